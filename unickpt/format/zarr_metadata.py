"""The Zarr v3 metadata of a checkpoint's arrays and groups."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from unickpt.arrays import dtypes
from unickpt.format import chunk_grid
from unickpt.format.chunk_grid import Part, join_key
from unickpt.format.index import ArrayEntry, Index

Codecs = Sequence[Mapping[str, Any]]
QUANTIZED = "unickpt.quantized"
"""The codec that `zarr.json` of a quantised array names."""
PATCHED = "unickpt.patched"
"""The last codec that `zarr.json` of an array with patches names."""


def codecs_for(compression: str | None) -> tuple[dict[str, Any], ...]:
    """The zarr v3 codecs that follow `bytes`."""
    settings = {
        "zstd": {"level": 3},
        "gzip": {"level": 5},
        "blosc": {"cname": "zstd", "clevel": 5, "shuffle": "shuffle"},
    }
    if compression is None:
        return ()
    return ({"name": compression, "configuration": settings[compression]},)


def zarr_metadata(entry: ArrayEntry, part: Part, codecs: Codecs) -> dict[str, Any]:
    """The `zarr.json` of a part."""
    stored = dtypes.stored_as(entry.dtype)
    itemsize = dtypes.from_name(entry.dtype).itemsize
    fill: Any = False if stored == "bool" else 0
    if stored.startswith("complex"):
        fill = [0, 0]
    to_bytes: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
    if itemsize == 1:
        to_bytes = {"name": "bytes"}
    if entry.quantized is not None:  # a name that TensorStore does not know, and so refuses
        to_bytes, codecs = {"name": QUANTIZED, "configuration": {"codes": entry.quantized}}, ()
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(part.box.shape),
        "data_type": stored,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(part.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [to_bytes, *(_complete(codec, itemsize) for codec in codecs)],
        "attributes": {},
    }


def _complete(codec: Mapping[str, Any], itemsize: int) -> Mapping[str, Any]:
    """A codec with the settings that depend on the array."""
    if codec["name"] != "blosc":
        return codec
    settings = {"typesize": itemsize, "blocksize": 0, **codec["configuration"]}
    return {**codec, "configuration": settings}


def zarr_json(metadata: Mapping[str, Any]) -> bytes:
    return json.dumps(metadata, separators=(",", ":")).encode()


GROUP_JSON = zarr_json({"zarr_format": 3, "node_type": "group", "attributes": {}})


def zarr_keys(index: Index) -> dict[str, bytes]:
    """The zarr metadata of all groups and parts, by key."""
    groups, out = {""}, dict[str, bytes]()
    of_kind: dict[tuple[Any, ...], bytes] = {}  # arrays of one shape share it
    for name, entry in index.arrays.items():
        is_patched = entry.patched > 0
        for part in chunk_grid.parts(entry) or [Part.whole(name, entry.shape, entry.chunk)]:
            kind = part.box, part.chunk, entry.dtype, entry.quantized, is_patched
            found = of_kind.get(kind)
            if found is None:
                metadata = zarr_metadata(entry, part, index.codecs)
                if is_patched:  # a name that TensorStore does not know, and so refuses
                    metadata["codecs"].append({"name": PATCHED})
                found = of_kind[kind] = zarr_json(metadata)
            out[join_key(part.key, "zarr.json")] = found
            parent = part.key.rpartition("/")[0]
            while parent not in groups:
                groups.add(parent)
                parent = parent.rpartition("/")[0]
    for group in groups:
        out.setdefault(join_key(group, "zarr.json"), GROUP_JSON)
    return out
