"""torch optimizers: their state as a container, keyed by numbers or by the parameters' names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from unickpt.adapters.torch_distributed import is_dtensor
from unickpt.adapters.torch_fresh_state import (
    add_counters,
    check_same_parameters,
    fresh_state,
    required_slots,
    undo_casts,
)
from unickpt.adapters.torch_modules import canonical_names, fsdp1
from unickpt.errors import LoadMismatch
from unickpt.frameworks.adapter_protocol import StoredTree
from unickpt.trees.tree import Expansion, Leaf, Node, by_key, component, join
from unickpt.trees.tree import rebuild as rebuild_tree
from unickpt.trees.wrapper_names import bare, without_wrappers

# Where wrappers, such as accelerate's AcceleratedOptimizer, hold the optimizer that they wrap.
_HELD = ("optimizer", "optim", "_optimizer")


def optimizers_of(obj: Any) -> list[Any]:
    """An optimizer and, if it is a wrapper, those that it wraps, outermost first; empty for
    anything else. Schedulers hold an optimizer as well, but have no `param_groups`."""
    if isinstance(obj, torch.nn.Module) or not hasattr(type(obj), "step"):
        return []
    optimizers: list[Any] = []
    while hasattr(obj, "param_groups") and not any(obj is outer for outer in optimizers):
        optimizers.append(obj)
        candidates = (getattr(obj, "__dict__", {}).get(name) for name in _HELD)
        obj = next((h for h in candidates if isinstance(h, torch.optim.Optimizer)), None)
    return optimizers if optimizers and isinstance(optimizers[-1], torch.optim.Optimizer) else []


def is_optimizer(obj: Any) -> bool:
    """Whether an object is a torch optimizer, or a wrapper of one."""
    return bool(optimizers_of(obj))


class NamedOptimizer:
    """An optimizer whose state is stored by the names of its parameters instead of their numbers.

    Rules use names, and a run with other parameters, or in another order, keeps its state.

    Arguments:
        optimizer: the one used for training.
        module: has its parameters; `module.named_parameters()` gives their names, without
            components of wrappers (DDP, torch.compile, FSDP1, activation checkpointing).

    Raises:
        ValueError: the module lacks a parameter of the optimizer, or the arguments are swapped.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 3)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
        if not (hasattr(optimizer, "param_groups") and hasattr(module, "named_parameters")):
            raise ValueError(
                "NamedOptimizer takes an optimizer and its module, in this order, not "
                f"{type(optimizer).__name__} and {type(module).__name__}"
            )
        parameters_of = dict(module.named_parameters())
        canonical = canonical_names(module, parameters_of)
        name_by_id = {id(parameter): canonical[name] for name, parameter in parameters_of.items()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        foreign_shapes = [tuple(p.shape) for p in parameters if id(p) not in name_by_id]
        if foreign_shapes:
            raise ValueError(
                f"the optimizer has {len(foreign_shapes)} parameters that are not the module's, "
                f"the first of shape {foreign_shapes[0]}; pass the module that holds them all"
            )
        self.optimizer, self.names = optimizer, [name_by_id[id(p)] for p in parameters]
        self.module = module


def expand_optimizer(obj: Any, name: str, stored: StoredTree | None) -> Expansion | None:
    """An optimizer, a wrapper of one or a `NamedOptimizer` as the container of its `state_dict`;
    see `Adapter.expand`."""
    optimizer = obj.optimizer if isinstance(obj, NamedOptimizer) else obj
    inner = optimizers_of(optimizer)[-1]
    params = [p for group in inner.param_groups for p in group["params"]]
    if fsdp1() is not None and any(getattr(p, "_fsdp_flattened", False) for p in params):
        from unickpt.adapters.torch_fsdp1 import expand_flattened  # only where there are such

        return expand_flattened(obj, inner, name, stored)
    if not hasattr(optimizer, "state_dict"):
        optimizer = inner
    names = obj.names if isinstance(obj, NamedOptimizer) else None
    state = optimizer.state_dict()
    if not isinstance(state.get("state"), dict):
        return None  # not torch's own format; its state_dict is stored unchanged
    keys: Sequence[str | int] = range(len(params)) if names is None else names
    fresh, misfits = dict[int, Any](), frozenset[int]()
    if stored is not None:
        fresh, misfits = fresh_state(inner, keys, state["state"], join(name, "state"), stored)
        add_counters(state, name, stored)
        state["state"] |= fresh
    numbered = state
    if names is not None:
        state = _renumbered(state, dict(enumerate(names)))
        if stored is not None and _has_settings_by_name(stored, name, names):
            state["param_groups"] = _settings_by_name(state["param_groups"])

    def in_our_order(loaded: dict[str, Any]) -> dict[str, Any]:
        if names is None:
            return loaded
        if isinstance(loaded["param_groups"], Mapping):
            groups = _renumbered(numbered, dict(enumerate(names)))["param_groups"]
            loaded = _grouped(name, groups, loaded)
        loaded = _renumbered(loaded, _numbers(names, loaded))
        return _regrouped(name, numbered["param_groups"], loaded)

    def check(node: Node, value: Callable[[str], Any]) -> None:
        children = by_key(node)
        fresh_keys = {keys[number] for number in fresh if number not in misfits}
        _check_slots(name, inner, children["state"], fresh_keys)
        # Hyper-parameters that are arrays are not read yet, and taken as equal.
        groups = rebuild_tree(children["param_groups"], lambda n: _plain(value(n)))
        if names is None:
            _check_names(name, inner.param_groups, groups)
        in_our_order({"state": {}, "param_groups": groups})

    def rebuild(children: list[Any]) -> Any:
        loaded = in_our_order(children[0])
        # Of parameters that stored slots do not fit, the optimizer makes a state of its own.
        slots = {key: value for key, value in loaded["state"].items() if key not in misfits}
        loaded = {**loaded, "state": slots}
        optimizer.load_state_dict(loaded)
        undo_casts(inner, loaded["state"])
        return obj

    kind = type(optimizer).__name__
    return Expansion("wrapper", ("state_dict",), (state,), rebuild, kind, check)


def _plain(value: Any) -> Any:
    return None if hasattr(value, "shape") else value


def _check_slots(
    name: str, optimizer: torch.optim.Optimizer, state: Node | Leaf, fresh: Collection[str | int]
) -> None:
    """Checks that nothing lacks in the state of parameters that had none; torch only notices when
    it has taken a part of it, or at the next step.

    Raises:
        LoadMismatch: something lacks.
    """
    needed = required_slots(optimizer)
    keys, children = (state.keys, state.children) if isinstance(state, Node) else ((), ())
    for key, child in zip(keys, children, strict=True):
        if key not in fresh or not isinstance(child, Node):
            continue
        lacks = [slot for slot in needed if slot not in child.keys]
        if lacks:
            where = join(join(name, "state"), component(key))
            raise LoadMismatch(
                f"{where!r}: {', '.join(map(repr, child.keys))} would be loaded, and "
                f"{lacks[0]!r} is not stored, or no rule makes it, which "
                f"{type(optimizer).__name__} needs as well. Let a rule make it; or load without "
                f"the optimizer's state (skip={join(name, 'state/**')!r}), which then starts "
                "from scratch"
            )


def _check_names(name: str, ours: Sequence[Any], stored: Sequence[Any]) -> None:
    """Checks that parameters whose state is stored by number have the names that they had.

    Raises:
        LoadMismatch: another parameter would get the state.
    """
    for group, (our_group, stored_group) in enumerate(zip(ours, stored, strict=True)):
        our_names, stored_names = (g.get("param_names") or () for g in (our_group, stored_group))
        both = zip(our_names, stored_names, strict=False)
        for number, (requested, before) in enumerate(both):
            if bare(str(requested)) == bare(str(before)):
                continue
            where = join(join(name, "param_groups"), str(group))
            raise LoadMismatch(
                f"{where!r}: parameter {number} was {before!r} when it was saved, and is "
                f"{requested!r} in `like`, which would get the state of {before!r}. Give the "
                "optimizer its parameters in the order in which they were saved. If they have "
                f"only been renamed, skip={where + '/param_names/**'!r} keeps the names of `like`"
            )


def _numbers(names: Sequence[str], state: Mapping[str, Any]) -> dict[Any, int]:
    """The number of each parameter by the name that a loaded `state_dict` has for it."""
    numbers = {name: number for number, name in enumerate(names)}
    loaded_names = {
        p for group in state["param_groups"] for p in group["params"] if isinstance(p, str)
    }
    old = without_wrappers([n for n in names if n not in loaded_names], loaded_names - {*names})
    return {**numbers, **{stored: numbers[name] for name, stored in old.items()}}


def _renumbered(state: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """A `state_dict` with other keys for its parameters."""
    groups = [{**g, "params": [keys.get(p, p) for p in g["params"]]} for g in state["param_groups"]]
    slots = {keys.get(key, key): value for key, value in state["state"].items()}
    return {**state, "state": slots, "param_groups": groups}


def _regrouped(name: str, ours: Sequence[Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """A loaded `state_dict` with its groups' parameters in our order, which torch relies on.

    Raises:
        LoadMismatch: hyper-parameters would apply to other parameters than when saved.
    """
    check_same_parameters(name, ours, loaded["param_groups"])
    groups = []
    for our_group, loaded_group in zip(ours, loaded["param_groups"], strict=True):
        names = {key: our_group[key] for key in ("params", "param_names") if key in our_group}
        settings = {key: value for key, value in loaded_group.items() if key != "param_names"}
        groups.append({**settings, **names})
    return {**loaded, "param_groups": groups}


def _has_settings_by_name(stored: Mapping[str, Any], name: str, names: Sequence[str]) -> bool:
    """Whether a checkpoint has the hyper-parameters of each parameter, as torch's
    `flatten_optimizer_state_dict` stores them, instead of those of each group."""
    prefix = f"{name}/param_groups/" if name else "param_groups/"
    keys = {entry.removeprefix(prefix).partition("/")[0] for entry in stored if prefix in entry}
    return any(component(key) in keys for key in names)


def _settings_by_name(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The hyper-parameters of each parameter."""
    return {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for name in group["params"]
    }


def _grouped(name: str, ours: Sequence[Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """A loaded `state_dict` that has hyper-parameters by parameter, with those of our groups.

    Raises:
        LoadMismatch: the parameters of a group had different ones.
    """
    groups = []
    for number, group in enumerate(ours):
        pairs = [(param, loaded["param_groups"][param]) for param in group["params"]]
        settings = pairs[0][1] if pairs else {k: v for k, v in group.items() if k != "params"}
        for param, loaded_settings in pairs:
            wrong = next((key for key in settings if loaded_settings[key] != settings[key]), None)
            if wrong is not None:
                raise LoadMismatch(
                    f"{name or 'the optimizer'}: in group {number}, {wrong!r} was "
                    f"{settings[wrong]!r} for {pairs[0][0]!r} and {loaded_settings[wrong]!r} "
                    f"for {param!r} when it was saved; put them into groups of their own, or drop "
                    "param_groups by a rule"
                )
        groups.append({**settings, "params": group["params"]})
    return {**loaded, "param_groups": groups}


class OptimizerFence:
    """A hook before every step of an optimizer, or of the one that a wrapper holds; see
    `unickpt.adapt.Fence`."""

    def __init__(self, optimizer: Any, wait: Callable[[], None]) -> None:
        # The innermost one changes the parameters; wrappers call its step, and may have no hooks.
        self._optimizer: torch.optim.Optimizer = optimizers_of(optimizer)[-1]
        self._hook = self._optimizer.register_step_pre_hook(lambda *_: wait())

    def owners(self) -> set[Hashable]:
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        slots = [v for state in self._optimizer.state.values() for v in state.values()]
        owners: set[Hashable] = set()
        for tensor in [*params, *slots]:
            if not isinstance(tensor, torch.Tensor):
                continue
            local: Any = tensor
            with torch.no_grad(), suppress(RuntimeError):  # no memory, nothing to guard
                local = local.to_local() if is_dtensor(tensor) else local
                owners.add(local.untyped_storage()._cdata)
        return owners

    def remove(self) -> None:
        self._hook.remove()
