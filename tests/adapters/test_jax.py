"""JAX in one process: layouts, trees, PRNG keys, donation, what `like` may be, what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import tensorstore as ts
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import unickpt
from unickpt.adapters import jax as adapter
from unickpt.frameworks.process_group import alone

AXES = ("data", "model", "seq")
MANY_CHUNKS = unickpt.SaveOptions(fsync=False, chunk_bytes=96)
Order = Callable[[Any], Any]


def named(grid: tuple[int, ...], spec: P, order: Order = lambda devices: devices) -> NamedSharding:
    """A sharding on a mesh of the first devices, in any order."""
    devices = order(np.array(jax.devices()[: math.prod(grid)]))
    return NamedSharding(Mesh(devices.reshape(grid), AXES[: len(grid)]), spec)


def gspmd(tiles: list[int], devices: list[int], *, replicate_last: bool = False) -> Sharding:
    """A sharding that JAX knows by its tiles alone: what positional shardings became."""
    try:
        from jax._src.lib import xla_client
        from jax._src.sharding_impls import GSPMDSharding
    except ImportError:
        pytest.skip("this JAX has no GSPMDSharding")
    tiling = xla_client.OpSharding()
    tiling.type = xla_client.OpSharding.Type.OTHER
    tiling.tile_assignment_dimensions, tiling.tile_assignment_devices = tiles, devices
    tiling.replicate_on_last_tile_dim = replicate_last
    made: Sharding = GSPMDSharding(jax.devices()[: len(devices)], tiling)
    return made


def check(found: jax.Array, want: np.ndarray, sharding: Sharding | None = None) -> None:
    """Every bit of every shard."""
    assert isinstance(found, jax.Array)
    assert (found.shape, found.dtype) == (want.shape, want.dtype)
    assert sharding is None or found.sharding == sharding
    for shard in found.addressable_shards:
        data, expected = np.asarray(shard.data), np.ascontiguousarray(want[shard.index])
        assert np.ascontiguousarray(data).tobytes() == expected.tobytes()


def abstract(like: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


# --- layouts ------------------------------------------------------------------------------------

SPECS: dict[str, tuple[Callable[[], Sharding], tuple[Any, ...] | None]] = {
    "rows": (lambda: named((8,), P("data")), ("data", None)),
    "columns": (lambda: named((8,), P(None, "data")), (None, "data")),
    "both": (lambda: named((4, 2), P("data", "model")), ("data", "model")),
    "two axes on one dimension": (
        lambda: named((4, 2), P(("data", "model"), None)),
        (("data", "model"), None),
    ),
    "two axes, the other way round": (
        lambda: named((4, 2), P(None, ("model", "data"))),
        (None, ("model", "data")),
    ),
    "three axes": (
        lambda: named((2, 2, 2), P(("seq", "data"), "model")),
        (("seq", "data"), "model"),
    ),
    "partly replicated": (lambda: named((2, 4), P("data", None)), ("data", None)),
    "fully replicated": (lambda: named((4, 2), P()), (None, None)),
    "permuted devices": (
        lambda: named((4, 2), P("data", "model"), lambda d: d[[3, 1, 7, 5, 0, 2, 6, 4]]),
        ("data", "model"),
    ),
    "transposed mesh": (
        lambda: named((4, 2), P("model", "data"), lambda d: d.reshape(2, 4).T),
        ("model", "data"),
    ),
    "some of the devices": (
        lambda: named((3, 2), P("model", "data"), lambda d: d[::-1]),
        ("model", "data"),
    ),
    "axes of size one": (lambda: named((1, 4, 1), P("data", "model")), ("data", "model")),
    "a mesh of one device": (lambda: named((1,), P("data")), ("data", None)),
    "one device": (lambda: SingleDeviceSharding(jax.devices()[5]), (None, None)),
    "gspmd": (lambda: gspmd([4, 2], [7, 6, 5, 4, 3, 2, 1, 0]), None),
    "gspmd, partly replicated": (
        lambda: gspmd([2, 1, 4], [0, 2, 4, 6, 1, 3, 5, 7], replicate_last=True),
        None,
    ),
}


@pytest.mark.parametrize("source", SPECS)
def test_every_layout_is_stored_as_it_is_and_loads_as_every_other(
    source: str, tmp_path: Path
) -> None:
    whole = np.random.default_rng(1).random((24, 48), np.float32)
    make, spec = SPECS[source]
    array = jax.device_put(whole, make())
    unickpt.save(tmp_path / "c", {"x": array}, options=MANY_CHUNKS)

    stored = unickpt.open(tmp_path / "c")["x"]
    assert (stored.layout.spec if stored.layout else None) == spec
    held = {tuple(s.indices(n)[:2] for s, n in zip(shard.index, whole.shape, strict=True))
            for shard in array.addressable_shards}  # fmt: skip
    assert {tuple(zip(b.start, b.stop, strict=True)) for b, _ in stored.fragments} == held
    assert sum(box.size for box, _ in stored.fragments) == whole.size
    assert len(stored.parts) == (1 if spec else len(held))
    assert np.array_equal(stored.tensorstore().read().result(), whole)
    if spec:
        opened = ts.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/c/|ocdbt:x/"})
        assert np.array_equal(opened.result().read().result(), whole)

    for target, _ in SPECS.values():
        found = unickpt.load(tmp_path / "c", {"x": abstract(whole, target())})["x"]
        check(found, whole, target())


def test_arrays_as_jit_returns_them(tmp_path: Path) -> None:
    sharding = named((4, 2), P("data", "model"))
    x = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), sharding)

    @jax.jit
    def step(x: jax.Array) -> dict[str, jax.Array]:
        pinned = jax.lax.with_sharding_constraint(x + 1, named((4, 2), P(("model", "data"))))
        return {"same": x * 2, "sum": x.sum(0), "turned": x.T, "pinned": pinned, "fresh": x[:2, 0]}

    tree = step(x)
    unickpt.save(tmp_path / "c", tree, options=MANY_CHUNKS)
    assert unickpt.open(tmp_path / "c")["pinned"].layout.spec == (("model", "data"), None)
    found = unickpt.load(tmp_path / "c", tree)
    for name, want in tree.items():
        check(found[name], np.asarray(want), want.sharding)


def test_fuzz_of_shapes_meshes_and_specs() -> None:
    rng = np.random.default_rng(20260)
    grids = [(8,), (2, 4), (4, 2), (2, 2, 2), (3, 2), (5,), (1, 7), (1, 2), (1,)]
    kinds = [np.float32, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16, ml_dtypes.int4]

    def sharding(rank: int) -> NamedSharding:
        grid = grids[rng.integers(len(grids))]
        dims: list[list[str]] = [[] for _ in range(rank + 1)]  # the last one: replicated
        for axis in rng.permutation(AXES[: len(grid)]):
            dims[rng.integers(rank + 1)].append(str(axis))
        return named(grid, P(*(tuple(d) or None for d in dims[:rank])), rng.permutation)

    for trial in range(12):
        wholes, sources, targets = {}, {}, {}
        for name in "abcdefgh":
            rank = int(rng.integers(4))
            source, target = sharding(rank), sharding(rank)
            pieces = [math.lcm(*n) for n in zip(_cuts(source), _cuts(target), strict=True)]
            shape = tuple(n * int(rng.integers(0 if rng.random() < 0.1 else 1, 4)) for n in pieces)
            if math.prod(shape) > 200_000:
                shape = tuple(pieces)
            whole = (rng.random(shape) * 8).astype(kinds[rng.integers(len(kinds))])
            wholes[name], targets[name] = whole, abstract(whole, target)
            sources[name] = jax.device_put(whole, source)
        path = f"memory://test_jax/fuzz/{trial}"
        chunk_shape = tuple(int(n) for n in rng.integers(1, 9, 2)) if trial % 3 == 0 else None
        size = int(rng.choice([100, 1000, 8 << 20]))
        options = unickpt.SaveOptions(chunk_bytes=size, chunk_shape=chunk_shape)
        unickpt.save(path, sources, options=options)
        found, plain = unickpt.load(path, targets), unickpt.load(path)
        for name, whole in wholes.items():
            check(found[name], whole, targets[name].sharding)
            assert plain[name].tobytes() == whole.tobytes()


def _cuts(sharding: NamedSharding) -> list[int]:
    """Into how many pieces each dimension is cut."""
    sizes = sharding.mesh.shape
    entries = [(e,) if isinstance(e, str) else e or () for e in sharding.spec]
    return [math.prod(sizes[axis] for axis in entry) for entry in entries]


@pytest.mark.parametrize("boxes", [(slice(0, 2), slice(1, 3)), (slice(0, 1), slice(2, 3))])
def test_shardings_whose_boxes_do_not_fit_together(boxes: tuple[slice, ...]) -> None:
    class Odd(Sharding):
        num_devices = 2

        def devices_indices_map(self, shape: tuple[int, ...]) -> Any:
            return {jax.devices()[i]: (box,) for i, box in enumerate(boxes)}

    with pytest.raises(TypeError, match=r"boxes of .* overlap, or do not cover shape \(4,\)"):
        adapter._layout_in_job(Odd(), (4,))


def test_scalars_and_empty_arrays(tmp_path: Path) -> None:
    tree = {
        "scalar": jnp.float32(-0.0),
        "on the mesh": jax.device_put(np.int8(-3), named((4, 2), P())),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "empty on the mesh": jax.device_put(np.zeros((0, 4)), named((4, 2), P("data", "model"))),
        "one": jnp.ones((1, 1, 1), jnp.int4),
    }
    unickpt.save(tmp_path / "c", tree)
    found = unickpt.load(tmp_path / "c", tree)
    for name, want in tree.items():
        check(found[name], np.asarray(want), want.sharding)
    assert unickpt.load(tmp_path / "c")["on the mesh"] == -3


def test_one_array_under_two_names_is_stored_once(tmp_path: Path) -> None:
    x = jax.device_put(np.arange(8.0, dtype=np.float32), named((8,), P("data")))
    tree = {"embed": x, "head": x, "copy": x + 0}
    unickpt.save(tmp_path / "c", tree)
    assert unickpt.open(tmp_path / "c").index.aliases == {"head": "embed"}
    for found in unickpt.load(tmp_path / "c", tree).values():
        check(found, np.asarray(x), x.sharding)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_kinds_of_memory(number: int, tmp_path: Path) -> None:
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    if number >= len(kinds):
        pytest.skip(f"this backend has only the memories {kinds}")
    sharding = named((4, 2), P("data")).with_memory_kind(kinds[number])
    whole = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    x = jax.device_put(whole, sharding)
    unickpt.save(tmp_path / "c", {"x": x})
    for like in (x, abstract(x, sharding)):
        found = unickpt.load(tmp_path / "c", {"x": like})["x"]
        check(found, whole, sharding)
        assert {s.data.sharding.memory_kind for s in found.addressable_shards} == {kinds[number]}


def test_device_layouts_other_than_row_major(tmp_path: Path) -> None:
    layout = pytest.importorskip("jax.experimental.layout")
    if not hasattr(layout, "Format"):
        pytest.skip("this JAX has no Format")
    whole = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    column_major = layout.Format(layout.Layout((1, 0)), SingleDeviceSharding(jax.devices()[1]))
    x = jax.device_put(whole, column_major)
    unickpt.save(tmp_path / "c", {"x": x}, options=MANY_CHUNKS)
    check(unickpt.load(tmp_path / "c", {"x": x})["x"], whole)


# --- trees --------------------------------------------------------------------------------------

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.arange(3.0)}


@flax.struct.dataclass
class Train:
    params: Any
    opt_state: Any
    name: str = flax.struct.field(pytree_node=False, default="run")


@jax.tree_util.register_pytree_with_keys_class
class Pair:
    """A node of our own, with keys."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        at = jax.tree_util.GetAttrKey
        return ((at("first"), self.first), (at("second"), self.second)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, ...]) -> Pair:
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class Bare:
    """A node of our own, without keys."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def tree_flatten(self) -> tuple[Any, None]:
        return self.items, None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, ...]) -> Bare:
        return cls(*children)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def boxed_linen() -> Any:
    kernel = nn.with_partitioning(nn.initializers.ones, ("data", None))
    return nn.Dense(3, kernel_init=kernel).init(jax.random.key(0), jnp.ones((1, 2)))


def adam_names(prefix: str, *params: str) -> set[str]:
    return {f"{prefix}count", *(f"{prefix}{slot}/{p}" for slot in ("mu", "nu") for p in params)}


MASKED = optax.masked(optax.adam(1e-3), {"w": True, "b": False})
TREES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "struct": (
        lambda: Train(PARAMS, optax.adamw(1e-3).init(PARAMS), "other"),
        {"params/w", "params/b"} | adam_names("opt_state/0/", "w", "b"),
    ),
    "adamw": (lambda: optax.adamw(1e-3).init(PARAMS), adam_names("0/", "w", "b")),
    "chain": (
        lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)).init(PARAMS),
        {"1/0/trace/w", "1/0/trace/b"},
    ),
    "masked": (lambda: MASKED.init(PARAMS), adam_names("inner_state/0/", "w")),
    "hyperparameters": (
        lambda: optax.inject_hyperparams(optax.sgd)(0.1).init(PARAMS),
        {"count", "hyperparams/learning_rate"},
    ),
    "linen boxes": (boxed_linen, {"params/kernel", "params/bias"}),
    "frozen": (lambda: flax.core.freeze({"a": PARAMS}), {"a/w", "a/b"}),
    "nnx.State": (
        lambda: nnx.state(Net(nnx.Rngs(0)), nnx.Param),
        {"up/kernel", "up/bias", "norm/scale", "norm/bias"},
    ),
    "nnx.State of more": (
        lambda: nnx.state(Net(nnx.Rngs(0)), nnx.Any(nnx.Param, nnx.BatchStat)),
        {"up/kernel", "up/bias", "norm/scale", "norm/bias", "norm/mean", "norm/var"},
    ),
    "own nodes": (
        lambda: {"p": Pair(PARAMS, Bare(jnp.ones(2), None, [jnp.zeros(1)]))},
        {"p/first/w", "p/first/b", "p/second/0", "p/second/2/0"},
    ),
    "empty nodes": (lambda: {"none": Bare(), "w": jnp.ones(1), "e": optax.EmptyState()}, {"w"}),
}  # fmt: skip


def is_none(x: Any) -> bool:
    return x is None


@pytest.mark.parametrize("name", TREES)
def test_registered_containers(name: str, tmp_path: Path) -> None:
    make, names = TREES[name]
    tree = make()
    unickpt.save(tmp_path / "c", tree)
    assert set(unickpt.open(tmp_path / "c")) == names
    like = jax.tree.map(jnp.zeros_like, tree)
    shapes = jax.eval_shape(lambda: make())
    for found in (unickpt.load(tmp_path / "c", like), unickpt.load(tmp_path / "c", shapes)):
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        for leaf, want in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
            check(raw_key(leaf), np.asarray(raw_key(want)))


def raw_key(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_containers_without_like(tmp_path: Path) -> None:
    state = optax.chain(optax.clip(1.0), MASKED).init(PARAMS)
    model = nnx.state(Net(nnx.Rngs(0)))
    tree = {"state": state, "model": model, "train": Train(PARAMS, None), "pair": Pair(1, Bare(2))}
    unickpt.save(tmp_path / "c", tree)
    found = unickpt.load(tmp_path / "c")
    empty, masked = found["state"]
    assert (type(empty).__name__, empty._fields) == ("EmptyState", ())
    adam, scale = masked.inner_state
    assert (type(adam).__name__, adam._fields) == ("ScaleByAdamState", ("count", "mu", "nu"))
    assert type(scale).__name__ == "EmptyState"
    assert type(adam.mu["b"]).__name__ == "MaskedNode"
    assert adam.mu["w"].tobytes() == np.zeros((2, 3), np.float32).tobytes()
    assert set(found["model"]) == {"up", "norm", "drop"}
    assert found["model"]["up"]["kernel"].shape == (2, 3)
    assert set(found["train"]) == {"params", "opt_state"}
    assert found["train"]["opt_state"] is None
    assert found["pair"] == {"first": 1, "second": {0: 2}}


@pytest.mark.skipif(not hasattr(nnx, "Pytree"), reason="modules of this flax are no pytrees")
def test_nnx_modules_and_optimizers_as_they_are(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = Net(nnx.Rngs(seed))
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)}

    def step(job: dict[str, Any]) -> float:
        model, optimizer = job["model"], job["optimizer"]
        loss, grads = nnx.value_and_grad(lambda m: (m.drop(m.up(jnp.ones((4, 2)))) ** 2).sum())(
            model
        )
        optimizer.update(model, grads)
        return float(loss)

    trained, other = make(0), make(1)
    step(trained)
    unickpt.save(tmp_path / "c", trained)
    names = set(unickpt.open(tmp_path / "c"))
    assert {"model/up/kernel", "model/drop/rngs/key", "optimizer/step"} <= names
    assert adam_names("optimizer/opt_state/0/", "up/kernel") <= names
    assert not any(name.endswith("/value") or "pytree" in name for name in names)
    assert set(unickpt.load(tmp_path / "c")["model"]) == {"up", "norm", "drop"}
    loaded = unickpt.load(tmp_path / "c", other)
    assert isinstance(loaded["model"], Net)
    assert [step(loaded) for _ in range(3)] == [step(trained) for _ in range(3)]


@pytest.mark.skipif(not hasattr(nnx, "Pytree"), reason="modules of this flax are no pytrees")
def test_nnx_modules_of_like_are_not_filled_but_can_be_updated(tmp_path: Path) -> None:
    trained, model = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    model.again, trained.again = model.up, trained.up  # the same module at two places
    kernel = np.asarray(model.up.kernel[...])
    unickpt.save(tmp_path / "c", {"model": trained})
    loaded, report = unickpt.load(tmp_path / "c", {"model": model}, return_report=True)
    assert loaded["model"] is not model
    assert report.new_objects == (("model", "Net"),)
    expected = "model  Net: the load returned a new one; the one in `like` was not filled"
    assert expected in str(report)
    np.testing.assert_array_equal(model.up.kernel[...], kernel)
    np.testing.assert_array_equal(loaded["model"].up.kernel[...], trained.up.kernel[...])
    nnx.update(model, nnx.state(loaded["model"]))
    np.testing.assert_array_equal(model.up.kernel[...], trained.up.kernel[...])
    assert model.again is model.up


def test_nodes_whose_children_share_a_key(tmp_path: Path) -> None:
    @jax.tree_util.register_pytree_with_keys_class
    class Twice(Pair):
        def tree_flatten_with_keys(self) -> tuple[Any, None]:
            at = jax.tree_util.GetAttrKey("x")
            return ((at, self.first), (at, self.second)), None

    with pytest.raises(unickpt.UnsupportedLeaf, match=r"'a': Twice gives .* the same key.*'x'"):
        unickpt.save(tmp_path / "c", {"a": Twice(jnp.ones(1), jnp.ones(1))})
    assert not (tmp_path / "c").exists()


# --- PRNG keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys(impl: str, tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(7, impl=impl), 8)
    sharding = named((4, 2), P("data"))
    tree = {
        "scalar": jax.random.key(3, impl=impl),
        "array": keys.reshape(2, 4),
        "sharded": jax.device_put(keys, sharding),
        "replicated": jax.device_put(keys, named((8,), P())),
    }
    unickpt.save(tmp_path / "c", tree)
    stored = unickpt.open(tmp_path / "c")
    assert {entry.prng for entry in stored.index.arrays.values()} == {impl}
    assert stored["sharded"].layout.spec == ("data", None)
    shapes = jax.tree.map(lambda key: abstract(key, key.sharding), tree)
    for like in (tree, shapes):
        found = unickpt.load(tmp_path / "c", like)
        for name, want in tree.items():
            assert found[name].dtype == want.dtype
            assert found[name].shape == want.shape
            assert found[name].sharding == want.sharding
            check(jax.random.key_data(found[name]), np.asarray(jax.random.key_data(want)))
    assert jax.random.uniform(found["scalar"]) == jax.random.uniform(tree["scalar"])
    bare = unickpt.load(tmp_path / "c")["array"]
    assert bare.tobytes() == np.asarray(jax.random.key_data(tree["array"])).tobytes()


def test_keys_of_another_implementation(tmp_path: Path) -> None:
    tree = {"a": jax.random.key(0), "b": jax.random.PRNGKey(0), "c": jax.random.key(0, impl="rbg")}
    unickpt.save(tmp_path / "c", tree)
    like = {"a": jax.random.key(0, impl="rbg"), "b": jax.random.key(0),
            "c": jax.random.key(0, impl="unsafe_rbg")}  # fmt: skip
    with pytest.raises(unickpt.LoadMismatch) as caught:
        unickpt.load(tmp_path / "c", like)
    rows = [line.split() for line in str(caught.value).splitlines() if "PRNG key  " in line]
    assert rows == [["a", "PRNG", "key", "threefry2x32", "rbg"],
                    ["b", "PRNG", "key", "None", "threefry2x32"],
                    ["c", "PRNG", "key", "rbg", "unsafe_rbg"]]  # fmt: skip


def test_legacy_keys_are_plain_arrays(tmp_path: Path) -> None:
    key = jax.random.PRNGKey(5)
    unickpt.save(tmp_path / "c", {"legacy": key, "typed": jax.random.key(5)})
    found = unickpt.load(tmp_path / "c", {"legacy": key, "typed": key})
    check(found["legacy"], np.asarray(key))
    check(found["typed"], np.asarray(key))  # who asks for the bits of a typed key gets them


# --- memory -------------------------------------------------------------------------------------


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The host memory that loads hand to JAX."""
    seen: list[np.ndarray] = []
    make = adapter.JaxTarget.buffer

    def buffer(self: adapter.JaxTarget, position: int) -> np.ndarray:
        seen.append(make(self, position))
        return seen[-1]

    monkeypatch.setattr(adapter.JaxTarget, "buffer", buffer)
    return seen


@pytest.mark.parametrize("layout", ["rows", "partly replicated", "fully replicated", "one device"])
def test_loaded_arrays_may_be_donated(
    layout: str, tmp_path: Path, buffers: list[np.ndarray]
) -> None:
    whole = np.arange(512 * 480, dtype=np.float32).reshape(512, 480)  # small ones are copied
    unickpt.save(tmp_path / "c", {"x": whole})
    x = unickpt.load(tmp_path / "c", {"x": abstract(whole, SPECS[layout][0]())})["x"]
    # JAX took the buffers over; replicas share one. If a later JAX copies, nothing is at stake.
    pointers = {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
    assert pointers == {buffer.ctypes.data for buffer in buffers}
    before = [buffer.copy() for buffer in buffers]
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for count in range(1, 4):
        donated, x = x, step(x)
        assert donated.is_deleted()
        check(x, whole + np.float32(count))
    assert all(np.array_equal(a, b) for a, b in zip(before, buffers, strict=True))


def test_a_saved_array_may_be_donated_and_its_memory_used_again(tmp_path: Path) -> None:
    sharding = named((4, 2), P("data"))
    x = jax.device_put(jnp.arange(1 << 15, dtype=jnp.float32), sharding) + 0
    at = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
    unickpt.save(tmp_path / "c", {"x": x}, options=MANY_CHUNKS)
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert [shard.data.unsafe_buffer_pointer() for shard in y.addressable_shards] == at
    check(unickpt.load(tmp_path / "c", {"x": y})["x"], np.arange(1 << 15, dtype=np.float32))


def test_views_outlive_the_donation_of_their_array() -> None:
    """A save that goes on in the background may hold views: JAX leaves their memory alone."""
    whole = np.arange(1 << 12, dtype=np.float32)
    x = jax.device_put(whole, named((8,), P("data"))) + 0
    (held,) = adapter.source(x, alone()).fragments  # of all devices
    boxes = [unickpt.types.Box((at,), (at + 512,)) for at in range(0, 1 << 12, 512)]
    views = [(box, held.read(box, lambda: None)) for box in boxes]
    for _ in range(3):
        x = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    check(x, whole + 3)
    assert all(np.array_equal(view, whole[box.slices]) for box, view in views)


# --- what `like` may be -------------------------------------------------------------------------


def test_uncommitted_arrays_stay_uncommitted(tmp_path: Path) -> None:
    whole = np.arange(5.0, dtype=np.float32)
    unickpt.save(tmp_path / "c", {"x": whole})
    home, third = jax.devices()[0], jax.devices()[3]

    def load(like: Any) -> jax.Array:
        found: jax.Array = unickpt.load(tmp_path / "c", {"x": like})["x"]
        check(found, whole)
        return found

    for like in (jnp.zeros(5), abstract(whole)):
        assert (load(like).committed, load(like).devices()) == (False, {home})
        with jax.default_device(third):
            assert load(like).devices() == {third}
    committed = jax.device_put(whole, third)
    assert (load(committed).committed, load(committed).devices()) == (True, {third})
    # Uncommitted arrays go along with others to any device.
    assert (load(jnp.zeros(5)) + committed).devices() == {third}


@pytest.mark.parametrize("value", [3, 2.5, 1 + 2j])
def test_weak_types(value: Any, tmp_path: Path) -> None:
    weak = jnp.asarray(value)
    strong = weak.astype(weak.dtype.name)
    placed = jax.device_put(weak, named((4, 2), P()))
    assert (weak.weak_type, strong.weak_type, placed.weak_type) == (True, False, True)
    unickpt.save(tmp_path / "c", {"x": weak})
    for like in (weak, jax.eval_shape(lambda: weak), strong, placed):
        found = unickpt.load(tmp_path / "c", {"x": like})["x"]
        check(found, np.asarray(weak), like.sharding)
        assert found.weak_type == like.weak_type


def test_weakly_typed_nans_keep_their_bits(tmp_path: Path) -> None:
    bits = np.array([0x7FC12345, 0xFF800001, 0x80000000], np.uint32).view(np.float32)
    unickpt.save(tmp_path / "c", {"x": bits})
    like = jnp.broadcast_to(1.0, (3,))
    assert like.weak_type
    check(unickpt.load(tmp_path / "c", {"x": like})["x"], bits)


def test_deleted_arrays_still_say_what_is_wanted(tmp_path: Path) -> None:
    x = jax.device_put(np.arange(8.0, dtype=np.float32), named((8,), P("data")))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), named((8,), P("data")))
    want, want_keys = np.asarray(x).copy(), np.asarray(jax.random.key_data(keys)).copy()
    unickpt.save(tmp_path / "c", {"x": x, "keys": keys})
    x.delete()
    keys.delete()
    found = unickpt.load(tmp_path / "c", {"x": x, "keys": keys})
    check(found["x"], want, x.sharding)
    check(jax.random.key_data(found["keys"]), want_keys)


def test_dtypes_that_jax_would_truncate(tmp_path: Path) -> None:
    names = ["float64", "int64", "uint64", "complex128"]
    unickpt.save(tmp_path / "c", {name: np.ones((8, 2), name) for name in names})
    like = {name: jax.ShapeDtypeStruct((8, 2), name) for name in names}
    with pytest.raises(unickpt.UnsupportedLeaf, match="jax_enable_x64") as caught:
        unickpt.load(tmp_path / "c", like)
    assert all(f"'{name}'" in str(caught.value) for name in names)
    half = jax.ShapeDtypeStruct((8, 2), jnp.float32)
    found = unickpt.load(tmp_path / "c", {"float64": half}, strict=False, cast=True)["float64"]
    check(found, np.ones((8, 2), np.float32))


@pytest.mark.skipif(not hasattr(jax.sharding, "get_mesh"), reason="needs jax.set_mesh")
def test_abstract_meshes(tmp_path: Path) -> None:
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=explicit)
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    sharding = NamedSharding(mesh, P("model", "data"))
    unickpt.save(tmp_path / "c", {"x": jax.device_put(whole, sharding)})
    with jax.set_mesh(mesh):
        like = jax.eval_shape(lambda: {"x": jax.device_put(jnp.zeros((8, 8)), P("data", "model"))})
        found = unickpt.load(tmp_path / "c", like)["x"]
    check(found, whole, NamedSharding(mesh, P("data", "model")))
    with pytest.raises(unickpt.UnsupportedLeaf, match=r"'x'.*abstract mesh.*jax\.set_mesh"):
        unickpt.load(tmp_path / "c", like)


def test_a_shape_that_the_sharding_does_not_divide(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"x": np.ones((6, 2), np.float32)})
    like = jax.ShapeDtypeStruct((6, 2), jnp.float32, sharding=named((4,), P("data")))
    with pytest.raises(unickpt.UnsupportedLeaf, match=r"'x': .*should (evenly divide|be div)"):
        unickpt.load(tmp_path / "c", {"x": like})


# --- what is refused ----------------------------------------------------------------------------


def deleted() -> jax.Array:
    x = jnp.ones(3)
    x.delete()
    return x


def donated() -> jax.Array:
    x = jax.random.key(0)
    jax.jit(lambda key: jax.random.fold_in(key, 1), donate_argnums=0)(x)
    return x


def unreduced() -> jax.Array:
    if not hasattr(P(), "unreduced"):
        pytest.skip("this JAX has no unreduced arrays")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((4, 8), np.float32), P(None, "data"))
        partial = P(None, None, unreduced={"data"})
        made: jax.Array = jax.jit(lambda x: jnp.einsum("ij,kj->ik", x, x, out_sharding=partial))(x)
        return made


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "deleted": (deleted, "deleted or donated"),
    "donated": (donated, "deleted or donated"),
    "abstract": (lambda: abstract(jnp.ones(3)), "no data; it can only be loaded into"),
    "unreduced": (unreduced, r"unreduced partial sums over the mesh axes \['data'\]"),
    "uint4": (lambda: jnp.ones(3, jnp.uint4), "dtype uint4 cannot be stored"),
    "float0": (lambda: np.zeros(3, jax.dtypes.float0), "float0.*cannot be stored"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_without_data_or_without_a_form(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    with pytest.raises(unickpt.UnsupportedLeaf, match=f"'a/b': .*{message}"):
        unickpt.save(tmp_path / "c", {"a": {"b": make(), "good": jnp.ones(2)}})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_traced_arrays(transform: Callable[..., Any], tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"x": np.ones(3, np.float32)})

    def save(x: jax.Array) -> jax.Array:
        unickpt.save(tmp_path / "new", {"x": x})
        return x.sum()

    def load(x: jax.Array) -> jax.Array:
        found: jax.Array = unickpt.load(tmp_path / "c", {"x": x})["x"]
        return found.sum()

    for work, message in ((save, "has no data"), (load, "cannot be loaded into")):
        match = f"'x': a traced array {message}.*outside jit"
        with pytest.raises(unickpt.UnsupportedLeaf, match=match):
            transform(work)(jnp.ones(3))
    assert not (tmp_path / "new").exists()


# --- accelerators -------------------------------------------------------------------------------


@pytest.fixture
def gpus() -> Iterator[list[Any]]:
    try:
        yield jax.devices("gpu")
    except RuntimeError:
        pytest.skip("JAX sees no GPU (JAX_PLATFORMS=cuda,cpu shows both)")


@pytest.mark.gpu
def test_arrays_on_an_accelerator(gpus: list[Any], tmp_path: Path) -> None:
    whole = np.random.default_rng(3).random((256, 512), np.float32)
    sharding = NamedSharding(Mesh(np.array(gpus), "data"), P("data" if len(gpus) > 1 else None))
    homes: list[Sharding] = [
        sharding,
        sharding.with_memory_kind("pinned_host"),
        SingleDeviceSharding(jax.devices("cpu")[0]),
    ]
    tree = {str(i): jax.device_put(whole, home) for i, home in enumerate(homes)}
    tree["key"] = jax.device_put(jax.random.key(1), gpus[0])
    unickpt.save(tmp_path / "c", tree, options=unickpt.SaveOptions(chunk_bytes=1 << 14))
    for source, home in itertools.product("012", homes):
        like = {source: abstract(whole, home)}
        check(unickpt.load(tmp_path / "c", like, strict=False)[source], whole, home)
    found = unickpt.load(tmp_path / "c", tree)
    assert jax.random.uniform(found["key"]) == jax.random.uniform(tree["key"])
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    check(step(found["0"]), whole + 1)
