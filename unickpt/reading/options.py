"""The options of a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unickpt.frameworks.host_memory import CommonOptions, MemoryBudget
from unickpt.frameworks.process_group import Group
from unickpt.quoting import changed_repr

if TYPE_CHECKING:
    from unickpt.progress import Progress


@dataclass(frozen=True)
class LoadOptions(CommonOptions):
    """How to load.

    Arguments:
        verify: whether to check each chunk that is read against its digest; and arrays of other
            formats that are read whole against the checksums that these keep.
        budget_bytes: bytes of host memory that the loads of all processes of a node may use
            beyond the destination; each process gets an equal share (see `SaveOptions`). By
            default 1 GiB for each process, or less where a quarter of the node's memory is less.
        exchange: whether processes read together. By default, those of a node do so by themselves:
            each chunk that several of them need of arrays that are distributed over processes is
            read by one, and the others take their parts from its memory; from a disk, if they
            would read everything at least three times. That never changes what a load does; who
            loads alone reads alone. True: all processes of the job read together;
            one reads each chunk, and sends the others their parts. Use it if the storage is slower
            than the network and processes of several nodes need parts of the same chunks: replicas,
            or shards along another axis than the saved ones. All processes must then call `load` in
            the same way. False: every process reads alone.
        timeout_s: with `exchange`, how long a process waits for the others, in seconds, each time
            that they exchange data; a `ProcessGroup` waits as long as its own function does.
        group: as in `SaveOptions`: who loads together. It counts for `exchange`, for `PerProcess`
            leaves, and where `budget_bytes` is divided.
        progress: as in `SaveOptions`, with the bytes that this process has loaded, on the thread
            that loads. If the load starts again, it begins again.

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
        if not (self.exchange is None or isinstance(self.exchange, bool)):
            raise TypeError(f"exchange={self.exchange!r} must be True, False or None")
