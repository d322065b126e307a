"""Experts on two levels: nodes have all of a step, and its copy in the root only some of them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server
from support.expert_job import Job, at, check, resumed
from support.mounts import NoMount
from support.mounts import run as run_command
from support.processes import Processes
from support.quantized import errors_of

import unickpt
from unickpt import Checkpointer, Experts, SaveOptions
from unickpt.errors import SaveConflict

OPTIONS = SaveOptions(fsync=False, timeout_s=30, chunk_bytes=4096)


@pytest.fixture
def job(processes: Processes, tmp_path: Path) -> Job:
    return Job(processes, tmp_path)


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
    assert unickpt.verify(f"{job.root}/step_5").ok


def test_without_experts_the_copy_in_the_root_is_loaded(job: Job) -> None:
    job.run("abcd", save=2, then="kill")
    job.lose("a")
    with Checkpointer(job.root, node_local=job.folder / "b", options=OPTIONS) as run:
        loaded, report = run.load(return_report=True)
        assert len(report.older_experts) == 6
        check(loaded, 2, {n: step for _, n, step in report.older_experts})


def test_a_copy_on_another_node_has_all_experts(job: Job) -> None:
    job.run("abcd", save=2, then="kill", arguments={"replicas": 1})
    job.lose("d")
    printed = job.run("abc", load=2, save=0, arguments={"replicas": 1})
    assert resumed(printed[0]) == at({2: range(8)})


def test_parity_of_left_out_files_is_left_out(job: Job) -> None:
    job.run("abcd", save=3, options={"parity": (2, 1)})
    copy = Path(job.root) / "step_3"
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


# --- with other features -------------------------------------------------------------------------


def test_experts_in_one_array_of_jax_are_recovered_in_torch(job: Job) -> None:
    job.run("ab", "jax", save=3, then="kill")
    assert job.in_root(3) == at({1: [4, 5, 6, 7], 2: [0, 1], 3: [2, 3]})
    job.lose("b")
    printed = job.run("ac", stacked=True, load=3, save=1)
    assert [resumed(out) for out in printed] == [at({3: [0, 1, 2, 3], 1: [4, 5, 6, 7]})] * 2
    assert job.in_root(4) == at({4: range(8)})


def test_processes_read_a_step_that_is_damaged_on_one_node_from_one_place(job: Job) -> None:
    """Else one would have the experts of the copy in the root, which are older."""
    job.run("ab", "jax", save=2, then="kill")
    for file in (job.folder / "a").glob("*/step_2/processes/*/00000/d/*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    printed = job.run("ab", "jax", load=2)
    assert [resumed(out) for out in printed] == [job.in_root(2)] * 2


def test_experts_with_other_keys_are_those_of_the_root(job: Job) -> None:
    job.run("ab", save=2, then="kill")
    job.lose("b")
    printed = job.run("ac", load=2, save=1, keys={"experts/{x}/*": 2})
    assert [resumed(out) for out in printed] == [job.in_root(2)] * 2
    assert job.in_root(3) == at({3: range(8)})


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_recovery_that_was_killed_is_made_again(when: str, job: Job) -> None:
    job.run("ab", save=2, then="kill")
    job.lose("b")
    started = job.start("ac", load=2, dies=["tools.partial_copies:replace_in_place", when])
    started[0].wait(timeout=60)
    for process in started:
        process.kill()
    assert resumed(job.run("a", load=2)[0]) == at({2: [0, 1, 2, 3], 1: [4, 5, 6, 7]})


def test_copies_and_parity_together(job: Job) -> None:
    order: dict[str, Any] = {"arguments": {"replicas": 1}, "options": {"parity": (8, 1)}}
    job.run("abc", save=2, then="kill", **order)
    job.lose("c")
    assert resumed(job.run("abd", load=2, save=1, then="kill", **order)[0]) == at({2: range(8)})
    job.lose("a")
    assert resumed(job.run("bd", load=3)[0]) == at({3: range(8)})
    assert unickpt.verify(f"{job.root}/step_3").ok


def test_the_root_of_both_levels_may_be_a_bucket(
    processes: Processes, tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(moto, monkeypatch)
    bucket = f"experts-{secrets.token_hex(4)}"
    s3_server.make_bucket(moto, bucket)
    job = Job(processes, tmp_path, f"s3://{bucket}/run")
    job.run("ab", save=2)
    assert job.in_root(2) == at({1: range(2, 8), 2: [0, 1]})
    job.lose("b")
    assert resumed(job.run("a", load=2)[0]) == at({2: [0, 1, 2, 3], 1: [4, 5, 6, 7]})
    assert unickpt.verify(f"{job.root}/step_2").ok
    s3_server.remove_bucket(moto, bucket)


def test_a_full_disk_of_a_node_costs_the_steps_that_do_not_fit(job: Job) -> None:
    folder = job.folder / "b"
    folder.mkdir()
    try:
        run_command("mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", folder)
    except NoMount as error:
        pytest.skip(str(error))
    try:
        settings = {"replicas": 1, "upload_every": 99}
        started = job.start("ab", save=2, arguments=settings)
        errors = [process.communicate(timeout=60)[1] for process in started]
        assert "No space left on device; this process has 24.3 kB to write" in errors[1]
        assert "kB were free before" in errors[1]
        assert not list(folder.glob("*/*/processes/*/*.new")), "a draft fills the disk"
    finally:
        run_command("umount", "--lazy", folder)
    assert resumed(job.run("ac", load=1)[0]) == at({1: range(8)})


def mixture(value: float) -> dict[str, Any]:
    """Three experts whose values are one number, and the number."""
    return {"experts": {str(x): {"up": np.full(3000, value)} for x in range(3)}, "value": value}


def test_steps_are_replaced_and_deleted(tmp_path: Path) -> None:
    root, values = tmp_path / "root", dict[int, float]()
    experts = Experts({"experts/{x}/up": 1})
    with Checkpointer(root, node_local=tmp_path / "n", experts=experts, options=OPTIONS) as run:

        def save(step: int, value: float) -> list[int]:
            """Saves a step; returns those of its experts in the root."""
            values[step] = value
            run.save(step, mixture(value), wait=True, overwrite=True)
            run.wait()
            loaded, report = unickpt.load(root / f"step_{step}", return_report=True)
            steps = {number: older for _, number, older in report.older_experts}
            for number in range(3):
                expected = mixture(values[steps.get(number, step)])["experts"]["0"]["up"]
                assert (loaded["experts"][str(number)]["up"] == expected).all()
            assert unickpt.verify(root / f"step_{step}").ok
            return [steps.get(number, step) for number in range(3)]

        assert [save(1, 1.0), save(2, 2.0), save(3, 3.0)] == [[1, 1, 1], [2, 1, 1], [2, 3, 1]]
        assert save(3, 3.5) == [2, 3, 1]
        with pytest.raises(SaveConflict, match="step_2 has chunks of step_3"):
            run.delete(2)
        run.delete(3)
        assert save(4, 4.0) == [2, 4, 1]
        assert run.load(step=2)["value"] == 2.0
        run.drop_later_steps()
        assert save(3, 3.75) == [2, 3, 1]
        for step in (3, 2, 1):
            run.delete(step)
        assert save(5, 5.0) == [5, 5, 5]


def test_the_errors_of_quantised_experts_are_those_of_older_ones(tmp_path: Path) -> None:
    options = SaveOptions(fsync=False, quantize={"experts/**": "uint8"})
    ramp = np.linspace(0, 1, 3000, dtype=np.float32)
    experts = Experts({"experts/{x}/up": 1})
    with Checkpointer(
        tmp_path / "root", node_local=tmp_path / "node", experts=experts, options=options
    ) as run:
        for step, factor in [(1, 1.0), (2, 0.0)]:
            state = {"experts": {str(x): {"up": ramp * np.float32(factor)} for x in range(2)}}
            run.save(step, state, wait=True)
            run.wait()
    arrays = unickpt.open(tmp_path / "root/step_2").index.arrays
    assert errors_of(arrays["experts/0/up"]) == (0.0, 0.0)
    assert errors_of(arrays["experts/1/up"])[0] > 0.0001, "it is as of step 1"
