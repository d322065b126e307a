"""How much memory there is: the limit of the machine or container, what is free, and their name."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_CGROUP = Path("sys/fs/cgroup")
# Of version 2 and of version 1: the limits, the use, and the file pages in it, which the kernel
# reclaims when it needs them (pages of files in memory do not count among them).
_V2 = ["memory.max", "memory.high"], "memory.current", ["active_file", "inactive_file"]
_V1 = (
    ["memory.limit_in_bytes"],
    "memory.usage_in_bytes",
    ["total_active_file", "total_inactive_file"],
)


class NodeMemory(NamedTuple):
    """The memory that a process shares with the others of its node.

    Arguments:
        total: bytes that they may use together: of the machine, or less in a container.
        available: bytes of it that are free, or would be taken from caches.
        name: of the machine and of its limit, the same for all processes that share it.
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
    meminfo = _table(root / "proc/meminfo")
    if total := meminfo.get("MemTotal:", 0) << 10:
        return total, (meminfo.get("MemAvailable:", 0) << 10) or total
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total


def _limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """The control groups of this process that limit memory: folder, limit and use, in bytes."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, remainder = line.partition(":")
        controllers, _, path = remainder.partition(":")
        if number == "0" and not controllers:
            mount, (limits, used, cached) = root / _CGROUP, _V2
        elif "memory" in controllers.split(","):
            mount, (limits, used, cached) = root / _CGROUP / "memory", _V1
        else:
            continue
        # Within a container, the path may be that of the machine, but only the mount is visible.
        for folder in (mount / path.strip("/"), *Path(path.strip("/")).parents):
            group = mount / folder
            bounds = [int(text) for name in limits if (text := _text(group / name)).isdigit()]
            if bounds:
                files = _table(group / "memory.stat")
                in_use = _text(group / used)
                used_bytes = int(in_use) if in_use.isdigit() else 0
                cached_bytes = sum(files.get(name, 0) for name in cached)
                yield group, min(bounds), max(0, used_bytes - cached_bytes)


def _table(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number on each line."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text().strip()
    return ""
