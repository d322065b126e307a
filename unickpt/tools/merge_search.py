"""The search for the weights of a merge: an optimiser tries weights, a function scores merges."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from unickpt.errors import MergeError, ProcessFailed
from unickpt.frameworks.members import named
from unickpt.frameworks.process_group import Group, all_gather_bytes, members_of
from unickpt.reading.checkpoint import Checkpoint
from unickpt.tools.merge_methods import Search

SourceWeights = tuple[float, ...]


def search(
    method: Search,
    group: Group,
    start: SourceWeights,
    merged: Callable[[SourceWeights], Checkpoint],
) -> tuple[SourceWeights, float]:
    """The best weights that were tried, and their score; the same on all processes.

    Process 0 has the optimiser, and tells the others what to try.

    Arguments:
        method: what to search.
        group: the processes.
        start: the first weights to try.
        merged: merges with weights; called by all processes.

    Raises:
        MergeError: scipy is not installed, or a score is no number.
        ProcessFailed: another process failed.
    """
    trials = _Trials(method, group, merged)
    try:
        if group.index > 0:
            trials.follow()
            return trials.best
        minimize = _optimiser()
        first = tuple(min(max(weight, method.low), method.high) for weight in start)
        trials.cost(first)  # the optimiser moves what is close to a bound
        bounds = [(method.low, method.high)] * len(first)
        radius = (method.high - method.low) / 4
        if method.trials > 1 and radius:
            options = {"maxfev": method.trials - 1, "initial_tr_radius": radius}
            minimize(trials.cost, first, method="COBYQA", bounds=bounds, options=options)
    except _TrialFailed as failed:
        raise failed.args[0] from None
    except Exception as error:
        if group.index == 0:
            with suppress(Exception):
                trials.order({"error": f"{type(error).__name__}: {error}"})
        raise
    trials.order({})
    return trials.best


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


def _optimiser() -> Callable[..., Any]:
    try:
        found: Any = importlib.import_module("scipy.optimize")
    except ImportError:
        raise MergeError(
            "how='search' needs scipy, which is not installed: pip install 'unickpt[search]'"
        ) from None
    minimize: Callable[..., Any] = found.minimize
    return minimize


class _TrialFailed(Exception):
    """A trial failed on a process, and all processes know it; its argument is the error."""


class _Trials:
    """The trials, which all processes merge and score together."""

    def __init__(
        self, method: Search, group: Group, merged: Callable[[SourceWeights], Checkpoint]
    ) -> None:
        self._method, self._group, self._merged = method, group, merged
        self._sign = -1 if method.better == "higher" else 1
        self._costs: dict[SourceWeights, float] = {}

    @property
    def best(self) -> tuple[SourceWeights, float]:
        """The weights with the best score, the first of them, and the score.

        Raises:
            MergeError: no score is finite.
        """
        weights, cost = min(self._costs.items(), key=lambda tried: tried[1])
        if not math.isfinite(cost):
            raise MergeError(f"the best score of {len(self._costs)} trials is {cost}")
        return weights, self._sign * cost

    def cost(self, weights: Sequence[float]) -> float:
        """What the optimiser of process 0 makes small.

        Raises:
            _TrialFailed: a process failed.
        """
        wanted = tuple(map(float, weights))
        if wanted not in self._costs:
            self.order({"weights": wanted})
            self._try(wanted)
        return self._costs[wanted]

    def follow(self) -> None:
        """Tries what process 0 says, up to the end."""
        while order := self.order({}):
            if "error" in order:
                raise ProcessFailed(f"process 0 failed: {order['error']}")
            self._try(tuple(order["weights"]))

    def order(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What process 0 says is next: weights to try; nothing at the end; or its error."""
        found: dict[str, Any] = json.loads(
            all_gather_bytes(self._group, json.dumps(mine).encode())[0]
        )
        return found

    def _try(self, weights: SourceWeights) -> None:
        try:
            scores = on_all(self._group, lambda: self._score(weights))
        except Exception as error:
            raise _TrialFailed(error) from None
        self._costs[weights] = self._sign * float(scores[0])

    def _score(self, weights: SourceWeights) -> float:
        score = float(self._method.score(self._merged(weights)))
        if math.isnan(score):
            raise MergeError(f"the score of the weights {list(weights)} is nan")
        return score
