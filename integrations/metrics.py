"""For functions that `SaveOptions(metrics=)` calls: figures of each save, for any tool.

    SaveOptions(metrics=JsonLines("saves.jsonl"))
    SaveOptions(metrics=each(JsonLines("saves.jsonl"), lambda report: log(figures(report))))

docs/metrics.md has such functions for TensorBoard, OpenTelemetry, Weights & Biases and MLflow.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from unickpt.errors import StorageError
from unickpt.extend import finite_or_text, resolve_path, version_at
from unickpt.types import LoadReport, SaveReport

Receiver = Callable[[SaveReport], None]
"""The type of `SaveOptions(metrics=)`."""
StepOf = Callable[[SaveReport], int | None]
"""The step of a checkpoint."""

_OF_LOAD = ("seconds", "bytes", "read_bytes", "received_bytes", "waited_s", "gb_per_s")
_STEP = re.compile(r"step_(\d{1,18})/?")


def step_of(report: SaveReport) -> int | None:
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


def each(*receivers: Receiver) -> Receiver:
    """A receiver that calls several; an error of one does not keep the others from being called."""

    def call(report: SaveReport) -> None:
        errors: list[Exception] = []
        for receiver in receivers:
            try:
                receiver(report)
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup(f"{len(errors)} receivers of metrics failed", errors)

    return call


class JsonLines:
    """Appends an object in JSON to a file for each save of each process, one a line; and for each
    load, if it is called with its report. `unickpt report --metrics` shows them.

    Each line is written by one call of the operating system, so that processes of one machine may
    share a file. Over a network file system, processes of several machines may not: write
    `{process}` in the path.

    Arguments:
        path: of a local file; `{process}` in it stands for the number of the process, and for
            "load" in the line of a load, which has no number.
        step: returns the step of a checkpoint.

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

    def __init__(self, path: str | os.PathLike[str], step: StepOf = step_of) -> None:
        self._path, self._step = os.path.abspath(path), step

    def __call__(self, report: SaveReport | LoadReport) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        about: dict[str, Any] = {"time": time, "url": report.url}
        if isinstance(report, LoadReport):
            about |= {"kind": "load", "counts": report.counts, "rows": report.rows}
            about |= {name: getattr(report, name) for name in _OF_LOAD}
            about["waited_for"] = {str(p): s for p, s in report.waited_for.items()}
            self._append(about, "load")
        else:
            about |= {"step": self._step(report), "process": report.process}
            metrics = {name: finite_or_text(value) for name, value in report.metrics.items()}
            extra = {"metrics": metrics} if metrics else {}
            self._append({**about, **figures(report), **extra}, str(report.process))

    def _append(self, record: Mapping[str, Any], process: str) -> None:
        line = json.dumps(record).encode() + b"\n"
        path = self._path.replace("{process}", process)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            written = os.write(file, line)
            if written < len(line):
                os.write(file, b"\n")  # so that the next line is whole
                raise StorageError(f"{path}: {written} of {len(line)} bytes of a line were written")
        finally:
            os.close(file)
