"""The saves' timeline as trace events, the format of Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from unickpt.extend import SAVE_PHASES

_SIZES = ("written", "stored", "reused", "staged", "chunks")
_PHASE_BYTES = {"stage": "staged", "write": "written"}

Event = dict[str, Any]


def trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """The timeline of the saves that the page draws.

    Each save is a process of the trace, and each process that took part in it is one of its tracks,
    because saves in the background overlap. Saves are placed by the second of their commit.

    Arguments:
        data: of `collect_page_data`.
    """
    created = {step["id"]: step["created"] for step in data["steps"]}
    begins = [_begin(created[save["id"]], save) for save in data["details"]]
    unknown = min((time for time in begins if time is not None), default=0)
    events = [
        event
        for save, begin in zip(data["details"], begins, strict=True)
        for event in _events(save, unknown if begin is None else begin)
    ]
    timed = [event for event in events if "ts" in event]
    first = min((event["ts"] for event in timed), default=0)
    for event in timed:
        event["ts"] -= first
    about = {"url": data["url"], "made_by": data["library"]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _begin(created: str, save: Mapping[str, Any]) -> int | None:
    """The time of the call of save on process 0, in microseconds; None if the index, which is
    untrusted, does not record it."""
    try:
        committed = datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError):
        return None
    merged: int = save["merged"] * (1_000_000 // save["unit"])
    return int(committed * 1e6) - merged


def _events(save: Mapping[str, Any], begin: int) -> Iterator[Event]:
    """The events of a save.

    Arguments:
        save: of `details` in the data of the page.
        begin: the time of the call of save on process 0, in microseconds.
    """
    pid, count, zeros = save["id"], save["processes"], [0] * save["processes"]
    unit = 1_000_000 // save["unit"]

    def times(column: str) -> Sequence[int]:
        return [value * unit for value in save.get(column, zeros)]

    phases = {phase: (times(f"{phase}_at"), times(f"{phase}_s")) for phase in SAVE_PHASES}
    began, blocked = times("began"), times("blocked")
    done = [a + b + c for a, b, c in zip(began, *phases["write"], strict=True)]
    last = max(done)
    yield _named("process_name", pid, 0, save["name"])
    for process in range(count):
        yield _named("thread_name", pid, process, f"process {process}")
        sizes = {name: save.get(name, zeros)[process] for name in _SIZES}

        def event(name: str, start: int, end: int, of_it: Event, tid: int = process) -> Event:
            where = {"cat": "save", "pid": pid, "tid": tid, "args": of_it}
            return {"name": name, "ph": "X", "ts": begin + start, "dur": end - start, **where}

        starts = [began[process] + column[process] for column, _ in phases.values()]
        took = [seconds[process] for _, seconds in phases.values()]
        ends = [start + lasted for start, lasted in zip(starts, took, strict=True)]
        end = max(done[process], *ends)
        every = {**sizes, "blocked_us": blocked[process]}
        yield event("save", min(began[process], *starts), end, every)
        for number, phase in enumerate(SAVE_PHASES):
            if ends[number] > starts[number]:
                # Rounded times must not overlap: viewers would draw one phase within another.
                later = (start for start in starts[number + 1 :] if start > starts[number])
                limit = min(later, default=end)
                nbytes = {"bytes": sizes[_PHASE_BYTES[phase]]} if phase in _PHASE_BYTES else {}
                yield event(phase, starts[number], min(ends[number], limit), nbytes)
        if last > end:
            yield event("wait for the last process", end, last, {})
    moment = {"ph": "i", "s": "p", "cat": "save", "pid": pid, "tid": 0}
    yield {"name": "merged", "ts": begin + save["merged"] * unit, **moment}


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    """The event that names a process or a track."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
