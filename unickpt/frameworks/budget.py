"""A node's budget of memory: how much by default, and a process's share of it."""

from __future__ import annotations

from functools import cache

from unickpt.frameworks import node_memory
from unickpt.frameworks.node_count import launched_on_node
from unickpt.frameworks.process_group import BoundedGroup, Group, ProcessGroup

# Of a node's memory, and of what of it is available. Machines with accelerators have two to four
# times their memory, of which the state to save takes three quarters at most: a quarter holds all
# of that. And never more than half of what is available, so that the rest of the program can grow.
_PART, _PART_AVAILABLE = 4, 2
MOST_WORKING = 1 << 30
"""Bytes that one process's reading and writing can use; more does not make it faster."""


class ProcessBytes(int):
    """A budget of one process, which is not divided again."""


def processes_on_node(group: Group) -> int:
    """How many processes share the memory of this node; at most, if that is not known exactly."""
    launched = launched_on_node(group.count)
    if launched is not None:
        return launched
    if isinstance(group, BoundedGroup | ProcessGroup):
        return group.on_node()
    return group.count


def node_bytes() -> int:
    """The default of what a node's processes stage, together: depends on what is available now."""
    found = node_memory.find()
    return min(found.total // _PART, found.available // _PART_AVAILABLE)


def everywhere(asked: int | None, count: int) -> int:
    """A part of every process's share, in bytes, that is the same on all processes of a job.

    Arguments:
        asked: as for `share`.
        count: number of processes of the job, on all nodes.
    """
    if asked is None:
        return MOST_WORKING
    return max(1, int(asked) // (1 if isinstance(asked, ProcessBytes) else count))


def share(asked: int | None, on_node: int, default: int | None = None) -> int:
    """One process's share of a node's budget, in bytes, at least 1.

    Arguments:
        asked: the budget of the node, or a `ProcessBytes`; None for the default.
        on_node: how many processes share it.
        default: the node's default; if None, what reading and writing can use of a fixed part.
    """
    if isinstance(asked, ProcessBytes):
        return max(1, int(asked))
    if asked is not None:
        return max(1, int(asked) // on_node)
    if default is not None:
        return max(1, default // on_node)
    return max(1, min(MOST_WORKING, _total() // _PART // on_node))


@cache
def _total() -> int:
    return node_memory.find().total
