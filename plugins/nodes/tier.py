"""The tier of nodes of a run: its steps, and where the files of each can be read."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import xxhash

from unickpt import SaveOptions
from unickpt.errors import InvalidPath
from unickpt.extend import (
    PathLike,
    Scheme,
    StepFolder,
    Tier,
    Version,
    job_group,
    new_session,
    register_scheme,
    resolve_path,
    version_at,
)
from unickpt.plugins.nodes import membership
from unickpt.plugins.nodes.file_server import FileServer
from unickpt.plugins.nodes.locations import shared
from unickpt.plugins.nodes.membership import Member
from unickpt.plugins.nodes.uploads import NodeCopying, Uploads

CONTROL = ".nodes"
"""In the root: what all processes must see of steps that lie in the nodes' folders."""
_UNREADABLE = "is not on the nodes of this job"


@dataclass(frozen=True)
class NodeOptions:
    """The keywords of `Checkpointer` next to `node_local`.

    Arguments:
        upload_every: upload every n-th step to the root; the last one also when the run is closed.
        upload_bytes_per_s: the most bytes that a node uploads in a second; None for no limit.
        replicas: how many other nodes keep a copy of each node's files: 0 or 1.
        unit: what fails together, such as a rack: the name of an environment variable, or a
            function that returns it; by default each node for itself.

    Raises:
        ValueError: one is out of range.
    """

    upload_every: int = 1
    upload_bytes_per_s: float | None = None
    replicas: int = 0
    unit: str | Callable[[], str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.upload_every, Integral) or self.upload_every < 1:
            raise ValueError(f"upload_every={self.upload_every!r} must be an integer, at least 1")
        rate = self.upload_bytes_per_s
        if rate is not None and not (isinstance(rate, Real) and rate > 0):
            raise ValueError(f"upload_bytes_per_s={rate!r} must be a positive number, or None")
        if self.replicas not in (0, 1):
            raise ValueError(f"replicas={self.replicas!r} must be 0 or 1")

    @classmethod
    def taken(cls, arguments: dict[str, Any]) -> NodeOptions:
        """These options, removed from the arguments of a Checkpointer."""
        names = cls.__dataclass_fields__.keys() & arguments.keys()
        return cls(**{name: arguments.pop(name) for name in names})

    def unit_of(self, node: str) -> str:
        """The name of what fails together with this node."""
        if self.unit is None:
            return node
        return os.environ.get(self.unit, node) if isinstance(self.unit, str) else self.unit()


def join(root: StepFolder, path: PathLike, arguments: dict[str, Any], options: SaveOptions) -> Tier:
    """Joins the nodes of a job; all of its processes call this.

    Arguments:
        root: the folder of the run.
        path: a folder of this node.
        arguments: of the Checkpointer; `NodeOptions` are removed.
        options: of its saves.

    Raises:
        InvalidPath: the path is no local folder.
        SaveTimeout: other processes do not join.
        ValueError: an option does not fit.
    """
    for name in ("reuse", "experts"):
        if arguments.get(name):
            raise ValueError(f"{name}= refers to earlier steps; with node_local, omit it")
    chosen, local = NodeOptions.taken(arguments), resolve_path(path)
    if not local.is_local:
        raise InvalidPath(
            f"node_local={str(local)!r} must be a folder of each node, such as /dev/shm/run"
        )
    nodes = Nodes(root, local.path, chosen, options)
    nodes.steps = NodeSteps(nodes)
    return Tier(nodes.steps, nodes.copying)


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
        self.folder = f"{path}{xxhash.xxh3_64_hexdigest(str(root.location).encode())}/"
        name = membership.node_of(self.folder)
        self.server = FileServer(self.folder)
        self._finalizer = weakref.finalize(self, self.server.close)
        self._finalizer.atexit = False
        self.location = shared(control, self.folder, group.index)
        self.attempt = group.next_attempt()
        self.session = self.attempt.rpartition("-")[0]
        unit, parts = chosen.unit_of(name), membership.parts_in(self.folder)
        member = Member(name, self.server.url, unit, parts)
        whole = control, self.attempt, group.index, group.count, member
        self.members = membership.gather(*whole, options.timeout_s)
        self.key = new_session()
        _NODES[self.key] = self
        self.uploads = Uploads(control, self.folder, root.location)
        self.steps: NodeSteps

    def copying(self, *arguments: Any) -> NodeCopying:
        """Uploads the steps; arguments as for `Tier.copying`."""
        return NodeCopying(self, *arguments)

    def close(self) -> None:
        """Ends the server of files."""
        self._finalizer()
        _NODES.pop(self.key, None)

    @cached_property
    def node(self) -> str:
        """The identity of this node."""
        return self.members[self.group.index].node

    def holders(self, step: str, version: Version) -> dict[int, list[Member]]:
        """Who has the data files of each process of a committed step; only this node, if it has.

        Arguments:
            step: the name of its folder.
            version: the committed one.
        """
        holders: dict[int, list[Member]] = {}
        if version.attempt.rpartition("-")[0] == self.session:
            holders = {process: [member] for process, member in enumerate(self.members)}
        for member in self.members:
            for process in member.parts.get(step, {}).get(version.attempt, ()):
                holders.setdefault(process, []).append(member)
        own = membership.parts_in(self.folder).get(step, {}).get(version.attempt, ())
        return holders | {process: [self.members[self.group.index]] for process in own}

    def is_readable(self, step: str, version: Version) -> bool:
        """Whether each data file of a step is on a node, or else in the root."""
        count = self.uploads.part_count(step, version.attempt)
        if count is not None and set(range(count)) <= self.holders(step, version).keys():
            return True
        in_root = version_at(self.root.location.child(step))
        return in_root is not None and in_root.name == version.name

    def spec(self, step: str) -> dict[str, Any]:
        """The key-value store from which a step is read: small files from the root, data files from
        this node, other nodes, or the root."""
        control: Any = self.location.spec
        layers: list[dict[str, Any]] = [{"base": control}]
        version = version_at(self.location.child(step))
        if version is not None and version.attempt:
            count = self.uploads.part_count(step, version.attempt) or 0
            holders = self.holders(step, version)
            for process in range(count):
                below = f"{step}/processes/{version.attempt}/{process:05d}/"
                base = self._base(below, holders.get(process, ()))
                layers.append({"base": base, "prefix": below, "strip_prefix": len(below)})
        return {"driver": "kvstack", "path": f"{step}/", "layers": layers}

    def _base(self, below: str, holders: Any) -> dict[str, Any]:
        """Where the data files of a process are read."""
        if any(member.node == self.node for member in holders):
            return {"driver": "file", "path": self.folder + below}
        if holders:
            chosen = holders[self.group.index % len(holders)]
            return {"driver": "http", "base_url": chosen.url, "path": below}
        spec = self.root.location.spec
        return {**spec, "path": spec["path"] + below}


class NodeSteps(StepFolder):
    """The steps that lie on the nodes of a job.

    Arguments:
        nodes: of the job.
    """

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes.location)  # type: ignore[arg-type]
        self._nodes = nodes
        self.lost: dict[int, Version] = {}
        """Committed steps that nobody can read."""
        for step in super().committed():
            version = super().version(step)
            if version is not None and not nodes.is_readable(f"step_{step}", version):
                self.lost[step] = version

    def path(self, step: int) -> str:
        return f"{SCHEME.name}://{self._nodes.key}/step_{step}"

    def committed(self) -> list[int]:
        return [step for step in super().committed() if step not in self.lost]

    def version(self, step: int) -> Version | None:
        version = super().version(step)
        return None if version is not None and version == self.lost.get(step) else version

    def remove(self, step: int) -> None:
        super().remove(step)
        self._nodes.uploads.forget(f"step_{step}")

    def remove_lost(self) -> None:
        if self.lost:
            self.lease.take()
        for step in list(self.lost):
            super().remove(step)
            del self.lost[step]


_NODES: dict[str, Nodes] = {}


def _spec(url: str) -> dict[str, Any]:
    key, _, step = url.partition("://")[2].strip("/").partition("/")
    nodes: Nodes | None = _NODES.get(key)
    if nodes is None or not step:
        raise InvalidPath(f"{url!r}: the Checkpointer with node_local= that has it is closed")
    return nodes.spec(step)


# A node that does not answer is gone; TensorStore's own default tries for minutes.
_RETRIES = {"max_retries": 4, "initial_delay": "100ms", "max_delay": "1s"}
SCHEME = Scheme("nodes", _spec, {"http_request_retries": _RETRIES})
register_scheme(SCHEME)
