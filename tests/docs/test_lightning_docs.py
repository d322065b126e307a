"""The examples of docs/integrations/lightning.md run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import TESTS

import unickpt

if find_spec("lightning") is None:  # not imported here: `lightning_jobs` makes that faster
    pytest.skip("needs lightning", allow_module_level=True)
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from support.lightning_jobs import Model, ModelCheckpoint, torch

PAGE = Path(TESTS).parent.joinpath("docs", "integrations", "lightning.md").read_text()
TRAIN, SHARDED, NEWEST, BACK = re.findall(r"```python\n(.*?)```", PAGE, re.S)


(EXPORT,) = re.findall(r"```sh\n(.*?)```", PAGE, re.S)


def test_lightning_by_its_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = Model("single"), torch.utils.data.DataLoader(range(100))
    names: dict[str, Any] = {"model": model, "data": data, "folder": tmp_path / "run"}
    exec(TRAIN, names)
    last = tmp_path / "run" / "last.ckpt"
    assert unickpt.open(last).values["global_step"] == 4
    exec(NEWEST, names)  # which is trained already
    assert names["trainer"].global_step == 4
    subprocess.run(
        EXPORT.replace("unickpt export", f"{sys.executable} -m unickpt export"),
        shell=True,
        check=True,
    )
    exec(BACK, names | {"Model": Model})
    assert names["trainer"].global_step == 4
    found = torch.load(last, weights_only=True)
    assert found["global_step"] == 6
    for name, tensor in model.state_dict().items():
        assert torch.equal(found["state_dict"][name], tensor)
    assert isinstance(names["saving"], ModelCheckpoint)


def test_lightning_by_its_mixin() -> None:
    names: dict[str, Any] = {}
    exec(SHARDED, names)
    assert type(names["strategy"].checkpoint_io).__name__ == "UnickptCheckpointIO"
