"""`unickpt.report`: facts of a run or a checkpoint, in a page that nothing can break out of."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server
from support.forging import array, forge, forge_index, index_of
from support.format_1 import unpacked
from support.report_cases import EVIL, forge_evil, forge_step, large_timing
from support.saving import save_in_job

import unickpt
from unickpt import Checkpointer, CheckpointNotFound, SaveOptions, StorageError
from unickpt.errors import InvalidPath, UnickptError
from unickpt.format.timing import TIMING_KEY
from unickpt.integrations.metrics import JsonLines
from unickpt.plugins.report import html_report
from unickpt.types import Mesh


def data_of(file: Path) -> Any:
    """What a page shows."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', file.read_text())
    assert found is not None
    return json.loads(found[1])


def reported(path: Path | str, out: Path, **options: Any) -> Any:
    return data_of(unickpt.report(path, out / "report.html", **options))


def by_name(data: Any) -> dict[str, Any]:
    return {step["name"]: step for step in data["steps"]}


def save_run(root: Path, steps: int = 5, **options: Any) -> None:
    state = {"w": np.arange(300_000.0), "frozen": np.arange(500_000.0)}
    with Checkpointer(root, reuse=True, **options) as checkpointer:
        for step in range(1, steps + 1):
            state["w"] += 1
            checkpointer.save(step, state, metrics={"loss": 1 / step}, wait=True)


def test_a_run_has_what_each_step_is_and_what_it_shares(tmp_path: Path) -> None:
    save_run(tmp_path / "run", 3, options=SaveOptions(timing=True))
    data = reported(tmp_path / "run", tmp_path)
    assert data["is_run"]
    assert [step["name"] for step in data["steps"]] == ["step_1", "step_2", "step_3"]
    first, second, third = data["steps"]
    assert (first["bytes"], first["new"]) == (6_400_000, 6_400_000)
    assert (second["bytes"], second["new"]) == (6_400_000, 2_400_000)
    (loss,) = data["metrics"]
    assert (loss["name"], loss["values"]) == ("loss", [1, 0.5, 0.333333])
    timing = unickpt.open(tmp_path / "run" / "step_3").timing
    assert timing is not None
    assert third["durations"]["merged"] == timing.merged
    assert third["durations"]["done"] == float(timing.done.max())
    assert third["rate"] == pytest.approx(2_400_000 / float(timing.done.max()))
    assert third["waited"] == pytest.approx(timing.merged), "the call returned after the commit"
    assert [detail["name"] for detail in data["details"]] == ["step_3", "step_2", "step_1"]
    assert data["arrays"]["of"] == "step_3"


def test_removed_steps_are_those_that_were_told_of_and_are_not_there(tmp_path: Path) -> None:
    lines = tmp_path / "saves.jsonl"
    save_run(
        tmp_path / "run", 5, keep_last=2, options=SaveOptions(metrics=JsonLines(lines), timing=True)
    )
    steps = by_name(reported(tmp_path / "run", tmp_path, metrics=lines))
    states = {name: step["state"] for name, step in steps.items()}
    assert states == {
        "step_1": "removed",
        "step_2": "removed",
        "step_3": "removed",
        "step_4": "stored",
        "step_5": "stored",
    }
    assert list(steps) == sorted(steps)
    told = [line for line in map(json.loads, lines.read_text().splitlines()) if "kind" not in line]
    assert steps["step_5"]["committed"] == told[-1]["seconds"]
    assert steps["step_2"]["bytes"] == 6_400_000
    assert steps["step_2"]["waited"] == told[1]["blocked_s"]
    assert [*by_name(reported(tmp_path / "run", tmp_path))] == ["step_4", "step_5"]


def test_metrics_are_those_of_all_steps_that_are_known_and_also_nan(tmp_path: Path) -> None:
    lines = tmp_path / "saves.jsonl"
    given = {1: {"loss": 2.0}, 2: {"loss": math.nan}, 3: {"acc": 0.5}, 4: {"loss": -math.inf}}
    options = SaveOptions(metrics=JsonLines(lines), timing=True)
    with Checkpointer(tmp_path / "run", keep_last=1, options=options) as checkpointer:
        for step, metrics in given.items():
            checkpointer.save(step, {"w": np.ones(3)}, metrics=metrics, wait=True)
    loss, acc = reported(tmp_path / "run", tmp_path, metrics=lines)["metrics"]
    assert loss == {
        "name": "loss",
        "values": [2, "nan", None, "-inf"],
        "lowest": 0,
        "highest": 0,
        "better": "lowest",
    }
    assert (acc["values"], acc["better"]) == ([None, None, 0.5, None], "highest")
    stored = reported(tmp_path / "run", tmp_path)
    assert [one["values"] for one in stored["metrics"]] == [["-inf"]], "without what was told"
    assert stored["headline"] == {"level": "bad", "text": "loss is infinite since step_4."}


def test_of_very_many_metrics_some_are_left_out(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"w": np.ones(3)}, metrics={f"m{n}": n for n in range(30)}, wait=True)
    data = reported(tmp_path / "run", tmp_path)
    assert [one["name"] for one in data["metrics"]] == [f"m{n}" for n in range(24)]
    assert data["more_metrics"] == 6


def test_what_steps_share_is_counted_once_on_the_disk(tmp_path: Path) -> None:
    save_run(tmp_path / "run", 3)
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    sizes = {file.stat().st_ino: file.stat().st_size for file in files}
    data = reported(tmp_path / "run", tmp_path)
    assert data["on_disk"] == sum(sizes.values())
    assert 11_200_000 < data["on_disk"] < 11_300_000, "6.4 MB, and twice 2.4 MB that are new"
    assert sum(step["bytes"] for step in data["steps"]) == 3 * 6_400_000
    assert reported(tmp_path / "run" / "step_3", tmp_path)["on_disk"] is None


def test_what_saving_cost_is_the_waits_by_the_time_between_the_calls(tmp_path: Path) -> None:
    lines = tmp_path / "saves.jsonl"
    save_run(
        tmp_path / "run", 4, keep_last=1, options=SaveOptions(metrics=JsonLines(lines), timing=True)
    )
    told = [line for line in map(json.loads, lines.read_text().splitlines()) if "kind" not in line]
    asked = [datetime.fromisoformat(of["time"]).timestamp() - of["seconds"] for of in told]
    cost = reported(tmp_path / "run", tmp_path, metrics=lines)["cost"]
    assert cost["total"] == pytest.approx(asked[-1] - asked[0])
    assert cost["waited"] == pytest.approx(sum(of["blocked_s"] for of in told[:-1]))
    assert 0.5 < cost["waited"] / cost["total"] < 1, "each call returned after the commit"
    assert not cost["is_least"]
    assert reported(tmp_path / "run", tmp_path)["cost"] is None, "one step alone"


def test_what_was_told_of_an_earlier_save_of_a_step_is_not_said_of_this_one(tmp_path: Path) -> None:
    lines, path = tmp_path / "saves.jsonl", tmp_path / "run" / "step_1"
    told = SaveOptions(metrics=JsonLines(lines), timing=True)
    unickpt.save(path, {"w": np.ones(3)}, options=told)
    unickpt.save(path, {"w": np.ones(4)}, overwrite=True)
    step = by_name(reported(tmp_path / "run", tmp_path, metrics=[lines]))["step_1"]
    assert (step["committed"], step["bytes"]) == (None, 32)
    unickpt.save(path, {"w": np.ones(5)}, overwrite=True, options=told)
    step = by_name(reported(tmp_path / "run", tmp_path, metrics=[lines]))["step_1"]
    assert (step["saved_times"], step["bytes"]) == (2, 40)
    assert step["committed"] > 0


def test_what_was_told_before_a_step_was_committed_is_not_of_it(tmp_path: Path) -> None:
    lines, path = tmp_path / "saves.jsonl", tmp_path / "run" / "step_1"
    unickpt.save(
        path, {"w": np.ones(3)}, options=SaveOptions(metrics=JsonLines(lines), timing=True)
    )
    shutil.rmtree(path)
    index, table = index_of(array("w", (3,), dtype="float64"), created="2999-01-01T00:00:00+00:00")
    forge_index(path, index, table)
    step = by_name(reported(tmp_path / "run", tmp_path, metrics=lines))["step_1"]
    assert (step["bytes"], step["committed"]) == (24, None)


def test_a_run_on_object_storage_is_like_one_on_a_disk(
    moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "reportbucket")
    lines = tmp_path / "saves.jsonl"
    options = SaveOptions(metrics=JsonLines(lines), timing=True)
    with Checkpointer("s3://reportbucket/run", keep_last=1, options=options) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": np.ones(4000)}, wait=True)
    data = reported("s3://reportbucket/run", tmp_path, metrics=lines)
    states = {name: step["state"] for name, step in by_name(data).items()}
    assert states == {"step_1": "removed", "step_2": "stored"}
    assert [detail["name"] for detail in data["details"]] == ["step_2"]
    assert data["on_disk"] == 32_000, "the objects that hold arrays, by their names"
    data = reported("s3://reportbucket/run/step_2", tmp_path, metrics=lines)
    assert data["steps"][0]["committed"] > 0


def test_lines_of_other_runs_and_broken_ones_are_counted_and_not_shown(tmp_path: Path) -> None:
    lines = tmp_path / "saves.jsonl"
    told = SaveOptions(metrics=JsonLines(lines), timing=True)
    for run in ("run", "other"):
        unickpt.save(tmp_path / run / "step_1", {"w": np.ones(3)}, options=told)
    whole = lines.read_bytes().splitlines()[0]
    for broken in (whole[:40], b"[]", b'{"time": 3}', b'{"a":' * 5000, b"\xff"):
        lines.write_bytes(lines.read_bytes() + broken + b"\n")
    data = reported(tmp_path / "run", tmp_path, metrics=lines)
    assert [*by_name(data)] == ["step_1"]
    assert data["notes"][0].startswith("1 line is of saves elsewhere, and not shown: file:///")
    assert data["notes"][1] == "5 lines of the files of metrics could not be understood"


def test_loads_are_shown_as_their_reports_say(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "saves.jsonl")
    save_run(tmp_path / "run", 1)
    like = {"w": np.zeros(300_000), "head": np.zeros(2)}
    _, report = unickpt.load(tmp_path / "run" / "step_1", like, strict=False, return_report=True)
    lines(report)
    _, elsewhere = unickpt.load(unpacked() / "linked", return_report=True)
    lines(elsewhere)
    data = reported(tmp_path / "run", tmp_path, metrics=tmp_path / "saves.jsonl")
    (load,) = data["loads"]
    assert load["name"] == "step_1"
    assert load["counts"] == {"loaded": 1, "kept": 1, "skipped": 1}
    assert ["kept", "head", "not stored, `like` keeps its value"] in load["rows"]
    assert data["notes"] == ["1 load is of other checkpoints, and not shown"]


def test_the_timing_of_a_step_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    save_in_job(tmp_path / "step", 3, lambda index: {"w": np.arange(50_000.0)})
    data = reported(tmp_path / "step", tmp_path)
    assert not data["is_run"]
    (detail,) = data["details"]
    timing = unickpt.open(tmp_path / "step").timing
    assert timing is not None
    assert detail["processes"] == 3
    assert detail["written"] == timing.written.tolist()
    scaled = np.array(detail["write_s"]) / detail["unit"]
    assert scaled == pytest.approx(timing.seconds["write"].tolist(), abs=1e-5)
    assert "reused" not in detail, "columns of zeros are left out"


def test_arrays_have_their_layouts_and_maps(tmp_path: Path) -> None:
    mesh = Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))
    forge_step(tmp_path / "step", large_timing(4), 8, mesh)
    arrays = reported(tmp_path / "step", tmp_path)["arrays"]
    rows = {row[0]: row for row in arrays["rows"]}
    dtype, shape, size, layout, fragments, number = rows["params/layers/0/mlp/down"][1:]
    assert (dtype, shape, size) == ("bfloat16", "53248 × 16384", 2 * 53248 * 16384)
    assert (arrays["layouts"][layout], fragments) == ("(tp, dp)", 4)
    drawn = arrays["maps"][number]
    cells = [[drawn["labels"][owner][0] for owner in row] for row in drawn["owner"]]
    assert cells == [["p0", "p2"], ["p1", "p3"]]
    assert drawn["down"] == ["0:26624", "26624:53248"]
    assert [row[3] for row in arrays["rows"]] == sorted(
        (row[3] for row in arrays["rows"]), reverse=True
    )


def test_thousands_of_processes_and_arrays_are_a_page_of_a_few_megabytes(tmp_path: Path) -> None:
    mesh = Mesh(("pp", "dp", "tp"), (8, 64, 8), tuple(range(4096)))
    for step in range(1, 7):
        (tmp_path / "run").mkdir(exist_ok=True)
        forge_step(tmp_path / "run" / f"step_{step}", large_timing(4096), 2000, mesh, step=step)
    out = unickpt.report(tmp_path / "run", tmp_path / "report.html")
    assert out.stat().st_size < 4_000_000
    data = data_of(out)
    assert len(data["steps"]) == 6
    assert [detail["name"] for detail in data["details"]][:2] == ["step_6", "step_5"]
    assert 2 <= len(data["details"]) < 6
    assert len(data["arrays"]["rows"]) == 2000
    (mesh_of,) = data["details"][0]["meshes"]
    assert mesh_of == {"axes": ["pp", "dp", "tp"], "shape": [8, 64, 8], "processes": None}


def test_checkpoints_of_others_have_arrays_and_no_timing(tmp_path: Path) -> None:
    np.savez(tmp_path / "state.npz", w=np.ones((3, 4)))
    data = reported(tmp_path / "state.npz", tmp_path)
    assert data["details"] == []
    assert data["arrays"]["rows"][0][:4] == ["w", "float64", "3 × 4", 96]


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    save_run(tmp_path / "run", 2)
    index, table = index_of(array("w", (3,)))
    forge_index(tmp_path / "run" / "step_3", index, table, **{TIMING_KEY: b"no timing"})
    forge(tmp_path / "run" / "step_4", {"unickpt.json": b"{"})
    steps = by_name(reported(tmp_path / "run", tmp_path))
    assert "checksum" in steps["step_3"]["error"]
    assert (steps["step_3"]["bytes"], steps["step_3"]["durations"]) == (12, None)
    assert steps["step_4"]["state"] == "unreadable"
    assert "index" in steps["step_4"]["error"]


def test_what_failed_saves_left_is_listed(tmp_path: Path) -> None:
    save_run(tmp_path / "run", 1)
    left = tmp_path / "run" / "step_9" / "processes" / "job-000000" / "00000" / "d"
    left.mkdir(parents=True)
    (left / "x").write_bytes(bytes(100))
    (row,) = reported(tmp_path / "run", tmp_path)["left"]
    assert row["name"] == "step_9"
    assert (row["what"], row["files"], row["bytes"]) == ("may be under way", 1, 100)


def test_nothing_in_a_checkpoint_can_break_out_of_the_data(tmp_path: Path) -> None:
    forge_evil(tmp_path / "run" / "step_1")
    out = unickpt.report(tmp_path / "run", tmp_path / "report.html")
    text = out.read_text()
    assert text.isascii() or not re.search("[\u2028\u202e]", text)
    elements = Elements(text)
    assert elements.scripts == 2
    assert "img" not in elements.tags
    data = data_of(out)
    assert "<" not in text[text.index('id="data">') + 10 :].partition("</script>")[0]
    assert data["arrays"]["rows"][0][0] == EVIL.replace("\u2028", " ").replace("\u202e", " ")


def test_only_the_page_s_own_script_and_styles_may_run_and_nothing_is_fetched(
    tmp_path: Path,
) -> None:
    unickpt.save(tmp_path / "step", {"w": np.ones(3)})
    text = unickpt.report(tmp_path / "step", tmp_path / "report.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules["default-src"] == "'none'"
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert re.findall(r"(?:https?:)?//[a-z]", re.sub(r"file:///", "", text)) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_an_existing_report_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "report.html"
    out.parent.mkdir()
    out.write_text("the old one")
    unickpt.save(tmp_path / "step", {"w": np.ones(3)})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(html_report.os, "replace", full)
    with pytest.raises(StorageError, match=r"report\.html: the report cannot be written.*No space"):
        unickpt.report(tmp_path / "step", out)
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    assert out.read_text() == "the old one"
    monkeypatch.undo()
    assert unickpt.report(tmp_path / "step", out) == out
    assert out.read_text().startswith("<!doctype html>")


def test_a_report_is_written_where_a_link_leads(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "step", {"w": np.ones(3)})
    (tmp_path / "link.html").symlink_to(tmp_path / "report.html")
    for _ in range(2):
        assert unickpt.report(tmp_path / "step", tmp_path / "link.html") == tmp_path / "link.html"
        assert (tmp_path / "link.html").is_symlink()
        assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "step", {"w": np.ones(3)})
    with pytest.raises(InvalidPath, match="is a folder"):
        unickpt.report(tmp_path / "step", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidPath, match="is a device, pipe or socket"):
        unickpt.report(tmp_path / "step", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(InvalidPath, match="local file"):
        unickpt.report(tmp_path / "step", "s3://bucket/report.html")
    with pytest.raises(StorageError, match="cannot be written"):
        unickpt.report(tmp_path / "step", tmp_path / "missing" / "report.html")
    with pytest.raises(CheckpointNotFound):
        unickpt.report(tmp_path / "nothing", tmp_path / "report.html")
    with pytest.raises(UnickptError, match=r"no\.jsonl: the file of metrics cannot be read"):
        unickpt.report(tmp_path / "step", tmp_path / "report.html", metrics=tmp_path / "no.jsonl")
    assert not (tmp_path / "report.html").exists()


class Elements(HTMLParser):
    """The tags of a page as browsers see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.scripts = set[str](), 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.scripts += tag == "script"
        assert not any(name.startswith("on") for name, _ in attrs)
