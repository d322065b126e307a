"""torch optimizers: their state as a container, under numbers or under the parameters' names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import torch

from unickpt import dtypes
from unickpt.adapters.torch_dtypes import TO_NUMPY
from unickpt.adapters.torch_layout import is_dtensor
from unickpt.errors import LoadMismatch, UnsupportedLeaf
from unickpt.tree import Expansion, component


class NamedOptimizer:
    """An optimizer whose state lies under the names of its parameters instead of their numbers.

    Rules relate names, and a run with other parameters, or in another order, keeps its state.

    Arguments:
        optimizer: as it is used for training.
        module: whose parameters it has; `module.named_parameters()` gives their names.

    Raises:
        ValueError: the optimizer has a parameter that the module lacks.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 3)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
        known = {id(parameter): name for name, parameter in module.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strange = [tuple(p.shape) for p in parameters if id(p) not in known]
        if strange:
            raise ValueError(
                f"the optimizer has {len(strange)} parameters that are not the module's, the first "
                f"of shape {strange[0]}; pass the module that holds them all"
            )
        self.optimizer, self.names = optimizer, [known[id(p)] for p in parameters]


def expand_optimizer(
    obj: torch.optim.Optimizer | NamedOptimizer, name: str, stored: Mapping[str, Any] | None
) -> Expansion | None:
    """An optimizer as the container of its `state_dict`; see `Adapter.expand`."""
    optimizer = obj.optimizer if isinstance(obj, NamedOptimizer) else obj
    names = obj.names if isinstance(obj, NamedOptimizer) else None
    state = optimizer.state_dict()
    if not isinstance(state.get("state"), dict):
        return None  # not as torch's own; its state_dict is stored as it is
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    keys: Sequence[str | int] = range(count) if names is None else names
    if stored is not None:
        prefix = f"{name}/state/" if name else "state/"
        state["state"] |= _fresh_state(optimizer, keys, state["state"], prefix, stored)
    numbered = state
    if names is not None:
        state = _renumbered(state, dict(enumerate(names)))

    def rebuild(children: list[Any]) -> Any:
        loaded = children[0]
        if names is not None:
            loaded = _renumbered(loaded, {key: at for at, key in enumerate(names)})
            loaded = _regrouped(name, numbered["param_groups"], loaded)
        optimizer.load_state_dict(loaded)
        _undo_casts(optimizer, loaded["state"])
        return obj

    return Expansion("wrapper", ("state_dict",), (state,), rebuild, type(optimizer).__name__)


def _renumbered(state: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """A `state_dict` with other keys for its parameters."""
    groups = [{**g, "params": [keys.get(p, p) for p in g["params"]]} for g in state["param_groups"]]
    slots = {keys.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": slots, "param_groups": groups}


def _regrouped(name: str, ours: Sequence[Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """A loaded `state_dict` with its groups' parameters in our order, by which torch goes.

    Raises:
        LoadMismatch: hyper-parameters would come to other parameters than they were saved for.
    """
    groups = []
    for at, (own, found) in enumerate(zip(ours, loaded["param_groups"], strict=True)):
        if set(own["params"]) != set(found["params"]):
            raise LoadMismatch(
                f"{name or 'the optimizer'}: group {at} had other parameters when it was saved; "
                "make the groups alike, or drop param_groups by a rule"
            )
        groups.append({**found, "params": own["params"]})
    return {**loaded, "param_groups": groups}


def _fresh_state(
    optimizer: torch.optim.Optimizer,
    keys: Sequence[str | int],
    present: Mapping[Any, Any],
    prefix: str,
    stored: Mapping[str, Any],
) -> dict[int, dict[str, Any]]:
    """Slots as the checkpoint has them, not filled yet, sharded like their parameters.

    Only for parameters that the optimizer has no state of.
    """
    params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    if any(p.is_meta for p in params):
        raise UnsupportedLeaf(
            f"{prefix}: the optimizer's parameters are on the meta device; load the module first "
            "and make the optimizer afterwards"
        )
    places = {component(key): at for at, key in enumerate(keys)}
    state: dict[int, dict[str, Any]] = {}
    for name, entry in stored.items():
        key, _, slot = name.removeprefix(prefix).partition("/")
        at = places.get(key) if name.startswith(prefix) else None
        if at is None or not slot or at in present:
            continue
        # LBFGS keeps lists, and empty ones leave no trace among the names.
        if "/" in slot or isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedLeaf(
                f"{name!r}: nested optimizer state cannot be made; let the optimizer take one step "
                "before loading into it"
            )
        slots = state.setdefault(at, {})
        slots[unquote(slot)] = _fresh_slot(params[at], slot, entry)
    return state


def _fresh_slot(param: torch.Tensor, slot: str, entry: Any) -> Any:
    if not hasattr(entry, "shape"):
        return entry  # a plain value
    dtype = next((t for t, n in TO_NUMPY.items() if dtypes.name_of(n) == entry.dtype), None)
    if dtype is None:
        raise UnsupportedLeaf(f"{entry.name!r}: torch has no dtype {entry.dtype}")
    if tuple(entry.shape) == tuple(param.shape) and slot != "step":
        return torch.empty_like(param, dtype=dtype)
    if not entry.shape:  # counters, which torch keeps on the host
        return torch.empty((), dtype=dtype, device="cpu")
    return param.new_empty(entry.shape, dtype=dtype)


def _undo_casts(optimizer: torch.optim.Optimizer, loaded: Mapping[Any, Any]) -> None:
    """Puts back what `Optimizer.load_state_dict` cast to the dtype of the parameter."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for at, slots in loaded.items():
        held = optimizer.state.get(params[at], {}) if at in range(len(params)) else {}
        for slot, value in slots.items() if held else ():
            now = held.get(slot)
            if isinstance(now, torch.Tensor) and now.dtype != getattr(value, "dtype", now.dtype):
                held[slot] = value.to(now.device)


class OptimizerFence:
    """Stands before every step of an optimizer; see `unickpt.adapt.Fence`."""

    def __init__(self, optimizer: torch.optim.Optimizer, wait: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._hook = optimizer.register_step_pre_hook(lambda *_: wait())

    def owners(self) -> set[Hashable]:
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        slots = [v for state in self._optimizer.state.values() for v in state.values()]
        found: set[Hashable] = set()
        for tensor in [*params, *slots]:
            if not isinstance(tensor, torch.Tensor):
                continue
            local: Any = tensor
            with torch.no_grad(), suppress(RuntimeError):  # without memory there is none to guard
                local = local.to_local() if is_dtensor(tensor) else local
                found.add(local.untyped_storage()._cdata)
        return found

    def remove(self) -> None:
        self._hook.remove()
