"""Errors in the background: kept until they are raised, at the latest by the program's exit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

from unickpt.errors import ProcessFailed
from unickpt.saving.exit_status import Failure, unraised

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
