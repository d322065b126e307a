"""What a writer takes from the base of its save, before it writes the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unickpt.reuse.base import Base
from unickpt.reuse.shares import Taken
from unickpt.saving.write_plan import WriteItem


def take(
    base: Base, items: Sequence[WriteItem], *, all_equal: bool, in_order: bool
) -> tuple[list[WriteItem], list[tuple[WriteItem, Sequence[Taken]]]]:
    """Takes the chunks that are not looked at.

    Arguments:
        base: of the save.
        items: of this process.
        all_equal: whether all chunks that are equal will be taken, or only those.
        in_order: whether the rest must stay in its order.

    Returns:
        The rest, and what was taken, with its places.
    """
    offered = items if all_equal else [item for item in items if item.borrowed]
    base.offer((item.entry, item.part, item.number) for item in offered)
    if not in_order:
        items = _likely_changed_first(items, base)
    others, taken = list[WriteItem](), list[tuple[WriteItem, Sequence[Taken]]]()
    for item in items:
        at = base.borrow(item.part, item.number) if item.borrowed else ()
        if at:
            taken.append((item, at))
        else:
            others.append(item)
    return others, taken


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
