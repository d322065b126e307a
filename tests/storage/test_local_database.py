"""Values of a database are found in its B-tree and read from its files, without TensorStore."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from support.nodes import Away, inner, leaf, manifest

import unickpt
from unickpt.storage import database
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.database import Database
from unickpt.storage.ocdbt import Tree
from unickpt.storage.paths import resolve

KEYS = {f"params/l%y:{i:03d}/c/0": bytes([i]) * (1 + 11 * i) for i in range(0, 90, 2)}


@pytest.fixture
def context() -> ts.Context:
    return ts.Context()


@pytest.fixture(params=[200, 500, 1 << 20], ids=["high", "lower", "flat"])
def tree(request: pytest.FixtureRequest, tmp_path: Path, context: ts.Context) -> Tree:
    """Trees of several heights: small nodes make high ones. Small values are in the nodes."""
    spec = {
        "driver": "ocdbt",
        "base": f"file://{tmp_path}/",
        "config": {"max_decoded_node_bytes": request.param, "max_inline_value_bytes": 100},
    }
    database = ts.KvStore.open(spec, context=context).result()
    with ts.Transaction(atomic=True) as transaction:
        for key, value in KEYS.items():
            database.with_transaction(transaction)[key] = value
    return of(tmp_path).tree


def of(path: Path) -> database.LocalDatabaseReader:
    """The values of the database in a folder."""
    found = Database(resolve(path), ts.Context()).reader()
    assert isinstance(found, database.LocalDatabaseReader)
    return found


def test_every_value_is_found(tree: Tree, tmp_path: Path) -> None:
    values = of(tmp_path)
    for key, value in KEYS.items():
        out = np.empty(len(value), np.uint8)
        seen = bytearray()
        assert values.read_into([key], [out], [len(value)], [seen.extend]) == [True]
        assert seen == out.tobytes() == value == values.read(key, len(value))
        assert values.read_into([key], [out[:1]], [len(value)], [seen.extend]) == [True]
        assert seen == value + value[:1]
    kinds = {type(tree.find(key)) for key in KEYS}
    assert kinds == {bytes, DataReference}


@pytest.mark.parametrize("key", ["", "a", "params/l%y:001/c/0", "params/l%y:088/c/1", "z"])
def test_a_missing_key_is_missing(tree: Tree, tmp_path: Path, key: str) -> None:
    assert tree.find(key) is None
    assert of(tmp_path).read(key, 3) is None
    assert of(tmp_path).read_into([key], [np.empty(3, np.uint8)], [3], [None]) == [False]


def test_an_empty_database_has_no_values(tmp_path: Path, context: ts.Context) -> None:
    database = ts.KvStore.open(f"file://{tmp_path}/|ocdbt:", context=context).result()
    database["a"] = b"1"
    del database["a"]
    assert of(tmp_path).tree.find("a") is None


@pytest.mark.parametrize("seed", range(3))
def test_values_are_read_together(
    tree: Tree, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, reads = of(tmp_path), []
    tree.files("")  # reads all nodes
    values.tree = tree
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: reads.append(a) or preadv(*a))
    keys = [*KEYS, "a", "params/l%y:001/c/0", "z"]
    random.Random(seed).shuffle(keys)
    found = values.request_all([*keys, keys[0]])
    assert {key: bytes(each.result().value) for key, each in found.items()} == KEYS
    if len(list(tree.leaves())) == 1:
        assert len(reads) <= len(list((tmp_path / "d").iterdir())), "each file once"


def test_values_are_read_together_only_if_they_are_near(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_GAP_BYTES", 0)
    found = of(tmp_path).request_all(list(KEYS)[::2])
    assert {k: bytes(v.result().value) for k, v in found.items()} == dict(list(KEYS.items())[::2])


@pytest.mark.parametrize("limit", [0, 100, 4096])
@pytest.mark.parametrize("step", [1, 3])
def test_values_are_read_into_memory_together(
    tree: Tree, tmp_path: Path, step: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, calls = of(tmp_path), []
    monkeypatch.setattr(database, "_GAP_BYTES", limit)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: calls.append(a) or preadv(*a))
    keys = [*list(KEYS)[::step], "a", "params/l%y:001/c/0", "params/l%y:044/c/0", "z"]
    random.Random(step).shuffle(keys)
    keys.append(keys[0])
    out = [np.full(len(KEYS.get(key, b"four")), 255, np.uint8) for key in keys]
    wrong = keys.index("params/l%y:044/c/0")
    out[wrong] = np.full(7, 255, np.uint8)
    done = values.read_into(keys, out, [to.nbytes for to in out], [None] * len(keys))
    assert done == [key in KEYS and at != wrong for at, key in enumerate(keys)]
    for key, to, is_done in zip(keys, out, done, strict=True):
        assert to.tobytes() == (KEYS[key] if is_done else b"\xff" * len(to))
    if limit == 4096 and len(list(tree.leaves())) == 1:
        assert len(calls) <= 2 * len(list((tmp_path / "d").iterdir()))


def test_values_that_are_cut_off_are_not_read(tree: Tree, tmp_path: Path) -> None:
    values, keys = of(tmp_path), list(KEYS)
    tree.files("")  # reads all nodes
    values.tree = tree
    for file in (tmp_path / "d").iterdir():
        os.truncate(file, min(file.stat().st_size, 700))
    out = [np.empty(len(KEYS[key]), np.uint8) for key in keys]
    done = values.read_into(keys, out, [to.nbytes for to in out], [None] * len(keys))
    assert any(done), "those in the nodes"
    assert not all(done)
    read = [(key, to) for key, to, is_done in zip(keys, out, done, strict=True) if is_done]
    assert all(to.tobytes() == KEYS[key] for key, to in read)


def test_large_and_damaged_values_are_not_read_together(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_MOST_BYTES", 500)
    short = {key for key, value in KEYS.items() if len(value) <= 500}
    values = of(tmp_path)
    assert set(values.request_all(list(KEYS))) == short
    for file in (tmp_path / "d").iterdir():
        os.truncate(file, 3)
    assert all(len(KEYS[key]) <= 100 for key in values.request_all(list(KEYS))), "in the nodes"


@pytest.mark.parametrize("wrong", [989, 991])
def test_a_value_of_another_length_is_refused(tree: Tree, tmp_path: Path, wrong: int) -> None:
    key = "params/l%y:088/c/0"
    assert len(KEYS[key]) == 969
    with pytest.raises(ValueError, match=f"969 bytes stored, {wrong} expected"):
        of(tmp_path).read(key, wrong)
    out = [np.empty(9, np.uint8)]
    assert of(tmp_path).read_into([key], out, [wrong], [None]) == [False]


@pytest.mark.parametrize("path", ["../passwd", "/etc/passwd", "a/../../passwd", "..", "a\0b"])
def test_no_value_lies_outside(path: str) -> None:
    """Reading a checkpoint that somebody sent must not copy this machine's files into arrays."""
    with pytest.raises(ValueError, match="lies outside the database"):
        forged(leaf({"k": Away(path, 0, 9)})).find("k")


def test_nodes_that_lead_to_each_other_end() -> None:
    loop = inner([(b"", b"", "x", 0, 0)], height=5)
    with pytest.raises(ValueError, match="does not have the height 4"):
        forged(loop, height=5).find("k")


def forged(node: bytes, height: int = 0) -> Tree:
    """A tree whose manifest, and each of whose nodes, leads to one node."""
    return Tree(lambda: manifest("x", 0, len(node), height), lambda place: node)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    options = unickpt.SaveOptions(chunk_bytes=128 << 10, fsync=False)
    unickpt.save(tmp_path / "c", {"w": np.arange(1 << 18, dtype=np.float32)}, options=options)
    return tmp_path / "c"


def data_file(path: Path) -> Path:
    return max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_a_file_cut_short_while_it_is_read_is_an_error(saved: Path) -> None:
    """Mapped, it would end the process with SIGBUS."""
    stored = unickpt.open(saved)
    assert stored["w"][:10].tolist() == list(range(10))
    os.truncate(data_file(saved), 300_000)
    assert stored["w"][:10].tolist() == list(range(10)), "the first chunk is still there"
    with pytest.raises(unickpt.CheckpointCorrupt, match=r"'w' \[65536:98304\].*has no bytes"):
        stored["w"][...]


def test_a_missing_file_is_named(saved: Path) -> None:
    gone = data_file(saved)
    stored = unickpt.open(saved)
    gone.unlink()
    with pytest.raises(unickpt.CheckpointCorrupt, match=f"no file .*{gone.name}"):
        stored["w"][...]


@pytest.mark.parametrize("hashed", [False, True])
def test_large_values_are_read_piece_by_piece(
    tree: Tree, tmp_path: Path, hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_PIECE_BYTES", 300)
    monkeypatch.setattr(database, "_MOST_BYTES", 0)
    values, sizes = of(tmp_path), list[int]()
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: sizes.append(len(a[1][0])) or preadv(*a))
    keys = [*KEYS, "a", "params/l%y:001/c/0", "params/l%y:044/c/0", "params/l%y:088/c/0"]
    random.Random(0).shuffle(keys)
    lengths = [len(KEYS.get(key, b"four")) for key in keys]
    wrong = keys.index("params/l%y:044/c/0")
    lengths[wrong] += 1
    out, seen = [np.zeros(length, np.uint8) for length in lengths], [bytearray() for _ in keys]
    shorter = keys.index("params/l%y:088/c/0")  # what is left out is padding
    out[shorter] = out[shorter][:-9]
    looks = [each.extend if hashed else None for each in seen]
    done = values.read_into(keys, out, lengths, looks)
    assert done == [key in KEYS and at != wrong for at, key in enumerate(keys)]
    for key, to, each, is_done in zip(keys, out, seen, done, strict=True):
        if is_done:
            assert to.tobytes() == KEYS[key][: len(to)]
            assert each == (to.tobytes() if hashed else b"")
        else:
            assert not any(to)
    in_files = {key for key, value in KEYS.items() if len(value) > 100}
    large = [to for key, to, d in zip(keys, out, done, strict=True) if d and key in in_files]
    pieces = sum(-(-len(to) // 300) for to in large)
    read = [n for n in sizes if n]
    assert len(read) == (pieces if hashed else len(large))


def test_what_a_file_does_not_give_at_once_is_asked_for_again(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system call may read less than asked; and a file may have been cut off."""
    values, keys = of(tmp_path), [key for key, value in KEYS.items() if len(value) > 100]
    tree.files("")  # reads all nodes
    values.tree = tree
    preadv = os.preadv

    def at_most(handle: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(handle, [buffers[0][:700]], offset)

    monkeypatch.setattr(os, "preadv", at_most)
    monkeypatch.setattr(database, "_MOST_BYTES", 0)
    out = [np.empty(len(KEYS[key]), np.uint8) for key in keys]
    lengths = list(map(len, out))
    done = values.read_into(keys, out, lengths, [len] * len(keys))
    assert all(done)
    assert [to.tobytes() for to in out] == [KEYS[key] for key in keys]
    for file in (tmp_path / "d").iterdir():
        os.truncate(file, min(file.stat().st_size, 700))
    cut = values.read_into(keys, out, lengths, [None] * len(keys))
    assert not all(cut)
    read = [(key, to) for key, to, is_done in zip(keys, out, cut, strict=True) if is_done]
    assert all(to.tobytes() == KEYS[key] for key, to in read)
