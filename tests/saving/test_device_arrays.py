"""Saves of the same arrays on devices: no array is described again, and small ones are gathered.

The devices are simulated.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.recognised import note_recognised
from support.saving import in_job
from support.simulated import simulate_jax, simulate_torch
from support.strategies import examples

import unickpt
from unickpt import ProcessGroup, SaveOptions, UnsupportedLeaf
from unickpt.adapters import jax as jax_adapter
from unickpt.adapters import jax_transfer
from unickpt.adapters import torch as torch_adapter
from unickpt.saving.background import SaveQueue, SaveRequest

KINDS = {memory.kind for memory in jax.devices("cpu")[0].addressable_memories()}
needs_pinned = pytest.mark.skipif("pinned_host" not in KINDS, reason="CPUs of this JAX have none")
FAST = SaveOptions(fsync=False)
MODES = ["auto", "copy", "lazy", "device", "reference"]


def sharded(value: complex, spec: P, dtype: Any = jnp.float32) -> Any:
    mesh, real = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")), np.real(value)
    whole = jnp.arange(96).astype(dtype).reshape(8, 12) + jnp.asarray(real, dtype)
    return jax.device_put(whole, NamedSharding(mesh, spec))


def of_jax(n: int) -> dict[str, Any]:
    """Arrays of all kinds, each five times."""
    makes: dict[str, Callable[[int], Any]] = {
        "vector": lambda i: jnp.arange(7.0) + i,
        "bfloat16": lambda i: jnp.full((3, 5), i, jnp.bfloat16),
        "scalar": lambda i: jnp.int32(i),
        "flags": lambda i: jnp.arange(9) % (i + 2) == 0,
        "complex": lambda i: jnp.full(4, i + 1j),
        "other device": lambda i: jax.device_put(jnp.arange(5.0) + i, jax.devices()[3]),
        "rows": lambda i: sharded(i, P("a")),
        "both": lambda i: sharded(i, P("a", "b"), jnp.bfloat16),
        "replicas": lambda i: sharded(i, P()),
    }
    return {f"{kind}{i}": make(n + i) for kind, make in makes.items() for i in range(5)}


def of_torch(n: int) -> dict[str, torch.Tensor]:
    makes: dict[str, Callable[[int], torch.Tensor]] = {
        "vector": lambda i: torch.arange(7.0) + i,
        "bfloat16": lambda i: torch.full((3, 5), i, dtype=torch.bfloat16),
        "scalar": lambda i: torch.tensor(i),
        "flags": lambda i: torch.arange(9) % (i + 2) == 0,
        "complex": lambda i: torch.full((4,), i + 1j),
        "conjugated": lambda i: torch.full((4,), i + 1j).conj(),
        "turned": lambda i: (torch.arange(12.0).reshape(3, 4) + i).t(),
        "part": lambda i: (torch.arange(12.0) + i)[2:7],
        "float8": lambda i: torch.full((3,), float(i)).to(torch.float8_e5m2),
        "parameter": lambda i: torch.nn.Parameter(torch.full((2, 2), float(i))),
    }
    return {f"{kind}{i}": make(n + i) for kind, make in makes.items() for i in range(5)}


def bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(array, torch.Tensor):
        plain = array.detach().resolve_conj().resolve_neg().clone().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(array.dtype)[6:], tuple(array.shape), raw
    host = np.array(array)
    return str(host.dtype), host.shape, host.tobytes()


def all_bits(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: bits(array) for name, array in tree.items()}


def overwrite(tree: dict[str, Any]) -> None:
    """What a program may do to its arrays right after the call."""
    for array in tree.values():
        if isinstance(array, jax.Array):
            array.delete()
        else:
            array.detach().zero_()


MAKES = {"jax": of_jax, "torch": of_torch}


@pytest.fixture(params=[pytest.param("jax", marks=needs_pinned), "torch"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    simulate_jax(monkeypatch)
    simulate_torch(monkeypatch)
    return MAKES[request.param]


def described(patch: pytest.MonkeyPatch) -> list[Any]:
    """Lists the arrays that are described from here on."""
    found: list[Any] = []
    for adapter in (jax_adapter, torch_adapter):
        real = adapter.source

        def noted(leaf: Any, group: Any, real: Any = real) -> Any:
            found.append(leaf)
            return real(leaf, group)

        patch.setattr(adapter, "source", noted)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_each_save_holds_what_there_was_at_its_call(
    mode: Any, make: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, options = SaveQueue(), SaveOptions(staging=mode, fsync=False)
    recognised, pending, expected = note_recognised(monkeypatch), [], []
    for step in range(6):
        tree = make(step)
        expected.append(all_bits(tree))
        pending.append(queue.save(SaveRequest(tmp_path / str(step), tree, options)))
        pending[-1].wait_staged()
        overwrite(tree)
        if step in (1, 4):
            pending[-1].result()
    for step in range(6):
        pending[step].result()
        assert unickpt.verify(tmp_path / str(step)).ok
        assert all_bits(unickpt.load(tmp_path / str(step))) == expected[step], step
    assert recognised[2]
    assert recognised[5]


def test_from_the_third_save_on_small_arrays_are_not_described(
    make: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, again = SaveQueue(), described(monkeypatch)
    for step in range(4):
        again.clear()
        queue.save(SaveRequest(tmp_path / str(step), make(step), FAST)).result()
        names = [name for name in make(step) if not step or name.startswith(("float8", "conj"))]
        assert len(again) == len(names)


@needs_pinned
def test_jax_arrays_are_transferred_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_jax(monkeypatch)
    queue, put, calls = SaveQueue(), jax.device_put, list[int]()
    trees = [{str(i): jnp.full(5, i + step) for i in range(600)} for step in range(3)]

    def counted(arrays: Any, *arguments: Any) -> Any:
        calls.append(len(arrays))
        return put(arrays, *arguments)

    monkeypatch.setattr(jax, "device_put", counted)
    for step, tree in enumerate(trees):
        calls.clear()
        queue.save(SaveRequest(tmp_path / str(step), tree, FAST)).result()
        assert all_bits(unickpt.load(tmp_path / str(step))) == all_bits(tree)
    assert calls == [3]


def test_torch_tensors_are_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, queue = simulate_torch(monkeypatch), SaveQueue()
    for step in range(3):
        stream.copies = 0
        tree = {str(i): torch.full((5,), float(i + step)) for i in range(600)}
        queue.save(SaveRequest(tmp_path / str(step), tree, FAST)).result()
        assert stream.copies == (1 if step else 600)


def test_large_arrays_are_not_gathered(
    make: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor more small ones than a sixteenth of the budget."""
    queue, again = SaveQueue(), described(monkeypatch)
    full = jnp.full if make is of_jax else torch.full
    tree: dict[str, Any] = {f"small{i}": full((256,), float(i)) for i in range(40)}
    tree |= {f"large{i}": full((20_000,), float(i)) for i in range(5)}
    options = SaveOptions(budget_bytes=16 * 4 * (24 << 10) // 3, fsync=False)
    for step in range(3):
        again.clear()
        queue.save(SaveRequest(tmp_path / str(step), tree, options)).result()
        assert all_bits(unickpt.load(tmp_path / str(step))) == all_bits(tree)
    assert len(again) == 45 - 24


@needs_pinned
@pytest.mark.parametrize("lack", ["page-locked memory", "memory of the device"])
def test_without_room_for_jax(lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_jax(monkeypatch)
    queue = SaveQueue()

    def none_left(*pieces: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    for step in range(3):
        if step == 1 and lack == "page-locked memory":
            monkeypatch.setattr(jax_transfer, "_MOST_BYTES", 0)
        elif step == 1:
            (plan,) = queue._plans._free
            stacked: Any = plan.together[0].gatherer  # type: ignore[union-attr]
            stacked._stacking = [none_left for _ in stacked._stacking]
        tree = of_jax(step)
        expected = all_bits(tree)
        pending = queue.save(SaveRequest(tmp_path / str(step), tree, FAST))
        overwrite(tree)
        pending.result()
        assert all_bits(unickpt.load(tmp_path / str(step))) == expected


def test_without_room_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_torch(monkeypatch)
    queue, flatten, calls = SaveQueue(), torch._C._nn.flatten_dense_tensors, list[int]()

    def none_left(tensors: Any) -> Any:
        calls.append(len(tensors))
        if len(calls) % 2:
            raise torch.OutOfMemoryError
        return flatten(tensors)

    monkeypatch.setattr(torch._C._nn, "flatten_dense_tensors", none_left)
    for step in range(3):
        tree = of_torch(step)
        expected = all_bits(tree)
        pending = queue.save(SaveRequest(tmp_path / str(step), tree, FAST))
        overwrite(tree)
        pending.result()
        assert all_bits(unickpt.load(tmp_path / str(step))) == expected
    assert calls


def test_a_deleted_array_is_named(make: Callable[[int], Any], tmp_path: Path) -> None:
    queue, tree = SaveQueue(), make(0)
    for step in range(2):
        queue.save(SaveRequest(tmp_path / str(step), tree, FAST)).result()
    if make is of_jax:
        tree["vector3"].delete()
    else:
        tree["vector3"].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeaf, match="'vector3': "):
        queue.save(SaveRequest(tmp_path / "c", tree, FAST))


def test_nothing_of_the_program_stays_in_memory(make: Callable[[int], Any], tmp_path: Path) -> None:
    queue = SaveQueue()
    for step in range(3):
        tree = make(step)
        refs = [weakref.ref(array) for array in tree.values()]
        queue.save(SaveRequest(tmp_path / str(step), tree, FAST)).result()
        del tree
        gc.collect()
        assert not any(ref() is not None for ref in refs)
    assert jax_transfer._Arriving._bytes == 0


@pytest.mark.plugins
@pytest.mark.parametrize("reuse", [True, "patch"])
@pytest.mark.parametrize("changed", [None, "tracked"])
def test_arrays_that_did_not_change(
    reuse: Any, changed: Any, make: Callable[[int], Any], tmp_path: Path
) -> None:
    options = SaveOptions(changed=changed, fsync=False)
    full = jnp.full if make is of_jax else torch.full
    tree = make(0) | {f"w{i}": full((10_000,), float(i)) for i in range(5)}
    small_bytes = sum(array.nbytes for array in make(0).values())  # written each time
    with unickpt.Checkpointer(tmp_path, reuse=reuse, keep_last=9, options=options) as run:
        for step in range(5):
            tree["w1"] = full((10_000,), 10.0 + step)
            report = run.save(step, tree).result()
            assert all_bits(unickpt.load(tmp_path / f"step_{step}")) == all_bits(tree)
            assert not step or report.written_bytes <= 40_000 + small_bytes


@pytest.mark.plugins
def test_experts_that_take_turns(make: Callable[[int], Any], tmp_path: Path) -> None:
    """Only those whose turn it is are copied."""
    full = jnp.full if make is of_jax else torch.full
    experts = unickpt.Experts({"e{x}.*": 2})
    with unickpt.Checkpointer(tmp_path, experts=experts, reuse=True, keep_last=9) as run:
        for step in range(5):
            tree = {f"e{x}.{i}": full((4,), float(step)) for x in range(4) for i in range(5)}
            run.save(step, tree).result()
            overwrite(tree)
            steps = unickpt.open(run.path(step)).metadata["unickpt"]["experts"]["steps"]["e{x}.*"]
            found = unickpt.load(run.path(step))
            for name, array in found.items():
                assert (array == steps[name[1]]).all(), (step, name)


def test_replicas_that_begin_to_differ_are_noticed(
    make: Callable[[int], Any], tmp_path: Path
) -> None:
    def work(group: ProcessGroup) -> list[Any]:
        queue, found = SaveQueue(), list[Any]()
        options = SaveOptions(fsync=False, group=group, timeout_s=20)
        for step in range(4):
            tree = {name: array for name, array in make(0).items() if "vector" in name}
            if step == 3 and group.index:
                tree["vector2"] = make(1)["vector2"]
            report = queue.save(SaveRequest(tmp_path / str(step), tree, options)).result()
            found.append(report.replicas_differ)
        return found

    with pytest.warns(unickpt.errors.ReplicasDiffer):
        found = in_job(2, work)
    assert found[0] == [(), (), (), ("vector2",)], found[0]


def _resharded(array: Any) -> Any:
    return sharded(np.ravel(array)[0], P("b", "a"), array.dtype)


MUTATIONS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "jax": {
        "value": lambda x: x * 0 + 5,
        "dtype": lambda x: x.real.astype(jnp.float16),
        "shape": lambda x: x.reshape(-1),
        "longer": lambda x: jnp.concatenate([jnp.ravel(x), jnp.ones(3, x.dtype)]),
        "device": lambda x: jax.device_put(x, jax.devices()[5]),
        "sharding": _resharded,
        "host": lambda x: np.array(x),
        "framework": lambda x: torch.zeros(3),
    },
    "torch": {
        "value": lambda x: x.detach().zero_(),
        "dtype": lambda x: (x.real if x.dtype.is_complex else x).to(torch.float16),
        "shape": lambda x: x.reshape(-1),
        "resized": lambda x: x.detach().clone().resize_(9).fill_(2),
        "turned": lambda x: x.t() if x.ndim == 2 else x,
        "conjugated": lambda x: x.conj() if x.dtype.is_complex else x,
        "data": lambda x: setattr(x, "data", x.detach().clone() * 0) or x,
        "stride": lambda x: torch.stack([x.detach(), x.detach()], -1)[..., 1],
        "framework": lambda x: jnp.ones(3),
    },
}


CHANGES = st.tuples(st.integers(0, 11), st.integers(0, 49), st.integers(0, 49))


@pytest.mark.integration  # histories of saves take seconds
@examples(24)
@given(st.lists(st.lists(CHANGES, max_size=2), min_size=5, max_size=7))
@pytest.mark.parametrize("framework", [pytest.param("jax", marks=needs_pinned), "torch"])
def test_whatever_changes_between_saves_is_saved(
    framework: str, steps: list[list[tuple[int, int, int]]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        simulate_jax(patch)
        simulate_torch(patch)
        queue, tree = SaveQueue(), MAKES[framework](0)
        kinds, names = [*MUTATIONS[framework], "tie", "remove", "add"], sorted(tree)
        for step, changes in enumerate(steps):
            for number, *both in changes:
                what, (name, other) = (
                    kinds[number % len(kinds)],
                    (names[n % len(names)] for n in both),
                )
                change(tree, framework, what, name, tree.get(other), MAKES[framework](step)[other])
            expected, path = all_bits(tree), f"memory://devices/{id(queue)}/{step}"
            pending = queue.save(SaveRequest(path, dict(tree), FAST, overwrite=True))
            for array in tree.values():  # after the call, so not saved
                if isinstance(array, torch.Tensor) and array.dtype in (torch.float32, torch.int64):
                    array.detach().add_(1)
            pending.result()
            assert all_bits(unickpt.load(path)) == expected


def change(
    tree: dict[str, Any], framework: str, what: str, name: str, other: Any, fresh: Any
) -> None:
    """Changes one array, adds or removes one, or ties it to another."""
    array = tree.get(name)
    if what == "remove":
        tree.pop(name, None)
    elif what == "add":
        tree[name] = fresh
    elif what == "tie" and other is not None:
        tree[name] = other
    elif (
        what in MUTATIONS[framework]
        and isinstance(array, jax.Array if framework == "jax" else torch.Tensor)
        and "float8" not in str(array.dtype)
    ):
        tree[name] = MUTATIONS[framework][what](array)
