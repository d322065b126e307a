"""Partial experts: which experts of a mixture of experts a save writes, and the record of all.

The idea, and the measure of lost tokens, are those of MoC-System (Cai et al., arXiv 2408.04307):
the experts take turns, and a restart loses the progress of those that were not saved last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Annotated, Any, TypeVar

import msgspec

from unickpt.errors import CheckpointCorrupt
from unickpt.extend import RESERVED_METADATA, UnitSteps, stored_unit_steps
from unickpt.plugins.experts.keys import ExpertKey

_MEMBER = "experts"  # `stored_unit_steps` reads its `steps`
_Count = TypeVar("_Count", int, float)


@dataclass(frozen=True)
class ExpertFacts:
    """The argument of `choose`: the experts of one key in the newest step.

    Arguments:
        key: of `Experts`.
        experts: their numbers, ascending.
        k: how many to save.
        steps: the step of each one's state.
        lost: how many tokens each one's stored state lacks, where token counts are given.
    """

    key: str
    experts: tuple[int, ...]
    k: int
    steps: Mapping[int, int]
    lost: Mapping[int, float]


Choose = Callable[[ExpertFacts], Sequence[int]]


@dataclass(frozen=True)
class TokenCounts:
    """The token counts of the experts of one layer.

    Arguments:
        seen: tokens of each expert since the start of the run.
        lost: those of them whose updates a restart from this step loses.
        lost_before: tokens whose updates earlier restarts lost, of all experts together.
    """

    seen: Mapping[int, float] = field(default_factory=dict)
    lost: Mapping[int, float] = field(default_factory=dict)
    lost_before: float = 0.0

    def fraction(self, lost: float) -> float:
        """The part of all tokens that some number of them is."""
        total = sum(self.seen.values())
        return lost / total if total > 0 else 0.0


@dataclass(frozen=True)
class ExpertRecord:
    """The record of experts in a checkpoint.

    Arguments:
        steps: the step of each one's state.
        layers: the token counts of each layer, where they are given.
        doublings: how often the number of experts to save was doubled.
        keys: for each layer, the key of its experts.
        since: the first step that was saved after the last load, where saves write all experts and
            their copies in the root leave some out; else None.
        resumed: the step of that load, if any.
    """

    steps: UnitSteps
    layers: Mapping[str, TokenCounts] = field(default_factory=dict)
    doublings: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)
    since: int | None = None
    resumed: int | None = None

    @property
    def lost_tokens(self) -> float:
        """The proportion of lost tokens (PLT) if the run restarts from this step.

        It is the mean, over the layers, of the tokens that this and all earlier restarts lost, as a
        part of all tokens.
        """
        every = self.layers.values()
        return _mean(t.fraction(t.lost_before + sum(t.lost.values())) for t in every)

    def lost_of(self, key: str) -> dict[int, float]:
        """The tokens that each expert of a key lacks, over all layers."""
        totals: dict[int, float] = {}
        for layer, counts in self.layers.items():
            if self.keys.get(layer) == key:
                for number, lost in counts.lost.items():
                    totals[number] = totals.get(number, 0.0) + lost
        return totals

    def restarted(self, budget: float | None) -> ExpertRecord:
        """The record of a run that resumes from this step.

        If another loss as large as this restart's would exceed the budget, twice as many experts
        are saved from now on, which about halves the loss of the next restart. So the sum of all
        losses stays near the budget.

        Arguments:
            budget: the greatest proportion of lost tokens; None for any.
        """
        now = _mean(t.fraction(sum(t.lost.values())) for t in self.layers.values())
        exceeds = budget is not None and now > 0 and self.lost_tokens + now > budget
        layers = {
            name: TokenCounts(t.seen, {}, t.lost_before + sum(t.lost.values()))
            for name, t in self.layers.items()
        }
        return replace(self, layers=layers, doublings=self.doublings + exceeds)

    def saving(
        self,
        chosen: UnitSteps | None,
        seen: Mapping[str, Mapping[int, float]],
        keys: Mapping[str, str],
    ) -> ExpertRecord:
        """The tokens of a save that follows this one.

        Arguments:
            chosen: the experts that it writes, by key; None if it writes all.
            seen: the token counts that are given, by layer.
            keys: for each of these layers, the key of its experts.

        Raises:
            ValueError: a count is less than before.
        """
        keys = {**self.keys, **keys}
        layers: dict[str, TokenCounts] = {}
        for layer in [*self.layers, *(name for name in seen if name not in self.layers)]:
            before = self.layers.get(layer, TokenCounts())
            now = {**before.seen, **seen.get(layer, {})}
            for number, count in now.items():
                if count < before.seen.get(number, 0):
                    raise ValueError(
                        f"expert {number} of {layer!r} has seen {count:g} tokens, but had seen "
                        f"{before.seen[number]:g} before; count from the start of the run"
                    )
            written = now if chosen is None else chosen.get(keys[layer], {})
            lost = {
                number: before.lost.get(number, 0.0) + count - before.seen.get(number, 0.0)
                for number, count in now.items()
                if number not in written
            }
            layers[layer] = TokenCounts(
                now, {n: count for n, count in lost.items() if count}, before.lost_before
            )
        return replace(self, layers=layers, keys=keys)

    # --- in the metadata of a checkpoint ----------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The record as in the metadata."""
        made: dict[str, Any] = {
            "steps": {key: _texts(expert_steps) for key, expert_steps in self.steps.items()},
            "doublings": self.doublings,
        }
        made |= {
            name: step
            for name, step in [("since", self.since), ("resumed", self.resumed)]
            if step is not None
        }
        if self.layers:
            made["plt"] = self.lost_tokens
            made["layers"] = {
                name: {
                    "key": self.keys[name],
                    "seen": _texts(counts.seen),
                    "lost": _texts(counts.lost),
                    "lost_before": counts.lost_before,
                }
                for name, counts in self.layers.items()
            }
        return made


def _texts(counts: Mapping[int, _Count]) -> dict[str, _Count]:
    return {str(number): counts[number] for number in sorted(counts)}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


# --- choosing -------------------------------------------------------------------------------------


def choose(
    key: ExpertKey,
    text: str,
    record: ExpertRecord,
    step: int,
    function: Choose | None,
    order: Sequence[int] | None = None,
) -> dict[int, int]:
    """The experts of a key that a save writes, with its step.

    By default they take turns: those whose state is the oldest.

    Arguments:
        key: with the number of experts to write.
        text: the key, with the number of a layer if it names layers.
        record: of the step that the save follows.
        step: that is saved.
        function: chooses instead.
        order: in which they take turns at first; None for that of their numbers.

    Raises:
        ValueError: it chose a number that is not an expert.
    """
    steps = record.steps[text]
    experts = tuple(sorted(steps))
    k = min(len(experts), key.k << min(record.doublings, 64))
    if function is None:
        return dict.fromkeys(_in_turn(order or experts, steps)[:k], step)
    facts = ExpertFacts(text, experts, k, dict(steps), record.lost_of(text))
    chosen = list(function(facts))
    for number in chosen:
        if isinstance(number, bool) or not isinstance(number, Integral) or number not in steps:
            raise ValueError(f"choose: {number!r} is not the number of an expert of {text!r}")
    return {int(number): step for number in chosen}


def most_lost(facts: ExpertFacts) -> list[int]:
    """Chooses the experts whose stored state lacks most tokens; of those that lack as many, the
    oldest."""
    order = sorted(facts.experts, key=lambda x: (-facts.lost.get(x, 0.0), facts.steps[x], x))
    return order[: facts.k]


def _in_turn(experts: Sequence[int], steps: Mapping[int, int]) -> list[int]:
    """All experts, the oldest first; those of one step in the order of their turns."""
    oldest = min(steps.values(), default=0)
    first = 0  # after the last one, the turn goes back to the first
    for position, number in enumerate(experts):
        if steps[number] == oldest != steps[experts[position - 1]]:
            first = position
    return sorted([*experts[first:], *experts[:first]], key=steps.__getitem__)


# --- reading --------------------------------------------------------------------------------------


def stored(metadata: Mapping[str, Any], where: str) -> ExpertRecord | None:
    """The record of experts in a checkpoint; None if there is none.

    Raises:
        CheckpointCorrupt: it is malformed.
    """
    steps = stored_unit_steps(metadata, where)
    if steps is None:
        return None
    try:
        body = msgspec.convert(metadata[RESERVED_METADATA][_MEMBER], _StoredRecord, str_keys=True)
    except msgspec.ValidationError as error:
        raise CheckpointCorrupt(
            f"{where}: what its metadata records of its experts is malformed: {error}"
        ) from None
    layers = {n: TokenCounts(t.seen, t.lost, t.lost_before) for n, t in body.layers.items()}
    keys = {name: layer.key for name, layer in body.layers.items()}
    return ExpertRecord(steps, layers, body.doublings, keys, body.since, body.resumed)


_Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]


class _StoredLayer(msgspec.Struct):
    key: str
    seen: dict[int, _Amount]
    lost: dict[int, _Amount]
    lost_before: _Amount


class _StoredRecord(msgspec.Struct):
    layers: dict[str, _StoredLayer] = {}
    doublings: Annotated[int, msgspec.Meta(ge=0)] = 0
    since: Annotated[int, msgspec.Meta(ge=0)] | None = None
    resumed: Annotated[int, msgspec.Meta(ge=0)] | None = None


def recorded(metadata: Mapping[str, Any], record: ExpertRecord) -> dict[str, Any]:
    """The metadata of a checkpoint with the record of its experts."""
    return {
        **metadata,
        RESERVED_METADATA: {**metadata[RESERVED_METADATA], _MEMBER: record.to_json()},
    }
