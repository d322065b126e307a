"""Real processes that run a Python source text."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.forked import Forked

PROCESS_TIMEOUT_S = 120
_KILLED_TIMEOUT_S = 20


def free_port() -> int:
    """Below those that the system gives to outgoing connections, which may take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


class Processes:
    """Real processes that run a Python source text; all are gone when the test ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def _script(self, source: str) -> Path:
        script = self.folder / f"script_{len(self.started)}.py"
        script.write_text(source)
        return script

    def start(
        self, source: str, *arguments: object, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts an interpreter."""
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(self._script(source)), *map(str, arguments)],
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def forked(
        self,
        source: str,
        *arguments: object,
        of: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> Any:
        """Starts a process that has imported what takes long, and else is like an interpreter.

        Arguments:
            of: what it has imported: names in `support.forked.PRELOADED`, such as "jax".
            env: further environment variables. What is read when a module is imported, such as
                `JAX_PLATFORMS`, comes too late; `start` is for those, and for what is about
                interpreters: how they begin and end, and what they import.
        """
        script = self._script(source)
        process: Any = Forked(script, [*map(str, arguments)], {**os.environ, **(env or {})}, of)
        self.started.append(process)
        return process

    def torch(
        self, world: int, source: str, *arguments: object, env: dict[str, str] | None = None
    ) -> list[subprocess.Popen[str]]:
        """Starts gloo ranks; the source finds them through `init_process_group("gloo")`."""
        port = str(free_port())
        ranks: list[Any] = []
        for rank in range(world):
            job = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            }
            job |= env or {}
            ranks.append(self.forked(source, *arguments, of=("torch",), env=job))
        return ranks

    def jax(
        self, world: int, devices: int, source: str, *arguments: object
    ) -> list[subprocess.Popen[str]]:
        """Starts `jax.distributed` processes, already initialised when the source runs."""
        head = (
            "import jax\n"
            "jax.config.update('jax_cpu_collectives_implementation', 'gloo')\n"
            "import os\n"
            "jax.distributed.initialize(os.environ['JAX_AT'], int(os.environ['JAX_WORLD']),"
            " int(os.environ['JAX_ID']))\n"
        )
        at = f"127.0.0.1:{free_port()}"
        return [
            self.forked(
                head + source,
                *arguments,
                of=("jax",),
                env={
                    "JAX_AT": at,
                    "JAX_WORLD": str(world),
                    "JAX_ID": str(process),
                    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                    "NPROC": "32",  # XLA's threads; gloo's collectives can block all of a few
                },
            )
            for process in range(world)
        ]

    def finish(
        self, processes: list[subprocess.Popen[str]], timeout_s: float = PROCESS_TIMEOUT_S
    ) -> list[str]:
        """Waits for processes that must succeed, and returns what each printed."""
        outputs = []
        for number, process in enumerate(processes):
            out, err = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, f"process {number} failed:\n{out}\n{err}"
            outputs.append(out)
        return outputs

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            with suppress(subprocess.TimeoutExpired):  # a process of its own may hold its pipes
                process.communicate(timeout=_KILLED_TIMEOUT_S)
