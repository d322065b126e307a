"""Experts on two levels: nodes have all of a step, and its copy in the root only some of them."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes

import unickpt
from unickpt import Checkpointer, Experts, SaveOptions

KEY = "experts/{x}/up"
OPTIONS = SaveOptions(fsync=False, timeout_s=30, chunk_bytes=4096)
JOB = """
import json, sys
from support import expert_job
expert_job.run(*json.loads(sys.argv[1]))
"""


class Job:
    """A job on nodes that each have a folder and two experts of eight.

    Arguments:
        processes: starts it.
        folder: for all of them.
    """

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._processes, self._folder, self.root = processes, folder, folder / "root"

    def run(self, nodes: Sequence[str], **order: Any) -> list[str]:
        folders = [str(self._folder / node) for node in nodes]
        text = json.dumps([str(self.root), folders, order])
        started = self._processes.torch(len(nodes), JOB, text)
        if order.get("then") != "kill":
            return self._processes.finish(started)
        printed = []
        for process in started:
            out, err = process.communicate(timeout=120)
            assert process.returncode == -signal.SIGKILL, f"{out}\n{err}"
            printed.append(out)
        return printed

    def lose(self, node: str) -> None:
        shutil.rmtree(self._folder / node)

    def in_root(self, step: int) -> dict[int, int]:
        """The step of each expert's values in the root, which are those that it records."""
        stored = unickpt.open(self.root / f"step_{step}")
        recorded = stored.metadata["unickpt"]["experts"]["steps"][KEY]
        tree = unickpt.load(self.root / f"step_{step}")
        values = {int(n): int(e["up"][0, 0]) for n, e in tree["experts"].items()}
        assert values == {int(n): s for n, s in recorded.items()}
        for expert in tree["experts"].values():
            assert len(np.unique(expert["up"])) == 1
        return values


@pytest.fixture
def job(processes: Processes, tmp_path: Path) -> Job:
    return Job(processes, tmp_path)


def resumed(printed: str) -> dict[int, int]:
    """The step of each expert that a process has after it resumed."""
    line = next(line for line in printed.splitlines() if line.startswith("experts "))
    return {int(n): s for n, s in json.loads(line.removeprefix("experts ")).items()}


def at(steps: Mapping[int, Sequence[int]]) -> dict[int, int]:
    return dict(sorted((n, step) for step, numbers in steps.items() for n in numbers))


def test_the_root_gets_some_experts_of_each_step(tmp_path: Path) -> None:
    root = tmp_path / "root"
    experts = Experts({"experts/{x}/up": 1})
    state = {"experts": {str(x): {"up": np.zeros(3000)} for x in range(3)}, "dense": np.zeros(9)}
    with Checkpointer(
        root, node_local=tmp_path / "node", experts=experts, keep_last=2, options=OPTIONS
    ) as run:
        for step in range(1, 6):
            for expert in state["experts"].values():
                expert["up"] += 1
            report = run.save(step, state, tokens={"experts": [step * 10] * 3}).result()
            run.wait()
            assert report.written_bytes == report.bytes  # the node has all
            loaded, report = run.load(return_report=True)
            assert not report.older_experts
            assert all((e["up"] == step).all() for e in loaded["experts"].values())
            if step == 1:
                continue
            copy, report = unickpt.load(root / f"step_{step}", return_report=True)
            assert len(report.older_experts) == 2
            ages = [step - int(e["up"][0]) for e in copy["experts"].values()]
            assert sorted(ages) == [0, 1, min(2, step - 1)] if step > 2 else [0, 1, 1]
        lost = unickpt.open(root / "step_5").metadata["unickpt"]["experts"]["plt"]
        assert lost == (10 + 20) / 150
    assert unickpt.verify(root / "step_5").ok
    sizes = [f.stat().st_size for f in (root / "step_5").rglob("d/*") if "root" not in f.parts]
    assert sum(sizes) < 2 * 3000 * 8
    assert Checkpointer(root).steps() == [4, 5]


def test_experts_of_surviving_nodes_are_newer(job: Job) -> None:
    job.run("abcd", save=3, then="kill")
    assert job.in_root(3) == at({1: [4, 5, 6, 7], 2: [0, 1], 3: [2, 3]})
    job.lose("c")
    printed = job.run("abd", load=3, save=0)
    expected = at({3: [0, 1, 2, 3, 6, 7], 1: [4, 5]})
    assert [resumed(out) for out in printed] == [expected] * 3
    assert job.in_root(3) == at({1: [4, 5, 6, 7], 2: [0, 1], 3: [2, 3]})


def test_nodes_are_lost_again_and_again(job: Job) -> None:
    job.run("abcd", save=3, then="kill")
    job.lose("c")
    job.run("abd", load=3, save=0, then="kill")
    job.lose("b")  # its two experts are in the root as of step 3
    printed = job.run("ad", load=3, save=2)
    assert resumed(printed[0]) == at({3: [0, 1, 2, 3, 6, 7], 1: [4, 5]})
    # Another job's experts are not borrowed: the first copy has all.
    assert job.in_root(4) == at({4: range(8)})
    assert job.in_root(5) == at({4: range(2, 8), 5: [0, 1]})
    assert unickpt.verify(job.root / "step_5").ok


def test_without_experts_the_copy_in_the_root_is_loaded(job: Job) -> None:
    job.run("abcd", save=2, then="kill")
    job.lose("a")
    with Checkpointer(job.root, node_local=job.root.parent / "b", options=OPTIONS) as run:
        loaded, report = run.load(return_report=True)
        assert len(report.older_experts) == 6
        assert (loaded["experts"]["0"]["up"] == 2).all()


def test_a_copy_on_another_node_has_all_experts(job: Job) -> None:
    job.run("abcd", save=2, then="kill", arguments={"replicas": 1})
    job.lose("d")
    printed = job.run("abc", load=2, save=0, arguments={"replicas": 1})
    assert resumed(printed[0]) == at({2: range(8)})


def test_parity_of_left_out_files_is_left_out(job: Job) -> None:
    job.run("abcd", save=3, parity=(2, 1))
    copy = job.root / "step_3"
    assert not list(copy.glob("processes/*/00003/added/*")), "all of its experts are older"
    assert unickpt.verify(copy).ok
    assert job.in_root(3) == at({1: [4, 5, 6, 7], 2: [0, 1], 3: [2, 3]})


def test_an_upload_that_was_interrupted_is_made_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unickpt.plugins.nodes import uploads

    root, node = tmp_path / "root", tmp_path / "node"
    state = {"experts": {str(x): {"up": np.full(3000, 1.0)} for x in range(3)}}
    experts = Experts({"experts/{x}/up": 1})
    run = Checkpointer(root, node_local=node, experts=experts, options=OPTIONS)
    run.save(1, state, wait=True)
    run.wait()

    def killed(*_: Any) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(uploads, "copy_files", killed)
        run.save(2, {"experts": {x: {"up": e["up"] + 1} for x, e in state["experts"].items()}})
        with pytest.raises(OSError, match="killed"):
            run.wait()
    assert list(root.glob("step_2/processes/*/00000/d/*")), "its files are there, but for two"
    run._steps.close()
    with Checkpointer(root, node_local=node, experts=experts, options=OPTIONS) as again:
        again.save(3, state)
    loaded, report = unickpt.load(root / "step_2", return_report=True)
    assert not report.older_experts
    assert all((e["up"] == 2).all() for e in loaded["experts"].values())
    assert unickpt.verify(root / "step_2").ok


@pytest.mark.parametrize(
    ("loads", "older"), [(2, 0), (3, 2)], ids=["an earlier step", "the newest step"]
)
def test_experts_are_borrowed_from_what_training_went_through(
    tmp_path: Path, loads: int, older: int
) -> None:
    root = tmp_path / "root"
    state = {"experts": {str(x): {"up": np.zeros(3000)} for x in range(3)}}

    def trained(tree: dict[str, Any]) -> dict[str, Any]:
        return {"experts": {x: {"up": e["up"] + 1} for x, e in tree["experts"].items()}}

    experts = Experts({"experts/{x}/up": 1})
    with Checkpointer(root, node_local=tmp_path / "n", experts=experts, options=OPTIONS) as run:
        for step in (1, 2, 3):
            state = trained(state)
            run.save(step, state, wait=True)
            run.wait()
        state = run.load(step=loads)
        run.save(4, state, wait=True)
    loaded, report = unickpt.load(root / "step_4", return_report=True)
    assert len(report.older_experts) == older
    values = sorted(float(e["up"][0]) for e in loaded["experts"].values())
    # Of step 2, only the root has a copy, with two older experts.
    assert values == ([1, 1, 2] if loads == 2 else [2, 3, 3])
