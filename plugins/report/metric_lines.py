"""Reads the files of `unickpt.integrations.metrics.JsonLines`: lines of saves, loads and events."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from unickpt.errors import UnickptError
from unickpt.extend import step_metrics

FilePath = str | os.PathLike[str]

_MOST_LINE = 1 << 20
_MOST_LOADS = 100_000  # lines: a load of a thousand processes has a thousand
_EVENTS = ("began", "step", "skipped", "fallback", "save failed", "copy failed", "ended")
_MOST_TEXT = 400


@dataclass(frozen=True)
class SavedLine:
    """Process 0's line of a save.

    Arguments:
        time: when it was over, as ISO 8601.
        url: of the checkpoint.
        nbytes: of its arrays.
        processes: how many saved it.
        seconds: from the call to the commit.
        blocked_s: for how long the call blocked its caller.
        metrics: numbers that the step was saved with.
        step: its number, if known.
        job: the process that wrote the line, as a random name; empty in lines of earlier versions.
    """

    time: datetime
    url: str
    nbytes: int
    processes: int
    seconds: float
    blocked_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    job: str = ""


@dataclass(frozen=True)
class LoadedLine:
    """A process's line of a load.

    Arguments:
        time: when it was over.
        url: of the checkpoint.
        counts: numbers of leaves by what happened to them, such as `loaded` and `kept`.
        rows: of a table: the event, its leaves, and the reason.
        seconds: how long it took.
        nbytes, read_bytes, received_bytes: of the loaded arrays; from the storage, and from other
            processes.
        waited_s: for other processes.
        waited_for: the process for which it waited longest; empty if that is not known.
        step, job: as of `SavedLine`.
        process, processes: which process wrote the line, and how many the job has.
    """

    time: datetime
    url: str
    counts: Mapping[str, int]
    rows: Sequence[tuple[str, str, str]]
    seconds: float = 0.0
    nbytes: int = 0
    read_bytes: int = 0
    received_bytes: int = 0
    waited_s: float = 0.0
    waited_for: str = ""
    step: int | None = None
    job: str = ""
    process: int = 0
    processes: int = 1


@dataclass(frozen=True)
class EventLine:
    """A process's line of another event (`unickpt.types.RunEvent`).

    Arguments:
        time, url, kind, step, process, error: of the event.
        job: as of `SavedLine`.
    """

    time: datetime
    url: str
    kind: str
    step: int | None
    process: int
    error: str
    job: str


@dataclass(frozen=True)
class Lines:
    """The content of the files.

    Arguments:
        saves: by process 0, in the order of their times.
        loads: the newest ones, in the order of their times.
        unread: number of lines that are not such lines, such as one that was cut off.
        left_out: number of lines of loads that are older than those.
        events: others, in the order of their times.
    """

    saves: Sequence[SavedLine] = ()
    loads: Sequence[LoadedLine] = ()
    unread: int = 0
    left_out: int = 0
    events: Sequence[EventLine] = ()


def read(files: Iterable[FilePath]) -> Lines:
    """Reads files of lines.

    Raises:
        UnickptError: a file cannot be read.
    """
    saves, loads, events, unread = list[SavedLine](), list[LoadedLine](), list[EventLine](), 0
    for file in files:
        for line in _lines(file):
            try:
                record = _decoded(line)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                unread += 1
                continue
            if isinstance(record, LoadedLine):
                loads.append(record)
            elif isinstance(record, EventLine):
                events.append(record)
            elif record is not None:
                saves.append(record)
    saves.sort(key=lambda save: save.time)
    loads.sort(key=lambda load: load.time)
    events.sort(key=lambda event: event.time)
    return Lines(saves, loads[-_MOST_LOADS:], unread, max(0, len(loads) - _MOST_LOADS), events)


def _lines(file: FilePath) -> Iterator[bytes]:
    try:
        with open(file, "rb") as stream:
            while line := stream.readline(_MOST_LINE):
                if line.strip():
                    yield line
    except OSError as error:
        raise UnickptError(
            f"{os.fspath(file)}: the file of metrics cannot be read: {error.strerror or error}; "
            "give a file that unickpt.integrations.metrics.JsonLines wrote"
        ) from error


def _decoded(line: bytes) -> SavedLine | LoadedLine | EventLine | None:
    """A line; None of a save by another process than 0, and of an event of a later version.

    Raises:
        ValueError, TypeError, KeyError: it is not such a line.
    """
    record = json.loads(line)
    time, url = datetime.fromisoformat(record["time"]), _text(record["url"])
    if time.tzinfo is None:
        raise ValueError("a time without its zone")
    kind, step, job = record.get("kind"), _step(record.get("step")), _text(record.get("job", ""))
    if kind in _EVENTS:
        process, error = _count(record["process"]), _text(record.get("error", ""))
        return EventLine(time, url, kind, step, process, error, job)
    if kind == "load":
        counts = {_text(name): _count(count) for name, count in record["counts"].items()}
        rows = [(_text(a), _text(b), _text(c)) for a, b, c in record["rows"]]
        place = _count(record.get("process", 0)), _count(record.get("processes", 1))
        return LoadedLine(time, url, counts, rows, *_load_figures(record), step, job, *place)
    if kind is not None or record["process"] != 0:
        return None
    seconds, blocked_s = _number(record["seconds"]), _number(record["blocked_s"])
    nbytes, processes = _count(record["bytes"]), _count(record["processes"])
    return SavedLine(
        time, url, nbytes, processes, seconds, blocked_s, step_metrics(record), step, job
    )


def _load_figures(record: Mapping[str, Any]) -> tuple[float, int, int, int, float, str]:
    """The figures of a load, as `LoadedLine` has them."""
    waits = {_text(process): _number(s) for process, s in record.get("waited_for", {}).items()}
    return (
        _number(record.get("seconds", 0)),
        _count(record.get("bytes", 0)),
        _count(record.get("read_bytes", 0)),
        _count(record.get("received_bytes", 0)),
        _number(record.get("waited_s", 0)),
        max(waits, key=waits.__getitem__, default=""),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value[:_MOST_TEXT]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("not a count")
    return value


def _step(value: Any) -> int | None:
    return None if value is None else _count(value)


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not a number")
    return number
