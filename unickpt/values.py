"""Plain values, which live in the index: int, float, bool, str, bytes and None as JSON, exactly."""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from typing import Any

from unickpt.quoting import quoted

_FLOAT64 = re.compile(r"[0-9a-f]{16}")
_INT = re.compile(r"-?0x[0-9a-f]+")


class BadValue(ValueError):
    """What is stored as a plain value is none; says why."""


Plain = int | float | bool | str | bytes | None


def is_plain(obj: object) -> bool:
    """Whether a value is of exactly a plain type; subclasses (enums, NumPy scalars) are not."""
    return obj is None or type(obj) in (int, float, bool, str, bytes)


def to_json(value: Plain) -> Any:
    """A plain value as JSON: itself where JSON keeps it exactly, else an object with its type."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float64": struct.pack(">d", value).hex()}  # the payload of a NaN survives
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
        BadValue: for anything that `to_json` never gives.
    """
    if is_plain(stored):
        plain: Plain = stored
        return plain
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
    raise BadValue(f"plain value {quoted(stored)} is of no known type")
