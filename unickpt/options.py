"""Options of saving and loading, and the reports they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from unickpt.group import Group

COMPRESSORS = ("zstd", "gzip", "blosc")
STAGINGS = ("auto", "copy", "reference", "lazy", "device")


@dataclass(frozen=True)
class SaveOptions:
    """How to save.

    Arguments:
        staging: how `save_async` keeps the state as it is now; `save` needs none of it.
            "auto": the loop may change anything at once. On the host JAX's arrays are kept by
            reference, and all else is copied before the call returns. (A JAX array made of memory
            of NumPy or torch by `device_put` or dlpack may share it. It is copied where that memory
            is in the tree, too; else nobody writes there before `PendingSave.result`.) On an
            accelerator everything is copied before the call returns; with
            `Checkpointer(optimizers=...)`, what they own is copied in the background, see there,
            and all else is cloned on the device, where it has room.
            "copy": everything is copied to host memory before the call returns.
            "reference": arrays that nobody writes to (JAX's) are kept by reference. Those on an
            accelerator are read in the background, and must not be donated before
            `PendingSave.wait_staged`. All else is copied before the call returns, as with "auto".
            "lazy": copied in the background; nothing may be changed or freed before
            `PendingSave.wait_staged`. Small arrays, NumPy's, and DTensors that no optimizer of
            `Checkpointer(optimizers=...)` guards are copied before the call returns. A change that
            comes too early is an error (`StateChanged`) where it is found: always what torch's
            version counters tell of, and memory on the host that is freed. What they do not tell of
            (changes through `.data` or NumPy, and of DTensors) is found on the host only if it
            touches one of about 64 elements of each array, so that a changed row is most often not
            found; on an accelerator it is never found.
            "device": arrays on an accelerator are cloned there, where it has room, and copied to
            the host in the background.
        fsync: whether files and directories are on the disk when the save returns.
        budget_bytes: bytes of host memory that saves may use beyond the state itself: for chunks
            that are being written, and, in `save_async`, as much again for staged copies of all
            saves in flight. Where a state is larger, staging waits for what is being written.
        chunk_bytes: wanted size of a chunk: the unit of writing, reading and checking.
        chunk_shape: wanted chunk extents for all arrays of this rank, lowered where they would
            cross a fragment's boundary; the other arrays follow `chunk_bytes`.
        compression: None, or one of "zstd", "gzip", "blosc". Digests do not depend on it.
        timeout_s: seconds that a process waits for the others: to begin to save, and again to end
            their part after its own is written.
        check_replicas: whether every byte of plain tensors and arrays is compared between the
            processes, which are taken to hold the same, and the save is refused if they do not.
            Without it a sample of each is compared; where that differs, one process's data is
            stored whole, with a warning (`ReplicasDiffer`).
        group: the processes that save together; found by itself under `torch.distributed` and
            `jax.distributed`.
        metrics: called with the report of each save that succeeds, on every process, on the thread
            that saves, for one save after another. `PendingSave.result` and the program's exit wait
            for it; later saves do not. It may itself save, load and wait for saves, which for it
            are over when they are committed; but in a job of several processes, what all of them
            must call in the same order belongs on one thread. What it raises is logged and does no
            harm to the save.

    Raises:
        ValueError: an option is out of range.
    """

    staging: Literal["auto", "copy", "reference", "lazy", "device"] = "auto"
    fsync: bool = True
    budget_bytes: int = 1 << 30
    chunk_bytes: int = 8 << 20
    chunk_shape: tuple[int, ...] | None = None
    compression: str | None = None
    timeout_s: float = 600.0
    check_replicas: bool = False
    group: Group | None = None
    metrics: Callable[[SaveReport], None] | None = None

    def __post_init__(self) -> None:
        if self.staging not in STAGINGS:
            raise ValueError(f"staging {self.staging!r} is not one of {', '.join(STAGINGS)}")
        if self.budget_bytes < 1 or self.chunk_bytes < 1 or self.timeout_s <= 0:
            raise ValueError("budget_bytes, chunk_bytes and timeout_s must be positive")
        if self.chunk_shape is not None and any(n < 1 for n in self.chunk_shape):
            raise ValueError(f"chunk_shape {self.chunk_shape} must be positive")
        if self.compression is not None and self.compression not in COMPRESSORS:
            raise ValueError(
                f"compression {self.compression!r} is not one of None, {', '.join(COMPRESSORS)}"
            )


@dataclass(frozen=True)
class LoadOptions:
    """How to load.

    Arguments:
        verify: whether each chunk that is read is checked against its digest.
        budget_bytes: bytes of host memory that a load may use beyond the destination.
        exchange: whether the processes of a job read together: each chunk once in all, by one that
            needs it, which sends the others what they need of it. For a storage that is slower than
            the network, where processes need parts of the same chunks: replicas, or shards along
            another axis than those that were saved. All of them must then call `load` alike.
        group: as in `SaveOptions`; matters for `exchange`, and for `PerProcess` leaves.

    Raises:
        ValueError: an option is out of range.
    """

    verify: bool = True
    budget_bytes: int = 1 << 30
    exchange: bool = False
    group: Group | None = None

    def __post_init__(self) -> None:
        if self.budget_bytes < 1:
            raise ValueError("budget_bytes must be positive")


@dataclass(frozen=True)
class SaveReport:
    """What a save did.

    Arguments:
        url: where the checkpoint is.
        arrays: number of arrays.
        bytes: logical bytes of all arrays.
        written_bytes: logical bytes of the chunks that this process wrote.
        chunks: number of chunks that this process wrote.
        processes: number of processes that took part.
        seconds: wall time in this process, from the call to the commit.
        phases: seconds of its phases. `describe`, `stage` (in the call), `queue` (waiting for saves
            before it), `write` and `commit`, which includes waiting for the other processes.
        process: index of this process.
        blocked_s: how long the call kept the caller, in seconds.
        staged_bytes: bytes that were copied to host memory, in the call or behind it.
        writers: what each process tells of its part, on the coordinator alone: `bytes` and
            `chunks` written, `seconds` of that, `blocked_s`, `staged_bytes`.
        replicas_differ: on the coordinator alone, names of plain arrays that were not the same on
            all processes, and are stored as one of them held them; see `ReplicasDiffer`.
    """

    url: str
    arrays: int
    bytes: int
    written_bytes: int
    chunks: int
    processes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    process: int = 0
    blocked_s: float = 0.0
    staged_bytes: int = 0
    writers: tuple[Mapping[str, float], ...] = ()
    replicas_differ: tuple[str, ...] = ()

    @property
    def gb_per_s(self) -> float:
        """Logical gigabytes (1e9 bytes) of the checkpoint per second."""
        return self.bytes / 1e9 / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Damage:
    """One thing that `verify` found.

    Arguments:
        array: name of the array; empty where the damage is not in one.
        box: the bad chunk's box in the global array, as text; empty where it is not in a chunk.
        process: index of the process that wrote it; None where it is not in a chunk.
        reason: what is wrong.
    """

    array: str
    box: str
    process: int | None
    reason: str

    def __str__(self) -> str:
        place = f"{self.array!r} {self.box} written by process {self.process}: "
        return (place if self.process is not None else "") + self.reason


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found; `ok` where all is well."""

    url: str
    arrays: int
    chunks: int
    bytes: int
    seconds: float
    damage: tuple[Damage, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.damage

    @property
    def gb_per_s(self) -> float:
        """Logical gigabytes (1e9 bytes) checked per second."""
        return self.bytes / 1e9 / max(self.seconds, 1e-9)
