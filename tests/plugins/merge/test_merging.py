"""merge: every method against NumPy, for any layout, slab and number of processes; refusals."""

from __future__ import annotations

import json
import math
import os
import signal
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from support import deepspeed_cases
from support.counts import ChunkRead
from support.processes import Processes
from support.saving import files, in_job

import unickpt
from unickpt import PerProcess, Rules, SaveOptions, merge_methods
from unickpt.errors import MergeError
from unickpt.plugins.merge.method_parameters import ByMetric, ByStep, Dare, Ema, Slerp, Ties
from unickpt.testing.thread_groups import Threads
from unickpt.tools.slab_reads import read_boxes

FAST = SaveOptions(fsync=False)
SMALL = SaveOptions(fsync=False, chunk_bytes=4096, budget_bytes=64 << 10)
BF16 = np.dtype(ml_dtypes.bfloat16)
Tree = dict[str, Any]


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepspeed_cases.unpack(tmp_path_factory.mktemp("deepspeed"))


def tree(seed: int, *, step: int = 7) -> Tree:
    """Arrays of all kinds; those of seeds differ everywhere but in what is counted."""
    rng = np.random.default_rng(seed)
    return {
        "layers": {
            "w": rng.standard_normal((70, 130)).astype(np.float32),
            "half": rng.standard_normal((3, 50, 40)).astype(BF16),
        },
        "wide": rng.standard_normal(5000),
        "scale": np.float32(rng.standard_normal()),
        "count": np.int32(step),
        "adam_step": np.float32(step),
        "mask": np.array([True, False]),
        "empty": np.zeros((0, 3), np.float32),
        "step": step,
    }


FLOATS = ("layers/w", "layers/half", "wide", "scale", "empty")
Names = dict[str, np.ndarray]


def flat(state: Tree) -> Names:
    layers = {f"layers/{name}": value for name, value in state["layers"].items()}
    return {**layers, **{k: v for k, v in state.items() if k not in ("layers", "step")}}


def written(
    folder: Path, count: int, options: SaveOptions = FAST
) -> tuple[list[Path], list[Names]]:
    states = [tree(seed) for seed in range(count)]
    for seed, state in enumerate(states):
        unickpt.save(folder / f"c{seed}", state, options=options)
    return [folder / f"c{seed}" for seed in range(count)], [flat(state) for state in states]


# --- the methods as plain NumPy -------------------------------------------------------------------


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def mean(name: str, xs: Sequence[Any]) -> Any:
    return np.mean([wide(x) for x in xs], axis=0)


def weighted(name: str, xs: Sequence[Any]) -> Any:
    return 0.5 * wide(xs[0]) - 1.25 * wide(xs[1]) + 2 * wide(xs[2])


def ema(name: str, xs: Sequence[Any]) -> Any:
    found = wide(xs[0])
    for x in xs[1:]:
        found = 0.7 * found + 0.3 * wide(x)
    return found


def task_arithmetic(name: str, xs: Sequence[Any]) -> Any:
    *sources, base = map(wide, xs)
    return base + 0.3 * (sources[0] - base) + 0.7 * (sources[1] - base)


def slerp(name: str, xs: Sequence[Any]) -> Any:
    a, b = map(wide, xs)
    if not a.size:
        return a
    angle = math.acos(min(1, max(-1, (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))))
    if abs(math.cos(angle)) > 0.9995:
        return 0.75 * a + 0.25 * b
    return (math.sin(0.75 * angle) * a + math.sin(0.25 * angle) * b) / math.sin(angle)


def ties(name: str, xs: Sequence[Any]) -> Any:
    """Element by element, as the paper says it."""
    *sources, base = map(wide, xs)
    if not base.size:
        return base
    kept = max(1, int(0.3 * base.size))
    trimmed = []
    for x in sources:
        difference = (x - base).reshape(-1)
        key = np.abs(difference)
        key = key if np.asarray(xs[0]).dtype == np.float64 else key.astype(np.float32)
        least = np.sort(key)[-kept]
        trimmed.append([d if k >= least else 0.0 for d, k in zip(difference, key, strict=True)])
    found = []
    for elements in zip(*trimmed, strict=True):
        sign = math.copysign(1, sum(elements)) if sum(elements) else 0
        agreeing = [d for d in elements if d * sign > 0]
        found.append(sum(agreeing) / len(agreeing) if agreeing else 0.0)
    return base + 0.8 * np.reshape(found, base.shape)


def dare(name: str, xs: Sequence[Any]) -> Any:
    *sources, base = map(wide, xs)
    found = base.copy()
    for number, x in enumerate(sources):
        key, most = xxhash.xxh3_64_intdigest(f"3/{number}/{name}".encode()), (1 << 64) - 1
        mask = []
        for position in range(base.size):
            z = (key + (position + 1) * 0x9E3779B97F4A7C15) & most
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & most
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & most
            mask.append(((z ^ (z >> 31)) >> 11) / 2**53 >= 0.6)
        found = found + np.where(np.reshape(mask, base.shape), (x - base) / (1 - 0.6), 0)
    return found


METHODS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "mean": (mean, 3, {}),
    "weighted": (weighted, 3, {"how": "weighted", "weights": [0.5, -1.25, 2]}),
    "ema": (ema, 4, {"how": Ema(0.7)}),
    "task_arithmetic": (task_arithmetic, 2, {"how": "task_arithmetic", "weights": [0.3, 0.7]}),
    "slerp": (slerp, 2, {"how": Slerp(0.25)}),
    "ties": (ties, 3, {"how": Ties(density=0.3, scale=0.8)}),
    "dare": (dare, 2, {"how": Dare(drop=0.6, seed=3)}),
}


def close(found: Any, expected: Any) -> bool:
    """Whether a result is the expected one, cast once: within the last bit of its dtype."""
    dtype = np.asarray(found).dtype
    if dtype == np.float64:
        return np.allclose(found, expected, rtol=1e-13, atol=1e-13)
    ulp = float(ml_dtypes.finfo(dtype).eps)
    return np.allclose(wide(found), expected, rtol=ulp, atol=1e-6 * ulp)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_what_numpy_makes(name: str, tmp_path: Path) -> None:
    evaluate, count, arguments = METHODS[name]
    paths, states = written(tmp_path, count + 1)
    if "base" in _needs(arguments):
        arguments = {**arguments, "base": paths[count]}
        inputs = states
    else:
        inputs = states[:count]
    found = {}
    for budget in (1 << 20, 40_000):  # in the second, chunks are made piece by piece
        options = SaveOptions(fsync=False, budget_bytes=budget)
        to = tmp_path / f"merged_{budget}"
        report = unickpt.merge(paths[:count], to, options=options, **arguments)
        merged = unickpt.load(to)
        found[budget] = {k: np.asarray(v).tobytes() for k, v in flat(merged).items()}
    assert found[1 << 20] == found[40_000]
    for array in FLOATS:
        value = flat(merged)[array]
        assert value.dtype == np.asarray(states[0][array]).dtype
        assert close(value, evaluate(array, [state[array] for state in inputs])), array
    for array in ("count", "adam_step", "mask"):
        assert flat(merged)[array].tobytes() == np.asarray(states[0][array]).tobytes()
    assert set(report.from_last) == {"count", "adam_step", "mask"}
    assert report.method == name


def _needs(arguments: dict[str, Any]) -> set[str]:
    method = merge_methods.method_of(arguments.get("how", "mean"))
    return {"base"} if method.needs_base else set()


@pytest.mark.parametrize(
    "names",
    [
        ("z1-bf16-dp4", "z2-bf16-rr-dp4", "z3-bf16-dp4"),
        ("z1-bf16opt-bf16-dp2", "z3-subgroups-bf16-dp4"),
        ("z3-fp32-dp2", "z1-bf16-dp4", "z1-fp16-dp2"),
        ("z3-fp32-dp2", "uc-z1-bf16-dp4", "z1-elastic-dp2", "z2-bf16-rr-dp4", "z1-fp16-dp2"),
    ],
)
def test_the_mean_of_deepspeed_checkpoints_is_that_of_what_deepspeed_says(
    names: Sequence[str], deepspeed: Path, tmp_path: Path
) -> None:
    """Of other stages of ZeRO, numbers of ranks and dtypes."""
    told = [deepspeed_cases.arrays(deepspeed / name) for name in names]
    sources = [deepspeed / name / "ckpt" for name in names]
    unickpt.merge(sources, tmp_path / "m", integers="last", options=FAST)
    merged = unickpt.open(tmp_path / "m")
    differ = 0
    for array, last in told[-1].items():
        expected = np.mean([wide(one[array]) for one in told], axis=0).astype(last.dtype)
        found = np.asarray(merged[array][...])
        assert (found.dtype, found.tobytes()) == (last.dtype, expected.tobytes()), array
        differ += found.tobytes() != last.tobytes()
    assert differ > 20


def test_by_metric_and_by_step_of_a_run(tmp_path: Path) -> None:
    """The weights are those of what the Checkpointer recorded."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((30, 40)).astype(np.float32) for _ in range(5)]
    losses = [3.0, 2.0, 1.0, 0.5, 0.8]
    with unickpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        for n, (value, loss) in enumerate(zip(values, losses, strict=True)):
            run.save(10 * n + 10, {"w": value}, metrics={"loss": loss})
    by_loss = unickpt.merge(tmp_path / "run", tmp_path / "a", how=ByMetric(penalty=2), last=3)
    expected = np.array([1.0, 0.5, 0.8]) ** -2.0
    expected /= expected.sum()
    assert np.allclose(by_loss.weights, expected)
    assert [url.rstrip("/")[-7:] for url in by_loss.sources] == ["step_30", "step_40", "step_50"]
    total = sum(w * wide(v) for w, v in zip(expected, values[2:], strict=True))
    assert close(unickpt.load(tmp_path / "a")["w"], total)
    by_step = unickpt.merge(tmp_path / "run", tmp_path / "b", how=ByStep(), last=2)
    assert np.allclose(by_step.weights, [4 / 9, 5 / 9])
    average = unickpt.merge(tmp_path / "run", tmp_path / "c", how=Ema(0.5), last=3)
    assert average.weights == (0.25, 0.25, 0.5)
    with pytest.raises(unickpt.CheckpointNotFound, match=r"5 steps .* last=6"):
        unickpt.merge(tmp_path / "run", tmp_path / "d", last=6)
    with pytest.raises(MergeError, match=r"no metric 'accuracy' .*recorded: loss"):
        unickpt.merge(tmp_path / "run", tmp_path / "d", how=ByMetric("accuracy"), last=2)
    # The result is neither a step of the run nor has its metrics.
    own = unickpt.open(tmp_path / "a").metadata["unickpt"]
    assert own.keys() == {"merge"}
    assert [source["step"] for source in own["merge"]["sources"]] == [30, 40, 50]
    assert own["merge"]["parameters"] == {"metric": "loss", "penalty": 2, "better": "lower"}


def test_what_was_merged_is_recorded(tmp_path: Path) -> None:
    paths, _ = written(tmp_path, 3)
    unickpt.save(tmp_path / "c1", tree(1), metadata={"run": "x"}, overwrite=True)
    unickpt.merge(paths[:2], tmp_path / "m", how=Ties(density=0.5), base=paths[2], options=FAST)
    metadata = unickpt.open(tmp_path / "m").metadata
    assert metadata["run"] == "x"
    record = metadata["unickpt"]["merge"]
    assert (record["method"], record["parameters"]) == ("ties", {"density": 0.5, "scale": 1.0})
    opened = [unickpt.open(path) for path in paths]
    for told, source in zip([*record["sources"], record["base"]], opened, strict=True):
        assert told["url"] == source.url
        assert told["attempt"] == source.index.attempt
    assert [source["weight"] for source in record["sources"]] == [1, 1]


# --- sources that differ --------------------------------------------------------------------------


def test_sources_of_other_layouts_chunks_formats_dtypes_and_names(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    up = [rng.standard_normal((2, 60, 80)).astype(np.float32) for _ in range(4)]
    unickpt.save(tmp_path / "a", {"up": up[0]}, options=SaveOptions(chunk_shape=(1, 7, 80)))

    def rows(group: unickpt.ProcessGroup) -> None:
        at = slice(30 * group.index, 30 * group.index + 30)
        box = unickpt.types.Box((0, at.start, 0), (2, at.stop, 80))
        part = unickpt.types.LocalFragments((2, 60, 80), [(box, up[1][:, at])])
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        unickpt.save(tmp_path / "b", {"up": part}, options=options)

    assert in_job(2, rows) == [None, None]
    names = {f"layers.{n}.up.weight": np.ascontiguousarray(up[2][n].T) for n in range(2)}
    np.savez(tmp_path / "c.npz", **names)
    unickpt.save(tmp_path / "d", {"up": up[3].astype(BF16)}, options=SMALL)
    rules = Rules.parse("layers.{l}.up.weight [o i] <-> up [l i o]")
    paths = [tmp_path / name for name in ("a", "b", "c.npz", "d")]
    report = unickpt.merge(paths, tmp_path / "m", rules=[None, None, rules, None], options=SMALL)
    assert report.dtypes_differ == ("up",)
    found = unickpt.load(tmp_path / "m")["up"]
    assert found.dtype == BF16
    assert close(found, mean("up", [*up[:3], up[3].astype(BF16)]))
    with pytest.raises(ValueError, match="rules= has 3 items"):
        unickpt.merge(paths, tmp_path / "n", rules=[None, None, rules])


def test_all_differences_are_told_at_once(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", {"w": np.ones(3), "x": np.ones(2), "old": np.ones(1), "k": 1.5})
    unickpt.save(tmp_path / "b", {"w": np.ones(4), "x": np.ones(2, int), "new": np.ones(1), "k": 2})
    unickpt.save(tmp_path / "c", {"w": np.ones(4), "x": np.ones(2), "new": 3.0, "k": np.ones(1)})
    with pytest.raises(MergeError) as raised:
        unickpt.merge([tmp_path / "a", tmp_path / "b", tmp_path / "c"], tmp_path / "m")
    told = str(raised.value)
    for words in (
        "'w': float64[4]; float64[3] in",
        "'old': only in",
        "'x': float64[2]; int64[2] in",
        "'new': only in",
        "'k': float64[1]; is plain float 1.5 in",
        "rules=",
    ):
        assert words in told, words
    assert not (tmp_path / "m").exists()


def test_a_tie_that_a_source_lacks_is_a_difference(tmp_path: Path) -> None:
    w = np.ones(3)
    unickpt.save(tmp_path / "tied", {"a": w, "b": w})
    unickpt.save(tmp_path / "two", {"a": w, "b": w + 1})
    with pytest.raises(MergeError, match="'b': tied to 'a'; another array in"):
        unickpt.merge([tmp_path / "two", tmp_path / "tied"], tmp_path / "m")
    unickpt.merge([tmp_path / "tied", tmp_path / "two"], tmp_path / "m")
    assert unickpt.load(tmp_path / "m")["b"].tolist() == [1.5] * 3
    unickpt.merge([tmp_path / "tied", tmp_path / "tied"], tmp_path / "n")
    found = unickpt.load(tmp_path / "n")
    assert found["a"] is found["b"]


def test_conventions_that_differ_are_refused(tmp_path: Path) -> None:
    rules = Rules.parse("convention rope: interleaved <-> half\nw [(p h)] <-> w [(h p)]  h=2")
    unickpt.save(tmp_path / "a", {"w": np.arange(6.0)})
    unickpt.convert(tmp_path / "a", tmp_path / "half", rules=rules)
    back = Rules.parse("convention rope: half <-> interleaved\nw [(h p)] <-> w [(p h)]  h=2")
    unickpt.convert(tmp_path / "half", tmp_path / "inter", rules=back)
    unickpt.save(
        tmp_path / "other",
        {"w": np.arange(6.0)},
        metadata={"unickpt": {"conversion": {"conventions": {"rope": "interleaved"}}}},
    )
    with pytest.raises(MergeError, match="convention 'rope': 'interleaved'; 'half' in"):
        unickpt.merge([tmp_path / "half", tmp_path / "other"], tmp_path / "m")
    unickpt.merge([tmp_path / "half", tmp_path / "other"], tmp_path / "m", rules=[back, None])
    recorded = unickpt.open(tmp_path / "m").metadata["unickpt"]
    assert recorded.keys() == {"conversion", "merge"}


def test_integers_and_counts_that_differ_are_named(tmp_path: Path) -> None:
    for n in range(2):
        state = tree(n, step=n + 1)
        state["key"] = np.arange(n, n + 4, dtype=np.uint32)
        state["same"] = np.arange(10_000)
        options = [FAST, SMALL][n]  # other chunks: digests alone cannot tell
        unickpt.save(tmp_path / f"c{n}", state, options=options)
    paths = [tmp_path / "c0", tmp_path / "c1"]
    with pytest.raises(MergeError, match=r"these differ: 'count', 'key', 'adam_step'.*integers='l"):
        unickpt.merge(paths, tmp_path / "m")
    report = unickpt.merge(paths, tmp_path / "m", integers="last", options=FAST)
    found = unickpt.load(tmp_path / "m")
    assert (found["count"], found["adam_step"], found["step"]) == (2, 2, 2)
    assert found["key"].tolist() == [1, 2, 3, 4]
    assert set(report.from_last) == {"count", "key", "adam_step", "same", "mask"}
    assert report.values_differ == ("step",)
    assert any("1 plain values that differ" in note for note in report.notes)
    with pytest.raises(ValueError, match="integers='first'"):
        unickpt.merge(paths, tmp_path / "m", integers="first")


def test_integers_are_compared_by_digests_where_these_tell(
    tmp_path: Path, chunk_reads: list[ChunkRead]
) -> None:
    for n in range(2):
        unickpt.save(tmp_path / f"c{n}", {"tokens": np.arange(10_000), "w": np.ones(4) / 3})
    chunk_reads.clear()
    unickpt.merge([tmp_path / "c0", tmp_path / "c1"], tmp_path / "m", verify=False)
    assert [read.key for read in chunk_reads].count("tokens") == 1  # to write it


def test_plain_values_that_sources_lack_are_told(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", {"w": np.ones(3), "gone": "x", "lr": 0.1, "same": (1, "y")})
    unickpt.save(tmp_path / "b", {"w": np.ones(3), "lr": 0.2, "new": None, "same": (1, "y")})
    report = unickpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    assert set(report.values_differ) == {"gone", "lr", "new"}
    assert unickpt.load(tmp_path / "m")["lr"] == 0.2


def test_per_process_values_are_those_of_the_last(tmp_path: Path) -> None:
    for n in range(2):
        unickpt.save(tmp_path / f"c{n}", {"w": np.ones(2) / 3, "rng": PerProcess({"seed": n})})
    paths = [tmp_path / "c0", tmp_path / "c1"]
    report = unickpt.merge(paths, tmp_path / "m")
    assert report.values_differ == ("rng",)
    assert unickpt.load(tmp_path / "m")["rng"].values == ({"seed": 1},)
    two = SaveOptions(group=unickpt.ProcessGroup(0, 2, "x" * 32))
    with pytest.raises(unickpt.LoadMismatch, match=r"'rng' .* and 2 merge it; merge with as many"):
        unickpt.merge(paths, tmp_path / "n", options=two)


# --- numbers that cannot be merged ----------------------------------------------------------------


def test_nan_is_refused_with_its_source_and_array_unless_allowed(tmp_path: Path) -> None:
    paths, _ = written(tmp_path, 3)
    bad = tree(1)
    bad["layers"]["w"][5, 7] = np.nan
    bad["wide"][9] = -np.inf
    unickpt.save(paths[1], bad, overwrite=True, options=FAST)
    for arguments in (
        {"how": "mean"},
        {"how": "slerp"},
        {"how": "ties", "base": paths[2]},
        {"how": "dare", "base": paths[2]},
    ):
        with pytest.raises(MergeError, match=r"array '(layers/w|wide)' has NaN .* in .*c1"):
            unickpt.merge(paths[:2], tmp_path / "m", **arguments)
        with pytest.raises(unickpt.CheckpointNotFound):
            unickpt.open(tmp_path / "m")
        if arguments["how"] != "mean":
            with pytest.raises(ValueError, match="cannot merge NaN"):
                unickpt.merge(paths[:2], tmp_path / "m", allow_nonfinite=True, **arguments)
    report = unickpt.merge(paths[:2], tmp_path / "m", allow_nonfinite=True, options=FAST)
    url = unickpt.open(paths[1]).url
    assert report.nonfinite == ((url, "layers/w"), (url, "wide"))
    assert any("2 arrays with NaN" in note for note in report.notes)
    found = unickpt.load(tmp_path / "m")["layers"]["w"]
    assert np.isnan(found[5, 7])
    assert np.isnan(found).sum() == 1


def test_what_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    for n in range(2):
        unickpt.save(tmp_path / f"c{n}", {"w": np.full(5, 40_000, np.float16)})
    paths = [tmp_path / "c0", tmp_path / "c1"]
    with pytest.raises(MergeError, match=r"array 'w' .* float16, its dtype in .*c1"):
        unickpt.merge(paths, tmp_path / "m", how="weighted", weights=[1, 1])
    report = unickpt.merge(paths, tmp_path / "m", how="weighted", weights=[1, 0.5])
    assert report.notes == ("the weights sum to 1.5, not to 1",)


def test_complex_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    xs = [rng.standard_normal(50) + 1j * rng.standard_normal(50) for _ in range(3)]
    for n, x in enumerate(xs):
        unickpt.save(tmp_path / f"c{n}", {"z": x.astype(np.complex64)})
    paths = [tmp_path / f"c{n}" for n in range(3)]
    unickpt.merge(paths, tmp_path / "m")
    assert np.allclose(unickpt.load(tmp_path / "m")["z"], sum(xs) / 3, rtol=1e-6)
    unickpt.merge(paths[:2], tmp_path / "s", how="slerp")
    inner = np.vdot(xs[0], xs[1]).real / np.linalg.norm(xs[0]) / np.linalg.norm(xs[1])
    factor = math.sin(math.acos(inner) / 2) / math.sin(math.acos(inner))
    assert np.allclose(unickpt.load(tmp_path / "s")["z"], factor * (xs[0] + xs[1]), rtol=1e-4)
    with pytest.raises(MergeError, match="'z' is complex64: how='ties' compares signs"):
        unickpt.merge(paths[:2], tmp_path / "t", how="ties", base=paths[2])


# --- arguments, destinations ----------------------------------------------------------------------


def test_mistakes_are_told(tmp_path: Path) -> None:
    paths, _ = written(tmp_path, 3)
    to = tmp_path / "m"
    for words, arguments in {
        "is no method": {"how": "median"},
        "needs base=": {"how": "ties"},
        "has no base": {"base": paths[2]},
        "takes no weights": {"weights": [1, 1, 1]},
        "takes two sources, not 3": {"how": "slerp"},
        "2 weights for 3": {"how": "weighted", "weights": [1, 1]},
        "the folder of one run": {"last": 2},
    }.items():
        with pytest.raises(ValueError, match=words):
            unickpt.merge(paths, to, **arguments)
    with pytest.raises(ValueError, match="a sequence of checkpoints"):
        unickpt.merge(paths[0], to)
    with pytest.raises(ValueError, match="at least 2 sources, not 1"):
        unickpt.merge(paths[:1], to)
    with pytest.raises(ValueError, match="at least 1"):
        unickpt.merge(tmp_path, to, last=0)
    assert not to.exists()


def test_the_destination_is_none_of_the_sources_and_is_replaced_if_asked(tmp_path: Path) -> None:
    paths, states = written(tmp_path, 3)
    before = files(tmp_path)
    for to, arguments in ((paths[0], {}), (paths[2], {"how": "task_arithmetic", "base": paths[2]})):
        with pytest.raises(unickpt.CheckpointExists, match="is one of the sources"):
            unickpt.merge(paths[:2], to, overwrite=True, **arguments)
    assert files(tmp_path) == before
    unickpt.save(tmp_path / "m", {"x": 1})
    with pytest.raises(unickpt.CheckpointExists):
        unickpt.merge(paths, tmp_path / "m")
    assert unickpt.load(tmp_path / "m") == {"x": 1}
    unickpt.merge(paths, tmp_path / "m", overwrite=True, options=FAST)
    assert close(unickpt.load(tmp_path / "m")["wide"], mean("wide", [s["wide"] for s in states]))


def test_a_destination_in_use_is_refused_before_arrays_are_read(
    tmp_path: Path, chunk_reads: list[ChunkRead]
) -> None:
    for n in range(2):
        unickpt.save(tmp_path / f"c{n}", {"w": np.random.default_rng(n).random(50)}, options=FAST)
    with pytest.raises(unickpt.CheckpointExists):
        unickpt.merge([tmp_path / "c0"] * 2, tmp_path / "c1", how="slerp")
    assert chunk_reads == []


def test_damage_in_a_source_is_found(tmp_path: Path) -> None:
    paths, states = written(tmp_path, 2)
    (data,) = (paths[0] / "processes").rglob("d/*")
    damaged = bytearray(data.read_bytes())
    damaged[damaged.find(states[0]["wide"].tobytes()[:64])] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(unickpt.CheckpointCorrupt, match=r"'wide'.*do not match their digest"):
        unickpt.merge(paths, tmp_path / "m")
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open(tmp_path / "m")


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    paths, _ = written(tmp_path, 2)
    seen: list[tuple[int, int]] = []
    report = unickpt.merge(paths, tmp_path / "m", progress=lambda *s: seen.append(s), options=SMALL)
    assert seen[-1][0] == seen[-1][1] == report.saved.bytes
    assert len(seen) > 5


# --- processes ------------------------------------------------------------------------------------

MERGE = """
    import json, sys, torch.distributed as dist, unickpt
    from unickpt import merge_methods as m
    dist.init_process_group("gloo")
    folder = sys.argv[1]
    options = unickpt.SaveOptions(chunk_bytes=2000, fsync=False)
    paths = [f"{folder}/c{n}" for n in range(2)]
    for how in (m.Mean(), m.Slerp(0.25), m.Ties(), m.Dare(), m.TaskArithmetic()):
        base = f"{folder}/c2" if how.needs_base else None
        to = f"{folder}/two_{how.name}"
        report = unickpt.merge(paths, to, how=how, base=base, options=options)
        assert report.saved.processes == 2 and report.saved.chunks > 2, report
    try:
        unickpt.merge([paths[0], f"{folder}/bad"], f"{folder}/m", how="slerp", options=options)
    except unickpt.UnickptError as error:
        print(json.dumps([type(error).__name__, str(error)]))
    dist.destroy_process_group()
"""


def test_two_ranks_make_the_same_bits_as_one_process(processes: Processes, tmp_path: Path) -> None:
    paths, _ = written(tmp_path, 3)
    bad = tree(1)
    bad["scale"] = np.float32(np.nan)
    unickpt.save(tmp_path / "bad", bad, options=FAST)
    told = processes.finish(processes.torch(2, textwrap.dedent(MERGE), tmp_path))
    for kind in (merge_methods.Mean, Slerp, Ties, Dare, merge_methods.TaskArithmetic):
        how = Slerp(0.25) if kind is Slerp else kind()
        base = paths[2] if how.needs_base else None
        unickpt.merge(paths[:2], tmp_path / f"one_{how.name}", how=how, base=base, options=SMALL)
        one, two = (flat(unickpt.load(tmp_path / f"{n}_{how.name}")) for n in ("one", "two"))
        for name in one:
            assert one[name].tobytes() == two[name].tobytes(), (how, name)
    errors = [json.loads(out) for out in told]
    assert {kind for kind, _ in errors} <= {"MergeError", "ProcessFailed"}
    assert any(kind == "MergeError" for kind, _ in errors)
    assert all("'scale' has NaN" in text for _, text in errors), errors


def test_processes_that_merge_different_sources_fail(tmp_path: Path) -> None:
    written(tmp_path, 3)

    def run(group: unickpt.ProcessGroup) -> None:
        paths = [tmp_path / f"c{n + group.index}" for n in range(2)]
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        unickpt.merge(paths, tmp_path / "m", options=options)

    first, second = in_job(2, run)
    assert isinstance(first, unickpt.errors.CoverageError), first
    assert "different metadata" in str(first)
    assert isinstance(second, unickpt.UnickptError), second
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open(tmp_path / "m")


def test_a_group_without_communication_is_told_what_it_needs(tmp_path: Path) -> None:
    paths, _ = written(tmp_path, 2)

    def run(group: unickpt.ProcessGroup) -> None:
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        unickpt.merge(paths, tmp_path / "m", how="slerp", options=options)

    for error in in_job(2, run):
        assert "give ProcessGroup(..., exchange=)" in str(error), error


def test_a_killed_merge_leaves_no_checkpoint_and_can_be_repeated(
    processes: Processes, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    for n in range(2):
        state = {f"w{k}": rng.standard_normal((500, 500)) for k in range(20)}
        unickpt.save(tmp_path / f"c{n}", state, options=FAST)
    source = """
        import sys, time, unickpt
        a, b, to = sys.argv[1:]
        def slowly(done, total):
            print(done, flush=True)
            time.sleep(0.1)
        options = unickpt.SaveOptions(budget_bytes=1 << 20, chunk_bytes=100_000)
        unickpt.merge([a, b], to, options=options, progress=slowly)
    """
    paths = [tmp_path / "c0", tmp_path / "c1"]
    running = processes.start(textwrap.dedent(source), *paths, tmp_path / "m")
    assert running.stdout is not None
    running.stdout.readline()
    time.sleep(0.3)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open(tmp_path / "m")
    assert all(unickpt.verify(path).ok for path in paths)
    unickpt.merge(paths, tmp_path / "m", options=FAST)
    assert unickpt.verify(tmp_path / "m").ok


@pytest.mark.parametrize("how", ["mean", "ties"])
def test_chunks_that_are_large_with_their_inputs_are_made_piece_by_piece(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    states = [{"w": rng.standard_normal((1000, 1000), np.float32)} for _ in range(4)]
    for n, state in enumerate(states):
        unickpt.save(tmp_path / f"c{n}", state, options=FAST)
    paths, read = [tmp_path / f"c{n}" for n in range(4)], list[int]()

    def counted(view: Any, boxes: Any, *rest: Any) -> Any:
        read.append(sum(box.size * entry.itemsize for entry, box in boxes))
        return read_boxes(view, boxes, *rest)

    monkeypatch.setattr("unickpt.plugins.merge.merging.read_boxes", counted)
    budget = 24_000_000  # a chunk and its four inputs are 20 MB
    options = SaveOptions(fsync=False, budget_bytes=budget)
    arguments = {"base": paths[3]} if how == "ties" else {}
    sources = paths[:3] if how == "ties" else paths
    unickpt.merge(sources, tmp_path / "m", how=how, options=options, verify=False, **arguments)
    assert 4 * max(read) <= budget // 6
    unickpt.merge(sources, tmp_path / "n", how=how, options=FAST, **arguments)
    assert unickpt.diff(tmp_path / "m", tmp_path / "n").same


def test_arrays_that_did_not_change_are_not_written_again(tmp_path: Path) -> None:
    """Their mean has the same bits, so that a base has their chunks."""
    frozen = np.random.default_rng(0).standard_normal((300, 400), np.float32)
    with unickpt.Checkpointer(tmp_path / "run", reuse=True, options=FAST) as run:
        for step in (1, 2, 3):
            run.save(step, {"frozen": frozen, "x": np.full(9, step / 3)})
    options = SaveOptions(fsync=False, base=tmp_path / "run" / "step_3")
    report = unickpt.merge(tmp_path / "run", tmp_path / "m", last=3, options=options)
    assert report.saved.reused_bytes == frozen.nbytes
    assert unickpt.load(tmp_path / "m")["frozen"].tobytes() == frozen.tobytes()


def test_processes_share_what_is_measured(tmp_path: Path, chunk_reads: list[ChunkRead]) -> None:
    """SLERP reads every chunk of its sources twice, in a job of any size."""
    for n in range(2):
        rng = np.random.default_rng(n)
        state = {f"w{k}": rng.standard_normal((40, 50)) for k in range(6)}
        unickpt.save(tmp_path / f"c{n}", state, options=FAST)
    paths = [tmp_path / "c0", tmp_path / "c1"]
    unickpt.merge(paths, tmp_path / "one", how="slerp", options=FAST, verify=False)
    assert len(chunk_reads) == 24
    chunk_reads.clear()

    def work(index: int, options: unickpt.LoadOptions) -> None:
        saving = SaveOptions(group=options.group, fsync=False, timeout_s=20)
        unickpt.merge(paths, tmp_path / "three", how="slerp", options=saving, verify=False)

    assert Threads(3).run(work) == [None] * 3
    assert len(chunk_reads) == 24
    assert unickpt.diff(tmp_path / "one", tmp_path / "three").same


def test_memory_stays_within_the_budget(processes: Processes, tmp_path: Path) -> None:
    """Of sources that are ten times as large together."""
    rng = np.random.default_rng(0)
    for n in range(4):
        state = {"w": rng.standard_normal((40, 500_000), np.float32)}  # 80 MB
        unickpt.save(tmp_path / f"c{n}", state, options=FAST)
    source = """
        import pathlib, re, sys, unickpt
        from unickpt import merge_methods as m
        def peak():  # in MB; that of getrusage counts the parent process too
            status = pathlib.Path("/proc/self/status").read_text()
            return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024
        paths, to = sys.argv[1:5], sys.argv[5]
        options = unickpt.SaveOptions(budget_bytes=1 << 20, fsync=False)
        unickpt.merge([f"{p}s" for p in paths], f"{to}s", options=options, verify=False)
        before = peak()
        options = unickpt.SaveOptions(budget_bytes=96 << 20, fsync=False)
        unickpt.merge(paths, to, options=options, verify=False)
        more = {"base": paths[3], "options": options, "verify": False}
        unickpt.merge(paths[:3], to + "t", how=m.Ties(), **more)
        print(peak() - before)
    """
    for n in range(4):
        unickpt.save(tmp_path / f"c{n}s", {"w": np.full(3, 0.3)}, options=FAST)
    paths = [tmp_path / f"c{n}" for n in range(4)]
    running = processes.start(textwrap.dedent(source), *paths, tmp_path / "m")
    (out,) = processes.finish([running])
    assert float(out) < 96 + 30, out
