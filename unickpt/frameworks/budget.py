"""How much memory a process may use: the node's memory, and a process's share of a budget of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Self

from unickpt.frameworks.process_group import Group
from unickpt.frameworks.registry import processes_here
from unickpt.progress import Progress, check_progress

# Of a node's memory, and of what of it is available. Machines with accelerators have two to four
# times their memory, of which the state to save takes three quarters at most: a quarter holds all
# of that. And never more than half of what is available, so that the rest of the program can grow.
_PART, _PART_AVAILABLE = 4, 2
MOST_WORKING = 1 << 30
"""Bytes that one process's reading and writing can use; more does not make it faster."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of memory for saving or loading.

    Arguments:
        bytes: how many.
        per: whose they are: the node's, whose processes share them, or each process's own.
    """

    bytes: int
    per: Literal["node", "process"] = "node"

    @classmethod
    def of(cls, given: int | MemoryBudget | None) -> MemoryBudget:
        """What an option asks for: a number is a node's; by default, each process has its own."""
        if given is None:
            return cls(MOST_WORKING, "process")
        return given if isinstance(given, MemoryBudget) else cls(int(given))

    def share(self, processes: int) -> int:
        """The bytes of one process, at least 1.

        Arguments:
            processes: how many share the node; those of the whole job, for a part that is the same
                on all of them.
        """
        return max(1, int(self.bytes) // (1 if self.per == "process" else processes))


def node_bytes() -> int:
    """The default of what a node's processes stage, together: depends on what is available now."""
    found = node_memory()
    return min(found.total // _PART, found.available // _PART_AVAILABLE)


def share(requested: int | MemoryBudget | None, on_node: int, default: int | None = None) -> int:
    """One process's share of a node's budget, in bytes, at least 1.

    Arguments:
        requested: what an option says.
        on_node: how many processes share the node.
        default: the node's default; if None, what reading and writing can use of a fixed part.
    """
    if requested is not None or default is not None:
        return MemoryBudget.of(default if requested is None else requested).share(on_node)
    return max(1, min(MOST_WORKING, _total() // _PART // on_node))


@cache
def _total() -> int:
    return node_memory().total


# --- options ------------------------------------------------------------------------------------


@cache
def _default(options: Any) -> Any:
    return options()


class CommonOptions:
    """What `SaveOptions` and `LoadOptions` have in common."""

    budget_bytes: int | MemoryBudget | None
    timeout_s: float
    group: Group | None
    progress: Progress

    @property
    def working_bytes(self) -> int:
        """Bytes of memory that this process may use to read and write."""
        requested = self.budget_bytes
        own = isinstance(requested, MemoryBudget) and requested.per == "process"
        return share(requested, 1 if own else processes_here(self.group))

    @classmethod
    def or_default(cls, given: object) -> Self:
        """The given options; the default ones for None.

        Raises:
            TypeError: they are not options, or those of the other kind.
        """
        if given is None:
            default: Self = _default(cls)  # type: ignore[arg-type]
            return default
        if not isinstance(given, cls):
            raise TypeError(
                f"options must be unickpt.{cls.__name__}(...), not of type {type(given).__name__}"
            )
        return given

    def check_common(self) -> None:
        """Checks these options.

        Raises:
            MissingPackage: `progress=True` without tqdm.
            ValueError, TypeError: one is out of range, or of a wrong type.
        """
        requested = self.budget_bytes
        if requested is not None:
            given = requested.bytes if isinstance(requested, MemoryBudget) else requested
            check_number("budget_bytes", given)
        check_number("timeout_s", self.timeout_s)
        if self.group is not None and not hasattr(self.group, "next_attempt"):
            raise TypeError(
                f"group is of type {type(self.group).__name__}; omit it under torch.distributed "
                "and jax.distributed, else pass unickpt.ProcessGroup(index, count, session)"
            )
        check_progress(self.progress)


def check_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or not float(value) > 0:
        raise ValueError(f"{name}={value!r} must be a positive number")


# --- the memory of this node --------------------------------------------------------------------

_CGROUP = Path("sys/fs/cgroup")
# Of version 2 and of version 1: limits, what is in use, and of that the pages of files, which the
# kernel takes back when it needs them (those of files in memory do not count among them).
_V2 = ["memory.max", "memory.high"], "memory.current", ["active_file", "inactive_file"]
_V1 = (
    ["memory.limit_in_bytes"],
    "memory.usage_in_bytes",
    ["total_active_file", "total_inactive_file"],
)


@dataclass(frozen=True)
class NodeMemory:
    """The memory that a process shares with the others of its node.

    Arguments:
        total: bytes that they may use together: of the machine, or less in a container.
        available: bytes of it that are free, or would be taken from caches.
        name: of the machine and of what limits it, the same for all processes that share it.
    """

    total: int
    available: int
    name: str


def node_memory(root: Path = Path("/")) -> NodeMemory:
    """The memory of the node of this process.

    Arguments:
        root: where `proc` and `sys` are.
    """
    total, available = _of_machine(root)
    name = _text(root / "proc/sys/kernel/random/boot_id") or socket.gethostname()
    for folder, limit, used in _limits(root):
        if limit < total:  # the kernel's number of a control group is the same in all containers
            total, name = limit, f"{name.partition('.')[0]}.{folder.stat().st_ino}"
        available = min(available, max(0, limit - used))
    return NodeMemory(total, available, name)


def node_name() -> str:
    """The name of this node, the same for all processes that share its memory."""
    return node_memory().name


def _of_machine(root: Path) -> tuple[int, int]:
    found = _table(root / "proc/meminfo")
    if total := found.get("MemTotal:", 0) << 10:
        return total, (found.get("MemAvailable:", 0) << 10) or total
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total


def _limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """The control groups of this process that limit memory: folder, limit and use, in bytes."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount, (limits, used, cached) = root / _CGROUP, _V2
        elif "memory" in controllers.split(","):
            mount, (limits, used, cached) = root / _CGROUP / "memory", _V1
        else:
            continue
        # Within a container, the path may be that of the machine, where only the mount is seen.
        for folder in (mount / path.strip("/"), *Path(path.strip("/")).parents):
            at = mount / folder
            given = [int(text) for name in limits if (text := _text(at / name)).isdigit()]
            if given:
                files = _table(at / "memory.stat")
                in_use = _text(at / used)
                taken = int(in_use) if in_use.isdigit() else 0
                yield at, min(given), max(0, taken - sum(files.get(name, 0) for name in cached))


def _table(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number on each line."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text().strip()
    return ""
