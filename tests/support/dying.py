"""Processes that kill themselves at a given step of their work."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from support.forks import Forks
from support.saving import session


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: str, when: str) -> None:
    """Has this process kill itself.

    Arguments:
        step: a function of unickpt, as `module:function` or `module.Class:method`; none if empty.
        when: "before", "during" or "after" its first call.
    """
    if not step:
        return
    name, _, attribute = step.rpartition(":")
    above, _, last = name.rpartition(".")
    module, kind = (above, last) if last[:1].isupper() else (name, "")
    holder: Any = importlib.import_module("unickpt." + module)
    holder = getattr(holder, kind) if kind else holder
    setattr(holder, attribute, _dying(getattr(holder, attribute), when))


def _dying(real: Callable[..., Any], when: str) -> Callable[..., Any]:
    def taken(*arguments: Any, **named: Any) -> Any:
        if when == "before":
            die()
        if when == "during":
            threading.Timer(0.0005, die).start()
        result = real(*arguments, **named)
        if when != "during":
            die()
        time.sleep(1)
        return result

    return taken


def start_job(
    forks: Forks,
    source: str,
    folders: Sequence[object],
    count: int,
    numbers: Sequence[object],
    doomed: int,
    dies: tuple[str, str],
) -> list[int]:
    """Starts the processes of a job, of which one kills itself; returns their ids.

    Arguments:
        forks: starts them.
        source: of each; its `ARGS` are the folders, its index, the number of processes, the
            session, these numbers and texts, and the arguments of `die_at`.
        folders, count, numbers: for it.
        doomed: the process that dies; none if negative.
        dies: when; see `die_at`.
    """
    name = session()
    return [
        forks.start(
            source, *folders, index, count, name, *numbers,
            dies[0] if index == doomed else "", dies[1],
        )
        for index in range(count)
    ]  # fmt: skip
