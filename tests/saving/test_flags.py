"""Flags are True or False: "no" is a text, and Python takes it for true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import LoadOptions, SaveOptions

STATE = {"w": np.arange(3.0)}
CALLS: dict[str, Callable[[Path, Any], object]] = {
    "overwrite": lambda path, flag: unickpt.save(path, STATE, overwrite=flag),
    "overwrite of save_async": lambda path, flag: unickpt.save_async(path, STATE, overwrite=flag),
    "overwrite of copy": lambda path, flag: unickpt.copy(path, f"{path}-2", overwrite=flag),
    "strict": lambda path, flag: unickpt.load(path, STATE, strict=flag),
    "cast": lambda path, flag: unickpt.load(path, STATE, cast=flag),
    "return_report": lambda path, flag: unickpt.load(path, return_report=flag),
    "strict_experts": lambda path, flag: unickpt.load(path, strict_experts=flag),
    "verify": lambda path, flag: LoadOptions(verify=flag),
    "fsync": lambda path, flag: SaveOptions(fsync=flag),
    "check_replicas": lambda path, flag: SaveOptions(check_replicas=flag),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_flag_is_true_or_false(name: str, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", STATE)
    flag = name.partition(" ")[0]
    with pytest.raises(TypeError, match=f"{flag}='no' must be True or False"):
        CALLS[name](tmp_path / "c", "no")
    assert unickpt.load(tmp_path / "c")["w"].tolist() == [0.0, 1.0, 2.0]
    CALLS[name](tmp_path / "c", np.True_)
