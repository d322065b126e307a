"""Plain values, stored in the index: int, float, bool, str, bytes and None as JSON, exactly; and
objects of other systems, as bytes.

Members of enumerations of ints or strings (IntEnum, IntFlag, StrEnum) are stored as int or str; the
tree has the name of their type, for people.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import enum
import math
import re
import struct
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import ml_dtypes
import numpy as np

from unickpt.arrays import dtypes
from unickpt.quoting import quoted

_FLOAT64 = re.compile(r"[0-9a-f]{16}")
_INT = re.compile(r"-?0x[0-9a-f]+")


class BadValue(ValueError):
    """The stored plain value is invalid; says why."""


@dataclass(frozen=True)
class Opaque:
    """An object of another system that only its class can read: kept as it was stored, never run.

    `pickle.loads(x.pickle)` restores it where its class can be imported. This runs code that the
    checkpoint names, so do it only with checkpoints that you trust.

    Arguments:
        class_name: of its class, or of the function that makes it, with its module.
        pickle: the object as a pickle.

    Example:
        >>> import fractions, pickle
        >>> value = Opaque("fractions.Fraction", pickle.dumps(fractions.Fraction(1, 3)))
        >>> value.class_name, pickle.loads(value.pickle)
        ('fractions.Fraction', Fraction(1, 3))
    """

    class_name: str
    pickle: bytes

    def __repr__(self) -> str:
        return f"<opaque {quoted(self.class_name)}, {len(self.pickle)} bytes>"


Plain = int | float | bool | str | bytes | Opaque | None


def is_plain(obj: object) -> bool:
    """Whether a value has exactly a plain type, or is a member of an enumeration of ints or
    strings; false for other subclasses."""
    return (
        obj is None
        or type(obj) in (int, float, bool, str, bytes, Opaque)
        or (isinstance(obj, (int, str)) and isinstance(obj, enum.Enum))
    )


def length(value: Plain) -> int:
    """The bytes of a text, of bytes or of an integer, about; 0 for all others."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return value.bit_length() // 8 if isinstance(value, int) else 0


def plain(obj: Any) -> Plain:
    """The stored form of a value that `is_plain`: for a member of an enumeration, the int or str.

    Example:
        >>> plain(enum.IntEnum("Color", "RED GREEN").GREEN)
        2
    """
    if isinstance(obj, enum.Enum):  # not `.value`, which can be any object
        return int.__int__(obj) if isinstance(obj, int) else str.__str__(obj)
    value: Plain = obj
    return value


def as_asked(stored: Plain, like: Any) -> Any:
    """A stored value as `like` requests it: a member of its enumeration, else unchanged.

    Raises:
        ValueError: the enumeration has no such member.
    """
    if isinstance(like, enum.Enum) and type(stored) is type(plain(like)):
        return type(like)(stored)
    return stored


def as_array(value: Plain, dtype: dtypes.DType) -> np.ndarray[Any, Any] | None:
    """A number as a 0-d array, if the dtype has its kind and holds it exactly; else None.

    Example:
        >>> as_array(7, np.dtype("int8")), as_array(300, np.dtype("int8"))
        (array(7, dtype=int8), None)
    """
    if not is_kind(value, dtype):
        return None
    if type(value) is int:
        limits: Any = ml_dtypes.iinfo
        if not limits(dtype).min <= value <= limits(dtype).max:
            return None
        return np.asarray(value, np.uint64 if value > 0 else np.int64).astype(dtype)
    with np.errstate(all="ignore"):
        array = np.asarray(value).astype(dtype)
        back = array.astype(np.asarray(value).dtype)
    return array if back.tobytes() == np.asarray(value).tobytes() else None


def is_kind(value: Plain, dtype: dtypes.DType) -> bool:
    """Whether a plain value is a number of the same kind as a dtype: int, float or bool."""
    kinds = {int: "integer", float: "float", bool: "other"}
    return kinds.get(type(value)) == dtypes.kind(dtype) and (
        type(value) is not bool or dtype == np.bool_
    )


def hint(obj: object) -> str:
    """What to store instead of an object that is neither a leaf nor a container."""
    if isinstance(obj, enum.Enum):
        return "store x.name, from which Type[name] restores it"
    for kinds, text in _hints():
        if isinstance(obj, kinds):
            return text
    return "convert it, leave it out, or give it state_dict() and load_state_dict()"


_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def _hints() -> Iterable[tuple[tuple[type, ...], str]]:
    # Only needed for an error, and slow to import.
    import decimal
    import fractions
    import uuid

    return (
        ((complex,), "store numpy.complex128(x)"),
        ((PurePath, decimal.Decimal, uuid.UUID), "store str(x)"),
        ((datetime.date, datetime.time), "store x.isoformat()"),
        ((datetime.timedelta,), "store (x.days, x.seconds, x.microseconds)"),
        ((fractions.Fraction,), "store (x.numerator, x.denominator)"),
        ((range,), "store (x.start, x.stop, x.step)"),
        ((Set,), "store sorted(x), which has the same order in every process"),
        ((deque,), "store list(x)"),
        ((Mapping,), "store dict(x)"),
        ((bytearray, memoryview), "store bytes(x)"),
        ((int,), "store int(x)"),
        ((float,), "store float(x)"),
        ((str,), "store str(x)"),
        ((bytes,), "store bytes(x)"),
        (_CODE, "leave it out: code is not stored"),
        ((type(...), type(NotImplemented)), "leave it out"),
        ((Iterator,), "store list(x), which exhausts the iterator"),
    )


def to_json(value: Plain) -> Any:
    """A plain value as JSON: itself where JSON keeps it exactly, else an object with its type.

    Of an `Opaque` it is the pickle; the tree has the name of its class.
    """
    value = plain(value)
    if isinstance(value, Opaque):
        value = value.pickle
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float64": struct.pack(">d", value).hex()}  # keeps the payload of a NaN
    if type(value) is int and abs(value) >= 1 << 53:
        return {"int": hex(value)}
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def from_json(stored: Any) -> Plain:
    """The reverse of `to_json`.

    Raises:
        BadValue: for anything that `to_json` never returns.
    """
    if is_plain(stored):
        return plain(stored)
    if isinstance(stored, dict) and len(stored) == 1:
        kind, text = next(iter(stored.items()))
        try:
            if kind == "bytes":
                return base64.b64decode(text, validate=True)
            if kind == "float64" and _FLOAT64.fullmatch(text):
                unpacked: float = struct.unpack(">d", bytes.fromhex(text))[0]
                return unpacked
            if kind == "int" and _INT.fullmatch(text):
                return int(text, 16)
            if kind == "str":
                return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
        except (TypeError, ValueError, binascii.Error, struct.error) as error:
            raise BadValue(f"plain value {quoted(stored)} is malformed: {error}") from None
    raise BadValue(f"plain value {quoted(stored)} has an unknown type")
