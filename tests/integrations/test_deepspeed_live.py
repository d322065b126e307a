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
from support import TESTS
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
    (("wide", 1, 2, 4), (3, 1, 2)),
    (("wide", 3, 2, 4), (0, 2, 2)),
    (("pipe", 1, 2, 4), (0, 1, 2)),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Run]:
    """Runs a scenario of `support.deepspeed_engines` on some ranks; returns what each returns."""
    paths = [str(TESTS), str(Path(TESTS).parent), os.environ.get("PYTHONPATH", "")]
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "support.deepspeed_engines"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip

    def run(count: int, name: str, *arguments: Any, fails: bool = False) -> Any:
        assert server.stdin is not None
        assert server.stdout is not None
        request = {
            "ranks": count, "name": name, "arguments": [*map(_plain, arguments)],
            "port": free_port(), "timeout_s": 200,
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


def arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
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
    assert_same(arrays(tmp_path / "global_step3"), arrays(folder / "global_step3"))
    # Sums have another order.
    np.testing.assert_allclose(found[0]["losses"], losses, rtol=3e-2 if what == "bf16" else 1e-5)
    assert found[0]["path"] == "global_step3"
    assert found[0]["counters"][0] == 3


@pytest.mark.parametrize(
    ("of", "once"), [(SAVED[1], True), (SAVED[4], True), (SAVED[6], True), (SAVED[3], False)], ids=str
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


@pytest.mark.parametrize("case", [SAVED[1], SAVED[3]], ids=str)
def test_the_same_ranks_go_on_bit_for_bit(
    ranks: Run, saved: Callable[[Any], Any], tmp_path: Path, case: Any
) -> None:
    folder, losses = saved(case)
    kind, stage, what, count = case
    found = ranks(count, "load", folder, tmp_path, kind, stage, what)
    assert found[0]["losses"] == losses
    assert [each["state"] for each in found] == [["mine", r, [0, 1, 2]] for r in range(count)]
    assert found[0]["counters"][1:] == [36, [1e-2 / 4, 1e-2 / 4]]


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
    ],
)
def test_mistakes_are_said(ranks: Run, tmp_path: Path, what: str, told: str) -> None:
    found = ranks(2, "refused", tmp_path, what)
    assert all(told in said for said in found), found
    if what != "optimizer":
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
