"""Processes that are forked from servers that have imported a framework, each like a `Popen`.

Importing torch or JAX takes a process seconds of a core. What it does at import time is the same in
all of them; what differs, they get before they run: environment, arguments, folder, output. All
else is as in an interpreter of their own: a server runs no thread and starts no backend, so each
process has its own, may join others, die and leave behind what it likes.

Run as a script this is a server. It takes orders from the socket on its standard input.
"""

from __future__ import annotations

import array
import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What a server imports, by the frameworks that its processes use.
PRELOADED = {
    # unickpt, and what it imports at the first use of `Checkpointer`, `verify`, `copy`, rules and
    # `SaveOptions(base=...)`; pytest, since sources import from test modules.
    "": (
        "pytest",
        "support.dying",
        "support.saving",
        "unickpt",
        "unickpt.adapters.numpy",
        "unickpt.backends.file",
        "unickpt.format.writers",
        "unickpt.rules.view",
        "unickpt.runs.checkpointer",
        "unickpt.plugins.incremental",
        "unickpt.tools.copying",
        "unickpt.reading.verification",
        "unickpt.types",
    ),
    "grain": ("grain", "unickpt.adapters.jax"),
    "jax": ("jax.experimental.multihost_utils", "unickpt.adapters.jax"),
    "orbax": ("orbax.checkpoint", "unickpt.adapters.jax", "unickpt.integrations.orbax"),
    "torch": (
        "torch._dynamo",  # imported by torch at the first use of DTensors and of FSDP2
        "torch._functorch.aot_autograd",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "unickpt.adapters.torch",
    ),
}
ORDER_BYTES = 1 << 17  # more than the environment of any process


class Server:
    """A process that has imported modules and forks others; it ends with this one.

    Arguments:
        modules: what it imports.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *modules],
            stdin=theirs,
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()
        atexit.register(self.close, os.getpid())

    def close(self, owner: int) -> None:
        """Ends the server, and what it has started."""
        if os.getpid() == owner:  # not in a fork of it
            self._orders.close()
            self.process.wait()

    def start(self, order: Mapping[str, Any], outputs: Sequence[int]) -> Started:
        """Starts a process.

        Arguments:
            order: `env` and `folder`, and either `argv`, of a script, or a `source` and its `ARGS`.
            outputs: the files that are its standard output and standard error.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = array.array("i", [theirs.fileno(), *outputs])
        with self._lock, theirs:
            self._orders.sendmsg(
                [json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
            )
        told = ours.recv(100)
        assert told, f"the server of processes has ended: {self.process.wait()}"
        return Started(int(told), ours)


class Started:
    """A process that a server has forked."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid, self._end = pid, end
        self.returncode: int | None = None

    def ended(self, timeout: float | None = None) -> int | None:
        """Its exit code (negative: the signal that killed it); None if it runs for longer."""
        if self.returncode is None:
            self._end.settimeout(timeout)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                told = self._end.recv(100)
                # None if the server was killed, and with it all that it had started.
                self.returncode = int(told) if told else -signal.SIGKILL
                self._end.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.ended(0) is None:
            # One that has just ended is gone before the server has told its exit code.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


_servers: dict[tuple[str, ...], Server] = {}


def server(*modules: str) -> Server:
    """The server that has imported these, of which a process has one."""
    known = _servers.get(modules)
    if known is None or known.process.poll() is not None:
        known = _servers[modules] = Server(modules)
    return known


def servers() -> list[int]:
    """The ids of all servers."""
    return [each.process.pid for each in _servers.values()]


class Forked:
    """A process that runs a script.

    Arguments:
        script: its path.
        arguments: of the script.
        env: its whole environment.
        frameworks: names in `PRELOADED`, of what it has imported when it begins.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        env: Mapping[str, str],
        frameworks: Sequence[str] = ("torch",),
    ) -> None:
        pipes = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (open(fd) for fd, _ in pipes)  # noqa: SIM115 - closed by `communicate`
        self.args = [str(script), *arguments]
        order = {"argv": self.args, "env": dict(env), "folder": os.getcwd()}
        modules = [name for each in ("", *sorted(frameworks)) for name in PRELOADED[each]]
        self._started = server(*modules).start(order, [fd for _, fd in pipes])
        self.pid = self._started.pid
        for _, fd in pipes:
            os.close(fd)

    @property
    def returncode(self) -> int | None:
        return self._started.returncode

    def poll(self) -> int | None:
        return self._started.ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._started.ended(timeout)
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
        self._started.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# --- in the server --------------------------------------------------------------------------------


def _serve(modules: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process handles it
    orders = socket.socket(fileno=os.dup(0))
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):  # a tree without plug-ins, of `make core`
            importlib.import_module(module)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # the collector of a process need not write to all that it has from here
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    selector.register(ended, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if ended in ready:
            os.read(ended, 1 << 16)
            _reap(running)
        if orders in ready and not _take(orders, running, (ended, wake)):
            break
    for pid in running:  # the tests' process is gone
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _reap(running: dict[int, socket.socket]) -> None:
    """Tells how processes ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as told, contextlib.suppress(BrokenPipeError):
            told.send(str(os.waitstatus_to_exitcode(status)).encode())


def _take(orders: socket.socket, running: dict[int, socket.socket], own: tuple[int, int]) -> bool:
    """Follows an order; False if there will be no more."""
    data, files, _, _ = socket.recv_fds(orders, ORDER_BYTES, 3)
    if not data:
        return False
    told = socket.socket(fileno=files[0])
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in (orders, told, *running.values()):
            each.close()
        for fd in own:
            os.close(fd)
        _become(json.loads(data), files[1:])
    running[pid] = told
    for fd in files[1:]:
        os.close(fd)
    told.send(str(pid).encode())
    return True


# --- in a process ---------------------------------------------------------------------------------


def _become(order: Mapping[str, Any], outputs: Sequence[int]) -> None:
    """Does what the order says, and ends."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, output in enumerate((nothing, *outputs)):
        os.dup2(output, target)
        os.close(output)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)  # noqa: SIM115
    code = 1
    try:
        _prepare(order)
        if "source" in order:
            exec(compile(order["source"], "<job>", "exec"), {"ARGS": order["ARGS"]})
        else:
            _run(order["argv"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    if "source" not in order:
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter that ends
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _prepare(order: Mapping[str, Any]) -> None:
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["env"])
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    sys.modules["numpy"].random.seed()  # `random` does it by itself
    warnings.simplefilter("ignore")


def _run(argv: Sequence[str]) -> None:
    """Does what `python -W ignore script arguments...` does."""
    script, sys.argv = argv[0], list(argv)
    first = str(Path(script).parent)
    path = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:0] = [each for each in (first, *path) if each not in sys.path]
    main = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = script, builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    _serve(sys.argv[1:])
