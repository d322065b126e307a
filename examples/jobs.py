"""Jobs of several processes, and how the demo speaks."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
JOB_TIMEOUT_S = 600


class DemoFailed(Exception):
    """Something is not as it should be; the message says what."""


class JobFailed(DemoFailed):
    """A process of a job failed."""


def headline(number: int, text: str) -> None:
    print(f"\n{number}. {text}", flush=True)


def say(text: str) -> None:
    print(f"   {text}", flush=True)


def run_job(
    directory: Path,
    processes: int,
    script: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    look: Callable[[], None] = lambda: None,
) -> str:
    """Runs a script of this folder in several processes, as torchrun would.

    Arguments:
        directory: for their logs.
        look: called again and again until they are done.

    Returns:
        What the first process printed.

    Raises:
        JobFailed: a process failed, or all took too long; the message holds what they wrote.
    """
    shared = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        # XLA's CPU client has as many threads as NPROC says, else as there are cores. Collectives
        # over gloo block threads: with fewer of them than collectives under way, a job hangs.
        "NPROC": "32",
        **(environment or {}),
    }
    logs = [directory / f"process_{rank}.log" for rank in range(processes)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, str(HERE / script), *arguments],
                    env={**shared, "RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            running.append(process)
        _wait(running, look)
        return logs[0].read_text()
    except JobFailed as error:
        wrote = "".join(f"\n--- {log.name} ---\n{log.read_text()}" for log in logs)
        raise JobFailed(f"{script}: {error}{wrote}") from None
    finally:
        for process in running:
            process.kill()
            process.wait()


def _wait(running: list[subprocess.Popen[bytes]], look: Callable[[], None]) -> None:
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while True:
        codes = [process.poll() for process in running]
        look()
        if all(code == 0 for code in codes):
            return
        if any(codes):
            time.sleep(2)  # so that the others can say what they make of it
            raise JobFailed(f"exit codes {[process.poll() for process in running]}")
        if time.monotonic() > deadline:
            raise JobFailed(f"not done after {JOB_TIMEOUT_S} s")
        time.sleep(0.05)


def free_port() -> int:
    """A port of the loopback interface on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
