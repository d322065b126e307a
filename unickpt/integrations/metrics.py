"""Receivers of `SaveOptions(metrics=)`: what each save did, in the tools that a team looks at.

    SaveOptions(metrics=TensorBoard(writer))
    SaveOptions(metrics=each(JsonLines("saves.jsonl"), WandB(run)))

They import a tool when they are made, and only their own. An error of theirs is logged, and does
not affect the save. `OpenTelemetry` and `JsonLines` record every process; the others process 0,
which has the run.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from unickpt._version import __version__
from unickpt.commit.version import version_at
from unickpt.errors import MissingPackage, StorageError, UnickptError
from unickpt.format.step_metrics import finite_or_text
from unickpt.loading.report import LoadReport
from unickpt.saving.options import SaveReport
from unickpt.storage import paths

_log = logging.getLogger("unickpt")

Receiver = Callable[[SaveReport], None]
"""What `SaveOptions(metrics=)` takes."""
StepOf = Callable[[SaveReport], int | None]
"""Of which step a checkpoint is."""

_STEP = re.compile(r"step_(\d{1,18})/?")


def step_of(report: SaveReport) -> int | None:
    """The step of a checkpoint that a `Checkpointer` saved, from its URL; None of others.

    Example:
        >>> step_of(SaveReport("memory://run/step_100", 1, 8, 8, 1, 1, 0.5))
        100
    """
    found = _STEP.fullmatch(report.url.rstrip("/").rpartition("/")[2])
    return None if found is None else int(found[1])


def figures(report: SaveReport) -> dict[str, float]:
    """The numbers of a report, by name; seconds of phases as `phase/<name>`.

    Example:
        >>> report = SaveReport("memory://run/a", 1, 8, 8, 1, 1, 0.5, {"write": 0.25})
        >>> figures(report)["phase/write"]
        0.25
    """
    values = {of.name: getattr(report, of.name) for of in fields(report) if of.name != "process"}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    phases = {f"phase/{name}": seconds for name, seconds in report.phases.items()}
    return {**numbers, "gb_per_s": report.gb_per_s, **phases}


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
            "load" where a load is told of, which has no number.
        step: tells the step of a checkpoint.

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
            self._append(about, "load")
        else:
            about |= {"step": self._step(report), "process": report.process}
            given = {name: finite_or_text(value) for name, value in report.metrics.items()}
            own = {"metrics": given} if given else {}
            self._append({**about, **figures(report), **own}, str(report.process))

    def _append(self, of: Mapping[str, Any], process: str) -> None:
        line = json.dumps(of).encode() + b"\n"
        path = self._path.replace("{process}", process)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            written = os.write(file, line)
            if written < len(line):
                os.write(file, b"\n")  # so that the next line is whole
                raise StorageError(f"{path}: {written} of {len(line)} bytes of a line were written")
        finally:
            os.close(file)


class OpenTelemetry:
    """Records each save of each process in instruments of OpenTelemetry.

    Histograms of seconds are `unickpt.save.duration`, `.blocked` and `.phase`, which has an
    attribute `phase`; counters of bytes, `.written`, `.reused` and `.staged`; the bytes of the
    checkpoint, from process 0, are the gauge `.size`. There is no attribute for the URL, because
    each would make new time series.

    Arguments:
        meter: makes the instruments; by default of the global provider, under the name `unickpt`.
        attributes: of everything that is recorded, such as the name of the run.

    Raises:
        MissingPackage: opentelemetry-api is not installed.
    """

    def __init__(self, meter: Any = None, attributes: Mapping[str, Any] | None = None) -> None:
        if meter is None:
            meter = _imported("opentelemetry.metrics", "opentelemetry-sdk").get_meter(
                "unickpt", __version__
            )
        self._attributes = dict(attributes or {})
        name, seconds, count = "unickpt.save.", meter.create_histogram, meter.create_counter
        duration = seconds(f"{name}duration", "s", "from the call to the commit")
        blocked = seconds(f"{name}blocked", "s", "the call blocked its caller")
        self._phase = seconds(f"{name}phase", "s", "one phase of a save")
        written = count(f"{name}written", "By", "chunks written")
        reused = count(f"{name}reused", "By", "chunks not written again")
        staged = count(f"{name}staged", "By", "copied to host memory")
        self._seconds = {"seconds": duration, "blocked_s": blocked}
        self._bytes = {"written_bytes": written, "reused_bytes": reused, "staged_bytes": staged}
        self._size = meter.create_gauge(f"{name}size", "By", "all arrays of the checkpoint")

    def __call__(self, report: SaveReport) -> None:
        attributes = self._attributes
        for name, histogram in self._seconds.items():
            histogram.record(getattr(report, name), attributes)
        for phase, seconds in report.phases.items():
            self._phase.record(seconds, {**attributes, "phase": phase})
        for name, counter in self._bytes.items():
            counter.add(getattr(report, name), attributes)
        if report.process == 0:
            self._size.set(report.bytes, attributes)


class TensorBoard:
    """Writes the figures of process 0 as scalars.

    Arguments:
        writer: a `SummaryWriter` of torch or tensorboardX, or what has its `add_scalar`; on other
            processes it may be None.
        prefix: of the names of the scalars.
        step: tells the step of a checkpoint.
    """

    def __init__(self, writer: Any, prefix: str = "checkpoint", step: StepOf = step_of) -> None:
        self._writer, self._prefix, self._step = writer, prefix, step

    def __call__(self, report: SaveReport) -> None:
        if report.process != 0:
            return
        for name, value in figures(report).items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, self._step(report))


class WandB:
    """Records each checkpoint in a run of Weights & Biases as a version of an artifact.

    The artifact refers to the checkpoint: its data is not uploaded, only a file `checkpoint.json`
    with what the metadata has too: URL, step, digest of the manifest and figures. These are also in
    the next row of the run's history, as `checkpoint/...` over `checkpoint/step`.

    Arguments:
        run: a `wandb.Run`; by default the one that is active when process 0 has saved.
        name: of the artifact; by default `checkpoint-<id of the run>`.
        step: tells the step of a checkpoint.

    Raises:
        MissingPackage: wandb is not installed.
    """

    def __init__(self, run: Any = None, name: str = "", step: StepOf = step_of) -> None:
        self._wandb = _imported("wandb", "wandb")
        self._run, self._name, self._step = run, name, step
        self._defined_in: Any = None

    def __call__(self, report: SaveReport) -> None:
        if report.process != 0:
            return
        run = self._run or self._wandb.run
        if run is None:
            raise UnickptError("there is no run of wandb; call wandb.init() or give WandB(run)")
        if self._defined_in is not run:
            # A step of their own: asynchronous saves end after later steps were logged.
            run.define_metric("checkpoint/step")
            run.define_metric("checkpoint/*", step_metric="checkpoint/step")
            self._defined_in = run
        facts = _reference(report, self._step)
        name = self._name or f"checkpoint-{run.id}"
        artifact = self._wandb.Artifact(name, type="checkpoint", metadata=facts)
        try:
            artifact.add_reference(report.url, checksum=False)
        except Exception as error:  # such as a missing library of a cloud: the URL is recorded
            _log.warning(
                "%s: W&B has its URL, and no reference to its files: %s", report.url, error
            )
        with artifact.new_file("checkpoint.json") as file:
            json.dump(facts, file)
        run.log_artifact(artifact)
        row = {f"checkpoint/{name}": value for name, value in figures(report).items()}
        step = {} if facts["step"] is None else {"checkpoint/step": facts["step"]}
        run.log({**row, **step}, commit=False)


class MLflow:
    """Records each checkpoint in a run of MLflow: the figures as metrics `checkpoint/...`, and a
    file `checkpoints/<name>.json` with URL, step, digest of the manifest and figures.

    The checkpoint's data is not uploaded. The tag `unickpt.checkpoint` is the newest one's URL.

    Arguments:
        run_id: of the run; by default the one that is active in this thread, because MLflow's
            active run is unknown to the thread that saves.
        tracking_uri: by default MLflow's own.
        step: tells the step of a checkpoint.

    Raises:
        MissingPackage: mlflow is not installed.
    """

    def __init__(
        self, run_id: str | None = None, tracking_uri: str | None = None, step: StepOf = step_of
    ) -> None:
        self._mlflow = _imported("mlflow", "mlflow")
        active = self._mlflow.active_run() if run_id is None else None
        self._run_id = run_id if active is None else active.info.run_id
        self._uri, self._step = tracking_uri, step

    def __call__(self, report: SaveReport) -> None:
        if report.process != 0:
            return
        if self._run_id is None:
            raise UnickptError(
                "no run of MLflow was active when MLflow() was made; make it within "
                "mlflow.start_run(), or give MLflow(run_id)"
            )
        facts = _reference(report, self._step)
        client = self._mlflow.MlflowClient(self._uri)
        now, step = time.time_ns() // 1_000_000, facts["step"] or 0
        rows = [
            self._mlflow.entities.Metric(f"checkpoint/{name}", value, now, step)
            for name, value in figures(report).items()
        ]
        client.log_batch(self._run_id, metrics=rows)
        name = report.url.rstrip("/").rpartition("/")[2]
        client.log_dict(self._run_id, facts, f"checkpoints/{name}.json")
        client.set_tag(self._run_id, "unickpt.checkpoint", report.url)


def _reference(report: SaveReport, step: StepOf) -> dict[str, Any]:
    """What another system has to know of a checkpoint to find it, and to see whether it is it.

    The digest is of the manifest that is there now: if another save has replaced the checkpoint
    since, it is that one's.
    """
    version = version_at(paths.resolve(report.url))
    return {
        "url": report.url,
        "step": step(report),
        "manifest_xxh3": None if version is None else version.digest,
        **figures(report),
    }


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"this needs {package}, which cannot be imported ({error}): pip install {package}"
        ) from error
