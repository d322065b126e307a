"""DeepSpeed engines that save into unickpt and load from it: real ranks, real DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS, s3_server
from support.processes import free_port

import unickpt

pytestmark = pytest.mark.integration
pytest.importorskip("deepspeed")
torch = pytest.importorskip("torch")

Run = Callable[..., Any]
SAVED = [  # kind, stage, dtype or degree, ranks
    ("net", 0, "fp32", 4),
    ("net", 1, "fp32", 4),
    ("net", 2, "bf16", 3),
    ("net", 3, "bf16", 4),
    ("net", 3, "fp32", 2),
    ("net", 0, "fp16", 2),
    ("net", 2, "fp16", 3),
    ("net", 3, "bf16 offload", 3),
    ("net", 2, "fp32 offload cpuadam", 2),
    ("wide", 1, 2, 4),
    ("wide", 3, 2, 4),
    ("pipe", 1, 2, 4),
]
LOADED = [  # of which, onto what
    (("net", 0, "fp32", 4), (2, "fp32", 3)),
    (("net", 1, "fp32", 4), (3, "fp32", 3)),
    (("net", 2, "bf16", 3), (3, "bf16", 2)),
    (("net", 3, "bf16", 4), (1, "bf16", 3)),
    (("net", 3, "fp32", 2), (0, "fp32", 1)),
    (("net", 0, "fp16", 2), (0, "fp16", 3)),
    (("net", 2, "fp16", 3), (3, "fp16", 2)),
    (("net", 3, "bf16 offload", 3), (2, "bf16", 2)),
    (("net", 2, "fp32 offload cpuadam", 2), (3, "fp32 offload", 3)),
    (("wide", 1, 2, 4), (3, 1, 2)),
    (("wide", 3, 2, 4), (0, 2, 2)),
    (("pipe", 1, 2, 4), (0, 1, 2)),
]


_TOLERANCE = {"bf16": 3e-2, "fp16": 5e-3}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Run]:
    """Runs a scenario of `support.deepspeed_engines` on some ranks; returns what each returns."""
    paths = [str(TESTS), str(Path(TESTS).parent), os.environ.get("PYTHONPATH", "")]
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "support.deepspeed_engines"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip

    def run(count: int, name: str, *arguments: Any, fails: bool = False, **variables: str) -> Any:
        assert server.stdin is not None
        assert server.stdout is not None
        request = {
            "ranks": count, "name": name, "arguments": [*map(_plain, arguments)],
            "port": free_port(), "timeout_s": 200, "variables": variables,
        }  # fmt: skip
        print(json.dumps(request), file=server.stdin, flush=True)
        found = json.loads(server.stdout.readline())
        errors = [said["error"] for said in found if isinstance(said, dict) and "error" in said]
        assert fails or not errors, "\n".join(errors)
        return found

    yield run
    server.kill()
    server.communicate()  # closes the pipes


def _plain(argument: Any) -> Any:
    return str(argument) if isinstance(argument, Path) else argument


@pytest.fixture(scope="module")
def saved(ranks: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Any]:
    """The folder of a run that was saved so, and the losses that follow the save."""
    made: dict[Any, Any] = {}

    def of(case: Any) -> Any:
        if case not in made:
            kind, stage, what, count = case
            folder = tmp_path_factory.mktemp("run")
            losses = ranks(count, "save", folder, kind, stage, what)[0]
            made[case] = folder, losses
        return made[case]

    return of


def arrays(path: Path | str) -> dict[str, np.ndarray[Any, Any]]:
    opened = unickpt.open(path)
    return {name: np.asarray(opened[name][...]) for name in opened}


def assert_same(
    found: dict[str, Any], expected: dict[str, Any], *, but: tuple[str, ...] = ()
) -> None:
    names = {n for n in expected if not n.startswith(but)} if but else set(expected)
    assert names - set(found) == set()
    for name in names:
        assert found[name].tobytes() == expected[name].tobytes(), name
        assert found[name].dtype == expected[name].dtype
        assert found[name].shape == expected[name].shape


@pytest.mark.parametrize(("of", "onto"), LOADED, ids=str)
def test_another_stage_and_number_of_ranks_hold_the_same_bits(
    ranks: Run, saved: Callable[[Any], Any], tmp_path: Path, of: Any, onto: Any
) -> None:
    folder, losses = saved(of)
    stage, what, count = onto
    found = ranks(count, "load", folder, tmp_path, of[0], stage, what)
    kinds = ("step/",) if "cpuadam" in str(of) else ()  # it counts in integers
    assert_same(arrays(tmp_path / "global_step3"), arrays(folder / "global_step3"), but=kinds)
    # Sums have another order.
    np.testing.assert_allclose(found[0]["losses"], losses, rtol=_TOLERANCE.get(str(what)[:4], 1e-5))
    assert found[0]["path"] == "global_step3"
    assert found[0]["counters"][0] == 3


@pytest.mark.parametrize(
    ("of", "once"),
    [(SAVED[1], True), (SAVED[4], True), (SAVED[-3], True), (SAVED[3], False)],
    ids=str,
)
def test_weights_that_are_the_masters_are_stored_once(
    saved: Callable[[Any], Any], of: Any, once: bool
) -> None:
    index = unickpt.open(saved(of)[0] / "global_step3").index
    trained = {n.removeprefix("step/") for n in index.names if n.startswith("step/")}
    assert trained
    for name in trained:
        one, other = (index.entry(f"{kind}/{name}").name for kind in ("module", "fp32"))
        assert (one == other) == once, name


def test_what_we_stored_twice_before_still_loads(
    ranks: Run, saved: Callable[[Any], Any], tmp_path: Path
) -> None:
    folder, _ = saved(SAVED[4])
    tree = unickpt.load(folder / "global_step3")
    del tree["client_state"]  # of each rank; no part of this
    tree["fp32"] = {name: np.array(array) for name, array in tree["fp32"].items()}
    older, again = tmp_path / "older", tmp_path / "again"
    unickpt.save(older / "global_step3", tree)
    (older / "latest").write_text("global_step3")
    assert not any(n.startswith("fp32") for n in unickpt.open(older / "global_step3").index.aliases)
    ranks(3, "load", older, again, "net", 1, "fp32")
    assert_same(arrays(again / "global_step3"), arrays(folder / "global_step3"))


@pytest.mark.parametrize("case", [SAVED[1], SAVED[3], *SAVED[5:9]], ids=str)
def test_the_same_ranks_go_on_bit_for_bit(
    ranks: Run, saved: Callable[[Any], Any], tmp_path: Path, case: Any
) -> None:
    folder, losses = saved(case)
    kind, stage, what, count = case
    found = ranks(count, "load", folder, tmp_path, kind, stage, what)
    assert found[0]["losses"] == losses
    assert [each["state"] for each in found] == [["mine", r, [0, 1, 2]] for r in range(count)]
    rate = 1e-2 / 4 if "fp16" not in str(what) else found[0]["counters"][2][0]  # skips steps
    assert found[0]["counters"][1:] == [36, [rate, rate]]


@pytest.mark.parametrize("case", [SAVED[5], SAVED[6]], ids=str)
def test_the_loss_scale_goes_on(
    ranks: Run, saved: Callable[[Any], Any], tmp_path: Path, case: Any
) -> None:
    folder, _ = saved(case)
    ranks(2, "load", folder, tmp_path, case[0], 2, "fp16")
    names = [f"optimizer/loss_scaler/{n}" for n in ("cur_scale", "cur_iter", "last_overflow_iter")]
    found, expected = (
        [unickpt.open(each / "global_step3").index.values[name] for name in names]
        for each in (tmp_path, folder)
    )
    assert found == expected
    assert expected[1] == 3
    assert expected[0] < 2**17 or not case[1]


@pytest.mark.parametrize(("stage", "onto"), [(1, 3), (3, 2)])
def test_a_run_goes_on_from_before_its_first_step(
    ranks: Run, tmp_path: Path, stage: int, onto: int
) -> None:
    first = tmp_path / "first"
    expected = ranks(2, "from_the_start", first, stage)[0]
    found = ranks(2, "resumed", first, onto, 3)[0]
    assert found[:2] == [0, "global_step0"]
    np.testing.assert_allclose(found[2], expected, rtol=1e-5)
    assert not any(n.startswith("exp_avg") for n in unickpt.open(first / "global_step0"))


def test_a_bucket_is_saved_into_and_loaded_from(
    ranks: Run, tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "engines")
    known = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    run, again = "s3://engines/run", "s3://engines/again"
    losses = ranks(3, "save", run, "net", 2, "bf16", **known)[0]
    found = ranks(2, "load", run, again, "net", 3, "bf16", **known)[0]
    assert_same(arrays(f"{again}/global_step3"), arrays(f"{run}/global_step3"))
    np.testing.assert_allclose(found["losses"], losses, rtol=_TOLERANCE["bf16"])
    ranks(2, "killed", "s3://engines/killed", 3, 3, fails=True, **known)
    (step, path, _), *_ = ranks(2, "resumed", "s3://engines/killed", 2, 4, **known)
    assert path == f"global_step{step}"
    assert 1 <= step <= 3


@pytest.mark.parametrize(
    ("stage", "dtype", "count"), [(1, "bf16", 3), (2, "fp32", 2), (3, "bf16", 3)]
)
def test_what_is_stored_is_what_deepspeed_says(
    ranks: Run, tmp_path: Path, stage: int, dtype: str, count: int
) -> None:
    ranks(count, "gathered", tmp_path, stage, dtype)
    found = arrays(tmp_path / "global_step3")
    expected = torch.load(tmp_path / "gathered.pt")
    assert len(expected) > 25
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].astype(np.float32), tensor.numpy(), name)


@pytest.mark.parametrize(
    ("of", "onto"), [((2, "bf16", 2), (3, "bf16", 3)), ((3, "fp32", 3), (1, "fp32", 2))]
)
def test_what_deepspeed_itself_wrote_is_gone_on_with(
    ranks: Run, tmp_path: Path, of: Any, onto: Any
) -> None:
    theirs, again = tmp_path / "theirs", tmp_path / "again"
    ranks(of[2], "themselves", theirs, *of[:2])
    ranks(onto[2], "theirs", theirs, again, *onto[:2])
    expected = arrays(theirs / "global_step3")
    assert_same(
        arrays(again / "global_step3"), expected, but=("fp32/frozen", "fp32/scale", "step/")
    )


def test_a_killed_job_goes_on_from_the_last_committed_save(ranks: Run, tmp_path: Path) -> None:
    expected = ranks(2, "uninterrupted", 2, 6)[0]
    ranks(4, "killed", tmp_path, 3, 4, fails=True)
    latest = (tmp_path / "latest").read_text()
    (step, path, losses), *_ = ranks(2, "resumed", tmp_path, 2, 6)
    assert path == latest == f"global_step{step}"
    assert 1 <= step <= 4
    np.testing.assert_allclose(losses, expected[step:], rtol=1e-5)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("tag", "pass the same tag on all ranks"),
        ("leaf", "client_state"),
        ("leaf of one", "client_state"),
        ("optimizer", "momentum_buffer"),
        ("module", "use_unickpt(engine)"),
        ("mics", "MiCS (mics_shard_size)"),
        ("ratio", "offload_optimizer with a ratio below 1"),
        ("ranks of another job", "Was the process group changed"),
        ("versions", "0.18.0"),
    ],
)
def test_mistakes_are_said(ranks: Run, tmp_path: Path, what: str, told: str) -> None:
    found = ranks(2, "refused", tmp_path, what)
    assert all(told in said for said in found), found
    if what != "optimizer":
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("what", "told", "others"),
    [
        ("a rank lacks a parameter", "does not have: temp", "rank 1"),
        ("a rank lacks its part", "does not have: lm_head.weight", "'lm_head.weight'"),
    ],
)
def test_ranks_with_other_parameters_are_told(
    ranks: Run, tmp_path: Path, what: str, told: str, others: str
) -> None:
    found = ranks(2, "refused", tmp_path, what)
    assert others in found[0], found
    assert told in found[1], found
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_stage_with_more_than_is_stored_is_told(ranks: Run, tmp_path: Path) -> None:
    found = ranks(4, "lacking", tmp_path, "gate")
    lacks = [said for said in found if "gate" in said]
    assert len(lacks) == 2, found
    for said in lacks:
        assert "load_module_strict=False" in said
    for said in found:
        assert "rank " in said
