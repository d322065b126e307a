"""Two levels, as in MoC-System (Cai et al., arXiv 2408.04307): the nodes of a job have all experts
of a step, and its copy in the root only some of them, with the others as an earlier copy has them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from unickpt.extend import (
    RESERVED_METADATA,
    Box,
    Index,
    Reader,
    RunFeature,
    SaveCall,
    SaveFeature,
    Selection,
    UnitSteps,
)
from unickpt.plugins.experts import token_counts
from unickpt.plugins.experts.expert_choice import Choose, ExpertRecord, choose, recorded, stored
from unickpt.plugins.experts.keys import ExpertKeys
from unickpt.plugins.experts.partial_save import Chosen, ExpertsOfSave, PartialSave, units_in


class WholeSaves(RunFeature):
    """The saves of a run that write all experts, because only copies in the root leave some out.

    Arguments:
        keys: name the experts.
        plt_budget: as of `Experts`.
    """

    needs_steps_before = True  # in the root

    def __init__(self, keys: ExpertKeys, plt_budget: float | None) -> None:
        self._keys, self._plt_budget = keys, plt_budget
        self._lock = threading.Lock()
        self._record = ExpertRecord({})

    def before_save(self, call: SaveCall) -> tuple[SaveFeature, Mapping[str, Any]]:
        seen, layers = token_counts.taken_from(call, self._keys)
        with self._lock:
            record = self._record
        since = call.step if record.since is None else record.since
        parts = self._keys, call.step, replace(record, since=since)
        save = PartialSave(*parts, seen=seen, layers=layers, selected=self._selected)
        return ExpertsOfSave(self._keys, lambda attempt: save), {}

    def _selected(self, chosen: Chosen) -> None:
        with self._lock:
            self._record = chosen.record

    def after_load(self, step: int, path: str, stored_step: Reader | None) -> None:
        """Records the experts of the step from which the run resumes."""
        metadata = {} if stored_step is None else stored_step.index.metadata
        record = stored(metadata, path) or ExpertRecord({})
        with self._lock:
            record = record.restarted(self._plt_budget)
            self._record = replace(record, since=None, resumed=step)


def copy_selection(
    step: Reader, base: Reader, keys: ExpertKeys, chooses: Choose | None
) -> Selection | None:
    """The experts that the copy of a step takes from an earlier copy; None if it has all.

    Arguments:
        step: with all experts.
        base: the earlier copy.
        keys: name the experts, and say how many of them the copy has as the step has them.
        chooses: chooses these, if they do not take turns.

    Raises:
        CheckpointCorrupt: the record of one is malformed.
        ValueError: `chooses` did not choose experts.
    """
    record, before = _record_of(step), _record_of(base)
    if record is None or before is None or record.steps.keys() != before.steps.keys():
        return None
    base_step = _number(base.index)
    if record.since is None or (base_step < record.since and base_step != record.resumed):
        return None  # training went on from another step
    number, chosen = _number(step.index), dict[str, dict[int, int]]()
    before = replace(before, doublings=record.doublings)
    for text, expert_steps in before.steps.items():
        match = keys.key_of(text)
        if match is None or expert_steps.keys() != record.steps[text].keys():
            return None
        chosen[text] = choose(match[0], text, before, number, chooses)
    seen = {layer: counts.seen for layer, counts in record.layers.items()}
    saving = before.saving(chosen, seen, record.keys)
    steps = {key: {**older, **chosen[key]} for key, older in before.steps.items()}
    copied = replace(saving, steps=steps, since=record.since, resumed=record.resumed)
    return _selection(step.index, keys, chosen, copied)


def recovered_selection(
    step: Reader, copy: Reader, keys: ExpertKeys, lost: Iterable[tuple[str, Box]]
) -> Selection | None:
    """The experts of a step that are taken from its copy, because parts of them are lost.

    Arguments:
        step: with all experts, of which some may have been taken from the copy before.
        copy: of it in the root.
        keys: name the experts.
        lost: arrays, each with the box of a lost chunk.

    Returns:
        The selection; None if what is lost is no expert, or the step was saved with other keys.

    Raises:
        CheckpointCorrupt: the record of one is malformed.
    """
    record, of_copy = _record_of(step), _record_of(copy)
    if record is None or of_copy is None:
        return None
    units, older = units_in(step.index, keys), dict[str, set[int]]()
    if any(array_units.key not in record.steps for array_units in units.values()):
        return None
    for name, box in lost:
        if (array_units := units.get(name)) is None:
            return None
        older.setdefault(array_units.key, set()).update(array_units.within(box))
    # Also those that were taken from the copy when nodes were lost before.
    steps = {
        key: {n: of_copy.steps[key][n] if n in older.get(key, ()) else s for n, s in of_key.items()}
        for key, of_key in record.steps.items()
    }
    written = {
        key: {n: s for n, s in of_key.items() if n not in older.get(key, ())}
        for key, of_key in record.steps.items()
    }
    layers = {
        name: replace(
            counts,
            lost={
                n: tokens
                for n, tokens in counts.lost.items()
                if steps[of_copy.keys[name]].get(n) == of_copy.steps[of_copy.keys[name]].get(n)
            },
        )
        for name, counts in of_copy.layers.items()
    }
    return _selection(step.index, keys, written, replace(of_copy, steps=steps, layers=layers))


def _selection(
    index: Index, keys: ExpertKeys, written: UnitSteps, record: ExpertRecord
) -> Selection:
    metadata = recorded(index.metadata, record)
    return Selection(units_in(index, keys), metadata, record.steps, "experts", written)


def _record_of(reader: Reader) -> ExpertRecord | None:
    return stored(reader.index.metadata, str(reader.location))


def _number(index: Index) -> int:
    """The step of a checkpoint of a run."""
    return int(index.metadata[RESERVED_METADATA]["step"])
