"""The state that an optimizer without any is to have, made for a load to fill it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

import torch

from unickpt.adapters.torch_distributed import TO_NUMPY
from unickpt.arrays import dtypes
from unickpt.errors import LoadMismatch, UnsupportedLeaf
from unickpt.frameworks.adapter_protocol import StoredTree
from unickpt.trees.tree import Leaf, Node, child_names, component, join, leaves, unwrapped
from unickpt.trees.wrapper_names import without_wrappers

# Slots that torch's optimizers read as soon as the state of a parameter is not empty.
_SLOTS = {
    **dict.fromkeys(("Adam", "AdamW", "RAdam", "SparseAdam"), ("step", "exp_avg", "exp_avg_sq")),
    "NAdam": ("step", "exp_avg", "exp_avg_sq", "mu_product"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "ASGD": ("step", "ax", "eta", "mu"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "Adafactor": ("step",),
    "Muon": ("momentum_buffer",),
}
_COUNTERS = {"step", "eta", "mu", "mu_product"}
# Slots that these optimizers make only with certain settings.
_OPTIONAL_SLOTS = ("max_exp_avg_sq", "momentum_buffer", "grad_avg")


def required_slots(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The slots that one of torch's own optimizers needs; none for those of other packages."""
    kind = type(optimizer)
    return _SLOTS.get(kind.__name__, ()) if kind.__module__.startswith("torch.optim.") else ()


def _slots_like_parameters(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The slots that have the shape of their parameter."""
    required = required_slots(optimizer)
    if not required and type(optimizer) is not torch.optim.SGD:
        return frozenset()
    return frozenset((*required, *_OPTIONAL_SLOTS)) - _COUNTERS


def fresh_state(
    optimizer: torch.optim.Optimizer,
    keys: Sequence[str | int],
    present: Mapping[Any, Any],
    name: str,
    stored: StoredTree,
) -> tuple[dict[int, dict[str, Any]], frozenset[int]]:
    """Slots as in the checkpoint, not filled yet, sharded like their parameters.

    Only for parameters for which the optimizer has no state, or one of other nested containers.

    Arguments:
        optimizer: the innermost one.
        keys: of its parameters in the tree, in the order of its groups.
        present: the state that it has, by the number of the parameter.
        name: of its state in the tree.
        stored: the checkpoint.

    Returns:
        The slots by the number of the parameter; and the numbers of parameters that stored slots
        do not fit. These slots have the shape of the parameter, so that the load is refused; if
        it keeps them, they are to be left out.

    Raises:
        UnsupportedLeaf: the stored state cannot be made.
    """
    params = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    if any(p.is_meta for p in params):
        raise UnsupportedLeaf(
            f"{name}/: the optimizer's parameters are on the meta device; load the module first "
            "and create the optimizer afterwards"
        )
    slots_of = slots_by_key(stored, name)
    places = {component(key): index for index, key in enumerate(keys)}
    old = without_wrappers(
        [key for key in places if key not in slots_of], [k for k in slots_of if k not in places]
    )
    places |= {stored_key: places[key] for key, stored_key in old.items()}
    state: dict[int, dict[str, Any]] = {}
    misfits: set[int] = set()
    whole = isinstance(optimizer, torch.optim.LBFGS)  # the first parameter has the state of all
    moments = _slots_like_parameters(optimizer)
    for key, slots in slots_of.items():
        number = places.get(key)
        # Some optimizers make an empty state when it is looked up.
        if number is None or (present.get(number) and _is_alike(present[number], slots, stored)):
            continue
        make = partial(_fresh_slot, params[number])
        wrong = [] if whole else _misfits(params[number], _shapes(slots, stored), moments)
        if wrong:
            make = partial(_misfit_slot, params[number])
            slots = {slot: slots[slot] for slot in wrong}
            misfits.add(number)
        state[number] = fresh_slots(make, slots, join(name, key), stored)
    return {number: slots for number, slots in state.items() if slots}, frozenset(misfits)


def fresh_slots(
    make: Callable[[str, Any], Any], slots: Slots, name: str, stored: StoredTree
) -> dict[str, Any]:
    """The slots of one parameter.

    Arguments:
        make: makes the value of a slot, or of a place in it, from its key and the stored value.
        slots: the stored ones.
        name: of the parameter's state.
        stored: the checkpoint.

    Raises:
        UnsupportedLeaf: nested ones cannot be made.
    """
    if not any(leaf.name in stored for slot in slots.values() for leaf in leaves(slot)):
        return {}
    both = ((slot, _fresh(make, slot, child, name, stored)) for slot, child in slots.items())
    return {slot: content for slot, content in both if content is not _NONE}


def add_counters(state: dict[str, Any], name: str, stored: Mapping[str, Any]) -> None:
    """Adds the counters to the groups of an optimizer that it makes in its first step, if it has
    not stepped.

    Arguments:
        state: the `state_dict` of the optimizer.
        name: of the optimizer in the tree.
        stored: the checkpoint.
    """
    if any(state["state"].values()):
        return
    new_groups = []
    for index, group in enumerate(state["param_groups"]):
        prefix = join(join(join(name, "param_groups"), str(index)), "")
        counters = {
            key.removeprefix(prefix): value
            for key, value in stored.items()
            if type(value) is int and key.startswith(prefix) and "/" not in key[len(prefix) :]
        }
        new_groups.append({**counters, **group})
    state["param_groups"] = new_groups


def check_same_parameters(name: str, ours: Sequence[Any], loaded: Sequence[Any]) -> None:
    """Checks that loaded groups have the parameters of ours, in any order.

    Raises:
        LoadMismatch: hyper-parameters would apply to other parameters than when saved.
    """
    for number, (our_group, loaded_group) in enumerate(zip(ours, loaded, strict=True)):
        if {*our_group["params"]} != {*loaded_group["params"]}:
            raise LoadMismatch(
                f"{name or 'the optimizer'}: group {number} had other parameters when it was "
                "saved; make the groups equal, or drop param_groups by a rule"
            )


Slots = dict[Any, Node | Leaf]
Shape = tuple[int, ...]
_NONE: Any = object()
_NESTED = ("dict", "ordereddict", "list", "tuple")


def slots_by_key(stored: StoredTree, name: str) -> dict[str, Slots]:
    """The slots of each parameter, by the parameter's key as part of a name."""
    slots_of: dict[str, Slots] = {}
    node = stored.find(name)
    if isinstance(node, Node):
        parts = child_names(node.kind, node.keys, "")
        for part, child in zip(parts, map(unwrapped, node.children), strict=True):
            if isinstance(child, Node) and child.children:
                slots_of[part] = dict(zip(child.keys, map(unwrapped, child.children), strict=True))
        return slots_of
    for leaf in stored if node is None else ():
        key, _, slot = leaf.removeprefix(f"{name}/").partition("/")
        if leaf.startswith(f"{name}/") and slot:
            slots_of.setdefault(key, {})[unquote(slot)] = Leaf(leaf, None)
    return slots_of


def _shapes(slots: Slots, stored: StoredTree) -> dict[str, Shape]:
    """The shapes of the arrays among the slots of a parameter."""
    entries: dict[str, Any] = {
        key: stored.get(x.name) for key, x in slots.items() if isinstance(x, Leaf)
    }
    return {key: tuple(e.shape) for key, e in entries.items() if hasattr(e, "shape")}


def _is_alike(present: Any, slots: Slots, stored: StoredTree) -> bool:
    """Whether a state has the stored nested containers, and numbers and tensors where these are
    stored; or neither has containers."""
    nested = any(isinstance(slot, Node) and slot.kind in _NESTED for slot in slots.values())
    if not nested or not isinstance(present, dict):
        return True
    return all(_has_structure(present.get(key), slot, stored) for key, slot in slots.items())


def _has_structure(value: Any, node: Node | Leaf, stored: StoredTree) -> bool:
    if isinstance(node, Leaf):
        is_array = hasattr(stored.get(node.name), "shape")
        return is_array is isinstance(value, torch.Tensor) or node.name not in stored
    if node.kind not in _NESTED:
        return True  # state that cannot be made stays unchanged
    if node.kind in ("dict", "ordereddict"):
        has_keys = isinstance(value, dict) and list(value) == list(node.keys)
        children = [value[key] for key in node.keys] if has_keys else None
    else:
        children = list(value) if isinstance(value, list | tuple) else None
    if children is None or len(children) != len(node.children):
        return False
    both = zip(children, map(unwrapped, node.children), strict=True)
    return all(_has_structure(child, below, stored) for child, below in both)


def _fresh(
    make: Callable[[str, Any], Any], slot: str, node: Node | Leaf, within: str, stored: StoredTree
) -> Any:
    """The value to load into a slot; `_NONE` if nothing of it is loaded.

    Raises:
        UnsupportedLeaf: it cannot be made.
    """
    if isinstance(node, Leaf):
        if node.name not in stored:
            return _NONE
        if "/" in slot:  # a name of a checkpoint without containers
            raise _not_created(node.name)
        return make(slot, stored[node.name])
    where = join(within, component(slot))
    children = [
        _fresh(make, str(key), unwrapped(child), where, stored)
        for key, child in zip(node.keys, node.children, strict=True)
    ]
    left_out = [child is _NONE for child in children]
    if children and all(left_out):
        return _NONE
    # Formats without lists have dicts with numbers.
    as_list = [str(n) for n in range(len(children))]
    if any(left_out) or node.kind not in _NESTED or (children and list(node.keys) == as_list):
        raise _not_created(where)
    if node.kind in ("list", "tuple"):
        return children if node.kind == "list" else tuple(children)
    return dict(zip(node.keys, children, strict=True))


def _not_created(name: str) -> UnsupportedLeaf:
    return UnsupportedLeaf(
        f"{name!r}: nested optimizer state can be created only as dicts, lists and tuples, and if "
        "it is stored as such; let the optimizer take one step before loading into it"
    )


def _misfits(
    param: torch.Tensor, slots: Mapping[str, Shape], moments: Collection[str]
) -> list[str]:
    """The stored slots that are of a parameter of another shape.

    Arguments:
        param: the parameter.
        slots: their shapes.
        moments: the slots that must have the shape of the parameter, or none.
    """
    shape = tuple(param.shape)
    wrong = [slot for slot in slots if slot in moments and slots[slot] not in (shape, ())]
    if wrong or shape in slots.values():
        return wrong
    return [slot for slot in slots if not _may_be_slot(shape, slots[slot])]


def _may_be_slot(shape: Shape, slot: Shape) -> bool:
    """Whether a parameter of this shape may have such a slot: some have dimensions of size 1, or
    fewer dimensions, or are counters, or factors of preconditioners, which are square."""
    if len(slot) != len(shape):
        return True
    ones = all(n in (1, size) for n, size in zip(slot, shape, strict=True))
    return ones or (len({*slot}) == 1 and slot[0] in shape)


def dtype_of(entry: Any) -> torch.dtype:
    """The dtype of a stored array.

    Raises:
        UnsupportedLeaf: torch does not have it.
    """
    dtype = next((t for t, n in TO_NUMPY.items() if dtypes.name_of(n) == entry.dtype), None)
    if dtype is None:
        raise UnsupportedLeaf(f"{entry.name!r}: torch has no dtype {entry.dtype}")
    return dtype


def _fresh_slot(param: torch.Tensor, slot: str, entry: Any) -> Any:
    if not hasattr(entry, "shape"):
        return entry  # a plain value
    dtype = dtype_of(entry)
    if tuple(entry.shape) == tuple(param.shape) and slot != "step":
        return torch.empty_like(param, dtype=dtype)
    if not entry.shape:  # counters, which torch keeps on the host
        return torch.empty((), dtype=dtype, device="cpu")
    return param.new_empty(entry.shape, dtype=dtype)


def _misfit_slot(param: torch.Tensor, slot: str, entry: Any) -> Any:
    """A slot in the shape of the parameter, in place of a stored one that does not fit it."""
    return torch.empty_like(param, dtype=dtype_of(entry))


def undo_casts(optimizer: torch.optim.Optimizer, loaded: Mapping[Any, Any]) -> None:
    """Restores values that `Optimizer.load_state_dict` cast to the dtype of the parameter, and
    texts, which it takes apart."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, slots in loaded.items():
        state = optimizer.state.get(params[number], {}) if number in range(len(params)) else {}
        for slot, value in slots.items() if state else ():
            if slot in state:
                state[slot] = _uncast(state[slot], value)


def _uncast(now: Any, loaded: Any) -> Any:
    if isinstance(now, torch.Tensor):
        same = now.dtype == getattr(loaded, "dtype", now.dtype)
        return now if same else loaded.to(now.device)
    if isinstance(loaded, str):
        return loaded
    if isinstance(now, dict) and isinstance(loaded, dict):
        return {key: _uncast(value, loaded.get(key, value)) for key, value in now.items()}
    if type(now) in (list, tuple) and len(now) == len(loaded):
        return type(now)(map(_uncast, now, loaded))
    return now
