"""The states of the random number generators of a process: Python's, NumPy's, and if torch is
imported, torch's and those of its accelerators. A leaf of a tree, one for each process."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unickpt import PerProcess

if TYPE_CHECKING:
    import torch

_ACCELERATORS = ("cuda", "xpu", "npu", "mlu", "musa", "hpu")


def states() -> PerProcess:
    """The states of this process's generators, to save.

    Example:
        >>> saved = states()
        >>> first = random.random()
        >>> restore(saved.value)
        >>> random.random() == first
        True
    """
    torch = sys.modules.get("torch")
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    accelerators = {
        name: [state.numpy() for state in module.get_rng_state_all()]
        for name, module in _accelerators().items()
    }
    return PerProcess(
        {
            "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
            "numpy": {
                "kind": str(kind),
                "keys": np.array(keys, np.uint32),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch": torch.get_rng_state().numpy() if torch else None,
            "accelerators": accelerators,
        }
    )


def like() -> PerProcess:
    """Requests the states of this process. If the number of processes has changed, it gets those
    that a process of its index saved; None if there was none."""
    return PerProcess(redistribute=_own)


def _own(saved: Sequence[Any], index: int, count: int) -> Any:
    return saved[index] if index < len(saved) else None


def restore(found: Mapping[str, Any] | None) -> None:
    """Continues with the states that were loaded. With None, and for accelerators that did not
    exist, the generators stay unchanged.

    Arguments:
        found: the value of `states`, or None.
    """
    if found is None:
        return
    python, numpy = found["python"], found["numpy"]
    words = tuple(int(word) for word in python["words"])
    random.setstate((python["version"], words, python["gauss"]))
    np.random.set_state(
        (
            numpy["kind"],
            np.asarray(numpy["keys"]),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached"],
        )
    )
    if found["torch"] is not None and (torch := sys.modules.get("torch")):
        torch.set_rng_state(_tensor(found["torch"]))
    for name, module in _accelerators().items():
        devices = range(module.device_count())
        for device, state in zip(devices, found["accelerators"].get(name, ()), strict=False):
            module.set_rng_state(_tensor(state), device)


def _tensor(state: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.array(state, np.uint8))  # a copy, which torch may write to


def _accelerators() -> dict[str, Any]:
    """torch's modules of the accelerators that are here."""
    torch = sys.modules.get("torch")
    modules = {name: getattr(torch, name, None) for name in _ACCELERATORS}
    return {
        name: module
        for name, module in modules.items()
        if module is not None and hasattr(module, "get_rng_state_all") and module.is_available()
    }
