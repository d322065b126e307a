"""The options of a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unickpt.frameworks.host_memory import CommonOptions, MemoryBudget, check_flags
from unickpt.frameworks.process_group import Group
from unickpt.quoting import changed_repr

if TYPE_CHECKING:
    from unickpt.progress import Progress


@dataclass(frozen=True)
class LoadOptions(CommonOptions):
    """How to load.

    Without `budget_bytes`, a process takes 1 GiB, or its share of a quarter of the node's memory if
    that is less.

    Arguments:
        verify: whether to check each chunk, or another format's file, against its checksum.
        budget_bytes: bytes of host memory for all loads of a node together, beyond the destination.
        exchange: read together: None in each node, True in the job, False never (howto/load.md).
        timeout_s: with `exchange=True`, seconds to wait for the other processes in each exchange.
        group: the processes that load together, as in `SaveOptions`.
        progress: as in `SaveOptions`, with the bytes loaded; it starts over if the load does.

    Raises:
        MissingPackage: `progress=True` without tqdm.
        ValueError, TypeError: an option is out of range, or of a wrong type; or this process is not
            in `group`.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://options/load", {"w": np.ones(3)})
        >>> unickpt.load("memory://options/load", options=unickpt.LoadOptions(budget_bytes=1 << 30))
        {'w': array([1., 1., 1.])}
    """

    verify: bool = True
    budget_bytes: int | MemoryBudget | None = None
    exchange: bool | None = None
    timeout_s: float = 600.0
    group: Group | Any | None = None
    progress: Progress = None

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        self.check_common()
        check_flags(verify=self.verify)
        if not (self.exchange is None or isinstance(self.exchange, bool)):
            raise TypeError(f"exchange={self.exchange!r} must be True, False or None")
