"""Untrusted JSON, read strictly: no key twice, no NaN, and each member of its type."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from unickpt.quoting import quoted

T = TypeVar("T")
ENCODER = msgspec.json.Encoder()
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH = re.compile(r"(.*?)(?: - at `(?:key in )?\$(.*)`)?", re.DOTALL)


class BadJSON(ValueError):
    """A reason why what is stored is invalid."""


def parsed(data: bytes | msgspec.Raw) -> Any:
    """Any JSON.

    Raises:
        BadJSON: it is none, or an object has a key twice.
    """
    try:
        return _DECODER.decode(bytes(data).decode())
    except (RecursionError, ValueError) as error:
        raise BadJSON(str(error)) from None


def members(data: bytes | msgspec.Raw, at: str) -> dict[str, msgspec.Raw]:
    """The members of a JSON object, each as the bytes that are stored.

    Arguments:
        data: the object.
        at: what it is, for messages.

    Raises:
        BadJSON: it is no object, or has a key twice.
    """
    try:
        found: dict[str, msgspec.Raw] = _MEMBERS.decode(data)
    except (RecursionError, UnicodeError, msgspec.DecodeError):
        body = parsed(data)
        if not isinstance(body, dict):
            raise BadJSON(f"{at} is {quoted(body)}, not an object") from None
        # It has a text that is not valid Unicode: whoever takes the member says which.
        return {key: msgspec.Raw(json.dumps(value).encode()) for key, value in body.items()}
    # No JSON of the same members is shorter than this, and one with a key twice is longer.
    shortest = len(ENCODER.encode(list(found))) + len(found)
    if len(bytes(data)) != shortest + len(b"".join(found.values())):
        parsed(data)
    return found


def decoded(decoder: msgspec.json.Decoder[T], data: bytes, at: str) -> T:
    """A JSON object as the struct of a decoder.

    Raises:
        BadJSON: it does not fit, or has a key twice; names the member and what is stored.
    """
    try:
        found = decoder.decode(data)
        if ENCODER.encode(found) == data:  # so that it has no key twice
            return found
    except (RecursionError, UnicodeError, msgspec.DecodeError):
        pass
    checked: T = typed(parsed(data), decoder.type, at)
    return checked


def typed(body: Any, kind: Any, at: str) -> Any:
    """What was parsed, converted to a type that checks it.

    Raises:
        BadJSON: it does not fit; names the member and what is stored.
    """
    try:
        return msgspec.convert(body, kind)
    except (RecursionError, msgspec.ValidationError) as error:
        match = _PATH.fullmatch(str(error))
    assert match is not None
    said = match[1].replace("`", "'")
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", match[2] or "")
    for key, number in steps:
        body = body[int(number) if number else key]
    names = [key for key, _ in steps if key]
    where = f"{at}: {names[-1]!r}" if names else at
    if not match[2]:
        raise BadJSON(f"{where}: {said}")
    stored = f"contains {quoted(str(body))}" if steps[-1][1] else f"is {quoted(body)}"
    raise BadJSON(f"{where} {stored}: {said}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BadJSON("a key occurs twice in an object")
    return found


def _constant(name: str) -> Any:
    raise BadJSON(f"it contains {name}, which is not valid JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
