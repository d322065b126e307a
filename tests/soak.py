"""A soak: jobs of torch ranks and of JAX processes that are killed again and again, with kill -9.

    python tests/soak.py --kills 1000
    python tests/soak.py --kills 100 --s3

Each lane is one training run in a folder of its own, some with a second tier; with `--s3` the root
is on an S3 server on this machine, and the second tier is on disk. A round starts a job
that resumes from the newest step, checks what it loaded bit for bit, and saves further steps while
it changes its state in place; some of its processes, or all, are killed at a random moment. A
reader loads the newest step all the while. After each round every committed step must be whole and
must hold exactly the state of that step, and no step that was reported committed may be missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from support import forks, s3_server
from support.forks import Ended, Forks
from support.processes import free_port

import unickpt
from unickpt import Checkpointer
from unickpt.storage import paths

MANY = 6  # steps that a job saves, if it lives
_READY_S = 60.0
_PATIENCE_S = 300.0  # `SaveOptions.timeout_s` of a job that is left alone
_BUCKET = "soak"


@dataclass(frozen=True)
class Pace:
    """Times that depend on the storage, in seconds.

    Arguments:
        timeout: `SaveOptions.timeout_s` of a job that is killed, so that what is left of it soon
            ends.
        window: a job is killed at most so long after it has started to save.
        pause: of a reader between two loads.
        lease: how often the lease on object storage is renewed, when it expires, and how long a
            job that took it over leaves remains alone; the library's own times would make each job
            wait for 40 s.
    """

    timeout: float
    window: float
    pause: float
    lease: tuple[float, float, float] | None = None


DISK = Pace(timeout=3.0, window=0.6, pause=0.02)
S3 = Pace(timeout=15.0, window=5.0, pause=0.2, lease=(0.2, 1.0, 900.0))


def arrays(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """The state of a step: every element differs from that of other steps, but for `frozen`."""
    rng = np.random.default_rng(step)
    return {
        "sharded": rng.random((301, 203), np.float32),
        "columns": rng.integers(0, 1 << 40, (57, 64)),
        "replicated": rng.random(70_000, np.float32),
        "statistics": rng.random(33, np.float64),
        "frozen": np.arange(50_000),
    }


def check_tree(tree: Any, step: int, count: int) -> None:
    """Raises AssertionError unless a tree of NumPy arrays is the state of a step."""
    for name, expected in arrays(step).items():
        found = tree[name]
        assert found.dtype == expected.dtype, f"step {step}: {name}: {found.dtype}"
        assert found.tobytes() == expected.tobytes(), f"step {step}: {name} differs"
    assert tree["step"] == step, f"step {step} holds {tree['step']}"
    mine = tuple(1000 * step + process for process in range(count))
    assert tree["mine"].values == mine, f"step {step}: {tree['mine']}"


_HEAD = f"""
import json, os, sys, time
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
import numpy as np
import unickpt
from soak import arrays
from unickpt.commit import lease

root, local, index, count, port, first, many, timeout, lease_times = ARGS
if lease_times:
    lease._RENEW_S, lease._EXPIRES_S, lease._SETTLES_S = lease_times

def run(make, change, check):
    options = unickpt.SaveOptions(timeout_s=timeout, chunk_bytes=16 << 10, fsync=False)
    arguments = {{"keep_last": 2, "options": options, "local": local}}
    arguments["keep"] = unickpt.Retention(keep_every=10)
    arguments["reuse"] = not root.startswith("s3:")  # there, more steps stay than are kept
    with unickpt.Checkpointer(root, **arguments) as checkpointer:
        state = {{**make(first), "step": first, "mine": unickpt.PerProcess(0)}}
        if first:
            state = checkpointer.load(state, step=first)
            check(state, first)
            assert state["mine"].value == 1000 * first + index, state["mine"]
        pending = {{}}
        print(json.dumps("ready"), flush=True)
        for step in range(first + 1, first + 1 + many):
            state = change(state, step)
            state["step"], state["mine"] = step, unickpt.PerProcess(1000 * step + index)
            pending[step] = checkpointer.save(step, state)
            for other in [s for s in pending if pending[s].done()]:
                pending.pop(other).result()
                print(json.dumps(other), flush=True)
        state = change(state, 0)  # what is in flight must not see this
        for other in pending:
            pending[other].result()
            print(json.dumps(other), flush=True)

def safely(job):
    try:
        job()
    except unickpt.UnickptError as error:
        print(json.dumps(f"{{type(error).__name__}}: {{error}}"), flush=True)
"""

TORCH = (
    _HEAD
    + """
import torch
import torch.distributed as dist
from datetime import timedelta
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

torch.set_num_threads(1)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(index),
               "WORLD_SIZE": str(count)}
try:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicate", "shard"))
except Exception as error:  # another rank was killed before it came here
    print(json.dumps(f"gloo: {error}"), flush=True)
    os._exit(0)
placements = {"sharded": [Shard(0), Shard(1)], "columns": [Replicate(), Shard(1)]}

def make(step):
    whole = {name: torch.from_numpy(array) for name, array in arrays(step).items()}
    for name, placed in placements.items():
        whole[name] = distribute_tensor(whole[name], mesh, placed, src_data_rank=None)
    return whole

def local_part(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def change(state, step):
    for name, new in make(step).items():
        local_part(state[name]).copy_(local_part(new))  # in place, as an optimizer does
    return state

def check(state, step):
    for name, expected in make(step).items():
        assert torch.equal(local_part(state[name]), local_part(expected)), name

safely(lambda: run(make, change, check))
"""
)

JAX = (
    _HEAD
    + """
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
try:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index, initialization_timeout=20)
    mesh = jax.make_mesh((2, 2), ("x", "y"))
except Exception as error:  # another process was killed before it came here
    print(json.dumps(f"jax.distributed: {error}"), flush=True)
    os._exit(0)
specs = {"sharded": P(None, None), "columns": P(None, ("x", "y")), "replicated": P("x"),
         "statistics": P(), "frozen": P(("x", "y"))}

def make(step):
    return {
        name: jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, specs[name]), lambda at, array=array: array[at])
        for name, array in arrays(step).items()
    }

def change(state, step):
    for name in specs:
        state[name].delete() if step else None  # as a step that donates its state does
    return {**state, **make(step)}

def check(state, step):
    for name, expected in arrays(step).items():
        for shard in state[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), name

safely(lambda: run(make, change, check))
"""
)

IMPORTS = {
    "torch": ["torch", "torch.distributed.tensor", "torch.distributed.fsdp"],
    "jax": ["jax", "jax.experimental.multihost_utils"],
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "NPROC": "32",  # XLA's threads; gloo's collectives can block all of a few
}

READER = f"""
import json, os, sys, time
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
import unickpt
from soak import check_tree

root, count, stop, pause = ARGS
loads = 0
while not os.path.exists(stop):
    checkpointer = unickpt.Checkpointer(root)
    floor = checkpointer.latest()
    if floor is None:
        time.sleep(0.01)
        continue
    try:
        tree = checkpointer.load(fallback=True)
        assert checkpointer.loaded_step >= floor, (checkpointer.loaded_step, floor)
        check_tree(tree, checkpointer.loaded_step, count)
    except Exception as error:
        print(json.dumps(f"{{type(error).__name__}}: {{error}}"), flush=True)
        os._exit(1)
    loads += 1
    time.sleep(pause)
print(json.dumps(loads), flush=True)
"""


@dataclass
class Tally:
    """What a soak did."""

    kills: int = 0
    jobs: int = 0
    steps: int = 0
    loads: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **more: int) -> None:
        with self.lock:
            for name, count in more.items():
                setattr(self, name, getattr(self, name) + count)


class Lane:
    """One training run, one job after another in one folder.

    Arguments:
        folder: its own, on disk.
        root: where its steps go.
        pace: how long what takes on the storage of `root`.
        seed: of when and what is killed.
        source: of a process of the job.
        count: processes of a job.
        tiers: 1 or 2.
        imports: what takes a process long to import.
    """

    def __init__(
        self,
        folder: Path,
        root: Path | str,
        pace: Pace,
        seed: int,
        source: str,
        count: int,
        tiers: int,
        imports: list[str],
        tally: Tally,
    ) -> None:
        folder.mkdir()
        self.forks = Forks(folder, *imports, env=ENVIRONMENT)
        self.root, self._pace = root, pace
        self.local = folder / "local" if tiers == 2 else None
        self._source, self._count, self._tally, self._folder = source, count, tally, folder
        self._committed = 0
        self._rng = random.Random(f"{seed} {folder.name}")

    def run(self, kills: int) -> None:
        """Rounds until the job's processes were killed so often, then one that is left alone."""
        try:
            killed = rounds = 0
            while killed < kills:
                killed += self._round(rounds)
                rounds += 1
            self._round(rounds, spare=True)
            self._check_clean()
        finally:
            self.forks.close()

    def _round(self, number: int, *, spare: bool = False) -> int:
        stop = self._folder / f"stop_{number}"
        pace, port = self._pace, free_port()
        reader = self.forks.start(READER, str(self.root), self._count, str(stop), pace.pause)
        lease = pace.lease
        if lease and (spare or self._rng.random() < 0.5):
            lease = (*lease[:2], 0.0)  # as a job that starts long after the killed one
        pids = [
            self.forks.start(
                self._source, str(self.root), self.local and str(self.local), index, self._count,
                port, self._committed, MANY, _PATIENCE_S if spare else pace.timeout, lease,
            )
            for index in range(self._count)
        ]  # fmt: skip
        if not spare:
            self._kill(pids)
        ended = self.forks.wait_all(pids)
        stop.touch()
        read = self.forks.wait(reader)
        assert read.code == 0, f"{self.root}: the reader alongside: {read.out}"
        return self._check(ended, read, spare)

    def _kill(self, pids: list[int]) -> None:
        rng = self._rng
        if rng.random() < 0.9:  # else while the job starts
            self._wait_ready(pids[0])
        time.sleep(rng.uniform(0, self._pace.window))
        victims = rng.choice([pids, pids, pids[:1], [rng.choice(pids)]])
        for pid in victims:
            self.forks.kill(pid)
        if rng.random() < 0.8:  # as a scheduler does with the rest of a job
            time.sleep(rng.uniform(0, 0.5))
            for pid in pids:
                self.forks.kill(pid)

    def _wait_ready(self, pid: int) -> None:
        deadline = time.monotonic() + _READY_S
        while '"ready"' not in self.forks.said(pid) and self.forks.runs(pid):
            assert time.monotonic() < deadline, f"not ready: {self.forks.said(pid)}"
            time.sleep(0.01)

    def _check(self, ended: list[Ended], read: Ended, spare: bool) -> int:
        told = []
        for process in ended:
            for line in process.out.splitlines():
                with suppress(ValueError):
                    told.append(json.loads(line))
            assert "AssertionError" not in process.out, process.out
            whole = process.code == 0 and f"\n{self._committed + MANY}\n" in process.out
            assert not spare or whole, f"a job that was left alone: {process}"
            self._tally.ends[_end_of(process)] += 1
        checkpointer = Checkpointer(self.root, local=self.local)
        steps = checkpointer.steps()
        newest = max(steps, default=0)
        least = max([self._committed, *(t for t in told if isinstance(t, int))])
        assert newest >= least, f"{self.root}: step {least} was committed, the newest is {newest}"
        for step in steps:
            check_tree(checkpointer.load(step=step), step, self._count)
        if steps:
            assert unickpt.verify(checkpointer.path(newest)).ok
        killed = sum(process.code == -9 for process in ended)
        self._tally.add(kills=killed, jobs=1, steps=newest - self._committed, loads=read.last)
        self._committed = newest
        return killed

    def _check_clean(self) -> None:
        """After a job that was not killed, only what retention keeps is left."""
        steps = Checkpointer(self.root).steps()
        newest = self._committed
        assert set(steps) <= {newest - 1, newest, *range(10, newest, 10)}, steps
        assert {newest - 1, newest} <= set(steps), steps
        for folder in [self.root, *([self.local] if self.local else [])]:
            for name in names_in(folder):
                if name != ".unickpt.lock":
                    there = f"{folder}/{name}: {sorted(keys_in(f'{folder}/{name}'))}"
                    assert int(name.removeprefix("step_")) in steps, f"debris: {there}"
                    attempts = names_in(f"{folder}/{name}/processes")
                    assert len(attempts) == 1, f"debris: {there}"


def keys_in(folder: Path | str) -> list[str]:
    """The names of all files below a folder."""
    return [k.decode() for k in paths.resolve(folder).store(paths.context()).list().result()]


def names_in(folder: Path | str) -> set[str]:
    """The names of the files and folders in a folder, also of empty folders on disk."""
    if "://" not in str(folder):
        return set(os.listdir(folder))
    return {key.partition("/")[0] for key in keys_in(folder)}


def _end_of(process: Ended) -> str:
    """How a process ended, in a word or two: an error that it told, or its exit code."""
    lines = process.out.splitlines()
    last = lines[-1].strip('"').partition(":")[0] if lines else ""
    names_error = last.replace(".", "").isalpha() and last != "ready"
    return last if process.code in (0, 1) and names_error else f"exit code {process.code}"


@contextmanager
def s3() -> Iterator[str]:
    """An S3 server with an empty bucket, in a process of its own; yields the bucket's URL."""
    port = free_port()
    arguments = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, *arguments], **quiet)  # type: ignore[call-overload]
    try:
        endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                s3_server.make_bucket(endpoint, _BUCKET)
                break
            except OSError:
                assert server.poll() is None, "the S3 server does not start"
                assert time.monotonic() < deadline, "the S3 server does not answer"
                time.sleep(0.1)
        with pytest.MonkeyPatch.context() as patch:
            s3_server.use(endpoint, patch)
            yield f"s3://{_BUCKET}"
    finally:
        server.kill()
        server.wait()


def soak(kills: int, seed: int, folder: Path, url: str | None = None) -> Tally:
    """Kills processes of torch and of JAX jobs, in four lanes at once.

    Arguments:
        kills: how many, in all.
        seed: of when and what is killed.
        folder: an empty folder on disk.
        url: where the lanes have their roots; in `folder` if None.
    """
    tally = Tally()
    lanes = []
    for name, source, count in (("torch", TORCH, 4), ("jax", JAX, 2)):
        for tiers in (1, 2):
            own = folder / f"{name}_{tiers}"
            root = f"{url}/{own.name}" if url else own / "root"
            arguments = source, count, tiers, IMPORTS[name], tally
            lanes.append(Lane(own, root, S3 if url else DISK, seed, *arguments))
    with ThreadPoolExecutor(len(lanes)) as pool:
        for lane in [pool.submit(lane.run, -(-kills // len(lanes))) for lane in lanes]:
            lane.result()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--s3", action="store_true", help="with the root on an S3 server")
    asked = parser.parse_args()
    forks.LIMIT_S = _PATIENCE_S
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if asked.s3:
            with s3() as url:
                tally = soak(asked.kills, asked.seed, Path(folder), url)
        else:
            tally = soak(asked.kills, asked.seed, Path(folder))
    print(
        f"{tally.kills} processes killed in {tally.jobs} jobs, {tally.steps} steps committed, "
        f"{tally.loads} loads alongside, {time.monotonic() - started:.0f} s; nothing lost, nothing "
        f"damaged. How processes ended: {dict(tally.ends.most_common())}"
    )


if __name__ == "__main__":
    main()
