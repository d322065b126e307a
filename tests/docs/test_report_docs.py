"""The example of docs/report.md prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text()


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "docs/report.md", "exec"), {})
    assert out.getvalue() == printed
