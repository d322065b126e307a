"""The nodes of a job, and where the files of each step can be read."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import xxhash

from unickpt import SaveOptions
from unickpt.errors import InvalidPath
from unickpt.extend import (
    Location,
    Scheme,
    StepFolder,
    Version,
    first_few,
    job_group,
    new_session,
    register_scheme,
    version_at,
)
from unickpt.plugins.nodes import membership
from unickpt.plugins.nodes.addresses import bypass_proxy
from unickpt.plugins.nodes.file_server import FileServer
from unickpt.plugins.nodes.membership import NodeProcess
from unickpt.plugins.nodes.node_folder import NodeFolder
from unickpt.plugins.nodes.node_locations import StepLocation, shared
from unickpt.plugins.nodes.options import NodeOptions
from unickpt.plugins.nodes.silent_nodes import SilentNodes, place_of
from unickpt.plugins.nodes.upload_notes import UploadNotes

# After a failure, other nodes are read; TensorStore's own default tries for minutes.
HTTP = {"driver": "http", "http_request_retries": {"max_retries": 0}}
CONTROL = ".nodes"
"""In the root: what all processes must see of steps that lie in the nodes' folders."""
_log = logging.getLogger("unickpt")
_jobs: dict[str, Nodes] = {}


class Nodes:
    """The nodes of a job.

    Arguments:
        root: the folder of the run.
        path: the folder of this node; ends with `/`.
        chosen: what users chose.
        options: of the saves.
    """

    def __init__(
        self, root: StepFolder, path: str, chosen: NodeOptions, options: SaveOptions
    ) -> None:
        self.root, self.chosen, self.options = root, chosen, options
        self.group = group = job_group(options.group, options.timeout_s)
        control = root.location.child(CONTROL)
        # Runs may share the folder of a node.
        name = xxhash.xxh3_64_hexdigest(str(root.location).encode())
        self.folder = NodeFolder(f"{path}{name}/")
        name = self.folder.identity()
        self.server = FileServer(self.folder.path)
        self._finalizer = weakref.finalize(self, self.server.close)
        self._finalizer.atexit = False
        self.key = new_session()
        url = f"{SCHEME.name}://{self.key}/"
        self.location = shared(control, url, self.folder.path, group.index, root.location)
        self.attempt = group.next_attempt()
        self.session = self.attempt.rpartition("-")[0]
        self._control, self._unit = control, chosen.unit_of(name)
        self.filters = [feature for feature in options.all_features if feature.filters_copies]
        """Features that leave units out of the copies of steps in the root."""
        self.uploads, self.silent = UploadNotes(control, self.attempt), SilentNodes()
        self._exchange, self._exchanges = self.attempt, 1
        try:
            self.members = self._gather(name)
        except BaseException:
            self._finalizer()
            raise
        _jobs[self.key] = self

    def _gather(self, node: str) -> list[NodeProcess]:
        """All processes of the job, and what is on their nodes."""
        parts, sums = self.folder.parts(), self.folder.sums()
        silent = self.silent.nodes
        member = NodeProcess(node, self.server.url, self._unit, parts, sums, silent)
        group = self.group
        whole = self._control, self._exchange, group.index, group.count, member
        members = membership.gather(*whole, self.options.timeout_s)
        bypass_proxy(other.url for other in members)
        return members

    @cached_property
    def parity(self) -> Any:
        """The arithmetic of parity, if sums of files are to be stored on other nodes."""
        code: Any = next((f for f in self.options.all_features if f.name == "parity"), None)
        units = len({member.unit for member in self.members})
        if code is not None and units <= code.counts[1]:
            _log.info("parity: only %d units of nodes; the loss of one is not covered", units)
            return None
        return code

    @property
    def is_protected(self) -> bool:
        """Whether other nodes get copies or sums of files."""
        return bool(self.chosen.replicas) or self.parity is not None

    def gather_again(self) -> None:
        """Learns what is on the nodes now; all processes call it. Raises SaveTimeout."""
        self._exchange = f"{self.attempt}-{self._exchanges}"
        self._exchanges += 1
        self.members = self._gather(self.node)

    def close(self) -> None:
        """Ends the server of files."""
        self._finalizer()
        _jobs.pop(self.key, None)

    def sees_root(self) -> bool:
        """Whether the root is still what all processes saw when they joined; else its file system
        may not be mounted, and says nothing about what is committed."""
        return membership.is_there(self._control, self._exchange)

    def silent_to_any(self) -> set[str]:
        """The nodes that do not answer to some process; all processes call it."""
        self.silent.among([m for m in self.members if m.node != self.node], again=True)
        self.gather_again()
        return {node for member in self.members for node in member.silent}

    @cached_property
    def node(self) -> str:
        """The identity of this node."""
        return self.members[self.group.index].node

    def holders(self, step: str, version: Version) -> dict[int, list[NodeProcess]]:
        """Who has the data files of each process of a committed step; first who saved them. Without
        those of processes for which others wrote.

        Arguments:
            step: the name of its folder.
            version: the committed one.
        """
        holders: dict[int, list[NodeProcess]] = {}
        if self.is_of_job(version.attempt):
            holders = {process: [member] for process, member in enumerate(self.members)}
        for member in self.members:
            for process in member.parts.get(step, {}).get(version.attempt, ()):
                holders.setdefault(process, []).append(member)
        me = self.members[self.group.index]
        for process in self.folder.parts().get(step, {}).get(version.attempt, ()):
            holders.setdefault(process, []).append(me)
        if needed := self.uploads.processes(step, version.attempt):
            return {process: having for process, having in holders.items() if process in needed}
        return holders

    def is_of_job(self, attempt: str) -> bool:
        """Whether all processes of this job made an attempt together."""
        return attempt.rpartition("-")[0] == self.session

    def is_readable(self, step: str, version: Version) -> bool:
        """Whether each data file of a step is on a node, or else in the root."""
        processes = self.uploads.processes(step, version.attempt)
        is_on_nodes = bool(processes) and processes <= self.holders(step, version).keys()
        return is_on_nodes or self.is_in_root(step, version)

    def is_in_root(self, step: str, version: Version) -> bool:
        """Whether the root has what the nodes have, or lack, of a step."""
        in_root = version_at(self.root.location.child(step))
        if in_root is None or in_root.name != version.name:
            return False
        # Other files than those of the step: it may lack some.
        return not in_root.copied or self.uploads.is_recovered(step, version.attempt)

    def spec(self, step: str) -> dict[str, Any]:
        """The key-value store from which a step is read: small files from the root, data files from
        this node, other nodes, or the root."""
        control: Any = self.location.spec
        layers: list[dict[str, Any]] = [{"base": control}]
        version = version_at(self.location.child(step))
        if version is not None and version.attempt:
            holders = self.holders(step, version)
            silent = self.silent.among(self._others(holders))
            has_root = bool(silent) and self.is_in_root(step, version)
            for process in sorted(self.uploads.processes(step, version.attempt)):
                below = f"{step}/processes/{version.attempt}/{process:05d}/"
                base = self._base(below, holders.get(process, ()), silent, has_root)
                layers.append({"base": base, "prefix": below, "strip_prefix": len(below)})
        return {"driver": "kvstack", "path": f"{step}/", "layers": layers}

    def _others(self, holders: Mapping[int, Sequence[NodeProcess]]) -> list[NodeProcess]:
        """Those from whom this process would read."""
        return [
            member
            for having in holders.values()
            if not any(member.node == self.node for member in having)
            for member in having
        ]

    def _base(
        self, below: str, holders: Sequence[NodeProcess], silent: Mapping[str, str], has_root: bool
    ) -> dict[str, Any]:
        """Where the data files of a process are read.

        Arguments:
            below: their folder.
            holders: who has them.
            silent: the URLs of those that do not answer.
            has_root: whether the root has them, too.
        """
        if any(member.node == self.node for member in holders):
            return {"driver": "file", "path": self.folder.path + below}
        answering = [member for member in holders if member.url not in silent]
        if holders and (answering or not has_root):  # it may only be slow
            having = answering or holders
            chosen = having[self.group.index % len(having)]
            return {**HTTP, "base_url": chosen.url, "path": below}
        spec = self.root.location.spec
        return {**spec, "path": spec["path"] + below}

    def unreadable(self, step: str, version: Version) -> str:
        """Whose files nobody has who answers; empty if there are none."""
        holders = self.holders(step, version)
        silent = self.silent.among(self._others(holders), again=True)
        if not silent or self.is_in_root(step, version):
            return ""
        missing = [
            process
            for process, having in holders.items()
            if all(member.url in silent and member.node != self.node for member in having)
        ]
        places = sorted({place_of(m.url) for n in missing for m in holders[n] if m.url in silent})
        text = f"only {first_few(places)} has the files of processes {first_few(missing)}, and does"
        return f"{text} not answer: {next(iter(silent.values()))}" if missing else ""


def job_of(url: str) -> tuple[Nodes | None, str]:
    """The nodes that have a step, and its name; None for any other URL."""
    scheme, _, path = url.partition("://")
    key, _, step = path.strip("/").partition("/")
    return (_jobs.get(key) if scheme == SCHEME.name else None), step


def _spec(url: str) -> dict[str, Any]:
    nodes, step = job_of(url)
    if nodes is None or not step:
        raise InvalidPath(f"{url!r}: the Checkpointer with node_local= that has it is closed")
    return nodes.spec(step)


class _JobStep(StepLocation):
    @property
    def parent(self) -> Location | None:
        """The root, which has the steps that this one borrows from."""
        nodes, _ = job_of(self.url)
        return None if nodes is None else nodes.root.location


SCHEME = Scheme("nodes", _spec, location=_JobStep, is_internal=True)
register_scheme(SCHEME)
