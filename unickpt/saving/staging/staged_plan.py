"""Which chunks a save copies, when, and where: what does not fit into memory is put off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from unickpt.saving.staging.capture import Capture, CaptureMethod
from unickpt.saving.staging.places import Places
from unickpt.saving.write_plan import WriteItem, WritePlan

Key = tuple[int, int]
"""Of a chunk: its array, and its position there."""
_COPIES = {CaptureMethod.COPY_NOW, CaptureMethod.COPY_LATER}


def _none() -> dict[CaptureMethod, list[WriteItem]]:
    return {method: [] for method in CaptureMethod}


@dataclass(frozen=True)
class StagedPlan:
    """The chunks of one save.

    Arguments:
        writes: what this process holds and writes.
        items: the chunks by how they are kept, in the order in which they are copied.
        deferred: those to be copied later because they do not fit.
        never_in_memory: those whose copies may only be in files.
        waits_for_commit: whether the state may change only after the commit.
    """

    writes: WritePlan = field(default_factory=lambda: WritePlan((), ()))
    items: dict[CaptureMethod, list[WriteItem]] = field(default_factory=_none)
    deferred: Sequence[WriteItem] = ()
    never_in_memory: frozenset[Key] = frozenset()
    waits_for_commit: bool = False


def plan_staging(writes: WritePlan, capture: Capture, places: Places) -> StagedPlan:
    """Plans how the chunks of a save are staged.

    Arguments:
        writes: what this process holds and writes.
        capture: decides how fragments are kept.
        places: for copies.
    """
    own = {key(item) for item in writes.own}
    spare = [item for item in kept(writes.held) if item.assumed and key(item) not in own]
    held_back = _held_back(spare, writes.own, capture, places)
    waits_for_commit = bool(held_back) and not places.can_spill
    room = places.room
    if not waits_for_commit:
        room -= sum(item.nbytes for item in spare if key(item) not in held_back)
    planned, deferred = _deferring(writes.own, capture, room)
    planned.sort(key=lambda item: capture.methods[item.fragment].value)
    items = _none()
    for item in kept(planned):
        items[capture.methods[item.fragment]].append(item)
    for item in spare:
        method = capture.methods[item.fragment]
        copy = method in _COPIES and not waits_for_commit
        items[method if copy else CaptureMethod.REFERENCE].append(item)
    writes = WritePlan(writes.held, planned)
    return StagedPlan(writes, items, deferred, held_back, waits_for_commit)


def _held_back(
    spare: Sequence[WriteItem], own: Sequence[WriteItem], capture: Capture, places: Places
) -> frozenset[Key]:
    """Of chunks that another process should write, those that have no room in memory.

    If that process lacks them, this one must write them; so they are held until the commit. They
    may have up to half of the memory. If the others find no place in a file, nothing is copied, and
    the caller waits for the commit.
    """
    room = places.budget // 2 - max((item.nbytes for item in kept(own)), default=0)
    found = set()
    for item in spare:
        if capture.methods[item.fragment] in _COPIES:
            room -= item.nbytes
            if room < 0:
                found.add(key(item))
    return frozenset(found)


def _deferring(
    own: Sequence[WriteItem], capture: Capture, room: int
) -> tuple[list[WriteItem], list[WriteItem]]:
    """What this process writes, and of that what is copied later, because it does not fit.

    Arguments:
        own: what it writes.
        capture: knows of which chunks that is safe.
        room: bytes of copies that fit.
    """
    found, deferred = [], []
    for item in own:
        if not item.borrowed and capture.methods[item.fragment] is CaptureMethod.COPY_NOW:
            room -= item.nbytes
            later = capture.deferred(item.fragment) if room < 0 else None
            if later is not None:
                item = replace(item, fragment=later)
                deferred.append(item)
        found.append(item)
    return found, deferred


def key(item: WriteItem) -> Key:
    """By which a chunk is found."""
    return item.array, item.position


def kept(items: Iterable[WriteItem]) -> list[WriteItem]:
    """Those whose own data are saved."""
    return [item for item in items if not item.borrowed]
