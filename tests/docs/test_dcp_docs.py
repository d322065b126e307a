"""The examples of docs/integrations/dcp.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import TESTS

import unickpt

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.integration,  # imports torch's distributed checkpoints
    pytest.mark.filterwarnings("ignore:.*single process.*:UserWarning"),
]
PAGE = Path(TESTS).parent.joinpath("docs", "integrations", "dcp.md").read_text()
BY_FUNCTION, BY_STORAGE = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_dcp_by_function(tmp_path: Path) -> None:
    names: dict[str, Any] = {"app": torch.nn.Linear(2, 3), "path": tmp_path / "c"}
    exec(BY_FUNCTION, names)
    assert names["state"] == {"app": names["app"], "step": 3}
    assert unickpt.open(tmp_path / "c").values["step"] == 3


def test_dcp_by_its_storage_classes(tmp_path: Path) -> None:
    names: dict[str, Any] = {"state": {"w": torch.ones(2)}, "path": tmp_path / "c"}
    exec("import unickpt.integrations.dcp as dcp\n" + BY_STORAGE, names)
    assert unickpt.load(tmp_path / "c")["w"].tolist() == [1, 1]
