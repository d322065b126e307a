"""A plugin of vLLM, for tests: each process writes what its loads read to a folder."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from unickpt.types import LoadReport

VARIABLE = "UNICKPT_TEST_LOAD_REPORTS"
"""Names the folder."""


class ToFolder(logging.Handler):
    """Appends the bytes of each load to a file of this process."""

    def emit(self, record: logging.LogRecord) -> None:
        report: Any = record.args
        if isinstance(report, tuple) and report and isinstance(report[0], LoadReport):
            figures = {"filled": report[0].bytes, "read": report[0].read_bytes}
            with (Path(os.environ[VARIABLE]) / str(os.getpid())).open("a") as file:
                file.write(json.dumps(figures) + "\n")


def total(file: Path) -> dict[str, int]:
    """The bytes of all loads of a process."""
    loads = [json.loads(line) for line in file.read_text().splitlines()]
    return {which: sum(load[which] for load in loads) for which in ("filled", "read")}


def register() -> None:
    logger = logging.getLogger("unickpt")
    if VARIABLE in os.environ and not any(isinstance(h, ToFolder) for h in logger.handlers):
        logger.setLevel(logging.INFO)
        logger.addHandler(ToFolder())
