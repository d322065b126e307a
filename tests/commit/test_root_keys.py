"""The root database: its keys in order, each with its value's place; what records may say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.saving import in_job, save_in_job

import unickpt
from unickpt import CheckpointCorrupt, SaveOptions
from unickpt.arrays.layout import Layout, Mesh
from unickpt.commit import root
from unickpt.commit.merge_chunks import BORROWED, COMPOSED, MISSING, WHOLE, Chunks
from unickpt.commit.messages import ADDITION_DTYPE, CHUNK_DTYPE, Record
from unickpt.format import borrowed, chunk_grid, digest_table, index_json
from unickpt.format.chunk_grid import FULL_LINK
from unickpt.format.index import ArrayEntry, BaseEntry, Index
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.verified_chunks import ChunkDigests
from unickpt.storage.btree.builder import PLACE_DTYPE
from unickpt.storage.btree.nodes import DataReference

NAMES = ["w", "w-x", "w.", "w0", "a/w", "a", "b/c", "c", "w!/c"]
ALONE = Layout(Mesh((), (), (0,)), ())


def places(first: int, count: int) -> Any:
    found = np.zeros(count, PLACE_DTYPE)
    found["offset"] = np.arange(first, first + count)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(NAMES), st.lists(st.integers(1, 13), max_size=3), min_size=1, max_size=6
    ),
    st.integers(0, 2**32 - 1),
)
def test_keys_ascend_and_each_has_its_own_place(grids: dict[str, list[int]], seed: int) -> None:
    arrays = {
        name: ArrayEntry(
            name, tuple(grid), "uint8", (1,) * len(grid), replace(ALONE, dims=((),) * len(grid))
        )
        for name, grid in grids.items()
    }
    count, random = chunk_grid.total_chunks(arrays), np.random.default_rng(seed)
    kinds = random.choice([WHOLE, COMPOSED, BORROWED], count).astype(np.uint8)
    spans = chunk_grid.chunk_spans(arrays)
    patch_counts = np.where(kinds == COMPOSED, random.integers(1, 4, count), 0)
    rows = np.repeat(np.arange(count), patch_counts)
    patches = np.zeros(len(rows), ADDITION_DTYPE)
    patches["row"], patches["offset"] = rows, 1000 + np.arange(len(rows))
    firsts = np.cumsum(patch_counts) - patch_counts
    patches["link"] = FULL_LINK + 1 + np.arange(len(rows)) - firsts[rows]
    patched = {name: int((kinds[span] == COMPOSED).sum()) for name, span in spans.items()}
    numbers = {name: int(patch_counts[span].sum()) for name, span in spans.items()}
    arrays = {
        name: replace(entry, composed=patched[name], additions=numbers[name])
        for name, entry in arrays.items()
    }
    index = Index("*", arrays, bases=(BaseEntry("other", "0" * 16),), chunks=count)
    chunks = Chunks(
        np.zeros(count, digest_table.DTYPE),
        kinds,
        places(0, count),
        patches,
        {"p/process_00000": (0, 5000, 1)},
        [(0, "d/0")],
        b"",
        patch_counts,
        np.zeros(0, borrowed.DTYPE),
        (),
        {},
    )
    assert MISSING not in kinds
    found: dict[bytes, int] = {}
    keys = list[bytes]()
    for run in root.runs(index, chunks, {"unickpt.json": (0, 6000, 1), **chunks.blobs}):
        run_keys = [run.key(n) for n in range(len(run.places))]
        keys += run_keys
        found.update(zip(run_keys, run.places["offset"].tolist(), strict=True))
    assert keys == sorted(set(keys))
    expected, patch = {b"unickpt.json": 6000, b"p/process_00000": 5000}, 1000
    row = 0
    for entry in arrays.values():
        (part,) = chunk_grid.parts(entry)
        for number in range(part.count):
            if kinds[row] == WHOLE:
                expected[chunk_grid.chunk_key(part, number).encode()] = row
            elif kinds[row] == COMPOSED:
                for link in range(1, 2 + int(patch_counts[row])):
                    key = chunk_grid.chunk_key(part.linked(link), number).encode()
                    expected[key] = row if link == FULL_LINK else patch
                    patch += link != FULL_LINK
            row += 1
    assert found == expected


def test_tensorstore_reads_what_many_processes_wrote_into_large_grids(tmp_path: Path) -> None:
    rows = np.arange(3 * 1500.0).reshape(1500, 3)
    wide = np.arange(12 * 11 * 30, dtype=np.int16).reshape(12, 11, 30)
    tree = {"rows": rows, "wide": wide, "one": np.float32(2.5), "x": {"rows": rows[:7]}}

    def save(group: Any) -> Any:
        return unickpt.save(
            tmp_path, tree, options=SaveOptions(group=group, chunk_bytes=24, fsync=False)
        )

    assert not [r for r in in_job(3, save) if isinstance(r, BaseException)]
    assert unickpt.verify(tmp_path).ok
    for name, array in (("rows", rows), ("wide", wide), ("x/rows", rows[:7])):
        opened = ts.open(f"file://{tmp_path}/|ocdbt:{name}/").result()
        np.testing.assert_array_equal(opened.read().result(), array)
    store = ts.KvStore.open(f"file://{tmp_path}/|ocdbt:").result()
    listed = [key.decode() for key in store.list().result()]
    assert listed == sorted(listed, key=str.encode)
    assert len(listed) == unickpt.open(tmp_path).index.chunks + 6 + 3  # zarr.json; ours


# --- records ------------------------------------------------------------------------------------


def record(**changes: Any) -> Record:
    chunks = np.zeros(2, CHUNK_DTYPE)
    found = {"description": 1, "chunks": chunks, "files": ("d/1",), "inline": b"abcd"}
    return Record(**{**found, **changes})


def with_places(file: int = 0, offset: int = 0, length: int = 0, path: str = "d/1") -> Record:
    chunks = np.zeros(2, CHUNK_DTYPE)
    chunks[1] = 3, 4, 5, file, offset, length
    return record(chunks=chunks, files=(path,))


def with_patches(*rows: tuple[int, int, int, int, int]) -> Record:
    return record(additions=np.array(list(rows), ADDITION_DTYPE))


def test_a_record_says_where_each_value_is() -> None:
    written = replace(
        with_places(-1, 1, 3),
        additions=np.array([(1, 2, 0, 7, 8), (1, 3, -1, 0, 2)], ADDITION_DTYPE),
        blobs={"rng": (3, 4, 0, (-1, 0, 3))},
        described=(0, 9, 10),
    )
    found = Record.decode(written.encode())
    assert (found.files, found.inline) == (("d/1",), b"abcd")
    assert found.chunks.tolist() == [(0,) * 6, (3, 4, 5, -1, 1, 3)]
    assert found.additions.tolist() == [(1, 2, 0, 7, 8), (1, 3, -1, 0, 2)]
    assert found.blobs == written.blobs
    assert found.described == (0, 9, 10)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (with_places(1), "not listed"),
        (with_places(-2), "where each value is"),
        (with_places(-3), "not listed"),
        (with_places(-1, 2, 3), "ends after"),
        (with_places(-1, 2**64 - 1, 2), "ends after"),
        (with_places(path="../other/d/1"), "not a file of the process"),
        (with_places(path="/etc/passwd"), "not a file of the process"),
        (with_patches((2, 2, 0, 0, 0)), "added values do not match its chunks"),
        (with_patches((1, 2, 0, 0, 0), (1, 2, 0, 0, 0)), "added values do not match its chunks"),
        (with_patches((1, 2, 0, 0, 0), (0, 2, 0, 0, 0)), "added values do not match its chunks"),
        (with_patches((1, 1, 0, 0, 0)), "added values do not match its chunks"),
        (with_patches((1, 3, 0, 0, 0)), "added values do not match its chunks"),
        (with_patches((0, 2, 0, 0, 0), (1, 3, 0, 0, 0)), "added values do not match its chunks"),
        (with_patches((1, 2, 0, 0, 0), (1, 4, 0, 0, 0)), "added values do not match its chunks"),
        (with_patches((1, 2, 1, 0, 0)), "not listed"),
        (with_patches((1, 2, -2, 0, 0)), "where each value is"),
        (record(blobs={"rng": (3, 4, 0, (1, 0, 3))}), "not listed"),
        (record(blobs={"rng": (3, 4, 0, (-1, 3, 3))}), "ends after"),
        (record(described=(7, 0, 3)), "not listed"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(wrong: Record, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Record.decode(wrong.encode())


def test_a_record_that_ends_early_is_refused() -> None:
    body = record().encode()[:-20]
    sealed = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    with pytest.raises(ValueError, match="malformed"):
        Record.decode(sealed)


# --- digests by block ---------------------------------------------------------------------------


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_table, "BLOCK_ROWS", 8)


TREE = {f"w{k}": np.arange(k * 100.0, k * 100 + 50).reshape(5, 10) for k in range(9)}


def reader_of(path: Path) -> OcdbtReader:
    reader = unickpt.open(path).reader
    assert isinstance(reader, OcdbtReader)
    return reader


@pytest.mark.usefixtures("short_blocks")
def test_only_the_blocks_of_an_array_are_read(tmp_path: Path, monkeypatch: Any) -> None:
    save_in_job(tmp_path, 2, lambda index: TREE)
    unickpt.save(tmp_path, TREE, options=SaveOptions(chunk_bytes=80), overwrite=True)
    read = list[tuple[int, int]]()
    real = ChunkDigests._read_range

    def counted(self: ChunkDigests, offset: int, length: int) -> bytes:
        read.append((offset // 12, length // 12))
        return real(self, offset, length)

    monkeypatch.setattr(ChunkDigests, "_read_range", counted)
    opened = unickpt.open(tmp_path)
    assert read == []
    np.testing.assert_array_equal(opened["w2"][:], TREE["w2"])
    assert read == [(8, 8)]  # rows 10 to 15 of 45
    np.testing.assert_array_equal(opened["w8"][:], TREE["w8"])
    assert read == [(8, 8), (40, 5)]
    assert sorted(unickpt.load(tmp_path)) == sorted(TREE)
    assert unickpt.verify(tmp_path).ok


@pytest.mark.usefixtures("short_blocks")
def test_a_damaged_block_is_noticed_by_its_arrays(tmp_path: Path) -> None:
    unickpt.save(tmp_path, TREE, options=SaveOptions(chunk_bytes=80))
    at = reader_of(tmp_path).chunks.values.tree.find("unickpt.digests")
    assert isinstance(at, DataReference)
    data = bytearray((tmp_path / at.path).read_bytes())
    data[at.offset + 12 * 12] ^= 1  # row 12: w2
    (tmp_path / at.path).write_bytes(data)
    opened = unickpt.open(tmp_path)
    np.testing.assert_array_equal(opened["w8"][:], TREE["w8"])
    with pytest.raises(CheckpointCorrupt, match="block 1 of the digest table"):
        opened["w2"][:]
    assert not unickpt.verify(tmp_path).ok


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("blocks", [[8, "0" * 15], [0, "0" * 96], [8, "0" * 80], [8], [True, ""]])
def test_an_index_with_other_blocks_is_refused(tmp_path: Path, blocks: list[Any]) -> None:
    unickpt.save(tmp_path, TREE, options=SaveOptions(chunk_bytes=80))
    text = json.loads(index_json.encode(reader_of(tmp_path).index))
    del text["xxh3"]
    text["digest_blocks"] = blocks
    body = json.dumps(text, separators=(",", ":")).encode()[:-1]
    sealed = body + b',"xxh3":"%016x"}' % xxhash.xxh3_64_intdigest(body)
    with pytest.raises(CheckpointCorrupt, match="digest_blocks"):
        index_json.decode(sealed, "here")


def test_metadata_that_many_arrays_share_is_stored_once(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {f"layer_{n}": {"w": np.ones(3, np.uint8)} for n in range(9)})
    [file] = (tmp_path / "c").glob("processes/*/root/0")
    assert file.read_bytes().count(b'"node_type":"group"') == 1
    assert file.read_bytes().count(b'"node_type":"array"') == 1
