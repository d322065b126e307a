"""What a writer takes from the base of its save, before it writes the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unickpt.reuse.base import Base, Compared
from unickpt.saving.write_plan import WriteItem


def take(
    base: Base, items: Sequence[WriteItem], *, all_equal: bool, in_order: bool
) -> tuple[list[WriteItem], list[tuple[WriteItem, Compared]]]:
    """Takes the chunks that are not looked at.

    Arguments:
        base: of the save.
        items: of this process.
        all_equal: whether all chunks that are equal will be taken, or only those.
        in_order: whether the rest must stay in its order.

    Returns:
        The rest, and what was taken, with where it is.
    """
    offered = items if all_equal else [item for item in items if item.borrowed]
    base.offer((item.entry, item.part, item.number) for item in offered)
    if not in_order:
        items = _likely_changed_first(items, base)
    others, taken = list[WriteItem](), list[tuple[WriteItem, Compared]]()
    for item in items:
        found = base.borrow(item.part, item.number) if item.borrowed else None
        if found is None:
            others.append(item)
        else:
            taken.append((item, found))
    return others, taken


def _likely_changed_first(items: Sequence[WriteItem], base: Base) -> Sequence[WriteItem]:
    """What is probably written comes first: the disk has time for it while the rest, which is only
    hashed, keeps the CPUs busy. Experts stay together."""

    def rank(item: WriteItem) -> tuple[Any, bool]:
        return item.expert or ("", -1), base.is_settled(item.part, item.number)

    return sorted(items, key=rank)
