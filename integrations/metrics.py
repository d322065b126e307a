"""For functions that `SaveOptions(metrics=)` calls: figures of each save, for any tool; and the
events of a run, for those with a method `run_event`.

    SaveOptions(metrics=JsonLines("saves.jsonl"))
    SaveOptions(metrics=each(JsonLines("saves.jsonl"), lambda report: log(figures(report))))

docs/metrics.md has such functions for TensorBoard, OpenTelemetry, Weights & Biases and MLflow.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from unickpt.errors import StorageError
from unickpt.extend import finite_or_text, hears_events, job_group, resolve_path, version_at
from unickpt.types import LoadReport, RunEvent, SaveReport

Receiver = Callable[[SaveReport], None]
"""The type of `SaveOptions(metrics=)`."""
StepOf = Callable[[SaveReport], int | None]
"""The step of a checkpoint."""

_OF_LOAD = ("seconds", "bytes", "read_bytes", "received_bytes", "waited_s", "gb_per_s")
_STEP = re.compile(r"step_(\d{1,18})/?")
_JOB = secrets.token_hex(4)  # of this process


def step_of(report: SaveReport | LoadReport | RunEvent) -> int | None:
    """The step of a checkpoint that a `Checkpointer` saved, from its URL; None of others.

    Example:
        >>> step_of(SaveReport("memory://run/step_100", 1, 8, 8, 1, 1, 0.5))
        100
    """
    match = _STEP.fullmatch(report.url.rstrip("/").rpartition("/")[2])
    return None if match is None else int(match[1])


def figures(report: SaveReport) -> dict[str, float]:
    """The numbers of a report, by name; seconds of phases as `phase/<name>`.

    Example:
        >>> report = SaveReport("memory://run/a", 1, 8, 8, 1, 1, 0.5, {"write": 0.25})
        >>> figures(report)["phase/write"]
        0.25
    """
    values = {field.name: getattr(report, field.name) for field in fields(report)}
    del values["process"]
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    phases = {f"phase/{name}": seconds for name, seconds in report.phases.items()}
    return {**numbers, "gb_per_s": report.gb_per_s, **phases}


def reference(report: SaveReport, step: StepOf = step_of) -> dict[str, Any]:
    """The facts that another system needs to find a checkpoint, and to check that it is the same:
    its URL, step and figures, and the digest of its manifest.

    The digest is of the manifest that is there now: if another save has replaced the checkpoint
    since, it is that one's.

    Arguments:
        report: of the save.
        step: returns the step of a checkpoint.

    Raises:
        StorageError: the manifest cannot be read.

    Example:
        >>> import numpy as np, unickpt
        >>> facts = reference(unickpt.save("memory://run/step_4", {"w": np.ones(2)}))
        >>> facts["url"], facts["step"], facts["bytes"], len(facts["manifest_xxh3"])
        ('memory://run/step_4/', 4, 16, 16)
    """
    version = version_at(resolve_path(report.url))
    return {
        "url": report.url,
        "step": step(report),
        "manifest_xxh3": None if version is None else version.digest,
        **figures(report),
    }


class _Each:
    def __init__(self, receivers: Iterable[Receiver]) -> None:
        self._receivers = tuple(receivers)

    def __call__(self, report: SaveReport) -> None:
        _call_all(self._receivers, report)

    def run_event(self, event: RunEvent) -> None:
        listeners: list[Any] = list(filter(hears_events, self._receivers))
        _call_all([listener.run_event for listener in listeners], event)


def each(*receivers: Receiver) -> Receiver:
    """A receiver that calls several; an error of one does not keep the others from being called.
    Those with a method `run_event` get events."""
    return _Each(receivers)


def _call_all(functions: Iterable[Callable[[Any], None]], value: SaveReport | RunEvent) -> None:
    errors: list[Exception] = []
    for function in functions:
        try:
            function(value)
        except Exception as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup(f"{len(errors)} receivers of metrics failed", errors)


class JsonLines:
    """Appends an object in JSON to a file for each save of each process, one a line; and for each
    event of a `Checkpointer` (`RunEvent`), such as loads and failures. For a load by `unickpt.load`
    call it with the report. `unickpt report --metrics` shows the lines.

    Each line is written by one call of the operating system, so that processes of one machine may
    share a file. Over a network file system, processes of several machines may not: write
    `{process}` in the path.

    Arguments:
        path: of a local file; `{process}` in it stands for the number of the process.
        step: returns the step of a checkpoint.
        every_s: at most so often, in seconds, process 0 has a line of the step that the loop has
            reached, as `Checkpointer.should_save` and `save` tell it; 0 for each.

    Example:
        >>> import numpy as np, pathlib, tempfile, unickpt
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "saves.jsonl"
        >>> options = unickpt.SaveOptions(metrics=JsonLines(file))
        >>> _ = unickpt.save("memory://run/step_3", {"w": np.ones(2)}, options=options)
        >>> line = json.loads(file.read_text())
        >>> line["step"], line["bytes"], line["url"]
        (3, 16, 'memory://run/step_3/')
        >>> _, report = unickpt.load("memory://run/step_3", return_report=True)
        >>> JsonLines(file)(report)
        >>> line = json.loads(file.read_text().splitlines()[1])
        >>> line["kind"], line["counts"]
        ('load', {'loaded': 1})
    """

    def __init__(
        self, path: str | os.PathLike[str], step: StepOf = step_of, every_s: float = 10.0
    ) -> None:
        self._path, self._step = os.path.abspath(path), step
        self._every_s, self._next_step_at = every_s, 0.0

    def __call__(self, report: SaveReport | LoadReport) -> None:
        if isinstance(report, LoadReport):
            group = job_group()
            place = group.index, group.count
            self.run_event(RunEvent("loaded", report.url, None, *place, report=report))
            return
        metrics = {name: finite_or_text(value) for name, value in report.metrics.items()}
        extra = {"metrics": metrics} if metrics else {}
        about: dict[str, Any] = {"time": _time_text(time.time()), "url": report.url, "job": _JOB}
        about |= {"step": self._step(report), "process": report.process}
        self._append({**about, **figures(report), **extra}, report.process)

    def run_event(self, event: RunEvent) -> None:
        """Appends a line of an event."""
        if event.kind == "step":
            if time.monotonic() < self._next_step_at:
                return
            self._next_step_at = time.monotonic() + self._every_s
        line: dict[str, Any] = {"time": _time_text(event.time), "url": event.url, "job": _JOB}
        line |= {"kind": event.kind, "step": step_of(event) if event.step is None else event.step}
        line |= {"process": event.process}
        if event.error:
            line["error"] = event.error
        if event.kind == "loaded":
            line |= {"kind": "load", "processes": event.processes, **_load_figures(event.report)}
        self._append(line, event.process)

    def _append(self, record: Mapping[str, Any], process: int) -> None:
        line = json.dumps(record).encode() + b"\n"
        path = self._path.replace("{process}", str(process))
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            written = os.write(file, line)
            if written < len(line):
                os.write(file, b"\n")  # so that the next line is whole
                raise StorageError(f"{path}: {written} of {len(line)} bytes of a line were written")
        finally:
            os.close(file)


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _load_figures(report: LoadReport) -> dict[str, Any]:
    waited_for = {str(process): seconds for process, seconds in report.waited_for.items()}
    outcome = {"counts": report.counts, "rows": report.rows, "waited_for": waited_for}
    return outcome | {name: getattr(report, name) for name in _OF_LOAD}
