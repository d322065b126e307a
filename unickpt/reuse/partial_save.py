"""What one save does with experts: which it writes, and which it takes from the step before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unickpt.arrays.box import Box
from unickpt.errors import StorageError
from unickpt.format import codec
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader import Reader
from unickpt.reuse.expert_keys import ArrayExperts, ExpertKeys
from unickpt.reuse.experts import Choose, ExpertRecord, ExpertSteps, choose, recorded

Expert = tuple[str, int]
"""A key, and the number of an expert."""


def _stored_as(entry: ArrayEntry, index: Index) -> tuple[object, ...]:
    """What must be alike in the base. Chunks may differ, which are then copied; but not of a
    codec that is none of Zarr's, which would encode the copies again."""
    if entry.codec is None:
        return entry.shape, entry.dtype
    compression = codec.common_codec(index.compression)
    return entry.shape, entry.dtype, entry.encoding, entry.chunk, entry.cut, compression


@dataclass(frozen=True)
class PartialBase:
    """The checkpoint whose experts a save may refer to.

    Arguments:
        path: of the checkpoint.
        attempt: that made it, by which another checkpoint at this path is noticed.
        arrays: of its arrays with experts what must be alike.
        steps: of which step its experts are.
        orders: by key, the experts in the order of their turns.
        writers: by key and expert, the bytes of each process that saves now.
        processes: how many made it.
        before: what is referred to instead if the save of this one, which had not ended, fails.
    """

    path: str
    attempt: str
    arrays: Mapping[str, tuple[object, ...]]
    steps: ExpertSteps
    orders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    writers: Mapping[str, Mapping[int, Mapping[int, int]]] = field(default_factory=dict)
    processes: int = 1
    before: PartialBase | None = None

    @classmethod
    def of(
        cls, path: str, attempt: str, index: Index, steps: ExpertSteps, keys: ExpertKeys
    ) -> PartialBase:
        """What has to be kept of a checkpoint's index until the next save.

        Arguments:
            path, attempt: of the checkpoint.
            index: its index; of a job of one process, it may be what that process saves.
            steps: of which step its experts are.
            keys: name the experts.
        """
        from unickpt.reuse import expert_turns

        stored = {n: _stored_as(index.arrays[n], index) for n in _held(index, keys)}
        orders = expert_turns.orders(steps, keys, {})
        return cls(path, attempt, stored, steps, orders, processes=index.processes)

    @classmethod
    def read(cls, path: str, reader: Reader, steps: ExpertSteps, keys: ExpertKeys) -> PartialBase:
        """The same of a committed checkpoint.

        Raises:
            CheckpointCorrupt, StorageError: it cannot be read.
        """
        from unickpt.reuse import expert_turns

        index = reader.index
        found = cls.of(path, index.attempt, index, steps, keys)
        if index.processes == 1:
            return found
        writers = expert_turns.writers(reader, _held(index, keys))
        orders = expert_turns.orders(steps, keys, writers)
        return replace(found, orders=orders, writers=writers)

    def followed_by(self, path: str, attempt: str, chosen: ExpertSteps) -> PartialBase:
        """What there will be once a save that refers to this one has ended."""
        steps = {key: {**of, **chosen.get(key, {})} for key, of in self.steps.items()}
        return replace(self, path=path, attempt=attempt, steps=steps, before=self.without_before())

    def without_before(self) -> PartialBase:
        """The same, whose save has ended."""
        return replace(self, before=None)


def _held(index: Index, keys: ExpertKeys) -> dict[str, ArrayExperts]:
    found = {name: keys.find(name, e.shape, e.layout) for name, e in index.arrays.items()}
    return {name: held for name, held in found.items() if held is not None}


def _ignore(_: ExpertSelection) -> None:
    pass


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
        earlier: what the step records that is before `base.before`.
        most_bases: how many checkpoints it may refer to; None if it only makes links.
        selected: called with what was chosen.
    """

    keys: ExpertKeys
    step: int
    before: ExpertRecord
    base: PartialBase | None = None
    choose: Choose | None = None
    seen: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)
    earlier: ExpertRecord = field(default_factory=lambda: ExpertRecord({}))
    most_bases: int | None = None
    selected: Callable[[ExpertSelection], object] = _ignore

    def select(self, index: Index, experts: Mapping[str, ArrayExperts]) -> ExpertSelection:
        """Chooses the experts to write: all, if the base lacks some of those of this process.

        Arguments:
            index: what this process has to save.
            experts: those of each array with experts.

        Raises:
            ValueError: `choose` did not choose experts, or a token count is less than before.
        """
        base = self.base if self._has_all(index, experts) else None
        chosen = None if base is None else self._chosen(base)
        if base is None or chosen is None or self._needs_too_many(base, chosen):
            base = chosen = None
        record = self.before.saving(chosen, self.seen, self.layers)
        earlier = self.earlier.saving(chosen, self.seen, self.layers)
        metadata = recorded(index.metadata, record)
        found = ExpertSelection(
            self.step, experts, metadata, index, record, chosen, base,
            recorded(index.metadata, earlier),
        )  # fmt: skip
        self.selected(found)
        return found

    def _chosen(self, base: PartialBase) -> dict[str, dict[int, int]]:
        chosen = {}
        record = replace(self.before, steps=base.steps)
        for text in base.steps:
            found = self.keys.key_of(text)
            if found is not None:
                order = base.orders.get(text)
                chosen[text] = choose(found[0], text, record, self.step, self.choose, order)
        return chosen

    def _needs_too_many(self, base: PartialBase, chosen: ExpertSteps) -> bool:
        """Whether the experts that are not written would lie in too many checkpoints."""
        if self.most_bases is None:
            return False
        needed = {
            step
            for key, of in base.steps.items()
            for number, step in of.items()
            if number not in chosen.get(key, {})
        }
        return len(needed) > self.most_bases

    def _has_all(self, index: Index, experts: Mapping[str, ArrayExperts]) -> bool:
        """Whether the base has all experts of this process.

        Not whether in the same chunks, which may differ for one process and not for another.
        """
        if self.base is None:
            return False
        arrays, steps = index.arrays, self.base.steps
        known = self.base.arrays
        for name, held in experts.items():
            if known.get(name) != _stored_as(arrays[name], index):
                return False
            if not all(map(steps.get(held.key, {}).__contains__, held.experts)):
                return False
        return True


@dataclass(frozen=True)
class ExpertSelection:
    """Which experts a save writes.

    Arguments:
        step: that is saved.
        experts: those that this process has in each array with experts.
        metadata: of the checkpoint, with the token counts.
        index: what this process has to save.
        record: what the checkpoint records of its experts; only process 0 knows the token counts.
        chosen: the experts that are written, by key; None if all are.
        base: has the others.
        earlier_metadata: as `metadata`, if it refers to `base.before`.
    """

    step: int
    experts: Mapping[str, ArrayExperts]
    metadata: Mapping[str, Any]
    index: Index
    record: ExpertRecord
    chosen: ExpertSteps | None = None
    base: PartialBase | None = None
    earlier_metadata: Mapping[str, Any] = field(default_factory=dict)

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

    def writes(self, expert: Expert) -> bool:
        """Whether an expert is written."""
        return self.chosen is None or expert[1] in self.chosen[expert[0]]

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

    @property
    def writes_by_process(self) -> Mapping[int, int]:
        """How many bytes of experts each process writes, as far as all processes know."""
        found: dict[int, int] = {}
        if self.base is None or self.base.processes != self.index.processes:
            return found
        for key, chosen in (self.chosen or {}).items():
            for number in chosen:
                for process, nbytes in self.base.writers.get(key, {}).get(number, {}).items():
                    found[process] = found.get(process, 0) + nbytes
        return found

    def bases(self) -> Iterator[PartialBase]:
        """The checkpoints that may have the others, the right one first."""
        base = self.base
        while base is not None:
            yield base
            base = base.before

    def on(self, base: PartialBase) -> ExpertSelection:
        """The same experts, with the others in one of `bases`."""
        if base is self.base:
            return self
        return replace(self, base=base, metadata=self.earlier_metadata)

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
