"""NumPy's arrays and scalars and common containers in pickles, without their classes."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pickle
import random
import zipfile
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unickpt
from unickpt import CheckpointCorrupt, Opaque
from unickpt.backends._files import known_objects, pickles
from unickpt.backends._files.pickles import BadPickle
from unickpt.backends._files.torch_tensors import CONSTRUCTORS, Tensor

PROTOCOLS = (2, 3, 4, 5)


def renamed(data: bytes) -> bytes:
    """As NumPy 1 calls its modules; in protocol 4 names have their length before them."""
    short = data.replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray")
    short = short.replace(b"\x8c\x13numpy._core.numeric", b"\x8c\x12numpy.core.numeric")
    return short.replace(b"cnumpy._core.", b"cnumpy.core.")


def decoded(data: bytes) -> Any:
    found = pickles.read(data, CONSTRUCTORS)
    return known_objects.decoded(found) if isinstance(found, pickles.PickledObject) else found


def opened(folder: Path, data: bytes) -> unickpt.Checkpoint:
    """A file of torch.save with a pickle."""
    with zipfile.ZipFile(folder / "x.pt", "w") as file:
        file.writestr("archive/data.pkl", data)
    return unickpt.open(folder / "x.pt")


ARRAYS = {
    "C": np.arange(6, dtype=np.float32).reshape(2, 3),
    "F": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "view": np.arange(20, dtype=np.int16)[::3],
    "big endian": np.arange(5, dtype=">i4"),
    "big endian F": np.asfortranarray(np.arange(6, dtype=">f8").reshape(2, 3)),
    "none": np.zeros((0, 3), np.uint8),
    "one": np.array(2.5),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j, 3]).astype(np.complex64),
    "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
    "float8": np.arange(3).astype(ml_dtypes.float8_e4m3fn),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("numpy", [1, 2])
def test_arrays(numpy: int, protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps(ARRAYS, protocol)
    assert (renamed(data) == data) == (b"numpy._core" not in data)
    assert b"numpy._core" not in renamed(data)
    found = opened(tmp_path, renamed(data) if numpy == 1 else data)
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        native = array.astype(array.dtype.newbyteorder("="))
        assert (found[name].shape, found[name].dtype) == (array.shape, native.dtype)
        assert found[name][...].tobytes() == native.tobytes()
    assert found["F"][1:, 1, 2:4].tolist() == ARRAYS["F"][1:, 1, 2:4].tolist()
    assert found["big endian"][2:4].tolist() == [2, 3]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("numpy", [1, 2])
def test_scalars(numpy: int, protocol: int) -> None:
    for scalar in (
        np.float64(0.1), np.float32(0.1), np.float16(0.1), np.int64(-3), np.uint8(200),
        np.bool_(True), np.uint64((1 << 64) - 1), np.str_("é\U0001f600"), np.bytes_(b"xy"),
        ml_dtypes.bfloat16(1.5), np.array(7, ">i4")[()],
    ):  # fmt: skip
        data = pickle.dumps(scalar, protocol)
        value = decoded(renamed(data) if numpy == 1 else data)
        assert (value, type(value)) == (scalar.item() if hasattr(scalar, "item") else 1.5,
                                        type(scalar.item()))  # fmt: skip


def test_random_states_of_a_trainer(tmp_path: Path) -> None:
    np.random.seed(5)
    state = {"numpy": np.random.get_state(), "python": random.getstate(), "step": np.int64(3)}
    unickpt.convert(opened(tmp_path, pickle.dumps(state, 2)), tmp_path / "ours")
    found = unickpt.load(tmp_path / "ours")
    expected = np.random.random(4).tolist()
    np.random.set_state(found["numpy"])
    assert np.random.random(4).tolist() == expected
    assert random.Random().setstate(found["python"]) is None
    assert found["step"] == 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_containers_and_paths(protocol: int, tmp_path: Path) -> None:
    state = {
        "args": argparse.Namespace(lr=0.1, out=PurePosixPath("/a/b"), ema=np.float32(0.5)),
        "more": SimpleNamespace(x=(1, None)),
        "deque": collections.deque([1, np.arange(2)], maxlen=4),
        "counter": collections.Counter("aab"),
        "frozen": frozenset([1]),
        "default": collections.defaultdict(list, {"x": [1]}),
        "windows": PureWindowsPath("c:/x"),
        "complex": 1 + 2j,
        "keys": {np.int64(3): "x", np.str_("k"): 1},
    }
    opened(tmp_path, pickle.dumps(state, protocol))
    found = unickpt.load(tmp_path / "x.pt")
    assert found["args"] == {"lr": 0.1, "out": "/a/b", "ema": 0.5}
    assert found["more"] == {"x": (1, None)}
    assert (found["deque"][0], found["deque"][1].tolist()) == (1, [0, 1])
    assert (found["counter"], found["frozen"]) == ({"a": 2, "b": 1}, [1])
    assert (found["default"], found["windows"]) == ({"x": [1]}, "c:\\x")
    assert found["complex"].tolist() == 1 + 2j
    assert found["keys"] == {3: "x", "k": 1}


def test_one_array_in_two_places_is_a_tie(tmp_path: Path) -> None:
    array = np.arange(3.0)
    found = opened(tmp_path, pickle.dumps({"a": array, "b": [array], "c": array.copy()}, 2))
    assert found.index.aliases == {"b/0": "a"}


class Ours(np.ndarray):
    """A class of somebody's own."""


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, "a", None], object),
        np.array(["a", "bc"]),
        np.array([b"a"]),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        np.array(["2020-01-01"], "M8[D]"),
        np.datetime64("2020-01-01"),
        np.dtype("float32"),
        np.arange(3).view(Ours),
        np.ma.masked_array([1, 2], [0, 1]),
        np.longdouble(0.5),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', value)}",
)
def test_what_has_no_plain_form_stays_as_it_was(value: Any, tmp_path: Path) -> None:
    for protocol in PROTOCOLS:
        found = opened(tmp_path, pickle.dumps({"x": value}, protocol)).values["x"]
        assert isinstance(found, Opaque)
        again = pickle.loads(found.pickle)
        assert type(again) is type(value)
        assert repr(again) == repr(value)


# --- damage -------------------------------------------------------------------------------------


def facts(value: Any) -> pickles.PickledObject:
    found = pickles.read(pickle.dumps(value, 2), CONSTRUCTORS)
    assert isinstance(found, pickles.PickledObject)
    return found


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ((3,), b"x" * 8), ((1 << 60,), b"x" * 12), ((-3,), b"x" * 12), ((True,), b"x" * 4),
        ([3], b"x" * 12), (3, b"x" * 12), ((1,) * 65, b"x" * 4), ((0, 1 << 70), b"x"),
    ],
)  # fmt: skip
def test_a_shape_that_contradicts_the_bytes_is_damage(
    shape: Any, data: bytes, tmp_path: Path
) -> None:
    found = facts(np.arange(3, dtype=np.float32))
    found.state = (found.state[0], shape, *found.state[2:4], data)
    with pytest.raises(BadPickle, match=r"a NumPy array of shape .* bytes"):
        known_objects.decoded(found)


def test_damage_names_the_file(tmp_path: Path) -> None:
    data = pickle.dumps({"x": np.arange(3, dtype=np.float32)}, 3)
    with pytest.raises(CheckpointCorrupt, match=r"x\.pt: .*a NumPy array of shape \(4,\) has 12"):
        opened(tmp_path, data.replace(b"K\x03\x85", b"K\x04\x85"))
    one, short = np.float64(1), b"C\x03abc"
    with pytest.raises(BadPickle, match="scalar of 8 bytes has 3"):
        decoded(pickle.dumps(one, 3).replace(b"C\x08" + one.tobytes(), short))
    with pytest.raises(BadPickle, match="text is damaged"):
        decoded(pickle.dumps(np.str_("a"), 3).replace(b"C\x04a\0\0\0", b"C\x04\xff\xff\xff\xff"))


DTYPES = st.builds(
    lambda name, state: pickles.PickledObject(
        pickles.Global("numpy.dtype"), (name, False, True), state
    ),
    st.sampled_from(
        [
            *("f4", "i8", "U1", "U0", "S0", "O8", "V4", "b9", "c8", "f16", "x", ""),
            *map(pickles.Global, ("ml_dtypes.bfloat16", "ml_dtypes.x")),
        ]
    ),
    st.one_of(st.none(), st.sampled_from([(3, x, *[None] * 3, -1, -1, 0) for x in "<>|=x"])),
)
PARTS = st.one_of(
    st.none(),
    st.integers(),
    st.binary(max_size=8),
    st.text(max_size=3),
    st.booleans(),
    st.tuples(st.integers(-2, 9)),
    st.just(pickles.Global("numpy.ndarray")),
    DTYPES,
)


@given(
    st.sampled_from(sorted(known_objects._KNOWN)),
    st.lists(PARTS, max_size=5).map(tuple),
    st.one_of(PARTS, st.lists(PARTS, min_size=5, max_size=5).map(tuple)),
)
def test_any_facts_are_decoded_or_refused(name: str, args: Any, state: Any) -> None:
    found = pickles.PickledObject(pickles.Global(name), args, state, at=7)
    try:
        made = known_objects.decoded(found)
    except BadPickle:
        return
    if isinstance(made, Tensor):
        assert made.nbytes <= 8 * 16


@pytest.mark.integration
def test_a_configuration_of_omegaconf_is_what_it_holds(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    conf = pytest.importorskip("omegaconf").OmegaConf
    held = {
        "layers": [1, 2],
        "lr": 0.1,
        "none": None,
        "other": "${lr}",
        "on": True,
        "in": {"a": {}},
    }
    torch.save({"cfg": conf.create(held), "w": torch.ones(2)}, tmp_path / "x.pt")
    found = unickpt.open(tmp_path / "x.pt")
    assert unickpt.load(found)["cfg"] == held
    assert not any(isinstance(value, unickpt.Opaque) for value in found.values.values())


@dataclasses.dataclass
class Structured:
    size: int | str = 3
    layers: list[int] = dataclasses.field(default_factory=lambda: [4, 5])
    name: str = "???"


@pytest.mark.integration
def test_a_structured_configuration_of_omegaconf_in_a_plain_pickle(tmp_path: Path) -> None:
    conf = pytest.importorskip("omegaconf").OmegaConf
    held = conf.create({"model": conf.structured(Structured), "seeds": [1, {"a": "${model.size}"}]})
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(held))
    assert unickpt.load(tmp_path / "x.pkl") == {
        "model": {"size": 3, "layers": [4, 5], "name": "???"},
        "seeds": [1, {"a": "${model.size}"}],
    }
