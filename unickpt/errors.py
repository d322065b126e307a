"""All errors that unickpt raises; each also derives from the matching built-in exception."""

from collections.abc import Iterator
from contextlib import contextmanager

from unickpt.quoting import printable

__all__ = [
    "CheckpointCorrupt",
    "CheckpointExists",
    "CheckpointNotFound",
    "CheckpointReplaced",
    "CoverageError",
    "ForkedProcess",
    "HintError",
    "InvalidPath",
    "LaterStepsExist",
    "LoadMismatch",
    "MergeError",
    "MissingPackage",
    "OutOfMemory",
    "PluginError",
    "ProcessFailed",
    "ReplicasDiffer",
    "RuleError",
    "RuleSyntaxError",
    "RuleWarning",
    "SaveConflict",
    "SaveTimeout",
    "StateChanged",
    "StorageError",
    "UnickptError",
    "UnsupportedFormat",
    "UnsupportedLeaf",
]

# Stored text and responses of servers may be long; longer lines of a message are cut.
_MOST_OF_LINE = 1000


class UnickptError(Exception):
    """Base class of all errors of unickpt. Long lines of a message are shortened, and control
    sequences of terminals are escaped."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_readable(a) if isinstance(a, str) else a for a in args))


def _readable(text: str) -> str:
    return "\n".join(printable(line, _MOST_OF_LINE, "\t") for line in text.split("\n"))


class InvalidPath(UnickptError, ValueError):
    """The path or URL is not a storage location that unickpt can use."""


class CheckpointNotFound(UnickptError, FileNotFoundError):
    """No committed checkpoint exists at the path."""


class CheckpointReplaced(CheckpointNotFound):
    """The checkpoint was replaced or removed, by a save or a person, while it was being read."""


class CheckpointExists(UnickptError, FileExistsError):
    """The destination already holds a committed checkpoint, or files that are not unickpt's."""


class LaterStepsExist(UnickptError, FileExistsError):
    """The run has later steps than the one to save; the message says how to roll back."""


class CheckpointCorrupt(UnickptError, ValueError):
    """Stored bytes violate the format or do not match their digest."""


class StorageError(UnickptError, OSError):
    """A storage operation failed: permissions, a full disk, a network error."""


class OutOfMemory(UnickptError, MemoryError):
    """There is not enough memory; the message says for what, and how much."""


class ForkedProcess(UnickptError, RuntimeError):
    """This process was forked from one that had used unickpt; start it with "spawn" instead."""


class UnsupportedFormat(UnickptError, ValueError):
    """The checkpoint was written in a newer major version of the format."""


class MissingPackage(UnickptError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class PluginError(UnickptError, ImportError):
    """Another package's plug-in cannot be imported, or two packages have one of the same name."""


class HintError(UnickptError, ValueError):
    """A hint is of a wrong type or value, or the format of the checkpoint does not take it; or a
    folder holds two checkpoints, and no hint says which one is meant."""


class UnsupportedLeaf(UnickptError, TypeError):
    """A leaf of the tree cannot be stored, or its shards are not boxes."""


class LoadMismatch(UnickptError, ValueError):
    """The requested tree differs from the stored one; the message has one row per difference."""


class MergeError(UnickptError, ValueError):
    """The sources of a merge differ in names, shapes or kinds, or hold what cannot be merged."""


class CoverageError(UnickptError, ValueError):
    """The processes' parts do not fit together: fragments of an array leave a gap or overlap, or
    the processes disagree about what to save or remove."""


class ProcessFailed(UnickptError, RuntimeError):
    """Another process of the job failed during the save or load; the message includes its message.

    `refused` is True if that process did not start, because one of its earlier saves failed.
    """

    refused = False


class SaveConflict(UnickptError, RuntimeError):
    """Another job committed a checkpoint at the same path during the save."""


class SaveTimeout(UnickptError, TimeoutError):
    """A process of the job did not finish its part of the save before the deadline."""


class StateChanged(UnickptError, RuntimeError):
    """An array was changed, donated or deleted before an asynchronous save staged it; or it
    changed, although `SaveOptions.changed` says that it did not."""


class ReplicasDiffer(UserWarning):
    """A plain array differs between processes; the checkpoint stores one process's data."""


class RuleError(UnickptError, ValueError):
    """Rules do not fit the arrays they apply to, or contradict each other."""


class RuleWarning(UserWarning):
    """Rules that are valid, but may not be what was meant."""


class RuleSyntaxError(RuleError):
    """The syntax of a rule is invalid; the message shows the line with a caret."""


@contextmanager
def naming_memory(what: str) -> Iterator[None]:
    """Wraps work that needs memory: a lack of it becomes an `OutOfMemory` that names the purpose.

    Arguments:
        what: the work, and its path.
    """
    try:
        yield
    except UnickptError:
        raise
    except MemoryError as error:
        raise out_of_memory(what, error) from error


def out_of_memory(what: str, error: MemoryError) -> OutOfMemory:
    """The error for a lack of memory; see `naming_memory`."""
    if isinstance(error, OutOfMemory):  # already has the details
        return error
    result = OutOfMemory(
        f"{what}: out of memory{': ' if str(error) else ''}{error}. Process less at once, or use a "
        "smaller budget_bytes, fewer processes on this machine, or a larger limit (ulimit -v, "
        "cgroups)"
    )
    for note in getattr(error, "__notes__", ()):  # such as the array
        result.add_note(note)
    return result
