"""Real processes: publishers and followers that are killed, and ranks that publish together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes

import unickpt
from unickpt.plugins.weights import Follower, Publisher

pytestmark = pytest.mark.plugins
SHAPE = (256, 256)
STATE = """
import numpy as np
SHAPE = (256, 256)

def state(version):
    words = np.random.default_rng(0).integers(0, 1 << 16, SHAPE).astype(np.uint16)
    for step in range(version):
        at = np.random.default_rng(step).integers(0, words.size, words.size // 50)
        words.reshape(-1)[at] += 1
    return {"w": words, "last": np.full(7, version)}
"""
PUBLISH = (
    STATE
    + """
import sys
from unickpt import SaveOptions
from unickpt.plugins.weights import Publisher

options = SaveOptions(chunk_bytes=1 << 14, fsync=False)
with Publisher(sys.argv[1], keep_last=3, options=options) as publisher:
    version = max(publisher.versions(), default=-1) + 1
    while True:
        publisher.publish(version, state(version)).result()
        version += 1
"""
)
FOLLOW = (
    STATE
    + """
import sys, time
from unickpt.plugins.weights import Follower

live = {
    "w": np.memmap(sys.argv[2] + "/w", np.uint16, "r+", shape=SHAPE),
    "last": np.memmap(sys.argv[2] + "/last", np.int64, "r+", shape=(7,)),
}
with Follower(sys.argv[1], live, lease_s=0.5) as follower:
    while True:
        time.sleep(0.01)
        if follower.update():
            expected = state(follower.version)
            for name in expected:
                assert live[name].tobytes() == expected[name].tobytes(), follower.version
            print(follower.version, flush=True)
"""
)
namespace: dict[str, Any] = {}
exec(STATE, namespace)
state = namespace["state"]


def bits(tree: Any) -> list[bytes]:
    return [tree[name].tobytes() for name in ("w", "last")]


def test_a_killed_publisher_leaves_whole_versions_and_another_goes_on(
    tmp_path: Path, processes: Processes
) -> None:
    rng = np.random.default_rng(0)
    live = {"w": np.zeros(SHAPE, np.uint16), "last": np.zeros(7, int)}
    seen = list[int]()
    with Follower(tmp_path / "run", live) as follower:
        for _ in range(5):
            process = processes.forked(PUBLISH, tmp_path / "run")
            until, wanted = time.monotonic() + rng.random(), len(seen) + 3
            while time.monotonic() < until or len(seen) < wanted:
                assert process.poll() is None, process.communicate()
                if follower.update():
                    assert follower.version is not None
                    seen.append(follower.version)
                    assert bits(live) == bits(state(follower.version))
                time.sleep(0.01)
            process.kill()
            process.wait()
            follower.update()
            assert bits(live) == bits(state(follower.version))
            assert follower.check().ok
    assert seen == sorted(set(seen))


def test_a_killed_follower_is_followed_by_one_that_mends_what_it_left(
    tmp_path: Path, processes: Processes
) -> None:
    rng, memory = np.random.default_rng(1), tmp_path / "memory"
    memory.mkdir()
    (memory / "w").write_bytes(bytes(2 * 256 * 256))
    (memory / "last").write_bytes(bytes(8 * 7))
    publisher = processes.forked(PUBLISH, tmp_path / "run")
    for _ in range(4):
        follower = processes.forked(FOLLOW, tmp_path / "run", memory)
        lines = [follower.stdout.readline() for _ in range(3)]
        time.sleep(rng.random() / 5)
        assert follower.poll() is None, follower.communicate()
        follower.kill()
        follower.wait()
        numbers = [int(line) for line in lines]
        assert numbers == sorted(set(numbers))
    publisher.kill()
    publisher.wait()
    # The notes of the killed ones expire.
    with Publisher(tmp_path / "run", keep_last=1) as last:
        for _ in range(2):
            version = last.versions()[-1] + 1
            last.publish(version, state(version)).result()
            last.wait()
            time.sleep(0.6)
        last.publish(version + 1, state(version + 1)).result()
    assert unickpt.load(tmp_path / "run" / f"step_{version + 1}")["last"][0] == version + 1
    assert not list((tmp_path / "run/.followers").glob("*.json"))


def test_a_second_publisher_in_another_process_is_refused(
    tmp_path: Path, processes: Processes
) -> None:
    process = processes.forked(PUBLISH, tmp_path / "run")
    while not (tmp_path / "run/step_1").exists():
        assert process.poll() is None, process.communicate()
    with (
        Publisher(tmp_path / "run") as second,
        pytest.raises(unickpt.SaveConflict, match="another job saves here now"),
    ):
        second.publish(10**6, state(0)).result()
    assert process.poll() is None
    process.kill()


RANKS = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, Replicate, distribute_tensor
from unickpt import SaveOptions
from unickpt.plugins.weights import Publisher

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
w = distribute_tensor(torch.randn(64, 48).bfloat16(), mesh, [Shard(0)])
v = distribute_tensor(torch.randn(32, 64), mesh, [Shard(1)])
b = distribute_tensor(torch.zeros(5), mesh, [Replicate()])
options = SaveOptions(chunk_bytes=1 << 11, fsync=False)
with Publisher(sys.argv[1], options=options) as publisher:
    for version in range(6):
        w.to_local()[version] += 1
        v.to_local()[:, version] *= 2
        b.to_local()[0] = version
        full = {name: x.full_tensor() for name, x in (("w", w), ("v", v), ("b", b))}
        if dist.get_rank() == 0:
            torch.save(full, f"{sys.argv[2]}/{version}.pt")
        dist.barrier()
        publisher.publish(version, {"w": w, "v": v, "b": b}).result()
dist.destroy_process_group()
"""


def test_ranks_publish_their_shards_and_one_follower_has_the_whole(
    tmp_path: Path, processes: Processes
) -> None:
    import torch

    (tmp_path / "expected").mkdir()
    ranks = processes.torch(2, RANKS, tmp_path / "run", tmp_path / "expected")
    live = {
        "w": torch.zeros(64, 48, dtype=torch.bfloat16),
        "v": torch.zeros(32, 64),
        "b": torch.zeros(5),
    }
    seen = set[int]()
    with Follower(tmp_path / "run", live) as follower:
        while follower.version != 5:
            time.sleep(0.02)
            assert not any(rank.poll() for rank in ranks), [rank.communicate() for rank in ranks]
            if follower.update():
                assert follower.version is not None
                seen.add(follower.version)
                expected = torch.load(tmp_path / f"expected/{follower.version}.pt")
                assert all(torch.equal(live[name], expected[name]) for name in live)
        assert follower.check().ok
        for version in range(5):
            follower.rollback(version)
            expected = torch.load(tmp_path / f"expected/{version}.pt")
            assert all(torch.equal(live[name], expected[name]) for name in live)
    processes.finish(ranks)
