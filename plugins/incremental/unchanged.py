"""Skipping unchanged arrays: `SaveOptions.changed`.

A save takes the arrays that it skips from the save before. The evidence is
- with "tracked": a digest of the content, which an accelerator computes (`Adapter.tokens`);
- with False or rows: the program's declaration. Each save compares a sample of each such array with
  the save before (`change_samples`), and hashes one of `TURNS` chunks; the chunks take turns, so
  that all were hashed after `TURNS` saves. A wrong declaration is an error, which names the array.

All else is staged and hashed, as without `changed`. Check-N-Run (Eisenman et al., NSDI 2022) tracks
rows in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

import numpy as np

from unickpt.errors import StateChanged, StorageError
from unickpt.extend import (
    Array,
    ArrayEntry,
    ArraySource,
    Fragment,
    Index,
    Part,
    Skipped,
    name_matches,
    parts_of_boxes,
    quoted,
)
from unickpt.plugins.incremental.change_samples import ArraySample, Sampler
from unickpt.types import Box

Changed = Literal["tracked"] | Mapping[str, Any]
"""See `SaveOptions.changed`."""
_ALL = "tracked"
TURNS = 17
"""After so many saves every chunk was hashed. Prime, so that this also holds for two sequences of
saves that alternately continue from the same one."""
LEAST_BYTES = 64 << 10
"""A process stages its part of a smaller array: a sample would take longer."""
Start = tuple[int, ...]


def check(changed: object) -> None:
    """Checks `SaveOptions.changed`.

    Raises:
        TypeError, ValueError: it is neither "tracked" nor a dict of patterns.
    """
    if changed is None or changed == _ALL:
        return
    if not isinstance(changed, Mapping) or not all(isinstance(p, str) for p in changed):
        raise TypeError(
            'changed must be "tracked", or a dict of patterns of names with what changed, such as '
            f'{{"frozen/**": False, "embedding/w": rows}}, not {quoted(changed)}'
        )
    for pattern, what in changed.items():
        if not isinstance(what, bool | np.bool_ | str) and _rows(what) is None:
            raise TypeError(
                f"changed[{pattern!r}] is {quoted(what)}, neither a bool nor an array of bools, "
                "one for each row"
            )
        if isinstance(what, str) and what != _ALL:
            raise ValueError(f'changed[{pattern!r}] is {what!r}; the only word is "{_ALL}"')


def _rows(what: Any) -> Array | None:
    """Bools, one for each row; None if it is something else."""
    try:
        rows = np.asarray(what)
    except (TypeError, ValueError, RuntimeError):
        return None
    return rows if rows.dtype == np.bool_ and rows.ndim == 1 else None


@dataclass(frozen=True)
class SeenState:
    """The arrays of a save, which show the next one the unchanged arrays.

    Arguments:
        url, attempt: identify the checkpoint.
        tokens: the tokens of the arrays that are tracked, by name.
        samples: of the arrays that the program may declare unchanged.
        turns: counts the saves that continue from here.
    """

    url: str
    attempt: str
    tokens: Mapping[str, object] = field(default_factory=dict)
    samples: Mapping[str, ArraySample] = field(default_factory=dict)
    turns: Iterator[int] = field(default_factory=itertools.count)


@dataclass(frozen=True)
class UnchangedArrays(Skipped):
    """The arrays that are as in the base.

    Arguments:
        rows: by the name of an array the rows that changed; None if none did.
        attempt: that made the base.
        due: by the name of an array the chunks that are hashed all the same, by the indices of
            their first elements; None for all of them.
    """

    rows: Mapping[str, Array | None]
    attempt: str
    due: Mapping[str, Collection[Start] | None] = field(default_factory=dict)

    def claims(self, name: str, box: Box) -> bool:
        """Whether a box of an array is as in the base, as far as is known."""
        if name not in self.rows:
            return False
        rows = self.rows[name]
        return rows is None or not rows[box.start[0] : box.stop[0]].any()

    def skips(self, name: str, box: Box) -> bool:
        """Whether nothing of a box that consists of chunks is staged."""
        if not self.claims(name, box):
            return False
        starts = self.due.get(name, ())
        return starts is not None and not any(_is_in(start, box) for start in starts)

    def skips_chunk(self, name: str, box: Box) -> bool:
        """Whether a chunk is not staged."""
        if not self.claims(name, box):
            return False
        starts = self.due.get(name, ())
        return starts is not None and box.start not in starts

    def check_base(self, base: Index | None, where: object) -> None:
        """Checks that the base is the save that was seen.

        Arguments:
            base: its index; None if there is none, or it cannot be used.
            where: of this save, for the error.

        Raises:
            StorageError: an array declared unchanged was neither staged, nor can it be taken.
        """
        if base is None or self.attempt != base.attempt:
            why = "is not there or is damaged" if base is None else "is another one"
            raise StorageError(
                f"{where}: the checkpoint that has the chunks which did not change (`changed`) "
                f"{why}. Nothing was saved; the next save hashes everything"
            )

    def check(self, name: str, box: Box, before: int | None, digest: int) -> None:
        """Checks a chunk that was hashed, and is as in the base, as far as is known.

        Arguments:
            name, box: which one.
            before: its digest in the base, if that has it.
            digest: of the saved one.

        Raises:
            StateChanged: it changed.
        """
        if before not in (None, digest):
            raise wrong_word(name, box)


def wrong_word(name: str, box: Box) -> StateChanged:
    """The error that the program was wrong about an array."""
    return StateChanged(
        f"array {name!r} {box} is said not to have changed since the step before "
        "(`SaveOptions.changed`), but it did. A save compares only a sample, and hashes each chunk "
        f"in one of {TURNS} saves, so earlier steps may lack this change, or others: find out what "
        "changes the array, and save without `changed`. Nothing was saved; the next save hashes "
        "everything"
    )


def _is_in(start: Start, box: Box) -> bool:
    return all(a <= i < b for i, a, b in zip(start, box.start, box.stop, strict=True))


def words_of(
    changed: Changed, arrays: Mapping[str, ArrayEntry], apart: Collection[str] = ()
) -> dict[str, bool | Literal["tracked"] | Array]:
    """The program's declaration for each array.

    Arguments:
        changed: see `SaveOptions.changed`.
        arrays: of the save.
        apart: arrays that the base need not have as they were in the save before: all experts.

    Raises:
        ValueError: a pattern matches no array, or has another number of rows.
    """
    patterns: Mapping[str, Any] = {"**": _ALL} if isinstance(changed, str) else changed
    unused, words = set(patterns), dict[str, Any]()
    for name, entry in arrays.items():
        pattern = next((p for p in patterns if name_matches(p, name)), None)
        if pattern is None:
            continue
        unused.discard(pattern)
        if entry.codec is not None or name in apart:
            continue  # the base may hold other elements: a codec's, or older ones of experts
        word = patterns[pattern]
        if not isinstance(word, str):
            is_one = isinstance(word, bool | np.bool_)
            word = bool(word) if is_one else _checked_rows(pattern, entry, word)
        words[name] = word
    unused.discard("**")  # there may be nothing else
    if unused:
        raise ValueError(
            f"SaveOptions.changed: {quoted(sorted(unused))} match no array, or only arrays that an "
            f"earlier pattern matches; there are {quoted(list(arrays))}"
        )
    return words


def _checked_rows(pattern: str, entry: ArrayEntry, what: Any) -> Array:
    rows = _rows(what)
    assert rows is not None, "`check` has checked it"
    if not entry.shape or len(rows) != entry.shape[0]:
        raise ValueError(
            f"SaveOptions.changed[{pattern!r}] has {len(rows)} rows, and {entry.name!r} has the "
            f"shape {list(entry.shape)}"
        )
    return rows


def find_unchanged(
    words: Mapping[str, bool | Literal["tracked"] | Array],
    arrays: Mapping[str, tuple[ArrayEntry, ArraySource]],
    tokens: Mapping[str, object],
    before: SeenState | None,
) -> tuple[UnchangedArrays | None, Mapping[str, ArraySample]]:
    """Finds the arrays that are as in the save before.

    Arguments:
        words: from `words_of`.
        arrays: those of the save that are large enough, as they are now.
        tokens: of those of them that are tracked.
        before: that save; None if it is unknown.

    Returns:
        None if there are none; and samples of arrays that are not tracked.

    Raises:
        StateChanged: the program is wrong about an array.
    """
    rows = dict[str, Array | None]()
    untracked_sources = {name: source for name, (_, source) in arrays.items() if name not in tokens}
    sampler = Sampler(untracked_sources)
    previous = SeenState("", "") if before is None else before
    for name in arrays:
        word = words[name]
        if name in tokens:
            if tokens[name] is not None and previous.tokens.get(name) == tokens[name]:
                rows[name] = None
        elif word is not True:
            changed_rows = word if isinstance(word, np.ndarray) else None
            if sampler.compare(name, previous.samples.get(name), changed_rows):
                rows[name] = changed_rows
    samples, wrong = sampler.finish()
    if wrong is not None:
        raise wrong_word(*wrong)
    if before is None:
        return None, samples
    # In each save, so that all processes count the same, whatever each of them holds.
    turn = next(before.turns) % TURNS
    if not rows:
        return None, samples
    due = {name: _due(*arrays[name], turn) for name in rows if name not in tokens}
    return UnchangedArrays(rows, before.attempt, due), samples


def _due(entry: ArrayEntry, source: ArraySource, turn: int) -> Collection[Start] | None:
    """The chunks of an array whose turn it is; None for all.

    On an accelerator all chunks of an array come in the same turn: a save may clone all of an array
    to stage any part of it.
    """
    offset = crc32(entry.name.encode()) + turn
    if any(fragment.memory.on_device for fragment in source.fragments):
        return () if offset % TURNS else None
    return {
        part.chunk_box(number).start
        for part, first, run in _runs(entry, source.fragments)
        for number in run[-(offset + first + run.start) % TURNS :: TURNS]
    }


def _runs(entry: ArrayEntry, fragments: Sequence[Fragment]) -> Iterator[tuple[Part, int, range]]:
    """The chunks of fragments: the part, the number of its first chunk, and chunks in it."""
    first = 0
    for part in parts_of_boxes(entry, [fragment.box for fragment in fragments]):
        for fragment in fragments:
            for run in part.runs_in(fragment.box):
                yield part, first, run
        first += part.count
