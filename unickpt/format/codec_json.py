"""The codecs that an index names: those that it may name, and as `ArrayEntry` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.format.index import CODEC_PREFIX, Encoding
from unickpt.quoting import quoted
from unickpt.trees.tree_json import BadJSON

# The codecs that may follow `bytes`, with their settings. Others are refused: some zarr codecs
# refer to further storage, or unpack into any amount of memory.
CODECS: Mapping[str, Mapping[str, type]] = {
    "zstd": {"level": int},
    "gzip": {"level": int},
    "blosc": {"cname": str, "clevel": int, "shuffle": str, "typesize": int, "blocksize": int},
}
# Of codecs that Zarr does not have; `Extra.validate` checks which.
_PLAIN = (bool, int, float, str)
_FIELDS = ("name", "configuration")


def from_json(item: Any) -> Encoding:
    """A stored codec.

    Raises:
        BadJSON: it is not allowed.
    """
    name, settings = map(item.get, _FIELDS) if isinstance(item, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(settings, dict) or item.keys() - {*_FIELDS}:
        raise BadJSON(f"its codecs hold {quoted(item)}")
    known = CODECS.get(name)
    for key, value in settings.items():
        allowed = (known.get(key),) if known is not None else _PLAIN
        if type(value) not in allowed:
            raise BadJSON(f"its codecs hold {quoted(item)}")
    if known is None and not name.startswith(CODEC_PREFIX):
        raise BadJSON(f"its codecs hold {quoted(item)}")
    return encoding_of(item)


def as_codecs(encoding: Encoding) -> tuple[dict[str, Any], ...]:
    """An encoding as Zarr and the index have it."""
    return tuple({"name": name, "configuration": dict(settings)} for name, settings in encoding)


def encoding_of(codec: Mapping[str, Any]) -> Encoding:
    """The encoding of a codec of Zarr."""
    return ((codec["name"], tuple(sorted(codec["configuration"].items()))),)
