"""Checkpoints on the nodes of a job: saved there, uploaded by each, resumed on any others."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server
from support.processes import Processes
from support.saving import files

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.errors import CheckpointCorrupt, InvalidPath, SaveTimeout
from unickpt.runs import save_leftovers

OPTIONS = SaveOptions(fsync=False, timeout_s=20, chunk_bytes=4096)
LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]  # 10 s for each kill, where 2 cores are busy
JOB = """
import json, sys
from support import node_job
node_job.run(*json.loads(sys.argv[1]))
"""


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(30_000) * (step + 1), "step": step}


class Cluster:
    """Nodes of which each has a folder.

    Arguments:
        processes: starts the job's.
        folder: for all of them.
        root: of the run.
    """

    def __init__(self, processes: Processes, folder: Path, root: str | None = None) -> None:
        self.processes, self.folder = processes, folder
        self.root = root or str(folder / "root")

    def path(self, node: str) -> Path:
        return self.folder / node

    def start(self, nodes: Sequence[str], kind: str = "torch", **order: Any) -> list[Any]:
        folders = [str(self.path(node)) for node in nodes]
        text = json.dumps([kind, self.root, folders, order])
        if kind == "jax":
            return self.processes.jax(len(nodes), 1, JOB, text)
        return self.processes.torch(len(nodes), JOB, text)

    def run(self, nodes: Sequence[str], kind: str = "torch", **order: Any) -> list[str]:
        started = self.start(nodes, kind, **order)
        if order.get("then") != "kill":
            return self.processes.finish(started)
        for process in started:
            out, err = process.communicate(timeout=120)
            assert process.returncode == -signal.SIGKILL, f"{out}\n{err}"
        return []

    def lose(self, node: str) -> None:
        shutil.rmtree(self.path(node))

    def in_root(self) -> list[int]:
        return Checkpointer(self.root).steps()


@pytest.fixture
def cluster(processes: Processes, tmp_path: Path) -> Cluster:
    return Cluster(processes, tmp_path)


# --- one process --------------------------------------------------------------------------------


def test_a_step_is_on_the_node_and_then_in_the_root(tmp_path: Path) -> None:
    root, node = tmp_path / "root", tmp_path / "node"
    with Checkpointer(root, node_local=node, keep_last=2, options=OPTIONS) as run:
        for step in range(4):
            report = run.save(step, state(step)).result()
            assert unickpt.open(report.url).values["step"] == step
            assert report.survives == "the end of all processes"
            assert "survives the end of all processes" in report._repr_html_()
        run.wait()
        assert run.steps() == [2, 3]
        assert run.survives() == dict.fromkeys([2, 3], "all but the loss of the root")
        assert run.load(state(0))["step"] == 3
        assert [p.name for p in node.glob("*/step_*")] == ["step_3"]
    for step in (2, 3):
        loaded = unickpt.load(root / f"step_{step}")
        assert (loaded["w"] == state(step)["w"]).all()
    assert unickpt.verify(root / "step_3").ok


def test_every_nth_step_is_uploaded_and_the_last_one(tmp_path: Path) -> None:
    root, node = tmp_path / "root", tmp_path / "node"
    with Checkpointer(root, node_local=node, upload_every=3, options=OPTIONS) as run:
        for step in range(5):
            run.save(step, state(step), wait=True)
            run.wait()
        assert Checkpointer(root).steps() == [2]
        assert run.steps() == [2, 3, 4]  # no earlier ones once a later one is in the root
        assert run.survives()[4] == "the end of all processes"
        assert run.load(state(0), step=3)["w"][1] == 4
    assert Checkpointer(root).steps() == [2, 4]


def test_the_rate_of_an_upload_is_limited(tmp_path: Path) -> None:
    root, rate, began = tmp_path / "root", 400_000.0, time.monotonic()
    with Checkpointer(
        root, node_local=tmp_path / "node", upload_bytes_per_s=rate, options=OPTIONS
    ) as run:
        run.save(1, state(1))
    uploaded = sum(path.stat().st_size for path in root.glob("step_1/processes/*/00000/d/*"))
    assert uploaded >= state(1)["w"].nbytes
    assert time.monotonic() - began >= uploaded / rate, "it cannot be faster"


def test_a_run_without_its_node_goes_on_from_the_root(tmp_path: Path) -> None:
    root, node = tmp_path / "root", tmp_path / "node"
    run = Checkpointer(root, node_local=node, upload_every=2, options=OPTIONS)
    for step in range(3):
        run.save(step, state(step), wait=True)
    run.wait()
    run._steps.close()  # as if the job were killed
    shutil.rmtree(node)
    with Checkpointer(root, node_local=node, options=OPTIONS) as again:
        assert again.steps() == [1]
        assert again.load(state(0))["step"] == 1
        again.save(2, state(7), wait=True)
        assert again.load(state(0))["step"] == 7
    assert unickpt.load(root / "step_2")["step"] == 7
    assert sorted(p.name for p in (root / ".nodes").glob("step_*")) == ["step_2"]


def test_a_damaged_file_of_the_node_is_read_from_the_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, node = tmp_path / "root", tmp_path / "node"
    with Checkpointer(root, node_local=node, options=OPTIONS) as run:
        run.save(1, state(1), wait=True)
        run.wait()
        (file,) = (path for path in node.glob("*/step_1/processes/*/00000/d/*"))
        data = bytearray(file.read_bytes())
        data[1000] ^= 1
        file.write_bytes(data)
        assert (run.load(state(0))["w"] == state(1)["w"]).all()
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("parity", [None, (4, 1)])
def test_a_lost_file_of_the_node_is_an_error(parity: Any, tmp_path: Path) -> None:
    """With parity, its files are looked for; TensorStore cannot list a stack of stores."""
    root, node = tmp_path / "root", tmp_path / "node"
    options = SaveOptions(fsync=False, chunk_bytes=4096, **({"parity": parity} if parity else {}))
    with Checkpointer(root, node_local=node, upload_every=2, options=options) as run:
        run.save(1, state(1), wait=True)
        run.wait()
        for file in node.glob("*/step_1/processes/*/00000/d/*"):
            file.unlink()
        with pytest.raises(CheckpointCorrupt, match="there is no older step"):
            run.load(state(0))
        run.save(2, state(2), wait=True)
    assert (unickpt.load(root / "step_2")["w"] == state(2)["w"]).all()


def test_files_of_saves_that_failed_go(tmp_path: Path) -> None:
    root, node = tmp_path / "root", tmp_path / "node"
    with Checkpointer(root, node_local=node, options=OPTIONS) as run:
        run.save(1, state(1), wait=True)
        run.wait()
        (folder,) = node.glob("*/step_1/processes")
        shutil.copytree(next(folder.iterdir()), folder / "0123456789abcdef-000000")
        shutil.copytree(folder, folder.parent.parent / "step_9/processes")
        run.save(2, state(2), wait=True)
        run.wait()
        assert not files(folder.parent.parent / "step_9")
        assert len(list(node.glob("*/step_*/processes/*"))) == 1


def test_a_root_that_is_gone_proves_nothing(tmp_path: Path) -> None:
    root, node = tmp_path / "root", tmp_path / "node"
    with Checkpointer(root, node_local=node, upload_every=9, options=OPTIONS) as run:
        run.save(1, state(1), wait=True)
        run.wait()
        root.rename(tmp_path / "elsewhere")  # as if its file system were not mounted
        assert run._copying is not None
        run._copying.start()
        with suppress(unickpt.UnickptError):
            run.wait()
        shutil.rmtree(root, ignore_errors=True)
        (tmp_path / "elsewhere").rename(root)
        assert run.load(state(0))["step"] == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"local": "l"}, ValueError, "local or node_local, not both"),
        ({"reuse": True}, ValueError, "reuse= refers to earlier steps"),
        ({"experts": unickpt.SaveOptions}, ValueError, "must be Experts"),
        ({"options": SaveOptions(base="c")}, ValueError, "refer to earlier steps"),
        ({"upload_every": 0}, ValueError, "upload_every=0 must be an integer, at least 1"),
        ({"upload_bytes_per_s": -1}, ValueError, "must be a positive number"),
        ({"replicas": 2}, ValueError, "replicas=2 must be 0 or 1"),
        ({"replicas": 1}, ValueError, "needs nodes of at least two units"),
        ({"node_local": "memory://n"}, InvalidPath, "must be a folder of each node"),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    options = {"node_local": tmp_path / "node", **arguments}
    with pytest.raises(error, match=text):
        Checkpointer(tmp_path / "root", **options)


def test_options_of_nodes_need_nodes(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'upload_every'"):
        Checkpointer(tmp_path, upload_every=2)


def test_a_process_that_is_missing_is_named(tmp_path: Path) -> None:
    group = unickpt.ProcessGroup(0, 3, "job-1")
    options = SaveOptions(group=group, timeout_s=0.2)
    with pytest.raises(SaveTimeout, match=r"processes 1, 2 did not create the Checkpointer"):
        Checkpointer(tmp_path / "root", node_local=tmp_path / "n", options=options)


def test_a_path_of_a_closed_run_says_so(tmp_path: Path) -> None:
    every = {"node_local": tmp_path / "n", "upload_every": 9, "options": OPTIONS}
    with Checkpointer(tmp_path / "root", **every) as run:
        run.save(1, state(1), wait=True)
        path = run.path(1)
        assert unickpt.load(path)["step"] == 1
    with pytest.raises(InvalidPath, match="is closed"):
        unickpt.load(path)


# --- several nodes ------------------------------------------------------------------------------


def test_a_killed_job_resumes_on_other_numbers_of_nodes(cluster: Cluster) -> None:
    cluster.run(["a", "a", "b", "b"], save=3, then="kill", arguments={"upload_every": 99})
    assert cluster.in_root() == []
    cluster.run(["a", "b"], load=2, then="stop")
    cluster.run(["a", "b", "c"], load=2, then="stop", kind="jax")
    cluster.run(["a", "b", "c"], load=2, save=1)
    assert cluster.in_root() == [0, 1, 2, 3]
    cluster.lose("a")
    cluster.lose("b")
    cluster.run(["d", "e"], load=3, then="stop")


def test_four_nodes_resume_on_six_on_three_and_on_one(cluster: Cluster) -> None:
    settings = {"upload_every": 99, "replicas": 1}
    cluster.run([*"abcd"], save=2, then="kill", waits=1, arguments=settings)
    cluster.run([*"abcdef"], load=1, then="kill", arguments=settings)
    cluster.lose("b")
    cluster.run([*"acd"], "jax", load=1, then="kill", arguments=settings)
    assert cluster.in_root() == []
    cluster.run([*"acd"], load=1, save=1)
    cluster.lose("c")
    cluster.lose("d")
    cluster.run(["a"], load=2, then="stop")


def test_jobs_of_jax_resume_in_torch(cluster: Cluster) -> None:
    cluster.run(["a", "b"], "jax", save=2, then="kill", arguments={"upload_every": 99})
    cluster.run(["b", "a", "c"], load=1, then="stop")


def test_a_lost_node_costs_no_step_that_has_a_copy(cluster: Cluster) -> None:
    settings = {"upload_every": 99, "replicas": 1, "keep_last": 1}
    cluster.run(["a", "b", "c"], save=2, then="kill", waits=1, arguments=settings)
    cluster.lose("b")
    cluster.run(["a", "c"], load=1, save=1, then="kill", waits=1, arguments=settings)
    cluster.lose("a")
    cluster.run(["c", "d"], load=2, then="stop", arguments=settings)


@pytest.mark.parametrize("unit", ["RACK", None])
def test_a_step_survives_the_loss_of_a_unit_of_several_nodes(
    cluster: Cluster, unit: str | None
) -> None:
    settings = {"upload_every": 99, "replicas": 1, "unit": unit}
    racks = ["left", "left", "right", "right"]
    cluster.run([*"abcd"], save=2, then="kill", waits=1, arguments=settings, racks=racks)
    cluster.lose("a")
    cluster.lose("b")
    if unit is None:  # the copies of one are on the other
        with pytest.raises(AssertionError, match="latest"):
            cluster.run([*"cd"], load=1, then="stop", arguments=settings)
    else:
        racks = ["right", "right", "new"]
        cluster.run([*"cde"], load=1, then="stop", arguments=settings, racks=racks)
    assert cluster.in_root() == []


@pytest.mark.parametrize(
    ("parity", "lost", "kind"),
    [((8, 1), "b", "torch"), ((2, 1), "d", "jax"), ((16, 2), "bd", "torch")],
)
def test_a_lost_node_is_restored_from_sums_on_others(
    parity: tuple[int, int], lost: str, kind: str, cluster: Cluster
) -> None:
    options = {"parity": parity}
    settings: Any = {"arguments": {"upload_every": 99, "keep_last": 1}, "options": options}
    outputs = cluster.run(list("abbcd"), save=2, then="stop", waits=1, **settings)
    losses = "a node" if len(lost) == 1 else "2 nodes"
    assert all(f"1: 'the loss of {losses}'" in text for text in outputs), outputs
    assert not list(cluster.path("root").glob("step_*"))
    for node in lost:
        cluster.lose(node)
    left = sorted({*"abcd"} - {*lost})
    # Without the option, too; then on other nodes and as many, with sums of the restored files.
    settings["options"] = {}
    cluster.run([*left, "e"], load=1, then="stop", kind=kind, **settings)
    settings["options"] = options
    cluster.run([*left, "e", "f"], load=1, then="kill", waits=1, **settings)
    cluster.lose(left[0])
    cluster.run([*left[1:], "e", "f"], load=1, save=1, **settings)
    assert cluster.in_root() == [2]


def test_more_lost_nodes_than_sums_cost_the_step(cluster: Cluster) -> None:
    settings: Any = {
        "arguments": {"upload_every": 2, "keep_last": 2},
        "options": {"parity": (8, 1)},
    }
    cluster.run(list("abc"), save=3, then="kill", waits=1, **settings)
    assert cluster.in_root() == [1]
    cluster.lose("a")
    cluster.lose("b")
    out = cluster.run(["c", "d"], load=1, then="stop", **settings)
    assert any("resumed 1" in text for text in out)


def test_a_damaged_sum_restores_nothing(cluster: Cluster) -> None:
    settings: Any = {
        "arguments": {"upload_every": 2, "keep_last": 2},
        "options": {"parity": (8, 1)},
    }
    cluster.run(list("abc"), save=3, then="kill", waits=1, **settings)
    for path in cluster.folder.glob("*/*/step_2/processes/*/sum-*/sum"):
        data = bytearray(path.read_bytes())
        data[7] ^= 1
        path.write_bytes(data)
    cluster.lose("a")
    cluster.run(["b", "c"], load=1, then="stop", **settings)


def test_an_upload_that_was_interrupted_is_resumed(cluster: Cluster) -> None:
    slow = {"upload_bytes_per_s": 20_000.0}
    started = cluster.start(["a", "b"], save=1, arguments=slow)
    while not list(cluster.path("root").glob("step_0/processes/*/0000?/d/*")):
        time.sleep(0.01)
    for process in started:
        process.kill()
        process.communicate()
    first = {path: os.stat(path).st_ino for path in cluster.path("root").glob("step_0/**/d/*")}
    assert cluster.in_root() == []
    cluster.run(["a", "b"], load=0, save=1)
    assert cluster.in_root() == [0, 1]
    assert {path: os.stat(path).st_ino for path in first} == first


def test_the_root_may_be_a_bucket(
    processes: Processes, tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(moto, monkeypatch)
    bucket = f"nodes-{secrets.token_hex(4)}"
    s3_server.make_bucket(moto, bucket)
    cluster = Cluster(processes, tmp_path, f"s3://{bucket}/run")
    cluster.run(["a", "b"], save=2)
    assert cluster.in_root() == [0, 1]
    cluster.lose("b")
    cluster.run(["a", "c"], load=1, then="stop")
    s3_server.remove_bucket(moto, bucket)


@pytest.mark.parametrize(
    ("order", "left", "is_read"),
    [
        ({}, "abc", False),
        ({"arguments": {"replicas": 1}}, "ac", False),
        ({"options": {"parity": (8, 1)}}, "ac", False),
        ({}, "ac", True),
    ],
    ids=["all nodes", "a node less, with a copy", "with parity", "with neither"],
)
def test_array_data_of_the_root_are_read_only_where_no_node_has_them(
    order: dict[str, Any],
    left: str,
    is_read: bool,
    processes: Processes,
    tmp_path: Path,
    moto: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3_server.use(moto, monkeypatch)
    bucket = f"nodes-{secrets.token_hex(4)}"
    s3_server.make_bucket(moto, bucket)
    cluster = Cluster(processes, tmp_path, f"s3://{bucket}/run")
    cluster.run(["a", "b", "c"], save=2, **order)
    assert cluster.in_root() == [0, 1]
    for node in {*"abc"} - {*left}:
        cluster.lose(node)
    with s3_server.requests() as requests:
        cluster.run([*left, "d"], load=1, then="stop", **order)
    data = re.compile(rf"/{bucket}/run/step_1/processes/[^/]+/\d{{5}}/")
    keys = [r.key for r in requests if r.method == "GET" and data.match(r.key)]
    assert bool(keys) == is_read, keys
    s3_server.remove_bucket(moto, bucket)


@pytest.mark.parametrize(
    ("count", "kills", "protection"),
    [
        (3, 3, "replicas"),
        (8, 2, "parity"),
        *(
            pytest.param(count, 60, protection, marks=LONG)
            for count in (2, 3, 8)
            for protection in ("replicas", "parity")
        ),
    ],
)
def test_a_node_that_dies_at_any_moment_costs_at_most_one_step(
    count: int, kills: int, protection: str, cluster: Cluster
) -> None:
    """All processes are killed, because a job of collectives ends with any; one node is lost."""
    random_moment, least = random.Random(f"{count} {kills}"), -1
    nodes = [f"n{number}" for number in range(count)]
    settings: dict[str, Any] = {"upload_every": 10_000, "keep_last": 2}
    options: dict[str, Any] = {}
    if protection == "replicas":
        settings["replicas"] = 1
    else:
        options["parity"] = (8, 1)
    for kill in range(kills):
        marks = cluster.folder / f"marks{kill}"  # written when what was resumed has copies again
        order = {"save": 1000, "arguments": settings, "options": options, "marks": str(marks)}
        started = cluster.start(nodes, **order)
        while len(list(cluster.folder.glob(f"{marks.name}-*"))) < len(nodes):
            assert all(process.poll() is None for process in started)
            time.sleep(0.02)
        time.sleep(random_moment.uniform(0.0, 1.5))
        for process in started:
            process.send_signal(signal.SIGKILL)
        outputs = [process.communicate()[0] for process in started]
        lines = [line.split() for out in outputs for line in out.splitlines()]
        resumed = [int(words[1]) for words in lines if words[0] == "resumed"]
        assert all(step >= least for step in resumed), (kill, resumed, least)
        saved = [int(words[1]) for words in lines if words[0] == "saved"]
        least = max([least, *(step - 1 for step in saved)])
        lost = random_moment.choice(nodes)
        if cluster.path(lost).exists():
            cluster.lose(lost)
        nodes = [node for node in nodes if node != lost] + [f"n{kill + count}"]
        print(
            f"kill {kill}: resumed {resumed[:1]}, saved {max(saved, default=None)}, {lost} is lost"
        )
    assert least > 0 or kills < 10, "no job saved"


def test_a_failed_upload_is_resumed_with_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unickpt.plugins.nodes import uploads

    root, whole = tmp_path / "root", uploads.copy_files

    def failing(*arguments: Any) -> None:
        monkeypatch.setattr(uploads, "copy_files", whole)
        raise OSError("the storage failed once")

    monkeypatch.setattr(uploads, "copy_files", failing)
    with Checkpointer(root, node_local=tmp_path / "node", options=OPTIONS) as run:
        run.save(1, state(1))
        with pytest.raises(OSError, match="failed once"):
            run.wait()
        run.save(2, state(2))
    assert Checkpointer(root).steps() == [1, 2]
    for step in (1, 2):
        assert unickpt.verify(root / f"step_{step}").ok


def test_an_interrupted_upload_whose_files_were_cleaned_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unickpt.plugins.nodes import uploads

    root, node = tmp_path / "root", tmp_path / "node"

    def killed(*_: Any) -> None:
        raise OSError("killed")

    run = Checkpointer(root, node_local=node, options=OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "copy_files", killed)
        run.save(1, state(1))
        with pytest.raises(OSError, match="killed"):
            run.wait()
    run._steps.close()
    for path in root.rglob("*"):
        os.utime(path, (0, 0))
    (orphan,) = save_leftovers.find(root).orphans
    assert save_leftovers.clean(root, [orphan]) == [orphan]
    Checkpointer(root, node_local=node, options=OPTIONS).close()
    assert (unickpt.load(root / "step_1")["w"] == state(1)["w"]).all()
    assert unickpt.verify(root / "step_1").ok
