"""Progress reports of processes in a save: one small object each, which is overwritten.

In a save of several processes they are also the signs of life (`liveness`). It lies next to the
records, because only the coordinator and a watcher of the run list these often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from unickpt.commit.messages import parse_note
from unickpt.frameworks import os_process_states
from unickpt.frameworks.os_process_states import DISK, RUNS, STOPPED, Identity
from unickpt.storage.errors import Damaged
from unickpt.storage.tensorstore_calls import KvStore

_SUFFIX = ".at"
_BYTES = 512
WRITE, WAIT, COMMIT = "write", "wait", "commit"
WORDS = {WRITE: "writing", WAIT: "waiting", COMMIT: "committing"}
"""The phases that a process reports, and what it does in each."""
COPY, SEND = "copy", "send"
ACTIVITIES = {"": "", COPY: "copying from its device", SEND: "sending to the storage"}
"""What a process that writes may wait for, and how it is called."""
CAUSES = os_process_states.CAUSES
"""The states in which a process makes no progress."""
NOT_BEGUN, DONE = "not begun", "done"
_State = Annotated[str, msgspec.Meta(pattern=rf"\A({RUNS}|{STOPPED}|{DISK})\Z")]
_Phase = Annotated[str, msgspec.Meta(pattern=rf"\A({'|'.join(WORDS)})\Z")]
_Activity = Annotated[str, msgspec.Meta(pattern=rf"\A({'|'.join(ACTIVITIES)})\Z")]
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class Report:
    """The progress of a process.

    Arguments:
        phase: one of `WORDS`.
        seconds: since it was called to save.
        nbytes: logical bytes that it has written, or reused from an earlier checkpoint.
        total: the logical bytes of its part.
        processes: how many save together.
        number: how many reports it has already written.
        identity: of the process; None if it saves alone.
        neighbours: the states of its neighbours, as far as it sees them (`os_process_states`).
        description: xxh3-64 of its encoded description; 0 if it saves alone.
        activity: one of `ACTIVITIES`.
    """

    phase: _Phase
    seconds: _Seconds
    nbytes: _Count
    total: _Count
    processes: _Count
    number: _Count = 0
    identity: Identity | None = None
    neighbours: Annotated[tuple[tuple[_Count, _State], ...], msgspec.Meta(max_length=2)] = ()
    description: Annotated[int, msgspec.Meta(ge=0)] = 0
    activity: _Activity = ""

    @property
    def words(self) -> str:
        """The activity of the process."""
        return ACTIVITIES[self.activity] or WORDS[self.phase]

    def encode(self) -> bytes:
        return padded(msgspec.json.encode(self), _BYTES)


def decode(data: bytes) -> Report | None:
    """A stored report, which is untrusted; None if the bytes are not one, such as those of a
    missing object."""
    return parse_note(data, Report)


def name_of(process: int) -> str:
    """The name of a process's report, next to the records."""
    return f"{process:05d}{_SUFFIX}"


def read(records: KvStore, processes: Sequence[int]) -> dict[int, Report]:
    """The reports of the given processes that have one.

    Raises:
        Failed: the storage failed.
    """
    reads = [(process, _reading(records, process)) for process in processes]
    reports = {process: decode(read()) for process, read in reads}
    return {process: report for process, report in reports.items() if report is not None}


def read_data(records: KvStore, process: int) -> bytes:
    """The bytes of a process's report, which `decode` takes. Raises as `read`."""
    return _reading(records, process)()


def _reading(records: KvStore, process: int) -> Callable[[], bytes]:
    return reading(records, name_of(process), _BYTES)


def seen(reports: Mapping[int, Report]) -> dict[int, str]:
    """The states of processes, as their neighbours report them.

    Arguments:
        reports: of the neighbours.
    """
    return {process: state for report in reports.values() for process, state in report.neighbours}


def padded(data: bytes, size: int) -> bytes:
    """JSON padded to the size that `reading` reads."""
    assert len(data) <= size, "all that is in it is bounded"
    return data.ljust(size)


def reading(records: KvStore, name: str, size: int) -> Callable[[], bytes]:
    """Starts to read an object that `padded` made, and no more than that.

    Returns:
        The function that waits for it; it returns empty bytes if the object is missing or shorter,
        and raises `Failed` if the storage failed.
    """
    read = records.read(name, byte_range=slice(0, size))

    def result() -> bytes:
        try:
            data: bytes = read.result().value
        except Damaged:
            return b""
        return data

    return result


def write(records: KvStore, process: int, report: Report) -> None:
    """Overwrites a process's report.

    Raises:
        Failed: the storage failed.
    """
    records.write(name_of(process), report.encode()).result()
