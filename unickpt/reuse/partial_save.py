"""What one save does with experts: which it writes, and which it takes from the step before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from unickpt.arrays.box import Box
from unickpt.errors import StorageError
from unickpt.format.index import Index
from unickpt.reuse.expert_keys import ArrayExperts, ExpertKeys
from unickpt.reuse.experts import Choose, ExpertRecord, ExpertSteps, choose, recorded

Expert = tuple[str, int]
"""A key, and the number of an expert."""


@dataclass(frozen=True)
class PartialBase:
    """The checkpoint whose experts a save may refer to.

    Arguments:
        path: of the checkpoint.
        attempt: that made it, by which another checkpoint at this path is noticed.
        arrays: shape and dtype of its arrays with experts.
        steps: of which step its experts are.
        renewed: by key, the experts that it has itself, while it borrows others from a checkpoint
            beside it. Nobody borrows from it, so they are written as they are now.
    """

    path: str
    attempt: str
    arrays: Mapping[str, tuple[tuple[int, ...], str]]
    steps: ExpertSteps
    renewed: Mapping[str, Collection[int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        path: str,
        index: Index,
        steps: ExpertSteps,
        keys: ExpertKeys,
        lender: ExpertSteps | None = None,
    ) -> PartialBase:
        """What has to be kept of a checkpoint's index until the next save.

        Arguments:
            path: of the checkpoint.
            index: its index.
            steps: of which step its experts are.
            keys: name the experts.
            lender: of which step the experts are in the checkpoint from which it borrows.
        """
        arrays = {
            name: (entry.shape, entry.dtype)
            for name, entry in index.arrays.items()
            if keys.find(name, entry.shape, entry.layout) is not None
        }
        renewed: dict[str, Collection[int]] = {}
        if lender is not None:
            for key, of in steps.items():
                lent = lender.get(key, {})
                renewed[key] = [number for number, step in of.items() if lent.get(number) != step]
        return cls(path, index.attempt, arrays, steps, renewed)


@dataclass(frozen=True)
class PartialSave:
    """A save of a run with partial experts, before its arrays are known.

    Arguments:
        keys: name the experts.
        step: that is saved.
        before: what the step before records of its experts.
        base: that step, whose experts it may refer to; None if it must write all.
        choose: chooses the experts to write, if they do not take turns.
        seen: token counts by layer; on process 0 only.
        layers: for each of these layers, the key of its experts.
    """

    keys: ExpertKeys
    step: int
    before: ExpertRecord
    base: PartialBase | None = None
    choose: Choose | None = None
    seen: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)

    def select(self, index: Index, experts: Mapping[str, ArrayExperts]) -> ExpertSelection:
        """Chooses the experts to write: all, if the base lacks some of those of this process.

        Arguments:
            index: what this process has to save.
            experts: those of each array with experts.

        Raises:
            ValueError: `choose` did not choose experts, or a token count is less than before.
        """
        base = self.base if self._has_all(index, experts) else None
        if base is None:
            return ExpertSelection(self.step, experts, self._metadata(index, None))
        chosen = {
            key.text: {
                **choose(key, self.before, self.step, self.choose),
                **dict.fromkeys(base.renewed.get(key.text, ()), self.step),
            }
            for key in self.keys
            if key.text in base.steps
        }
        return ExpertSelection(self.step, experts, self._metadata(index, chosen), chosen, base)

    def _metadata(self, index: Index, chosen: ExpertSteps | None) -> dict[str, Any]:
        record = self.before.saving(chosen, self.seen, self.layers)
        return recorded(index.metadata, record)

    def _has_all(self, index: Index, experts: Mapping[str, ArrayExperts]) -> bool:
        """Whether the base has all experts of this process.

        Not whether in the same chunks, which may differ for one process and not for another.
        """
        if self.base is None:
            return False
        for name, held in experts.items():
            ours = index.arrays[name]
            if self.base.arrays.get(name) != (ours.shape, ours.dtype):
                return False
            if not self.base.steps.get(held.key, {}).keys() >= set(held.experts):
                return False
        return True


@dataclass(frozen=True)
class ExpertSelection:
    """Which experts a save writes.

    Arguments:
        step: that is saved.
        experts: those that this process has in each array with experts.
        metadata: of the checkpoint, with the token counts.
        chosen: the experts that are written, by key; None if all are.
        base: has the others.
    """

    step: int
    experts: Mapping[str, ArrayExperts]
    metadata: Mapping[str, Any]
    chosen: ExpertSteps | None = None
    base: PartialBase | None = None

    def of(self, name: str, box: Box) -> tuple[Expert, bool]:
        """The expert of a chunk of an array with experts, and whether it is taken from the base."""
        held = self.experts[name]
        return (held.key, held.within(box).start), self.borrows(name, box)

    def borrows(self, name: str, box: Box) -> bool:
        """Whether all experts of a box of an array are taken from the base."""
        held = self.experts.get(name)
        if held is None or self.chosen is None:
            return False
        return self.chosen[held.key].keys().isdisjoint(held.within(box))

    @property
    def steps(self) -> ExpertSteps:
        """Of which step the experts of this process are once they are saved."""
        found: dict[str, dict[int, int]] = {}
        for held in self.experts.values():
            of = found.setdefault(held.key, {})
            if self.base is None or self.chosen is None:
                of.update(dict.fromkeys(held.experts, self.step))
            else:
                written, before = self.chosen[held.key], self.base.steps[held.key]
                of.update({n: written.get(n, before[n]) for n in held.experts})
        return found

    def check(self, found: Index | None, where: object) -> None:
        """Checks that the base is as it was when the experts were chosen.

        Arguments:
            found: its index, now; None if it is gone.
            where: the checkpoint that is saved.

        Raises:
            StorageError: it is not.
        """
        if self.base is None or (found is not None and found.attempt == self.base.attempt):
            return
        how = "gone, or no longer on this file system" if found is None else "replaced"
        raise StorageError(
            f"{where}: the experts that this save does not write are in {self.base.path}, which is "
            f"{how}. Nothing was saved; the next save writes all experts"
        )
