"""At exit: waits for unfinished saves; exits with status 1 if an error was never raised."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from unickpt.errors import ProcessFailed


@dataclass(frozen=True)
class Failure:
    """An error in the background.

    Arguments:
        what: the operation that failed.
        error: why it failed.
    """

    what: str
    error: BaseException


# --- when the program ends -----------------------------------------------------------------------

unfinished: set[object] = set()
"""Saves that have not ended."""
unraised: list[Failure] = []


def _exit_if_unraised() -> None:
    """Ends the program with status 1, if an error was never raised.

    Python offers no other way to change the exit status this late. Handlers that were registered
    before this module was imported are not called.
    """
    if not unraised:
        return
    for failure in unraised:
        kind = type(failure.error).__name__
        print(
            f"unickpt: {failure.what} failed, and its result was not requested:\n"
            f"{kind}: {failure.error}",
            file=sys.stderr,
        )
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be closed, or None
            stream.flush()
    os._exit(1)


def exit_child() -> None:
    """The same in a process of `multiprocessing`, which does not call `atexit` handlers."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return
    if not threading.main_thread().is_alive() and not unfinished:
        _exit_if_unraised()


atexit.register(_exit_if_unraised)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=unfinished.clear)
    os.register_at_fork(after_in_child=unraised.clear)


_log = logging.getLogger("unickpt")


class BackgroundErrors:
    """The errors in the background of one queue that were not raised yet."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []

    def add(self, what: str, error: BaseException) -> Failure:
        """Keeps an error until it can be raised.

        Arguments:
            what: the operation that failed.
            error: why it failed.
        """
        _log.error("%s failed: %s", what, error)
        failure = Failure(what, error)
        self._failures.append(failure)
        unraised.append(failure)
        return failure

    def raise_first(self) -> None:
        """Raises the first error that was not raised before, if any."""
        if self._failures:
            self.raise_these(self._failures)

    def raise_unless_refused(self) -> None:
        """As `raise_first`, except for saves that failed only because another process refused
        them; otherwise two processes could refuse each other's saves forever."""
        errors = [failure.error for failure in self._failures]
        if not all(isinstance(error, ProcessFailed) and error.refused for error in errors):
            self.raise_first()

    def raise_these(self, failures: Sequence[Failure]) -> NoReturn:
        """Raises the first error, which names the others; forgets all of them."""
        first, *others = failures
        for failure in list(failures):
            self.forget(failure)
        notes = [f"unickpt: {first.what} failed with this error, in the background"]
        notes += [f"unickpt: {other.what} failed too: {other.error}" for other in others]
        for note in notes:
            if note not in getattr(first.error, "__notes__", ()):
                first.error.add_note(note)
        raise first.error

    def forget(self, failure: Failure | None) -> None:
        """Does not raise an error any more: its caller has it."""
        for failures in (self._failures, unraised):
            if failure in failures:
                failures.remove(failure)
