"""What a writer takes from the base of its save, while it writes the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from unickpt.commit.messages import PATCH_DTYPE, ValuePlace
from unickpt.format.index import BaseEntry
from unickpt.format.links import FULL_LINK
from unickpt.reuse.base import Base, Compared
from unickpt.reuse.shares import Taken
from unickpt.reuse.spans import Span, Spans
from unickpt.saving.write_plan import WriteItem
from unickpt.storage.btree.builder import PLACE_DTYPE
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.data_files import DataFile

if TYPE_CHECKING:
    from unickpt.reuse.unchanged import Unchanged

_MOST_THREADS = 16  # that write and also encode, or compare with the base


class Notes(Protocol):
    """What notes where chunks are: `References`."""

    chunks: Any

    def place(self, taken: DataReference | BaseEntry) -> ValuePlace:
        """Where a value is that was taken."""

    def add_patches(self, patches: Any) -> None:
        """Notes where some patches are."""


_Notes = TypeVar("_Notes", bound=Notes)


class Writer(Protocol):
    """What writes the rest: `ChunkWriter`."""

    unchanged: Unchanged | None

    def write(
        self,
        items: Sequence[WriteItem],
        done: Any,
        values: Sequence[bytes | memoryview],
        base: Base | None = None,
        *,
        rows: Sequence[int] | None = None,
        meanwhile: Callable[[], None] = ...,
    ) -> Any: ...

    def count_done(self, nbytes: int) -> None: ...

    def tell(self) -> None: ...


def take_or_write(
    writer: Writer,
    base: Base,
    items: Sequence[WriteItem],
    values: Sequence[bytes | memoryview],
    *,
    noting: Callable[[Sequence[WriteItem]], _Notes],
    looked_in: Base | None,
    in_order: bool,
) -> _Notes:
    """Takes the chunks that are not looked at, and writes the others, and some values.

    Arguments:
        writer: of the save.
        base: of the save.
        items: the chunks of this process.
        values: what else it writes.
        noting: makes what notes where chunks are.
        looked_in: the base, if chunks that are equal there are taken, too.
        in_order: whether what is written must stay in its order.
    """
    asked = [item for item in items if item.borrowed]
    some = [item for item in items if not item.borrowed] if looked_in is not None else ()
    together = base.offer(
        ((item.entry, item.part, item.number) for item in some),
        [Span(item.entry, item.part, item.numbers) for item in asked],
    )
    spans = [asked[number] for number in together.which.tolist()]
    others, lent, known = list[WriteItem](), list[WriteItem](), set(map(id, spans))
    for item in items:
        if id(item) not in known:
            for chunk in item.chunks():
                is_lent = chunk.borrowed and base.may_lend(chunk.part, chunk.number)
                (lent if is_lent else others).append(chunk)
    if not in_order:
        others.sort(key=partial(_is_unlikely, base, writer.unchanged))
    done, left = noting([*others, *lent, *spans]), dict[int, WriteItem]()

    def take() -> None:
        found, first = dict[int, Compared](), len(others) + len(lent)
        for row, item in enumerate(lent, len(others)):
            each = base.borrow(item.part, item.number)
            if each is None:  # its file can no longer be linked
                left[row] = item
            else:
                found[row] = each
        note(done, found)
        for row in note_spans(done, first, together, base.take_spans(together)):
            number, (_, _, chunk) = together.chunk(row)
            at = chunk - asked[number].number
            left[first + row] = asked[number].some(range(at, at + 1))
        all_of_them = sum(item.nbytes for item in [*lent, *spans])
        writer.count_done(all_of_them - sum(item.nbytes for item in left.values()))
        writer.tell()

    writer.write(others, done, values, looked_in, meanwhile=take)
    if left:
        writer.write(list(left.values()), done, (), rows=list(left))
    return done


def note_spans(
    done: Notes, first: int, some: Spans, taken: Mapping[int, Taken | None]
) -> Sequence[int]:
    """Notes where chunks are that were taken together.

    Arguments:
        done: where it is noted.
        first: row of the first of them there.
        some: what they are.
        taken: where each unit is; see `Base.take_spans`.

    Returns:
        Those that were not taken, as rows of `some`.
    """
    if not len(some.unit):
        return ()
    file, offset = np.zeros(len(some.units), np.int64), np.zeros(len(some.units), np.int64)
    is_apart, is_taken = np.zeros(len(file), np.bool_), np.zeros(len(file), np.bool_)
    for unit, each in taken.items():
        if each is not None:
            assert not isinstance(each, bytes), "what is in files stays there"
            file[unit], offset[unit], _ = done.place(each)
            is_taken[unit], is_apart[unit] = True, isinstance(each, BaseEntry)
    rows = slice(first, first + len(some.unit))
    apart = is_apart[some.unit]
    done.chunks["digest"][rows] = some.digest
    done.chunks["file"][rows] = file[some.unit]
    done.chunks["offset"][rows] = np.where(apart, offset[some.unit], some.offset)
    done.chunks["length"][rows] = np.where(apart, 0, some.length)
    return np.flatnonzero(~is_taken[some.unit]).tolist()


@dataclass(frozen=True)
class Apart:
    """A file for the whole chunks of a batch that has patches, too. The next saves link that of the
    patches, in which a whole chunk, changed again, would stay, too.

    Arguments:
        file: the file.
        rows: of its chunks.
    """

    file: DataFile
    rows: list[int] = field(default_factory=list)


def threads(
    looked_in: Base | None, items: Sequence[WriteItem], least: int, *, background: bool
) -> int:
    """How many threads write if they also encode or compare.

    Arguments:
        looked_in: with what they compare; None for nothing.
        items: the chunks.
        least: how many write in any case.
        background: whether in the background of a training loop.
    """
    compared = [
        item.nbytes for item in items if looked_in is not None and looked_in.patches(item.entry)
    ]
    if not compared and not any(item.entry.encoding for item in items):
        return least
    cpus = os.cpu_count() or 1
    wanted = max(least, cpus // 4 if background else min(cpus, _MOST_THREADS))
    if compared and looked_in is not None:
        wanted = min(wanted, max(1, looked_in.comparable_at_once(max(compared))))
    return wanted


def note(done: Notes, found: Mapping[int, Compared]) -> None:
    """Notes where the values of chunks are that were not written, by their rows: those of whole
    ones, or their full chunks and patches."""
    places, patches = list[ValuePlace](), list[tuple[int, ...]]()
    for row, each in found.items():
        first = each.taken[0]
        assert not isinstance(first, bytes), "only patches are written again"
        places.append(done.place(first))
        patches += [
            (row, link, *done.place(taken))
            for link, taken in enumerate(each.taken[1:], FULL_LINK + 1)
            if not isinstance(taken, bytes)
        ]
    if not found:
        return
    rows = np.fromiter(found, np.int64, len(found))
    done.chunks["digest"][rows] = np.array([each.digest for each in found.values()], np.uint64)
    columns: Any = zip(*places, strict=True)
    for name, column in zip(PLACE_DTYPE.names or (), columns, strict=True):
        done.chunks[name][rows] = column
    if patches:
        done.add_patches(np.array(patches, PATCH_DTYPE))


def notes(base: Base, items: Sequence[WriteItem]) -> Iterator[tuple[int, str, Any]]:
    """What the base says, on behalf of codecs, about arrays of which chunks are taken, whatever
    they hold: array number, codec, note."""
    for array, entry in {i.array: i.entry for i in items if i.borrowed}.items():
        theirs = base.index.arrays.get(entry.name)
        if entry.codec is not None and theirs is not None and entry.codec in theirs.extra:
            yield array, entry.codec, theirs.extra[entry.codec]


def _is_unlikely(base: Base, unchanged: Unchanged | None, item: WriteItem) -> tuple[Any, bool]:
    """What is probably written comes first: the disk has time for it while the rest, which is only
    hashed, keeps the CPUs busy. Units stay together."""
    is_looked_at = unchanged is not None and unchanged.claims(item.entry.name, item.box)
    return item.unit or ("", -1), is_looked_at or base.is_settled(item.part, item.number)
