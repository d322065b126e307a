"""Pickles are data: nothing runs, whatever they say, and small ones take little time and memory."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import pickletools
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pickled import trees, typed

from unickpt.backends._files import pickles, torch_tensors
from unickpt.backends._files.pickles import BadPickle, Global, PickledObject

_BOUND = 5.0  # seconds of processor time; what would take minutes or hours without a bound


def read(data: bytes, **constructors: Any) -> Any:
    return pickles.read(data, {**pickles.PLAIN, **constructors})


def refused(data: bytes) -> str:
    began = time.thread_time()
    with pytest.raises(BadPickle) as caught:
        pickles.read(data, torch_tensors.CONSTRUCTORS)
    assert time.thread_time() - began < _BOUND
    assert len(str(caught.value)) < 10_000
    return str(caught.value)


# --- what is valid ------------------------------------------------------------------------------


@given(trees, st.integers(0, 5))
def test_plain_trees_of_every_protocol_read_as_they_were(tree: Any, protocol: int) -> None:
    assert typed(read(pickle.dumps(tree, protocol))) == typed(tree)


@pytest.mark.parametrize("protocol", range(6))
def test_shared_and_recursive_objects_stay_so(protocol: int) -> None:
    inner: list[Any] = [1]
    inner.append(inner)
    found = read(pickle.dumps([inner, inner], protocol))
    assert found[0] is found[1]
    assert found[0][1] is found[0]


@pytest.mark.parametrize("protocol", range(6))
def test_containers_of_the_library(protocol: int) -> None:
    default = collections.defaultdict(list, {"a": 1})
    tree = [collections.OrderedDict(x=1, y=2), default, {1, 2}]
    found = pickles.read(pickle.dumps(tree, protocol), torch_tensors.CONSTRUCTORS)
    assert found[:2] == [{"x": 1, "y": 2}, {"a": 1}]
    assert sorted(found[2]) == [1, 2]


class Ours:
    def __init__(self) -> None:
        self.x = 1


@pytest.mark.parametrize("protocol", range(6))
def test_an_object_of_an_unknown_class_says_what_the_pickle_says(protocol: int) -> None:
    found = read(pickle.dumps(Ours(), protocol))
    assert isinstance(found, PickledObject)
    assert found.state == {"x": 1} or protocol < 2
    assert "Ours" in repr(found) or protocol < 2


# --- what would run code ------------------------------------------------------------------------


class Runs:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_no_function_that_a_pickle_names_is_called(protocol: int, tmp_path: Any) -> None:
    made = tmp_path / "made"
    attacks = [
        Runs(os.system, f"touch {made}"),
        Runs(eval, f"open({str(made)!r}, 'w')"),
        Runs(exec, f"open({str(made)!r}, 'w')"),
        Runs(__import__, "os"),
        Runs(getattr, Runs(__import__, "os"), "system"),
        Runs(open, str(made), "w"),
    ]
    for attack in attacks:
        found = read(pickle.dumps([attack], protocol))
        assert isinstance(found[0], PickledObject)
    assert not made.exists()


def test_every_way_to_call_is_a_description() -> None:
    for data in [
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"(cos\nsystem\nS'true'\no.",
        b"\x80\x02cos\nsystem\n(S'true'\nt\x81.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93(S'true'\nt}\x92.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x041+11\x85R.",
    ]:
        found = read(data)
        assert isinstance(found, PickledObject)
        assert found.name in ("os.system", "builtins.eval")


def test_what_is_known_is_not_changed_by_a_state() -> None:
    function: Any = torch_tensors.CONSTRUCTORS["torch.Size"]
    before = function.keywords.copy(), dict(function.__dict__)
    data = b"\x80\x02ctorch\nSize\nN}U\x0c__defaults__K\x01s\x86b."
    found = pickles.read(data, torch_tensors.CONSTRUCTORS)
    assert isinstance(found, Global)
    assert (function.keywords, dict(function.__dict__)) == before


def test_names_with_dots_are_names_of_nothing() -> None:
    found = read(b"\x80\x04\x8c\x08builtins\x8c\x10list.__class__.x\x93.")
    assert isinstance(found, Global)
    assert found.make is None


@pytest.mark.parametrize(
    "data",
    [
        b"K\x01K\x02R.",
        b"]K\x01\x85R.",
        b"cos\nsystem\nK\x01\x85RK\x01\x85R.",  # what an object of an unknown class returns
        b"\x82\x01.",
        b"\x83\x01\x00.",
        b"\x84\x01\x00\x00\x00.",
        b"\x97.",
        b"\x98.",
        b"K\x01Q.",
        b"Pabc\n.",
    ],
)
def test_calls_of_values_extensions_and_data_outside_are_refused(data: bytes) -> None:
    refused(data)


# --- what would take long, or much memory -------------------------------------------------------


@pytest.mark.parametrize(
    "code", [b"T", b"X", b"B", b"\x8b", b"\x8d", b"\x8e", b"\x96", b"U", b"C", b"\x8c", b"\x8a"]
)
@pytest.mark.parametrize("count", [b"\xff" * 8, b"\xff\xff\xff\x7f\0\0\0\0", b"\xff" * 7 + b"\x7f"])
def test_lengths_beyond_the_end_take_no_memory(code: bytes, count: bytes) -> None:
    refused(code + count)


def doubling(times: int) -> bytes:
    """Leaves on the stack a tuple of a tuple of ..., of `2 ** times` items."""
    return b")" + b"2\x86" * times


def test_tuples_that_double_are_no_keys_and_no_part_of_messages() -> None:
    refused(b"}" + doubling(60) + b"K\x01s.")
    refused(b"\x8f(" + doubling(60) + b"\x90.")
    refused(b"(" + doubling(60) + b"\x91.")
    refused(doubling(60) + b"K\x01K\x01s.")
    refused(doubling(60) + b"K\x01a.")
    refused(doubling(60) + b")R.")
    refused(b"ctorch\nSize\n" + doubling(60) + b"R.")


def test_deep_nesting_ends() -> None:
    assert isinstance(read(b")" + b"\x85" * 100_000 + b"."), tuple)
    refused(b"}" + b")" + b"\x85" * 100_000 + b"K\x01s.")
    refused(b"K\x01)" + b"\x85" * 100_000 + b"s.")


def integers(numbers: Any) -> bytes:
    return b"".join(b"\x8a\x10" + n.to_bytes(16, "little", signed=True) + b"N" for n in numbers)


def test_keys_whose_hashes_are_equal_are_refused() -> None:
    prime = (1 << 61) - 1
    refused(b"}(" + integers(n * prime for n in range(50_000)) + b"u.")
    refused(b"(" + integers(n * prime for n in range(50_000)) + b"d.")
    refused(b"\x8f(" + integers(n * prime for n in range(50_000)) + b"\x90.")
    refused(b"}(G" + struct.pack(">d", 2.0**61) + b"\x85Nu.")
    pairs = b"".join(integers([n * prime])[:-1] + b"N\x86" for n in range(50_000))
    refused(b"ccollections\nOrderedDict\n](" + pairs + b"e\x85R.")
    refused(b"N" + b"".join(b"p%d\n" % (n * prime) for n in range(50_000)) + b".")
    refused(b"}(" + integers([1 << 40])[:-1] + b"\x85Nu.")


def test_floats_are_keys_because_only_few_have_the_same_hash() -> None:
    found = {2.0**n: n for n in range(-61 * 17, 61 * 16, 61)} | {0.1: 1, float("-inf"): 2}
    assert len({hash(key) for key in found}) == 3
    assert read(pickle.dumps(found)) == found


def test_long_keys_that_are_used_often_are_refused() -> None:
    key = b"(" + b"K\x01" * 10_000 + b"t\x940"
    refused(key + b"}(" + b"h\x00N" * 100_000 + b"u.")


@pytest.mark.parametrize(
    ("name", "close"),
    [
        (b"collections\nOrderedDict", b"e\x85"),
        (b"builtins\nset", b"e\x85"),
        (b"torch\nSize", b"et"),
        (b"torch._utils\n_rebuild_parameter", b"et"),
        (b"unknown\nclass", b"et"),
    ],
)
def test_calls_that_share_a_large_argument_are_refused(name: bytes, close: bytes) -> None:
    if close == b"e\x85":
        large = b"](" + b"NN\x86" * 30_000 + close
    else:
        large = b"(" + b"K\x01" * 100_000 + b"t"
    many = b"c" + name + b"\n\x940" + large + b"\x940" + b"h\x00h\x01R0" * 30_000 + b"N."
    began = time.thread_time()
    with pytest.raises(BadPickle, match=r"too much work|cannot be built|not a tuple"):
        pickles.read(many, torch_tensors.CONSTRUCTORS)
    assert time.thread_time() - began < _BOUND


def test_named_arguments_of_shared_tuples_are_bounded() -> None:
    large = b"(" + b"N" * 100_000 + b"t\x940"
    once = b"ca\nb\n\x940}K\x01K\x02s\x940" + large + b"h\x00h\x02h\x01\x920" * 50_000
    assert "work" in refused(once + b"N.")


def test_long_numbers_as_text_are_refused() -> None:
    refused(b"I" + b"9" * 1_000_000 + b"\n.")
    refused(b"L" + b"9" * 1_000_000 + b"L\n.")
    refused(b"Ng" + b"9" * 1_000_000 + b"\n.")


@pytest.mark.parametrize(
    "data",
    [
        b"", b".", b"(.", b"(\x85.", b"(0.", b"((R.", b"(2.", b"(q\x00.", b"h\x00.", b"g-1\n.",
        b"Np-1\n.", b"K\x01t.", b"u.", b"](K\x01d.", b"N(K\x01u.", b"}K\x01.", b"a.", b"N(ea.",
        b"S'abc\n.", b"Sabc\n.", b"S'\\x41'\n.", b"V\\ud800", b"X\x01\0\0\0\xff.", b"Iabc\n.",
        b"Fabc\n.", b"}]Ns.", b"}}Ns.", b"b.", b"Nb.", b"\x95\x01.", b"\x80.", b"c\n", b"cos\n",
        b"\x93.", b"K\x01K\x02\x93.", b"\x86.", b"o.", b"(o.", b"(NNo.", b"ia\nb\n.", b"\x92.",
        b"N" * 9 + b"\x92.",
    ],
)  # fmt: skip
def test_malformed_pickles_are_refused(data: bytes) -> None:
    if data == b"}K\x01.":
        assert read(data) == 1
    else:
        refused(data)


# --- damage of a real one -----------------------------------------------------------------------


def real() -> bytes:
    """With all that torch's own have: nested containers, calls, the memo, persistent ids."""
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\nq\x10((X\x07\0\0\0storageq\x11ctorch\nFloatStorage\n"
        b"q\x12X\x01\0\0\x000q\x13X\x03\0\0\0cpuq\x14K\x18tq\x15QK\x00K\x04K\x06\x86q\x16K\x06K\x01"
        b"\x86q\x17\x89ccollections\nOrderedDict\nq\x18)Rq\x19tq\x1aRq\x1b"
    )
    plain = pickle.dumps({"a": [1, 2.5, "x", None, (True, 1 << 70)], "b": {"c": b"d"}}, 2)
    return plain[:-1] + b"0}q\x20X\x01\0\0\0w" + tensor + b"s."


def machine(data: bytes) -> Any:
    return pickles.read(data, torch_tensors.CONSTRUCTORS, torch_tensors.storage)


def test_truncation_at_every_byte_is_an_error() -> None:
    data = real()
    assert machine(data)["w"].shape == (4, 6)
    assert list(pickletools.genops(data))
    for count in range(len(data)):
        with pytest.raises(BadPickle):
            machine(data[:count])


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_are_another_value_or_an_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(real())
    for at, byte in changes:
        data[at % len(data)] = byte
    began = time.thread_time()
    with contextlib.suppress(BadPickle):
        machine(bytes(data))
    assert time.thread_time() - began < _BOUND


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    with contextlib.suppress(BadPickle):
        machine(data)


@given(st.lists(st.sampled_from([bytes([c]) for c in pickles._OPERATIONS]) | st.binary(max_size=3)))
def test_any_opcodes_are_a_value_or_an_error(codes: list[bytes]) -> None:
    with contextlib.suppress(BadPickle):
        machine(b"".join(codes) + b".")
