"""Databases of references that the builder encodes: read by our decoder and by TensorStore."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.storage import ocdbt, paths
from unickpt.storage.btree import builder, nodes
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.errors import Failed

KEYS = st.binary(min_size=0, max_size=12)
PATHS = st.sampled_from(["a", "d/0123", "d/01ab", "processes/x/00003/d/ff", "b"])


def entries_of(keys: Sequence[bytes], places: builder.PlaceArray) -> builder.TreeEntries:
    return builder.TreeEntries(builder.SortedKeys.from_texts(keys), places)


def build(values: list[tuple[bytes, DataReference]], nodes: str) -> tuple[bytes, bytes]:
    """A database of references.

    Arguments:
        values: keys and where their values are, in files below the database's folder.
        nodes: the path of the file for the nodes, likewise.

    Returns:
        The manifest, and the content of the file for the nodes.
    """
    out = bytearray()

    def place(node: bytes) -> DataReference:
        reference = DataReference(nodes, len(out), len(node))
        out.extend(node)
        return reference

    ordered = sorted(values, key=lambda value: value[0])
    numbers = {
        path: n for n, path in enumerate(sorted({reference.path for _, reference in ordered}))
    }
    places = [
        (numbers[reference.path], reference.offset, reference.length) for _, reference in ordered
    ]
    run = entries_of([key for key, _ in ordered], np.array(places, builder.PLACE_DTYPE))
    manifest, _ = builder.encode([run], list(numbers), b"", place)
    return manifest, bytes(out)


def found(manifest: bytes, node_file: bytes) -> ocdbt.Tree:
    def fetch(reference: DataReference) -> bytes:
        assert reference.path == "nodes"
        return node_file[reference.offset : reference.offset + reference.length]

    return ocdbt.Tree(lambda: manifest, fetch)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.builds(
            DataReference, PATHS, st.integers(0, 1 << 50), st.integers(0, 1 << 40), st.just(0)
        ),
        max_size=60,
    ),
    st.integers(2, 5),
)
def test_every_reference_is_found(values: dict[str, DataReference], entries: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "_ENTRIES", entries)
        built = build([(key.encode(), at) for key, at in values.items()], "nodes")
    tree = found(*built)
    assert {key: tree.find(key) for key in values} == values
    assert tree.find("\U0010ffff" * 9) is None
    facts = nodes.manifest(built[0])
    assert facts.keys == len(values)
    assert facts.nbytes == (len(built[1]) + sum(v.length for v in values.values())) * bool(values)


@pytest.mark.parametrize("count", [0, 1, 700])
def test_tensorstore_reads_and_copies_it(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "_ENTRIES", 20)
    data = np.random.default_rng(0).bytes(100_000)
    below = tmp_path / "below"
    below.mkdir()
    (below / "data").write_bytes(data)
    values = {f"w/c/{k}": DataReference("data", 131 * k, 131) for k in range(count)}
    manifest, node_file = build([(k.encode(), v) for k, v in values.items()], "nodes")
    (below / "nodes").write_bytes(node_file)
    (below / "manifest.ocdbt").write_bytes(manifest)
    context = paths.context()
    source = ts.KvStore.open(ocdbt.spec({"driver": "file", "path": f"{below}/"}), context=context)
    copied = ts.KvStore.open(
        ocdbt.spec({"driver": "file", "path": f"{tmp_path}/"}), context=context
    ).result()
    copied.write("more", b"1").result()
    source.result().experimental_copy_range_to(copied).result()
    for store in (source.result(), copied):
        listed = {key.decode() for key in store.list().result()} - {"more"}
        assert listed == values.keys()
        for key, at in values.items():
            assert store[key] == data[at.offset : at.offset + at.length]
    assert sum(file.stat().st_size for file in tmp_path.glob("d/*")) < 40_000  # no values


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.one_of(KEYS, st.binary(max_size=3).map(lambda key: key + b"/c/" * 9)),
        st.one_of(
            st.binary(max_size=9),
            st.builds(
                DataReference, PATHS, st.integers(0, 1 << 62), st.integers(0, 1 << 62), st.just(0)
            ),
        ),
        max_size=90,
    ),
    st.integers(2, 50),
    st.integers(1, 40),
)
def test_runs_of_values_in_nodes_and_files_are_found(
    values: dict[bytes, bytes | DataReference], entries: int, size: int
) -> None:
    keys, files = (
        sorted(values),
        sorted({v.path for v in values.values() if isinstance(v, DataReference)}),
    )
    inline, places = b"", np.zeros(len(keys), builder.PLACE_DTYPE)
    for n, key in enumerate(keys):
        value = values[key]
        if isinstance(value, bytes):
            places[n] = builder.INLINE, len(inline), len(value)
            inline += value
        else:
            places[n] = files.index(value.path), value.offset, value.length
    starts = range(0, len(keys), size)
    runs = [entries_of(keys[at : at + size], places[at : at + size]) for at in starts]
    out = bytearray()

    def place(node: bytes) -> DataReference:
        out.extend(node)
        return DataReference("nodes", len(out) - len(node), len(node))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "_ENTRIES", entries)
        manifest, count = builder.encode(runs, files, inline, place)
        if len(runs) > 1:
            with pytest.raises(ValueError, match="must ascend"):
                builder.encode(runs[::-1], files, inline, place)
    assert count == len(values)
    leaves = list(found(manifest, bytes(out)).leaves())
    assert {k: leaf.find(n) for leaf in leaves for n, k in enumerate(leaf.keys)} == values
    assert [key for leaf in leaves for key in leaf.keys] == keys


@given(st.binary(max_size=3000))
@settings(max_examples=60)
def test_the_checksum_is_the_one_that_is_checked(data: bytes) -> None:
    sealed = data + google_crc32c.value(data).to_bytes(4, "little")
    assert nodes.is_sealed(sealed) == (len(data) > 0)
    if data:
        assert not nodes.is_sealed(sealed[:-1] + bytes([sealed[-1] ^ 1]))


def test_keys_that_end_in_zeros_stay_apart() -> None:
    at = DataReference("a", 1, 2)
    values = [(b"k" + b"\0" * n, at) for n in range(50)]
    (leaf,) = found(*build(values, "nodes")).leaves()
    assert leaf.keys == [key for key, _ in values]


def test_a_key_that_is_too_long_is_named() -> None:
    place = np.zeros(1, builder.PLACE_DTYPE)

    def encoded(key: bytes) -> bytes:
        return builder.encode([entries_of([key], place)], ["d/1"], b"", lambda n: at(len(n)))[0]

    def at(length: int) -> DataReference:
        return DataReference("d/2", 0, length)

    assert encoded(b"x" * 65_535)
    with pytest.raises(Failed, match=r"the key 'layer/xx.*' has 65536 bytes.*shorter name"):
        encoded(b"layer/" + b"x" * 65_530)


@settings(max_examples=150)
@given(
    st.integers(0, 400).flatmap(
        lambda n: st.tuples(
            st.lists(st.binary(min_size=1, max_size=3), min_size=n, max_size=n),
            st.lists(st.tuples(st.integers(0, 450), st.integers(1, 200)), min_size=1, max_size=6),
        )
    ),
    st.integers(2, 90),
)
def test_a_table_of_files_is_cut_out_of_that_of_all(
    drawn: tuple[list[bytes], list[tuple[int, int]]], entries: int
) -> None:
    tails, cuts = drawn
    files = sorted({b"processes/job/%05d/d/%b" % (n // 2, tail) for n, tail in enumerate(tails)})
    used = sorted({n for start, count in cuts for n in range(start, start + count)})
    used = [n for n in used if n < len(files)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "_ENTRIES", entries)
        tables = builder._FileTables(files)
    expected = builder._files([files[n] for n in used])
    assert tables.subset(np.array(used, np.int64)) == expected


@given(
    st.sampled_from([1, 127, 128, 16383, 1 << 31, (1 << 64) - 1]).flatmap(
        lambda most: st.lists(st.integers(0, most), max_size=80)
    ),
    st.booleans(),
)
def test_numbers_are_encoded_alike_whatever_their_size(values: list[int], same: bool) -> None:
    if same:
        values = values[:1] * 40
    one_by_one = b"".join(builder._numbers([value]) for value in values)
    assert builder._numbers(np.array(values, np.uint64)) == one_by_one
    assert builder._numbers(values) == one_by_one


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["", "a/", "a/b/", "layers/0/w/c/", "layers/10/w/c/", "m" * 130 + "/c/"]),
        st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(1, 200)),
        min_size=1,
        max_size=6,
    ),
    st.integers(2, 70),
    st.integers(0, 2**32 - 1),
)
def test_keys_that_many_arrays_share_give_the_same_bytes(
    parts: dict[str, tuple[int, int, int]], entries: int, seed: int
) -> None:
    """Whatever chunks an array has: the keys of its grid are sorted and compared once."""
    tails = [sorted(b"%d/%d" % (n % k, n) for n in range(201)) for k in (1, 7, 60)]
    random, shared, all_keys = np.random.default_rng(seed), [], list[bytes]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "_ENTRIES", entries)
        grids = {
            cut: builder.SortedKeys.from_texts(tails[cut[0]][cut[1] : cut[1] + cut[2]])
            for cut in parts.values()
        }
        for prefix, cut in sorted(parts.items()):
            keys = grids[cut]
            places = np.zeros(len(keys.texts), builder.PLACE_DTYPE)
            places["file"] = random.integers(0, 3, len(places))
            places["offset"] = random.integers(0, 1 << 40, len(places))
            shared.append(builder.TreeEntries(keys, places, prefix.encode() or b"0"))
            all_keys += [shared[-1].key(n) for n in range(len(places))]
        alone = [entries_of(all_keys, np.concatenate([run.places for run in shared]))]
        built = [list[bytes](), list[bytes]()]
        for runs, nodes_of_runs in zip((shared, alone), built, strict=True):

            def place(node: bytes, placed: list[bytes] = nodes_of_runs) -> DataReference:
                placed.append(node)
                return DataReference("nodes", sum(map(len, placed[:-1])), len(node))

            builder.encode(runs, ["a", "b", "c"], b"", place)
    assert built[0] == built[1]
