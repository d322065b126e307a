"""Progress of long saves and loads: a callback with byte counts, or a bar of tqdm.

This is the only module that imports tqdm, and only for `progress=True`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from unickpt.errors import MissingPackage
from unickpt.threads import is_synchronous

_log = logging.getLogger("unickpt")

ProgressFunction = Callable[[int, int], None]
"""Called with the bytes that are done and those in total."""
Progress = ProgressFunction | bool | None
"""The type of `progress=`: True shows a bar on process 0."""


def check_progress(progress: object) -> None:
    """Checks the value of an option or argument `progress`.

    Raises:
        MissingPackage: it is True, but tqdm is not installed.
        TypeError: it is neither a bool nor a function.
    """
    if progress is True and find_spec("tqdm") is None:
        raise MissingPackage(
            "progress=True needs tqdm, which is not installed: pip install 'unickpt[progress]', "
            "or give a function progress(done, total)"
        )
    if not (progress is None or isinstance(progress, bool) or is_synchronous(progress)):
        raise TypeError(
            f"progress is True or a function, not async, of bytes done and in total, not of type "
            f"{type(progress).__name__}"
        )


@contextmanager
def reporting(progress: Progress, what: str, process: int = 0) -> Iterator[ProgressFunction]:
    """A function to call with the bytes done and in total; shows or forwards them.

    Its first error is logged; errors affect nothing else. A bar is removed if the work fails, and
    stays when it is done.

    Arguments:
        progress: as users give it.
        what: the label of the bar.
        process: the number of this process.

    Raises:
        MissingPackage, TypeError: see `check_progress`.
    """
    check_progress(progress)
    if not progress or (progress is True and not (process == 0 and _has_viewer())):
        yield nothing
        return
    if progress is not True:
        yield _Guarded(progress)
        return
    bar = _Bar(what)
    report = _Guarded(bar.show)
    try:
        yield report
    except BaseException:
        bar.close(done=False)
        raise
    bar.close(done=True)


def nothing(done: int, total: int) -> None:
    """Reports nothing."""


class _Guarded:
    """Calls a function until it fails."""

    def __init__(self, report: ProgressFunction) -> None:
        self._report = report

    def __call__(self, done: int, total: int) -> None:
        try:
            self._report(done, total)
        except Exception:
            self._report = nothing
            _log.exception("progress cannot be shown any more; the work continues")


def _has_viewer() -> bool:
    """Whether a bar can be seen: on a terminal, or in a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and "IPKernelApp" in shell.config:
        return True
    return sys.stderr is not None and sys.stderr.isatty()


class _Bar:
    """A bar of tqdm; appears with the first bytes."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None

    def show(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm.auto import tqdm

            class Bar(tqdm):  # type: ignore[misc]
                monitor_interval = 0  # no thread that outlives it

            self._bar = Bar(total=total, desc=self._what, unit="B", unit_scale=True)
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self, *, done: bool) -> None:
        if self._bar is None:
            return
        try:
            self._bar.leave = done
            self._bar.close()
        except Exception:
            _log.exception("the progress bar could not be closed")
