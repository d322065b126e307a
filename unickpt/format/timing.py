"""How long a save took, by process and phase, as it is kept in the checkpoint: `unickpt.timing`.

docs/format.md (section 10) is the normative text. Nothing that is loaded depends on it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from unickpt.format.index import TIMING, extra_key

TIMING_KEY = extra_key(TIMING)
PHASES = ("describe", "plan", "stage", "queue", "write")
"""The phases of one process, until it has published its record."""
_SIZES = ("written", "stored", "reused", "staged", "chunks")
_F4: np.dtype[Any] = np.dtype("<f4")
_U8: np.dtype[Any] = np.dtype("<u8")
_KINDS = {kind.str: kind for kind in (_F4, _U8)}
_COLUMNS: Mapping[str, np.dtype[Any]] = {
    "began": _F4,
    "blocked": _F4,
    **{f"{phase}_at": _F4 for phase in PHASES},
    **{f"{phase}_s": _F4 for phase in PHASES},
    **dict.fromkeys(_SIZES, _U8),
}
_IN_MEMORY = {name: kind.newbyteorder("=") for name, kind in _COLUMNS.items()}
_KEPT = "write_s"
"""The column that is always there: it backs the number of processes, which is untrusted."""
_SEAL_BYTES = 8
_MOST_COLUMNS, _MOST_HEAD = 64, 1 << 14
_WIDEST = 8  # bytes of an element of a column


@dataclass(frozen=True)
class Timing:
    """How long a save took. All arrays have an element for each process.

    Times are seconds since the coordinator, process 0, was called to save. Other processes' times
    are converted to its clock by the clocks of the hosts, and corrected where these contradict its
    observations: which records existed at each of its polls (docs/format.md).

    Arguments:
        collected: when process 0 had the records of all processes.
        merged: when it had merged them. Then it built the root and committed.
        began: when each process was called to save.
        at: for each phase of `PHASES`, by its name, how long after that it began.
        seconds: how long it took; 0 if there was none.
        blocked: seconds for which the call blocked the caller; 0 if it returned only after the
            save.
        written: logical bytes of the chunks that the process wrote, and the bytes of its patches.
        stored: the same, as encoded by codecs.
        reused: logical bytes that it did not write, because an earlier checkpoint has them.
        staged: bytes that it copied to host memory.
        chunks: number of chunks that it wrote.

    Example:
        >>> import numpy as np, unickpt
        >>> options = unickpt.SaveOptions(timing=True)  # of one process only if asked for
        >>> _ = unickpt.save("memory://run/timing", {"w": np.ones(3)}, options=options)
        >>> unickpt.open("memory://run/timing").timing.written
        array([24], dtype=uint64)
    """

    collected: float
    merged: float
    began: NDArray[np.float32]
    at: Mapping[str, NDArray[np.float32]]
    seconds: Mapping[str, NDArray[np.float32]]
    blocked: NDArray[np.float32]
    written: NDArray[np.uint64]
    stored: NDArray[np.uint64]
    reused: NDArray[np.uint64]
    staged: NDArray[np.uint64]
    chunks: NDArray[np.uint64]

    @property
    def processes(self) -> int:
        """The number of processes."""
        return len(self.began)

    @property
    def done(self) -> NDArray[np.float32]:
        """When each process had published its record, and so ended its part."""
        ended: NDArray[np.float32] = self.began + self.at["write"] + self.seconds["write"]
        return ended

    @property
    def waited(self) -> NDArray[np.float32]:
        """How long each process then waited until the last one was done."""
        done = self.done
        late: NDArray[np.float32] = done.max() - done
        return late

    @property
    def slowest(self) -> NDArray[np.intp]:
        """The processes, the one for which all others waited first."""
        return np.argsort(-self.done, kind="stable")


def from_columns(
    collected: float, merged: float, columns: Mapping[str, NDArray[Any]], processes: int
) -> Timing:
    """A timing from columns by their names; missing columns are 0."""
    none = np.zeros(processes)
    arrays = {name: np.asarray(columns.get(name, none), kind) for name, kind in _IN_MEMORY.items()}
    return Timing(
        collected,
        merged,
        arrays["began"],
        {phase: arrays[f"{phase}_at"] for phase in PHASES},
        {phase: arrays[f"{phase}_s"] for phase in PHASES},
        arrays["blocked"],
        *[arrays[name] for name in _SIZES],
    )


def encode(timing: Timing) -> bytes:
    """A line of JSON, the columns that are not all 0, and the xxh3-64 of both."""
    every: list[NDArray[Any]] = [timing.began, timing.blocked]
    for times in timing.at, timing.seconds:
        every += [times[phase] for phase in PHASES]
    every += [timing.written, timing.stored, timing.reused, timing.staged, timing.chunks]
    columns = [
        (name, kind, column)
        for (name, kind), column in zip(_COLUMNS.items(), every, strict=True)
        if name == _KEPT or column.any()
    ]
    head = {
        "processes": timing.processes,
        "collected": round(timing.collected, 3),
        "merged": round(timing.merged, 3),
        "columns": [[name, kind.str] for name, kind, _ in columns],
    }
    line = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    body = b"".join([line, *[column.astype(kind).tobytes() for _, kind, column in columns]])
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little")


def most_bytes(processes: int) -> int:
    """The most bytes that the timing of a save of some processes may have."""
    return _MOST_HEAD + _MOST_COLUMNS * _WIDEST * processes + _SEAL_BYTES


def decode(data: bytes, processes: int) -> Timing:
    """Decodes a stored timing.

    Arguments:
        data: of at most `most_bytes`; untrusted.
        processes: how many the index names.

    Raises:
        ValueError: says what is wrong.
    """
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little") != seal:
        raise ValueError("it does not match its checksum")
    line, _, column_bytes = body.partition(b"\n")
    if len(line) > _MOST_HEAD:
        raise ValueError(f"its head has {len(line)} bytes")
    try:
        head = json.loads(line)
        named = [(str(name), _KINDS[kind]) for name, kind in head["columns"]]
        collected, merged = float(head["collected"]), float(head["merged"])
        process_count = head["processes"]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"its head is malformed: {error!r}") from None
    if type(process_count) is not int or process_count != processes:
        raise ValueError(f"it is of {process_count!r} processes, but the index names {processes}")
    if not (_is_moment(collected) and _is_moment(merged)):
        raise ValueError("its times are not finite")
    return from_columns(collected, merged, _columns(named, column_bytes, processes), processes)


def _columns(
    named: list[tuple[str, np.dtype[Any]]], data: bytes, processes: int
) -> dict[str, NDArray[Any]]:
    """The columns that are known; those of later versions are skipped."""
    names = {name for name, _ in named}
    sound = len(names) == len(named) <= _MOST_COLUMNS and _KEPT in names
    if not sound:
        raise ValueError("its columns are malformed")
    if len(data) != processes * sum(kind.itemsize for _, kind in named):
        raise ValueError(f"its columns have {len(data)} bytes, which is not what its head says")
    columns, offset = dict[str, NDArray[Any]](), 0
    for name, kind in named:
        column = np.frombuffer(data, kind, processes, offset)
        offset += column.nbytes
        if name not in _COLUMNS:
            continue
        if kind != _COLUMNS[name]:
            raise ValueError(f"its column {name!r} is of another type")
        if kind == _F4 and not _are_moments(column, signed=name == "began" or name.endswith("_at")):
            raise ValueError(f"its column {name!r} has times that cannot be")
        columns[name] = column
    return columns


_LONGEST_S = 1e9


def _is_moment(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= _LONGEST_S


def _are_moments(column: NDArray[Any], *, signed: bool) -> bool:
    least = -_LONGEST_S if signed else 0
    return bool(((column >= least) & (column <= _LONGEST_S)).all())  # false for NaN, too


# The statistics of a record that are the columns of a timing, in their order.
_STATISTICS = (
    *("began", "blocked_s"),
    *[f"{phase}_at" for phase in PHASES],
    *[f"{phase}_s" for phase in PHASES],
    *("bytes", "stored_bytes", "reused_bytes", "staged_bytes", "chunks"),
)
_MOST_S, _MOST_WALL_S, _MOST_BYTES = 1e8, 1e12, 2.0**62
_MOST = np.array([_MOST_S if kind == _F4 else _MOST_BYTES for kind in _COLUMNS.values()])
_MOST[0] = _MOST_WALL_S  # the time of day of each host


class Arrivals:
    """The records that existed at each poll of the coordinator.

    Arguments:
        count: number of processes.
        clock: seconds; for tests.
    """

    extra: Mapping[str, Any] = {TIMING: {}}
    """The entry of an index for a timing."""

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._late = set(range(count))
        self._looked = -math.inf
        self._published = math.nan
        self.collected = math.nan
        """When all existed."""
        self._not_before = np.full(count, -math.inf)
        self._seen = np.full(count, math.inf)

    def published(self) -> None:
        """Records that the coordinator has published its own record."""
        self._published = self._clock()

    def looked(self, late: Collection[int]) -> None:
        """Records a poll of the coordinator in which the records of some processes were missing."""
        if not self._late:
            return  # of further records, which the coordinator has requested
        now = self._clock()
        for process in self._late.difference(late):
            self._not_before[process], self._seen[process] = self._looked, now
        self._late.intersection_update(late)
        self._looked = now
        if not self._late:
            self.collected = now

    def encode(self, statistics: Sequence[Mapping[str, float]]) -> dict[str, bytes]:
        """The timing as it is stored, by its key. As `timing`."""
        return {TIMING_KEY: encode(self.timing(statistics))}

    def timing(self, statistics: Sequence[Mapping[str, float]]) -> Timing:
        """The timing of the save that is merged now.

        Arguments:
            statistics: in the records of all processes, in order.
        """
        count, (walls, *values) = len(statistics), _values(statistics)
        columns: dict[str, NDArray[Any]] = {
            name: row.astype(kind)
            for (name, kind), row in zip(islice(_IN_MEMORY.items(), 1, None), values, strict=True)
        }
        took = columns["write_at"].astype(float) + columns["write_s"]
        began = walls - walls[0]
        start = self._published - took[0]  # of the coordinator, by its own clock
        # A record is published before it is seen, and after it was missing. This needs no clock but
        # the coordinator's, so it corrects the hosts' clocks.
        began = np.clip(began, self._not_before - start - took, self._seen - start - took)
        columns["began"] = np.clip(began, -_MOST_S, _MOST_S).astype(np.float32)
        columns["began"][0] = 0
        collected, merged = self.collected - start, self._clock() - start
        return from_columns(collected, merged, columns, count)


def _values(statistics: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
    """The statistics of all processes, a row for each of `_STATISTICS`; an impossible value must
    not make the save fail."""
    rows = [[*map(record.get, _STATISTICS, repeat(0))] for record in statistics]
    # For NaN and a number, these two return the number.
    nonnegative: NDArray[np.float64] = np.fmax(np.array(rows, float).T, 0.0)
    clipped: NDArray[np.float64] = np.fmin(nonnegative, _MOST[:, None])
    return clipped
