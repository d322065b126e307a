"""What each process needs, as far as layouts say it for all, and whether the processes agree.

Every process describes its arrays by layouts, and checks that these give its own boxes. The
processes compare digests of the descriptions: where they agree, the description holds for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from unickpt.extend import ArrayTarget, Job, Members, members_of
from unickpt.plugins.exchange.layout_schedule import Demand, devices_of
from unickpt.types import Box, Group, Layout, Mesh


class MeshDescription(msgspec.Struct, array_like=True):
    """The arrays that some processes hold together.

    Arguments:
        processes: a digest of the indices of the processes.
        count: how many they are.
        demands: a digest of the arrays' names and demands.
        names: hashes of the arrays' names; only from the first of the processes.
    """

    processes: str
    count: int
    demands: str
    names: list[int] = []


class DemandDescription(msgspec.Struct, array_like=True):
    """The arrays that a process needs.

    Arguments:
        meshes: those that layouts describe.
        undescribed: hashes of the names of all others.
    """

    meshes: list[MeshDescription] = []
    undescribed: list[int] = []


class Demands:
    """The demands for each stored array that the layouts of a process describe.

    Arguments:
        jobs: of this process.
        group: the processes that load together.
    """

    def __init__(self, jobs: Iterable[Job], group: Group) -> None:
        self._index = group.index
        texts: dict[str, dict[str, Demand]] = {}
        undescribed: set[str] = set()
        for job in jobs:
            recipes = job.recipes
            for name, target in job.targets.items():
                layout = _layout_of(target, group)
                is_held = layout is not None and devices_of(layout.mesh, group.index)
                if not is_held and all(box.empty for box in target.boxes):
                    continue  # this process needs nothing of it
                for source in recipes[name].sources:
                    demand = None
                    if layout is not None:
                        demand = Demand.from_source(source, layout, target.shape)
                    if demand is None:
                        undescribed.add(source.entry.name)
                    else:
                        texts.setdefault(source.entry.name, {})[_text(demand)] = demand
        self._meshes: dict[str, _Processes] = {}
        """The processes that need each array."""
        for name, demands in texts.items():
            meshes = {_processes(demand.layout.mesh) for demand in demands.values()}
            if len(meshes) > 1:
                undescribed.add(name)
            elif name not in undescribed:
                (self._meshes[name],) = meshes
        self._texts, self._others = texts, undescribed

    def demands_for(self, name: str) -> list[Demand] | None:
        """The demands for a stored array, in the same order on all processes; None if none are
        known."""
        if name not in self._meshes:
            return None
        demands = self._texts[name]
        return [demands[text] for text in sorted(demands)]

    def description(self) -> DemandDescription:
        """The description to compare with those of the other processes."""
        names: dict[_Processes, list[str]] = {}
        for name, processes in self._meshes.items():
            names.setdefault(processes, []).append(name)
        meshes = []
        for processes, arrays in names.items():
            lines = ["\n".join([name, *sorted(self._texts[name])]) for name in sorted(arrays)]
            hashes = [*map(_hash, arrays)] if processes.first == self._index else []
            digest = _digest("\n\n".join(lines).encode())
            meshes.append(MeshDescription(processes.digest, processes.number, digest, hashes))
        return DemandDescription(meshes, sorted(map(_hash, self._others)))

    def settle(self, every: Sequence[DemandDescription]) -> bool:
        """Forgets the arrays that not all processes describe alike.

        Arguments:
            every: the descriptions of all processes.

        Returns:
            Whether there are such arrays, in any process.
        """
        seen: dict[str, list[tuple[int, str]]] = {}
        for description in every:
            for mesh in description.meshes:
                seen.setdefault(mesh.processes, []).append((mesh.count, mesh.demands))
        torn = {
            mesh
            for mesh, reports in seen.items()
            if len(reports) != reports[0][0] or len({*reports}) > 1
        }
        disputed, holders = set[int](), dict[int, str]()
        for description in every:
            disputed.update(description.undescribed)
            for mesh in description.meshes:
                for name in mesh.names:
                    holder = holders.setdefault(name, mesh.processes)
                    if mesh.processes in torn or holder != mesh.processes:
                        disputed.add(name)
        if not (torn or disputed):
            return False
        self._meshes = {
            name: processes
            for name, processes in self._meshes.items()
            if processes.digest not in torn and _hash(name) not in disputed
        }
        return True


class _Processes(NamedTuple):
    """Some processes: a digest of their indices, how many they are, and the first."""

    digest: str
    number: int
    first: int


@lru_cache(maxsize=256)
def _processes(mesh: Mesh) -> _Processes:
    indices = np.unique(mesh.grid)
    return _Processes(_digest(indices.tobytes()), len(indices), int(indices[0]))


def _layout_of(target: ArrayTarget, group: Group) -> Layout | None:
    """How the processes of a group need an array, if a layout says it; a plain array is needed by
    all, which they compare."""
    shape, layout = tuple(target.shape), target.layout
    if layout is None:
        if tuple(target.boxes) != (Box.whole(shape),):
            return None
        layout = Layout.replicated(len(shape), group.count)
    else:
        mesh = _mesh_in(layout.mesh, members_of(group), group.count)
        if mesh is None:
            return None
        layout = layout if mesh is layout.mesh else Layout(mesh, layout.dims)
    boxes = {box for box in target.boxes if not box.empty}
    return layout if boxes == _boxes_of(layout, shape, group.index) else None


@lru_cache(maxsize=256)
def _mesh_in(mesh: Mesh, members: Members | None, count: int) -> Mesh | None:
    """A mesh by the indices of its processes in a group; None if some are not in it."""
    if members is None:
        return mesh if max(mesh.processes) < count else None
    is_inside = all(process in members.positions for process in mesh.processes)
    return members.mesh(mesh) if is_inside else None


@lru_cache(maxsize=4096)
def _boxes_of(layout: Layout, shape: tuple[int, ...], process: int) -> set[Box]:
    return Demand(layout, shape, ()).boxes_of(process)


def _text(demand: Demand) -> str:
    layout = demand.layout
    return f"{_mesh_text(layout.mesh)}{layout.dims}{demand.shape}{demand.maps}{demand.fixed}"


@lru_cache(maxsize=256)
def _mesh_text(mesh: Mesh) -> str:
    return f"{mesh.axes}{mesh.shape}{_digest(mesh.grid.tobytes())}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
