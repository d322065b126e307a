"""The states of one process's part of an attempt: what it may remove, and what it may conclude."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class AttemptState(Enum):
    """How far one process is with an attempt; so what it may remove, and what it may conclude.

    Process 0, the coordinator: OPEN, WRITING, MERGING, COMMITTING, COMMITTED. The others: OPEN,
    WRITING, PUBLISHED, COMMITTED. Each may end in FAILED instead.
    """

    OPEN = auto()
    """The destination has not been checked yet, and nothing was written."""
    WRITING = auto()
    """This process writes its part. Without its record the coordinator cannot commit, so it may
    remove the part, and tell the others that this attempt cannot succeed any more."""
    PUBLISHED = auto()
    """This process has published its record, or tried to. The coordinator may commit at any moment,
    so nothing may be removed, and only the root tells whether the checkpoint exists."""
    MERGING = auto()
    """The coordinator has published its record. Only it commits, and it has not begun to, so it may
    remove everything; no other process may."""
    COMMITTING = auto()
    """The coordinator has begun to write the root. Until the storage answers, the checkpoint may or
    may not exist: nothing may be removed, and nothing may be concluded from an error."""
    COMMITTED = auto()
    """The checkpoint exists. Nothing of this attempt may be removed."""
    FAILED = auto()
    """The root is that of another job, or the files are gone: no process commits this attempt any
    more. What it wrote may be removed."""


_S = AttemptState
# WRITING again: the destination is checked twice, in the call and when it is the save's turn.
# PUBLISHED again: after a second record, of chunks that the coordinator requested.
# COMMITTING again: a write of the root that was refused, or had no answer, may be repeated.
# FAILED again: several errors of one save are explained by the same conflict.
NEXT: Mapping[AttemptState, set[AttemptState]] = {
    _S.OPEN: {_S.WRITING},
    _S.WRITING: {_S.WRITING, _S.PUBLISHED, _S.MERGING, _S.FAILED},
    _S.PUBLISHED: {_S.PUBLISHED, _S.COMMITTED, _S.FAILED},
    _S.MERGING: {_S.COMMITTING, _S.FAILED},
    _S.COMMITTING: {_S.COMMITTING, _S.COMMITTED, _S.FAILED},
    _S.COMMITTED: set(),
    _S.FAILED: {_S.FAILED},
}
"""The states that may follow each."""
REMOVABLE = {_S.OPEN, _S.WRITING, _S.MERGING, _S.FAILED}
"""In these, a process that gives up may remove what it wrote: it is certain that nobody commits it.
In the others only if another process has reported that (`Notes.settled`)."""
