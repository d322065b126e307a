"""What is written as a pickle is read back: by Python, by torch, and by `pickles.read` as facts."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pickled import trees, typed

from unickpt.backends._files import pickles
from unickpt.backends._files.pickle_writer import PickledCall, dumps
from unickpt.backends._files.pickles import Global, PersistentId


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: Any) -> bool:
        return type(other) is Slotted and other.x == self.x

    def __hash__(self) -> int:
        return 1


class Named(tuple[Any, ...]):
    def __new__(cls, *args: Any, key: Any) -> Named:
        made = super().__new__(cls, args)
        made.key = key
        return made

    def __getnewargs_ex__(self) -> Any:
        return tuple(self), {"key": self.key}


class Many(dict[Any, Any]):
    pass


class Listing(list[Any]):
    pass


def again(value: Any, protocol: int) -> Any:
    """What Python makes of its own pickle, after it was read as facts and written."""
    facts = pickles.read(pickle.dumps(value, protocol), {}, PersistentId)
    return pickle.loads(dumps(facts))


@given(trees)
def test_python_reads_plain_trees(tree: Any) -> None:
    assert typed(pickle.loads(dumps(tree))) == typed(tree)


@given(trees, st.integers(0, 5))
def test_facts_of_every_protocol_are_written_as_they_were(tree: Any, protocol: int) -> None:
    assert typed(again(tree, protocol)) == typed(tree)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_are_written_as_they_were(protocol: int) -> None:
    listing, many = Listing([1, 2]), Many(a=1)
    listing.note, many.note = "x", [listing]
    for value in [
        argparse.Namespace(lr=0.1, layers=[1, 2]), Slotted((1, 2)), listing, many,
        collections.OrderedDict(b=1, a=2), collections.defaultdict(list, {1: [2]}),
        fractions.Fraction(1, 3), decimal.Decimal("0.1"), datetime.datetime(2026, 1, 2),
        {1, 2, 3}, frozenset("ab"), collections.Counter("aab"), int, len, Path("/x"), b"\xff\0",
        "x" * 300, 1 << 3000, -(1 << 31), -(1 << 15), 255, "\ud800",
    ]:  # fmt: skip
        found = again(value, protocol)
        assert type(found) is type(value)
        assert found == value
        assert getattr(found, "note", None) == getattr(value, "note", None)


@pytest.mark.parametrize("protocol", [4, 5])
def test_arguments_with_names_and_names_with_dots(protocol: int) -> None:
    found = again([Named(1, 2, key="k"), collections.OrderedDict.fromkeys], protocol)
    assert (found[0], found[0].key) == ((1, 2), "k")
    assert found[1] == collections.OrderedDict.fromkeys


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_is_shared_or_contains_itself_stays_so(protocol: int) -> None:
    inner: list[Any] = []
    loop = (inner, 1, 2, 3)
    inner.append(loop)
    ours = Slotted(None)
    ours.x = [ours]
    found = again([loop, (inner,), ours, ours], protocol)
    assert found[0][0][0] is found[0]
    assert found[1][0] is found[0][0]
    assert found[2] is found[3]
    assert found[2].x[0] is found[2]


def test_an_object_in_its_own_arguments() -> None:
    args: list[Any] = []
    call = PickledCall(Global("collections.deque"), (args,))
    args.append(call)
    found = pickles.read(dumps([call, call]), {})
    assert found[0] is found[1]
    assert found[0].args[0][0] is found[0]


def test_no_object_takes_the_place_of_one_that_is_gone() -> None:
    values = [bytes([n % 256, n // 256]) for n in range(2000)]
    assert pickle.loads(dumps(values)) == values
    assert pickle.loads(dumps([{n, "x"} for n in range(500)])) == [{n, "x"} for n in range(500)]


def test_deep_nesting_is_written() -> None:
    deep: Any = []
    for _ in range(50_000):
        deep = [deep]
    found = pickles.read(dumps(deep), {})
    for _ in range(50_000):
        [found] = found
    assert found == []


def test_persistent_ids() -> None:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return ("outside", *pid)

    data = dumps({"a": PersistentId(("storage", Global("builtins.int"), "0"))})
    assert Unpickler(io.BytesIO(data)).load() == {"a": ("outside", "storage", int, "0")}


@pytest.mark.parametrize("value", [object(), 1j, [bytearray()], Many(), True + 1j])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="is not written into a pickle"):
        dumps(value)


@pytest.mark.parametrize(
    "name", [Global("x"), Global("os.system\n)R.x"), Global("a\nb.c", None, "a\nb"), Global("")]
)
def test_a_name_cannot_smuggle_opcodes(name: Global) -> None:
    with pytest.raises(ValueError, match="is not the name of a class"):
        dumps([name])


@pytest.mark.integration
def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    storage = PersistentId(("storage", Global("torch.FloatStorage"), "0", "cpu", 6))
    args = (storage, 0, (2, 3), (3, 1), False, PickledCall(Global("collections.OrderedDict")))
    tensor = PickledCall(Global("torch._utils._rebuild_tensor_v2"), args)
    state = {"w": tensor, "tied": tensor, "step": 3, "raw": b"\xff", "size": [None, 0.5, 1 << 40]}
    data = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("archive/data.pkl", dumps(state))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", data.numpy().tobytes())
    for weights_only in (False, True):
        found = torch.load(tmp_path / "x.pt", weights_only=weights_only)
        assert torch.equal(found["w"], data)
        assert found["tied"].data_ptr() == found["w"].data_ptr()
        assert (found["step"], found["raw"], found["size"]) == (3, b"\xff", [None, 0.5, 1 << 40])
