"""The search for the weights of a merge: an optimiser tries weights, a function scores merges."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from unickpt.errors import MergeError, ProcessFailed
from unickpt.frameworks.process_group import Group, all_gather_bytes
from unickpt.reading.checkpoint import Checkpoint
from unickpt.tools.merge_methods import Search

Weights = tuple[float, ...]


def search(
    method: Search,
    group: Group,
    start: Weights,
    merged: Callable[[Weights], Checkpoint],
) -> tuple[Weights, float]:
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
    if group.index > 0:
        return trials.follow()
    try:
        minimize = _optimiser()
        first = tuple(min(max(weight, method.low), method.high) for weight in start)
        trials.cost(first)  # the optimiser moves what is close to a bound
        bounds = [(method.low, method.high)] * len(first)
        radius = (method.high - method.low) / 4
        if method.trials > 1 and radius:
            options = {"maxfev": method.trials - 1, "initial_tr_radius": radius}
            minimize(trials.cost, first, method="COBYQA", bounds=bounds, options=options)
    except _TrialFailed:
        raise trials.error or AssertionError("a trial has failed") from None
    except Exception as error:
        with suppress(Exception):
            trials.end(error)
        raise
    trials.end(None)
    return trials.best


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
    """A trial failed on a process, and all processes know it."""


class _Trials:
    """The trials, which all processes merge and score together."""

    def __init__(
        self, method: Search, group: Group, merged: Callable[[Weights], Checkpoint]
    ) -> None:
        self._method, self._group, self._merged = method, group, merged
        self.error: Exception | None = None
        self._found: list[tuple[float, Weights]] = []

    @property
    def best(self) -> tuple[Weights, float]:
        """The weights with the best score, the first of them, and the score.

        Raises:
            MergeError: no score is finite.
        """
        cost, weights = min(self._found, key=lambda found: found[0])
        if not math.isfinite(cost):
            raise MergeError(f"the best score of {len(self._found)} trials is {cost}")
        return weights, -cost if self._method.better == "higher" else cost

    def cost(self, weights: Sequence[float]) -> float:
        """What the optimiser of process 0 makes small.

        Raises:
            _TrialFailed: a process failed; see `error`.
        """
        wanted = tuple(map(float, weights))
        for cost, tried in self._found:
            if tried == wanted:
                return cost
        self._order({"weights": wanted})
        return self._try(wanted)

    def follow(self) -> tuple[Weights, float]:
        """Tries what process 0 says, up to the end."""
        while True:
            order = json.loads(all_gather_bytes(self._group, b"{}")[0])
            if order.get("error"):
                raise ProcessFailed(f"process 0 failed: {order['error']}")
            if not order:
                return self.best
            try:
                self._try(tuple(order["weights"]))
            except _TrialFailed:
                raise self.error or AssertionError("a trial has failed") from None

    def end(self, error: Exception | None) -> None:
        """Ends the search on all processes."""
        self._order({} if error is None else {"error": f"{type(error).__name__}: {error}"})

    def _order(self, order: dict[str, Any]) -> None:
        all_gather_bytes(self._group, json.dumps(order).encode())

    def _try(self, weights: Weights) -> float:
        score, told = 0.0, ""
        try:
            score = float(self._method.score(self._merged(weights)))
            if math.isnan(score):
                raise MergeError(f"the score of the weights {list(weights)} is nan")
        except Exception as error:
            self.error, told = error, f"{type(error).__name__}: {error}"
        mine = json.dumps([score, told]).encode()
        everyone = [json.loads(said) for said in all_gather_bytes(self._group, mine)]
        for process, (_, problem) in enumerate(everyone):
            if problem:
                self.error = self.error or ProcessFailed(f"process {process} failed: {problem}")
        if self.error is not None:
            raise _TrialFailed
        cost = float(everyone[0][0]) * (-1 if self._method.better == "higher" else 1)
        self._found.append((cost, weights))
        return cost
