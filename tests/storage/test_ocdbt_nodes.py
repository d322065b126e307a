"""Nodes and manifests of a database: what is small on the disk stays small in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import xxhash
from support.forging import database
from support.forks import Forks
from support.nodes import Away, files, inner, leaf, leaf_body, manifest, node, plain, varint, zstd
from support.reading import read_all, written

import unickpt
from unickpt.format import digest_table
from unickpt.storage.btree import nodes as decoder
from unickpt.storage.database import Database
from unickpt.storage.errors import Damaged
from unickpt.storage.paths import resolve


def long_keys(count: int) -> bytes:
    """A leaf in which each key repeats all of the one before it but the last bytes."""
    shared = [60_000] * (count - 1)
    keys = [b"a" * 60_000 + b"\0\0\0\0"] + [k.to_bytes(4, "big") for k in range(1, count)]
    return leaf_body(keys, shared, [60_004] + [4] * (count - 1))


def zeros(count: int) -> bytes:
    """A stream of a leaf with one inline value of so many MiB."""
    head = bytes([0]) + files([]) + varint(count) + bytes(count - 1) + bytes([1]) * count
    keys = bytes(range(1, count + 1))
    body = head + keys + varint(1 << 20) * count + bytes(count)
    runs = [(1, b"\0", 1 << 17)] * (8 * count)
    return zstd((0, body, len(body)), *runs)


NODES: dict[str, Callable[[], bytes]] = {
    "inline values of 250 MiB": lambda: node(zeros(250), packed=True),
    "keys of 6 GB": lambda: node(long_keys(100_000)),
    "keys of 6 GB, packed": lambda: node(plain(long_keys(100_000)), packed=True),
    "a table of files of 6 GB": lambda: node(
        bytes([0])
        + varint(100_000)
        + varint(60_000) * 99_999
        + varint(60_000)
        + varint(0) * 99_999
        + varint(0) * 100_000
        + b"a" * 60_000
    ),
    "2**60 files": lambda: node(bytes([0]) + varint(1 << 60)),
    "a million entries of nothing": lambda: node(
        zstd(
            (0, bytes([0, 0]) + varint(1 << 20), 5),
            *[(1, b"\0", 1 << 17)] * 100,
        ),
        packed=True,
    ),
    "a stream without an end": lambda: node(
        zstd((0, bytes(20), 20), (1, b"\0", 1 << 17))[:-6], packed=True
    ),
}


@pytest.mark.parametrize("bomb", NODES)
def test_a_node_takes_no_more_memory_than_is_stored(
    bomb: str, forks: Forks, tmp_path: Path
) -> None:
    for said in read_all(forks, written(tmp_path / "c", NODES[bomb]())):
        assert "CheckpointCorrupt" in said or "B-tree" in said, said


def test_the_values_of_a_small_database_are_not_gigabytes(forks: Forks, tmp_path: Path) -> None:
    """An array of nine elements beside 300 MB of zeros, all of it in 40 KB."""
    unickpt.save(tmp_path / "source", {"w": np.ones(9)})
    source = database(tmp_path / "source")
    keys = {key: source.read(key).result().value for key in source.list().result()}
    config = {
        "compression": {"id": "zstd"},
        "max_inline_value_bytes": 1 << 20,
        "max_decoded_node_bytes": (1 << 31) - 1,
    }
    base = {"driver": "file", "path": f"{tmp_path}/c/"}
    spec = {"driver": "ocdbt", "base": base, "config": config}
    store = ts.KvStore.open(spec).result()
    with ts.Transaction(atomic=True) as transaction:
        within = store.with_transaction(transaction)
        for key, value in {**keys, **{f"zz{i}": bytes(1 << 20) for i in range(300)}}.items():
            within.write(key, value).result()
    for said in read_all(forks, tmp_path / "c"):
        assert "when unpacked" in said, said


def test_nodes_that_share_their_children_end_soon(forks: Forks, tmp_path: Path) -> None:
    """Two entries each, 40 high: 2**40 ways to one leaf; each node is looked at once."""
    path = tmp_path / "c"
    path.mkdir()
    data, below = {}, ("n0", leaf({"k": b""}))
    data[below[0]] = below[1]
    for height in range(1, 40):
        entries = [(key, b"", below[0], 0, len(below[1])) for key in (b"", b"\x01")]
        below = (f"n{height}", inner(entries, height))
        data[below[0]] = below[1]
    for name, content in data.items():
        (path / name).write_bytes(content)
    (path / "manifest.ocdbt").write_bytes(manifest(below[0], 0, len(below[1]), 39))
    values = Database(resolve(path), ts.Context()).reader()
    assert values.tree.files("") == set(data)
    assert values.read("k") == b""


MANIFESTS = {
    "2 GB of holes": (b"", 2 << 30),
    "a stream of 300 MB": (
        manifest("x", 0, 9)[:13]
        + b"\x01"
        + zstd((0, bytes(20), 20), *[(1, b"\x01", 1 << 17)] * 2400),
        None,
    ),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_is_small(case: str, forks: Forks, tmp_path: Path) -> None:
    data, size = MANIFESTS[case]
    (tmp_path / "manifest.ocdbt").write_bytes(data)
    if size:
        os.truncate(tmp_path / "manifest.ocdbt", size)
    for said in read_all(forks, tmp_path):
        assert "manifest" in said, said


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}, {"id": "zstd", "level": 19}])
@pytest.mark.parametrize("node_bytes", [1000, 8 << 20])
def test_what_tensorstore_writes_is_found(
    compression: Any, node_bytes: int, tmp_path: Path
) -> None:
    """20,000 keys: nodes of more than 2 MiB do not tell how large they are."""
    config = {"compression": compression, "max_decoded_node_bytes": node_bytes}
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}
    store = ts.KvStore.open(spec).result()
    count = 20_000 if node_bytes > 1000 else 1000
    keys = {
        f"model/layers/{i}/{xxhash.xxh64_hexdigest(str(i).encode()) * 8}/c/0": i
        for i in range(count)
    }
    with ts.Transaction(atomic=True) as transaction:
        within = store.with_transaction(transaction)
        for key, i in keys.items():
            within.write(key, str(i).encode() * (1 + i % 40)).result()
    values = Database(resolve(tmp_path), ts.Context()).reader()
    for key, i in list(keys.items())[::97]:
        assert values.read(key) == str(i).encode() * (1 + i % 40)
        assert values.read(key + "x") is None
    assert Database(resolve(tmp_path), ts.Context()).facts().keys == count
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert values.tree.files("") == found - {"manifest.ocdbt"}


def test_the_decoder_ends_where_bytes_do() -> None:
    """Every beginning of a node is refused, never misread."""
    body = leaf({f"k{i}": Away("f", i, 1) if i % 2 else b"v" for i in range(40)})[14:-4]
    where = decoder.DataReference("x", 0, 0)
    for size in range(len(body)):
        for packed in (False, True):
            data = node(plain(body[:size]) if packed and size else body[:size], packed=packed)
            with pytest.raises(Damaged):
                decoder.node(data, where, 0, b"", decoder.NodeBudget())
    assert decoder.node(node(body), where, 0, b"", decoder.NodeBudget()).keys[0] == b"k0"
    assert digest_table.DTYPE.itemsize == 12


@pytest.mark.parametrize("packed", [False, True])
def test_a_number_without_end_is_refused_at_once(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by how often the bytes are looked at; each look takes as long as there are bytes."""
    looks, real = [0], np.flatnonzero

    def look(raw: Any) -> Any:
        looks[0] += 1
        assert looks[0] < 50
        return real(raw)

    monkeypatch.setattr(decoder.np, "flatnonzero", look)
    body = bytes([0]) + files([]) + varint(40) + bytes(38) + b"\xff" * 500_000
    data = node(plain(body) if packed else body, packed=packed)
    with pytest.raises(Damaged, match="a number of more than 64 bits"):
        decoder.node(data, decoder.DataReference("x", 0, 0), 0, b"", decoder.NodeBudget())
