"""Real processes by the dozen: one that has imported unickpt forks the others, in milliseconds.

Each has the environment of its caller when it starts, as a process of its own would.

Run as a script this is that process: it takes a line of JSON per command from its standard input.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
# unickpt, and what it imports at the first use of `Checkpointer`, `verify`, `copy` and rules.
IMPORTS = (
    "unickpt",
    "unickpt.loading.ruled_view",
    "unickpt.runs.checkpointer",
    "unickpt.tools.copying",
    "unickpt.tools.verification",
)


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

    Arguments:
        folder: where their output goes.
        imports: modules that take long to import, besides unickpt.
        env: further environment variables of all processes.
    """

    def __init__(self, folder: Path, *imports: str, env: Mapping[str, str] | None = None) -> None:
        self._folder, self._env = folder, dict(env or {})
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment(),
        )
        self._outputs: dict[int, Path] = {}

    def start(self, source: str, *arguments: object) -> int:
        """Starts a process and returns its id."""
        out = self._folder / f"out_{len(self._outputs)}_{time.monotonic_ns()}"
        env = self._environment()
        pid: int = self._ask(start=source, arguments=arguments, out=str(out), env=env)
        self._outputs[pid] = out
        return pid

    def kill(self, pid: int) -> None:
        """Kills a process that has not been waited for, ended or not."""
        os.kill(pid, signal.SIGKILL)

    def said(self, pid: int) -> str:
        """What a process has written until now."""
        out = self._outputs[pid]
        return out.read_text() if out.exists() else ""

    def runs(self, pid: int) -> bool:
        """Whether a process that has not been waited for still runs."""
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"

    def wait(self, pid: int) -> Ended:
        """Waits for the end of a process; kills it if that takes too long."""
        deadline = time.monotonic() + LIMIT_S
        while (code := self._ask(poll=pid)) is None:
            if time.monotonic() > deadline:
                self.kill(pid)
                raise AssertionError(f"a process hangs; it said:\n{self.said(pid)}")
            time.sleep(0.005)
        said = self.said(pid)
        del self._outputs[pid]
        return Ended(code, said)

    def wait_all(self, pids: list[int]) -> list[Ended]:
        return [self.wait(pid) for pid in pids]

    def close(self) -> None:
        for pid in self._outputs:
            self.kill(pid)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self._env}

    def _ask(self, **command: Any) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


def _serve() -> None:
    for module in (*IMPORTS, *sys.argv[1:]):
        importlib.import_module(module)
    for line in sys.stdin:
        command = json.loads(line)
        if "poll" in command:
            pid, status = os.waitpid(command["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                _run(command)
        print(json.dumps(answer), flush=True)


def _run(command: dict[str, Any]) -> None:
    code = 1
    os.environ.clear()
    os.environ.update(command["env"])
    try:
        out = os.open(command["out"], os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        exec(compile(command["start"], "<job>", "exec"), {"ARGS": command["arguments"]})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
