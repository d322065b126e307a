"""The nodes of a job: which processes run on them, where their files can be read, and which files
they have from earlier jobs. Agreed over small objects in the root when all processes have begun."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from unickpt.errors import SaveTimeout, StorageError
from unickpt.extend import Location, first_few, storage_context

_ALL = "all"
_PAUSES_S = 0.01, 1.0
Parts = Mapping[str, Mapping[str, Sequence[int]]]
"""By step folder and attempt, the processes whose data files are there."""


@dataclass(frozen=True)
class NodeProcess:
    """A process of the job.

    Arguments:
        node: identifies its node, by the folder of the node.
        url: where the files of this folder can be read.
        unit: what fails together with the node.
        parts: what the folder has.
        sums: the folders of sums of other nodes' files that it has; see `node_parity`.
        silent: the nodes that do not answer to it.
    """

    node: str
    url: str
    unit: str = ""
    parts: Parts = field(default_factory=dict)
    sums: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    silent: Sequence[str] = ()


def gather(
    location: Location, name: str, index: int, count: int, member: NodeProcess, timeout_s: float
) -> list[NodeProcess]:
    """What each process says of itself; called by all of them.

    Arguments:
        location: a folder that all processes see.
        name: of this exchange, the same on all processes and never used before.
        index, count: number of this process, and of all.
        member: what this one says.
        timeout_s: how long to wait for the others.

    Raises:
        SaveTimeout: names the processes that are missing.
        StorageError: the storage failed, or has something else.
    """
    context = storage_context(fsync=False)
    folder = location.child(f"members/{name}")
    store = folder.store(context)
    store.write(f"{index:05d}", msgspec.json.encode(member)).result()
    deadline, pause = time.monotonic() + timeout_s, _PAUSES_S[0]
    while True:
        names = {key.decode() for key in store.list().result()}
        if _ALL in names:
            break
        missing = [n for n in range(count) if f"{n:05d}" not in names]
        if index == 0 and not missing:
            reads = [store.read(f"{n:05d}") for n in range(count)]
            members = [_decoded(read.result().value, NodeProcess) for read in reads]
            _remove_older(location, name)  # before any process goes on, to a next exchange
            store.write(_ALL, msgspec.json.encode(_without_repeats(members))).result()
            break
        if time.monotonic() > deadline:
            who = f"processes {first_few(missing)}" if missing else "process 0"
            raise SaveTimeout(
                f"{location}: {who} did not create the Checkpointer within {timeout_s:g} s. All "
                "processes create it with the same arguments, and see this folder"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, _PAUSES_S[1])
    all_members: list[NodeProcess] = _decoded(store.read(_ALL).result().value, list[NodeProcess])
    return all_members


def is_there(location: Location, name: str) -> bool:
    """Whether the answers of an exchange are still in a folder."""
    return location.child(f"members/{name}").has_file(_ALL, storage_context(fsync=False))


def _without_repeats(members: Sequence[NodeProcess]) -> list[NodeProcess]:
    """The members, of which only the first of each node says what is in the folder: all that any of
    them saw, because another one may have added files since."""
    by_node: dict[str, list[NodeProcess]] = {}
    for member in members:
        by_node.setdefault(member.node, []).append(member)
    shortened = []
    for member in members:
        of_node = by_node.pop(member.node, [])
        parts, sums = [m.parts for m in of_node], [m.sums for m in of_node]
        shortened.append(replace(member, parts=_union(parts), sums=_union(sums)))
    return shortened


def _union(listings: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]) -> dict[str, Any]:
    """All that listings by step and attempt have."""
    union: dict[str, dict[str, list[Any]]] = {}
    for listing in listings:
        for step, by_attempt in listing.items():
            for attempt, names in by_attempt.items():
                union_names = union.setdefault(step, {}).setdefault(attempt, [])
                union_names += [name for name in names if name not in union_names]
    return union


def _remove_older(location: Location, name: str) -> None:
    folder, context = location.child("members"), storage_context(fsync=False)
    for other in folder.folders(context):
        if other != name:
            folder.child(other).remove(context)


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise StorageError(f"a process of the job said something else of itself: {error}") from None
