"""torch modules: canonical names, which are the same whether a module is wrapped or not."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

# Where the types of wrappers are defined, and their attribute that holds the wrapped module. These
# are not imported: a module can only be of such a type if that was imported before.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
)


def _wrappers_in(module: torch.nn.Module) -> dict[type, str]:
    """The types of wrappers among the modules within a module, and the attribute of each that holds
    the wrapped module."""
    there = {type(part) for part in module.modules()}
    found: dict[type, str] = {}
    for where, name, held in _WRAPPERS:
        wrapper = getattr(sys.modules.get(where), name, None)
        if isinstance(wrapper, type):
            found |= {kind: held for kind in there if issubclass(kind, wrapper)}
    return found


def is_wrapped(module: torch.nn.Module) -> bool:
    """Whether a module, or any module within it, is a wrapper."""
    return bool(_wrappers_in(module))


def canonical_names(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names of parameters, buffers or keys of a `state_dict`, without what wrappers add.

    Like torch's `get_model_state_dict`, this checks the types of the modules along a name: a user's
    module that is called "module" keeps its name.

    Arguments:
        module: the outermost module.
        names: as that module returns them.

    Returns:
        The canonical names by the given ones. Names that would collide stay as they are.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.DataParallel(torch.nn.Linear(2, 3)))
        >>> canonical_names(model, ["0.module.weight"])
        {'0.module.weight': '0.weight'}
    """
    given = list(names)
    kinds = _wrappers_in(module)
    if not kinds:
        return dict(zip(given, given, strict=True))
    new = {name: _canonical(module, name, kinds) for name in given}
    count: dict[str, int] = {}
    for name in new.values():
        count[name] = count.get(name, 0) + 1
    return {name: other if count[other] == 1 else name for name, other in new.items()}


def _canonical(module: torch.nn.Module, name: str, kinds: dict[type, str]) -> str:
    parts: list[str] = []
    here: Any = module
    for part in name.split("."):
        held = kinds.get(type(here))
        while held is not None and part != held:  # some wrappers remove their own part
            here = here._modules.get(held)
            held = kinds.get(type(here))
        if held is None:
            parts.append(part)
        here = None if here is None else here._modules.get(part)
    return ".".join(parts)
