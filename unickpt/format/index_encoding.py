"""Index -> JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from unickpt.arrays.layout import Layout, Mesh
from unickpt.format.index import (
    FORMAT,
    PATCHED_FORMAT,
    ArrayEntry,
    Index,
)
from unickpt.quantized import codes
from unickpt.trees import tree_json


def encode(index: Index) -> bytes:
    """The index as JSON, sealed by the xxh3-64 of all bytes before the seal."""
    meshes: dict[Mesh, int] = {}
    layouts: dict[Layout, int] = {}
    arrays = _arrays_to_json(index.arrays.values(), meshes, layouts)
    is_patched = any(entry.patched for entry in index.arrays.values())
    version = PATCHED_FORMAT if is_patched else FORMAT
    head = {
        "format": f"{version[0]}.{version[1]}",
        "library": index.library,
        "created": index.created,
        "attempt": index.attempt,
        "processes": index.processes,
        "metadata": index.metadata,
        "tree": index.tree,
        "meshes": [{"axes": m.axes, "shape": m.shape, "processes": m.processes} for m in meshes],
        "layouts": [{"mesh": meshes[x.mesh], "dims": x.dims} for x in layouts],
    }
    body = {
        "aliases": dict(index.aliases),
        "values": {name: tree_json.value_to_json(v) for name, v in index.values.items()},
        "per_process": {
            name: [[size, f"{digest:016x}"] for size, digest in entry.blobs]
            for name, entry in index.per_process.items()
        },
        "codecs": list(index.codecs),
        "chunks": index.chunks,
        "digests": index.digests_xxh3,
    }
    if index.digest_blocks is not None:
        digests = "".join(f"{digest:016x}" for digest in index.digest_blocks.digests)
        body["digest_blocks"] = [index.digest_blocks.rows, digests]
    if index.reused:
        body["reused"] = index.reused
    if index.bases:
        body["bases"] = [{"name": base.name, "manifest": base.manifest} for base in index.bases]
        body["borrowed"] = [index.borrowed, index.borrowed_xxh3]
    text = f'{_text(head)[:-1]},"arrays":{arrays},{_text(body)[1:]}'
    unsealed = text.encode()[:-1]
    return unsealed + b',"xxh3":"%016x"}' % xxhash.xxh3_64_intdigest(unsealed)


_TEXT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def _arrays_to_json(
    entries: Iterable[ArrayEntry], meshes: dict[Mesh, int], layouts: dict[Layout, int]
) -> str:
    """The JSON of all arrays; that of many with equal entries, as layers of a model are, is made
    once. Numbers the meshes and layouts."""
    known: dict[Any, str] = {}
    texts = []
    for entry in entries:
        layout, kind = entry.layout, None
        if entry.boxes is None and entry.quantized is None:
            # Layouts are equal only if they are the same: comparing them takes longer.
            kind = (
                entry.shape, entry.dtype, entry.chunk, id(layout), entry.cut, entry.prng,
                entry.patched,
            )  # fmt: skip
        text = known.get(kind)
        if text is None:
            if layout is not None:
                meshes.setdefault(layout.mesh, len(meshes))
                layouts.setdefault(layout, len(layouts))
            text = _text(_array_to_json(entry, layouts))
            if kind is not None:
                known[kind] = text
        texts.append(f"{_text(entry.name)}:{text}")
    return f"{{{','.join(texts)}}}"


def _array_to_json(entry: ArrayEntry, layouts: Mapping[Layout, int]) -> dict[str, Any]:
    dtype = entry.dtype if entry.quantized is None else codes.joined(entry.dtype, entry.quantized)
    out: dict[str, Any] = {"shape": entry.shape, "dtype": dtype, "chunk": entry.chunk}
    if entry.quantized is not None:
        out["errors"] = entry.errors
    if entry.layout is not None:
        out["layout"] = layouts[entry.layout]
    if entry.cut:
        out["cut"] = entry.cut
    if entry.boxes is not None:
        out["boxes"] = [[box.start, box.stop, holders] for box, holders in entry.boxes]
    if entry.prng is not None:
        out["prng"] = entry.prng
    if entry.patched:
        out["patched"] = entry.patched
    return out


_text = _TEXT.encode
