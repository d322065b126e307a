"""The search for the weights of a merge: an optimiser tries weights, a function scores merges."""

from __future__ import annotations

import importlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt import Checkpoint
from unickpt.errors import MergeError, ProcessFailed
from unickpt.extend import (
    all_gather_bytes,
    html_page,
    html_table,
    members_of,
    process_names,
)
from unickpt.plugins.merge import front_plot
from unickpt.plugins.merge.method_parameters import Search
from unickpt.types import Group

SourceWeights = tuple[float, ...]
Scores = dict[str, float]
ONLY = ""
"""The name of a score that is a plain number."""


@dataclass(frozen=True)
class Trial:
    """A merge that was tried.

    Arguments:
        weights: of the sources.
        scores: of the merge, by task.
    """

    weights: SourceWeights
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Trials:
    """The trials of a search on several tasks, in their order.

    Arguments:
        sources: their URLs.
        better: for each task whether "higher" or "lower" scores are better.
        trials: all of them.
        chosen: the number of the trial that became the result.

    Example:
        >>> tried = (Trial((1, 0), {"a": 1, "b": 3}), Trial((0, 1), {"a": 0, "b": 2}))
        >>> Trials(("x", "y"), {"a": "higher", "b": "lower"}, tried, 0).front
        (0, 1)
    """

    sources: tuple[str, ...]
    better: Mapping[str, str]
    trials: tuple[Trial, ...]
    chosen: int

    @property
    def front(self) -> tuple[int, ...]:
        """The numbers of the trials on the Pareto front: no other is at least as good in all tasks
        and better in one."""
        return pareto_front(self.trials, self.better)

    @property
    def recorded(self) -> list[dict[str, Any]]:
        """The front, for the metadata of the result."""
        chosen = (self.trials[number] for number in self.front)
        return [{"weights": list(t.weights), "scores": dict(t.scores)} for t in chosen]

    def __len__(self) -> int:
        return len(self.trials)

    def __str__(self) -> str:
        rows = [self.headings, *map(self.row, self.front)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )

    @property
    def headings(self) -> list[str]:
        """Of a table of trials."""
        names = [source.rstrip("/").rpartition("/")[2] for source in self.sources]
        return ["trial", *names, *self.better]

    def row(self, number: int) -> list[str]:
        """The cells of a trial; a star marks the one that was chosen."""
        trial = self.trials[number]
        values = [*trial.weights, *(trial.scores[task] for task in self.better)]
        return [f"{'*' * (number == self.chosen)}{number}", *(f"{value:.4g}" for value in values)]

    def _repr_html_(self) -> str:
        front = self.front
        rows = [self.row(number) for number in front]
        facts = [f"{len(self)} trials", f"{len(front)} on the front", f"chosen: {self.chosen}"]
        axes = list(self.better)[:2]
        points = [[trial.scores[task] for task in axes] for trial in self.trials]
        plot = front_plot.svg(axes, points, front, self.chosen) if len(axes) == 2 else ""
        shown = html_table(self.headings, rows, len(rows))
        return html_page("search", "merged weights", facts, plot, shown)


def pareto_front(trials: Sequence[Trial], better: Mapping[str, str]) -> tuple[int, ...]:
    """The numbers of trials that no other one dominates; of equal ones the first.

    Arguments:
        trials: with finite or infinite scores.
        better: by task, "higher" or "lower".
    """
    costs = [_costs(trial, better) for trial in trials]
    front = []
    for number, cost in enumerate(costs):
        worse = any(
            all(a <= b for a, b in zip(other, cost, strict=True))
            and (other != cost or index < number)
            for index, other in enumerate(costs)
            if index != number
        )
        if not worse and all(map(math.isfinite, cost)):
            front.append(number)
    return tuple(front)


def balanced(trials: Sequence[Trial], better: Mapping[str, str], front: Sequence[int]) -> int:
    """The trial of a front whose largest distance to the best of any task is smallest; each task's
    range on the front counts as 1."""
    costs = {number: _costs(trials[number], better) for number in front}
    best, worst = (list(map(f, zip(*costs.values(), strict=True))) for f in (min, max))

    def distance(number: int) -> float:
        return max(
            (cost - low) / (high - low) if high > low else 0.0
            for cost, low, high in zip(costs[number], best, worst, strict=True)
        )

    return min(front, key=distance)


def _costs(trial: Trial, better: Mapping[str, str]) -> tuple[float, ...]:
    """The scores, so that lower ones are better."""
    return tuple(
        trial.scores[task] * (-1 if way == "higher" else 1) for task, way in better.items()
    )


class TrialLog:
    """The file of trials, which a stopped search resumes from.

    Arguments:
        path: of the file; None for none.
        about: the search's sources and settings.

    Raises:
        MergeError: the file is of another search, or cannot be read or written.
    """

    def __init__(self, path: str | None, about: Mapping[str, Any]) -> None:
        self._path, self.known = path, dict[SourceWeights, Scores]()
        if path is None:
            return
        first = json.dumps(about, sort_keys=True)
        try:
            text = Path(path).read_text("utf-8") if os.path.exists(path) else ""
            lines = text.split("\n")[:-1]  # a line without an end was not written whole
            if lines and lines[0] != first:
                raise MergeError(
                    f"{path} keeps the trials of another search, of other sources or with other "
                    "parameters; remove it, or name another file"
                )
            for line in lines[1:]:
                trial = json.loads(line)
                self.known[tuple(trial["weights"])] = trial["scores"]
            whole = sum(len(line.encode()) + 1 for line in lines)
            if whole < len(text.encode()):
                os.truncate(path, whole)
            if not lines:
                self._append(first)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MergeError(f"the trials in {path} cannot be used: {error}") from error

    def add(self, weights: SourceWeights, scores: Scores) -> None:
        """Keeps a trial.

        Raises:
            OSError: it cannot be written.
        """
        self.known[weights] = scores
        if self._path is not None:
            self._append(json.dumps({"weights": weights, "scores": scores}))

    def _append(self, line: str) -> None:
        assert self._path is not None, "only what has a file is written"
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True)
class BestWeights:
    """The result of a search.

    Arguments:
        weights: of the sources, those of the chosen trial.
        score: its score; None of several tasks.
        trials: all of them, of several tasks.
    """

    weights: SourceWeights
    score: float | None = None
    trials: Trials | None = None


def search(
    method: Search,
    group: Group,
    start: SourceWeights,
    merged: Callable[[SourceWeights], Checkpoint],
    sources: Sequence[Mapping[str, Any]],
) -> BestWeights:
    """The best weights that were tried; of several tasks those of a trial on the Pareto front. The
    same on all processes.

    Process 0 has the optimiser, and sends the others the weights to try.

    Arguments:
        method: of the search.
        group: the processes.
        start: the first weights to try.
        merged: merges with weights; called by all processes.
        sources: facts about each: at least its "url".

    Raises:
        MergeError: scipy or optuna is not installed, a score is no number, or `Search.log` is of
            another search.
        ProcessFailed: another process failed.
    """
    trials = _Trying(method, group, merged, [str(source["url"]) for source in sources])
    try:
        if group.index > 0:
            return trials.follow()
        _imported("scipy.optimize")  # before a trial takes long
        path = None if method.log is None else os.fspath(method.log)
        trials.log = TrialLog(path, {"sources": list(sources), **method.parameters})
        first = tuple(min(max(weight, method.low), method.high) for weight in start)
        # Before the optimiser runs, since optimisers move weights that are close to a bound.
        tasks = trials.scores(first)
        if ONLY in tasks:
            _minimise(method, first, trials)
        else:
            _find_front(method, first, list(tasks), trials)
        best = trials.best()
        trials.order({"known": [[list(w), scores] for w, scores in trials.tried.items()]})
        return best
    except _TrialFailed as failed:
        raise failed.args[0] from None
    except Exception as error:
        if group.index == 0:
            with suppress(Exception):
                trials.order({"error": f"{type(error).__name__}: {error}"})
        raise


def _minimise(method: Search, first: SourceWeights, trials: _Trying) -> None:
    """Searches for the best weights for one score."""
    minimize = _imported("scipy.optimize").minimize
    bounds = [(method.low, method.high)] * len(first)
    radius = (method.high - method.low) / 4
    sign = -1 if method.better == "higher" else 1

    def cost(weights: Sequence[float]) -> float:
        return sign * trials.scores(tuple(map(float, weights)))[ONLY]

    if method.trials > 1 and radius:
        options = {"maxfev": method.trials - 1, "initial_tr_radius": radius}
        minimize(cost, first, method="COBYQA", bounds=bounds, options=options)


def _find_front(
    method: Search, first: SourceWeights, tasks: Sequence[str], trials: _Trying
) -> None:
    """Searches for the Pareto front of several scores, from the mean and each source alone, with
    optuna's TPE (Ozaki et al., GECCO 2020)."""
    optuna = _imported("optuna")
    better = method.better_of(tasks)
    names = [f"w{number}" for number in range(len(first))]
    starts = [first]
    for number in range(len(first)):
        alone = (1.0 if source == number else 0.0 for source in range(len(first)))
        starts.append(tuple(min(max(weight, method.low), method.high) for weight in alone))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        random = max(1, min(10, method.trials // 4))
        sampler = optuna.samplers.TPESampler(seed=0, multivariate=True, n_startup_trials=random)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        directions = ["maximize" if better[task] == "higher" else "minimize" for task in tasks]
        study = optuna.create_study(directions=directions, sampler=sampler)
        for weights in dict.fromkeys(starts):
            study.enqueue_trial(dict(zip(names, weights, strict=True)))
        for _ in range(method.trials):
            trial = study.ask()
            weights = tuple(trial.suggest_float(n, method.low, method.high) for n in names)
            scores = trials.scores(weights)
            if scores.keys() != set(tasks):
                raise MergeError(
                    f"the weights {list(weights)} have scores for the tasks {sorted(scores)}, but "
                    f"the first trial has scores for {sorted(tasks)}"
                )
            study.tell(trial, [scores[task] for task in tasks])
    finally:
        optuna.logging.set_verbosity(verbosity)


def on_all(group: Group, work: Callable[[], Any]) -> list[Any]:
    """The results of each process's work, as JSON; called by all of them.

    Raises:
        Exception: that of this process's work.
        ProcessFailed: another process's work failed.
    """
    output: Any = None
    error: Exception | None = None
    try:
        output = work()
    except Exception as raised:
        error = raised
    failure = "" if error is None else f"{type(error).__name__}: {error}"
    message = json.dumps({"found": output, "error": failure}).encode()
    everyone = [json.loads(said) for said in all_gather_bytes(group, message)]
    if error is not None:
        raise error
    for process, said in enumerate(everyone):
        if said["error"]:
            who = process_names(members_of(group), [process])
            raise ProcessFailed(f"{who} failed: {said['error']}")
    return [said["found"] for said in everyone]


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise MergeError(
            f"this search needs {package}, which is not installed: pip install 'unickpt[search]'"
        ) from None


class _TrialFailed(Exception):
    """A trial failed on a process, and all processes know it; its argument is the error."""


class _Trying:
    """The trials, which all processes merge and score together."""

    def __init__(
        self,
        method: Search,
        group: Group,
        merged: Callable[[SourceWeights], Checkpoint],
        urls: Sequence[str],
    ) -> None:
        self._method, self._group, self._merged = method, group, merged
        self._urls = tuple(urls)
        self.tried: dict[SourceWeights, Scores] = {}
        """In this search, in their order."""
        self.log = TrialLog(None, {})

    def best(self) -> BestWeights:
        """The best trial; of equal ones the first.

        Raises:
            MergeError: no score is finite.
        """
        trials = [Trial(weights, scores) for weights, scores in self.tried.items()]
        better = self._method.better_of(list(trials[0].scores))
        front = pareto_front(trials, better)
        if not front:
            raise MergeError(
                f"none of {len(trials)} trials has finite scores; the first trial scored "
                f"{trials[0].scores if ONLY not in better else trials[0].scores[ONLY]}"
            )
        if ONLY in better:
            best = trials[front[0]]
            return BestWeights(best.weights, best.scores[ONLY])
        if self._method.choose is None:
            chosen = balanced(trials, better, front)
        else:
            candidates = [trials[number] for number in front]
            chosen = front[candidates.index(self._method.choose(candidates))]
        all_trials = Trials(self._urls, better, tuple(trials), chosen)
        return BestWeights(trials[chosen].weights, None, all_trials)

    def scores(self, weights: SourceWeights) -> Scores:
        """The scores of weights, tried unless they are known.

        Raises:
            _TrialFailed: a process failed.
        """
        if weights not in self.tried:
            if weights in self.log.known:
                self.tried[weights] = self.log.known[weights]
            else:
                self.order({"weights": weights})
                self._try(weights)
                self.log.add(weights, self.tried[weights])
        return self.tried[weights]

    def follow(self) -> BestWeights:
        """Tries the weights that process 0 sends, up to the end."""
        while "known" not in (order := self.order({})):
            if "error" in order:
                raise ProcessFailed(f"process 0 failed: {order['error']}")
            self._try(tuple(order["weights"]))
        self.tried = {tuple(weights): scores for weights, scores in order["known"]}
        return self.best()

    def order(self, mine: dict[str, Any]) -> dict[str, Any]:
        """The next message of process 0: weights to try; all trials at the end; or its error."""
        orders = all_gather_bytes(self._group, json.dumps(mine).encode())
        instruction: dict[str, Any] = json.loads(orders[0])
        return instruction

    def _try(self, weights: SourceWeights) -> None:
        try:
            scores = on_all(self._group, lambda: self._score(weights))
        except Exception as error:
            raise _TrialFailed(error) from None
        self.tried[weights] = scores[0]

    def _score(self, weights: SourceWeights) -> Scores:
        answer = self._method.score(self._merged(weights))
        score_by_task = answer if isinstance(answer, Mapping) else {ONLY: answer}
        scores = {str(task): float(score) for task, score in score_by_task.items()}
        if not scores:
            raise MergeError("score returned no scores; return a number, or one for each task")
        for task, score in scores.items():
            if math.isnan(score):
                suffix = f" of {task!r}" if task else ""
                raise MergeError(f"the score{suffix} of the weights {list(weights)} is nan")
        return scores
