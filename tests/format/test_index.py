"""The index as JSON: exact round trips, and nothing hostile gets through."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.quantized import quantized_as
from support.strategies import laid_out, plain, shapes

from unickpt import CheckpointCorrupt
from unickpt.arrays.layout import Layout, Mesh
from unickpt.errors import UnsupportedFormat
from unickpt.format import chunk_encoding, chunk_grid, index_json
from unickpt.format.codec_protocol import encoding_of
from unickpt.format.index import ArrayEntry, BaseEntry, Encoding, Index, PerProcessEntry
from unickpt.types import Box


def blosc(itemsize: int, shuffle: str) -> Encoding:
    """A codec that arrays of some saves may have."""
    settings = {"cname": "zstd", "clevel": 1, "shuffle": shuffle, "typesize": itemsize}
    return encoding_of({"name": "blosc", "configuration": {**settings, "blocksize": 1 << 19}})


CHOSEN = blosc(2, "shuffle")


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    arrays: dict[str, ArrayEntry] = {}
    for number in range(draw(st.integers(0, 4))):
        shape, layout = draw(laid_out())
        chunk, cut = chunk_grid.chunk_grid(shape, 2, layout, draw(st.integers(1, 99)))
        name = f"layer/{number}"
        encoding = draw(st.sampled_from([None, (), CHOSEN, chunk_encoding.encoding_for("gzip")]))
        arrays[name] = ArrayEntry(name, shape, "bfloat16", chunk, layout, cut, encoding=encoding)
    shape = draw(shapes(max_rank=2).filter(all))
    arrays["boxes"] = ArrayEntry(
        "boxes", shape, "int4", shape, boxes=((Box.whole(shape), (0, 2)),), prng="threefry2x32"
    )
    named = [entry.layout.mesh.processes for entry in arrays.values() if entry.layout]
    processes = 1 + max([2, *itertools.chain(*named)])
    return Index(
        tree={"dict": []},
        arrays=arrays,
        aliases={"tied": "boxes"},
        values=draw(st.dictionaries(st.text(max_size=4).map("value/{}".format), plain, max_size=3)),
        per_process={"rng": PerProcessEntry(((3, 2**64 - 1), *[(0, 7)] * (processes - 1)))},
        metadata={"note": "ä"},
        compression=draw(st.sampled_from([None, "auto", "zstd"])),
        reused=draw(st.integers(0, 9)),
        extra=draw(st.sampled_from([{}, {"timing": {}, "incremental": {"a": [1, None]}}])),
        processes=processes,
        chunks=7,
        digests_xxh3="0" * 16,
    )


@given(indexes())
def test_round_trip(index: Index) -> None:
    again = index_json.decode(index_json.encode(index), "here")
    assert repr(again) == repr(index)  # repr, because NaN values differ from themselves
    assert list(again.arrays) == list(index.arrays)


@pytest.mark.plugins
def test_arrays_that_differ_in_one_thing_only_are_not_mixed_up() -> None:
    mesh = Mesh(("x",), (2,), (0, 1))
    rows, columns = Layout(mesh, (("x",), ())), Layout(mesh, ((), ("x",)))
    like = ArrayEntry("", (4, 6), "uint32", (2, 3), rows)
    boxes = ((Box((0, 0), (4, 6)), (0,)),)
    different = [
        like,
        replace(like, shape=(6, 6)),
        replace(like, dtype="int32"),
        replace(like, chunk=(2, 6)),
        replace(like, layout=columns),
        replace(like, layout=Layout(Mesh(("x",), (2,), (1, 0)), rows.dims)),
        replace(like, cut=(0,)),
        replace(like, layout=None, boxes=boxes),
        replace(like, layout=None, boxes=((boxes[0][0], (1,)),)),
        replace(like, prng="threefry2x32"),
        replace(like, dtype="float32", **quantized_as("uint8", (0.5, 0.25))),
        replace(like, dtype="float32", **quantized_as("uint8", (0.5, 0.125))),
        replace(like, composed=1, additions=1),
        replace(like, composed=1, additions=2),
        replace(like, encoding=()),
        replace(like, encoding=blosc(1, "bitshuffle")),
        replace(like, encoding=CHOSEN),
    ]
    twice = [*different, *(replace(entry) for entry in different)]
    arrays = {str(n): replace(entry, name=str(n)) for n, entry in enumerate(twice)}
    index = Index(tree="*", arrays=arrays, processes=2)
    encoded = index_json.encode(index)
    assert index_json.decode(encoded, "here").arrays == arrays
    assert len(json.loads(encoded)["layouts"]) == 3
    assert len(json.loads(encoded)["codecs"]) == 3
    alone = json.loads(index_json.encode(Index(tree="*", arrays={"9": arrays["9"]}, processes=2)))
    assert json.loads(encoded)["arrays"]["9"] == alone["arrays"]["9"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("shape", [True]), ("shape", [1.0]), ("chunk", [True]), ("layout", False), ("layout", 0.0)],
)
def test_what_only_compares_equal_to_a_valid_entry_is_refused(key: str, value: Any) -> None:
    valid = {"shape": [1], "dtype": "float32", "chunk": [1], "layout": 0}
    layout = {
        "meshes": [{"axes": [], "shape": [], "processes": [0]}],
        "layouts": [{"mesh": 0, "dims": [[]]}],
    }
    arrays = {"v": valid, "w": {**valid, key: value}}
    assert arrays["v"] == arrays["w"]
    with pytest.raises(CheckpointCorrupt, match=f"'w': '{key}'"):
        index_json.decode(sealed(arrays=arrays, **layout), "here")
    index_json.decode(sealed(arrays={"v": valid, "w": {**valid}}, **layout), "here")


ODD = [
    '"',
    "\\",
    '},"',
    'a":{',
    '}},"aliases":{',
    "\n",
    "ä",
    "\u2028",
    "\ue000",
    "😀",
    "",
    "a\\",
    "x},",
]


@given(st.lists(st.sampled_from(ODD) | st.text(max_size=3), min_size=1, max_size=9, unique=True))
def test_arrays_of_any_names_are_read_as_they_were_written(names: list[str]) -> None:
    like = ArrayEntry("", (4, 6), "uint32", (2, 3), Layout.replicated(2, 1))
    kinds = [like, replace(like, prng='},"'), replace(like, shape=(6, 6))]
    arrays = {n: replace(kinds[at % 3], name=n) for at, n in enumerate(names)}
    note = {"arrays": {"w": {"shape": [1]}}, "aliases": {}}
    for metadata in ({}, note):
        index = Index(tree="*", arrays=arrays, metadata=metadata)
        again = index_json.decode(index_json.encode(index), "here")
        assert again == index
        assert list(again.arrays) == names


@pytest.mark.parametrize("old", [b'"v":{', b'"w":{"shape":[2]', b'"chunk":[1],"layout":0}},"al'])
def test_a_key_that_occurs_twice_is_refused(old: bytes) -> None:
    valid = {"shape": [1], "dtype": "float32", "chunk": [1], "layout": 0}
    layout = {
        "meshes": [{"axes": [], "shape": [], "processes": [0]}],
        "layouts": [{"mesh": 0, "dims": [[]]}],
    }
    arrays = {"v": valid, "w": {**valid, "shape": [2]}, "x": valid}
    data = sealed(arrays=arrays, **layout)
    assert list(index_json.decode(data, "here").arrays) == ["v", "w", "x"]
    new = {
        b'"v":{': b'"w":{',
        b'"w":{"shape":[2]': b'"w":{"shape":[3],"shape":[2]',
        b'"chunk":[1],"layout":0}},"al': b'"chunk":[1],"layout":0}},"arrays":{},"al',
    }[old]
    assert data.count(old) == 1
    unsealed = data.replace(old, new)[: -len(b',"xxh3":"0123456789abcdef"}')]
    data = unsealed + b',"xxh3":"%016x"}' % xxhash.xxh3_64_intdigest(unsealed)
    with pytest.raises(CheckpointCorrupt, match="a key occurs twice"):
        index_json.decode(data, "here")


SMALL = Index(tree="*", arrays={"w": ArrayEntry("w", (2, 3), "float32", (2, 3), boxes=(
    (Box((0, 0), (2, 3)), (0,)),))})  # fmt: skip


@given(st.integers(0, len(index_json.encode(SMALL)) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, change: int) -> None:
    data = bytearray(index_json.encode(SMALL))
    data[at] ^= change
    with pytest.raises((CheckpointCorrupt, UnsupportedFormat)):
        index_json.decode(bytes(data), "here")


@given(st.integers(0, len(index_json.encode(SMALL)) - 1))
def test_truncation_is_noticed(length: int) -> None:
    with pytest.raises(CheckpointCorrupt, match="here: the index is damaged"):
        index_json.decode(index_json.encode(SMALL)[:length], "here")


def sealed(**changes: Any) -> bytes:
    body = json.loads(index_json.encode(SMALL))
    del body["xxh3"]
    body.update(changes)
    unsealed = json.dumps(body, separators=(",", ":")).encode()[:-1]
    return unsealed + b',"xxh3":"%016x"}' % xxhash.xxh3_64_intdigest(unsealed)


@pytest.mark.parametrize("format", [2, 0, -1, "4.0", "", 10**30])
def test_another_format_is_refused_by_its_number(format: Any) -> None:
    """Before anything else is looked at, also the seal, which may be another one there."""
    body = {"format": format, "library": "unickpt 7.5", "arrays": 3}
    for data in (sealed(format=format, library="unickpt 7.5"), json.dumps(body).encode()):
        for act in (index_json.decode, index_json.check_known):
            with pytest.raises(UnsupportedFormat) as caught:
                act(data, "here")
            said = str(caught.value)
            assert f"its format is {format!r}, and this unickpt (unickpt 0.1.0) knows" in said
            assert "'unickpt 7.5' wrote it" in said
            assert "pip install --upgrade unickpt" in said


def test_features_that_are_not_known_are_refused_by_name() -> None:
    """They may change all else: what it says of arrays means nothing then."""
    features = ["patches", "telepathy", "wormholes"]
    data = sealed(features=features, library="unickpt 7.5", arrays=3, tree={"cloud": 1})
    for act in (index_json.decode, index_json.check_known):
        with pytest.raises(UnsupportedFormat) as caught:
            act(data, "here")
        assert "here: it needs the features 'telepathy', 'wormholes', which" in str(caught.value)
        assert "neither read nor replaced nor removed. 'unickpt 7.5' wrote" in str(caught.value)
    with pytest.raises(UnsupportedFormat, match="needs the feature 'telepathy', which this"):
        index_json.decode(sealed(features=["telepathy"]), "here")
    damaged = data.replace(b"wormholes", b"wormholez")
    with pytest.raises(CheckpointCorrupt, match="seal"):
        index_json.decode(damaged, "here")
    index_json.check_known(damaged, "here")  # damage may be replaced


def test_what_is_in_extra_and_not_known_is_ignored_and_kept() -> None:
    w = {**W, "extra": {"novelty": 1, "patches": {"chunks": 1, "patches": 1, "novelty": 2}}}
    extra = {"novelty": {"x": None}, "incremental": {"reused": 5, "novelty": 3}}
    data = sealed(arrays={"w": w}, extra=extra, features=["patches"], novelty=4)
    index = index_json.decode(data, "here")
    assert (index.arrays["w"].additions, index.reused, index.extra) == (
        1,
        5,
        {"novelty": {"x": None}, "incremental": {"novelty": 3}},
    )
    lent = replace(
        index, bases=(BaseEntry("b", "0" * 16),), borrowed=3, borrowed_xxh3="1" * 16, reused=7
    )
    changed = index_json.with_references(data, lent)
    assert index_json.decode(changed, "here") == lent
    body = json.loads(changed)
    assert body["features"] == ["patches", "references"]
    assert (body["arrays"], body["novelty"]) == ({"w": w}, 4)
    assert body["extra"] == {"novelty": {"x": None}, "incremental": {"reused": 7, "novelty": 3}}
    whole = replace(index, reused=0)
    again = index_json.with_references(changed, whole)
    assert index_json.decode(again, "here") == whole
    assert json.loads(again)["features"] == ["patches"]
    assert json.loads(again)["extra"]["incremental"] == {"novelty": 3}


W = {"shape": [2, 3], "dtype": "float32", "chunk": [2, 3], "boxes": [[[0, 0], [2, 3], [0]]]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": None}, "its format is None"),
        ({"features": {}}, "its features are"),
        ({"arrays": []}, "'arrays'"),
        ({"arrays": {"w": {**W, "shape": [-1, 3]}}}, "'shape'"),
        ({"arrays": {"w": {**W, "shape": [1 << 61, 1 << 61]}}}, "2\\^62 bytes"),
        ({"arrays": {"w": {**W, "shape": [True, 3]}}}, "'shape'"),
        ({"arrays": {"w": {**W, "chunk": [0, 3]}}}, "'chunk'"),
        ({"arrays": {"w": {**W, "chunk": [3]}}}, "do not fit"),
        ({"arrays": {"w": {**W, "codec": 0}}}, "there is no codec 0 of 0"),
        ({"codecs": [{"name": "sharding_indexed", "configuration": {}}]}, "its codecs hold"),
        ({"codecs": 3}, "'codecs'"),
        ({"arrays": {"w": {**W, "dtype": "object"}}}, "unknown dtype"),
        ({"arrays": {"w": {**W, "layout": 0}}}, "layout 0 does not fit"),
        ({"arrays": {"w": {k: v for k, v in W.items() if k != "boxes"}}}, "either a layout"),
        ({"arrays": {"w": {**W, "boxes": [[[0, 0], [2, 2], [0]]]}}}, "do not cover"),
        ({"arrays": {"w": {**W, "boxes": [[[0, 0], [2, 4], [0]]]}}}, "outside"),
        ({"arrays": {"w": {**W, "boxes": W["boxes"] * 2}}}, "overlap"),
        ({"arrays": {"w": {**W, "boxes": [[[0], [2], [0]]]}}}, "does not fit shape"),
        ({"arrays": {"w": {**W, "cut": [0]}}}, "is cut along"),
        ({"aliases": {"t": "nobody"}}, "not an array"),
        ({"values": {"v": {"pickle": "gASV"}}}, "has an unknown type"),
        ({"meshes": [{"axes": ["a"], "shape": [9], "processes": [0]}]}, "lists 1 devices"),
        ({"processes": 0}, "0 processes"),
        ({"per_process": {"r": [[1]]}}, "per-process"),
        ({"codecs": ["zstd"]}, "codecs"),
    ],
)
def test_contradictions_are_refused_with_their_reason(changes: dict, reason: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=reason):
        index_json.decode(sealed(**changes), "here")


def test_a_bottomless_tree_is_no_crash() -> None:
    data = sealed().replace(b'"tree":"*"', b'"tree":' + b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(CheckpointCorrupt):
        index_json.decode(data, "here")
