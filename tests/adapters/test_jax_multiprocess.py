"""JAX in several processes: meshes over all of them, over some, over none; failures of one.

The functions that take a folder run in the processes themselves.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from support import TESTS
from support.counts import keys_read
from support.processes import Processes

import unickpt
from unickpt.adapters import jax_group

HERE = TESTS
WHOLE = np.random.default_rng(11).random((24, 16), np.float32)
KEYS = 8
MANY_CHUNKS = unickpt.SaveOptions(fsync=False, chunk_bytes=96)
Start = Callable[[Callable[[str], None], Path], list[Any]]


@pytest.fixture
def run(processes: Processes) -> Start:
    """Runs a function of this file in two processes of four devices; returns what they print."""

    def start(work: Callable[[str], None], folder: Path) -> list[Any]:
        name = work.__name__
        source = (
            f"import sys\nsys.path[:0] = [{HERE!r}, {str(Path(__file__).parent)!r}]\n"
            "import jax\nif hasattr(jax.config, 'jax_enable_empty_arrays'):\n"
            "    jax.config.update('jax_enable_empty_arrays', True)\n"
            f"import {__name__}\n{__name__}.{name}(sys.argv[1])"
        )
        outputs = processes.finish(processes.jax(2, 4, source, folder))
        return [json.loads(out.splitlines()[-1]) for out in outputs]

    return start


def devices(*numbers: int) -> np.ndarray:
    """Devices by number: 0 to 3 are process 0's, 4 to 7 process 1's."""
    ordered = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return np.array(ordered)[list(numbers or range(8))]


def named(grid: tuple[int, ...], spec: P, *numbers: int) -> NamedSharding:
    return NamedSharding(Mesh(devices(*numbers).reshape(grid), ("a", "b", "c")[: len(grid)]), spec)


def gspmd() -> Sharding:
    from jax._src.lib import xla_client
    from jax._src.sharding_impls import GSPMDSharding

    tiling = xla_client.OpSharding()
    tiling.type = xla_client.OpSharding.Type.OTHER
    tiling.tile_assignment_dimensions = [2, 4]
    tiling.tile_assignment_devices = [0, 4, 1, 5, 2, 6, 3, 7]
    made: Sharding = GSPMDSharding(tuple(devices()), tiling)
    return made


def shardings() -> dict[str, Sharding]:
    found: dict[str, Sharding] = {
        "rows": named((8,), P("a")),
        "columns": named((8,), P(None, "a")),
        "both": named((4, 2), P("a", "b")),
        "two axes on one dimension": named((2, 4), P(("b", "a"))),
        "partly replicated": named((2, 4), P(None, "b")),
        "fully replicated": named((4, 2), P()),
        "transposed devices": named((4, 2), P("b", "a"), 0, 4, 1, 5, 2, 6, 3, 7),
        "permuted devices": named((2, 2, 2), P(("c", "a")), 6, 1, 3, 4, 0, 7, 2, 5),
        "some of the devices": named((2, 2), P("a", "b"), 1, 5, 6, 2),
        "one device of each process": named((2,), P("a"), 7, 0),
    }
    try:
        found["gspmd"] = gspmd()
    except ImportError:
        print("this JAX has no GSPMDSharding")
    return found


def put(whole: Any, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(
        whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype
    )


def check(found: jax.Array, want: np.ndarray, sharding: Sharding) -> None:
    assert (found.shape, found.dtype, found.sharding) == (want.shape, want.dtype, sharding)
    assert {shard.device for shard in found.addressable_shards} == sharding.addressable_devices
    for shard in found.addressable_shards:
        assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes()


def abstract(like: Any, sharding: Sharding | None) -> Any:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


# --- layouts ------------------------------------------------------------------------------------


def save_and_load_layouts(folder: str) -> None:
    arrays = {name: put(WHOLE, sharding) for name, sharding in shardings().items()}
    keys = jax.random.split(jax.random.key(3), KEYS)
    bits = np.asarray(jax.random.key_data(keys))
    rows = named((8,), P("a"))
    tree = {
        **arrays,
        "keys": jax.random.wrap_key_data(put(bits, rows)),
        "scalar": put(np.float32(-0.0), named((4, 2), P())),
        "empty": put(np.zeros((0, 8), np.int8), named((4, 2), P("a", "b"))),
        # Every process has its own copy of these, all alike.
        "host": WHOLE,
        "local": jax.numpy.asarray(WHOLE),
        "local mesh": jax.device_put(
            WHOLE, NamedSharding(Mesh(np.array(jax.local_devices()), "x"), P(None, "x"))
        ),
        "step": 7,
        "rng": unickpt.PerProcess({"seed": jax.process_index()}),
    }
    report = unickpt.save(f"{folder}/c", tree, options=MANY_CHUNKS)

    for target in shardings().values():
        like = {name: abstract(WHOLE, target) for name in arrays}
        with keys_read() as read:
            found = unickpt.load(f"{folder}/c", like, strict=False)
        for array in found.values():
            check(array, WHOLE, target)
        boxes = target.addressable_devices_indices_map(WHOLE.shape).values()
        needed = sum(chunks_meeting(f"{folder}/c", name, list(boxes)) for name in arrays)
        assert read.keys == 2 + needed, "the index, the digests, each chunk once"

    found = unickpt.load(f"{folder}/c", tree)
    for name in arrays:
        check(found[name], WHOLE, arrays[name].sharding)
    for name in ("host", "local", "local mesh"):
        assert np.asarray(found[name]).tobytes() == WHOLE.tobytes()
    assert found["local mesh"].sharding == tree["local mesh"].sharding
    assert found["local"].devices() == {jax.local_devices()[0]}
    assert (found["step"], found["rng"].value) == (7, {"seed": jax.process_index()})
    check(jax.random.key_data(found["keys"]), bits, jax.random.key_data(tree["keys"]).sharding)
    weak = jax.jit(lambda: 1.0, out_shardings=named((8,), P()))()
    weak_again = unickpt.load(f"{folder}/c", {"scalar": weak}, strict=False)["scalar"]
    assert weak_again.weak_type
    check(weak_again, np.float32(-0.0), weak.sharding)

    # A process without any of the devices gets an array that it knows but does not hold.
    second = named((4,), P("a"), 4, 5, 6, 7)
    far = unickpt.load(f"{folder}/c", {"rows": abstract(WHOLE, second)}, strict=False)["rows"]
    check(far, WHOLE, second)
    assert len(far.addressable_shards) == 4 * jax.process_index()
    print(json.dumps([report.processes, report.written_bytes, report.bytes]))


def chunks_meeting(path: str, name: str, boxes: list[Any]) -> int:
    """How many stored chunks hold an element of these boxes, counted one by one."""
    wanted = np.zeros(WHOLE.shape, bool)
    for box in boxes:
        wanted[box] = True
    count = 0
    for part in unickpt.open(path)[name].parts:
        chunks = (part.chunk_box(number) for number in range(math.prod(part.grid)))
        count += sum(bool(wanted[chunk.slices].any()) for chunk in chunks)
    return count


def test_layouts_over_two_processes(run: Start, tmp_path: Path) -> None:
    reports = run(save_and_load_layouts, tmp_path)
    assert [processes for processes, _, _ in reports] == [2, 2]
    written = [nbytes for _, nbytes, _ in reports]
    assert sum(written) == reports[0][2], "every byte has one writer"
    assert min(written) > 0.4 * sum(written), "replicas share the work"

    stored = unickpt.open(tmp_path / "c")
    specs = {"rows": ("a", None), "two axes on one dimension": (("b", "a"), None),
             "transposed devices": ("b", "a"), "permuted devices": (("c", "a"), None),
             "fully replicated": (None, None), "keys": ("a", None)}  # fmt: skip
    assert {name: stored[name].layout.spec for name in specs} == specs
    assert stored["transposed devices"].layout.mesh.processes == (0, 1) * 4
    assert stored["some of the devices"].layout.mesh.processes == (0, 1, 1, 0)
    if "gspmd" in stored:
        assert stored["gspmd"].layout is None
        assert {holders for _, holders in stored["gspmd"].fragments} == {(0,), (1,)}

    found = unickpt.load(tmp_path / "c")
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y")), P("y", "x"))
    like = {name: abstract(WHOLE, sharding) for name in stored if stored[name].shape == (24, 16)}
    assert len(like) >= 13
    for name, array in unickpt.load(tmp_path / "c", like, strict=False).items():
        check(array, WHOLE, sharding)
        assert found[name].tobytes() == WHOLE.tobytes()
    assert found["rng"].values == ({"seed": 0}, {"seed": 1})
    assert unickpt.verify(tmp_path / "c").ok


# --- messages -----------------------------------------------------------------------------------

SHORT = 64 << 10
LENGTHS = [
    [[0, 0], [0, 0]],
    [[1, 5], [0, 3]],
    [[2, SHORT], [SHORT - 1, 0]],
    [[0, SHORT + 1], [7, 0]],
    [[3, 0], [5 * SHORT + 9, 4 * SHORT]],  # in several slices
]
"""Of the bytes that each process sends to each, in one exchange after another."""


def message(number: int, sender: int, receiver: int) -> np.ndarray:
    rng = np.random.default_rng([number, sender, receiver])
    return rng.integers(0, 256, LENGTHS[number][sender][receiver], np.uint8)


def exchange(folder: str) -> None:
    jax_group._SLICES = 4 * SHORT
    group, me = jax_group.JaxGroup(), jax.process_index()
    right = []
    for number, lengths in enumerate(LENGTHS):
        outbox = np.concatenate([message(number, me, other) for other in (0, 1)])
        inbox = group.exchange(outbox, lengths[me], [sizes[me] for sizes in lengths])
        expected = np.concatenate([message(number, other, me) for other in (0, 1)])
        right.append(inbox.tobytes() == expected.tobytes())
    print(json.dumps(right))


def test_messages_of_any_length_arrive(run: Start, tmp_path: Path) -> None:
    assert run(exchange, tmp_path) == [[True] * len(LENGTHS)] * 2


# --- failures -----------------------------------------------------------------------------------


def fail_and_recover(folder: str) -> None:
    process = jax.process_index()
    rows = named((8,), P("a"))
    mine = jax.device_put(WHOLE, jax.local_devices()[0])
    local = Mesh(np.array(jax.local_devices()), ("a",))
    split = jax.device_put(WHOLE, NamedSharding(local, P(None, "a")))
    alone = unickpt.SaveOptions(group=unickpt.ProcessGroup(0, 1, f"alone-{process}"))

    def attempt(name: str, tree: Any, options: unickpt.SaveOptions = MANY_CHUNKS) -> list[Any]:
        began = time.monotonic()
        try:
            unickpt.save(f"{folder}/{name}", tree, options=options)
        except Exception as error:
            return [type(error).__name__, str(error), time.monotonic() - began]
        return ["saved", "", 0]

    bad = object() if process == 1 else 1
    second = put(WHOLE, named((4,), P("a"), 4, 5, 6, 7))
    stages: dict[str, Any] = {"first": mine} if process == 0 else {"second": second}
    print(json.dumps({
        "one fails": attempt("c", {"x": put(WHOLE, rows), "model": {"bad": bad}}),
        "then all is well": attempt("c", {"x": put(WHOLE, rows)}),
        "values differ": attempt("values", {"seed": process}),
        "one process's": attempt("far", {"x": second}),
        "stages": attempt("stages", {"shared": put(WHOLE, rows), "stage": stages}),
        "alone": attempt(f"alone_{process}", {"x": mine, "y": split}, alone),
        "alone with others' data": attempt(f"bad_{process}", {"x": put(WHOLE, rows)}, alone),
    }))  # fmt: skip


def test_failures_of_one_process_reach_all(run: Start, tmp_path: Path) -> None:
    first, second = run(fail_and_recover, tmp_path)
    kind, message, _ = second["one fails"]
    assert kind == "UnsupportedLeaf"
    assert "'model/bad': builtins.object is neither an array" in message
    kind, message, seconds = first["one fails"]
    assert kind == "ProcessFailed"
    assert message.startswith("process 1 failed: ")
    assert "'model/bad': builtins.object is neither an array" in message
    assert seconds < 10

    for outcome in (first, second):
        assert outcome["then all is well"][0] == "saved", outcome["then all is well"]
        assert "'seed'" in outcome["values differ"][1]
        assert "unickpt.PerProcess" in outcome["values differ"][1]
        assert "'x': the array is on devices of process 1" in outcome["one process's"][1]
        assert outcome["stages"][0] == "saved", outcome["stages"]
        assert outcome["alone"][0] == "saved"
        assert outcome["alone with others' data"][0] == "UnsupportedLeaf"
        assert "spans the 2 processes" in outcome["alone with others' data"][1]
    assert first["values differ"][0] == "CoverageError"
    assert second["values differ"][0] == "ProcessFailed"
    for process in (0, 1):
        stored = unickpt.open(tmp_path / f"alone_{process}")
        assert stored["y"].layout.mesh.processes == (0,) * 4
        assert {holders for _, holders in stored["y"].fragments} == {(0,)}
        assert stored["y"][...].tobytes() == stored["x"][...].tobytes() == WHOLE.tobytes()
    stages = unickpt.load(tmp_path / "stages")
    for found in (stages["shared"], stages["stage"]["first"], stages["stage"]["second"]):
        assert found.tobytes() == WHOLE.tobytes()
    for name in ("c", "alone_0", "alone_1"):
        assert unickpt.load(tmp_path / name)["x"].tobytes() == WHOLE.tobytes()
    for name in ("values", "far", "bad_0", "bad_1"):
        with pytest.raises(unickpt.CheckpointNotFound):
            unickpt.open(tmp_path / name)
