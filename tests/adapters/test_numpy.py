"""Saving and loading with NumPy alone: dtypes, shapes, trees, values, slices, options."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import shapes, trees

import unickpt
from unickpt.arrays import dtypes

DTYPES = [*dtypes.supported(), "datetime64[ns]", "datetime64", "timedelta64[25s]"]
Bits = Callable[[object], bytes]


def random_array(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Any bit pattern of a dtype: NaN payloads, signed zeros and all."""
    dtype = dtypes.from_name(name)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if name == "bool":
        raw &= 1
    if name in ("int4", "int2", "float4_e2m1fn"):
        low, high = {"int4": (-8, 8), "int2": (-2, 2)}.get(name, (-4, 4))
        return rng.integers(low, high, shape).astype(np.float32).astype(dtype)
    return raw.reshape(-1).view(dtype).reshape(shape)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("chunk_bytes", [64, 8 << 20])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_dtype_bit_for_bit(
    name: str, chunk_bytes: int, compression: str | None, tmp_path: Path,
    rng: np.random.Generator, bits: Bits,
) -> None:  # fmt: skip
    tree = {
        "matrix": random_array(name, (7, 11), rng),
        "scalar": random_array(name, (), rng),
        "empty": random_array(name, (0, 3), rng),
        "zeros": np.zeros((5, 3), dtypes.from_name(name)),
    }
    options = unickpt.SaveOptions(chunk_bytes=chunk_bytes, compression=compression)
    unickpt.save(tmp_path / "c", tree, options=options)
    got = unickpt.load(tmp_path / "c")
    like = {key: np.ones_like(value) for key, value in tree.items()}
    filled = unickpt.load(tmp_path / "c", like)
    for key, value in tree.items():
        for found in (got[key], filled[key]):
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert bits(found) == bits(value)
    assert filled["matrix"] is like["matrix"]
    assert unickpt.verify(tmp_path / "c").ok


@pytest.mark.parametrize("name", dtypes.supported())
def test_tensorstore_opens_every_dtype_from_the_documented_url(
    name: str, tmp_path: Path, rng: np.random.Generator, bits: Bits
) -> None:
    array = random_array(name, (300, 70), rng)  # small chunks and large ones are written apart
    tree = {"a": {"large": array, "small": array[:3, :5], "zeros": np.zeros_like(array)}}
    unickpt.save(tmp_path / "c", tree)
    for key, value in tree["a"].items():
        opened = ts.open(
            {"driver": "zarr3", "kvstore": f"file://{tmp_path}/c/|ocdbt:a/{key}/"}
        ).result()
        assert opened.fill_value is not None
        assert bits(opened.read().result()) == bits(value)
        assert unickpt.open(tmp_path / "c")[f"a/{key}"].url.endswith(f"|ocdbt:a/{key}/")


@pytest.mark.parametrize("size", [10, 100_000])
def test_bools_of_any_byte_are_stored_as_0_and_1(size: int) -> None:
    odd = np.arange(size).astype(np.uint8).view(bool)
    unickpt.save("memory://numpy/bools", {"x": odd}, overwrite=True)
    got = unickpt.load("memory://numpy/bools")["x"]
    assert np.array_equal(got.view(np.uint8), np.arange(size) % 256 != 0)


@pytest.mark.parametrize("name", ["a/b", "ä ö", "a|b", "a?b#c", "%", "..", "", "a:b", "\0"])
def test_any_name_has_a_url_that_tensorstore_opens(name: str, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {name: np.arange(3)})
    (stored,) = dict(unickpt.open(tmp_path / "c")).values()
    opened = ts.open({"driver": "zarr3", "kvstore": stored.url}).result()
    assert opened.read().result().tolist() == [0, 1, 2]


def test_layouts_of_memory(tmp_path: Path, bits: Bits) -> None:
    base = np.arange(60.0).reshape(5, 12)
    tree = {
        "transposed": base.T,
        "strided": base[::2, ::-3],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(base[0], (4, 12)),
        "big_endian": base.astype(">f4"),
        "scalar": np.float16(1.5),
        "big_chunked": np.arange(70000.0).reshape(70, 1000).T,
    }
    unickpt.save(tmp_path / "c", tree, options=unickpt.SaveOptions(chunk_bytes=1 << 12))
    got = unickpt.load(tmp_path / "c")
    for key, value in tree.items():
        assert np.array_equal(got[key], value)
    assert got["big_endian"].dtype == np.float32

    like = {
        "transposed": np.empty((5, 12)).T,
        "strided": np.empty((6, 8))[::2, ::2],
        "fortran": np.empty((5, 12), order="F"),
        "broadcast": np.broadcast_to(0.0, (4, 12)),  # not writable: replaced
        "big_endian": np.empty((5, 12), ">f4"),
        "scalar": np.float16(0),
        "big_chunked": np.empty((70, 1000)).T,
    }
    filled = unickpt.load(tmp_path / "c", like)
    for key, value in tree.items():
        assert np.array_equal(filled[key], value), key
    assert filled["fortran"] is like["fortran"]
    assert type(filled["scalar"]) is np.float16


@settings(max_examples=60, deadline=None)
@given(
    trees(shapes(max_rank=2, max_extent=3).map(lambda s: np.arange(np.prod(s)).reshape(s))),
    st.uuids(),
)
def test_any_tree_comes_back(tree: Any, unique: Any) -> None:
    path = f"memory://numpy/{unique}"
    unickpt.save(path, tree, overwrite=True)
    assert repr(unickpt.load(path)) == repr(tree)
    assert unickpt.verify(path).ok


def test_containers_and_values(tmp_path: Path) -> None:
    Pair = namedtuple("Pair", ["first", "second"])

    @dataclasses.dataclass
    class State:
        step: int
        weights: np.ndarray

    tree = {
        "pair": Pair(1, np.arange(2)),
        "state": State(3, np.arange(4)),
        "ordered": OrderedDict(z=1, a=(2, [None, b"\0"])),
        "empty": [{}, [], ()],
        5: "int key",
        "huge": 2**200,
        "nan": float("nan"),
    }
    unickpt.save(tmp_path / "c", tree, metadata={"run": [1, "x"]})
    got = unickpt.load(tmp_path / "c")
    assert got["pair"]._fields == ("first", "second")
    assert got["state"]["step"] == 3
    assert (got["ordered"], got["empty"], got[5], got["huge"]) == (
        tree["ordered"], tree["empty"], "int key", 2**200,
    )  # fmt: skip
    opened = unickpt.open(tmp_path / "c")
    assert opened.metadata == {"run": [1, "x"]}
    assert opened.values["huge"] == 2**200
    assert set(opened) == {"pair/second", "state/weights"}

    back = unickpt.load(
        tmp_path / "c",
        {**tree, "state": State(0, np.zeros(4, int)), "pair": Pair(0, np.zeros(2, int))},
    )
    assert isinstance(back["state"], State)
    assert back["state"].step == 3
    assert back["pair"] == Pair(1, back["pair"].second)


def test_objects_with_a_state_dict(tmp_path: Path) -> None:
    class Loader:
        def __init__(self, position: int) -> None:
            self.position = position

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]

    unickpt.save(tmp_path / "c", {"loader": Loader(7)})
    fresh = Loader(0)
    assert unickpt.load(tmp_path / "c", {"loader": fresh})["loader"] is fresh
    assert fresh.position == 7
    assert unickpt.load(tmp_path / "c") == {"loader": {"position": 7}}


def test_an_error_of_the_users_own_object_stays_what_it_is() -> None:
    class Broken:
        def state_dict(self) -> None:
            raise ValueError("boom")

        def load_state_dict(self, state: None) -> None: ...

    with pytest.raises(ValueError, match=r"^boom$"):
        unickpt.save("memory://numpy/broken", {"x": Broken()})


def test_ties_are_stored_once_and_come_back_as_one(tmp_path: Path) -> None:
    w = np.arange(6.0)
    report = unickpt.save(tmp_path / "c", {"embed": w, "head": w, "other": w.copy()})
    assert (report.arrays, report.bytes) == (2, 96)
    got = unickpt.load(tmp_path / "c")
    assert got["head"] is got["embed"]
    assert got["other"] is not got["embed"]
    opened = unickpt.open(tmp_path / "c")
    assert np.array_equal(opened["head"][:], w)
    untied = unickpt.load(tmp_path / "c", {k: np.zeros(6) for k in ("embed", "head", "other")})
    assert np.array_equal(untied["head"], w)


def test_tying_what_was_stored_apart_is_refused(tmp_path: Path) -> None:
    unickpt.save(
        tmp_path / "c", {"a": np.arange(3.0), "b": np.arange(3.0) + 1, "c": np.arange(3.0)}
    )
    one = np.zeros(3)
    with pytest.raises(unickpt.LoadMismatch, match=r"b +tied +an array of its own"):
        unickpt.load(tmp_path / "c", {"a": one, "b": one, "c": np.zeros(3)})
    unickpt.load(tmp_path / "c", {"a": one, "b": np.zeros(3), "c": one})  # equal: no harm


SLICES = [
    (slice(2, 5),), (3,), (-1, slice(None, None, -2)), (Ellipsis, 4), (slice(5, 2),),
    (slice(None), slice(1, 40, 7)), (slice(-3, None), -2), (), (np.int64(2),),
]  # fmt: skip


@pytest.mark.parametrize("key", SLICES, ids=str)
def test_slices_are_those_of_numpy(key: tuple, tmp_path: Path) -> None:
    array = np.arange(9 * 50).reshape(9, 50)
    unickpt.save(tmp_path / "c", {"x": array}, options=unickpt.SaveOptions(chunk_shape=(2, 7)))
    stored = unickpt.open(tmp_path / "c")["x"]
    assert stored.chunk == (2, 7)
    assert np.array_equal(stored[key], array[key])
    assert stored[key].shape == array[key].shape


def test_a_stored_array_is_array_like(tmp_path: Path) -> None:
    array = np.arange(12).reshape(3, 4)
    unickpt.save(tmp_path / "c", {"x": array})
    stored = unickpt.open(tmp_path / "c")["x"]
    assert np.array_equal(np.asarray(stored), array)
    assert (len(stored), stored.shape, stored.dtype) == (3, (3, 4), np.int64)
    assert np.array_equal(stored.tensorstore()[1].read().result(), array[1])
    for bad, message in [((0, 0, 0), "too many"), ((3,), "out of bounds"), ("x", "integers")]:
        with pytest.raises(IndexError, match=message):
            stored[bad]
    with pytest.raises(KeyError, match="'y' is not in this checkpoint; arrays are x"):
        unickpt.open(tmp_path / "c")["y"]


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (np.array([object()]), "dtype object"),
        (np.array(["text"]), "dtype <U4"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        (np.zeros(2, ml_dtypes.uint4), "uint4"),
        (np.zeros(2, np.longdouble), "dtype float128"),
        (np.ma.masked_array([1, 2], [True, False]), "mask"),
        (object(), "neither an array"),
        (1j, "neither an array"),
    ],
)
def test_what_cannot_be_stored_is_named_before_anything_is_written(
    leaf: Any, reason: str, tmp_path: Path
) -> None:
    tree = {"good": np.ones(3), "bad": {"leaf": leaf}}
    with pytest.raises(unickpt.UnsupportedLeaf, match=reason) as caught:
        unickpt.save(tmp_path / "c", tree)
    assert "'bad/leaf'" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_metadata_must_be_json(tmp_path: Path) -> None:
    for bad in ({"x": object()}, {"x": float("nan")}, {1: 2}):
        with pytest.raises(unickpt.UnsupportedLeaf, match="metadata"):
            unickpt.save(tmp_path / "c", {}, metadata=bad)
    assert list(tmp_path.iterdir()) == []


def test_existing_destinations_are_refused_and_overwritten_only_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "c"
    unickpt.save(path, {"x": np.arange(3)})
    with pytest.raises(unickpt.CheckpointExists, match="overwrite=True"):
        unickpt.save(path, {"x": np.arange(4)})
    with pytest.raises(FileExistsError):
        unickpt.save(path, {})
    unickpt.save(path, {"y": np.arange(5)}, overwrite=True)
    assert set(unickpt.open(path)) == {"y"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(unickpt.CheckpointExists, match=r"other files \(thesis\.tex"):
        unickpt.save(tmp_path / "mine", {}, overwrite=True)


def test_reading_where_nothing_is(tmp_path: Path) -> None:
    for read in (unickpt.open, unickpt.load, unickpt.verify):
        with pytest.raises(unickpt.CheckpointNotFound, match="no checkpoint at"):
            read(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        unickpt.load("memory://nothing/here")


def test_casting_is_asked_for_and_stays_within_a_kind(tmp_path: Path) -> None:
    f32 = np.array([1.0, 2.5, np.inf, -0.0], np.float32)
    tree = {"f": f32, "i": np.array([1, -2, 100]), "c": np.array([1j], np.complex128)}
    unickpt.save(tmp_path / "c", tree)

    def like(f: str, i: str, c: str) -> dict[str, np.ndarray]:
        return {"f": np.zeros(4, f), "i": np.zeros(3, i), "c": np.zeros(1, c)}

    with pytest.raises(unickpt.LoadMismatch, match=r"f +dtype +float32 +float64"):
        unickpt.load(tmp_path / "c", like("f8", "i8", "c16"))
    got = unickpt.load(tmp_path / "c", like(ml_dtypes.bfloat16, "i1", "c8"), cast=True)
    assert got["f"].tobytes() == f32.astype(ml_dtypes.bfloat16).tobytes()
    assert got["i"].tolist() == [1, -2, 100]
    for bad in (like("i4", "i8", "c16"), like("f4", "f8", "c16"), like("c8", "i8", "c16")):
        with pytest.raises(unickpt.LoadMismatch, match="dtype"):
            unickpt.load(tmp_path / "c", bad, cast=True)
    with pytest.raises(unickpt.LoadMismatch, match="array 'i': stored as int64"):
        unickpt.load(tmp_path / "c", like("f4", "u1", "c16"), cast=True)


@pytest.mark.parametrize(
    ("value", "stored", "asked", "fits"),
    [
        (200, "u1", "i1", False),  # would come back right after two wrong casts
        (-1, "i8", "u8", False),
        (2**63, "u8", "i8", False),
        (127, "u1", "i1", True),
        (-8, "i8", "int4", True),
        (8, "i8", "int4", False),
        (7, "int4", "u2", True),
    ],
)
def test_integers_are_cast_only_where_they_fit(
    value: int, stored: str, asked: str, fits: bool
) -> None:
    def dtype(name: str) -> Any:
        return ml_dtypes.int4 if name == "int4" else np.dtype(name)

    path = "memory://numpy/integers"
    unickpt.save(path, {"x": np.full(3, value, dtype(stored))}, overwrite=True)
    like = {"x": np.zeros(3, dtype(asked))}
    if fits:
        assert unickpt.load(path, like, cast=True)["x"].astype(int).tolist() == [value] * 3
    else:
        with pytest.raises(unickpt.LoadMismatch, match="does not hold all its values"):
            unickpt.load(path, like, cast=True)


def test_per_process_values_in_a_job_of_one(tmp_path: Path) -> None:
    state = {"seed": 7, "bits": np.arange(5, dtype=np.uint32), "name": "philox"}
    unickpt.save(tmp_path / "c", {"rng": unickpt.PerProcess(state)})
    like = unickpt.PerProcess({"seed": 0, "bits": np.zeros(5, np.uint32), "name": ""})
    got = unickpt.load(tmp_path / "c", {"rng": like})["rng"].value
    assert (got["seed"], got["bits"].tolist(), got["name"]) == (7, [0, 1, 2, 3, 4], "philox")
    (only,) = unickpt.load(tmp_path / "c")["rng"].values
    assert only["bits"].tolist() == [0, 1, 2, 3, 4]
    assert unickpt.load(tmp_path / "c", {"rng": unickpt.PerProcess()})["rng"].value["seed"] == 7


def test_neither_jax_nor_torch_is_needed_or_imported(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["jax"] = sys.modules["torch"] = None
import numpy as np, unickpt
del sys.modules["jax"], sys.modules["torch"]
unickpt.save({str(tmp_path / "c")!r}, {{"x": np.arange(5)}})
assert unickpt.load({str(tmp_path / "c")!r})["x"].tolist() == [0, 1, 2, 3, 4]
assert unickpt.verify({str(tmp_path / "c")!r}).ok
assert not {{"jax", "torch", "typer", "rich"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_bytes": 0}, {"budget_bytes": 0}, {"timeout_s": 0}, {"compression": "lzma"},
        {"chunk_shape": (0,)},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        unickpt.SaveOptions(**options)


def test_a_state_larger_than_the_budget_saves_and_loads(tmp_path: Path) -> None:
    tree = {f"x{i}": np.full((256, 256), i, np.float32) for i in range(12)}
    options = unickpt.SaveOptions(budget_bytes=100_000, chunk_bytes=30_000)
    unickpt.save(tmp_path / "c", tree, options=options)
    got = unickpt.load(tmp_path / "c", options=unickpt.LoadOptions(budget_bytes=100_000))
    assert all(np.array_equal(got[k], v) for k, v in tree.items())


def test_compressed_chunks_are_not_too_large(tmp_path: Path) -> None:
    """Found before anything is written: readers refuse such chunks."""
    huge = np.broadcast_to(np.float32(0), (1 << 15, 1 << 14))  # 2 GiB, in four bytes of memory
    options = unickpt.SaveOptions(compression="zstd", chunk_bytes=2 << 30)
    with pytest.raises(unickpt.UnsupportedLeaf, match=r"'w': .* lower SaveOptions.chunk_bytes"):
        unickpt.save(tmp_path / "c", {"w": huge}, options=options)
    assert not (tmp_path / "c").exists()
