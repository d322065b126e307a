"""At exit: waits for unfinished saves; exits with status 1 if an error was never raised."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass


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
