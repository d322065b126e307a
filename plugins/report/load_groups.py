"""Joins the lines of the processes that loaded, or failed, together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from unickpt.extend import shown_text
from unickpt.plugins.report.metric_lines import EventLine, LoadedLine

Line = TypeVar("Line", LoadedLine, EventLine)

_TOGETHER_S = 60.0
"""Lines that come later belong to another load."""
_MOST_ROWS, _MOST_PROCESSES = 1000, 30_000
_MOST_PATH, _MOST_ERROR = 400, 400


def load_rows(lines: Iterable[LoadedLine]) -> tuple[list[dict[str, Any]], int]:
    """The newest loads for the page, by time, and how many are left out. The figures of each
    process are given for the newest loads that fit."""
    groups = _grouped(lines, lambda line: (line.url, line.processes))
    rows, left = list[dict[str, Any]](), _MOST_PROCESSES
    for group in reversed(groups[-_MOST_ROWS:]):
        row = _load(group)
        if 1 < len(group) <= left:
            left -= len(group)
            row["each"] = _columns(group)
        rows.append(row)
    return rows[::-1], max(0, len(groups) - _MOST_ROWS)


def failure_rows(events: Iterable[EventLine]) -> list[dict[str, Any]]:
    """The newest failures and fallbacks for the page: one for all processes, with the error of the
    first process that has a line."""
    kinds = ("fallback", "save failed", "copy failed")
    failures = (event for event in events if event.kind in kinds)
    groups = _grouped(failures, lambda event: (event.kind, event.url))
    return [
        {
            "time": group[0].time.isoformat(timespec="seconds"),
            "kind": group[0].kind,
            "name": shown_text(_name(group[0].url)),
            "processes": [event.process for event in group[:_MOST_ROWS]],
            "error": shown_text(min(group, key=lambda event: event.process).error, _MOST_ERROR),
        }
        for group in groups[-_MOST_ROWS:]
    ]


def _grouped(lines: Iterable[Line], key: Any) -> list[list[Line]]:
    """Lines in the order of their times, joined if they are of the same thing, of different
    processes, and at about the same time."""
    groups, newest = list[list[Line]](), dict[Hashable, list[Line]]()
    numbers = dict[Hashable, set[int]]()
    for line in lines:
        of_what = key(line)
        group = newest.get(of_what)
        is_late = group is not None and _began(line) - group[-1].time.timestamp() > _TOGETHER_S
        if group is None or is_late or line.process in numbers[of_what]:
            group = newest[of_what] = []
            numbers[of_what] = set()
            groups.append(group)
        group.append(line)
        numbers[of_what].add(line.process)
    return groups


def _began(line: LoadedLine | EventLine) -> float:
    return line.time.timestamp() - (line.seconds if isinstance(line, LoadedLine) else 0.0)


def _name(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def _load(group: Sequence[LoadedLine]) -> dict[str, Any]:
    """The row of a load: seconds and waits of the process that took longest, bytes of all."""
    first = min(group, key=lambda line: line.process)
    slowest = max(group, key=lambda line: line.seconds)
    waiting = max(group, key=lambda line: line.waited_s)
    return {
        "time": max(line.time for line in group).isoformat(timespec="seconds"),
        "name": shown_text(_name(first.url)),
        "counts": {shown_text(name): count for name, count in first.counts.items()},
        "rows": [[shown_text(text, _MOST_PATH) for text in row] for row in first.rows],
        "told": len(group),
        "processes": first.processes,
        "slowest": slowest.process,
        "seconds": slowest.seconds,
        "bytes": sum(line.nbytes for line in group),
        "read": sum(line.read_bytes for line in group),
        "received": sum(line.received_bytes for line in group),
        "waited": waiting.waited_s,
        "waitedFor": shown_text(waiting.waited_for),
    }


def _columns(group: Sequence[LoadedLine]) -> dict[str, list[Any]]:
    """The figures of each process, in the order of their numbers."""
    ordered = sorted(group, key=lambda line: line.process)
    start = min(map(_began, ordered))
    return {
        "process": [line.process for line in ordered],
        "began": [round(_began(line) - start, 5) for line in ordered],
        "seconds": [round(line.seconds, 5) for line in ordered],
        "bytes": [line.nbytes for line in ordered],
        "read": [line.read_bytes for line in ordered],
        "received": [line.received_bytes for line in ordered],
        "waited": [round(line.waited_s, 5) for line in ordered],
        "waitedFor": [shown_text(line.waited_for) for line in ordered],
    }
