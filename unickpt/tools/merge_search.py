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
from typing import Any

from unickpt.errors import MergeError, ProcessFailed
from unickpt.frameworks.members import named
from unickpt.frameworks.process_group import Group, all_gather_bytes, members_of
from unickpt.reading.checkpoint import Checkpoint
from unickpt.tools.merge_methods import Search
from unickpt.tools.merge_trials import (
    ONLY,
    Scores,
    SourceWeights,
    Trial,
    TrialLog,
    Trials,
    balanced,
    pareto_front,
)


@dataclass(frozen=True)
class Found:
    """What a search has found.

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
) -> Found:
    """The best weights that were tried; of several tasks those of a trial on the Pareto front. The
    same on all processes.

    Process 0 has the optimiser, and tells the others what to try.

    Arguments:
        method: what to search.
        group: the processes.
        start: the first weights to try.
        merged: merges with weights; called by all processes.
        sources: what is known of each: at least its "url".

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
        tasks = trials.scores(first)  # first of all, as optimisers move what is close to a bound
        if ONLY in tasks:
            _minimise(method, first, trials)
        else:
            _find_front(method, first, list(tasks), trials)
        found = trials.found()
        trials.order({"known": [[list(w), scores] for w, scores in trials.tried.items()]})
        return found
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
        alone = (1.0 if at == number else 0.0 for at in range(len(first)))
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
            asked = study.ask()
            weights = tuple(asked.suggest_float(n, method.low, method.high) for n in names)
            scores = trials.scores(weights)
            if scores.keys() != set(tasks):
                raise MergeError(
                    f"the scores of the weights {list(weights)} are of the tasks {sorted(scores)}, "
                    f"those of the first trial of {sorted(tasks)}"
                )
            study.tell(asked, [scores[task] for task in tasks])
    finally:
        optuna.logging.set_verbosity(verbosity)


def on_all(group: Group, work: Callable[[], Any]) -> list[Any]:
    """What the work of each process gives, as JSON has it; called by all of them.

    Raises:
        Exception: that of this process's work.
        ProcessFailed: another process's work failed.
    """
    found: Any = None
    error: Exception | None = None
    try:
        found = work()
    except Exception as raised:
        error = raised
    told = {"found": found, "error": "" if error is None else f"{type(error).__name__}: {error}"}
    everyone = [json.loads(said) for said in all_gather_bytes(group, json.dumps(told).encode())]
    if error is not None:
        raise error
    for process, said in enumerate(everyone):
        if said["error"]:
            who = named(members_of(group), [process])
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

    def found(self) -> Found:
        """What is best of what was tried; of equal ones the first.

        Raises:
            MergeError: no score is finite.
        """
        trials = [Trial(weights, scores) for weights, scores in self.tried.items()]
        better = self._method.better_of(list(trials[0].scores))
        front = pareto_front(trials, better)
        if not front:
            raise MergeError(
                f"of {len(trials)} trials none has finite scores; those of the first are "
                f"{trials[0].scores if ONLY not in better else trials[0].scores[ONLY]}"
            )
        if ONLY in better:
            best = trials[front[0]]
            return Found(best.weights, best.scores[ONLY])
        choose = self._method.choose
        chosen = balanced(trials, better, front) if choose is None else front[0]
        if choose is not None:
            candidates = [trials[number] for number in front]
            chosen = front[candidates.index(choose(candidates))]
        kept = Trials(self._urls, better, tuple(trials), chosen)
        return Found(trials[chosen].weights, None, kept)

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

    def follow(self) -> Found:
        """Tries what process 0 says, up to the end."""
        while "known" not in (order := self.order({})):
            if "error" in order:
                raise ProcessFailed(f"process 0 failed: {order['error']}")
            self._try(tuple(order["weights"]))
        self.tried = {tuple(weights): scores for weights, scores in order["known"]}
        return self.found()

    def order(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What process 0 says is next: weights to try; all trials at the end; or its error."""
        found: dict[str, Any] = json.loads(
            all_gather_bytes(self._group, json.dumps(mine).encode())[0]
        )
        return found

    def _try(self, weights: SourceWeights) -> None:
        try:
            scores = on_all(self._group, lambda: self._score(weights))
        except Exception as error:
            raise _TrialFailed(error) from None
        self.tried[weights] = scores[0]

    def _score(self, weights: SourceWeights) -> Scores:
        given = self._method.score(self._merged(weights))
        named = given if isinstance(given, Mapping) else {ONLY: given}
        scores = {str(task): float(score) for task, score in named.items()}
        if not scores:
            raise MergeError("score returned no scores; return a number, or one for each task")
        for task, score in scores.items():
            if math.isnan(score):
                of = f" of {task!r}" if task else ""
                raise MergeError(f"the score{of} of the weights {list(weights)} is nan")
        return scores
