"""Functions for SaveOptions(metrics=); those of docs/metrics.md with the real packages."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forks import Forks
from support.pages import snippets
from support.processes import Processes

import unickpt
from unickpt import SaveOptions
from unickpt.errors import StorageError
from unickpt.integrations.metrics import JsonLines, each, figures, reference, step_of
from unickpt.storage.database import digest_of
from unickpt.types import SaveReport

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
    lines = [json.loads(line) for line in (tmp_path / "saves.jsonl").read_text().splitlines()]
    assert [line.get("kind") for line in lines] == ["began", "step", None, "ended"]
    assert lines[2]["metrics"] == {"loss": 0.5, "norm": "nan"}


def test_a_reference_says_which_checkpoint_it_is(tmp_path: Path) -> None:
    report = saved(tmp_path / "step_7", None)
    assert reference(report) == {**facts_of(tmp_path / "step_7"), **figures(report)}
    assert reference(report, step=lambda report: 9)["step"] == 9
    assert reference(report_of("memory://none/step_7"))["manifest_xxh3"] is None


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
        from unickpt.types import SaveReport
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


def test_the_core_imports_no_receiver(processes: Processes) -> None:
    source = """
        import sys, unickpt
        from unickpt.integrations import metrics
        named = {"opentelemetry", "wandb", "mlflow", "tensorboard", "tensorboardX", "torch"}
        assert not named & set(sys.modules), named & set(sys.modules)
    """
    assert processes.start(textwrap.dedent(source)).wait() == 0


# --- the snippets of docs/metrics.md --------------------------------------------------------------


def snippet(function: str) -> str:
    """The snippet that defines a function."""
    (found,) = (s.text for s in snippets("docs/metrics.md") if f"def {function}(" in s.text)
    return found


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")  # of tensorboard and what it imports
@pytest.mark.parametrize("module", ["torch.utils.tensorboard", "tensorboardX"])
def test_tensorboard(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(module, exc_type=ImportError)
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(snippet("to_tensorboard").replace("torch.utils.tensorboard", module), names)
    report = saved(tmp_path / "step_7", names["to_tensorboard"])
    names["to_tensorboard"](report_of(process=3))
    names["writer"].close()
    events = EventAccumulator("events").Reload()
    (event,) = events.Scalars("checkpoint/seconds")
    assert (event.step, event.value) == (7, pytest.approx(report.seconds))
    assert {f"checkpoint/{name}" for name in figures(report)} == set(events.Tags()["scalars"])


@pytest.mark.integration
def test_opentelemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk: Any = pytest.importorskip("opentelemetry.sdk.metrics")
    export: Any = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    monkeypatch.setattr("opentelemetry.metrics.get_meter", provider.get_meter)
    names: dict[str, Any] = {"unickpt": unickpt}
    exec(snippet("to_opentelemetry"), names)
    report = saved(tmp_path / "step_1", names["to_opentelemetry"])
    names["to_opentelemetry"](report_of(process=1))
    data = reader.get_metrics_data()
    provider.shutdown()
    (scope,) = data.resource_metrics[0].scope_metrics
    points = {metric.name: metric.data.data_points for metric in scope.metrics}
    assert points["unickpt.save.duration"][0].sum == pytest.approx(report.seconds + 0.5)
    phases = {point.attributes["phase"]: point for point in points["unickpt.save.phase"]}
    assert phases["write"].sum == pytest.approx(report.phases["write"] + 0.25)
    assert points["unickpt.save.written"][0].value == 2 * 4024


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_wandb(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    source = f"""
import os, sys
os.environ |= {{"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}}
os.chdir(sys.argv[1])
import numpy as np, unickpt
{snippet("to_wandb")}
options = unickpt.SaveOptions(metrics=to_wandb)
pending = unickpt.save_async(sys.argv[1] + "/step_3", {{"w": np.ones(9)}}, options=options)
run.log({{"loss": 1.0}}, step=10)
pending.result()
run.log({{"loss": 0.5}}, step=11)
run.finish()
"""
    process = processes.start(source, tmp_path)
    assert process.wait() == 0, process.communicate()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = file.read_bytes()
    for text in (b"checkpoint/seconds", b"manifest_xxh3", b"manifest.ocdbt", b"loss"):
        assert text in written
    assert (facts_of(tmp_path / "step_3")["manifest_xxh3"]).encode() in written


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)  # mlflow puts its folders there
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    names: dict[str, Any] = {}
    exec(snippet("to_mlflow"), names)
    report = saved(tmp_path / "step_7", names["to_mlflow"])  # on a thread without an active run
    mlflow.end_run()
    client, run_id = mlflow.MlflowClient(uri), names["run_id"]
    expected = {f"checkpoint/{name}": value for name, value in figures(report).items()}
    assert client.get_run(run_id).data.metrics == pytest.approx(expected)
    (point,) = client.get_metric_history(run_id, "checkpoint/seconds")
    assert point.step == 7
    file = mlflow.artifacts.download_artifacts(
        run_id=run_id, artifact_path="checkpoints/step_7.json", tracking_uri=uri
    )
    assert json.loads(Path(file).read_text()) == reference(report)
