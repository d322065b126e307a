"""Checkpoints as an enemy would write them: any index, any keys, any manifest."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

from unickpt.format import chunk_grid, digest_table, index_json
from unickpt.format import index as index_module
from unickpt.format.index import ArrayEntry, Index
from unickpt.types import Box


def database(path: Path | str, *, plain: bool = False) -> ts.KvStore:
    """An OCDBT database; a plain one without compression, so that its bytes can be changed."""
    spec: dict[str, Any] = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
    if plain:
        spec |= {"config": {"compression": None, "max_inline_value_bytes": 0}}
        kinds = ("value_data", "btree_node_data", "version_tree_node_data")
        spec |= {f"{kind}_prefix": "data/inside/" for kind in kinds}
    return ts.KvStore.open(spec, context=ts.Context({})).result()


def forge(path: Path | str, keys: Mapping[str, bytes], *, plain: bool = False) -> None:
    """Writes a database of these keys."""
    transaction = ts.Transaction(atomic=True)
    store = database(path, plain=plain).with_transaction(transaction)
    for write in [store.write(key, value) for key, value in keys.items()]:
        write.result()
    transaction.commit_async().result()


def array(
    name: str,
    shape: tuple[int, ...],
    chunk: tuple[int, ...] | None = None,
    dtype: str = "float32",
    **fields: Any,
) -> ArrayEntry:
    """An array in one box, where nothing else is said."""
    if "layout" not in fields and "boxes" not in fields:
        fields["boxes"] = ((Box.whole(shape), (0,)),)
    return ArrayEntry(name, shape, dtype, chunk or tuple(max(1, n) for n in shape), **fields)


def index_of(*arrays: ArrayEntry, rows: int | None = None, **fields: Any) -> tuple[Index, bytes]:
    """An index of arrays, consistent in itself, with a digest table of any number of rows."""
    entries = {entry.name: entry for entry in arrays}
    if rows is None:
        rows = chunk_grid.total_chunks(entries)
    table = np.zeros(rows, digest_table.DTYPE).tobytes()
    index = Index(
        tree={"dict": [[name, "*"] for name in entries]},
        arrays=entries,
        chunks=rows,
        digests_xxh3=f"{xxhash.xxh3_64_intdigest(table):016x}",
    )
    return dataclasses.replace(index, **fields), table


def forge_index(path: Path | str, index: Index, table: bytes, **keys: bytes) -> None:
    forge(
        path,
        {
            index_module.INDEX_KEY: index_json.encode(index),
            index_module.DIGESTS_KEY: table,
            **keys,
        },
    )


def sealed(body: Any) -> bytes:
    """Any JSON as an index with a valid seal."""
    unsealed = json.dumps(body, separators=(",", ":")).encode()[:-1]
    return unsealed + b',"xxh3":"%016x"}' % xxhash.xxh3_64_intdigest(unsealed)


def redirect(path: Path, old: bytes, new: bytes) -> None:
    """Changes bytes in all files of a plain database, and mends their checksums."""
    assert len(old) == len(new)
    for at, _, names in os.walk(path):
        for name in names:
            file = Path(at) / name
            data = file.read_bytes()
            if name == "manifest.ocdbt":
                data = data[:-4].replace(old, new)
                file.write_bytes(data + crc32c(data).to_bytes(4, "little"))
            elif old in data:
                file.write_bytes(_mend_nodes(data, old, new))


def _mend_nodes(data: bytes, old: bytes, new: bytes) -> bytes:
    magic, out, at = bytes.fromhex("0cdb20de"), bytearray(data), 0
    while (at := data.find(magic, at)) >= 0:
        length = int.from_bytes(data[at + 4 : at + 12], "little")
        node = data[at : at + length - 4].replace(old, new)
        out[at : at + length] = node + crc32c(node).to_bytes(4, "little")
        at += length
    return bytes(out)


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 & -(value & 1))
    return value ^ 0xFFFFFFFF
