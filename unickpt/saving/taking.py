"""What a writer takes from the base of its save, while it writes the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from unickpt.commit.messages import PATCH_DTYPE, ValuePlace
from unickpt.format.index import BaseEntry
from unickpt.format.links import FULL_LINK
from unickpt.reuse.base import Base, Compared
from unickpt.saving.write_plan import WriteItem
from unickpt.storage.btree.builder import PLACE_DTYPE
from unickpt.storage.btree.nodes import DataReference


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
    some = items if looked_in is not None else [item for item in items if item.borrowed]
    base.offer((item.entry, item.part, item.number) for item in some)
    if not in_order:
        items = _likely_changed_first(items, base)
    others, lent = list[WriteItem](), list[WriteItem]()
    for item in items:
        is_lent = item.borrowed and base.may_lend(item.part, item.number)
        (lent if is_lent else others).append(item)
    done, left = noting([*others, *lent]), list[int]()

    def take() -> None:
        found = dict[int, Compared]()
        for row, item in enumerate(lent, len(others)):
            each = base.borrow(item.part, item.number)
            if each is None:  # its file can no longer be linked
                left.append(row)
            else:
                found[row] = each
        note(done, found)
        writer.count_done(sum(lent[row - len(others)].nbytes for row in found))
        writer.tell()

    writer.write(others, done, values, looked_in, meanwhile=take)
    if left:
        rest = [lent[row - len(others)] for row in left]
        writer.write(rest, done, (), rows=left)
    return done


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


def errors(
    base: Base, items: Sequence[WriteItem], known: Mapping[int, tuple[float, float]]
) -> dict[int, tuple[float, float]]:
    """The errors of quantised arrays of which chunks are taken, whatever they hold.

    Arguments:
        base: has them, and records its errors.
        items: of the save.
        known: the errors so far, by the array's number.
    """
    found = {}
    for array, entry in {i.array: i.entry for i in items if i.borrowed}.items():
        theirs = base.index.arrays.get(entry.name)
        if entry.quantized is not None and theirs is not None:
            ours = known.get(array, (0.0, 0.0))
            found[array] = max(ours[0], theirs.errors[0]), max(ours[1], theirs.errors[1])
    return found


def _likely_changed_first(items: Sequence[WriteItem], base: Base) -> Sequence[WriteItem]:
    """What is probably written comes first: the disk has time for it while the rest, which is only
    hashed, keeps the CPUs busy. Experts stay together."""

    def rank(item: WriteItem) -> tuple[Any, bool]:
        return item.expert or ("", -1), base.is_settled(item.part, item.number)

    return sorted(items, key=rank)
