"""The codecs that an index names: those that it may name, and as `ArrayEntry.encoding`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from unickpt.format.index import Encoding
from unickpt.quoting import quoted
from unickpt.trees.tree_json import BadJSON

# The codecs that may follow `bytes`, with their settings. Others are refused: some zarr codecs
# refer to further storage, or unpack into any amount of memory.
CODECS: Mapping[str, Mapping[str, type]] = {
    "zstd": {"level": int},
    "gzip": {"level": int},
    "blosc": {"cname": str, "clevel": int, "shuffle": str, "typesize": int, "blocksize": int},
}
_FIELDS = ("name", "configuration")


def checked(items: list[Any]) -> tuple[Mapping[str, Any], ...]:
    """Stored codecs.

    Raises:
        BadJSON: they are not allowed.
    """
    for item in items:
        known = CODECS.get(str(item.get("name"))) if isinstance(item, dict) else None
        settings = item.get("configuration") if isinstance(item, dict) else None
        if known is None or not isinstance(settings, dict) or item.keys() - {*_FIELDS}:
            raise BadJSON(f"its codecs hold {quoted(item)}")
        for key, value in settings.items():
            if type(value) is not known.get(key):
                raise BadJSON(f"its codecs hold {quoted(item)}")
    if len(items) > 1:
        raise BadJSON("it names more than one codec")
    return tuple(items)


def as_codecs(encoding: Encoding) -> tuple[dict[str, Any], ...]:
    """An encoding as Zarr has it."""
    return tuple({"name": name, "configuration": dict(settings)} for name, settings in encoding)


def encoding_of(codecs: Iterable[Mapping[str, Any]]) -> Encoding:
    """The encoding of codecs."""
    found = ((codec["name"], codec["configuration"].items()) for codec in codecs)
    return tuple((name, tuple(sorted(settings))) for name, settings in found)
