"""Receivers of SaveOptions(metrics=), each with the real package where it is installed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.forks import Forks
from support.processes import Processes

import unickpt
from unickpt import SaveOptions, SaveReport
from unickpt.errors import MissingPackage, StorageError, UnickptError
from unickpt.integrations.metrics import (
    JsonLines,
    MLflow,
    OpenTelemetry,
    TensorBoard,
    WandB,
    each,
    figures,
    step_of,
)
from unickpt.storage.database import digest_of

TREE = {"w": np.arange(1000, dtype=np.float32), "n": np.ones(3)}


def saved(path: object, metrics: Any, **options: Any) -> SaveReport:
    """Saves in the background, as a training job does, and waits for the receiver."""
    made = SaveOptions(metrics=metrics, fsync=False, **options)
    return unickpt.save_async(str(path), TREE, options=made).result()


def report_of(url: str = "memory://m/step_7", process: int = 0) -> SaveReport:
    return SaveReport(
        url, 2, 4024, 4024, 2, 1, 0.5, {"write": 0.25}, process, blocked_s=0.1, reused_bytes=8
    )


def facts_of(path: Path) -> dict[str, Any]:
    return {
        "url": f"file://{path}/",
        "step": 7,
        "manifest_xxh3": digest_of((path / "manifest.ocdbt").read_bytes()),
    }


def test_figures_are_all_numbers_of_a_report() -> None:
    found = figures(report_of())
    assert found["bytes"] == 4024
    assert found["reused_bytes"] == 8
    assert found["phase/write"] == 0.25
    assert found["gb_per_s"] == pytest.approx(4024 / 1e9 / 0.5)
    assert "process" not in found  # no measurement
    assert all(type(value) in (int, float) for value in found.values())


def test_json_lines_has_the_metrics_of_the_step_also_nan(tmp_path: Path) -> None:
    options = SaveOptions(metrics=JsonLines(tmp_path / "saves.jsonl"), fsync=False)
    with unickpt.Checkpointer(tmp_path / "run", options=options) as checkpointer:
        given = {"loss": 0.5, "norm": float("nan")}
        report = checkpointer.save(1, TREE, metrics=given, wait=True).result()
    assert report.metrics["loss"] == 0.5
    (line,) = (tmp_path / "saves.jsonl").read_text().splitlines()
    assert json.loads(line)["metrics"] == {"loss": 0.5, "norm": "nan"}


@pytest.mark.parametrize(
    ("url", "step"),
    [
        ("s3://b/run/step_100", 100),
        ("file:///a/step_0/", 0),
        ("memory://final", None),
        ("memory://step_4/best", None),
        (f"memory://step_{'9' * 5000}", None),
    ],
)
def test_the_step_is_that_of_a_run(url: str, step: int | None) -> None:
    assert step_of(report_of(url)) == step


# --- JSON lines -----------------------------------------------------------------------------------


def test_json_lines_has_a_line_for_each_save(tmp_path: Path) -> None:
    to = JsonLines(tmp_path / "saves.jsonl")
    reports = [saved(tmp_path / f"step_{n}", to) for n in (1, 2)]
    lines = [json.loads(line) for line in (tmp_path / "saves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line, report in zip(lines, reports, strict=True):
        assert line["url"] == report.url
        assert line["bytes"] == report.bytes == 4024
        assert line["seconds"] == report.seconds
        assert {name: line[name] for name in figures(report)} == figures(report)


def test_many_processes_append_whole_lines_to_one_file(forks: Forks, tmp_path: Path) -> None:
    source = """
        from unickpt import SaveReport
        from unickpt.integrations.metrics import JsonLines
        file, process = ARGS[0], int(ARGS[1])
        to = JsonLines(file, step=lambda report: report.chunks)
        for n in range(200):
            phases = {f"phase {k}": 0.5 for k in range(200)}  # a line of several kilobytes
            to(SaveReport("memory://x", 1, 1, 1, n, 4, 0.5, phases, process))
    """
    file = tmp_path / "saves.jsonl"
    running = [forks.start(textwrap.dedent(source), str(file), n) for n in range(4)]
    assert [forks.wait(job).code for job in running] == [0] * 4
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((line["process"], line["step"]) for line in lines) == [
        (process, n) for process in range(4) for n in range(200)
    ]


def test_processes_may_have_files_of_their_own(tmp_path: Path) -> None:
    to = JsonLines(tmp_path / "saves-{process}.jsonl")
    for process in (0, 3):
        to(report_of(process=process))
    assert sorted(os.listdir(tmp_path)) == ["saves-0.jsonl", "saves-3.jsonl"]


def test_a_line_that_the_disk_has_no_room_for_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, to = os.write, JsonLines(tmp_path / "saves.jsonl")
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20]))
    with pytest.raises(StorageError, match=r"saves.jsonl: 20 of \d+ bytes"):
        to(report_of())
    monkeypatch.undo()
    to(report_of())
    lines = (tmp_path / "saves.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1])["step"] == 7


# --- several, and errors --------------------------------------------------------------------------


def test_each_receiver_is_called_also_after_one_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(report: SaveReport) -> None:
        raise ZeroDivisionError("of the receiver")

    seen: list[SaveReport] = []
    report = saved(tmp_path / "step_7", each(broken, seen.append, broken))
    assert seen == [report]
    assert "2 receivers of metrics failed" in caplog.text
    assert "of the receiver" in caplog.text
    np.testing.assert_array_equal(unickpt.load(tmp_path / "step_7")["w"], TREE["w"])


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, make in [("wandb", WandB), ("mlflow", MLflow)]:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingPackage, match=f"pip install {module}"):
            make()
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(MissingPackage, match="pip install opentelemetry-sdk"):
        OpenTelemetry()


def test_the_core_imports_no_receiver(processes: Processes) -> None:
    source = """
        import sys, unickpt
        from unickpt.integrations import metrics
        named = {"opentelemetry", "wandb", "mlflow", "tensorboard", "tensorboardX", "torch"}
        assert not named & set(sys.modules), named & set(sys.modules)
    """
    assert processes.start(textwrap.dedent(source)).wait() == 0


# --- TensorBoard ----------------------------------------------------------------------------------


class Scalars:
    """A SummaryWriter as far as it is needed."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, int | None]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert tag not in self.found
        self.found[tag] = scalar_value, global_step


def test_any_writer_of_scalars_gets_the_figures_of_process_0(tmp_path: Path) -> None:
    writer = Scalars()
    report = saved(tmp_path / "step_7", TensorBoard(writer, prefix="save"))
    expected = {f"save/{name}": (value, 7) for name, value in figures(report).items()}
    assert writer.found == expected
    TensorBoard(None)(report_of(process=3))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")  # of tensorboard and what it imports
@pytest.mark.parametrize("module", ["torch.utils.tensorboard", "tensorboardX"])
def test_a_real_summary_writer_writes_events(module: str, tmp_path: Path) -> None:
    found: Any = pytest.importorskip(module, exc_type=ImportError)
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with found.SummaryWriter(str(tmp_path / "events")) as writer:
        report = saved(tmp_path / "step_7", TensorBoard(writer))
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    (event,) = events.Scalars("checkpoint/seconds")
    assert event.step == 7
    assert event.value == pytest.approx(report.seconds)
    assert {f"checkpoint/{name}" for name in figures(report)} == set(events.Tags()["scalars"])


# --- OpenTelemetry --------------------------------------------------------------------------------


@pytest.mark.integration
def test_opentelemetry_records_seconds_and_bytes(tmp_path: Path) -> None:
    sdk: Any = pytest.importorskip("opentelemetry.sdk.metrics")
    export: Any = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    to = OpenTelemetry(provider.get_meter("test"), {"run": "a"})
    reports = [saved(tmp_path / f"step_{n}", to) for n in range(2)]
    to(report_of(process=1))
    data = reader.get_metrics_data()
    provider.shutdown()
    (resource_metrics,) = data.resource_metrics
    (scope,) = resource_metrics.scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    (duration,) = found["unickpt.save.duration"].data.data_points
    assert (duration.count, found["unickpt.save.duration"].unit) == (3, "s")
    assert duration.sum == pytest.approx(sum(r.seconds for r in reports) + 0.5)
    assert dict(duration.attributes) == {"run": "a"}
    phases = {p.attributes["phase"]: p for p in found["unickpt.save.phase"].data.data_points}
    assert phases["write"].count == 3
    assert phases["commit"].sum == pytest.approx(sum(r.phases["commit"] for r in reports))
    (written,) = found["unickpt.save.written"].data.data_points
    assert written.value == 3 * 4024
    (size,) = found["unickpt.save.size"].data.data_points
    assert size.value == 4024


@pytest.mark.integration
def test_opentelemetry_has_a_meter_of_its_own() -> None:
    pytest.importorskip("opentelemetry.metrics")
    OpenTelemetry()(report_of())  # to the global provider, which drops it if there is none


# --- Weights & Biases -----------------------------------------------------------------------------


class Run:
    """A run of wandb as far as it is needed."""

    id = "abc"

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], bool | None]] = []
        self.defined: list[tuple[str, str | None]] = []
        self.artifacts: list[Any] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.defined.append((name, step_metric))

    def log(self, row: dict[str, Any], commit: bool | None = None) -> None:
        self.rows.append((row, commit))

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_wandb_refers_to_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = Run()
    path = tmp_path / "run" / "step_7"
    report = saved(path, WandB(run, name="model"))
    (artifact,) = run.artifacts
    facts = {**facts_of(path), **figures(report)}
    assert (artifact.name, artifact.type, dict(artifact.metadata)) == ("model", "checkpoint", facts)
    entries = artifact.manifest.entries
    references = {entry.ref for entry in entries.values() if entry.ref is not None}
    assert f"file://{path}/manifest.ocdbt" in references
    manifest = base64.b64encode(hashlib.md5((path / "manifest.ocdbt").read_bytes()).digest())
    assert manifest.decode() not in {entry.digest for entry in entries.values()}  # nothing is read
    (stored,) = [entry for entry in entries.values() if entry.ref is None]  # all that is uploaded
    assert stored.path == "checkpoint.json"
    assert json.loads(Path(stored.local_path).read_text()) == facts
    ((row, commit),) = run.rows
    assert commit is False  # with the next row of the loop, whose steps it does not disturb
    assert row["checkpoint/step"] == 7
    assert row["checkpoint/seconds"] == report.seconds
    assert run.defined == [("checkpoint/step", None), ("checkpoint/*", "checkpoint/step")]


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_keeps_the_run_and_its_steps(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    source = """
        import os, sys
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        import numpy as np, unickpt, wandb
        from unickpt.integrations.metrics import WandB
        folder = sys.argv[1]
        run = wandb.init(project="p", dir=folder, settings=wandb.Settings(console="off"))
        options = unickpt.SaveOptions(metrics=WandB())
        pending = unickpt.save_async(f"{folder}/step_3", {"w": np.ones(9)}, options=options)
        run.log({"loss": 1.0}, step=10)
        pending.result()
        run.log({"loss": 0.5}, step=11)
        run.finish()
    """
    assert processes.start(textwrap.dedent(source), tmp_path).wait() == 0
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = file.read_bytes()
    for text in (b"checkpoint/seconds", b"manifest_xxh3", b"loss"):
        assert text in written
    assert (facts_of(tmp_path / "step_3")["manifest_xxh3"]).encode() in written


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_wandb_records_the_url_where_it_cannot_refer_to_the_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb: Any = pytest.importorskip("wandb")

    def refuse(*_: object, **__: object) -> None:
        raise ImportError("s3:// references require boto3")

    monkeypatch.setattr(wandb.Artifact, "add_reference", refuse)
    run = Run()
    saved("memory://wandb/step_1", WandB(run))
    (artifact,) = run.artifacts
    assert artifact.metadata["url"] == "memory://wandb/step_1/"
    assert "no reference to its files" in caplog.text


def test_wandb_without_a_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))  # type: ignore[arg-type]
    with pytest.raises(UnickptError, match=r"call wandb.init\(\)"):
        WandB()(report_of())
    WandB()(report_of(process=1))


# --- MLflow ---------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_mlflow_has_the_figures_and_the_reference(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    if store == "sqlite":
        pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)  # mlflow puts its folders there
    uri = f"sqlite:///{tmp_path}/mlflow.db" if store == "sqlite" else f"file://{tmp_path}/mlruns"
    mlflow.set_tracking_uri(uri)
    with mlflow.start_run() as run:
        report = saved(tmp_path / "step_7", MLflow())  # on a thread that knows no active run
    client = mlflow.MlflowClient(uri)
    found = client.get_run(run.info.run_id).data
    expected = {f"checkpoint/{name}": value for name, value in figures(report).items()}
    assert found.metrics == pytest.approx(expected)
    (point,) = client.get_metric_history(run.info.run_id, "checkpoint/seconds")
    assert point.step == 7
    assert found.tags["unickpt.checkpoint"] == report.url
    file = mlflow.artifacts.download_artifacts(
        run_id=run.info.run_id, artifact_path="checkpoints/step_7.json", tracking_uri=uri
    )
    assert json.loads(Path(file).read_text()) == {
        **facts_of(tmp_path / "step_7"),
        **figures(report),
    }


def test_mlflow_without_a_run_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fake = SimpleNamespace(active_run=lambda: None)
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
    saved(tmp_path / "step_1", MLflow())
    assert "no run of MLflow was active" in caplog.text
    assert unickpt.verify(tmp_path / "step_1").ok
