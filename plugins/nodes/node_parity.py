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
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec
import xxhash

from unickpt.extend import Version, counted, find_door, first_few, version_at
from unickpt.plugins.nodes.membership import NodeProcess
from unickpt.plugins.nodes.peer_copies import PeerTask, fetched, paced

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


class _PartStream(msgspec.Struct):
    """The files of a process: name, bytes, digest."""

    process: int
    files: list[tuple[str, int, str]]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size, _ in self.files)

    def pieces(self, offset: int, length: int) -> Iterator[tuple[str, int, int]]:
        """The parts of files in a window of the stream: name, offset, bytes."""
        for name, size, _ in self.files:
            first, last = max(0, offset), min(size, offset + length)
            if first < last:
                yield name, first, last - first
            offset -= size


class _SumTable(msgspec.Struct):
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
    streams: list[_PartStream]


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
            streams.append(_PartStream(process, [(name, size, "") for name, size in names.items()]))
        hashers = _Hashers()
        with self._nodes.folder.filled(folder) as draft:
            with open(f"{draft}/sum", "wb") as file:
                for offset in range(0, max(s.nbytes for s in streams), _WINDOW_BYTES):
                    with paced(self._rate) as count:
                        pieces = [
                            _window(urls[s.process], s, offset, hashers.of_part(s)) for s in streams
                        ]
                        count(sum(map(len, pieces)))
                    file.write(self._code.encode(pieces)[number])
            for stream in streams:
                by_name = hashers.of_part(stream)
                stream.files = [(name, n, by_name[name].hexdigest()) for name, n, _ in stream.files]
            group = os.path.basename(folder).replace(f"-{number}-", "-", 1)
            table = _SumTable(self._code.counts, group, number, streams)
            with open(f"{draft}/table", "wb") as file:
                file.write(msgspec.json.encode(table))


class _Hashers(dict[Any, Any]):
    """Digests in progress: of files by name, and one such set for each stream."""

    def __missing__(self, name: Any) -> Any:
        self[name] = made = _Hashers() if isinstance(name, int) else xxhash.xxh3_128()
        return made

    def of_part(self, stream: _PartStream) -> _Hashers:
        hashers: _Hashers = self[stream.process]
        return hashers


def _window(url: str, stream: _PartStream, offset: int, hashers: _Hashers) -> bytes:
    """Some bytes of a stream; fewer at its end."""
    parts = []
    for name, first, length in stream.pieces(offset, _WINDOW_BYTES):
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
    work. What cannot be restored is logged."""
    steps = sorted({step for member in nodes.members for step in member.sums})
    silent = nodes.silent_to_any()
    able = [n for n, member in enumerate(nodes.members) if member.node not in silent]
    for step in steps:
        version = version_at(nodes.location.child(step))
        if version is None:
            continue
        holders = nodes.holders(step, version).items()
        answering = {p for p, having in holders if any(m.node not in silent for m in having)}
        lost = set(nodes.uploads.processes(step, version.attempt)) - answering
        for process in sorted(lost):
            if not able or able[process % len(able)] != nodes.group.index:
                continue
            try:
                _restore_process(nodes, step, version, process, lost, silent)
            except Exception as error:
                _log.warning(
                    "%s: the files of process %d are on no node that answers, and are not restored "
                    "from parity: %s. The step is lost unless the root has it",
                    *(step, process, error),
                )
            else:
                _log.warning(
                    "%s: the files of process %d, which no node that answers had, are restored "
                    "from parity",
                    *(step, process),
                )


class _StoredSum(NamedTuple):
    """A sum on a node: where its folder is, and its table."""

    url: str
    table: _SumTable


def _restore_process(
    nodes: Nodes, step: str, version: Version, process: int, lost: set[int], silent: set[str]
) -> None:
    """Restores the files of a process. Raises OSError if that is not possible."""
    below = f"{step}/processes/{version.attempt}/"
    groups = dict[str, list[_StoredSum]]()
    for member in nodes.members:
        if member.node in silent:
            continue
        for name in member.sums.get(step, {}).get(version.attempt, ()):
            url = f"{member.url}{below}{name}/"
            table = msgspec.json.decode(fetched(f"{url}table"), type=_SumTable)
            if any(stream.process == process for stream in table.streams):
                groups.setdefault(table.group, []).append(_StoredSum(url, table))
    reasons = []
    for sums in groups.values():
        gone = [s.process for s in sums[0].table.streams if s.process in lost]
        if len(gone) > len(sums):
            what = counted(len(sums), "sum")
            reasons.append(f"processes {first_few(gone)} have none on any node, and {what} is left")
            continue
        urls = {
            p: f"{member.url}{below}"
            for p, having in nodes.holders(step, version).items()
            for member in reversed(having)  # the first of those that answer
            if member.node not in silent
        }
        for other in gone:  # also one that this process has just restored
            urls.pop(other, None)
        with nodes.folder.filled(f"{below}{process:05d}") as draft:
            _rebuild(draft, process, sums, urls)
        return
    raise OSError("; ".join(reasons) or "no node has a sum of them")


def _rebuild(draft: str, process: int, sums: Sequence[_StoredSum], urls: Mapping[int, str]) -> None:
    """Restores the files of a process.

    Arguments:
        draft: the path of the folder for them.
        process: which.
        sums: of its group.
        urls: by process, where its folder is; lost ones are missing.
    """
    streams = sums[0].table.streams
    code, hashers = _code(sums[0].table.counts), _Hashers()
    place = [stream.process for stream in streams].index(process)
    nbytes = max(stream.nbytes for stream in streams)
    for name, _, _ in streams[place].files:
        os.makedirs(os.path.dirname(f"{draft}/{name}"), exist_ok=True)
        open(f"{draft}/{name}", "wb").close()
    for offset in range(0, nbytes, _WINDOW_BYTES):
        pieces = [
            _window(urls[s.process], s, offset, hashers.of_part(s)) if s.process in urls else None
            for s in streams
        ]
        length = min(_WINDOW_BYTES, nbytes - offset)
        stored = {s.table.number: _range(f"{s.url}sum", offset, length) for s in sums}
        data, start = code.decode(pieces, stored)[place], 0
        for name, _, size in streams[place].pieces(offset, _WINDOW_BYTES):
            with open(f"{draft}/{name}", "ab") as file:
                file.write(data[start : start + size])
            hashers[name].update(data[start : start + size])
            start += size
    for name, _, digest in streams[place].files:
        if hashers[name].hexdigest() != digest:
            raise OSError(f"{name}: its sum, or another file of its group, is damaged")


def _code(counts: tuple[int, int]) -> ParityCode:
    door = find_door("features", "parity")
    if door is None:
        raise OSError("the plug-in parity is missing")
    made: ParityCode = door.open()(tuple(counts))
    return made
