"""A soak of live weights: a publisher and four followers, killed with kill -9, over a bad network.

    python tests/weights_soak.py --versions 10000

Each follower sees the publisher's folder through a copy of its own, into which files come late, in
any order, in halves, damaged, or not at all for a while; its lease goes the other way. The disk
fills up, versions are pruned, and second publishers start by mistake. After every call, what a
follower has must be a published version, bit for bit, and its number must be right; a follower that
does not take the newest version that it sees must have said so. At the end, all have the newest.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from support.forks import Ended, Forks

import unickpt
from unickpt import Rules, SaveConflict, SaveOptions, UnickptError
from unickpt.plugins.weights import Follower, Publisher
from unickpt.types import Box, LocalFragments

Arrays = dict[str, np.ndarray[Any, Any]]
ROWS, COLUMNS = 96, 128
FOLLOWERS = 4
LEASE_S = 1.0
OPTIONS = SaveOptions(chunk_bytes=1 << 12, fsync=False)
RULES = "w [a b] <-> w [b a]\nsalt [n] as int64 <-> salt [n] as int32\nlast [n] <-> last [n]"
_WORDS = np.random.default_rng(0).integers(0, 1 << 16, (ROWS, COLUMNS)).astype(np.uint16)
_PHASES = np.random.default_rng(1).integers(0, 50, (ROWS, COLUMNS))
_DISK = "size=32m"


def arrays(version: int, writer: int) -> Arrays:
    """A version: 2 % of `w` differ from the version before.

    Arguments:
        version: its number.
        writer: the publisher that wrote it.
    """
    return {
        "w": _WORDS + ((version + _PHASES) // 50).astype(np.uint16),
        "salt": np.full(700, writer),
        "last": np.array([version, writer] * 3),
    }


# --- the network ----------------------------------------------------------------------------------


def files_in(folder: Path) -> dict[str, tuple[int, int, int]]:
    """The files below a folder, but for notes and locks, with what tells a file from its
    successors."""
    identities = dict[str, tuple[int, int, int]]()
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != ".followers"]
        for name in names:
            path = os.path.join(top, name)
            with suppress(OSError):
                facts = os.stat(path)
                identity = facts.st_ino, facts.st_mtime_ns, facts.st_size
                identities[os.path.relpath(path, folder)] = identity
    return {path: x for path, x in identities.items() if not path.startswith(".")}


class Mirror:
    """Makes one folder like another, file by file, as a bad network does.

    Arguments:
        source, target: the folders.
        rng: of what happens to which file.
    """

    def __init__(self, source: Path, target: Path, rng: random.Random) -> None:
        self.source, self.target, self._rng = source, target, rng
        self._arrived = dict[str, tuple[int, int, int]]()
        self._late = dict[str, float]()
        self._notes = dict[str, bytes]()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Delivers all that is missing."""
        self._stopped.set()
        self._thread.join()
        self._deliver(is_good=True)

    def _run(self) -> None:
        while not self._stopped.wait(self._rng.uniform(0, 0.05)):
            self._deliver(is_good=self._rng.random() < 0.2)

    def _deliver(self, *, is_good: bool) -> None:
        sent, there = files_in(self.source), files_in(self.target)
        work = [path for path, identity in sent.items() if self._arrived.get(path) != identity]
        work += there.keys() - sent.keys()
        self._rng.shuffle(work)
        for path in work:
            with suppress(OSError):  # it is gone, or the disk is full
                if path not in sent:
                    self._remove(path, is_good)
                elif self._copy(path, is_good):
                    self._arrived[path] = sent[path]
        self._return_note()

    def _remove(self, path: str, is_good: bool) -> None:
        if is_good or self._rng.random() < 0.3:
            self._arrived.pop(path, None)
            (self.target / path).unlink()
            os.removedirs((self.target / path).parent)

    def _copy(self, path: str, is_good: bool) -> bool:
        """Copies a file, or a part of it, or something else; whether it is right."""
        fate = "whole" if is_good else self._rng.choices(
            ["whole", "in place", "half", "damaged", "lost", "late"], [40, 20, 8, 4, 8, 20]
        )[0]  # fmt: skip
        if not is_good and self._late.get(path, 0) > time.monotonic():
            return False
        if fate in ("lost", "late"):
            self._late[path] = time.monotonic() + (self._rng.random() if fate == "lost" else 0)
            return False
        content = (self.source / path).read_bytes()
        file, middle = self.target / path, self._rng.randrange(len(content) + 1)
        file.parent.mkdir(parents=True, exist_ok=True)
        if fate == "half":
            file.write_bytes(content[:middle])
        elif fate == "damaged" and content:
            byte = self._rng.randrange(len(content))
            changed = bytes([content[byte] ^ (1 << self._rng.randrange(8))])
            file.write_bytes(content[:byte] + changed + content[byte + 1 :])
        elif fate == "in place":
            with open(file, "wb", buffering=0) as out:
                out.write(content[:middle])
                time.sleep(self._rng.uniform(0, 0.004))
                out.write(content[middle:])
            return True
        else:
            new = self.target.with_name(f"{self.target.name}-{os.getpid()}.new")
            new.write_bytes(content)
            new.replace(file)
            return True
        return False

    def _return_note(self) -> None:
        """Sends the note of this process's follower to the publisher."""
        for note in self.target.glob(f".followers/*-{os.getpid()}-*.json"):
            with suppress(OSError):
                content = note.read_bytes()
                if self._notes.get(note.name) != content and self._rng.random() < 0.5:
                    (self.source / ".followers").mkdir(exist_ok=True)
                    (self.source / ".followers" / note.name).write_bytes(content)
                    self._notes[note.name] = content


# --- the processes --------------------------------------------------------------------------------


def say(*facts: object) -> None:
    print(json.dumps(facts), flush=True)


def publish(root: str, writer: int, stop: str) -> None:
    """A publisher: publishes until it is killed, or the file `stop` exists."""
    rng = random.Random(writer)
    keep_last = rng.choice([1, 2, 4])
    with Publisher(root, keep_last=keep_last, options=OPTIONS) as publisher:
        while not os.path.exists(stop):
            version = max(publisher.versions(), default=-1) + rng.choice([1, 1, 1, 1, 2])
            try:
                publisher.publish(version, arrays(version, writer)).result()
            except (SaveConflict, ValueError):  # or another one has published this number
                say("refused")
                return
            except UnickptError as error:
                say("error", type(error).__name__)
                time.sleep(0.01)
                continue
            say("published", version, writer)
            time.sleep(rng.choice([0, 0, 0, 0.02]))


class Engine:
    """A follower and its arrays, in one of four forms.

    Arguments:
        root: its copy of the publisher's folder.
        memory: a folder for arrays that outlive the process.
        kind: which form.
    """

    def __init__(self, root: Path, memory: Path, kind: int) -> None:
        self.live, rules = self._arrays(memory, kind), None
        tree: dict[str, Any] = dict(self.live)
        if kind in (1, 2):  # as of a rank that has a part of each chunk
            w = self.live["w"]
            halves = [(Box((0, a), (ROWS, b)), w[:, a:b]) for a, b in ((0, 50), (50, COLUMNS))]
            tree["w"] = LocalFragments((ROWS, COLUMNS), halves[kind - 1 :])
        elif kind == 3:
            rules = Rules.parse(RULES)
        self.kind, self.root = kind, root
        self.follower = Follower(
            root, tree, rules=rules, rank=kind, keep_copies=kind == 1, lease_s=LEASE_S
        )
        self.floor, self.warnings = -1, list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: self.warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("unickpt").addHandler(handler)

    def _arrays(self, memory: Path, kind: int) -> Arrays:
        live = dict[str, Any]()
        for name, array in arrays(0, 0).items():
            shape, dtype = array.shape, array.dtype
            if kind == 3:
                shape = shape[::-1]
                dtype = np.dtype(np.int32) if name == "salt" else dtype
            file = memory / name
            if not file.exists():
                file.write_bytes(bytes(array.nbytes))
            live[name] = np.memmap(file, dtype, "r+", shape=shape)
        return live

    def prove(self) -> None:
        """What is live is the version that the follower reports, as a whole."""
        version = self.follower.version
        if version is None:
            return
        writer = int(self.live["last"][1])
        for name, expected in arrays(version, writer).items():
            live = self.live[name]
            if name == "w" and self.kind == 2:
                live, expected = live[:, 50:], expected[:, 50:]
            elif self.kind == 3:
                live = live.T
            same = np.array_equal(live, expected)
            assert same, f"follower {self.kind}: {name} is not of version {version}"

    def visible(self) -> dict[int, tuple[int, int, int]]:
        """The versions whose manifest is there."""
        files = files_in(self.root)
        manifests = {p: x for p, x in files.items() if p.endswith("/manifest.ocdbt")}
        return {
            int(path.split("/")[0].removeprefix("step_")): identity
            for path, identity in manifests.items()
            if path.count("/") == 1
        }

    def update(self) -> None:
        before, visible, live = self.visible(), {}, self.follower.version
        self.warnings.clear()
        changed = self.follower.update()
        version, visible = self.follower.version, self.visible()
        assert changed == (version != live), (changed, version, live)
        self.floor = max(self.floor, -1 if version is None else version)
        stale = [v for v in before if v > self.floor and visible.get(v) == before[v]]
        assert not stale, f"follower {self.kind}: {version} is live, and {stale} are there"
        is_older = version is not None and {*before, *visible} <= {*range(version)}
        if is_older and before == visible and not changed:
            assert any(f"version {version} is live here" in text for text in self.warnings)
        if changed:
            say("live", version, int(self.live["last"][1]))

    def roll_back(self, rng: random.Random) -> None:
        before = self.visible()
        versions = self.follower.versions()
        if versions:
            version = rng.choice(versions)
            self.follower.rollback(version)
            assert self.follower.version == version
            self.floor = max(self.floor, *before, *versions, *self.visible())
            say("back", version, int(self.live["last"][1]))

    def check(self) -> None:
        if self.follower.version is not None:
            assert self.follower.check().ok


def follow(source: str, target: str, memory: str, kind: int, seed: int, stop: str) -> None:
    """A follower: follows until it is killed, or the file `stop` exists."""
    rng = random.Random(seed)
    mirror = Mirror(Path(source), Path(target), random.Random(-seed))
    engine = Engine(Path(target), Path(memory), kind)
    say("started")
    try:
        while not os.path.exists(stop):
            action = rng.choices(["update", "back", "check"], [30, 1, 1])[0]
            try:
                if action == "back":
                    engine.roll_back(rng)
                else:
                    getattr(engine, action)()
            except UnickptError as error:
                say("error", type(error).__name__)
            engine.prove()
            time.sleep(rng.choice([0, 0.01, 0.05]))
    finally:
        mirror.stop()
    newest = max(engine.visible())
    if newest > engine.floor:
        engine.update()
    else:  # after a rollback
        engine.follower.rollback(newest)
    engine.prove()
    engine.check()
    assert engine.follower.version == newest
    engine.follower.close()
    say("end", newest, int(engine.live["last"][1]))


PROCESS = f"""
import sys
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
import weights_soak
getattr(weights_soak, ARGS[0])(*ARGS[1:])
"""


# --- the soak -------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What a soak did and saw."""

    newest: int = -1
    published: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    writers: dict[int, int] = field(default_factory=dict)
    """Which publisher wrote each version, by all that saw it."""


class Soak:
    """Starts, kills and checks processes.

    Arguments:
        folder: an empty folder.
        output: another one, for what processes say.
        seed: of what happens.
        every_s: at most so many seconds between two faults.
        has_limit: whether the folder is a small disk, which may be filled.
    """

    def __init__(
        self, folder: Path, output: Path, seed: int, every_s: float, *, has_limit: bool
    ) -> None:
        self.folder, self.root, self.has_limit = folder, folder / "run", has_limit
        self._every_s = every_s
        self.rng, self.tally = random.Random(seed), Tally()
        self.forks = Forks(output, "unickpt.plugins.weights", "weights_soak")
        self.stops = {name: output / f"stop-{name}" for name in ("publish", "follow")}
        self._parsed = Counter[int]()
        self.publishers: list[int] = []
        self.followers: list[int] = []
        self._started = 0

    def run(self, versions: int) -> Tally:
        try:
            self.followers = [self.start_follower(kind) for kind in range(FOLLOWERS)]
            self.start_publishers(1)
            while self.tally.counts["published"] < versions:
                time.sleep(self.rng.uniform(0, self._every_s))
                self.see()
                faults = [self.kill_publisher, self.kill_follower, self.start_second]
                faults += [self.fill] * self.has_limit
                self.rng.choice(faults)()
            self.end()
        finally:
            self.forks.close()
        return self.tally

    def start_publishers(self, count: int) -> None:
        """Starts publishers at once; one of them goes on, the others are refused."""
        for _ in range(count):
            self._started += 1
            arguments = "publish", str(self.root), self._started, str(self.stops["publish"])
            self.publishers.append(self.forks.start(PROCESS, *arguments))
        deadline = time.monotonic() + 60
        while not any('"published"' in self.forks.said(pid) for pid in self.publishers):
            assert time.monotonic() < deadline, [self.forks.said(p) for p in self.publishers]
            time.sleep(0.01)
        while len(self.publishers) > 1:
            assert time.monotonic() < deadline, [self.forks.said(p) for p in self.publishers]
            for pid in [p for p in self.publishers if not self.forks.runs(p)]:
                ended = self.ended(pid)
                assert '["refused"]' in ended.out, ended
                self.publishers.remove(pid)
                self.tally.counts["publishers refused"] += 1
            time.sleep(0.01)

    def start_follower(self, kind: int) -> int:
        self._started += 1
        target, memory = self.folder / f"copy-{kind}", self.folder / f"memory-{kind}"
        memory.mkdir(exist_ok=True)
        stop, seed = str(self.stops["follow"]), self.rng.randrange(1 << 30)
        return self.forks.start(
            PROCESS, "follow", str(self.root), str(target), str(memory), kind, seed, stop
        )

    def kill_publisher(self) -> None:
        (pid,) = self.publishers
        self.kill(pid)
        self.publishers.clear()
        self.tally.counts["publishers killed"] += 1
        time.sleep(self.rng.choice([0, 0, 0.3]))
        self.start_publishers(self.rng.choice([1, 1, 2]))

    def kill_follower(self) -> None:
        kind = self.rng.randrange(FOLLOWERS)
        self.kill(self.followers[kind])
        self.tally.counts["followers killed"] += 1
        self.followers[kind] = self.start_follower(kind)

    def kill(self, pid: int) -> None:
        assert self.forks.runs(pid), self.forks.said(pid)
        self.forks.kill(pid)
        assert self.ended(pid).code == -9

    def start_second(self) -> None:
        """A second publisher by mistake, in another process than the first."""
        with Publisher(self.root, options=OPTIONS) as second:
            try:
                second.publish(10**9, arrays(0, 0)).result()
            except SaveConflict:
                self.tally.counts["publishers refused"] += 1
            except UnickptError as error:
                self.tally.errors[f"second: {type(error).__name__}"] += 1
            else:
                raise AssertionError("two publishers")

    def fill(self) -> None:
        """Fills the disk for a while."""
        filler = self.folder / "filler"
        with suppress(OSError), open(filler, "wb", buffering=0) as out:
            while os.statvfs(self.folder).f_bavail:
                out.write(bytes(1 << 16))
        time.sleep(self.rng.uniform(0, 0.3))
        filler.unlink()
        self.tally.counts["disk full"] += 1

    def see(self) -> None:
        """Reads what the processes said."""
        for pid in [*self.publishers, *self.followers]:
            self.parse(pid, self.forks.said(pid))
            assert self.forks.runs(pid), self.forks.said(pid)[-3000:]

    def ended(self, pid: int) -> Ended:
        ended = self.forks.wait(pid)
        self.parse(pid, ended.out)
        self._parsed.pop(pid)
        assert "AssertionError" not in ended.out, ended.out[-3000:]
        return ended

    def parse(self, pid: int, text: str) -> None:
        lines = text.splitlines(keepends=True)
        for line in lines[self._parsed[pid] :]:
            if not line.endswith("\n"):
                break
            self._parsed[pid] += 1
            if line.startswith("["):
                self.note(*json.loads(line))

    def note(self, what: str, *facts: Any) -> None:
        if what == "error":
            self.tally.errors[facts[0]] += 1
            return
        self.tally.counts[what] += 1
        if facts:
            version, writer = facts
            known = self.tally.writers.setdefault(version, writer)
            assert known == writer, f"version {version} is of publishers {known} and {writer}"
            self.tally.newest = max(self.tally.newest, version)

    def end(self) -> None:
        """Ends the publisher, then the followers, which must have its last version."""
        self.stops["publish"].touch()
        (pid,) = self.publishers
        ended = self.ended(pid)
        assert ended.code == 0, ended.out[-3000:]
        self.stops["follow"].touch()
        for pid in self.followers:
            ended = self.ended(pid)
            assert ended.code == 0, ended.out[-3000:]
            newest = json.loads(ended.out.splitlines()[-1])
            assert newest[:2] == ["end", self.tally.newest], (newest, self.tally.newest)
        assert unickpt.verify(self.root / f"step_{self.tally.newest}").ok
        self.tally.published = self.tally.counts["published"]


@contextmanager
def small_disk() -> Iterator[tuple[Path, bool]]:
    """An empty folder on a small disk, and True; on any disk and False, if it cannot be mounted."""
    folder = Path(tempfile.mkdtemp(prefix="unickpt-weights-"))
    mount = ["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(folder)]
    is_mounted = shutil.which("mount") and not subprocess.run(mount, capture_output=True).returncode
    try:
        yield folder, bool(is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder)


def soak(versions: int, seed: int, every_s: float) -> Tally:
    """Publishes versions to four followers, while both sides are killed.

    Arguments:
        versions: how many.
        seed: of what happens.
        every_s: at most so many seconds between two faults.
    """
    with small_disk() as (disk, has_limit), tempfile.TemporaryDirectory() as output:
        return Soak(disk, Path(output), seed, every_s, has_limit=has_limit).run(versions)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=3, help="seconds between faults, at most")
    asked = parser.parse_args()
    started = time.monotonic()
    tally = soak(asked.versions, asked.seed, asked.every)
    print(
        f"{tally.published} versions, {time.monotonic() - started:.0f} s: 0 mixed, 0 stale without "
        f"notice, 0 wrong numbers. {dict(tally.counts)}. Errors that were raised: "
        f"{dict(tally.errors.most_common())}"
    )


if __name__ == "__main__":
    main()
