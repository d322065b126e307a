"""jax.distributed jobs whose roles save by themselves: an actor on devices of processes 0, 2 and 3,
and a critic on those of process 1.

The functions that take a folder run in the processes themselves.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import TESTS
from support.processes import PROCESS_TIMEOUT_S, Processes

import unickpt

ACTOR, CRITIC = (0, 2, 3), (1,)
WHOLE = {"actor": np.random.default_rng(1).random((24, 7), np.float32),
         "critic": np.random.default_rng(2).random((10, 3), np.float32)}  # fmt: skip


def source(work: Callable[[str], None]) -> str:
    return (
        f"import sys\nsys.path[:0] = [{TESTS!r}, {str(Path(__file__).parent)!r}]\n"
        f"import {__name__}\n{__name__}.{work.__name__}(sys.argv[1])"
    )


def of_processes(*processes: int) -> list[Any]:
    return [device for device in jax.devices() if device.process_index in processes]


class Role:
    """The part of the job to which this process belongs."""

    def __init__(self) -> None:
        self.name, self.processes = (
            ("critic", CRITIC) if jax.process_index() == 1 else ("actor", ACTOR)
        )
        self.devices = of_processes(*self.processes)
        self.mesh = Mesh(np.array(self.devices), ("x",))
        self.whole = WHOLE[self.name]

    def options(self, **more: Any) -> unickpt.SaveOptions:
        # As a list or as a mesh, in any order: the same devices are the same group.
        group = self.mesh if jax.process_index() % 3 else self.devices[::-1]
        given = {"chunk_bytes": 64, "fsync": False, "timeout_s": 60, **more}
        return unickpt.SaveOptions(group=group, **given)

    def tree(self, add: float = 0) -> dict[str, Any]:
        whole = self.whole + np.float32(add)
        return {
            "rows": put(whole, NamedSharding(self.mesh, P("x"))),
            "all": put(whole, NamedSharding(self.mesh, P())),
            "host": whole,
            "local": jax.numpy.asarray(whole),
            "rng": unickpt.PerProcess(jax.process_index()),
        }


def put(whole: Any, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype
    )


def is_right(found: jax.Array, whole: np.ndarray) -> bool:
    return all(
        np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()
        for shard in found.addressable_shards
    )


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# --- saving and loading ---------------------------------------------------------------------------


def save_in_roles(folder: str) -> None:
    role, process = Role(), jax.process_index()
    report = unickpt.save(f"{folder}/{role.name}", role.tree(), options=role.options())
    assert (report.processes, report.process) == (
        len(role.processes), role.processes.index(process))  # fmt: skip
    with unickpt.Checkpointer(f"{folder}/{role.name}_run", options=role.options()) as run:
        for step in (1, 2, 3):
            run.save(step, role.tree(step))

    for exchange in (False, True):
        options = unickpt.LoadOptions(group=role.devices, exchange=exchange, timeout_s=100)
        columns = NamedSharding(role.mesh, P(None, None))
        like = {
            "rows": jax.ShapeDtypeStruct(role.whole.shape, np.float32, sharding=columns),
            "host": np.zeros_like(role.whole),
            "rng": unickpt.PerProcess(),
        }
        got = unickpt.load(f"{folder}/{role.name}", like, strict=False, options=options)
        assert is_right(got["rows"], role.whole)
        assert got["host"].tobytes() == role.whole.tobytes()
        assert got["rng"].value == process
    # What a role saved, the whole job loads.
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("y",)), P(None, None))
    for name in WHOLE:
        path = Path(folder) / name
        while not (path / "manifest.ocdbt").exists():
            time.sleep(0.05)
        like = {"rows": jax.ShapeDtypeStruct(WHOLE[name].shape, np.float32, sharding=everywhere)}
        for exchange in (False, True):
            options = unickpt.LoadOptions(exchange=exchange, timeout_s=100)
            got = unickpt.load(path, like, strict=False, options=options)
            assert is_right(got["rows"], WHOLE[name])
    print(json.dumps("right"))


def test_each_role_saves_and_loads_its_part(processes: Processes, tmp_path: Path) -> None:
    outputs = processes.finish(processes.jax(4, 2, source(save_in_roles), tmp_path))
    assert [json.loads(out.splitlines()[-1]) for out in outputs] == ["right"] * 4
    for name, members in (("actor", ACTOR), ("critic", CRITIC)):
        stored, count = unickpt.open(tmp_path / name), len(members)
        assert stored.index.processes == count
        assert stored["rows"].layout.spec == ("x", None)
        assert stored["rows"].layout.mesh.processes == tuple(
            np.repeat(np.arange(count), 2).tolist()
        )
        assert stored["local"].layout == stored["host"].layout
        found = unickpt.load(tmp_path / name)
        for array in ("rows", "all", "host", "local"):
            assert found[array].tobytes() == WHOLE[name].tobytes()
        assert found["rng"].values == members
        for step in (1, 2, 3):
            found = unickpt.load(tmp_path / f"{name}_run/step_{step}")
            assert found["rows"].tobytes() == (WHOLE[name] + np.float32(step)).tobytes()


# --- deciding, and what goes wrong ----------------------------------------------------------------


def decide_and_fail(folder: str) -> None:
    role, process = Role(), jax.process_index()
    when = unickpt.SaveEvery(seconds=1000, preemption=True)
    roots = [f"{folder}/{name}" for name in WHOLE]
    with unickpt.Checkpointer(
        f"{folder}/alone_{role.name}", save_every=when, options=role.options()
    ) as run:
        assert not run.should_save(1)
        if process == 2:
            run.preempt()
        assert run.should_save(2) == run.preempted == (role.name == "actor")
    with unickpt.Checkpointer(f"{folder}/{role.name}", roles=roots, options=role.options()) as run:
        sync_global_devices("the Checkpointers of all roles are there before any of them saves")
        run.save(1, role.tree(1), wait=True)
    far = NamedSharding(Mesh(np.array(of_processes(0, 1)), ("x",)), P("x"))
    shared = put(np.zeros((8, 2), np.float32), far)
    bad = object() if process == 2 else 1
    found = {
        "outside": error_of(
            lambda: unickpt.save(f"{folder}/far_{role.name}", {"w": shared}, options=role.options())
        ),
        "no member": error_of(lambda: unickpt.SaveOptions(group=of_processes((process + 1) % 4))),
        "no device": error_of(lambda: unickpt.LoadOptions(group=[])),
        "bad leaf": error_of(
            lambda: unickpt.save(f"{folder}/bad_{role.name}", {"b": bad}, options=role.options())
        ),
        "user's group": error_of(lambda: unickpt.save(
            f"{folder}/user_{process}", role.tree(),
            options=unickpt.SaveOptions(group=unickpt.ProcessGroup(0, 1, f"s{process}")))),
    }  # fmt: skip
    # A group of other devices has never agreed on anything: process 3 does not come.
    some = (
        unickpt.SaveOptions(group=of_processes(0, 2, 3)[1:], timeout_s=2) if process != 1 else None
    )
    if some is not None and process == 2:
        found["late"] = error_of(lambda: unickpt.save(f"{folder}/late", {"w": 1}, options=some))
        each = unickpt.SaveEvery(seconds=5)
        with unickpt.Checkpointer(f"{folder}/late_run", save_every=each, options=some) as run:
            found["undecided"] = error_of(lambda: run.should_save(1))
    print(json.dumps(found))


def test_each_role_decides_and_fails_for_itself(processes: Processes, tmp_path: Path) -> None:
    outputs = processes.finish(processes.jax(4, 2, source(decide_and_fail), tmp_path))
    found = [json.loads(out.splitlines()[-1]) for out in outputs]
    for process, told in enumerate(found):
        members, missing = ("process 1", "process 0 is") if process == 1 else (
            "processes 0, 2, 3", "process 1 is")  # fmt: skip
        assert told["outside"].startswith("UnsupportedLeaf"), told
        assert "'w': an array on processes 0, 1 cannot" in told["outside"]
        assert f"by {members} of jax.distributed (SaveOptions.group)" in told["outside"]
        assert missing in told["outside"]
        assert told["no member"].startswith(
            f"ValueError: process {process} has none of the 2 devices"
        )
        assert told["no device"].startswith("TypeError: group is of type list; ")
    assert [told["bad leaf"].partition(":")[0] for told in found] == [
        "ProcessFailed", "no error", "UnsupportedLeaf", "ProcessFailed"]  # fmt: skip
    assert "process 1 failed: " in found[3]["bad leaf"]
    assert "in order, processes 0, 2, 3 of jax.distributed" in found[3]["bad leaf"]
    for process in (0, 2, 3):
        assert "give SaveOptions(group=) their devices" in found[process]["user's group"]
    assert found[1]["user's group"] == "no error", "it has all of its arrays"
    for what in ("late", "undecided"):
        assert found[2][what].startswith("SaveTimeout: "), found[2]
        assert "process 2 in the group of processes 0, 2, 3 of jax.distributed" in found[2][what]
    assert "waited for process 0, which did not start to save" in found[2]["late"]
    roots = [tmp_path / "actor", tmp_path / "critic"]
    assert unickpt.Checkpointer(roots[0], roles=roots).steps() == [1]


def one_dies(folder: str) -> None:
    from support.dying import die_at

    role, process = Role(), jax.process_index()
    with unickpt.Checkpointer(f"{folder}/{role.name}", options=role.options()) as run:
        run.save(1, role.tree(1), wait=True)
        if process == 1:
            die_at("saving.writer.ChunkWriter:write_all", "before")
        else:
            while not (Path(folder) / "critic/step_2").exists():
                time.sleep(0.01)
        for step in (2, 3, 4):
            run.save(step, role.tree(step), wait=True)
    print(json.dumps("saved"), flush=True)
    os._exit(0)  # JAX ends the others of a job in which a process died


def test_one_role_goes_on_when_another_dies(processes: Processes, tmp_path: Path) -> None:
    started = processes.jax(4, 2, source(one_dies), tmp_path)
    outputs = [each.communicate(timeout=PROCESS_TIMEOUT_S) for each in started]
    assert started[1].returncode == -signal.SIGKILL
    assert [outputs[at][0].splitlines()[-1:] for at in ACTOR] == [['"saved"']] * 3, outputs
    assert unickpt.Checkpointer(tmp_path / "actor").steps() == [1, 2, 3, 4]
    assert unickpt.Checkpointer(tmp_path / "critic").steps() == [1]


# --- in one process -------------------------------------------------------------------------------


@pytest.mark.parametrize("as_mesh", [False, True])
def test_devices_of_one_process_are_a_group(as_mesh: bool, tmp_path: Path) -> None:
    devices = jax.devices()
    group: Any = Mesh(np.array(devices), ("x",)) if as_mesh else devices
    options = unickpt.SaveOptions(group=group, fsync=False)
    report = unickpt.save(tmp_path / "c", {"w": jax.numpy.arange(5)}, options=options)
    assert (report.process, report.processes) == (0, 1)
    found = unickpt.load(tmp_path / "c", options=unickpt.LoadOptions(group=group))
    assert found["w"].tolist() == [0, 1, 2, 3, 4]
    assert unickpt.LoadOptions(group=np.array(devices)).group.count == 1
