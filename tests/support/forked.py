"""Processes that are forked from servers that have imported a framework, each like a `Popen`.

Importing torch or JAX takes a process seconds of a core. What it does at import time is the same in
all of them; what differs, they get before they run: environment, arguments, folder, output. All
else is as in an interpreter of their own: a server runs no thread and starts no backend, so each
process has its own, may join others, die and leave behind what it likes.

Run as a script this is a server. Those who give it orders connect to its standard input. Or, with
the arguments of an interpreter, it is a worker of pytest-xdist: see `worker`.
"""

from __future__ import annotations

import array
import atexit
import builtins
import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What a server imports, by the frameworks that its processes use.
PRELOADED = {
    # unickpt, and what it imports at the first use of what tests do in many processes; pytest,
    # since sources import from test modules.
    "": (
        "encodings.idna",  # of an address
        "http.server",
        "hypothesis",
        "numpy.random",
        "pytest",
        "support.data_ranks",
        "support.dying",
        "support.node_job",
        "support.saving",
        "unickpt",
        "unickpt.adapters.numpy",
        "unickpt.backends.file",
        "unickpt.backends.s3",
        "unickpt.commit.awaited_processes",
        "unickpt.commit.differing_replicas",
        "unickpt.commit.participant",
        "unickpt.commit.stand_ins",
        "unickpt.commit.writer_choice",
        "unickpt.data",
        "unickpt.format.borrowed_chunks",
        "unickpt.format.writer_registry",
        "unickpt.frameworks.grown_state",
        "unickpt.loading.mismatch",
        "unickpt.loading.suggestions",
        "unickpt.plugins.compress",
        "unickpt.plugins.exchange",
        "unickpt.plugins.experts",
        "unickpt.plugins.incremental",
        "unickpt.plugins.merge",
        "unickpt.plugins.nodes",
        "unickpt.plugins.parity",
        "unickpt.plugins.quantize",
        "unickpt.plugins.seal",
        "unickpt.plugins.weights",
        "unickpt.reading.verification",
        "unickpt.rules.view",
        "unickpt.runs.checkpointer",
        "unickpt.saving.fingerprints",
        "unickpt.storage.restorers",
        "unickpt.tools.copying",
        "unickpt.tools.partial_copies",
        "unickpt.types",
    ),
    "grain": ("grain", "unickpt.adapters.jax"),
    "jax": (
        "jax.experimental.multihost_utils",
        "jaxlib.mlir.dialects.mhlo",  # of the first programs
        "unickpt.adapters.jax",
    ),
    "keras-jax": ("support.keras_on_jax", "unickpt.adapters.jax"),
    "keras-torch": ("support.keras_on_torch", "unickpt.adapters.torch"),
    "orbax": ("orbax.checkpoint", "unickpt.adapters.jax", "unickpt.integrations.orbax"),
    "tests": (  # all that test modules import
        "pytest",
        "jsonschema",
        "tensorboard.compat.proto.event_pb2",
        "lightning",
        "flax",
        "orbax.checkpoint",
        "transformers.modeling_flax_pytorch_utils",
    ),
    "torch": (
        "torch._dynamo",  # imported by torch at the first use of DTensors and of FSDP2
        "torch._functorch.aot_autograd",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torchdata.stateful_dataloader",
        "unickpt.adapters.torch",
    ),
}
ORDER_BYTES = 1 << 17  # more than the environment of any process


class Server:
    """A process that has imported modules and forks others; it ends with the last that uses it.

    The workers of a run share it: all processes that have the same `UNICKPT_TESTS`, a folder.

    Arguments:
        modules: what it imports.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        run = os.environ.get("UNICKPT_TESTS", str(os.getpid()))
        part = _part_of(modules)
        parent = server(*part) if part else None  # before the lock, which that takes, too
        self._name = "\0" + hashlib.sha256(repr((run, modules)).encode()).hexdigest()
        self._lock = threading.Lock()
        self._orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lock_folder = os.environ.get("UNICKPT_TESTS", tempfile.gettempdir())
        with open(Path(lock_folder, f"servers-{os.getuid()}.lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # nor does one end meanwhile
            try:
                self._orders.connect(self._name)
            except ConnectionRefusedError:
                self._begin(parent, modules, lock.name)
                self._orders.connect(self._name)
        atexit.register(self.close, os.getpid())

    def _begin(self, parent: Server | None, modules: Sequence[str], lock: str) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        env = {**os.environ, "PYTHONPATH": path}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as theirs:
            theirs.bind(self._name)
            theirs.listen(64)
            if parent is not None:
                order = {"lock": lock, "modules": modules, "env": env, "folder": os.getcwd()}
                parent.start(order, [2, 2], theirs.fileno()).forget()
                return
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, lock, *modules],
                stdin=theirs,
                stdout=2,  # that of a worker is how it talks to pytest
                env=env,
            )
        _begun.append(process)  # it may outlive this one, which does not wait for it

    def runs(self) -> bool:
        """Whether it takes orders."""
        try:
            return self._orders.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self, owner: int) -> None:
        """Gives no more orders; what this process has started is killed."""
        if os.getpid() == owner:  # not in a fork of it
            self._orders.close()

    def start(
        self, order: Mapping[str, Any], outputs: Sequence[int], stdin: int | None = None
    ) -> Started:
        """Starts a process.

        Arguments:
            order: `env` and `folder`, and either `argv`, of a script or from "-c" on, or a `source`
                and its `ARGS`, or the `modules` and the `lock` of another server.
            outputs: the files that are its standard output and standard error.
            stdin: the file that is its standard input; None: it is empty.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdins = [] if stdin is None else [stdin]
        files = array.array("i", [theirs.fileno(), *stdins, *outputs])
        with self._lock, theirs:
            self._orders.sendmsg(
                [json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
            )
        pid = ours.recv(100)
        assert pid, "the server of processes has ended"
        return Started(int(pid), ours)


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
                report = self._end.recv(100).split()
                # None if the server was killed, and with it all that it had started.
                self.returncode = int(report[0]) if report else -signal.SIGKILL
                _computed.append(float(report[1]) if report else 0.0)
                self._end.close()
        return self.returncode

    def forget(self) -> None:
        """Does not wait for its end."""
        self._end.close()

    def send_signal(self, number: int) -> None:
        if self.ended(0) is None:
            # One that has just ended is gone before the server has told its exit code.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _part_of(modules: Sequence[str]) -> tuple[str, ...]:
    """What the server has imported of which one with these modules is forked; else empty."""
    for frameworks in (("torch",), ("jax",), ()):
        part = tuple(module for each in ("", *frameworks) for module in PRELOADED[each])
        if {*part} < {*modules}:
            return part
    return ()


_servers: dict[tuple[str, ...], Server] = {}
_begun: list[subprocess.Popen[bytes]] = []
_computed: list[float] = []


def server(*modules: str) -> Server:
    """The server that has imported these, of which a run has one."""
    known = _servers.get(modules)
    if known is None or not known.runs():
        known = _servers[modules] = Server(modules)
    return known


def computed() -> float:
    """The CPU seconds of the processes that servers started for this one and that have ended."""
    return sum(_computed)


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


def _serve(lock: str, modules: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process handles it
    listener = socket.socket(fileno=os.dup(0))
    gc.disable()  # what modules define stays
    for module in modules:
        # What is not there, as plug-ins in `make core`, or fails, does so again where it is used.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # the collector of a process need not write to all that it has from here
    gc.enable()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # those of modules, as torch's, take each process 40 ms at its end
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, tuple[socket.socket | None, socket.socket]] = {}
    users: list[socket.socket] = []
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(ended, selectors.EVENT_READ)
    while True:
        ready: list[Any] = [key.fileobj for key, _ in selector.select()]
        if ended in ready:
            os.read(ended, 1 << 16)
            _reap(running)
        if listener in ready:
            users.append(listener.accept()[0])
            selector.register(users[-1], selectors.EVENT_READ)
        for user in set(users).intersection(ready):
            if not _take(user, running, (ended, wake), (listener, *users)):
                _leave(user, running)
                selector.unregister(user)
                users.remove(user)
                user.close()
                if not users:
                    _end_if_unused(listener, lock)


def _end_if_unused(listener: socket.socket, lock: str) -> None:
    """Ends, unless somebody has just joined."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):  # the run is over
            fcntl.flock(stack.enter_context(open(lock)), fcntl.LOCK_EX)
        if not select.select([listener], [], [], 0)[0]:
            os._exit(0)


def _leave(
    user: socket.socket, running: dict[int, tuple[socket.socket | None, socket.socket]]
) -> None:
    """Kills what a tests' process that is gone had started, but for servers, which others use."""
    for pid, (starter, _) in running.items():
        if starter is user:
            os.kill(pid, signal.SIGKILL)


def _reap(running: dict[int, tuple[socket.socket | None, socket.socket]]) -> None:
    """Tells how processes ended, and what they computed."""
    while running:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if not pid:
            return
        report = f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime}"
        with running.pop(pid)[1] as told, contextlib.suppress(BrokenPipeError):
            told.send(report.encode())


def _take(
    user: socket.socket,
    running: dict[int, tuple[socket.socket | None, socket.socket]],
    own: Sequence[int],
    sockets: Sequence[socket.socket],
) -> bool:
    """Follows an order; False if there will be no more."""
    data, files, _, _ = socket.recv_fds(user, ORDER_BYTES, 4)
    if not data:
        return False
    told, order = socket.socket(fileno=files[0]), json.loads(data)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in (told, *sockets, *(end for _, end in running.values())):
            each.close()
        for fd in own:
            os.close(fd)
        _become(order, files[1:])
    running[pid] = None if "modules" in order else user, told
    for fd in files[1:]:
        os.close(fd)
    told.send(str(pid).encode())
    return True


# --- in a process ---------------------------------------------------------------------------------


def _become(order: Mapping[str, Any], files: Sequence[int]) -> None:
    """Does what the order says, and ends."""
    if len(files) < 3:
        files = [os.open(os.devnull, os.O_RDONLY), *files]
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)  # noqa: SIM115
    code = 1
    try:
        _prepare(order)
        if "modules" in order:
            sys.path[:] = order["env"]["PYTHONPATH"].split(os.pathsep)
            _serve(order["lock"], order["modules"])
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
    """Does what `python -W ignore script arguments...` does, or `python -c source`."""
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if argv[0] == "-c":
        sys.argv, sys.warnoptions[:] = ["-c", *argv[2:]], []
        exec(compile(argv[1], "<string>", "exec"), main.__dict__)
        return
    script, sys.argv = argv[0], list(argv)
    first = str(Path(script).parent)
    path = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:0] = [each for each in (first, *path) if each not in sys.path]
    main.__file__ = script
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


# --- a worker of pytest-xdist ---------------------------------------------------------------------


def worker(argv: Sequence[str]) -> int:
    """Has a server fork what `python argv...` would start, with the files of this process.

    All workers import what tests import, which takes each ten seconds of a core.

    Returns: how it ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles it
    order = {"argv": argv[argv.index("-c") :], "env": dict(os.environ), "folder": os.getcwd()}
    code = server(*PRELOADED["tests"]).start(order, [1, 2], stdin=0).ended()
    assert code is not None
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    if "-c" in sys.argv:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        sys.exit(worker(sys.argv[1:]))
    _serve(sys.argv[1], sys.argv[2:])
