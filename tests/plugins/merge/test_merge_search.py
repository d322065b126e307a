"""The search for the weights of a merge: finds them, alone and in a job; errors reach everybody."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import s3_server
from support.processes import Processes
from support.saving import files

import unickpt
from unickpt import Checkpoint, SaveOptions
from unickpt.errors import MergeError
from unickpt.plugins.merge.method_parameters import Search, Weighted
from unickpt.plugins.merge.weight_search import Trial, balanced, pareto_front
from unickpt.reading.checkpoints_below import checkpoints_below

pytest.importorskip("scipy")
pytest.importorskip("optuna")
FAST = SaveOptions(fsync=False)
BEST = np.array([0.7, -0.2, 0.4])


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"c{n}" for n in range(3)]
    for n, path in enumerate(found):
        state = {"w": np.random.default_rng(n).standard_normal((20, 30)), "n": np.int64(3)}
        unickpt.save(path, state, options=FAST)
    return found


def goal(paths: Sequence[Path]) -> Any:
    return sum(b * unickpt.load(path)["w"] for b, path in zip(BEST, paths, strict=True))


def test_the_weights_of_the_best_merge_are_found(paths: list[Path], tmp_path: Path) -> None:
    wanted, seen = goal(paths), list[float]()

    def loss(trial: Checkpoint) -> float:
        seen.append(float(((trial["w"][:] - wanted) ** 2).mean()))
        return seen[-1]

    before = set(files(tmp_path))
    how = Search(loss, better="lower", trials=60, low=-1)
    report = unickpt.merge(paths, tmp_path / "m", how=how, options=FAST)
    assert np.allclose(report.weights, BEST, atol=1e-3)
    assert report.score == min(seen) < 1e-6
    assert seen[0] == pytest.approx(float(((mean(paths) - wanted) ** 2).mean()))  # the start
    assert len(seen) <= 60
    assert all(name.startswith("m/") for name in set(files(tmp_path)) - before)  # no trial is left
    own = unickpt.open(tmp_path / "m").metadata["unickpt"]["merge"]
    assert own["score"] == report.score
    assert own["parameters"] == {"better": "lower", "trials": 60, "low": -1, "high": 1.0}
    assert [source["weight"] for source in own["sources"]] == list(report.weights)
    found = unickpt.load(tmp_path / "m")["w"]
    unickpt.merge(paths, tmp_path / "n", how=Weighted(), weights=report.weights, options=FAST)
    assert found.tobytes() == unickpt.load(tmp_path / "n")["w"].tobytes()


def mean(paths: Sequence[Path]) -> Any:
    return sum(unickpt.load(path)["w"] for path in paths) / len(paths)


def test_higher_scores_are_better_by_default_and_infinite_ones_are_none(
    paths: list[Path], tmp_path: Path
) -> None:
    wanted = goal(paths)
    scores = iter([-math.inf])

    def score(trial: Checkpoint) -> float:
        return next(scores, -float(np.abs(trial["w"][:] - wanted).max()))

    how = Search(score, trials=40, low=-1, scratch=f"memory://scratch/{tmp_path.name}")
    report = unickpt.merge(paths, tmp_path / "m", how=how, options=FAST)
    assert report.score is not None
    assert report.score > -0.6
    how = Search(lambda trial: -math.inf, trials=5)
    with pytest.raises(MergeError, match=r"none of \d+ trials has finite scores; .* -inf"):
        unickpt.merge(paths, tmp_path / "n", how=how, options=FAST)


def test_mistakes_are_told_before_and_leave_nothing(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(tmp_path)

    def fails(trial: Checkpoint) -> float:
        raise KeyError("a mistake of the user's")

    with pytest.raises(KeyError, match="a mistake"):
        unickpt.merge(paths, tmp_path / "m", how=Search(fails), options=FAST)
    with pytest.raises(MergeError, match="is nan"):
        unickpt.merge(paths, tmp_path / "m", how=Search(lambda _: math.nan), options=FAST)
    with pytest.raises(unickpt.CheckpointExists, match="one of the sources"):
        unickpt.merge(paths, paths[0], how=Search(fails), overwrite=True)
    with pytest.raises(ValueError, match="takes no weights"):
        unickpt.merge(paths, tmp_path / "m", how=Search(fails), weights=[1, 2, 3])
    with pytest.raises(TypeError, match="score"):
        Search("accuracy")  # type: ignore[arg-type]
    for arguments in ({"trials": 0}, {"better": "more"}, {"low": 2}, {"high": math.nan}):
        with pytest.raises(ValueError, match=next(iter(arguments)) + "|high"):
            Search(fails, **arguments)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MergeError, match=r"pip install 'unickpt\[search\]'"):
        unickpt.merge(paths, tmp_path / "m", how=Search(fails), options=FAST)
    assert files(tmp_path) == before
    unickpt.save(tmp_path / "m", {"x": 1}, options=FAST)
    with pytest.raises(unickpt.CheckpointExists, match="already holds"):
        unickpt.merge(paths, tmp_path / "m", how=Search(fails), options=FAST)  # no trial was made


# --- several tasks -------------------------------------------------------------------------------


def two_tasks(paths: list[Path]) -> Callable[[Checkpoint], dict[str, float]]:
    """Errors from two different goals: what serves one harms the other."""
    goals = {"math": unickpt.load(paths[0])["w"], "code": unickpt.load(paths[1])["w"]}

    def scores(trial: Checkpoint) -> dict[str, float]:
        found = trial["w"][:]
        return {task: float(((found - goal) ** 2).mean()) for task, goal in goals.items()}

    return scores


def test_several_tasks_give_the_pareto_front(paths: list[Path], tmp_path: Path) -> None:
    how = Search(two_tasks(paths), better="lower", trials=30)
    report = unickpt.merge(paths, tmp_path / "m", how=how, options=FAST)
    found = report.trials
    assert found is not None
    assert report.score is None
    assert len(found) == 30
    front = [found.trials[number] for number in found.front]
    alone = {(1.0, 0.0, 0.0), (0.0, 1.0, 0.0)}  # each is perfect in one
    assert alone <= {trial.weights for trial in front}
    assert len(front) > 4
    ordered = sorted(front, key=lambda trial: trial.scores["math"])
    assert [t.scores["code"] for t in ordered] == sorted(
        (t.scores["code"] for t in ordered), reverse=True
    )
    chosen = found.trials[found.chosen]
    assert report.weights == chosen.weights
    assert max(chosen.scores.values()) < 0.9, "neither of the goals themselves: 2"
    recorded = unickpt.open(tmp_path / "m").metadata["unickpt"]["merge"]["front"]
    assert [tuple(each["weights"]) for each in recorded] == [trial.weights for trial in front]
    lines = str(found).splitlines()
    assert lines[0].split() == ["trial", "c0", "c1", "c2", "math", "code"]
    assert len(lines) == 1 + len(front)
    assert sum("*" in line for line in lines) == 1
    drawn = found._repr_html_()
    assert drawn.count("<circle") == 30
    assert drawn.count("<tr") == 1 + len(front)


def test_the_program_chooses_of_the_front(paths: list[Path], tmp_path: Path) -> None:
    def best_at_math(front: Sequence[Any]) -> Any:
        return min(front, key=lambda trial: trial.scores["math"])

    how = Search(two_tasks(paths), better={"math": "lower", "code": "lower"}, trials=6,
                 choose=best_at_math)  # fmt: skip
    report = unickpt.merge(paths, tmp_path / "m", how=how, options=FAST)
    assert report.weights == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("several", [False, True])
def test_a_search_that_was_stopped_goes_on(
    several: bool, paths: list[Path], tmp_path: Path
) -> None:
    both, calls = two_tasks(paths), list[object]()

    def score(trial: Checkpoint) -> Any:
        calls.append(trial)
        if len(calls) == 6:
            raise KeyboardInterrupt
        found = both(trial)
        return found if several else found["math"]

    log = tmp_path / "trials.jsonl"
    how = Search(score, better="lower", trials=12, log=log)
    with pytest.raises(KeyboardInterrupt):
        unickpt.merge(paths, tmp_path / "m", how=how, options=FAST)
    assert len(log.read_text().splitlines()) == 1 + 5
    with log.open("a") as file:
        file.write('{"weights": [0.1')  # of a process that was killed while it wrote
    report = unickpt.merge(paths, tmp_path / "m", how=how, options=FAST)
    assert len(calls) <= 6 + 12 - 5
    whole = Search(lambda trial: both(trial) if several else both(trial)["math"], better="lower",
                   trials=12)  # fmt: skip
    expected = unickpt.merge(paths, tmp_path / "n", how=whole, options=FAST)
    assert report.weights == expected.weights
    assert report.trials == expected.trials
    unickpt.save(paths[0], {"w": np.zeros((20, 30)), "n": np.int64(3)}, overwrite=True)
    with pytest.raises(MergeError, match="trials of another search"):
        unickpt.merge(paths, tmp_path / "o", how=how, options=FAST)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 1, math.inf])),
        min_size=1,
        max_size=12,
    )
)
def test_no_trial_beats_one_of_the_front(scores: list[tuple[float, ...]]) -> None:
    better = {"a": "higher", "b": "lower", "c": "lower"}
    trials = [Trial((n,), dict(zip("abc", each, strict=True))) for n, each in enumerate(scores)]
    costs = [(-a, b, c) for a, b, c in scores]

    def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return one != other and all(x <= y for x, y in zip(one, other, strict=True))

    front = pareto_front(trials, better)
    assert list(front) == sorted(front)
    finite = [n for n, cost in enumerate(costs) if math.isfinite(cost[2])]
    for number in finite:
        beaten = any(beats(other, costs[number]) for other in costs)
        first = costs.index(costs[number]) == number
        assert (number in front) == (first and not beaten)
    assert set(front) <= set(finite)
    if front:
        assert balanced(trials, better, front) in front


def test_mistakes_with_tasks_are_told(paths: list[Path], tmp_path: Path) -> None:
    tasks = iter([{"a": 1.0}, {"b": 1.0}])
    with pytest.raises(MergeError, match=r"for the tasks \['b'\], .* for \['a'\]"):
        unickpt.merge(paths, tmp_path / "m", how=Search(lambda _: next(tasks)), options=FAST)
    how = Search(lambda _: {"a": 1.0}, better={"b": "lower"})
    with pytest.raises(MergeError, match=r"other tasks than \['a'\]"):
        unickpt.merge(paths, tmp_path / "m", how=how, options=FAST)
    with pytest.raises(MergeError, match="no scores"):
        unickpt.merge(paths, tmp_path / "m", how=Search(lambda _: {}), options=FAST)
    with pytest.raises(ValueError, match="better"):
        Search(lambda _: {}, better={"a": "more"})  # type: ignore[dict-item]
    how = Search(lambda _: 1.0, log=tmp_path)
    with pytest.raises(MergeError, match=r"trials in .* cannot be used"):
        unickpt.merge(paths, tmp_path / "m", how=how, options=FAST)


def test_on_object_storage(paths: list[Path], moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "merging")
    for n, path in enumerate(paths):
        unickpt.convert(path, f"s3://merging/c{n}", verify=False)
    wanted = goal(paths)
    how = Search(lambda trial: -float(((trial["w"][:] - wanted) ** 2).sum()), trials=6)
    sources = [f"s3://merging/c{n}" for n in range(3)]
    report = unickpt.merge(sources, "s3://merging/m", how=how)
    expected = sum(
        w * unickpt.load(path)["w"] for w, path in zip(report.weights, paths, strict=True)
    )
    assert np.allclose(unickpt.load("s3://merging/m")["w"], expected, rtol=1e-12)
    left = [listed.name for listed in checkpoints_below("s3://merging")]
    assert left == ["c0", "c1", "c2", "m"]


JOB = """
    import json, sys, torch.distributed as dist, numpy as np, unickpt
    from unickpt.plugins.merge.method_parameters import Search
    dist.init_process_group("gloo")
    folder, rank = sys.argv[1], dist.get_rank()
    options = unickpt.SaveOptions(fsync=False, chunk_bytes=800)
    paths = [f"{folder}/c{n}" for n in range(3)]
    calls = []
    def score(trial):  # whose value counts on process 0 only
        calls.append(1)
        return -float(((trial["w"][:] - 0.5) ** 2).sum()) * (1 if rank == 0 else -1)
    report = unickpt.merge(paths, f"{folder}/m", how=Search(score, trials=3), options=options)
    def fails(trial):
        return 1 / 0 if rank == 1 else 0.0
    try:
        unickpt.merge(paths, f"{folder}/n", how=Search(fails), options=options)
    except (unickpt.UnickptError, ZeroDivisionError) as error:
        print(json.dumps([report.weights, len(calls), type(error).__name__, str(error)]))
    dist.destroy_process_group()
"""


def test_the_processes_of_a_job_search_together(
    processes: Processes, paths: list[Path], tmp_path: Path
) -> None:
    outs = processes.finish(processes.torch(2, textwrap.dedent(JOB), tmp_path))
    first, second = (json.loads(out) for out in outs)
    assert first[:2] == second[:2]
    assert first[2:] == ["ProcessFailed", "process 1 failed: ZeroDivisionError: division by zero"]
    assert second[2] == "ZeroDivisionError"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c0", "c1", "c2", "m"]
