"""Jobs that publish: of JAX processes, of ranks of which one is killed, and through a bucket."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import s3_server
from support.processes import Processes

from unickpt import UnickptError
from unickpt.plugins.weights import Follower

pytestmark = [pytest.mark.plugins, pytest.mark.integration]
VERSIONS = 4
JAX = """
import sys
import numpy as np
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from unickpt import SaveOptions
from unickpt.plugins.weights import Publisher

mesh = jax.make_mesh((2, 2), ("x", "y"))
specs = {"w": P("y", "x"), "b": P()}
shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

host = {"w": np.asarray(jnp.arange(96 * 64.0).reshape(96, 64).astype(jnp.bfloat16)).copy()}
host["b"] = np.zeros(5, np.float32)
options = SaveOptions(chunk_bytes=1 << 10, fsync=False, timeout_s=60)
with Publisher(sys.argv[1], options=options) as publisher:
    for version in range(4):
        host["w"][version] *= -1
        host["b"][0] = version
        state = {
            name: jax.make_array_from_callback(array.shape, shardings[name], array.__getitem__)
            for name, array in host.items()
        }
        publisher.publish(version, state).result()
"""


def whole_state(version: int) -> dict[str, torch.Tensor]:
    """What the job of JAX publishes."""
    w = torch.arange(96 * 64.0).reshape(96, 64).bfloat16()
    w[: version + 1] *= -1
    b = torch.zeros(5)
    b[0] = version
    return {"w": w, "b": b}


def zeros() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(96, 64, dtype=torch.bfloat16), "b": torch.ones(5)}


def equal(live: dict[str, torch.Tensor], version: int) -> bool:
    expected = whole_state(version)
    return all(torch.equal(live[name], expected[name]) for name in live)


def test_jax_processes_publish_and_a_torch_engine_follows(
    tmp_path: Path, processes: Processes
) -> None:
    job = processes.jax(2, 2, JAX, tmp_path / "run")
    live, seen = zeros(), list[int]()
    with Follower(tmp_path / "run", live) as follower:
        while follower.version != VERSIONS - 1:
            time.sleep(0.02)
            assert not any(process.poll() for process in job), job[0].communicate()[1][-3000:]
            if follower.update():
                assert follower.version is not None
                seen.append(follower.version)
                assert equal(live, follower.version)
        assert follower.check().ok
        for version in range(VERSIONS):
            follower.rollback(version)
            assert equal(live, version)
    processes.finish(job)
    assert seen == sorted(set(seen))


RANKS = """
import sys, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from support import dying
from unickpt import SaveOptions
from unickpt.plugins.weights import Publisher

def die():
    time.sleep(1)  # so that the others have learned this process's id
    die_now()

dying.die, die_now = die, dying.die
root, first, doomed, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (3,))
whole = torch.arange(96 * 64.0).reshape(96, 64).bfloat16()
whole[:first] *= -1
options = SaveOptions(chunk_bytes=1 << 10, fsync=False, timeout_s=60)
publisher = Publisher(root, options=options)
for version in range(first, first + 2):
    whole[version] *= -1
    w = distribute_tensor(whole, mesh, [Shard(0)])
    b = distribute_tensor(torch.tensor([version, 0, 0, 0, 0.0]), mesh, [Replicate()])
    if version == 1 and dist.get_rank() == doomed:
        dying.die_at(step, "before")
    try:
        publisher.publish(version, {"w": w, "b": b}).result()
        print(version, flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        break
"""


@pytest.mark.parametrize(
    ("doomed", "step"),
    [
        (1, "storage.data_files.DataFile:add"),
        (2, "commit.attempt.Attempt:publish"),
        (0, "commit.root.Root:replace"),
    ],
)
def test_a_rank_that_is_killed_while_it_publishes_leaves_no_version(
    doomed: int, step: str, tmp_path: Path, processes: Processes
) -> None:
    root, live = tmp_path / "run", zeros()
    job = processes.torch(3, RANKS, root, 0, doomed, step)
    with Follower(root, live) as follower:
        while job[doomed].poll() is None:
            follower.update()
            assert follower.version in (None, 0)
            time.sleep(0.01)
        outputs = {rank: job[rank].communicate(timeout=60)[0] for rank in range(3)}
        assert job[doomed].returncode == -9
        assert outputs.pop(doomed) == "0\n"
        for lines in outputs.values():
            first, second = lines.splitlines()
            assert (first, second.partition(" ")[0]) == ("0", "ProcessFailed")
        follower.update()
        assert (follower.version, follower.versions()) == (0, [0])
        assert equal(live, 0)
        assert follower.check().ok
        again = processes.torch(3, RANKS, root, 1, -1, "")
        assert processes.finish(again) == ["1\n2\n"] * 3
        assert follower.update()
        assert follower.version == 2
        assert equal(live, 2)
        assert follower.rollback(1).check().ok
        assert equal(live, 1)


BUCKET = """
import json, pathlib, sys, time
import numpy as np
from unickpt import SaveOptions
from unickpt.plugins.weights import Publisher

words = np.random.default_rng(0).integers(0, 1 << 16, (64, 64)).astype(np.uint16)
options = SaveOptions(chunk_bytes=1 << 11)
with Publisher("s3://bucket/run", options=options) as publisher:
    for version in range(4):
        while not pathlib.Path(sys.argv[1], str(version)).exists():
            time.sleep(0.01)
        words[version] += 1
        publisher.publish(version, {"w": words}).result()
        print(json.dumps(words.tolist()), flush=True)
"""


@pytest.fixture
def bucket(moto: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bucket of a server on this machine."""
    import boto3

    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "bucket")
    keys = {"aws_access_key_id": "anyone", "aws_secret_access_key": "anything"}
    yield boto3.resource("s3", endpoint_url=moto, region_name="us-east-1", **keys).Bucket("bucket")
    s3_server.remove_bucket(moto, "bucket")


def test_an_object_of_a_bucket_that_is_lost_leaves_the_old_version(
    bucket: Any, processes: Processes, tmp_path: Path
) -> None:
    process = processes.forked(BUCKET, tmp_path)
    live, expected = np.zeros((64, 64), np.uint16), dict[int, Any]()

    def publish(version: int) -> None:
        (tmp_path / str(version)).touch()
        expected[version] = np.array(json.loads(process.stdout.readline()), np.uint16)

    with Follower("s3://bucket/run", {"w": live}) as follower:
        for version in range(2):
            publish(version)
            assert follower.update()
            assert np.array_equal(live, expected[version])
        publish(2)
        objects = bucket.objects.filter(Prefix="run/step_2/")
        stored = {entry.key: entry.get()["Body"].read() for entry in objects}
        refused = 0
        for key, body in stored.items():
            bucket.Object(key).delete()
            try:
                follower.update()
                assert follower.version in (1, 2)  # without some objects it is no version, or whole
            except UnickptError:
                refused += 1
                assert follower.version == 1
            assert np.array_equal(live, expected[follower.version])
            follower.rollback(1)
            assert np.array_equal(live, expected[1])
            bucket.put_object(Key=key, Body=body)
        assert refused
        publish(3)
        assert follower.update()
        assert follower.version == 3
        assert np.array_equal(live, expected[3])
        assert follower.check().ok
