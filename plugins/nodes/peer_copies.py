"""Copies of each node's files on a node of another failure unit, fetched behind the training loop.

Keeping a copy in the memory of a peer is an idea of Gemini (Wang et al., SOSP 2023).
"""

from __future__ import annotations

import errno
import logging
import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import quote

import msgspec

from unickpt.extend import Failed, SerialExecutor, StepFolder, Version
from unickpt.plugins.nodes.membership import NodeProcess
from unickpt.plugins.nodes.silent_nodes import place_of

if TYPE_CHECKING:
    from unickpt.plugins.nodes.job import Nodes

_log = logging.getLogger("unickpt")
_PIECE_BYTES, _TIMEOUT_S, _PAUSE_S = 1 << 20, 15.0, 0.2
_DOWN = errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH


def keepers(members: Sequence[NodeProcess]) -> list[int]:
    """For each process the one that keeps a copy of its files.

    It is on the next node, in the order of the processes, of another unit. The processes of a node
    share the work.

    Raises:
        ValueError: a node has no other one of another unit.

    Example:
        >>> keepers([NodeProcess(name, "", rack) for name, rack in ["a1", "b1", "c2"]])
        [2, 2, 0]
    """
    processes: dict[str, list[int]] = {}
    for process, member in enumerate(members):
        processes.setdefault(member.node, []).append(process)
    nodes, units = list(processes), {member.node: member.unit for member in members}
    keeper_of = [0] * len(members)
    for place, node in enumerate(nodes):
        other_nodes = [*nodes[place + 1 :], *nodes[:place]]
        keeper = next((other for other in other_nodes if units[other] != units[node]), None)
        if keeper is None:
            raise ValueError(
                f"replicas=1 needs nodes of at least two units; all {len(nodes)} have the unit "
                f"{units[node]!r}. Correct unit=, or omit replicas"
            )
        for number, process in enumerate(processes[node]):
            keeper_of[process] = processes[keeper][number % len(processes[keeper])]
    return keeper_of


class PeerTask:
    """Protects the newest step by files on other nodes, in the background.

    Arguments:
        nodes: of the job.
        steps: that lie on them.
        bytes_per_s: the most that this process fetches in a second; None for no limit.
    """

    def __init__(self, nodes: Nodes, steps: StepFolder, bytes_per_s: float | None) -> None:
        self._nodes, self._steps, self._rate = nodes, steps, bytes_per_s
        failed = partial(_log.warning, "a step is not protected by other nodes: %s")
        self._work = SerialExecutor("unickpt peers", failed)
        self._done: Version | None = None

    def start(self) -> None:
        """Protects what is committed in the background, after earlier work."""
        self._work.add(self._protect_newest)

    def wait(self) -> None:
        """Waits until all is done; raises nothing."""
        self._work.wait()

    def _protect_newest(self) -> None:
        steps = self._steps.committed()
        version = self._steps.version(steps[-1]) if steps else None
        if version is not None and version != self._done:
            step = f"step_{steps[-1]}"
            self._protect(step, version.attempt, self._nodes.holders(step, version))
            self._done = version

    def _protect(self, step: str, attempt: str, holders: Mapping[int, list[NodeProcess]]) -> None:
        """Does this process's share for a step, whose files `holders` have."""
        raise NotImplementedError


class PeerCopies(PeerTask):
    """Fetches the files of the processes that this one keeps copies of.

    Arguments:
        arguments: as for `PeerTask`.

    Raises:
        ValueError: as `keepers`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._keepers = keepers(self._nodes.members)

    def _protect(self, step: str, attempt: str, holders: Mapping[int, list[NodeProcess]]) -> None:
        members, me = self._nodes.members, self._nodes.group.index
        for process, having in holders.items():
            # A step of an earlier job may have lost its copies.
            if self._keepers[members.index(having[0])] == me:
                self._fetch(step, attempt, process, having[0])

    def _fetch(self, step: str, attempt: str, process: int, holder: NodeProcess) -> None:
        """Fetches the files of a process; they appear together."""
        part = f"{step}/processes/{attempt}/{process:05d}/"
        if not self._nodes.folder.has(part):
            with self._nodes.folder.filled(part) as draft:
                for name in msgspec.json.decode(fetched(holder.url + part), type=dict[str, int]):
                    self._fetch_file(holder.url + part + quote(name), f"{draft}/{name}")
        self._nodes.uploads.note_copy(step, attempt, process)

    def _fetch_file(self, url: str, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with answer(url) as response, open(path, "wb") as file:
            expected, received = int(response.headers["Content-Length"]), 0
            while True:
                with paced(self._rate) as counted:
                    if not (piece := response.read(_PIECE_BYTES)):
                        break
                    received += file.write(piece)
                    counted(len(piece))
        if received != expected:
            raise OSError(f"{path}: {received} of {expected} bytes came")


@contextmanager
def paced(bytes_per_s: float | None) -> Iterator[Callable[[int], None]]:
    """Takes as long as the bytes that are counted in it may take."""
    counts, began = list[int](), time.monotonic()
    yield counts.append
    if bytes_per_s is not None:
        time.sleep(max(0.0, sum(counts) / bytes_per_s - (time.monotonic() - began)))


@contextmanager
def answer(url: str | urllib.request.Request) -> Iterator[Any]:
    """What a node answers, to be read. Raises Failed, which names the node."""
    try:
        with _opened(url) as response:
            yield response
    except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
        place = place_of(url if isinstance(url, str) else url.full_url)
        raise Failed(f"{place}: {getattr(error, 'reason', error)}") from error


def _opened(url: str | urllib.request.Request) -> Any:
    """Waits for a network that is down as long as for one that stalls. Raises URLError."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return urllib.request.urlopen(url, timeout=_TIMEOUT_S)
        except URLError as error:
            if getattr(error.reason, "errno", 0) not in _DOWN or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)


def fetched(url: str | urllib.request.Request) -> bytes:
    """What a node answers. Raises Failed."""
    with answer(url) as response:
        data: bytes = response.read()
    return data
