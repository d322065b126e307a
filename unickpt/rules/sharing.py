"""Values that one side has once and the other once per parameter, such as step counts."""

from __future__ import annotations

from collections.abc import Sequence

from unickpt.rules.lift import Shared, Slot
from unickpt.rules.matching import Instance, Names, names_of


def shared_names(
    lift: Shared, found: Sequence[Instance], have: Names, want: Names | None
) -> tuple[list[str], list[str]]:
    """The names that a lift is about, on both sides.

    Arguments:
        lift: what is shared.
        found: the families of arrays that rules apply to.
        have: what is stored.
        want: what is asked for, where that is known.
    """
    left = _names(lift.left, found, True, lift.right)
    right = _names(lift.right, found, False, lift.left)
    return [n for n in left if n in have.facts], [
        n for n in right if want is None or n in want.facts
    ]


def _names(slot: Slot, found: Sequence[Instance], left: bool, other: Slot) -> list[str]:
    if slot.single is not None:
        return [slot.single]
    parameters = [
        name
        for instance in found
        if not instance.rule.lifted
        for name in names_of(instance, instance.rule.left if left else instance.rule.right)
    ]
    names = list(dict.fromkeys(n for parameter in parameters for n in slot.of(parameter)))
    assert other.single is not None, "one side has one name"
    beside = _folders_beside(other.single, found, left)
    return [name for name in names if _folder(name) in beside] if beside else names


def _folders_beside(single: str, found: Sequence[Instance], left: bool) -> set[str]:
    """Where the slots lie that stand beside the one name on the other side.

    A job may have several optimizers, or groups of parameters, each with a count of its own.
    """
    folder = _folder(single)
    beside: set[str] = set()
    for instance in found:
        if not instance.rule.lifted:
            continue
        ours, theirs = instance.rule.left, instance.rule.right
        if not left:
            ours, theirs = theirs, ours
        if any(f"{name}/".startswith(f"{folder}/") for name in names_of(instance, theirs)):
            beside.update(map(_folder, names_of(instance, ours)))
    return beside


def _folder(name: str) -> str:
    return name.rpartition("/")[0]
