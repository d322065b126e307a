"""What is stored as a plain value, and what to do about everything else."""

from __future__ import annotations

import datetime
import enum
import fractions
import math
import types
import uuid
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import LoadMismatch, UnsupportedLeaf
from unickpt.display import tree_table
from unickpt.trees import tree

PATH = "memory://plain/c"


class Color(enum.IntEnum):
    RED = 1
    BLUE = 1 << 60


class Name(enum.StrEnum):
    A = "a"
    ODD = "\udc80"


class OldName(str, enum.Enum):  # noqa: UP042
    A = "a"


class Flags(enum.IntFlag):
    X = 1
    Y = 2


class Shown(str, enum.Enum):  # noqa: UP042
    """Its value is not the text that it is."""

    def __new__(cls, text: str, number: int) -> Shown:
        member = str.__new__(cls, text)
        member._value_ = number  # type: ignore[assignment]
        return member

    A = "a", 1


class Planet(enum.Enum):
    EARTH = 3


def roundtrip(value: Any, like: Any = None) -> Any:
    unickpt.save(PATH, {"x": value}, overwrite=True)
    return unickpt.load(PATH, None if like is None else {"x": like})["x"]


MEMBERS = [Color.RED, Color.BLUE, Name.A, Name.ODD, OldName.A, Flags.X | Flags.Y, Flags(0)]


@pytest.mark.parametrize("member", MEMBERS, ids=repr)
def test_a_member_of_an_enumeration_is_stored_as_the_int_or_str_that_it_is(member: Any) -> None:
    plain = roundtrip(member)
    assert type(plain) in (int, str)
    assert plain == member
    for like in MEMBERS:
        if type(like) is type(member):
            got = roundtrip(member, like)
            assert type(got) is type(member)
            assert got == member
    assert type(roundtrip(member, type(plain)())) is type(plain)
    assert roundtrip(unickpt.PerProcess(member), unickpt.PerProcess(member)).value is member


def test_the_name_of_the_type_is_kept_for_people() -> None:
    state: Any = {
        "mode": [Color.RED, 1, Name.A, Color.RED, Color.RED, Flags.X, Flags.Y],
        "own": unickpt.PerProcess(Color.RED),
    }
    unickpt.save(PATH, state, overwrite=True)
    index = unickpt.open(PATH).index
    rows = [row.label for row in tree_table.outline(index, PATH)]
    assert rows == [
        "mode/",
        "{0,3..4} = 1 (Color)",
        "1 = 1",
        "2 = 'a' (Name)",
        "5 = 1 (Flags)",
        "6 = 2 (Flags)",
        "own",
    ]
    assert unickpt.load(PATH)["mode"] == [1, 1, "a", 1, 1, 1, 2]
    assert unickpt.verify(PATH).ok
    unickpt.convert(PATH, PATH + "2", overwrite=True)
    assert unickpt.open(PATH + "2").index.tree == index.tree
    deepest: Any = Color.RED
    for _ in range(tree.MAX_DEPTH - 1):
        deepest = [deepest]
    assert roundtrip(deepest) == deepest


def test_a_member_that_is_none_is_refused() -> None:
    with pytest.raises(LoadMismatch, match=r"x +member +plain int 7 +plain Color"):
        roundtrip(7, Color.RED)
    with pytest.raises(LoadMismatch, match="no member of the stored value: request a plain value"):
        roundtrip("b", Name.A)
    with pytest.raises(LoadMismatch, match="7 is not a valid Color"):
        roundtrip(unickpt.PerProcess(7), unickpt.PerProcess(Color.RED))
    assert roundtrip(7, 0) == 7
    assert roundtrip(None, Color.RED) is None  # as any plain value for another
    with pytest.raises(LoadMismatch, match="member"):
        roundtrip(Shown.A, Shown.A)
    assert roundtrip(Shown.A) == "a"


class MyInt(int):
    pass


class MyStr(str):
    pass


class MyFloat(float):
    pass


class MyBytes(bytes):
    pass


NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)

# What cannot be stored, the hint, what the hint says, and the way back.
REFUSED: list[tuple[Any, str, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (1 + 2j, "numpy.complex128(x)", np.complex128, complex),
    (Path("a/b"), "str(x)", str, Path),
    (Decimal("0.10"), "str(x)", str, Decimal),
    (uuid.UUID(int=5), "str(x)", str, uuid.UUID),
    (NOW, "x.isoformat()", lambda x: x.isoformat(), datetime.datetime.fromisoformat),
    (NOW.date(), "x.isoformat()", lambda x: x.isoformat(), datetime.date.fromisoformat),
    (NOW.time(), "x.isoformat()", lambda x: x.isoformat(), datetime.time.fromisoformat),
    (
        datetime.timedelta(-1, 5, 7),
        "(x.days, x.seconds, x.microseconds)",
        lambda x: (x.days, x.seconds, x.microseconds),
        lambda x: datetime.timedelta(*x),
    ),
    (
        fractions.Fraction(1, 3),
        "(x.numerator, x.denominator)",
        lambda x: (x.numerator, x.denominator),
        lambda x: fractions.Fraction(*x),
    ),
    (
        range(1, 9, 2),
        "(x.start, x.stop, x.step)",
        lambda x: (x.start, x.stop, x.step),
        lambda x: range(*x),
    ),
    ({3, 1, 2}, "sorted(x)", sorted, set),
    (frozenset("ab"), "sorted(x)", sorted, frozenset),
    (deque([1, 2]), "list(x)", list, deque),
    (types.MappingProxyType({"a": 1}), "dict(x)", dict, types.MappingProxyType),
    (bytearray(b"ab"), "bytes(x)", bytes, bytearray),
    (MyInt(5), "int(x)", int, MyInt),
    (MyStr("s"), "str(x)", str, MyStr),
    (MyFloat(0.5), "float(x)", float, MyFloat),
    (MyBytes(b"b"), "bytes(x)", bytes, MyBytes),
    (Planet.EARTH, "x.name", lambda x: x.name, lambda x: Planet[x]),
    (np.str_("s"), "x.tolist()", lambda x: x.tolist(), np.str_),
    (np.bytes_(b"s"), "x.tolist()", lambda x: x.tolist(), np.bytes_),
    (np.longdouble(0.5), "x.astype(numpy.float64)", lambda x: x.astype(np.float64), np.longdouble),
]


@pytest.mark.parametrize(
    ("value", "hint", "apply", "back"), REFUSED, ids=[type(case[0]).__name__ for case in REFUSED]
)
def test_what_is_refused_comes_with_a_hint_that_works(
    value: Any, hint: str, apply: Callable[[Any], Any], back: Callable[[Any], Any]
) -> None:
    with pytest.raises(UnsupportedLeaf) as caught:
        roundtrip(value)
    assert "'x'" in str(caught.value)
    assert f"store {hint}" in str(caught.value)
    again = back(roundtrip(apply(value)))
    assert type(again) is type(value)
    assert again == value


@pytest.mark.parametrize(
    "value", [..., print, int, math, lambda: 0, object()], ids=lambda value: type(value).__name__
)
def test_what_cannot_be_stored_at_all_is_to_be_left_out(value: Any) -> None:
    with pytest.raises(UnsupportedLeaf, match=r"'x': .*leave it out"):
        roundtrip(value)


@pytest.mark.parametrize(
    "value", [True, False, 0, 1, 0.0, 1.0, "", b"", None, 1 << 70, -0.0], ids=repr
)
def test_plain_values_keep_their_type(value: Any) -> None:
    got = roundtrip(value)
    assert repr(got) == repr(value)


@pytest.mark.parametrize("value", [np.float64(0.1), np.int8(3), np.bool_(True), np.complex64(1j)])
def test_scalars_of_numpy_are_arrays_without_dimensions(value: Any) -> None:
    """float64 is a subclass of float, but no plain float."""
    got = roundtrip(value)
    assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, (), value.tobytes())
    again = roundtrip(value, value)
    assert type(again) is type(value)
    assert again == value
