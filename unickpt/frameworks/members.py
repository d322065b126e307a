"""Members: the processes of a framework's job in a group, and their names in messages.

In a group that is only a part of a job (an actor next to a critic), a process has an index in the
group, by which everything is stored, and a number in the job, which its user knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from unickpt.arrays.layout import Mesh
from unickpt.errors import UnickptError
from unickpt.quoting import first_few


@dataclass(frozen=True, eq=False)
class Members:
    """The processes of a group that are only some of a framework's job.

    Arguments:
        numbers: their numbers in the job, in the order of the group.
        job_count: how many processes the job has.
        kind: the job's word for a process: "rank" or "process".
        job: the name of the job.
    """

    numbers: tuple[int, ...]
    job_count: int
    kind: str
    job: str

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """The index in the group of each process of the job that is in it."""
        return {number: position for position, number in enumerate(self.numbers)}

    def __str__(self) -> str:
        """As "ranks 0, 2, 3 of torch.distributed"."""
        return f"{_called(self.kind, self.numbers)} of {self.job}"

    def check(self, what: str, processes: Iterable[int]) -> None:
        """Checks that the processes that hold an array are all in the group.

        Arguments:
            what: the array.
            processes: their numbers in the job.

        Raises:
            TypeError: some are not; says what to do.
        """
        holders = sorted(set(processes))
        outside = [process for process in holders if process not in self.positions]
        if outside:
            missing = f"{_called(self.kind, outside)} {'is' if len(outside) == 1 else 'are'}"
            raise TypeError(
                f"{what} on {_called(self.kind, holders)} cannot be saved by {self} "
                f"(SaveOptions.group), among which {missing} missing; let all that hold it save "
                "it, by a group of these, or put it on a mesh of the group"
            )

    def mesh(self, mesh: Mesh) -> Mesh:
        """A mesh of processes of the group, numbered by their index in the group."""
        return replace(mesh, processes=tuple(self.positions[p] for p in mesh.processes))


def named(members: Members | None, processes: Sequence[int]) -> str:
    """Some processes of a group as a user knows them, as "ranks 2, 3".

    Arguments:
        members: of the group; None for a whole job.
        processes: their indices in the group.

    Example:
        >>> named(Members((0, 2, 3), 4, "rank", "torch.distributed"), [1, 2]), named(None, [1])
        ('ranks 2, 3', 'process 1')
    """
    if members is None:
        return _called("process", processes)
    return _called(members.kind, [members.numbers[process] for process in processes])


def _called(kind: str, numbers: Sequence[int]) -> str:
    plural = ("es" if kind.endswith("s") else "s") if len(numbers) > 1 else ""
    return f"{kind}{plural} {first_few(numbers)}"


def legend(members: Members | None) -> str:
    """Text that explains the process indices in a message; empty for a whole job."""
    if members is None:
        return ""
    return f" (the processes of this group are, in order, {members})"


def explained(error: Exception, members: Members | None) -> Exception:
    """The same error; if it names processes by their index, its message says which these are."""
    if members is None or not isinstance(error, UnickptError):
        return error  # a user's may have no text
    note, message = legend(members), str(error)
    if "process" in message and str(members) not in message:
        error.args = (message + note,)
    return error
