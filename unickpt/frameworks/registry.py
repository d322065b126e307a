"""The registry of the frameworks' adapters."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast

from unickpt.frameworks.process_group import Group, alone, processes_on_node
from unickpt.frameworks.protocol import Adapter

T = TypeVar("T")
_FRAMEWORKS = ("jax", "torch")


def adapters() -> list[Adapter]:
    """The adapters of the frameworks that this process has imported, and NumPy's."""
    loaded = [name for name in _FRAMEWORKS if sys.modules.get(name) is not None]
    modules = [importlib.import_module(f"unickpt.adapters.{n}") for n in [*loaded, "numpy"]]
    return [cast(Adapter, module) for module in modules]


def adapter_of(leaf: Any, adapters: Sequence[Adapter]) -> Adapter | None:
    """The adapter that handles a leaf, if any."""
    for adapter in adapters:
        if adapter.is_array(leaf):
            return adapter
    return None


def by_type(find: Callable[[Any], T]) -> Callable[[Any], T]:
    """A function that decides by an object's type alone, called once for each type."""
    known: dict[type, T] = {}

    def found(leaf: Any) -> T:
        kind = type(leaf)
        if kind not in known:
            known[kind] = find(leaf)
        return known[kind]

    return found


def current_group(adapters: Sequence[Adapter]) -> Group:
    """The job of this process, as its frameworks report it.

    Raises:
        ValueError: two frameworks each report a job.
    """
    groups = _jobs(adapters)
    if len(groups) > 1:
        raise ValueError(
            "jax.distributed and torch.distributed are both initialised; say which processes save "
            "together: options=SaveOptions(group=unickpt.ProcessGroup(index, count, session))"
        )
    return groups[0] if groups else alone()


def saving_group(adapters: Sequence[Adapter]) -> Group:
    """As `current_group`, for a save: warns if the processes of a job would save apart."""
    if not _jobs(adapters):
        _warn_if_launched()
    return current_group(adapters)


@cache
def _warn_if_launched() -> None:
    """Says, once, that a process which a launcher started with others belongs to no job."""
    world = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and world != "1" and sys.modules.get("torch") is not None:
        warnings.warn(
            f"WORLD_SIZE is {world}, but torch.distributed is not initialised: this process saves "
            "alone. Call torch.distributed.init_process_group() before, on all ranks",
            RuntimeWarning,
            stacklevel=2,
        )


def processes_here(group: Group | None) -> int:
    """How many processes share the memory of this node; at most, if that is not known exactly.

    Arguments:
        group: the job, if the options name one.
    """
    groups = _jobs(adapters()) or [alone()] if group is None else [group]
    return max(map(processes_on_node, groups))


def _jobs(adapters: Sequence[Adapter]) -> list[Group]:
    found = (adapter.group() for adapter in adapters if adapter.group is not None)
    return [group for group in found if group is not None]
