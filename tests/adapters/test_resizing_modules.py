"""Modules whose own code resizes their tensors when it loads, as torch lets it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import unickpt
from unickpt import LoadMismatch

torch = pytest.importorskip("torch")
nn = torch.nn


class Overrides(nn.Module):
    """Takes what is there in its own `load_state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("seen", torch.empty(0, dtype=torch.long))

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.seen = state["seen"].clone()
        return super().load_state_dict(state, strict=strict)


class Hooked(nn.Module):
    """Does it in a hook, for a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.inner = nn.Linear(2, 2), nn.Module()
        self.inner.register_buffer("seen", torch.empty(0, dtype=torch.long))
        self.inner.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: setattr(module, "seen", state[f"{prefix}seen"])
        )

    @property
    def seen(self) -> Any:
        return self.inner.seen


class Refuses(Overrides):
    """Has code of its own, which resizes nothing."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return nn.Module.load_state_dict(self, state, strict=strict)


def saved(module: Any, path: Path) -> Any:
    target = module.inner if isinstance(module, Hooked) else module
    target.seen = torch.arange(5)
    unickpt.save(path / "c", {"m": module})
    return str(path / "c")


@pytest.mark.parametrize("kind", [Overrides, Hooked])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_a_module_resizes_is_loaded_as_it_is_stored(
    kind: Any, wrapped: bool, tmp_path: Path
) -> None:
    old, new = kind(), kind()
    path = saved(old, tmp_path)
    if wrapped and kind is Hooked:
        unickpt.load(path, {"m": nn.DataParallel(new)})
    else:
        unickpt.load(path, {"m": new})
    assert torch.equal(new.seen, torch.arange(5))
    assert torch.equal(new.fc.weight, old.fc.weight)


def test_what_it_does_not_take_is_a_mismatch_and_nothing_is_changed(tmp_path: Path) -> None:
    path, new = saved(Refuses(), tmp_path), Refuses()
    before = copy.deepcopy(new.state_dict())
    with pytest.raises(LoadMismatch, match=r"m/seen +shape +\[5\] +\[0\]"):
        unickpt.load(path, {"m": new})
    assert all(torch.equal(before[key], value) for key, value in new.state_dict().items())


def test_other_shapes_of_such_a_module_are_a_mismatch(tmp_path: Path) -> None:
    path, new = saved(Overrides(), tmp_path), Overrides()
    new.fc = nn.Linear(3, 2)
    with pytest.raises(LoadMismatch, match=r"m/fc.weight +shape +\[2, 2\] +\[2, 3\]"):
        unickpt.load(path, {"m": new})
    assert new.seen.shape == (0,)
    assert new.fc.weight.is_cpu
