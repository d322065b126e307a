"""The example of docs/integrations/fsspec.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import TESTS

fsspec = pytest.importorskip("fsspec")

PAGE = Path(TESTS).parent.joinpath("docs", "integrations", "fsspec.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_a_run_goes_on_on_another_machine(tmp_path: Path) -> None:
    first: dict[str, Any] = {"root": tmp_path / "a"}
    second: dict[str, Any] = {"root": tmp_path / "b"}
    try:
        exec(EXAMPLE, first)
        assert first["ckpt"].steps() == [30, 40]
        exec(EXAMPLE, second)
        assert second["state"]["step"] == 40
        assert second["state"]["w"].tolist() == [40, 40, 40]
        assert second["ckpt"].loaded_step == 40
    finally:
        fsspec.filesystem("memory").rm("/container", recursive=True)
