"""Processes that are forked from a server that has imported torch, with the interface of `Popen`.

Importing torch takes a rank two to three seconds of a core. What a rank does at import time is the
same for all of them; what differs, they get before they run: environment, arguments, output.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

PRELOADED = (
    "numpy",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "unickpt.adapters.torch",
)


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.forked", *PRELOADED])
    return context


class Forked:
    """A process that runs a script.

    Arguments:
        script: its path.
        arguments: of the script.
        env: its whole environment.
    """

    def __init__(self, script: Path, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        pipes = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (open(fd) for fd, _ in pipes)  # noqa: SIM115 - closed by `communicate`
        self._process = _context().Process(
            target=_Script(script, arguments, dict(env), [fd for _, fd in pipes])
        )
        self._process.start()
        for _, fd in pipes:
            os.close(fd)
        pid = self._process.pid
        assert pid is not None
        self.pid, self.args = pid, [str(script), *arguments]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        found: dict[int, str] = {}
        pipes = [pipe for pipe in (self.stdout, self.stderr) if not pipe.closed]

        def read(at: int) -> None:
            found[at] = pipes[at].read()
            pipes[at].close()

        threads = [
            threading.Thread(target=read, args=(at,), daemon=True) for at in range(len(pipes))
        ]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join()
        return found.get(0, ""), found.get(1, "")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # One that has just ended is gone before the server has told its exit code.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Script:
    """What the process does: as `python -W ignore script arguments...`."""

    def __init__(
        self, script: Path, arguments: Sequence[str], env: dict[str, str], outputs: Sequence[Any]
    ) -> None:
        self._script, self._arguments, self._env, self._outputs = script, arguments, env, outputs

    def __reduce__(self) -> Any:  # while it is sent to the process
        outputs = [reduction.DupFd(fd) for fd in self._outputs]
        return _Script, (self._script, self._arguments, self._env, outputs)

    def __call__(self) -> None:
        for target, output in enumerate(self._outputs, 1):
            fd = output.detach()
            os.dup2(fd, target)
            os.close(fd)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)  # noqa: SIM115
        _run(self._script, self._arguments, self._env)


def _run(script: Path, arguments: Sequence[str], env: dict[str, str]) -> None:
    multiprocessing.set_start_method(None, force=True)  # of the script's own processes
    os.environ.clear()
    os.environ.update(env)
    torch = sys.modules["torch"]
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", 1)))
    warnings.simplefilter("ignore")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter that ends
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
