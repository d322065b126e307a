"""Starts jobs in milliseconds: a server that has imported what a job imports forks each of them.

    python launcher.py serve SOCKET JOB         # until its standard input ends
    python -S -E launcher.py SOCKET FOLDER      # one run of the job, in the caller's environment

The second is the command that ckpt-chaos runs and kills, as often as there are points; imports
would take most of its time otherwise. The job is a process of its own, with the client's
environment, output and exit code, and is killed with the client. What ckpt-chaos has Python import
at its start (`sitecustomize`, which arms it) is run right after the fork.
"""

import ast
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys

PAUSE_S = 0.01
HARMLESS = ("jemalloc_bg_thd",)  # of pyarrow's memory, which does without


def main():
    if sys.argv[1] != "serve":
        ask(*sys.argv[1:])
    job = sys.argv[3]
    sys.path[0] = os.path.dirname(job)
    told = os.dup(1)
    os.dup2(2, 1)  # some print while they are imported
    for module in imported(job):
        with contextlib.suppress(ImportError):  # not a module, but a name in one
            importlib.import_module(module)
    folder = warm_up(f"{sys.argv[2]}.warm")
    if folder is None:
        os.dup2(told, 1)
        os.close(told)
        folder = serve(sys.argv[2])
    if folder is not None:  # in a job
        sys.argv = [job, folder]
        runpy.run_path(job, run_name="__main__")


# --- the client: only what Python has without `site` ----------------------------------------------


def ask(at, folder):
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(at)
        request = json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "folder": folder})
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [1, 2])
        server.sendall(request.encode())
        code = int.from_bytes(server.recv(4), "big", signed=True)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


# --- the server -----------------------------------------------------------------------------------


def imported(job):
    """The modules that a job imports, except the one beside it."""
    found = []
    with open(job) as file:
        for node in ast.walk(ast.parse(file.read())):
            if isinstance(node, ast.Import):
                found += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
    return [name for name in found if name != "target"]  # which looks at the arguments


def warm_up(folder):
    """Imports what the job imports while it runs: from the beginning, and when it goes on.

    Arguments:
        folder: of these two runs.

    Returns:
        None; in a run of the job the folder.
    """
    told = f"{folder}.modules"
    for _ in range(2):
        pid = os.fork()
        if not pid:
            os.environ["CHAOS_MODULES"] = told
            os.dup2(2, 1)
            return folder
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("the job fails, though nobody kills it")
        with open(told) as file:
            for name in file.read().split():
                if name in ("target", "__main__"):
                    continue
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    if threads := [name for name in started() if name not in HARMLESS]:
        raise SystemExit(f"imports started threads, which forked jobs would not have: {threads}")
    return None


def started():
    """The names of the threads of this process, except the first."""
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            with open(f"/proc/self/task/{thread}/comm") as file:
                yield file.read().strip()


def serve(at):
    """Forks jobs until standard input ends; returns the folder in each of them, None at the end."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(at)
        listening.listen()
        print("ready", flush=True)
        running = {}  # by connection
        while True:
            ready, _, _ = select.select([0, listening, *running], [], [], PAUSE_S)
            if 0 in ready and not os.read(0, 1):
                for pid in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            for client in set(ready) & set(running):  # it says nothing: it has been killed
                os.kill(running[client], signal.SIGKILL)
            for client, pid in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[client]
                    code = os.waitstatus_to_exitcode(status)
                    with contextlib.suppress(OSError):  # the client has been killed
                        client.sendall(code.to_bytes(4, "big", signed=True))
                    client.close()
            if listening in ready:
                client, _ = listening.accept()
                length, fds, _, _ = socket.recv_fds(client, 4, 2)
                request = client.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
                pid = os.fork()
                if not pid:
                    for each in (listening, client, *running):
                        each.close()
                    return begin(json.loads(request), fds)
                for fd in fds:
                    os.close(fd)
                running[client] = pid


def begin(request, fds):
    """Makes a forked process what the client would have been."""
    import random

    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, standard in zip((nothing, *fds), (0, 1, 2), strict=True):
        os.dup2(fd, standard)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and folder not in sys.path:
            sys.path.append(folder)
        if os.path.exists(start := os.path.join(folder, "sitecustomize.py")):
            runpy.run_path(start)
            break
    return request["folder"]


if __name__ == "__main__":
    main()
