"""Real processes by the dozen: one that has imported unickpt forks the others, in milliseconds.

Each has the environment of its caller when it starts, as a process of its own would.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.forked import PRELOADED, Started, server

LIMIT_S = 60.0


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal that killed it) and its output."""

    code: int
    out: str

    @property
    def last(self) -> Any:
        """Its last line, as JSON."""
        return json.loads(self.out.splitlines()[-1])


class Forks:
    """Starts processes that run a Python source text with `ARGS` defined.

    They end as with `os._exit`: nobody waits for their threads, and what they registered with
    `atexit` does not run.

    Arguments:
        folder: where their output goes.
        imports: modules that take long to import, besides unickpt.
        env: further environment variables of all processes.
    """

    def __init__(self, folder: Path, *imports: str, env: Mapping[str, str] | None = None) -> None:
        self._folder, self._env = folder, dict(env or {})
        self._imports = (*PRELOADED[""], *imports)
        self._running: dict[int, tuple[Started, Path]] = {}
        self._count = 0

    def start(self, source: str, *arguments: object) -> int:
        """Starts a process and returns its id."""
        out = self._folder / f"out_{self._count}_{time.monotonic_ns()}"
        self._count += 1
        order = {
            "source": source,
            "ARGS": arguments,
            "env": {**os.environ, **self._env},
            "folder": os.getcwd(),
        }
        with open(out, "w") as file:
            started = server(*self._imports).start(order, [file.fileno()] * 2)
        self._running[started.pid] = started, out
        return started.pid

    def kill(self, pid: int) -> None:
        """Kills a process that has not been waited for, ended or not."""
        self._running[pid][0].send_signal(signal.SIGKILL)

    def said(self, pid: int) -> str:
        """What a process has written until now."""
        return self._running[pid][1].read_text()

    def runs(self, pid: int) -> bool:
        """Whether a process that has not been waited for still runs."""
        return self._running[pid][0].ended(0) is None

    def wait(self, pid: int) -> Ended:
        """Waits for the end of a process; kills it if that takes too long."""
        code = self._running[pid][0].ended(LIMIT_S)
        if code is None:
            self.kill(pid)
            raise AssertionError(f"a process hangs; it said:\n{self.said(pid)}")
        said = self.said(pid)
        del self._running[pid]
        return Ended(code, said)

    def wait_all(self, pids: list[int]) -> list[Ended]:
        return [self.wait(pid) for pid in pids]

    def close(self) -> None:
        """Kills what has not been waited for."""
        for started, _ in self._running.values():
            started.send_signal(signal.SIGKILL)
            started.ended(LIMIT_S)
        self._running.clear()


def kills(
    coordinators_steps: Sequence[tuple[str, str]], steps: Sequence[tuple[str, str]]
) -> pytest.MarkDecorator:
    """Jobs of one or two processes, of which one is killed at each of its steps.

    A process alone is the coordinator of a job of one: it is killed at all steps by `make soak`.

    Arguments:
        coordinators_steps: those of process 0.
        steps: those of any other.
    """
    return pytest.mark.parametrize(
        ("count", "doomed", "steps"),
        [
            (1, 0, [coordinators_steps[0], *coordinators_steps[-3:]]),
            pytest.param(1, 0, coordinators_steps, marks=pytest.mark.slow),
            (2, 0, coordinators_steps),
            (2, 1, steps),
        ],
        ids=["1-0", "1-0-all", "2-0", "2-1"],
    )
