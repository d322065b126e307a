"""The steps that lie on the nodes of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unickpt.errors import StorageError
from unickpt.extend import StepFolder, Version, version_at
from unickpt.plugins.nodes.job import Nodes


class NodeSteps(StepFolder):
    """The steps that lie on the nodes of a job.

    Arguments:
        nodes: of the job.
    """

    copies_differ = True

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes.location)  # type: ignore[arg-type]
        self._nodes = nodes
        self._lost = dict[int, Version]()  # committed steps that nobody can read
        for step in super().committed():
            version = super().version(step)
            if version is not None and not nodes.is_readable(f"step_{step}", version):
                self._lost[step] = version

    def path(self, step: int) -> str:
        return self.location_of(step).url.rstrip("/")

    def committed(self) -> list[int]:
        steps = super().committed()  # one that was lost may have been saved again
        return [step for step in steps if step not in self._lost or self.version(step) is not None]

    def version(self, step: int) -> Version | None:
        version = super().version(step)
        return None if version is not None and version == self._lost.get(step) else version

    def reading_failed(self, step: int, error: StorageError) -> StorageError:
        version = self.version(step)
        reason = "" if version is None else self._nodes.unreadable(f"step_{step}", version)
        return StorageError(f"{self.path(step)}: {reason}") if reason else error

    def needed(self, steps: Sequence[int]) -> Sequence[int]:
        """All from the newest step on that others protect: with copies or parity, other nodes; if
        its copy leaves out experts, that copy."""
        nodes, places = self._nodes, list[int]()
        if nodes.is_protected:
            places.append(self._newest(steps, nodes.uploads.lost_nodes))
        if nodes.filters:
            places.append(self._newest(steps, self._has_copy))
        return steps[min(places) :] if places else super().needed(steps)

    def _newest(self, steps: Sequence[int], is_protected: Callable[[str, str], object]) -> int:
        """The place of the newest protected step; the first, if there is none."""
        for place in range(len(steps) - 1, 0, -1):
            version = self.version(steps[place])
            if version is not None and is_protected(f"step_{steps[place]}", version.attempt):
                return place
        return 0

    def _has_copy(self, step: str, attempt: str) -> bool:
        version = version_at(self._nodes.root.location.child(step))
        return version is not None and version.attempt == attempt

    def remove(self, step: int) -> None:
        super().remove(step)
        self._nodes.uploads.forget(f"step_{step}")
        # The other processes do so when they next look.
        self._nodes.folder.remove(f"step_{step}")

    def remove_lost(self) -> None:
        if self._lost:
            self.lease.take()
        for step in list(self._lost):
            self.remove(step)
            del self._lost[step]
