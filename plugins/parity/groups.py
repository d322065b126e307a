"""Groups of files with parity: which of them are damaged, and the bytes that parity restores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import tensorstore as ts

from unickpt.extend import (
    ADDED_FOLDER,
    ATTEMPTS_FOLDER,
    Damaged,
    Failed,
    Location,
    OcdbtDatabase,
    counted,
    first_few,
)
from unickpt.plugins.parity import tables
from unickpt.plugins.parity.codes import Bytes, ParitySums, solve
from unickpt.plugins.parity.files import FolderFiles, digest
from unickpt.plugins.parity.tables import GroupTable

_THREADS = 4  # a group's files are hashed at the same time


@dataclass(frozen=True)
class GroupState:
    """The damage of a group.

    Arguments:
        files: why each damaged file cannot be used, by its number.
        parity: the same for parity files.
        count: how many parity files the group has.
    """

    files: Mapping[int, str]
    parity: Mapping[int, str]
    count: int

    @property
    def is_covered(self) -> bool:
        """Whether all damaged files can be restored."""
        return len(self.files) <= self.count - len(self.parity)


@dataclass(eq=False)
class ParityGroup:
    """A group of files in a folder.

    Arguments:
        files: the folder's.
        prefix: its path below the checkpoint's folder, ending with `/`.
        table: of the group.
    """

    files: FolderFiles
    prefix: str
    table: GroupTable
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def state(self) -> GroupState:
        """Its damage when this was first requested; reads all of it.

        Raises:
            Failed: the storage failed.
        """
        with self._lock:
            return self._state

    @cached_property
    def _state(self) -> GroupState:
        with ThreadPoolExecutor(_THREADS) as pool:
            files = pool.map(lambda facts: self._look(*facts), self.table.files)
            damaged_parity = self._look_at_parity(pool.map)
            damaged_files = {n: reason for n, reason in enumerate(files) if reason}
        return GroupState(damaged_files, damaged_parity, len(self.table.parity))

    @property
    def state_if_read(self) -> GroupState | None:
        """Its damage, if it was requested before."""
        return self.__dict__.get("_state")

    def state_of_parity(self) -> GroupState:
        """The damage of parity files alone; reads only these. Raises as `state`."""
        return GroupState({}, self._look_at_parity(map), len(self.table.parity))

    def _look_at_parity(self, run: Callable[..., Iterable[str]]) -> dict[int, str]:
        size = self.table.nbytes

        def look(facts: tuple[str, str]) -> str:
            return self._look(facts[0], size, facts[1], in_sums=True)

        reasons = run(look, self.table.parity)
        return {number: reason for number, reason in enumerate(reasons) if reason}

    def _look(self, path: str, size: int, expected: str, *, in_sums: bool = False) -> str:
        """Why a file cannot be used; empty if it can."""
        try:
            if digest(self.files.pieces(path, size)) != expected:
                return "its bytes changed"
            if in_sums and _read_tables(self.files, path) != [self.table]:
                return "its table changed"
        except Damaged:
            return "it is missing, or too short"
        except Failed as error:
            if not self.files.location.is_local:
                raise
            return f"it cannot be read: {error}"
        return ""

    def restore(self, lost: Mapping[int, str], offset: int, length: int) -> dict[int, bytes]:
        """Some bytes of lost files, by their numbers; those beyond the end of a file are zeros.

        Raises:
            Damaged: another file is damaged, too.
            Failed: the storage failed.
        """
        sums, differences = self.sums(offset, length, lost), {}
        for number, (path, _) in enumerate(self.table.parity):
            if number not in self.state.parity:
                stored = np.frombuffer(self.files.read(path, offset, length), np.uint8)
                differences[number] = sums[number] ^ stored
        restored = solve([*lost], len(self.table.files), differences)
        return {number: data.tobytes() for number, data in restored.items()}

    def sums(self, offset: int, length: int, lost: Collection[int] = ()) -> list[Bytes]:
        """The sums of some bytes of its files, lost ones being zeros. Raises as `restore`."""
        sums = ParitySums(len(self.table.parity))
        for number, (path, size, _) in enumerate(self.table.files):
            stop = offset if number in lost else min(size, offset + length)
            data = self.files.read(path, offset, max(0, stop - offset))
            sums.add([memoryview(data)], length)
        return [np.concatenate(parts) for parts in sums.sums()]

    def name(self, path: str) -> str:
        """The path of one of its files, below the checkpoint's folder."""
        return f"{self.prefix}{path}"

    def is_needed(self, state: GroupState, needed: Collection[str] | None) -> bool:
        """Whether the checkpoint needs one of its damaged files; see `needed_files`."""
        paths = [self.name(self.table.files[number][0]) for number in state.files]
        lost = paths if needed is None else [path for path in paths if path in needed]
        return bool(lost or (state.parity and state.is_covered))

    def losses(self, state: GroupState) -> str:
        """The damaged files of a group, with the reasons, for users."""
        names = [f"{self.name(self.table.files[n][0])} ({text})" for n, text in state.files.items()]
        names += [
            f"{self.name(self.table.parity[n][0])} ({text})" for n, text in state.parity.items()
        ]
        return first_few(names, 8)

    def uncovered(self) -> str:
        """Why its damaged files cannot be restored, for users."""
        state = self.state
        lost = counted(len(state.files) + len(state.parity), "file")
        return (
            f"{lost} of a parity group of {len(self.table.files)} + {state.count} are damaged or "
            f"missing, and parity restores {state.count}: {self.losses(state)}"
        )


@dataclass
class ParityFolder:
    """The groups of a folder.

    Arguments:
        files: in the folder.
        prefix: its path below the checkpoint's folder, ending with `/`.
        groups: in it.
        list_damage: why the list of groups cannot be used; empty if it can.
        unreadable: the parity files whose groups are therefore unknown, each with the reason.
    """

    files: FolderFiles
    prefix: str
    groups: list[ParityGroup]
    list_damage: str
    unreadable: dict[str, str]
    list_path = f"{ADDED_FOLDER}/{tables.LIST}"

    def damage_texts(self, where: object, needed: Collection[str] | None) -> Iterator[str]:
        """See `Restorer.damage`.

        Arguments:
            where: the checkpoint.
            needed: from `needed_files`.
        """
        repairs = f"`unickpt repair {where}` restores"
        for group in self.groups:
            state = group.state_if_read or group.state_of_parity()
            if group.is_needed(state, needed):
                covered = f"{repairs} {group.losses(state)}"
                yield covered if state.is_covered else group.uncovered()
        if self.list_damage:
            yield f"{repairs} {self.prefix}{self.list_path} ({self.list_damage})"
        for path, reason in self.unreadable.items():
            yield f"{path} is damaged ({reason}): the files that it protected have no parity"


def folders_of(
    location: Location, context: ts.Context, attempt: str | None = None
) -> list[ParityFolder]:
    """The folders of a checkpoint that have parity files.

    Arguments:
        location: of the checkpoint.
        context: for the storage.
        attempt: the only one whose folders are needed.

    Raises:
        Failed: the storage failed.
    """
    names_by_folder = _parity_files(location, context, attempt)
    return [
        _open_folder(FolderFiles(location.child(prefix), context), prefix, names)
        for prefix, names in names_by_folder.items()
    ]


def needed_files(location: Location, context: ts.Context) -> set[str] | None:
    """The files with the chunks and values of a checkpoint; None if its B-tree is damaged. A copy
    that borrows chunks of another one lacks the others."""
    try:
        database = OcdbtDatabase(location, context).pinned()
        return None if database is None else database.reader().tree.files("")
    except Failed:
        return None


def _open_folder(files: FolderFiles, prefix: str, names: list[str]) -> ParityFolder:
    folder = ParityFolder(files, prefix, [], "", {})
    try:
        groups = _read_tables(files, folder.list_path)
    except Damaged as error:  # each parity file has the table of its own group
        folder.list_damage, by_path = error.reason, dict[str, GroupTable]()
        for path in (f"{ADDED_FOLDER}/{name}" for name in names if name != tables.LIST):
            try:
                for table in () if path in by_path else _read_tables(files, path):
                    by_path.update({other: table for other, _ in table.parity})
            except Damaged as damage:
                folder.unreadable[f"{prefix}{path}"] = damage.reason
        for path in by_path:
            folder.unreadable.pop(f"{prefix}{path}", None)
        groups = list({table.parity[0]: table for table in by_path.values()}.values())
    folder.groups = [ParityGroup(files, prefix, table) for table in groups]
    return folder


def _read_tables(files: FolderFiles, path: str) -> list[GroupTable]:
    """The tables in a file. Raises Damaged, Failed."""
    end = files.read_end(path, tables.TRAILER_BYTES)
    return tables.decode(files.read_end(path, tables.table_bytes(end) + tables.TRAILER_BYTES))


def _parity_files(
    location: Location, context: ts.Context, attempt: str | None
) -> dict[str, list[str]]:
    """The names of parity files, by the paths of the folders of processes and B-trees."""
    top = location.child(ATTEMPTS_FOLDER)
    if location.is_local:  # without TensorStore, which a forked process cannot use
        attempts = top.folders(context) if attempt is None else [attempt]
        folders = [f"{a}/{name}" for a in attempts for name in top.child(a).folders(context)]
        paths = [
            f"{folder}/{ADDED_FOLDER}/{name}"
            for folder in folders
            for name in top.child(f"{folder}/{ADDED_FOLDER}").files(context)
        ]
    else:
        searched = top if attempt is None else top.child(attempt)
        prefix = "" if attempt is None else f"{attempt}/"
        keys = searched.store(context).list().result()
        paths = [f"{prefix}{key.decode(errors='replace')}" for key in keys]
    names = dict[str, list[str]]()
    for path in sorted(paths):
        folder, _, name = path.rpartition("/")
        above, _, last = folder.rpartition("/")
        if last == ADDED_FOLDER and above.count("/") == 1:
            names.setdefault(f"{ATTEMPTS_FOLDER}/{above}/", []).append(name)
    return names
