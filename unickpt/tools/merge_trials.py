"""The trials of a search for merging weights: on one score or several, kept in a file to go on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.errors import MergeError

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
        from unickpt.display import front_plot, html  # only where they are shown

        front = self.front
        rows = [self.row(number) for number in front]
        facts = [f"{len(self)} trials", f"{len(front)} on the front", f"chosen: {self.chosen}"]
        axes = list(self.better)[:2]
        points = [[trial.scores[task] for task in axes] for trial in self.trials]
        plot = front_plot.svg(axes, points, front, self.chosen) if len(axes) == 2 else ""
        shown = html.table(self.headings, rows, len(rows))
        return html.page("search", "merged weights", facts, plot, shown)


def pareto_front(trials: Sequence[Trial], better: Mapping[str, str]) -> tuple[int, ...]:
    """The numbers of trials that no other one dominates; of equal ones the first.

    Arguments:
        trials: with finite or infinite scores.
        better: by task, "higher" or "lower".
    """
    costs = [_costs(trial, better) for trial in trials]
    found = []
    for number, own in enumerate(costs):
        worse = any(
            all(a <= b for a, b in zip(other, own, strict=True)) and (other != own or at < number)
            for at, other in enumerate(costs)
            if at != number
        )
        if not worse and all(map(math.isfinite, own)):
            found.append(number)
    return tuple(found)


def balanced(trials: Sequence[Trial], better: Mapping[str, str], front: Sequence[int]) -> int:
    """The trial of a front that is nearest to the best of each task, where each task's range on the
    front counts as 1, and the task counts in which it is farthest."""
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
    """The file in which trials are kept, so that a search that was stopped goes on.

    Arguments:
        path: of the file; None for none.
        about: what the search is: its sources and how it searches.

    Raises:
        MergeError: the file is of another search, or cannot be read or written.
    """

    def __init__(self, path: str | None, about: Mapping[str, Any]) -> None:
        self._path, self.known = path, dict[SourceWeights, Scores]()
        if path is None:
            return
        first = json.dumps(about, sort_keys=True)
        try:
            text = _read(path)
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


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""
