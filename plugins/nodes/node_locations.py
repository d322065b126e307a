"""Where the files of a step are: small ones in the root, data files in the folder of each node."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorstore as ts

from unickpt.extend import KvStore, LocalLocation, Location, StorageFuture, local_folders

_STEP = re.compile(r"step_\d+/")
_PART = re.compile(r"step_\d+/processes/[^/]+/(\d{5,})/")


class PartLocation(LocalLocation):
    """The data files of a process, in the folder of its node."""

    def sync(self, top: Location, made: int = 1) -> None:
        """Makes the folders durable up to that of the step; `top` is elsewhere."""
        local_folders.sync(self.path, self.path.partition("processes/")[0])


class RemotePart(Location):
    """The data files of a process of another node, which only processes there remove."""

    is_seen = False

    def remove(self, context: ts.Context) -> None:
        pass


@dataclass(frozen=True)
class _ControlLocation(Location):
    """A folder below `top` that all nodes see, except the data files of processes.

    Arguments:
        top: the path of the folder of all steps.
        node: the path of the same folder in that of this node; ends with `/`.
        process: the number of this process.
        run: the root, which has the steps that a step borrows from.
    """

    top: str = ""
    node: str = ""
    process: int = 0
    run: Location | None = None

    shares_data: ClassVar[bool] = False

    def child(self, relative: str) -> Location:
        tail = relative.strip("/") + "/"
        url, path = self.url + tail, f"{self.spec['path']}{tail}"
        below = path[len(self.top) :]
        if match := _PART.match(below):
            return self._part(below, match)
        spec = {**self.spec, "path": path}
        return type(self)(url, spec, self.top, self.node, self.process, self.run)

    @property
    def parent(self) -> Location | None:
        return self.run if _STEP.fullmatch(self.path[len(self.top) :]) else None

    def _part(self, below: str, match: re.Match[str]) -> Location:
        """A folder of the data files of a process, by its path below the folder of all steps."""
        path = self.node + below
        if int(match[1]) == self.process or os.path.isdir(self.node + match[0]):
            return PartLocation(f"file://{path}", {"driver": "file", "path": path})
        return RemotePart(f"node://{below}", {"driver": "memory", "path": below})


class SharedObjects(_ControlLocation):
    """Such a folder in object storage."""


class SharedFolder(_ControlLocation, LocalLocation):
    """Such a folder in a file system."""


class _ListedStore(KvStore):
    """A stack of stores that lists the keys of another one: TensorStore 0.1.86 ends the process
    when it lists such a stack."""

    listed: KvStore

    def list(self, **options: Any) -> StorageFuture[list[bytes]]:
        return self.listed.list(**options)


class StepLocation(Location):
    """A step as it is read: a stack of stores, of which the first has the small files. Only these
    are listed."""

    def store(self, context: ts.Context) -> KvStore:
        opened, base = _ListedStore.open(dict(self.spec), context), self.spec["layers"][0]["base"]
        control = {**base, "path": f"{base['path']}{self.spec['path']}"}
        opened.listed = KvStore.open(control, context)
        return opened


def shared(control: Location, url: str, node: str, process: int, run: Location) -> Location:
    """The folder of all steps.

    Arguments:
        control: the folder for small files.
        url: from which its steps are loaded.
        node, process, run: as for `_ControlLocation`.
    """
    kind: Any = SharedFolder if control.is_local else SharedObjects
    location: Location = kind(url, control.spec, control.path, node, process, run)
    return location
