"""Experts that take turns, and how chunks are stored: quantised, as patches, unlooked at."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server
from support.quantized import errors_of
from support.saving import in_job

import unickpt
from unickpt import Checkpointer, Experts, SaveOptions
from unickpt.plugins.incremental import base

EXPERTS, KEY = 6, "experts/{x}/*"
SMALL: dict[str, Any] = {"chunk_bytes": 8192, "fsync": False, "timeout_s": 20}


@pytest.fixture(params=["links", "memory", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "links":
            yield str(tmp_path / "run")
        elif request.param == "memory":
            yield f"memory://{secrets.token_hex(6)}"
        else:
            endpoint, bucket = request.getfixturevalue("moto"), f"experts-{secrets.token_hex(4)}"
            s3_server.use(endpoint, patch)
            s3_server.make_bucket(endpoint, bucket)
            yield f"s3://{bucket}/run"


def state(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)

    def numbers(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    experts = {str(x): {"up": numbers(64, 96), "down": numbers(96, 64)} for x in range(EXPERTS)}
    return {"dense": numbers(64, 64), "experts": experts, "up": numbers(EXPERTS, 64, 96)}


def steps_of(path: str) -> dict[str, dict[int, int]]:
    found = unickpt.open(path).metadata["unickpt"]["experts"]["steps"]
    return {key: {int(x): step for x, step in of.items()} for key, of in found.items()}


def check(path: str, whole: Callable[[int], Any], steps: int) -> None:
    """Each expert is as a whole save of its step has it, bit for bit.

    Arguments:
        path: of the checkpoints.
        whole: what a load of such a save returns.
        steps: how many there are.
    """
    for step in range(steps):
        found, of = unickpt.load(f"{path}/step_{step}"), steps_of(f"{path}/step_{step}")
        assert np.array_equal(found["dense"], whole(step)["dense"])
        for x in range(EXPERTS):
            for name, value in found["experts"][str(x)].items():
                assert np.array_equal(value, whole(of[KEY][x])["experts"][str(x)][name]), (step, x)
            assert np.array_equal(found["up"][x], whole(of["up"][x])["up"][x]), (step, x)
        report = unickpt.verify(f"{path}/step_{step}")
        assert report.ok, report.damage


def stored(values: tuple[Any, Any]) -> list[Any]:
    """Each kind of folder with both values; of object storage, `make soak` tries the first."""
    return [
        pytest.param(
            run, value, marks=[pytest.mark.slow] if (run, value) == ("s3", values[0]) else []
        )
        for run in ("links", "memory", "s3")
        for value in values
    ]


@pytest.mark.parametrize(("run", "count"), stored((1, 2)), indirect=["run"])
def test_quantised_experts_are_as_a_whole_save_quantises_them(
    run: str, count: int, tmp_path: Path
) -> None:
    count_of_steps = 5 if run.startswith("s3") else 6
    quantize = {"experts/**": "uint8", "up": "int4"}
    made = [SaveOptions(quantize=quantize, **SMALL)]

    def work(group: unickpt.ProcessGroup) -> None:
        options = SaveOptions(quantize=quantize, group=group, **SMALL)
        keys = {KEY: 2, "up": (0, 2)}
        with Checkpointer(run, experts=Experts(keys), options=options) as steps:
            for step in range(count_of_steps):
                steps.save(step, state(step))

    assert in_job(count, work) == [None] * count
    known = dict[int, Any]()

    def whole(step: int) -> Any:
        if step not in known:
            unickpt.save(tmp_path / "whole" / str(step), state(step), options=made[0])
            known[step] = unickpt.load(tmp_path / "whole" / str(step))
        return known[step]

    check(run, whole, count_of_steps)
    for step in range(1, count_of_steps):
        index = unickpt.open(f"{run}/step_{step}").index
        assert sum(n == step for n in steps_of(f"{run}/step_{step}")["up"].values()) == 2
        worst = max(
            float(np.abs(whole(s)["up"][x] - state(s)["up"][x]).max())
            for x, s in steps_of(f"{run}/step_{step}")["up"].items()
        )
        # At least the error of what it has; perhaps that of an expert that was replaced since.
        assert errors_of(index.arrays["up"])[0] >= 0.999 * worst


@pytest.mark.parametrize(
    "other",
    [
        {"chunk_bytes": 4096},
        {"quantize": {"experts/**": "int4"}},
        {"quantize": {}},
        {"compression": "zstd"},
    ],
)
def test_quantised_experts_of_another_form_are_written_as_they_are_now(
    other: dict[str, Any], tmp_path: Path
) -> None:
    first = {"quantize": {"experts/**": "uint8"}, **SMALL}
    experts = Experts({"experts/{x}/*": 2})
    with Checkpointer(tmp_path, experts=experts, options=SaveOptions(**first)) as steps:
        for step in range(3):
            steps.save(step, state(step), wait=True)
    with Checkpointer(tmp_path, experts=experts, options=SaveOptions(**{**first, **other})) as run:
        run.load()
        for step in range(3, 5):
            run.save(step, state(step), wait=True)
    assert set(steps_of(str(tmp_path / "step_3"))[KEY].values()) == {3}
    assert sorted(steps_of(str(tmp_path / "step_4"))[KEY].values()) == [3] * 4 + [4] * 2


def test_quantised_experts_that_cannot_be_linked_are_copied_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into another folder, on a file system without links."""
    options = SaveOptions(quantize={"experts/**": "uint8"}, **SMALL)
    experts = Experts({"experts/{x}/*": 2})
    with Checkpointer(tmp_path / "run", experts=experts, options=options) as steps:
        for step in range(2):
            steps.save(step, state(step), wait=True)

        def none(*_: Any) -> bool:
            return False

        monkeypatch.setattr(base, "_is_beside", none)
        monkeypatch.setattr(base.LinkedFiles, "are_possible", none)
        report = steps.save(2, state(2)).result()
        assert report.written_bytes == report.bytes
    old, new = (unickpt.load(tmp_path / "run" / f"step_{step}") for step in (1, 2))
    for x, step in steps_of(str(tmp_path / "run" / "step_2"))[KEY].items():
        if step < 2:
            for name, value in new["experts"][str(x)].items():
                assert np.array_equal(value, old["experts"][str(x)][name])
    assert unickpt.verify(tmp_path / "run" / "step_2").ok
    errors = [unickpt.open(tmp_path / "run" / f"step_{n}").index.arrays for n in (1, 2)]
    for x, step in steps_of(str(tmp_path / "run" / "step_2"))[KEY].items():
        name = f"experts/{x}/up"
        assert errors_of(errors[1][name])[0] > 0
        if step < 2:
            assert errors[1][name].extra == errors[0][name].extra


def test_quantised_experts_that_have_patches_are_copied_with_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when too little of their files is used to link them."""
    options = SaveOptions(quantize={"experts/**": "uint8"}, **SMALL)
    experts = Experts({"experts/{x}/*": 3})
    with Checkpointer(tmp_path, experts=experts, reuse="patch", options=options) as steps:
        for step in range(4):
            steps.save(step, drifting(step), wait=True)
        assert any(e.composed for e in unickpt.open(tmp_path / "step_3").index.arrays.values())
        monkeypatch.setattr(base, "_is_beside", lambda *_: False)
        monkeypatch.setattr(base.LinkedFiles, "are_possible", lambda _: False)
        steps.save(4, drifting(4), wait=True)
    old, new = (unickpt.load(tmp_path / f"step_{step}") for step in (3, 4))
    left_out = [x for x, step in steps_of(str(tmp_path / "step_4"))[KEY].items() if step < 4]
    assert len(left_out) == EXPERTS - 3
    for x in left_out:
        for name, value in new["experts"][str(x)].items():
            assert value.tobytes() == old["experts"][str(x)][name].tobytes()
    assert unickpt.verify(tmp_path / "step_4").ok


# --- what changed little, and what did not --------------------------------------------------------


@functools.cache
def drifting(step: int) -> dict[str, Any]:
    """Of which one element in a hundred changes with each step."""
    found = state(0)

    def moved(value: Any, seed: int) -> Any:
        out = value.copy().reshape(-1)
        for n in range(1, step + 1):
            rng = np.random.default_rng([n, seed])
            out[rng.integers(0, out.size, out.size // 100)] += np.float32(0.01 * n)
        return out.reshape(value.shape)

    experts = {
        x: {name: moved(value, int(x) * 7 + len(name)) for name, value in of.items()}
        for x, of in found["experts"].items()
    }
    return {
        "dense": moved(found["dense"], 99),
        "experts": experts,
        "up": moved(found["up"], 98),
    }


@pytest.mark.parametrize(("run", "reuse"), stored(("patch", "digest")), indirect=["run"])
def test_experts_with_reuse(run: str, reuse: Any) -> None:
    keys = {KEY: 2, "up": (0, 2)}
    second, steps = (3, 6) if run.startswith("s3") else (5, 9)
    written = []
    for first, after in ((0, second), (second, steps)):
        with Checkpointer(
            run, experts=Experts(keys), reuse=reuse, options=SaveOptions(**SMALL)
        ) as saves:
            if first:
                saves.load()
            pending = [saves.save(step, drifting(step)) for step in range(first, after)]
            written += [each.result().written_bytes for each in pending]
    check(run, drifting, steps)
    for step in range(1, steps):
        of = steps_of(f"{run}/step_{step}")
        assert sum(n == step for n in of[KEY].values()) == 2, "in a chain, too"
    if reuse == "patch":
        patched = [
            sum(e.composed for e in unickpt.open(f"{run}/step_{step}").index.arrays.values())
            for step in range(1, steps)
        ]
        assert any(patched), "what is written of an expert is what changed of it"
        assert min(written[1:]) < 0.2 * max(written)


def test_experts_of_which_some_did_not_change(run: str) -> None:
    """`changed=` says of some that they are as before; turns go on all the same."""
    state_of, steps = dict[int, Any](), 5 if run.startswith("s3") else 8

    def of(step: int) -> Any:
        if step not in state_of:
            made = state(step)
            made["experts"]["0"] = state(0)["experts"]["0"]
            state_of[step] = made
        return state_of[step]

    keys = {KEY: 2, "up": (0, 2)}
    with Checkpointer(
        run, experts=Experts(keys), reuse=True, options=SaveOptions(**SMALL)
    ) as saves:
        reports = [
            saves.save(step, of(step), changed={"experts/0/*": False} if step else None)
            for step in range(steps)
        ]
        saves.wait()
    check(run, of, steps)
    for step, pending in enumerate(reports):
        if step:
            kept = steps_of(f"{run}/step_{step}")[KEY]
            assert pending.result().reused_bytes > 0
            # Its turn comes; then it is taken as well.
            assert sum(n == step for n in kept.values()) == 2


def test_an_expert_is_looked_at_whatever_is_said_to_have_changed(tmp_path: Path) -> None:
    """The save before may have left it out: what changed since that one is not what changed since
    its last turn."""
    tree = {str(x): {"w": np.full((200, 30), x * 1.0)} for x in range(2)}
    changed = {"0/w": False}
    options = SaveOptions(**SMALL)
    with Checkpointer(tmp_path, experts=Experts({"{x}/w": 2}), reuse=True, options=options) as run:
        run.save(0, tree, wait=True)
        tree["0"]["w"][:] = 7
        run.save(1, tree, changed=changed, wait=True)
    assert (unickpt.load(tmp_path / "step_1")["0"]["w"] == 7).all()
