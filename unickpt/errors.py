"""Every error unickpt raises; each also derives from the built-in that a person would catch."""

from unickpt.quoting import shortened

# What is stored, and what a server answers, may be long; nobody reads more of it than this.
_MOST_OF_LINE = 1000


class UnickptError(Exception):
    """Base of all errors raised on purpose by unickpt. No line of a message is endless."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_readable(a) if isinstance(a, str) else a for a in args))


def _readable(text: str) -> str:
    if len(text) <= _MOST_OF_LINE:
        return text
    return "\n".join(shortened(line, _MOST_OF_LINE) for line in text.split("\n"))


class InvalidPath(UnickptError, ValueError):
    """The path or URL names no storage that unickpt can use."""


class CheckpointNotFound(UnickptError, FileNotFoundError):
    """No committed checkpoint exists at the path."""


class CheckpointReplaced(CheckpointNotFound):
    """The checkpoint was replaced or removed, by a save or a person, while it was being read."""


class CheckpointExists(UnickptError, FileExistsError):
    """The destination is taken: by a committed checkpoint, or by files that are not ours."""


class LaterStepsExist(UnickptError, FileExistsError):
    """The run has later steps than the one to be saved; the message tells how to go back."""


class CheckpointCorrupt(UnickptError, ValueError):
    """Stored bytes contradict the format or their digest."""


class StorageError(UnickptError, OSError):
    """The storage refused or failed: permissions, a full disk, a network error."""


class ForkedProcess(UnickptError, RuntimeError):
    """This process was forked from one that had used unickpt; start it by "spawn" instead."""


class UnsupportedFormat(UnickptError, ValueError):
    """The checkpoint was written in a newer major version of the format."""


class UnsupportedLeaf(UnickptError, TypeError):
    """The tree holds something that cannot be stored, or whose layout has no boxes."""


class LoadMismatch(UnickptError, ValueError):
    """What is asked for differs from what is stored; the message holds one row per difference."""


class CoverageError(UnickptError, ValueError):
    """The fragments of the processes leave a hole in an array, or overlap."""


class ProcessFailed(UnickptError, RuntimeError):
    """Another process of the job failed during the save, or the load; the message is its message.

    `refused` is true where that process did not even begin, because an earlier save of its failed.
    """

    refused = False


class SaveConflict(UnickptError, RuntimeError):
    """Another job committed a checkpoint at the same path meanwhile."""


class SaveTimeout(UnickptError, TimeoutError):
    """A process of the job did not finish its part of the save before the deadline."""


class StateChanged(UnickptError, RuntimeError):
    """An array was changed, donated or deleted before an asynchronous save had staged it."""


class ReplicasDiffer(UserWarning):
    """A plain array was not the same on all processes; the checkpoint has it from one of them."""


class RuleError(UnickptError, ValueError):
    """Rules do not fit the arrays that they are to relate, or each other."""


class RuleWarning(UserWarning):
    """Rules that may not be what was meant, although nothing speaks against them."""


class RuleSyntaxError(RuleError):
    """The text of a rule is wrong; the message shows the line with a caret."""
