"""Commands within lines of pages, which no snippet runs, are used as they are meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import pages
from support.pages import ROOT
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app


def commands() -> Iterator[tuple[str, str]]:
    """Those with an argument; of others only an option is shown."""
    for page in pages.pages():
        for found in re.findall(r"`unickpt ([^`\n]+)`", (ROOT / page).read_text()):
            if re.match(r"(?!watch)\w+ [^-A-Z]", found):  # `watch` goes on for ever
                yield page, found


@pytest.mark.parametrize(("page", "command"), [*commands()])
def test_a_command_within_a_line(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(re.sub(r"\b\w+://", "memory://", command))
    if words[0] in ("convert", "export", "ls", "report"):
        unickpt.save(words[1], {"w": np.ones(3, np.float32)})
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 2, f"{page}: {result.output}"  # wrong usage
