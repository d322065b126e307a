"""Plain values and the structure of a tree as JSON, as the index stores them; untrusted when read.

Plain values are int, float, bool, str, bytes and None, exactly; and objects of other systems, as
bytes. Members of enumerations of ints or strings (IntEnum, IntFlag, StrEnum) are stored as int or
str; the tree has the name of their type, for people.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import math
import re
import struct
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import unquote

import ml_dtypes
import msgspec
import numpy as np

from unickpt.arrays import dtypes
from unickpt.quoting import quoted
from unickpt.trees.tree import (
    MAX_DEPTH,
    Key,
    Leaf,
    Node,
    Opaque,
    Rebuild,
    child_names,
    component,
    dict_of,
    join,
    key_problem,
    leaves,
    namedtuple_problem,
    put,
)

_FLOAT64 = r"[0-9a-f]{16}"
_INT = r"-?0x[0-9a-f]+"


class BadValue(ValueError):
    """The stored plain value is invalid; says why."""


Plain = int | float | bool | str | bytes | Opaque | None
"""A value that the tree of a checkpoint stores itself."""
PLAIN_TYPES = (int, float, bool, str, bytes, Opaque, type(None))


def is_plain(obj: object) -> bool:
    """Whether a value has exactly a plain type, or is a member of an enumeration of ints or
    strings; false for other subclasses."""
    return type(obj) in PLAIN_TYPES or (isinstance(obj, (int, str)) and isinstance(obj, enum.Enum))


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


def value_to_json(value: Plain) -> Any:
    """A plain value as JSON: itself where JSON keeps it exactly, else an object with its type.

    For an `Opaque` it is the pickle; the tree has the name of its class.
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


def value_from_json(stored: Any) -> Plain:
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
            if kind == "float64" and re.fullmatch(_FLOAT64, text):
                unpacked: float = struct.unpack(">d", bytes.fromhex(text))[0]
                return unpacked
            if kind == "int" and re.fullmatch(_INT, text):
                return int(text, 16)
            if kind == "str":
                return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
        except (TypeError, ValueError, binascii.Error, struct.error) as error:
            raise BadValue(f"plain value {quoted(stored)} is malformed: {error}") from None
    raise BadValue(f"plain value {quoted(stored)} has an unknown type")


LEAF = "*"
_PICKLE = "pickle:"  # before the name of the class of an opaque leaf


def to_json(node: Node | Leaf) -> Any:
    """The structure, without leaf values, as JSON types (see docs/format.md)."""
    if isinstance(node, Leaf):
        if isinstance(node.value, Opaque):
            return {"wrapper": LEAF, "type": _PICKLE + node.value.class_name}
        return LEAF
    children = [to_json(child) for child in node.children]
    if node.kind in ("list", "tuple"):
        return {node.kind: children}
    if node.kind == "wrapper":
        return {"wrapper": children[0], "type": node.type_name}
    pairs = [[key, child] for key, child in zip(node.keys, children, strict=True)]
    if node.kind in ("namedtuple", "object"):
        return {node.kind: pairs, "type": node.type_name}
    return {node.kind: pairs}


def with_opaque(structure: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a tree, with opaque ones as `Opaque` objects.

    Arguments:
        structure: as `to_json` returns it.
        values: by name; for an opaque one, its pickle.

    Raises:
        BadTree: the structure is invalid.
    """
    restored_values = dict(values)
    for leaf in leaves(from_json(structure)):
        if isinstance(leaf.value, Opaque):
            pickle = restored_values.get(leaf.name)
            if type(pickle) is bytes:
                restored_values[leaf.name] = Opaque(leaf.value.class_name, pickle)
    return restored_values


def has_opaque(data: bytes) -> bool:
    """Whether the JSON of a tree could contain leaves that are opaque."""
    return f'"{_PICKLE}'.encode() in data


class BadTree(ValueError):
    """The stored tree is invalid; says why."""


def from_json(structure: Any) -> Node | Leaf:
    """The inverse of `to_json`, with Python's built-in containers.

    Namedtuples keep their name and fields; objects (dataclasses, registered pytrees) become dicts,
    and wrappers become what they wrap. No class is ever looked up by name. The value of an opaque
    leaf is an `Opaque` without its pickle; others have no value.

    Raises:
        BadTree: the structure is invalid; says why.
    """
    return _from_json(structure, "", 0)


def from_names(names: Iterable[str]) -> Node | Leaf:
    """The nested dicts that names describe.

    Raises:
        ValueError: a name is both a leaf and a container.
    """
    root: dict[str, Any] = {}
    for name in names:
        keys = ["" if part == "%" else unquote(part) for part in name.split("/")]
        if not put(root, keys, Leaf(name, None)):
            raise ValueError(f"{quoted(name)} is a leaf, and so is a name above or below it")
    return _nested(root)


def _nested(level: Any) -> Node | Leaf:
    if isinstance(level, Leaf):
        return level
    return dict_of({key: _nested(below) for key, below in level.items()})


def _from_json(structure: Any, name: str, depth: int) -> Node | Leaf:
    if structure == LEAF:
        return Leaf(name, None)
    if depth >= MAX_DEPTH:
        raise BadTree(f"tree is nested deeper than {MAX_DEPTH} levels at {quoted(name)}")
    if not isinstance(structure, dict):
        raise BadTree(f"tree node {quoted(name)} is {quoted(structure)}")
    type_name = structure.get("type", "")
    kinds = [k for k in structure if k != "type"]
    if len(kinds) != 1 or not isinstance(type_name, str):
        raise BadTree(f"tree node {quoted(name)} has the fields {quoted(list(structure))}")
    kind, body = kinds[0], structure[kinds[0]]
    if kind == "wrapper" and body == LEAF and type_name.startswith(_PICKLE):
        return Leaf(name, Opaque(type_name.removeprefix(_PICKLE), b""))
    if kind == "wrapper":
        child = _from_json(body, name, depth + 1)
        return Node(kind, (0,), (child,), lambda xs: xs[0], type_name)
    keys, items = _children(kind, body, name)
    names = child_names(kind, keys, name)
    children = tuple(
        Leaf(child, None) if item == LEAF else _from_json(item, child, depth + 1)
        for item, child in zip(items, names, strict=True)
    )
    return Node(kind, keys, children, _python_container(kind, keys, type_name, name), type_name)


def _children(kind: str, body: Any, name: str) -> tuple[tuple[Key, ...], list[Any]]:
    """The keys of a container, and its members.

    Raises:
        BadTree: they are not as `to_json` writes them.
    """
    if not isinstance(body, list):
        raise BadTree(f"tree node {quoted(name)}: {quoted(kind)} does not contain a list")
    if kind in ("list", "tuple"):
        return tuple(range(len(body))), body
    for pair in body:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise BadTree(
                f"tree node {quoted(name)}: {quoted(kind)} contains {quoted(pair)}, not a pair"
            )
    keys = tuple(key for key, _ in body)
    problem = key_problem(keys)
    if problem:
        raise BadTree(f"tree node {quoted(name)}: {problem}")
    return keys, [item for _, item in body]


def _python_container(kind: str, keys: tuple[Key, ...], type_name: str, name: str) -> Rebuild:
    if kind == "list":
        return list
    if kind == "tuple":
        return tuple
    if kind == "ordereddict":
        return lambda xs: OrderedDict(zip(keys, xs, strict=True))
    if kind in ("dict", "object"):
        return lambda xs: dict(zip(keys, xs, strict=True))
    if kind == "namedtuple":
        problem = namedtuple_problem(keys, type_name)
        if problem:
            raise BadTree(f"tree node {quoted(name)}: {problem}")
        make = _namedtuple(type_name, keys)
        return lambda xs: make(*xs)
    raise BadTree(f"tree node {quoted(name)}: unknown container {quoted(kind)}")


@lru_cache(maxsize=256)
def _namedtuple(type_name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple(type_name, fields)


def merge(ours: Any, theirs: Any, name: str = "") -> Any:
    """Merges the structures of two processes: dicts unite their keys, also in wrappers of one type;
    everything else must be equal.

    Raises:
        ValueError: names the place where they differ.
    """
    if ours == theirs:
        return ours
    for kind in ("dict", "ordereddict"):
        if isinstance(ours, dict) and isinstance(theirs, dict) and kind in ours and kind in theirs:
            mine = {(type(k), k): child for k, child in ours[kind]}
            for key, child in theirs[kind]:
                typed_key = (type(key), key)
                inner = join(name, component(key))
                mine[typed_key] = (
                    merge(mine[typed_key], child, inner) if typed_key in mine else child
                )
            return {kind: [[key, child] for (_, key), child in mine.items()]}
    if isinstance(ours, dict) and isinstance(theirs, dict) and "wrapper" in ours:
        pair = ours["wrapper"], theirs.get("wrapper")
        if ours.get("type") == theirs.get("type") and all(isinstance(x, dict) for x in pair):
            return {**ours, "wrapper": merge(*pair, name)}
    raise ValueError(f"the trees differ at {quoted(name)}")


T = TypeVar("T")
ENCODER = msgspec.json.Encoder()
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH = r"(.*?)(?: - at `(?:key in )?\$(.*)`)?"


class BadJSON(ValueError):
    """A reason why stored JSON is invalid."""


def parsed(data: bytes | msgspec.Raw) -> Any:
    """Any JSON.

    Raises:
        BadJSON: it is none, or an object has a key twice.
    """
    with suppress(RecursionError, UnicodeError, msgspec.DecodeError):
        body = msgspec.json.decode(data)
        if ENCODER.encode(body) == bytes(data):  # so that no object has a key twice
            return body
    try:
        return _DECODER.decode(bytes(data).decode())
    except (RecursionError, ValueError) as error:
        raise BadJSON(str(error)) from None


def members(data: bytes | msgspec.Raw, subject: str) -> dict[str, msgspec.Raw]:
    """The members of a JSON object, each as the bytes that are stored.

    Arguments:
        data: the object.
        subject: its name in messages.

    Raises:
        BadJSON: it is no object, or has a key twice.
    """
    try:
        raw_members: dict[str, msgspec.Raw] = _MEMBERS.decode(data)
    except (RecursionError, UnicodeError, msgspec.DecodeError):
        body = parsed(data)
        if not isinstance(body, dict):
            raise BadJSON(f"{subject} is {quoted(body)}, not an object") from None
        # It has a text that is not valid Unicode: the parser of that member reports which.
        return {key: msgspec.Raw(json.dumps(value).encode()) for key, value in body.items()}
    # No JSON of the same members is shorter than this, and one with a key twice is longer.
    shortest = len(ENCODER.encode(list(raw_members))) + len(raw_members)
    if len(bytes(data)) != shortest + len(b"".join(raw_members.values())):
        parsed(data)
    return raw_members


def decoded(decoder: msgspec.json.Decoder[T], data: bytes, kind: str, name: str) -> T:
    """A JSON object as the struct of a decoder.

    Arguments:
        decoder: of the struct.
        data: the object.
        kind, name: its owner, for messages.

    Raises:
        BadJSON: it does not fit, or has a key twice; names the member and its stored value.
    """
    try:
        struct = decoder.decode(data)
        if ENCODER.encode(struct) == data:  # so that it has no key twice
            return struct
    except (RecursionError, UnicodeError, msgspec.DecodeError):
        pass
    checked: T = typed(parsed(data), decoder.type, f"{kind} {quoted(name)}")
    return checked


def typed(body: Any, kind: Any, subject: str) -> Any:
    """Converts parsed JSON to a type that checks it.

    Raises:
        BadJSON: it does not fit; names the member and its stored value.
    """
    try:
        return msgspec.convert(body, kind)
    except (RecursionError, msgspec.ValidationError) as error:
        match = re.fullmatch(_PATH, str(error), re.DOTALL)
    assert match is not None
    said = match[1].replace("`", "'")
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", match[2] or "")
    for key, number in steps:
        body = body[int(number) if number else key]
    names = [key for key, _ in steps if key]
    where = f"{subject}: {names[-1]!r}" if names else subject
    if not match[2]:
        raise BadJSON(f"{where}: {said}")
    stored = f"contains {quoted(str(body))}" if steps[-1][1] else f"is {quoted(body)}"
    raise BadJSON(f"{where} {stored}: {said}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise BadJSON("a key occurs twice in an object")
    return body


def _constant(name: str) -> Any:
    raise BadJSON(f"it contains {name}, which is not valid JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
