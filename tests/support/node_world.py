"""A simulated job on nodes: the code of `plugins/nodes` and `runs` on a storage in memory.

Threads run one at a time and pass each other the turn at operations of the storage, by a seed. So a
seed is one schedule, with a clock of its own. Simulated are the storage, the folders of the nodes,
transfers between them, the arithmetic of parity, and the commit of a step; the decisions are real.
"""

from __future__ import annotations

import _thread
import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import msgspec

from unickpt.commit import version
from unickpt.commit.version import Version
from unickpt.errors import SaveConflict
from unickpt.plugins.nodes import job as job_module
from unickpt.plugins.nodes import membership, node_parity, peer_copies, tier, upload_notes, uploads
from unickpt.plugins.nodes.node_parity import NodeParity, PartStream, SumTable
from unickpt.plugins.nodes.peer_copies import PeerCopies
from unickpt.plugins.nodes.silent_nodes import SilentNodes
from unickpt.runs import (
    attempt_folders,
    background_removal,
    current_steps,
    requested_removal,
    save_leftovers,
    step_folder,
    tier_copies,
)
from unickpt.storage import paths
from unickpt.storage.database import digest_of
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST

OP_S, SWITCHES, FILES, TIMEOUT_S = 0.001, 0.1, 2, 15.0
"""Seconds of an operation; how often another thread gets the turn; files of a process; how long a
message waits for its answer."""
BUCKETS = {job_module.CONTROL: "control", "uploads": "uploads"}
"""Folders that are key-value stores of their own, for speed."""


class Killed(BaseException):
    """The process of this thread was killed."""


class Worker:
    """A thread of the operating system, used by one simulated thread after another."""

    idle: ClassVar[list[Worker]] = []

    def __init__(self) -> None:
        self.turn = _thread.allocate_lock()
        self.turn.acquire()
        self.work: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.turn.acquire()
            self.work()


class Thread:
    """A simulated thread.

    Arguments:
        process: whose it is.
        work: what it does.
    """

    def __init__(self, process: Process, work: Callable[[], object]) -> None:
        self.process, self.work = process, work
        self.wake = 0.0
        self.ready: Callable[[], bool] | None = None
        self.worker = Worker.idle.pop() if Worker.idle else Worker()


class Partition(NamedTuple):
    """Messages between the nodes of two sides are dropped or delayed, both ways.

    Arguments:
        start, end: of this time.
        side: the nodes of one side.
        drops: or else they are delayed.
    """

    start: float
    end: float
    side: frozenset[str]
    drops: bool


class World:
    """The clock, the threads, the storage of the run and the nodes.

    Arguments:
        seed: of the schedule.
    """

    now_here: World

    def __init__(self, seed: int) -> None:
        World.now_here = self
        self.random = random.Random(seed)
        self.chance = self.random.random
        self.now, self.count, self.kill_at = 0.0, 0, math.inf
        self.threads: list[Thread] = []
        self.current: Thread
        self.over = _thread.allocate_lock()
        self.over.acquire()
        self.objects = {name: dict[str, bytes]() for name in ("root", *BUCKETS.values())}
        self.nodes: dict[str, Node] = {}
        self.names = 0
        self.lease: Job | None = None
        self.partition: Partition | None = None
        self.failures: list[str] = []
        """Promises that were broken."""

    # --- turns ----------------------------------------------------------------------------------

    def start(self, process: Process, work: Callable[[], object]) -> None:
        thread = Thread(process, work)
        self.threads.append(thread)
        thread.worker.work = lambda: self._do(thread)

    def _do(self, thread: Thread) -> None:
        try:
            if not thread.process.job.is_dead:
                thread.work()
        except Killed:
            pass
        except Exception as error:  # the program ends, and with it the job
            thread.process.job.end(error)
        except BaseException as error:
            self.failures.append(repr(error))
            thread.process.job.end(error)
        self.threads.remove(thread)
        Worker.idle.append(thread.worker)
        if not self.threads:
            self.over.release()
            return
        self.current = self._next()
        self.current.worker.turn.release()

    def run(self) -> None:
        """Runs until no thread is left."""
        self.current = self._next()
        self.current.worker.turn.release()
        self.over.acquire()

    def _next(self) -> Thread:
        while True:
            now = self.now
            able = [
                thread
                for thread in self.threads
                if thread.process.job.is_dead
                or (thread.wake <= now and (thread.ready is None or thread.ready()))
            ]
            if able:
                return able[int(self.chance() * len(able))] if len(able) > 1 else able[0]
            times = [thread.wake for thread in self.threads if thread.wake > now]
            if not times:  # all wait for each other
                self.failures.append("a deadlock")
                self.threads[0].process.job.is_dead = True
                continue
            self.now = min(times)

    def switch(self) -> None:
        thread, following = self.current, self._next()
        if following is not thread:
            self.current = following
            following.worker.turn.release()
            thread.worker.turn.acquire()
        if thread.process.job.is_dead:
            raise Killed

    def operate(self) -> None:
        """An operation begins: the others may go first, or the job may be killed."""
        process = self.current.process
        self.count += 1
        self.now += OP_S
        if self.count >= self.kill_at and not process.job.is_dead:
            process.job.end(None)
        if process.job.is_dead:
            raise Killed
        if process.pause_s:
            self.sleep(process.pause_s * self.chance())
        elif self.chance() < SWITCHES:
            self.switch()

    def reach(self) -> bool:
        """An operation of the root begins; false if the process sees an empty folder."""
        process = self.current.process
        self.operate()
        if process.cut is None or not process.cut[0] <= self.now < process.cut[1]:
            return True
        _, end, how = process.cut
        if how == "hangs":
            self.sleep(end - self.now)
            return True
        if how == "fails":
            raise Failed("the network is down")
        return False

    def is_cut_off(self, node: str) -> bool:
        """Whether messages between this process and a node are dropped or delayed now."""
        cut, own = self.partition, self.current.process.node.name
        return (
            cut is not None
            and cut.start <= self.now < cut.end
            and (own in cut.side) != (node in cut.side)
        )

    def message(self, node: str) -> None:
        """A message to a node, and its answer."""
        self.operate()
        if not self.is_cut_off(node):
            return
        assert self.partition is not None
        if self.partition.drops:
            self.sleep(min(self.partition.end - self.now, TIMEOUT_S))
            raise Failed("no answer")
        self.sleep(2 * self.chance())

    def sleep(self, seconds: float) -> None:
        self.current.wake = self.now + seconds
        self.switch()

    def wait(self, ready: Callable[[], bool]) -> None:
        if not ready():
            self.current.ready = ready
            self.switch()
            self.current.ready = None

    def name(self) -> str:
        self.names += 1
        return f"{self.names:016x}"


def world() -> World:
    return World.now_here


class Clock:
    """In the place of the module `time`."""

    @staticmethod
    def monotonic() -> float:
        return world().now

    @staticmethod
    def sleep(seconds: float) -> None:
        if seconds > 0:
            world().sleep(seconds)


class Condition:
    """In the place of `threading.Condition`; no thread loses its turn while it holds it."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def notify_all(self) -> None: ...
    def wait_for(self, ready: Callable[[], bool]) -> None:
        world().wait(ready)


class Executor:
    """In the place of `SerialExecutor`."""

    def __init__(self, name: str, failed: Callable[[BaseException], object]) -> None:
        self.failed, self.process = failed, world().current.process
        self.is_of_peers = name == "unickpt peers"
        self.work: deque[Callable[[], None]] = deque()
        self.busy = False
        self.thread: Thread | None = None

    def add(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        if not self.busy:
            self.busy = True
            world().start(self.process, self._run)

    def _run(self) -> None:
        self.thread = world().current
        while self.work:
            try:
                self.work.popleft()()
            except Exception as error:
                self.process.unprotected |= self.is_of_peers
                self.failed(error)
        self.busy, self.thread = False, None

    def wait(self, most: int = 0) -> None:
        if self.thread is not world().current:
            world().wait(lambda: len(self.work) + self.busy <= most)


# --- the storage of the run ---------------------------------------------------------------------


class Done:
    """The result of an operation."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        return self.value


ABSENT = SimpleNamespace(state="missing", value=b"")


class Store:
    """A key-value store of a folder."""

    def __init__(self, objects: dict[str, bytes], prefix: str) -> None:
        self.objects, self.prefix = objects, prefix

    def read(self, name: str, **options: Any) -> Done:
        value = self.objects.get(self.prefix + name) if world().reach() else None
        return Done(ABSENT if value is None else SimpleNamespace(state="value", value=value))

    def list(self) -> Done:
        start = len(self.prefix)
        prefix, objects = self.prefix, self.objects if world().reach() else ()
        return Done([key[start:].encode() for key in objects if key.startswith(prefix)])

    def write(self, name: str, value: bytes | None) -> Done:
        try:
            if not world().reach():
                raise Failed("the file system is not mounted")
        except Killed:  # it may be on its way
            if world().chance() < 0.5:
                self._write(name, value)
            raise
        self._write(name, value)
        return Done(None)

    def _write(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.objects.pop(self.prefix + name, None)
        else:
            self.objects[self.prefix + name] = value

    def delete_range(self, keys: object) -> Done:
        if world().reach():
            for key in [key for key in self.objects if key.startswith(self.prefix)]:
                del self.objects[key]
        return Done(None)


@dataclass(frozen=True)
class Folder(Location):
    """A folder in the root; some folders are buckets of their own."""

    bucket: str = "root"

    def child(self, relative: str) -> Location:
        if relative in BUCKETS:
            return folder("", BUCKETS[relative])
        return folder(f"{self.path}{relative.strip('/')}/", self.bucket)

    def store(self, context: object) -> Any:
        return Store(world().objects[self.bucket], self.path)


@cache
def folder(path: str, bucket: str) -> Folder:
    return Folder(f"{bucket}://{path}", {"driver": bucket, "path": path}, bucket)


def folders_with(location: Folder, file: str, context: object) -> list[str]:
    """In the place of `locations.folders_with`, for speed."""
    objects = world().objects[location.bucket] if world().reach() else ()
    return [name.partition("/")[0] for name in objects if name.endswith(file)]


class Root:
    """In the place of `commit.root.Root`."""

    def __init__(self, location: Folder) -> None:
        self.location = location

    def read(self) -> Any:
        read = self.location.store(None).read(MANIFEST).result()
        return SimpleNamespace(digest=digest_of(read.value) if read.state == "value" else "")

    def replace(self, state: Any, manifest: bytes, timeout_s: float) -> bool:
        store = self.location.store(None)
        key = store.prefix + MANIFEST
        world().reach()
        before = store.objects.get(key)
        if (digest_of(before) if before is not None else "") != state.digest:
            return False
        store._write(MANIFEST, manifest)
        if self.location.bucket == "root":
            check_whole(self.location.path, manifest)
        return True


def version_of(manifest: bytes) -> Version:
    return Version(manifest, manifest.decode())


def check_whole(step: str, manifest: bytes) -> None:
    """Notes if a committed step of the root lacks files, or has others."""
    attempt, objects = manifest.decode(), world().objects["root"]
    for process in range(count_of(attempt)):
        below = f"{step}processes/{attempt}/{process:05d}/"
        for name, data in files_of(attempt, process).items():
            if objects.get(below + name) != data:
                world().failures.append(f"{step} in the root lacks {below}{name}")


def count_of(attempt: str) -> int:
    """How many processes an attempt has: the first character says it."""
    return int(attempt[0])


def files_of(attempt: str, process: int) -> dict[str, bytes]:
    """What a process writes."""
    return {f"d/{number}": f"{attempt} {process} {number}".encode() for number in range(FILES)}


def remove_checkpoint(location: Folder, context: object) -> None:
    store = location.store(None)
    read = store.read(MANIFEST).result()
    store.write(MANIFEST, None)
    if read.state == "value":
        location.child(f"processes/{read.value.decode()}").remove(context)  # type: ignore[arg-type]


def remove_crashed(step: Folder, whole: object, session: str = "") -> None:
    committed = step.store(None).read(MANIFEST).result()
    for attempt in step.child("processes").folders(None):  # type: ignore[arg-type]
        if attempt.rpartition("-")[0] != session and attempt.encode() != committed.value:
            step.child(f"processes/{attempt}").remove(None)  # type: ignore[arg-type]


def copy_files(origin: Folder, destination: Folder, attempt: str, budget_bytes: int) -> None:
    """Copies the small files."""
    source, below = origin.store(None), f"processes/{attempt}/"
    for key in source.list().result():
        name = key.decode()
        if name.startswith(below):
            destination.store(None).write(name, source.read(name).result().value)


class Lease:
    """In the place of `commit.lease.Lease`: the job of process 0 may write."""

    is_settled = True

    def __init__(self, location: Folder) -> None:
        self.job = world().current.process.job
        self.is_held = False

    def take(self) -> bool:
        holder = world().lease
        if holder is not None and holder is not self.job and not holder.is_dead:
            raise SaveConflict("another job saves here")
        was_held, self.is_held = self.is_held, True
        world().lease = self.job
        return not was_held

    def check(self) -> None:
        if world().lease is not self.job:
            raise SaveConflict("another job has taken over")

    def give_back(self) -> None:
        self.is_held = False


# --- nodes --------------------------------------------------------------------------------------

Tree = dict[str, dict[str, dict[str, dict[str, bytes]]]]


class Node:
    """A machine.

    Arguments:
        name: of it.
        unit: what fails with it.
    """

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.tree: Tree = {}  # by step, attempt, and process or sum: the files
        self.claims: set[str] = set()

    def files(self, below: str) -> dict[str, bytes] | None:
        step, _, attempt, name = below.strip("/").split("/")
        return self.tree.get(step, {}).get(attempt, {}).get(name)

    def make(self, below: str) -> dict[str, bytes]:
        step, _, attempt, name = below.strip("/").split("/")
        made: dict[str, bytes] = {}
        self.tree.setdefault(step, {}).setdefault(attempt, {})[name] = made
        return made


class SimulatedFolder:
    """In the place of `NodeFolder`."""

    def __init__(self, path: str) -> None:
        self.path, self.node = path, world().nodes[path.split("/")[2]]

    def identity(self) -> str:
        return self.node.name

    def parts(self) -> dict[str, dict[str, list[int]]]:
        world().operate()
        return {
            step: {a: [int(n) for n in names if n.isdigit()] for a, names in attempts.items()}
            for step, attempts in self.node.tree.items()
        }

    def sums(self) -> dict[str, dict[str, list[str]]]:
        sums: dict[str, dict[str, list[str]]] = {}
        for step, attempts in self.node.tree.items():
            for attempt, names in attempts.items():
                if chosen := [n for n in names if n[:4] == "sum-" and not n.endswith(".new")]:
                    sums.setdefault(step, {})[attempt] = chosen
        return sums

    def has(self, below: str) -> bool:
        world().operate()
        return self.node.files(below) is not None

    def files(self, below: str) -> dict[str, int]:
        world().operate()
        return {name: len(data) for name, data in (self.node.files(below) or {}).items()}

    def read(self, name: str) -> bytes:
        world().operate()
        below, _, file = name.rpartition("/d/")
        files = self.node.files(below)
        if files is None:
            raise Failed("it was removed")
        return files[f"d/{file}"]

    def remove(self, below: str) -> None:
        world().operate()
        step, _, attempt = below.partition("/processes/")
        if not attempt:
            self.node.tree.pop(step, None)
        elif step in self.node.tree:
            self.node.tree[step].pop(attempt, None)
            if not self.node.tree[step]:
                del self.node.tree[step]

    @contextmanager
    def filled(self, below: str) -> Iterator[str]:
        below = below.strip("/")
        draft, made = f"{below}.new", self.node.make(f"{below}.new")
        world().operate()
        yield f"{self.node.name}:{draft}"
        world().operate()
        step, _, attempt, name = below.split("/")
        names = self.node.tree.get(step, {}).get(attempt, {})
        if names.get(f"{name}.new") is made:
            names[name] = names.pop(f"{name}.new")

    @contextmanager
    def claimed(self, below: str) -> Iterator[bool]:
        world().operate()
        if below in self.node.claims or self.node.files(below) is None:
            yield False
            return
        self.node.claims.add(below)
        try:
            yield True
        finally:
            self.node.claims.discard(below)


class Server:
    """In the place of `FileServer`."""

    def __init__(self, path: str) -> None:
        self.url = f"http://{path.split('/')[2]}:{world().current.process.index}/"

    def close(self) -> None: ...


def at(url: str) -> tuple[Node, str]:
    """A node, and the path of a folder there, after a message to the node."""
    host, _, below = url.removeprefix("http://").partition("/")
    name = host.partition(":")[0]
    world().message(name)
    return world().nodes[name], below


def silent_among(silent: SilentNodes, members: Any, *, again: bool = False) -> dict[str, str]:
    """In the place of `SilentNodes.among`."""
    partition, by_url = world().partition, {member.url: member.node for member in members}
    drops = partition is not None and partition.drops
    urls = [url for url, node in by_url.items() if drops and world().is_cut_off(node)]
    silent.nodes = sorted({by_url[url] for url in urls})
    return dict.fromkeys(urls, "no answer")


def fetched(url: Any) -> bytes:
    """In the place of `peer_copies.fetched`."""
    node, below = at(url)
    if url.endswith("/table"):
        return (node.files(below.removesuffix("/table")) or {})["table"]
    if len(parts := below.strip("/").split("/")) == 3:
        folders = node.tree.get(parts[0], {}).get(parts[2], {}).items()
        return msgspec.json.encode({f"{f}/{name}": 1 for f, files in folders for name in files})
    files = node.files(below)
    if files is None:
        raise OSError("404")
    return msgspec.json.encode(dict.fromkeys(files, 1))


def fetch_file(copies: PeerCopies, url: str, path: str) -> None:
    """In the place of `PeerCopies._fetch_file`."""
    node, below = at(url)
    source, _, name = below.rpartition("/d/")
    files = node.files(source)
    if files is None or f"d/{name}" not in files:
        raise OSError("404")
    write_to(path.rpartition("/d/")[0])[f"d/{name}"] = files[f"d/{name}"]


def open_own(location: Folder) -> Any:
    """In the place of `ocdbt_reader.open`."""
    digest = Root(location).read().digest
    return SimpleNamespace(manifest_digest=digest) if digest else None


class PartCheck:
    """In the place of `part_check.PartCheck`."""

    def __init__(self, reader: Any, process: int, part: str) -> None:
        self._expected = files_of(part.split("/")[1], process)
        self.names = set(self._expected)

    def damage(self, name: str, data: bytes) -> str:
        return "" if data == self._expected[name] else "it differs"


def write_to(draft: str) -> dict[str, bytes]:
    """The files of a draft."""
    name, _, below = draft.partition(":")
    files = world().nodes[name].files(below)
    if files is None:
        raise OSError("the draft is gone")
    return files


def add_up(task: NodeParity, folder: str, urls: dict[int, str], number: int) -> None:
    """In the place of `NodeParity._add_up`: the sum has a copy of each stream."""
    streams, data = [], {}
    with task._nodes.folder.filled(folder) as draft:
        for process, url in urls.items():
            node, below = at(f"{url}{process:05d}")
            files = dict(node.files(below) or {})
            streams.append(PartStream(process, [(name, 1, "") for name in files]))
            data[str(process)] = {name: value.decode() for name, value in files.items()}
        group = folder.rpartition("/")[2].replace(f"-{number}-", "-", 1)
        table = SumTable(task._code.counts, group, number, streams)
        write_to(draft).update(table=msgspec.json.encode(table), sum=msgspec.json.encode(data))


def rebuild(draft: str, process: int, sums: Any, urls: dict[int, str]) -> None:
    """In the place of `node_parity._rebuild`: needs as many sums as streams are lost."""
    streams = sums[0].table.streams
    gone = [s.process for s in streams if s.process not in urls]
    if len(gone) > len(sums):
        raise OSError("too many are lost")
    data: Any = None
    for stored in sums:
        node, below = at(stored.url)
        data = msgspec.json.decode((node.files(below) or {})["sum"])
    for stream in streams:
        if stream.process in urls:
            node, below = at(f"{urls[stream.process]}{stream.process:05d}")
            found = {n: d.decode() for n, d in (node.files(below) or {}).items()}
            if found != data[str(stream.process)]:
                raise OSError("another file is damaged")
    write_to(draft).update({name: text.encode() for name, text in data[str(process)].items()})


# --- jobs ---------------------------------------------------------------------------------------


class Job:
    """The processes of a job, until any of them ends.

    Arguments:
        nodes: of each process.
    """

    def __init__(self, nodes: list[Node]) -> None:
        self.session = f"{len(nodes)}{world().name()}"
        self.processes = [Process(self, n, node) for n, node in enumerate(nodes)]
        self.is_dead = False
        self.error: BaseException | None = None
        self.agreed: list[list[int]] = []

    def end(self, error: BaseException | None) -> None:
        self.is_dead, self.error = True, error or self.error


class Process:
    """A process, and its `Group`.

    Arguments:
        job: that it is of.
        index: its number.
        node: where it runs.
    """

    def __init__(self, job: Job, index: int, node: Node) -> None:
        self.job, self.index, self.node = job, index, node
        self.pause_s = 0.0
        self.cut: tuple[float, float, str] | None = None
        """From when to when it does not see the root, and what it gets instead."""
        self.unprotected = False
        self._attempts = self._agreements = 0

    @property
    def count(self) -> int:
        return len(self.job.processes)

    def next_attempt(self) -> str:
        self._attempts += 1
        return f"{self.job.session}-{self._attempts:06d}"

    def agree(self, value: int) -> int:
        if self._agreements == len(self.job.agreed):
            self.job.agreed.append([])
        values = self.job.agreed[self._agreements]
        self._agreements += 1
        values.append(value)
        world().wait(lambda: len(values) == self.count)
        return max(values)


def damage(steps: Any, step: int) -> str:
    return ""


def patches() -> list[Any]:
    """What is simulated."""
    nothing, clock = (lambda **options: None), Clock()
    patch = mock.patch.object
    threads = SimpleNamespace(Condition=Condition)
    chosen = [
        patch(version, "version_of", version_of),
        patch(version, "context", nothing),
        patch(paths, "context", nothing),
        patch(attempt_folders, "remove_checkpoint", remove_checkpoint),
        patch(save_leftovers, "remove_crashed", remove_crashed),
        patch(step_folder, "Lease", Lease),
        patch(step_folder, "folders_with", folders_with),
        patch(requested_removal, "check_shared", lambda group, local: None),
        patch(step_folder.StepFolder, "damage", damage),
        patch(current_steps, "Lease", Lease),
        patch(current_steps, "threading", threads),
        patch(tier_copies, "Root", Root),
        patch(tier_copies, "Database", lambda location, context: location),
        patch(tier_copies, "_opened", lambda location, version: None),
        patch(tier, "resolve_path", lambda path: SimpleNamespace(is_local=True, path=path)),
        patch(job_module, "NodeFolder", SimulatedFolder),
        patch(job_module, "FileServer", Server),
        patch(job_module, "new_session", lambda: world().name()),
        patch(job_module, "job_group", lambda group, timeout_s: group),
        patch(job_module, "shared", lambda control, url, folder, process, run: control),
        patch(SilentNodes, "among", silent_among),
        patch(uploads, "copy_files", copy_files),
        patch(uploads, "open_own", open_own),
        patch(uploads, "PartCheck", PartCheck),
        patch(PeerCopies, "_fetch_file", fetch_file),
        patch(NodeParity, "_add_up", add_up),
        patch(node_parity, "_rebuild", rebuild),
    ]
    chosen += [patch(m, "storage_context", nothing) for m in (membership, upload_notes, uploads)]
    chosen += [patch(m, "time", clock) for m in (membership, uploads)]
    chosen += [patch(m, "fetched", fetched) for m in (peer_copies, node_parity)]
    chosen += [
        patch(m, "SerialExecutor", Executor) for m in (peer_copies, background_removal, tier_copies)
    ]
    return chosen


@contextmanager
def simulated() -> Iterator[None]:
    """Within the block, the code runs in the world that was made last."""
    started, log = patches(), logging.getLogger("unickpt")
    log.disabled = True
    for patch in started:
        patch.start()
    try:
        yield
    finally:
        log.disabled = False
        for patch in started:
            patch.stop()
        with suppress(AttributeError):
            del World.now_here
