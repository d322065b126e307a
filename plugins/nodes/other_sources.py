"""Supplies the files of a step that are damaged or gone on a node that lives: from their copies on
other nodes, from sums, and else from the root."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorstore as ts

from unickpt.errors import StorageError
from unickpt.extend import Damaged, KvStore, Location, Version, storage_context, version_at
from unickpt.plugins.nodes.job import HTTP, Nodes, job_of
from unickpt.plugins.nodes.node_parity import StoredSum, file_bytes, list_files
from unickpt.plugins.nodes.silent_nodes import place_of

T = TypeVar("T")
WHOLE = slice(0, None)
_log = logging.getLogger("unickpt")
_FILE = re.compile(r"processes/[^/]+/(\d{5,})/(.+)", re.DOTALL)


class OtherSource:
    """A `Restorer`: supplies the files of some processes, all of them; whether these bytes are
    sound, their digests tell.

    Arguments:
        step: the location of the step, for messages.
        places: by process, where its files come from, for messages.
    """

    def __init__(self, step: str, places: Mapping[int, str]) -> None:
        self._step, self.places = step, places
        self._reported = dict[str, str]()

    def fetch(self, process: int, name: str, part: slice = WHOLE) -> bytes:
        """Bytes of a file.

        Arguments:
            process: whose file.
            name: its path in the folder of the process.
            part: which bytes.

        Raises:
            StorageError, OSError, ValueError: it is not there.
        """
        raise NotImplementedError

    def read(self, path: str, offset: int, length: int) -> bytes | None:
        """As `Restorer.read`."""
        match = _FILE.fullmatch(path)
        if match is None or int(match[1]) not in self.places:
            return None
        place = self.places[int(match[1])]
        try:
            data = self.fetch(int(match[1]), match[2], slice(offset, offset + length))
        except (StorageError, OSError, ValueError) as error:
            raise Damaged(f"{path}: {place}: {error}") from error
        if len(data) != length:  # a node whose file is short may answer with what it has
            raise Damaged(f"{path}: {place}: {len(data)} bytes, {length} expected")
        if path not in self._reported:
            self._reported[path] = place
            _log.warning("%s: %s is damaged or gone; read from %s", self._step, path, place)
        return data

    def damage(self) -> Iterator[str]:
        """As `Restorer.damage`."""
        for path, place in self._reported.items():
            yield f"{path} is damaged or gone on its node; {place} has it"


class _StoredFiles(OtherSource):
    """The files that other nodes have, or the root.

    Arguments:
        step: as for `OtherSource`.
        specs: by process, the key-value store of the folder in which its own is.
    """

    def __init__(self, step: str, specs: Mapping[int, Mapping[str, Any]]) -> None:
        urls = {process: spec.get("base_url") for process, spec in specs.items()}
        places = {process: place_of(url) if url else "the root" for process, url in urls.items()}
        super().__init__(step, places)
        self._specs, self._context = specs, storage_context()

    def fetch(self, process: int, name: str, part: slice = WHOLE) -> bytes:
        store = KvStore.open(dict(self._specs[process]), self._context)
        read = store.read(f"{process:05d}/{name}", byte_range=part).result()
        if read.state != "value":
            raise Damaged("no such file")
        return bytes(read.value)


class _Sums(OtherSource):
    """Sums on nodes, and the other files of them.

    Arguments:
        step: as for `OtherSource`.
        groups: by process, the sums of a group that it is in.
        urls: by process, the URL of the folder in which its own is.
    """

    def __init__(
        self, step: str, groups: Mapping[int, Sequence[StoredSum]], urls: Mapping[int, str]
    ) -> None:
        super().__init__(step, dict.fromkeys(groups, "sums on other nodes"))
        self._groups, self._urls = groups, urls

    def fetch(self, process: int, name: str, part: slice = WHOLE) -> bytes:
        return file_bytes(self._groups[process], self._urls, process, name, part)


class _Nowhere(OtherSource):
    """Raises the error that nothing else has a file."""

    def fetch(self, process: int, name: str, part: slice = WHOLE) -> bytes:
        raise Damaged("damaged or gone, and no other node, no sum and not the root has it whole")


def restorers_at(location: Location, context: ts.Context) -> list[OtherSource]:
    """What else has the files of a step on the nodes; empty for any other checkpoint."""
    nodes, step = job_of(location.url)
    version = None if nodes is None else version_at(nodes.location.child(step))
    if nodes is None or version is None:
        return []
    holders = nodes.holders(step, version).items()
    places = {process: place_of(having[0].url) for process, having in holders}
    return [*other_sources(nodes, step, version), _Nowhere(str(location), places)]


def other_sources(nodes: Nodes, step: str, version: Version) -> list[OtherSource]:
    """What has the files of a step besides the node from which this process reads them, in the
    order in which it is tried.

    Arguments:
        nodes: of the job.
        step, version: which step.
    """
    text, members = f"{nodes.root.location}/{step}", nodes.members
    silent = nodes.silent.among(member for member in members if member.node != nodes.node)
    listed = list_files(step, version, (m for m in members if m.url not in silent))
    processes = nodes.uploads.processes(step, version.attempt)
    copies, groups = dict[int, list[str]](), dict[int, list[list[StoredSum]]]()
    for process in processes:
        urls = listed.folders.get(process, {}).items()
        copies[process] = [url for node, url in urls if node != nodes.node]
        groups[process] = listed.groups_of(process)
    sources = list[OtherSource]()
    for urls_by_process in _ranked(copies):
        bases = {p: {**HTTP, "base_url": url} for p, url in urls_by_process.items()}
        sources.append(_StoredFiles(text, bases))
    sources += [_Sums(text, of_process, listed.urls) for of_process in _ranked(groups)]
    if nodes.is_in_root(step, version):
        base = nodes.root.location.child(f"{step}/processes/{version.attempt}").spec
        sources.append(_StoredFiles(text, dict.fromkeys(processes, base)))
    return sources


def _ranked(choices: Mapping[int, Sequence[T]]) -> list[dict[int, T]]:
    """The first choice of each process, then the second of each that has one, and so on."""
    most = max(map(len, choices.values()), default=0)
    return [{p: c[rank] for p, c in choices.items() if rank < len(c)} for rank in range(most)]
