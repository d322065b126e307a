"""Jobs of Megatron-Core that save into unickpt and load from it: real ranks, real Megatron."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.forks import Ended, Forks
from support.processes import free_port

import unickpt

if find_spec("megatron") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integration

FINDS = version("megatron-core") < "0.17"  # the strategy, by metadata.json
OLD = version("megatron-core") < "0.14"  # which has flattened ranges
BUCKETS = "fully_sharded_model_space" if OLD else "dp_reshardable"
IN_FULL = "fully_sharded_model_space" if OLD else "fully_reshardable"
LIMIT_S = 240  # of ranks
FAILED = "Traceback (most recent call last)"
RUN = "from support import megatron_job; megatron_job.run(*ARGS)"
EXAMPLE = Path(TESTS).parent.joinpath("examples", "megatron_job.py").read_text()
FSDP2 = "from support import small_gpt; small_gpt.run(*ARGS)"


class Ranks:
    """Runs scenarios of `support.megatron_job`, on ranks that one process forks, which has imported
    Megatron."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        patch.setenv("PYTHONPATH", str(TESTS), prepend=":")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        self.forks = Forks(folder, "support.megatron_job")

    def start(self, count: int, name: str, *arguments: Any, **more: Any) -> list[int]:
        return self.run(count, RUN, name, [*map(_plain, arguments)], more)

    def run(self, count: int, source: str, *arguments: Any) -> list[int]:
        self._patch.setenv("WORLD_SIZE", str(count))
        self._patch.setenv("MASTER_PORT", str(free_port()))
        pids = []
        for rank in range(count):
            self._patch.setenv("RANK", str(rank))
            self._patch.setenv("LOCAL_RANK", str(rank))
            pids.append(self.forks.start(source, *map(_plain, arguments)))
        return pids

    def __call__(self, count: int, name: str, *arguments: Any, **more: Any) -> list[Any]:
        """What each rank returns."""
        return self.said(self.start(count, name, *arguments, **more))

    def said(self, pids: list[int]) -> list[Any]:
        ended = self.ended(pids)
        assert all(one.code == 0 for one in ended), "\n".join(one.out for one in ended)
        return [one.last for one in ended]

    def ended(self, pids: list[int]) -> list[Ended]:
        """How ranks ended; the others of one that fails would wait for it."""
        left, deadline = {*pids}, time.monotonic() + LIMIT_S
        while left := {pid for pid in left if self.forks.runs(pid)}:
            if len(left) < len(pids) and any(FAILED in self.forks.said(pid) for pid in pids):
                deadline = min(deadline, time.monotonic() + 3)
            if time.monotonic() > deadline:
                for pid in left:
                    self.forks.kill(pid)
            time.sleep(0.02)
        return self.forks.wait_all(pids)


def _plain(argument: Any) -> Any:
    return str(argument) if isinstance(argument, Path) else argument


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        made = Ranks(tmp_path_factory.mktemp("out"), patch)
        yield made
        made.forks.close()


def shape(tp: int = 1, pp: int = 1, form: str = "plain", **more: Any) -> dict[str, Any]:
    return {"tp": tp, "pp": pp, "form": form, **more}


def arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What is the same with all parallel sizes."""
    opened, own = unickpt.open(path), ("rng_state", "/param_state/")
    names = [name for name in opened if not any(of in name for of in own)]
    return {name: np.asarray(opened[name][...]) for name in names}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


STORED = [  # ranks, what, the form in which Megatron itself stores the same by parameter
    (4, shape(2, 2, bf16=True), "plain"),
    (4, shape(2, 2, gated=False), "plain"),
    (4, shape(1, 2, IN_FULL, bf16=True), IN_FULL),
    (4, shape(2, 1, BUCKETS, bf16=True), IN_FULL),
    (4, shape(2, 1, BUCKETS, gated=False), IN_FULL),
    (4, shape(1, 2, BUCKETS, experts=4, ep=2), IN_FULL),
]


@pytest.mark.parametrize(("count", "what", "their_form"), STORED, ids=str)
def test_what_is_stored_is_what_megatron_stores(
    ranks: Ranks, tmp_path: Path, count: int, what: dict[str, Any], their_form: str
) -> None:
    ranks(count, "both", tmp_path / "ours", tmp_path / "theirs", what, their_form, 2)
    found = arrays(tmp_path / "ours" / "iter_0000002")
    assert_same(found, arrays(tmp_path / "theirs" / "iter_0000002"))
    assert any("optimizer.state.exp_avg." in name for name in found)


TRAINED = {  # what a run was, by name: ranks, shape
    "tp2 pp2 float32": (4, shape(2, 2)),
    "tp2 pp2": (4, shape(2, 2, bf16=True)),
    "tp2 dp2 by buckets": (4, shape(2, 1, BUCKETS, bf16=True)),
    "pp2 dp2 by buckets": (4, shape(1, 2, BUCKETS)),
    "dp3 in full": (2, shape(1, 1, IN_FULL, bf16=True)),
    "experts": (4, shape(1, 2, BUCKETS, experts=4, ep=2)),
}
LOADED = [  # of which, on how many ranks, onto what
    ("tp2 pp2", 4, shape(4, 1, bf16=True)),
    ("tp2 pp2", 2, shape(1, 2, bf16=True)),
    ("tp2 dp2 by buckets", 4, shape(1, 4, BUCKETS, bf16=True)),
    ("tp2 dp2 by buckets", 4, shape(1, 1, BUCKETS, bf16=True)),
    ("pp2 dp2 by buckets", 4, shape(4, 1, BUCKETS)),
    ("dp3 in full", 4, shape(2, 2, IN_FULL, bf16=True)),
    ("experts", 4, shape(1, 1, BUCKETS, experts=4, ep=4)),
]


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The folder of a run that has saved step 2, and its losses."""
    made: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in made:
            folder = tmp_path_factory.mktemp("run")
            count, what = TRAINED[name]
            ranks(count, "train", folder, what, 2, 2)
            said = ranks(count, "train", folder, what, 5, 0)
            made[name] = folder, next(one["losses"] for one in said if one["losses"])
        return made[name]

    return of


@pytest.mark.parametrize(("of", "count", "what"), LOADED, ids=str)
def test_other_parallel_sizes_hold_the_same_bits(
    ranks: Ranks,
    trained: Callable[[str], Any],
    tmp_path: Path,
    of: str,
    count: int,
    what: dict[str, Any],
) -> None:
    folder, losses = trained(of)
    said = ranks(count, "resave", folder, tmp_path, what, 3)
    assert_same(arrays(tmp_path / "iter_0000002"), arrays(folder / "iter_0000002"))
    found = next(one["losses"] for one in said if one["losses"][0] is not None)
    np.testing.assert_allclose(found, list(losses.values()), rtol=3e-2 if "bf16" in what else 1e-4)


@pytest.mark.parametrize("of", ["tp2 pp2 float32", "pp2 dp2 by buckets"])
def test_it_goes_on_in_fsdp2(
    ranks: Ranks, trained: Callable[[str], Any], tmp_path: Path, of: str
) -> None:
    folder, losses = trained(of)
    stored = folder / "iter_0000002"
    said = ranks.said(ranks.run(2, FSDP2, stored, tmp_path / "fsdp2", 3, 5))
    np.testing.assert_allclose(said[0], list(losses.values()), rtol=1e-4)
    found, expected = arrays(tmp_path / "fsdp2"), arrays(stored)
    seen = 0
    for name, array in found.items():
        key, _, slot = name.removeprefix("optim/state/").rpartition("/")
        if name.startswith("model/"):
            key, slot = name.removeprefix("model/"), ""
        elif slot not in ("exp_avg", "exp_avg_sq"):
            continue
        layer = re.search(r"layers\.(\d+)\.", key)
        of_megatron = re.sub(r"layers\.\d+\.", "layers.", key)
        for norm, before in NORMS.items():
            of_megatron = of_megatron.replace(norm, before)
        whole = expected[f"optimizer.state.{slot}.{of_megatron}" if slot else of_megatron]
        assert array.tobytes() == (whole[int(layer[1])] if layer else whole).tobytes(), name
        seen += 1
    assert seen == 3 * 36  # parameters, and their moments


NORMS = {  # of a layer, as Megatron calls them in checkpoints
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
WAYS = [  # to save and load
    {},
    {"wrapped": True},
    {"queue": "theirs"},
    {"queue": "ours"},
    {"queue": "ours", "wrapped": True, "options": {"staging": "lazy"}},
]


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize(
    "what",
    [shape(2, 1, bf16=True), shape(2, 1, BUCKETS, bf16=True), shape(1, 2, experts=4)],
    ids=str,
)
def test_the_same_sizes_go_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, what: dict[str, Any], how: dict[str, Any]
) -> None:
    expected = ranks(4, "train", tmp_path / "none", what, 6, 0)
    ranks(4, "train", tmp_path / "run", what, 4, 2, **how)
    found = ranks(4, "train", tmp_path / "run", what, 6, 0, **how)
    for one, whole in zip(found, expected, strict=True):
        assert one["first"] == 5
        last = {step: loss for step, loss in whole["losses"].items() if int(step) > 4}
        assert one["losses"] == last


@pytest.mark.parametrize(("count", "onto"), [(2, 2), (4, 2), (1, 4)])
def test_values_of_all_kinds(ranks: Ranks, tmp_path: Path, count: int, onto: int) -> None:
    ranks(count, "write values", tmp_path, opaque=True)
    ranks(onto, "read values", tmp_path, objects=onto == count)
    ranks(onto, "read values", tmp_path, objects=False, opaque=True, unpickle=True)
    found = arrays(tmp_path)
    np.testing.assert_array_equal(found["gates"], np.arange(24.0).reshape(8, 3))
    np.testing.assert_array_equal(found["stacked"], np.arange(60.0).reshape(4, 5, 3))
    tree = unickpt.load(tmp_path)
    assert tree["common"]["iteration"] == 7
    assert tree["own"][f"shard_0_{count}"]["values"][1] == (1, (2, [0]), {})


REFUSED = [  # a mistake; what the first rank, and the second, is told; whether it is in a save
    ("no optimizer", "pass optimizer=", "pass optimizer=", True),
    ("class of one rank", "rank 1", "OwnTensor", True),
    ("object of one rank", "rng_state/shard_0.0_1.2", "LocalNonpersistentObject", True),
    ("object in the background", "rng_state/shard_0.0_1.2", "LocalNonpersistentObject", True),
    ("not all are covered", "linear_proj.weight", "linear_proj.weight", True),
    ("sizes", "word_embeddings.weight", "word_embeddings.weight", True),
    ("one asks for more", "rank 1 could not load", "model.more", False),
    ("another shape", "word_embeddings.weight", "[14, 16]", False),
    ("common of another save", "later save into this folder", "rank 0 could not load", False),
    ("later version", "version 2", "version 2", False),
    *[("no optimizer to load", "LoadStrategy(optimizer=optimizer)", "pass optimizer=", False)][
        :FINDS
    ],
]


@pytest.mark.parametrize(
    ("what", "first", "second", "saving"),
    [each for each in REFUSED if not (OLD and each[0].startswith("no optimizer"))],
    ids=str,
)
def test_mistakes_are_said(
    ranks: Ranks, tmp_path: Path, what: str, first: str, second: str, saving: bool
) -> None:
    said = ranks(2, "refuse", tmp_path, shape(2, 1, BUCKETS), what)
    assert first in said[0], said
    assert second in said[1], said
    if saving:  # Megatron writes common.pt before it calls a strategy
        left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
        assert left in ([], ["common.pt"]), left


def test_a_run_of_megatron_goes_on_in_its_folder(ranks: Ranks, tmp_path: Path) -> None:
    what = shape(2, 1, IN_FULL, bf16=True)
    expected = ranks(4, "train", tmp_path / "none", what, 4, 0)[0]["losses"]
    said = ranks(4, "change_over", tmp_path / "run", what)[0]
    assert said["first"] == 3
    assert said["again"]["first"] == 3
    last = {step: expected[step] for step in ("3", "4")}
    assert said["losses"] == said["again"]["losses"] == last
    assert not any(name.endswith(".distcp") or name == ".metadata" for name in said["left"])


def commands() -> list[list[str]]:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_text().split("\0"))
    return found


@pytest.mark.parametrize("queue", [None, "ours", "theirs"])
def test_a_job_killed_while_it_saves_goes_on_from_the_step_before(
    ranks: Ranks, tmp_path: Path, queue: str | None
) -> None:
    what = shape(2, 2, bf16=True, hidden=256)
    expected = ranks(4, "train", tmp_path / "none", what, 6, 0)[2]["losses"]
    run = tmp_path / "run"
    pids = ranks.start(4, "train", run, what, 6, 2, queue=queue)
    parts = run / "iter_0000004"
    while not (parts.is_dir() and any(path.is_file() for path in parts.rglob("*"))):
        assert all(map(ranks.forks.runs, pids)), ranks.ended(pids)
        time.sleep(0.002)
    for pid in pids:
        ranks.forks.kill(pid)
    ranks.ended(pids)
    deadline = time.monotonic() + 30
    while any(str(pid) in each for pid in pids for each in commands()):  # who waits for a save
        assert time.monotonic() < deadline
        time.sleep(0.1)
    latest = int((run / "latest_checkpointed_iteration.txt").read_text())
    assert latest == 2
    found = ranks(4, "train", run, what, 6, 2, queue=queue, load=None if FINDS else "ours")[2]
    assert found["first"] == latest + 1
    assert found["losses"] == {n: x for n, x in expected.items() if int(n) > latest}
    assert unickpt.verify(run / "iter_0000006").ok


def test_the_example_goes_on_on_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    source = "import sys; sys.argv[1:] = ARGS\n" + EXAMPLE
    for count, steps, done in ((4, "2", (1, 2)), (2, "4", (3, 4))):
        ended = ranks.ended(ranks.run(count, source, tmp_path, steps))
        for one in ended:
            assert one.code == 0, one.out
            assert one.out.splitlines()[-2:] == [f"step {step}" for step in done]
    found = unickpt.load(tmp_path / "0000004")
    assert found["weight"].shape == (8, 16)


def test_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own, of torch
        from unickpt.integrations.megatron import latest

    assert latest(tmp_path / "none") is None
    with pytest.raises(ValueError, match=r"s3://bucket/run.*not into a URL; pass its path"):
        latest("s3://bucket/run")  # None would begin the training anew
    whole = json.dumps({"sharded_backend": "unickpt", "sharded_backend_version": 1})
    written = {"iter_0000002": whole, "10": whole, "iter_0000011": whole[:20], "12 of 1": whole}
    for name, text in written.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text(text)
    (tmp_path / "iter_0000013").mkdir()  # nothing in it yet
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("13")
    (tmp_path / "13").write_text("a file")
    assert latest(str(tmp_path)) == str(tmp_path / "10")
