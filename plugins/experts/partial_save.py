"""The experts in one save: which it writes, and which it takes from the step before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unickpt.extend import (
    ArrayEntry,
    ArrayUnits,
    Earlier,
    Index,
    Reader,
    SaveFeature,
    Selection,
    UnitSteps,
    common_codec,
)
from unickpt.plugins.experts import turn_order
from unickpt.plugins.experts.expert_choice import Choose, ExpertRecord, choose, recorded
from unickpt.plugins.experts.keys import ExpertKeys


def _stored_as(entry: ArrayEntry, index: Index) -> tuple[object, ...]:
    """The facts of an array that must be equal in the base. Chunk shapes may differ: chunks are
    then copied, except with codecs that are not Zarr's, which would encode the copies again."""
    if entry.codec is None:
        return entry.shape, entry.dtype
    compression = common_codec(index.compression)
    return entry.shape, entry.dtype, entry.encoding, entry.chunk, entry.cut, compression


@dataclass(frozen=True)
class PartialBase:
    """The checkpoint whose experts a save may refer to.

    Arguments:
        path: of the checkpoint.
        attempt: that made it, by which another checkpoint at this path is noticed.
        arrays: of its arrays with experts, the facts that must be equal.
        steps: the step of each of its experts.
        orders: by key, the experts in the order of their turns.
        writers: by key and expert, the bytes of each process that saves now.
        processes: how many made it.
        before: the base to refer to instead if the save of this one, which had not ended, fails.
    """

    path: str
    attempt: str
    arrays: Mapping[str, tuple[object, ...]]
    steps: UnitSteps
    orders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    writers: Mapping[str, Mapping[int, Mapping[int, int]]] = field(default_factory=dict)
    processes: int = 1
    before: PartialBase | None = None

    @classmethod
    def of(
        cls, path: str, attempt: str, index: Index, steps: UnitSteps, keys: ExpertKeys
    ) -> PartialBase:
        """The facts of a checkpoint's index that have to be kept until the next save.

        Arguments:
            path, attempt: of the checkpoint.
            index: its index; of a job of one process, it may be that process's own.
            steps: the step of each of its experts.
            keys: name the experts.
        """
        stored = {n: _stored_as(index.arrays[n], index) for n in units_in(index, keys)}
        orders = turn_order.orders(steps, keys, {})
        return cls(path, attempt, stored, steps, orders, processes=index.processes)

    @classmethod
    def read(cls, path: str, reader: Reader, steps: UnitSteps, keys: ExpertKeys) -> PartialBase:
        """The same of a committed checkpoint.

        Raises:
            CheckpointCorrupt, StorageError: it cannot be read.
        """
        index = reader.index
        base = cls.of(path, index.attempt, index, steps, keys)
        if index.processes == 1:
            return base
        writers = turn_order.writers(reader, units_in(index, keys))
        orders = turn_order.orders(steps, keys, writers)
        return replace(base, orders=orders, writers=writers)

    def followed_by(self, path: str, attempt: str, chosen: UnitSteps) -> PartialBase:
        """The experts that a step will have once a save that refers to this one has ended."""
        steps = {
            key: {**expert_steps, **chosen.get(key, {})} for key, expert_steps in self.steps.items()
        }
        return replace(self, path=path, attempt=attempt, steps=steps, before=self.without_before())

    def without_before(self) -> PartialBase:
        """The same, whose save has ended."""
        return replace(self, before=None)

    def chain(self) -> Iterator[PartialBase]:
        """The checkpoints that may have experts of the next save, the right one first."""
        base: PartialBase | None = self
        while base is not None:
            yield base
            base = base.before

    def bytes_of(self, chosen: UnitSteps, processes: int) -> dict[int, int]:
        """How many bytes of experts each process writes, as far as all processes know.

        Arguments:
            chosen: the experts that are written.
            processes: how many save them.
        """
        totals: dict[int, int] = {}
        if self.processes != processes:
            return totals
        for key, numbers in chosen.items():
            for number in numbers:
                for process, nbytes in self.writers.get(key, {}).get(number, {}).items():
                    totals[process] = totals.get(process, 0) + nbytes
        return totals


def units_in(index: Index, keys: ExpertKeys) -> dict[str, ArrayUnits]:
    """The arrays of an index that hold experts, and which."""
    units_by_name = {name: keys.find(name, e.shape, e.layout) for name, e in index.arrays.items()}
    return {name: units for name, units in units_by_name.items() if units is not None}


@dataclass(frozen=True)
class Chosen:
    """The part of a save that handles experts.

    Arguments:
        index: of this process's state.
        record: of the checkpoint's experts; only process 0 knows the token counts.
        steps: the step of each of this process's experts once they are saved.
        written: the experts that are written, by key; None if all are.
        base: has the others.
    """

    index: Index
    record: ExpertRecord
    steps: UnitSteps
    written: UnitSteps | None = None
    base: PartialBase | None = None


@dataclass(frozen=True)
class PartialSave:
    """A save of a run with partial experts, before its arrays are known (a `WriteFilter`).

    Arguments:
        units: name the experts.
        step: that is saved.
        before: the record of the step before.
        base: that step, whose experts it may refer to; None if it must write all.
        choose: chooses the experts to write, if they do not take turns.
        seen: token counts by layer; on process 0 only.
        layers: for each of these layers, the key of its experts.
        earlier: the record of the step before `base.before`.
        most_bases: how many checkpoints it may refer to; None if it only makes links.
        selected: called with the chosen experts.
    """

    units: ExpertKeys
    step: int
    before: ExpertRecord
    base: PartialBase | None = None
    choose: Choose | None = None
    seen: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)
    earlier: ExpertRecord = field(default_factory=lambda: ExpertRecord({}))
    most_bases: int | None = None
    selected: Callable[[Chosen], object] = lambda _: None

    def select(self, index: Index, units: Mapping[str, ArrayUnits]) -> Selection:
        """Chooses the experts to write: all, if the base lacks some of those of this process.

        Raises:
            ValueError: `choose` did not choose experts, or a token count is less than before.
        """
        base = self.base if self._has_all(index, units) else None
        chosen = None if base is None else self._chosen(base)
        if base is None or chosen is None or self._needs_too_many(base, chosen):
            base = chosen = None
        record = self.before.saving(chosen, self.seen, self.layers)
        earlier_record = self.earlier.saving(chosen, self.seen, self.layers)
        choice = Chosen(index, record, self._steps(units, chosen, base), chosen, base)
        self.selected(choice)
        metadata, earlier = recorded(index.metadata, record), list[Earlier]()
        for candidate in () if base is None else base.chain():
            step_record = record if candidate is base else earlier_record
            of_step = recorded(index.metadata, step_record), self._steps(units, chosen, candidate)
            earlier.append(Earlier(candidate.path, candidate.attempt, *of_step))
        nbytes = {} if base is None or chosen is None else base.bytes_of(chosen, index.processes)
        return Selection(units, metadata, choice.steps, "experts", chosen, earlier, nbytes)

    def _steps(
        self, units: Mapping[str, ArrayUnits], chosen: UnitSteps | None, base: PartialBase | None
    ) -> UnitSteps:
        """The step of each of this process's experts once they are saved."""
        steps: dict[str, dict[int, int]] = {}
        for array_units in units.values():
            expert_steps = steps.setdefault(array_units.key, {})
            if base is None or chosen is None:
                expert_steps.update(dict.fromkeys(array_units.numbers, self.step))
            else:
                written, before = chosen[array_units.key], base.steps[array_units.key]
                expert_steps.update({n: written.get(n, before[n]) for n in array_units.numbers})
        return steps

    def _chosen(self, base: PartialBase) -> dict[str, dict[int, int]]:
        chosen = {}
        record = replace(self.before, steps=base.steps)
        for text in base.steps:
            match = self.units.key_of(text)
            if match is not None:
                order = base.orders.get(text)
                chosen[text] = choose(match[0], text, record, self.step, self.choose, order)
        return chosen

    def _needs_too_many(self, base: PartialBase, chosen: UnitSteps) -> bool:
        """Whether the experts that are not written would lie in too many checkpoints."""
        if self.most_bases is None:
            return False
        needed = {
            step
            for key, expert_steps in base.steps.items()
            for number, step in expert_steps.items()
            if number not in chosen.get(key, {})
        }
        return len(needed) > self.most_bases

    def _has_all(self, index: Index, units: Mapping[str, ArrayUnits]) -> bool:
        """Whether the base has all experts of this process.

        Not whether in the same chunks, which may differ for one process and not for another.
        """
        if self.base is None:
            return False
        arrays, steps = index.arrays, self.base.steps
        base_arrays = self.base.arrays
        for name, array_units in units.items():
            if base_arrays.get(name) != _stored_as(arrays[name], index):
                return False
            if not all(map(steps.get(array_units.key, {}).__contains__, array_units.numbers)):
                return False
        return True


class ExpertsOfSave(SaveFeature):
    """The experts of one save of a run.

    Arguments:
        keys: name them. Saves with the same ones are alike, for the plans that saves share.
        begin: returns the arrays that it leaves out, for the attempt that makes it.
        save: facts about it, for the run.
    """

    name = "experts"

    def __init__(
        self, keys: ExpertKeys, begin: Callable[[str], PartialSave], save: Any = None
    ) -> None:
        self.save, self._keys, self._begin = save, keys, begin

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertsOfSave) and other._keys is self._keys

    def __hash__(self) -> int:
        return id(self._keys)

    def write_filter(self, attempt: str) -> PartialSave:
        return self._begin(attempt)
