"""Copies of each node's files on a node of another failure unit, fetched behind the training loop.

Keeping a copy in the memory of a peer is an idea of Gemini (Wang et al., SOSP 2023).
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from urllib.parse import quote

import msgspec

from unickpt.extend import SerialExecutor, StepFolder, system_calls
from unickpt.plugins.nodes.job import Nodes
from unickpt.plugins.nodes.membership import NodeProcess

_log = logging.getLogger("unickpt")
_PIECE_BYTES, _TIMEOUT_S = 1 << 20, 60.0


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


class PeerCopies:
    """Fetches the files of the processes that this one keeps copies of.

    Arguments:
        nodes: of the job.
        steps: that lie on them.
        bytes_per_s: the most that this process fetches in a second; None for no limit.

    Raises:
        ValueError: as `keepers`.
    """

    def __init__(self, nodes: Nodes, steps: StepFolder, bytes_per_s: float | None) -> None:
        self._nodes, self._steps, self._rate = nodes, steps, bytes_per_s
        self._keepers = keepers(nodes.members)
        failed = partial(_log.warning, "no copy of a step on another node: %s")
        self._work = SerialExecutor("unickpt replicas", failed)

    def start(self) -> None:
        """Fetches what is committed in the background, after earlier work."""
        self._work.add(self._fetch_newest)

    def wait(self) -> None:
        """Waits until all is fetched; raises nothing."""
        self._work.wait()

    def _fetch_newest(self) -> None:
        steps = self._steps.committed()
        version = self._steps.version(steps[-1]) if steps else None
        if version is None:
            return
        members, me = self._nodes.members, self._nodes.group.index
        for process, holders in self._nodes.holders(f"step_{steps[-1]}", version).items():
            # A step of an earlier job may have lost its copies.
            if self._keepers[members.index(holders[0])] == me:
                self._fetch(f"step_{steps[-1]}", version.attempt, process, holders[0])

    def _fetch(self, step: str, attempt: str, process: int, holder: NodeProcess) -> None:
        """Fetches the files of a process; they appear together."""
        part = f"{step}/processes/{attempt}/{process:05d}/"
        target, draft = self._nodes.folder + part, f"{self._nodes.folder}{part[:-1]}.new/"
        url = holder.url + part
        if not os.path.isdir(target):
            shutil.rmtree(draft, ignore_errors=True)
            with system_calls("write", draft):
                os.makedirs(draft)
                for name in msgspec.json.decode(_read(url), type=list[str]):
                    self._fetch_file(url + quote(name), draft + name)
                with suppress(FileNotFoundError):  # the step was removed meanwhile
                    os.rename(draft, target)
        self._nodes.uploads.note_copy(step, attempt, process)

    def _fetch_file(self, url: str, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, open(path, "wb") as file:
            expected, received = int(response.headers["Content-Length"]), 0
            while piece := response.read(_PIECE_BYTES):
                began = time.monotonic()
                received += file.write(piece)
                if self._rate is not None:
                    time.sleep(max(0.0, len(piece) / self._rate - (time.monotonic() - began)))
        if received != expected:
            raise OSError(f"{path}: {received} of {expected} bytes came")


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        data: bytes = response.read()
    return data
