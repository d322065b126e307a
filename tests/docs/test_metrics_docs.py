"""The examples of docs/metrics.md print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 2
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code, printed in examples:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "docs/metrics.md", "exec"), names)
        assert out.getvalue() == printed
