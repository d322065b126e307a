"""torch modules: canonical names, which are the same whether a module is wrapped or not."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from unickpt.adapters.torch_extra_state import with_extra_states
from unickpt.errors import LoadMismatch, UnsupportedLeaf
from unickpt.frameworks.adapter_protocol import StoredTree
from unickpt.trees.tree import Expansion, Leaf, Node, component, join

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Where the types of wrappers are defined, and their attribute that holds the wrapped module. These
# are not imported: a module can only be of such a type if that was imported before.
_FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper",
     "_checkpoint_wrapped_module"),
    (*_FSDP1, "_fsdp_wrapped_module"),
)  # fmt: skip


def _wrappers_in(module: torch.nn.Module) -> dict[type, str]:
    """The types of wrappers among the modules within a module, and the attribute of each that holds
    the wrapped module."""
    kinds = _kinds_in(module)
    attributes: dict[type, str] = {}
    for where, name, attribute in _WRAPPERS:
        wrapper = getattr(sys.modules.get(where), name, None)
        if isinstance(wrapper, type):
            attributes |= {kind: attribute for kind in kinds if issubclass(kind, wrapper)}
    return attributes


def _kinds_in(module: torch.nn.Module) -> set[type]:
    """The types of a module and of all within it; `modules` takes five times as long."""
    kinds, seen, stack = set[type](), set[int](), [module]
    while stack:
        part = stack.pop()
        if id(part) not in seen:
            seen.add(id(part))
            kinds.add(type(part))
            stack += [child for child in part._modules.values() if child is not None]
    return kinds


def fsdp1() -> type | None:
    """The class of FSDP1; None if it is not imported."""
    return getattr(sys.modules.get(_FSDP1[0]), _FSDP1[1], None)


def is_wrapped(module: torch.nn.Module) -> bool:
    """Whether a module, or any module within it, is a wrapper."""
    return bool(_wrappers_in(module))


def canonical_names(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names of parameters, buffers or keys of a `state_dict`, without components of wrappers.

    Like torch's `get_model_state_dict`, this checks the types of the modules along a name: a user's
    module that is called "module" keeps its name.

    Arguments:
        module: the outermost module.
        names: as that module returns them.

    Returns:
        The canonical names by the given ones. Names that would collide stay unchanged.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.DataParallel(torch.nn.Linear(2, 3)))
        >>> canonical_names(model, ["0.module.weight"])
        {'0.module.weight': '0.weight'}
    """
    originals = list(names)
    kinds = _wrappers_in(module)
    if not kinds:
        return dict(zip(originals, originals, strict=True))
    new = {name: _canonical(module, name, kinds) for name in originals}
    count: dict[str, int] = {}
    for name in new.values():
        count[name] = count.get(name, 0) + 1
    return {name: other if count[other] == 1 else name for name, other in new.items()}


def _canonical(module: torch.nn.Module, name: str, kinds: dict[type, str]) -> str:
    parts: list[str] = []
    current: Any = module
    for part in name.split("."):
        attribute = kinds.get(type(current))
        while attribute is not None and part != attribute:  # some wrappers remove their own part
            current = current._modules.get(attribute)
            attribute = kinds.get(type(current))
        if attribute is None:
            parts.append(part)
        current = None if current is None else current._modules.get(part)
    return ".".join(parts)


def expand_module(obj: torch.nn.Module, name: str, stored: StoredTree | None) -> Expansion | None:
    """Expands modules with wrappers, under canonical names; and all modules to load into, since
    some have parameters on the meta device, resize their tensors, or have an extra state.

    Raises:
        UnsupportedLeaf: DeepSpeed has partitioned its parameters, which are empty now.
    """
    if "deepspeed" in sys.modules and any(hasattr(p, "ds_tensor") for p in obj.parameters()):
        raise UnsupportedLeaf(
            f"{name or 'the module'}: ZeRO 3 has partitioned its parameters, so that they are "
            "empty: save and load the engine, by unickpt.integrations.deepspeed.use_unickpt(engine)"
        )
    state = obj.state_dict(keep_vars=True) if stored is not None else {}
    meta = any(map(_is_meta, state.values()))
    wrapped, resizes = not meta and is_wrapped(obj), bool(stored) and _has_own_load(obj)
    if stored is None and not wrapped:
        return None
    if not meta:
        state = obj.state_dict()
    if not isinstance(state, dict):
        return None  # not torch's own format; stored unchanged
    names = canonical_names(obj, state)
    old_names = {new: old for old, new in names.items()}
    if resizes:
        state = _resized(
            obj, state, {old: join(name, component(n)) for old, n in names.items()}, stored or {}
        )
    if stored is not None:
        state = with_extra_states(state, names, name, stored)

    def rebuild(children: list[Any]) -> Any:
        obj.load_state_dict(_renamed(children[0], old_names), **({"assign": True} if meta else {}))
        return obj

    def check(node: Node, value: Callable[[str], Any]) -> None:
        (state_node,) = node.children
        assert isinstance(state_node, Node), "a state_dict"
        leaves = zip(state_node.keys, state_node.children, strict=True)
        loaded = {
            old_names[str(k)]: value(leaf.name) for k, leaf in leaves if isinstance(leaf, Leaf)
        }
        first: dict[int, str] = {}
        for key, old in state.items():
            other = first.setdefault(id(old), key) if isinstance(old, torch.Tensor) else key
            if loaded.get(key) is not loaded.get(other):
                raise LoadMismatch(
                    f"{name!r}: {other!r} and {key!r} of the module are tied, but were stored as "
                    "two arrays; untie them, or load both into a plain dict and choose"
                )

    new_state, kind = _renamed(state, names), type(obj).__name__
    return Expansion(
        "wrapper", ("state_dict",), (new_state,), rebuild, kind, check if meta else None
    )


def _is_meta(value: Any) -> bool:
    if type(value) not in _PLAIN and hasattr(type(value), "local_shards"):
        return False  # a ShardedTensor, which does not say this of itself on all ranks
    return isinstance(value, torch.Tensor) and value.is_meta


def _has_own_load(module: torch.nn.Module) -> bool:
    """Whether code that is not torch's takes part in loading a module."""
    for part in module.modules():
        kind, hooks = type(part), part._load_state_dict_pre_hooks.values()
        if any(map(_is_of_users, (kind.load_state_dict, kind._load_from_state_dict, *hooks))):
            return True
    return False


def _is_of_users(function: Any) -> bool:
    function = getattr(function, "hook", function)  # as torch wraps hooks
    return not str(getattr(function, "__module__", "")).startswith("torch.")


def _resized(
    module: torch.nn.Module,
    state: dict[str, Any],
    names: Mapping[str, str],
    stored: Mapping[str, Any],
) -> dict[str, Any]:
    """The state to load into; tensors that the module resizes when it loads have the stored shapes.

    Arguments:
        module: whose state it is.
        state: its `state_dict`.
        names: the names of the leaves by the keys of the state.
        stored: the stored leaves, by name.
    """
    shapes = {
        key: shape
        for key, value in state.items()
        if type(value) in _PLAIN
        and (shape := getattr(stored.get(names[key]), "shape", value.shape)) != value.shape
    }
    if not shapes:
        return state
    # Tried with a copy that has no memory, so that nothing is changed if the module refuses them.
    memo: dict[int, Any] = {id(x): x.to("meta") for x in module.buffers()}
    for x in module.parameters():
        memo[id(x)] = torch.nn.Parameter(x.data.to("meta"), x.requires_grad)
    try:
        trial = copy.deepcopy(module, memo)
        offered = {
            key: torch.empty(shapes.get(key, value.shape), dtype=value.dtype, device="meta")
            if isinstance(value, torch.Tensor)
            else value
            for key, value in state.items()
        }
        trial.load_state_dict(offered)
        trial_state = trial.state_dict()
    except Exception:  # whatever a user's code raises: it does not take these shapes
        return state
    fresh = {
        key: torch.empty(shape, dtype=state[key].dtype, device=state[key].device)
        for key, shape in shapes.items()
        if tuple(trial_state[key].shape) == tuple(shape)
    }
    resized_state = copy.copy(state)  # with the versions of modules
    resized_state.update(fresh)
    return resized_state


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """A `state_dict` with other keys."""
    items = ((names[key], value) for key, value in state.items())
    if not isinstance(state, OrderedDict):
        return dict(items)
    renamed: Any = OrderedDict(items)
    if hasattr(state, "_metadata"):  # versions of modules, which load_state_dict reads
        renamed._metadata = state._metadata
    result: Mapping[str, Any] = renamed
    return result
