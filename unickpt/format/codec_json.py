"""The codecs that an index names: those that it may name, and as `ArrayEntry` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.format.index import Encoding
from unickpt.quantized import codes
from unickpt.quoting import quoted
from unickpt.trees.tree_json import BadJSON

# The codecs that may follow `bytes`, with their settings. Others are refused: some zarr codecs
# refer to further storage, or unpack into any amount of memory.
CODECS: Mapping[str, Mapping[str, type]] = {
    "zstd": {"level": int},
    "gzip": {"level": int},
    "blosc": {"cname": str, "clevel": int, "shuffle": str, "typesize": int, "blocksize": int},
}
QUANTIZED = "unickpt.quantized"
"""The codec of quantised arrays, whose setting are their codes; plain Zarr does not know it."""
_KNOWN = {**CODECS, QUANTIZED: {"codes": str}}
_FIELDS = ("name", "configuration")


def from_json(item: Any) -> Encoding | str:
    """A stored codec: an encoding, or the codes of quantised arrays.

    Raises:
        BadJSON: it is not allowed.
    """
    name, settings = map(item.get, _FIELDS) if isinstance(item, dict) else (None, None)
    known = _KNOWN.get(name) if isinstance(name, str) else None
    if known is None or not isinstance(settings, dict) or item.keys() - {*_FIELDS}:
        raise BadJSON(f"its codecs hold {quoted(item)}")
    for key, value in settings.items():
        if type(value) is not known.get(key):
            raise BadJSON(f"its codecs hold {quoted(item)}")
    if name != QUANTIZED:
        return encoding_of(item)
    if settings.get("codes") not in codes.NAMES:
        raise BadJSON(f"its codecs hold {quoted(item)}")
    return str(settings["codes"])


def to_json(codec: Encoding | str) -> dict[str, Any]:
    """The inverse of `from_json`."""
    if isinstance(codec, str):
        return {"name": QUANTIZED, "configuration": {"codes": codec}}
    return as_codecs(codec)[0]


def as_codecs(encoding: Encoding) -> tuple[dict[str, Any], ...]:
    """An encoding as Zarr has it."""
    return tuple({"name": name, "configuration": dict(settings)} for name, settings in encoding)


def encoding_of(codec: Mapping[str, Any]) -> Encoding:
    """The encoding of a codec of Zarr."""
    return ((codec["name"], tuple(sorted(codec["configuration"].items()))),)
