"""Commit: the processes' databases -> one atomic root, agreed on through the storage alone.

Every process ends its part with a record under `processes/<attempt>/records/`, or with an error.
The coordinator reads the records, proves that each chunk was written exactly once, and merges the
databases into the root in one transaction. No process talks to another in any other way.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

from unickpt import chunks, digests, plan, tree
from unickpt import index as index_module
from unickpt._version import LIBRARY
from unickpt.backends import Location
from unickpt.box import Box, overlap, uncovered
from unickpt.describe import Description
from unickpt.errors import (
    CheckpointExists,
    CoverageError,
    ProcessFailed,
    SaveConflict,
    SaveTimeout,
    StorageError,
)
from unickpt.group import Group
from unickpt.index import DIGESTS_KEY, INDEX_KEY, ArrayEntry, Index, PerProcessEntry
from unickpt.layout import Layout, Mesh
from unickpt.record import Record

_OK, _MORE, _ERROR = ".ok", ".more", ".error"
_REQUEST, _COMMITTED = "request", "committed"
_NOBODY = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True)
class Totals:
    """Number of arrays of a checkpoint, and their logical bytes."""

    arrays: int
    nbytes: int

    @classmethod
    def of(cls, index: Index) -> Totals:
        return cls(len(index.arrays), sum(entry.nbytes for entry in index.arrays.values()))


Serve = Callable[[Mapping[str, list[int]]], Record]


class Attempt:
    """One try of a group of processes to save one checkpoint.

    Arguments:
        location: the checkpoint's folder.
        group: the processes.
        name: the attempt's name, the same on all processes.
        context: the TensorStore context of this save.
        timeout_s: how long to wait for other processes.
    """

    def __init__(
        self, location: Location, group: Group, name: str, context: ts.Context, timeout_s: float
    ) -> None:
        self.location, self.group, self.name = location, group, name
        self.context, self.timeout_s = context, timeout_s
        self._folder = location.child(f"processes/{name}")
        self._records = self._folder.child("records").store(context)

    def check_destination(self, overwrite: bool) -> None:
        """Refuses a place that is taken.

        Raises:
            CheckpointExists: by a checkpoint (without `overwrite`) or by foreign files.
            StorageError: the storage cannot be read.
        """
        foreign = self.location.foreign_files()
        if foreign:
            raise CheckpointExists(
                f"{self.location} holds other files ({', '.join(foreign[:3])}, ...); give a new "
                "or empty directory"
            )
        if not overwrite and _root_index(self.location, self.context) is not None:
            raise CheckpointExists(
                f"{self.location} already holds a checkpoint; pass overwrite=True to replace it, "
                "or save to another path"
            )

    def check_new(self) -> None:
        """Refuses an attempt's name that was used before, whose records would be taken for news.

        Raises:
            ValueError: names the session.
        """
        if self.group.count > 1:
            old = {key.decode() for key in self._records.list().result()}
            if _COMMITTED in old or any(n.startswith(f"{self.group.index:05d}") for n in old):
                raise ValueError(
                    f"{self.location}: attempt {self.name!r} was made before; the session of a "
                    "ProcessGroup must be new for every run of the job"
                )

    def database(self, process: int) -> Location:
        """Where a process writes its chunks."""
        return self._folder.child(f"{process:05d}")

    def publish(self, record: Record, kind: str = _OK) -> None:
        """Ends this process's part."""
        self._records.write(f"{self.group.index:05d}{kind}", record.encode()).result()

    def publish_error(self, error: BaseException) -> None:
        """Tells the others why this process gives up; does nothing in a job of one."""
        if self.group.count > 1:
            message = str(error) or type(error).__name__
            with suppress(Exception):  # the storage itself may be what failed
                self._records.write(f"{self.group.index:05d}{_ERROR}", message.encode()).result()

    def check_others(self) -> None:
        """Raises `ProcessFailed` with the message of a process that gave up."""
        if self.group.count > 1:
            self._look()

    def wait_committed(self, serve: Serve) -> Totals:
        """Waits, in all processes but the coordinator, until the checkpoint exists.

        Arguments:
            serve: writes more chunks, should the coordinator ask for them.

        Raises:
            ProcessFailed: another process gave up.
            SaveTimeout: the coordinator neither committed nor gave up in time.
        """
        try:
            names = self._poll(lambda names: _COMMITTED in names or _REQUEST in names)
            if _COMMITTED not in names:
                requests = json.loads(self._records.read(_REQUEST).result().value)
                mine = requests.get(str(self.group.index))
                if mine:
                    self.publish(serve(mine), _MORE)
                self._poll(lambda names: _COMMITTED in names)
            return Totals(**json.loads(self._records.read(_COMMITTED).result().value))
        except SaveTimeout:
            # The coordinator may have died after the commit: the root itself is the truth.
            index = _root_index(self.location, self.context)
            if index is None or index.attempt != self.name:
                raise SaveTimeout(
                    f"{self.location}: process 0 did not commit within {self.timeout_s:g} s "
                    "(SaveOptions.timeout_s); it may have died. No checkpoint was written."
                ) from None
            return Totals.of(index)

    def commit(self, description: Description, overwrite: bool, serve: Serve) -> Totals:
        """Merges what all processes wrote; the coordinator's work.

        Arguments:
            description: the coordinator's own.
            overwrite: whether an existing checkpoint is replaced.
            serve: writes more chunks of the coordinator's own.

        Raises:
            ProcessFailed, SaveTimeout: another process gave up, or is late.
            CoverageError: an array is not covered exactly once.
            SaveConflict: another job committed at this path meanwhile.
        """
        records = self._collect(range(self.group.count), _OK)
        index, table = self._merge(description, records, serve)
        self._write_root(index, table, overwrite)
        totals = Totals.of(index)
        if self.group.count > 1:
            self._records.write(_COMMITTED, json.dumps(vars(totals)).encode()).result()
        self._remove_debris(overwrite)
        return totals

    # --- records -------------------------------------------------------------------------------

    def _look(self) -> set[str]:
        names = {key.decode() for key in self._records.list().result()}
        for name in sorted(names):
            if name.endswith(_ERROR) and name != f"{self.group.index:05d}{_ERROR}":
                message = self._records.read(name).result().value.decode(errors="replace")
                raise ProcessFailed(f"process {int(name.removesuffix(_ERROR))} failed: {message}")
        return names

    def _poll(self, ready: Callable[[set[str]], bool]) -> set[str]:
        deadline, pause = time.monotonic() + self.timeout_s, 0.002
        while not ready(names := self._look()):
            if time.monotonic() > deadline:
                done = {n.removesuffix(_OK) for n in names if n.endswith(_OK)}
                late = [p for p in range(self.group.count) if f"{p:05d}" not in done]
                raise SaveTimeout(
                    f"{self.location}: processes {_some(late)} of {self.group.count} wrote nothing "
                    f"within {self.timeout_s:g} s (SaveOptions.timeout_s) after process "
                    f"{self.group.index} was done; they may have died. No checkpoint was written."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0 if self.location.is_remote else 0.1)
        return names

    def _collect(self, processes: Iterable[int], kind: str) -> list[tuple[int, Record]]:
        names = {process: f"{process:05d}{kind}" for process in processes}
        self._poll(lambda found: found.issuperset(names.values()))
        reads = {process: self._records.read(name) for process, name in names.items()}
        return [(p, Record.decode(read.result().value)) for p, read in reads.items()]

    # --- merging -------------------------------------------------------------------------------

    def _merge(
        self, ours: Description, records: list[tuple[int, Record]], serve: Serve
    ) -> tuple[Index, digests.Table]:
        described = [
            ours.index if record.description == ours.digest else self._described(process, record)
            for process, record in records
        ]
        index = ours.index
        for process, theirs in enumerate(described):
            if theirs is not ours.index:
                index = _unite(index, theirs, process)
        names = [list(d.arrays) for d in described]
        index = replace(index, arrays=_with_boxes(index.arrays, records, names))
        table = _table(index, records, names)
        requests = _requests(index, table, names)
        if requests:
            table = _table(index, records + self._request(requests, serve), names)
            _requests(index, table, [])
        blobs = {
            name: PerProcessEntry(tuple(_blob(name, p, r) for p, r in records))
            for name in index.per_process
        }
        return replace(
            index,
            per_process=blobs,
            attempt=self.name,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            library=LIBRARY,
            chunks=len(table),
            digests_xxh3=f"{xxhash.xxh3_64_intdigest(table.tobytes()):016x}",
        ), table

    def _request(
        self, requests: Mapping[int, Mapping[str, list[int]]], serve: Serve
    ) -> list[tuple[int, Record]]:
        """Has processes write chunks that their planned writers do not hold."""
        self._records.write(_REQUEST, json.dumps(requests).encode()).result()
        ours = self.group.index
        own = [(ours, serve(requests[ours]))] if ours in requests else []
        return own + self._collect([p for p in requests if p != ours], _MORE)

    def _described(self, process: int, record: Record) -> Index:
        database = self.database(process)
        data = database.database(self.context).read(INDEX_KEY).result().value
        if xxhash.xxh3_64_intdigest(data) != record.description:
            raise StorageError(f"{database}: the description of process {process} is damaged")
        return index_module.decode(data, str(database), partial=True)

    # --- the root ------------------------------------------------------------------------------

    def _write_root(self, index: Index, table: digests.Table, overwrite: bool) -> None:
        transaction = ts.Transaction(atomic=True, repeatable_read=True)
        root = self.location.database(self.context).with_transaction(transaction)
        # Reading the index makes the commit fail if another job commits in between.
        if root.read(INDEX_KEY).result().state == "value":
            if not overwrite:
                raise SaveConflict(f"{self.location}: another job committed here meanwhile")
            root.delete_range(ts.KvStore.KeyRange()).result()
        merges = [
            self.database(p).database(self.context).experimental_copy_range_to(root)
            for p in range(self.group.count)
        ]
        for merge in merges:
            merge.result()
        writes = [root.write(key, value) for key, value in root_keys(index, table).items()]
        for write in writes:
            write.result()
        try:
            transaction.commit_async().result()
        except ValueError as error:
            if "Generation mismatch" in str(error) or "ABORTED" in str(error):
                raise SaveConflict(f"{self.location}: another job committed here meanwhile") from (
                    error
                )
            raise

    def _remove_debris(self, overwrite: bool) -> None:
        """Removes what no committed checkpoint needs; a failure here does no harm."""
        with suppress(Exception):
            store = self.location.store(self.context)
            under = ts.KvStore.KeyRange("processes/", "processes0")
            attempts = {key.decode().split("/")[1] for key in store.list(under).result()}
            for attempt in attempts - {self.name}:
                _delete(store, f"processes/{attempt}/")
            self.location.child("processes").remove_empty_folders()
            for key in self._records.list().result():
                if key != _COMMITTED.encode():
                    self._records.write(key, None).result()

    def discard(self) -> None:
        """Removes what this process wrote for a failed try; the records stay for the others."""
        with suppress(Exception):
            _delete(self.database(self.group.index).store(self.context), "")


def root_keys(index: Index, table: digests.Table) -> dict[str, bytes]:
    """All keys of the root that are not chunks: index, digests, zarr metadata."""
    groups, out = {""}, {}
    for name, entry in index.arrays.items():
        stored = plan.parts(entry) or [plan.Part(name, Box.whole(entry.shape), entry.chunk)]
        for part in stored:
            metadata = chunks.zarr_metadata(entry, part, index.codecs)
            out[_join(part.key, "zarr.json")] = chunks.zarr_json(metadata)
            parent = part.key
            while parent:
                parent = parent.rpartition("/")[0]
                groups.add(parent)
    for group in groups:
        out.setdefault(_join(group, "zarr.json"), chunks.GROUP_JSON)
    out[DIGESTS_KEY] = table.tobytes()
    out[INDEX_KEY] = index_module.encode(index)
    return out


def _join(prefix: str, key: str) -> str:
    return f"{prefix}/{key}" if prefix else key


def _root_index(location: Location, context: ts.Context) -> Index | None:
    """The index of the committed checkpoint at a location, if there is one.

    A root without an index is a commit that was cut short, and no checkpoint.
    """
    try:
        read = location.database(context).read(INDEX_KEY).result()
    except (ValueError, OSError) as error:
        raise chunks.translate(error, str(location)) from error
    return index_module.decode(read.value, str(location)) if read.state == "value" else None


def _delete(store: ts.KvStore, prefix: str) -> None:
    store.delete_range(ts.KvStore.KeyRange(prefix, prefix[:-1] + "0" if prefix else "")).result()


def _some(items: Sequence[int]) -> str:
    return ", ".join(map(str, items[:8])) + (", ..." if len(items) > 8 else "")


def _blob(name: str, process: int, record: Record) -> tuple[int, int]:
    if name not in record.blobs:
        raise CoverageError(
            f"process {process} has no value for the PerProcess leaf {name!r}; every process must "
            "save one"
        )
    return record.blobs[name]


def _unite(ours: Index, theirs: Index, process: int) -> Index:
    """Joins the descriptions of processes that hold different parts of one tree."""

    def same(kind: str, mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        for name in mine.keys() & other.keys():
            if not _agree(mine[name], other[name]):
                raise CoverageError(
                    f"the processes disagree about {kind} {name!r}: one has {_show(mine[name])}, "
                    f"process {process} has {_show(other[name])}. Values that differ by process "
                    "belong in unickpt.PerProcess."
                )
        return {**other, **mine}

    try:
        joined = tree.merge(ours.tree, theirs.tree)
    except ValueError as error:
        raise CoverageError(f"process 0 and process {process} save different trees: {error}") from (
            None
        )
    if ours.codecs != theirs.codecs or ours.metadata != theirs.metadata:
        raise CoverageError(f"process {process} saves with other metadata or compression")
    joined_arrays = same("array", ours.arrays, theirs.arrays)
    aliases = same("alias", ours.aliases, theirs.aliases)
    clash = next((name for name in aliases if name in joined_arrays), None)
    if clash is not None:
        raise CoverageError(
            f"the processes disagree about {clash!r}: it is tied to {aliases[clash]!r} on some only"
        )
    return replace(
        ours,
        tree=joined,
        arrays=joined_arrays,
        aliases=aliases,
        values=same("value", ours.values, theirs.values),
        per_process=same("value", ours.per_process, theirs.per_process),
    )


def _agree(mine: Any, other: Any) -> bool:
    if isinstance(mine, ArrayEntry) and isinstance(other, ArrayEntry):
        return _no_processes(mine) == _no_processes(other)
    return type(mine) is type(other) and (mine == other or mine != mine)


def _no_processes(entry: ArrayEntry) -> ArrayEntry:
    """An array on a mesh per replica (tensor parallelism without a data axis): same but for it."""
    if entry.layout is None:
        return entry
    mesh = entry.layout.mesh
    anonymous = Mesh(mesh.axes, mesh.shape, (0,) * len(mesh.processes))
    return replace(entry, layout=Layout(anonymous, entry.layout.dims))


def _show(fact: Any) -> str:
    if isinstance(fact, ArrayEntry):
        return f"{fact.dtype}{list(fact.shape)} laid out {fact.layout}"
    return repr(fact)[:80]


def _with_boxes(
    arrays: Mapping[str, ArrayEntry],
    records: Sequence[tuple[int, Record]],
    names: Sequence[Sequence[str]],
) -> dict[str, ArrayEntry]:
    """Arrays whose fragments the processes told one by one, with the boxes of all."""
    told: dict[str, list[tuple[Box, tuple[int, ...]]]] = {}
    for process, record in records:
        for number, boxes in record.boxes.items():
            at = told.setdefault(names[process][number], [])
            at += [(box, (process,)) for box in boxes]
    out = dict(arrays)
    for name, entry in arrays.items():
        if entry.boxes == ():
            all_boxes = tuple(told.get(name, ()))
            check_boxes(entry, all_boxes)
            out[name] = replace(entry, boxes=all_boxes)
    return out


def check_boxes(entry: ArrayEntry, boxes: Sequence[tuple[Box, tuple[int, ...]]]) -> None:
    """Proves that boxes cover an array exactly once.

    Raises:
        CoverageError: names the array, and a hole or two boxes that overlap.
    """
    plain = [box for box, _ in boxes]
    pair = overlap(plain)
    if pair is not None:
        (first, by_first), (second, by_second) = boxes[pair[0]], boxes[pair[1]]
        raise CoverageError(
            f"array {entry.name!r} of shape {list(entry.shape)}: {first} of process {by_first[0]} "
            f"overlaps {second} of process {by_second[0]}; let one process alone give each element"
        )
    whole = Box.whole(entry.shape)
    if sum(box.size for box in plain) != whole.size:
        raise CoverageError(
            f"array {entry.name!r} of shape {list(entry.shape)}: no process holds "
            f"{uncovered(whole, plain)}"
        )


def _table(
    index: Index, records: Sequence[tuple[int, Record]], names: Sequence[Sequence[str]]
) -> digests.Table:
    """The digest table, as far as the records fill it; no chunk has two writers."""
    at = digests.offsets(index.arrays)
    table = np.zeros(at["\0"], digests.DTYPE)
    table["process"] = _NOBODY
    told = {name: at[name] for name in index.arrays}
    for process, record in records:
        if not len(record.chunks):
            continue
        numbers = record.chunks["array"]
        base = np.zeros(len(names[process]), np.int64)
        for number in np.unique(numbers).tolist():
            name = names[process][number]
            base[number] = told[name]
            if number in record.boxes:
                entry = index.arrays[name]
                counts = [plan.box_part(entry, box).count for box in record.boxes[number]]
                told[name] += sum(counts)
        where = base[numbers] + record.chunks["chunk"].astype(np.int64)
        taken = table["process"][where] != _NOBODY
        if taken.any() or len(np.unique(where)) != len(where):
            _refuse_second_writer(index, table, where, taken, process, record)
        fresh = where[~taken]
        table["digest"][fresh] = record.chunks["digest"][~taken]
        table["process"][fresh] = process
    return table


def _requests(
    index: Index, table: digests.Table, names: Sequence[Sequence[str]]
) -> dict[int, dict[str, list[int]]]:
    """For chunks that nobody wrote: who does hold them, and so has to write them.

    A plain tensor is taken to be on all processes. Where it is on some only (pipeline stages),
    its planned writer may lack it, which shows here, when all have told what they have.

    Returns:
        For each process the positions of chunks by array name.

    Raises:
        CoverageError: no process holds a chunk.
    """
    holes = np.flatnonzero(table["process"] == _NOBODY)
    requests: dict[int, dict[str, list[int]]] = {}
    if not holes.size:
        return requests
    having: dict[str, list[int]] = {}
    for process, own in enumerate(names):
        for name in own:
            having.setdefault(name, []).append(process)
    first = 0
    for name, entry in index.arrays.items():
        start = first
        for part in plan.parts(entry):
            low, high = np.searchsorted(holes, (first, first + part.count))
            for position in holes[low:high].tolist():
                box = part.chunk_box(position - first)
                able = [p for p in having.get(name, ()) if _holds(entry, p, box)]
                if not able:
                    raise CoverageError(
                        f"array {name!r} of shape {list(entry.shape)}: no process holds {box}. Its "
                        f"layout is {entry.layout}; processes {_some(having.get(name, []))} have "
                        "it in their tree"
                    )
                chosen = able[position % len(able)]
                requests.setdefault(chosen, {}).setdefault(name, []).append(position - start)
            first += part.count
    return requests


def _holds(entry: ArrayEntry, process: int, box: Box) -> bool:
    if entry.layout is not None:
        return any(b.contains(box) for b in entry.layout.local(entry.shape, process))
    return any(process in holders and b.contains(box) for b, holders in entry.boxes or ())


def _refuse_second_writer(
    index: Index, table: digests.Table, where: Any, taken: Any, process: int, record: Record
) -> None:
    """Two writers of a chunk are tolerated only where replicas did not know of each other."""
    for position, digest in zip(where[taken].tolist(), record.chunks["digest"][taken], strict=True):
        if table["digest"][position] != digest:
            name, box = chunk_at(index, position)
            raise CoverageError(
                f"array {name!r}: processes {table['process'][position]} and {process} hold "
                f"different data for {box}"
            )


def chunk_at(index: Index, position: int) -> tuple[str, Box]:
    """Array name and box of the chunk at a position of the digest table."""
    for name, entry in index.arrays.items():
        for part in plan.parts(entry):
            if position < part.count:
                return name, part.chunk_box(position)
            position -= part.count
    raise IndexError(position)
