"""Parity across nodes: sums of several nodes' files on other nodes, and lost files from the sums.

A process's files, one after the other, are one stream. The streams of processes on different nodes
are added up to one or two sums, which lie on nodes of their own. The nodes of the next job restore
the files that none of them has, before they read.
"""

from __future__ import annotations

import logging
import os
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec
import xxhash

from unickpt.errors import StorageError
from unickpt.extend import Failed, Version, counted, find_door, first_few, version_at
from unickpt.plugins.nodes.membership import NodeProcess
from unickpt.plugins.nodes.peer_copies import PeerTask, fetched, paced
from unickpt.plugins.nodes.silent_nodes import place_of

if TYPE_CHECKING:
    from unickpt.plugins.nodes.job import Nodes

_log = logging.getLogger("unickpt")
_WINDOW_BYTES = 4 << 20  # of each stream, in memory


class ParityCode(Protocol):
    """The arithmetic, of the plug-in `parity`."""

    counts: tuple[int, int]
    """Streams, and their sums."""

    def encode(self, pieces: Sequence[bytes]) -> list[bytes]:
        """The sums of pieces."""
        ...

    def decode(self, pieces: Sequence[bytes | None], sums: Mapping[int, bytes]) -> dict[int, bytes]:
        """The pieces that are None, by their numbers."""
        ...


class SumGroup(NamedTuple):
    """Processes whose files are added up.

    Arguments:
        processes: which; all in different units.
        keepers: for each sum the process that stores it, in further units.
    """

    processes: tuple[int, ...]
    keepers: tuple[int, ...]


def sum_groups(
    holders: Mapping[int, NodeProcess], members: Sequence[NodeProcess], counts: tuple[int, int]
) -> list[SumGroup]:
    """The groups of a step's processes; none if the job has too few units.

    Arguments:
        holders: by process, who has its files.
        members: the processes of the job, which share the work.
        counts: the most processes in a group, and the sums of each.

    Example:
        >>> abc = [NodeProcess(name, "", name) for name in "abc"]
        >>> sum_groups(dict(enumerate(abc)), abc, (8, 1))
        [SumGroup(processes=(0, 1), keepers=(2,)), SumGroup(processes=(2,), keepers=(0,))]
    """
    by_unit: dict[str, list[int]] = {}
    for index, member in enumerate(members):
        by_unit.setdefault(member.unit, []).append(index)
    most = min(counts[0], len(by_unit) - counts[1])
    if most < 1:
        return []
    turns, order = Counter[str](), dict[int, int]()
    for process, holder in sorted(holders.items()):
        order[process] = turns[holder.unit]
        turns[holder.unit] += 1
    left = dict.fromkeys(sorted(order, key=lambda p: (order[p], p)))
    sums_of, groups = Counter[int](), list[SumGroup]()
    while left:
        chosen: dict[str, int] = {}
        for process in left:
            chosen.setdefault(holders[process].unit, process)
            if len(chosen) == most:
                break
        for process in chosen.values():
            del left[process]
        candidates = [
            min(indices, key=sums_of.__getitem__)
            for unit, indices in by_unit.items()
            if unit not in chosen
        ]
        keepers = sorted(candidates, key=sums_of.__getitem__)[: counts[1]]
        sums_of.update(keepers)
        groups.append(SumGroup(tuple(chosen.values()), tuple(keepers)))
    return groups


class PartStream(msgspec.Struct):
    """The files of a process: name, bytes, digest."""

    process: int
    files: list[tuple[str, int, str]]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size, _ in self.files)

    def span(self, name: str) -> tuple[int, int]:
        """Where a file begins, and its bytes. Raises ValueError if it has none of this name."""
        place = [file for file, _, _ in self.files].index(name)
        return sum(size for _, size, _ in self.files[:place]), self.files[place][1]

    def pieces(self, offset: int, length: int) -> Iterator[tuple[str, int, int]]:
        """The parts of files in a window of the stream: name, offset, bytes."""
        for name, size, _ in self.files:
            first, last = max(0, offset), min(size, offset + length)
            if first < last:
                yield name, first, last - first
            offset -= size


class SumTable(msgspec.Struct):
    """What a sum is of.

    Arguments:
        counts: of the code.
        group: identifies its group.
        number: of the sum in its group.
        streams: of the group.
    """

    counts: tuple[int, int]
    group: str
    number: int
    streams: list[PartStream]


class NodeParity(PeerTask):
    """Stores the sums that this process is to keep.

    Arguments:
        nodes, steps, bytes_per_s: as for `PeerTask`.
        code: the arithmetic.
    """

    def __init__(
        self, nodes: Nodes, steps: Any, bytes_per_s: float | None, code: ParityCode
    ) -> None:
        super().__init__(nodes, steps, bytes_per_s)
        self._code = code
        self._holders, self._groups = dict[int, NodeProcess](), list[SumGroup]()

    def _protect(self, step: str, attempt: str, holders: Mapping[int, list[NodeProcess]]) -> None:
        nodes, (_, sums) = self._nodes, self._code.counts
        if holders.keys() != nodes.uploads.processes(step, attempt):
            return  # the root has the rest
        first_holders = {process: members[0] for process, members in holders.items()}
        if first_holders != self._holders:  # 0.6 s for 4,096 processes
            self._groups = sum_groups(first_holders, nodes.members, self._code.counts)
            self._holders = first_holders
        groups = self._groups
        for index, group in enumerate(groups):
            for number, keeper in enumerate(group.keepers):
                if keeper == nodes.group.index:
                    name = f"sum-{index}-{number}-{nodes.attempt}"
                    below = f"{step}/processes/{attempt}/"
                    if not nodes.folder.has(below + name):
                        urls = {p: f"{first_holders[p].url}{below}" for p in group.processes}
                        self._add_up(below + name, urls, number)
                    nodes.uploads.note_sum(step, attempt, name, len(groups) * sums, sums)

    def _add_up(self, folder: str, urls: Mapping[int, str], number: int) -> None:
        """Stores a sum; it appears with its table.

        Arguments:
            folder: its own.
            urls: by process, where its folder is.
            number: of the sum.
        """
        streams = []
        for process, url in urls.items():
            names = msgspec.json.decode(fetched(f"{url}{process:05d}/"), type=dict[str, int])
            streams.append(PartStream(process, [(name, size, "") for name, size in names.items()]))
        hashers = _Hashers()
        with self._nodes.folder.filled(folder) as draft:
            with open(f"{draft}/sum", "wb") as file:
                for offset in range(0, max(s.nbytes for s in streams), _WINDOW_BYTES):
                    with paced(self._rate) as count:
                        pieces = [
                            _window(urls[s.process], s, offset, _WINDOW_BYTES, hashers[s.process])
                            for s in streams
                        ]
                        count(sum(map(len, pieces)))
                    file.write(self._code.encode(pieces)[number])
            for stream in streams:
                by_name = hashers[stream.process]
                stream.files = [(name, n, by_name[name].hexdigest()) for name, n, _ in stream.files]
            group = os.path.basename(folder).replace(f"-{number}-", "-", 1)
            table = SumTable(self._code.counts, group, number, streams)
            with open(f"{draft}/table", "wb") as file:
                file.write(msgspec.json.encode(table))


class _Hashers(dict[Any, Any]):
    """Digests in progress: of files by name, and one such set for each stream."""

    def __missing__(self, name: Any) -> Any:
        self[name] = made = _Hashers() if isinstance(name, int) else xxhash.xxh3_128()
        return made


def _window(url: str, stream: PartStream, offset: int, nbytes: int, hashers: _Hashers) -> bytes:
    """Some bytes of a stream; fewer at its end."""
    parts = []
    for name, first, length in stream.pieces(offset, nbytes):
        file = f"{url}{stream.process:05d}/{quote(name)}"
        parts.append(_range(file, first, length))
        hashers[name].update(parts[-1])
    return b"".join(parts)


def _range(url: str, offset: int, length: int) -> bytes:
    headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
    data = fetched(urllib.request.Request(url, headers=headers))
    if len(data) != length:
        raise OSError(f"{url}: {len(data)} of {length} bytes came")
    return data


# --- restoring ------------------------------------------------------------------------------------


def restore(nodes: Nodes) -> None:
    """Restores files of committed steps that no node has; all processes call it, and share the
    work. What cannot be restored is logged.

    Raises:
        StorageError: on all processes, because nodes do not answer now, which may have an end; else
            the step would be removed as lost.
    """
    names = sorted({step for member in nodes.members for step in member.sums})
    steps = {name: version for name in names if (version := version_at(nodes.location.child(name)))}
    for _ in range(2):  # a node may have been cut off in the midst of it
        silent = nodes.silent_to_any()
        for step, version in steps.items():
            _restore_step(nodes, step, version, silent)
        nodes.gather_again()
        lost = [step for step, version in steps.items() if not nodes.is_readable(step, version)]
        if not lost:
            return
    if silent:
        places = sorted({place_of(member.url) for member in nodes.members if member.node in silent})
        raise StorageError(
            f"{nodes.root.location}: files of {first_few(lost)} cannot be restored while "
            f"{first_few(places)} does not answer. Start the job again when it does; to go on "
            f"without these steps, remove them from {nodes.location}"
        )


def _restore_step(nodes: Nodes, step: str, version: Version, silent: set[str]) -> None:
    """Does the share of this process."""
    able = [n for n, member in enumerate(nodes.members) if member.node not in silent]
    holders = nodes.holders(step, version).items()
    answering = {p for p, having in holders if any(m.node not in silent for m in having)}
    for process in sorted(nodes.uploads.processes(step, version.attempt) - answering):
        if not able or able[process % len(able)] != nodes.group.index:
            continue
        outcome = "are restored from parity"
        try:
            _restore_process(nodes, step, version, process, silent)
        except Exception as error:
            outcome = f"are not restored: {error}. The step is lost unless the root has it"
        text = "%s: the files of process %d, which no node that answers had, %s"
        _log.warning(text, step, process, outcome)


class StoredSum(NamedTuple):
    """A sum on a node: where its folder is, and its table."""

    url: str
    table: SumTable


class NodeFiles(NamedTuple):
    """What nodes have of a step.

    Arguments:
        folders: by process and node, the URL of the folder in which its own is.
        groups: the sums of each group.
    """

    folders: dict[int, dict[str, str]]
    groups: dict[str, list[StoredSum]]

    @property
    def urls(self) -> dict[int, str]:
        """One of the folders of each process."""
        return {process: next(iter(urls.values())) for process, urls in self.folders.items()}

    def groups_of(self, process: int) -> list[list[StoredSum]]:
        """The groups of a process."""
        groups = ((sums, sums[0].table.streams) for sums in self.groups.values())
        return [sums for sums, streams in groups if process in {s.process for s in streams}]


def list_files(step: str, version: Version, members: Iterable[NodeProcess]) -> NodeFiles:
    """What nodes have of a step; those that do not answer have nothing."""
    below, listed = f"{step}/processes/{version.attempt}/", NodeFiles({}, {})
    for node, url in {member.node: f"{member.url}{below}" for member in members}.items():
        with suppress(Failed, msgspec.MsgspecError):  # it has none of the step, or says else
            names = msgspec.json.decode(fetched(url), type=dict[str, int])
            for folder in sorted({name.partition("/")[0] for name in names}):
                if folder.isdigit():
                    listed.folders.setdefault(int(folder), {})[node] = url
                elif f"{folder}/table" in names and not folder.endswith(".new"):
                    table = msgspec.json.decode(fetched(f"{url}{folder}/table"), type=SumTable)
                    group = listed.groups.setdefault(table.group, [])
                    group.append(StoredSum(f"{url}{folder}/", table))
    return listed


def _restore_process(
    nodes: Nodes, step: str, version: Version, process: int, silent: set[str]
) -> None:
    """Restores the files of a process. Raises OSError if that is not possible."""
    listed = list_files(step, version, (m for m in nodes.members if m.node not in silent))
    reasons, urls = list[str](), listed.urls
    urls.pop(process, None)
    for sums in listed.groups_of(process):
        try:
            with nodes.folder.filled(f"{step}/processes/{version.attempt}/{process:05d}") as draft:
                _rebuild(draft, process, sums, urls)
        except OSError as error:
            reasons.append(str(error))
        else:
            return
    raise OSError("; ".join(reasons) or "no node has a sum of them")


def _rebuild(draft: str, process: int, sums: Sequence[StoredSum], urls: Mapping[int, str]) -> None:
    """Restores the files of a process.

    Arguments:
        draft: the path of the folder for them.
        process: which.
        sums: of its group.
        urls: by process, where its folder is; lost ones are missing.
    """
    streams, hashers = sums[0].table.streams, _Hashers()
    place = [stream.process for stream in streams].index(process)
    nbytes = max(stream.nbytes for stream in streams)
    for name, _, _ in streams[place].files:
        os.makedirs(os.path.dirname(f"{draft}/{name}"), exist_ok=True)
        open(f"{draft}/{name}", "wb").close()
    for offset in range(0, nbytes, _WINDOW_BYTES):
        length = min(_WINDOW_BYTES, nbytes - offset)
        data, start = _lost_bytes(sums, urls, offset, length, hashers)[place], 0
        for name, _, size in streams[place].pieces(offset, _WINDOW_BYTES):
            with open(f"{draft}/{name}", "ab") as file:
                file.write(data[start : start + size])
            hashers[name].update(data[start : start + size])
            start += size
    for name, _, digest in streams[place].files:
        if hashers[name].hexdigest() != digest:
            raise OSError(f"{name}: its sum, or another file of its group, is damaged")


def _lost_bytes(
    sums: Sequence[StoredSum], urls: Mapping[int, str], offset: int, length: int, hashers: _Hashers
) -> dict[int, bytes]:
    """Some bytes of the streams of a group that are in no folder, by their places in it.

    Arguments:
        sums, urls: as for `_rebuild`.
        offset, length: which bytes.
        hashers: get the bytes of the other streams.

    Raises:
        OSError: too many are lost; or a node does not answer.
    """
    pieces, gone = list[bytes | None](), list[int]()
    for stream in sums[0].table.streams:
        if url := urls.get(stream.process):
            pieces.append(_window(url, stream, offset, length, hashers[stream.process]))
        else:
            pieces.append(None)
            gone.append(stream.process)
    if len(gone) > len(sums):
        what = counted(len(sums), "sum")
        raise OSError(f"processes {first_few(gone)} have none on any node, and {what} is left")
    stored = {s.table.number: _range(f"{s.url}sum", offset, length) for s in sums}
    return _code(sums[0].table.counts).decode(pieces, stored)


def file_bytes(
    sums: Sequence[StoredSum], urls: Mapping[int, str], process: int, name: str, part: slice
) -> bytes:
    """Bytes of a file from sums, piece by piece.

    Arguments:
        sums: of a group of the process.
        urls: as for `_rebuild`, also of the process.
        process, name: the file.
        part: which bytes.

    Raises:
        OSError, ValueError: too many are lost; or the sums are of other files.
    """
    streams = sums[0].table.streams
    place = [stream.process for stream in streams].index(process)
    first, size = streams[place].span(name)
    start, stop, _ = part.indices(size)
    sound_urls, pieces = {p: url for p, url in urls.items() if p != process}, list[bytes]()
    for offset in range(start, stop, _WINDOW_BYTES):
        window = first + offset, min(_WINDOW_BYTES, stop - offset)
        pieces.append(_lost_bytes(sums, sound_urls, *window, _Hashers())[place])
    return b"".join(pieces)


def _code(counts: tuple[int, int]) -> ParityCode:
    door = find_door("features", "parity")
    if door is None:
        raise OSError("the plug-in parity is missing")
    made: ParityCode = door.open()(tuple(counts))
    return made
