"""Hostile checkpoints: whatever they claim, the reader says no, soon, and in little memory."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.forging import array, crc32c, database, forge, forge_index, index_of, redirect, sealed
from support.forks import Forks

import unickpt
from unickpt import CheckpointCorrupt, LoadOptions, UnickptError
from unickpt.extend import Sections
from unickpt.format import chunk_encoding, chunk_grid, digest_table, index_json
from unickpt.format import index as index_module
from unickpt.format.index import ArrayEntry
from unickpt.storage import regular_files
from unickpt.types import Box, Layout, Mesh

ZSTD = chunk_encoding.encoding_for("zstd")
BLOSC = chunk_encoding.encoding_for("blosc")
GZIP = chunk_encoding.encoding_for("gzip")
X1000 = Layout(Mesh(("x",), (1000,), (0,) * 1000), (("x",),))
GRID = Layout(Mesh(("x", "y"), (300, 300), (0,) * 90_000), (("x",), ("y",)))

# Opens, loads, verifies and slices a checkpoint; none of it may end the process or take its memory.
READER = """
import json, resource, sys, time
import numpy as np
import unickpt
from unickpt import LoadOptions

def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

path = ARGS[0]

def each(act):
    stored = unickpt.open(path)
    return [act(stored[name]) for name in list(stored)[:3]]

actions = {
    "open": lambda: repr(unickpt.open(path)),
    "load": lambda: repr(unickpt.load(path))[:200],
    "unverified": lambda: repr(unickpt.load(path, options=LoadOptions(verify=False)))[:200],
    "verify": lambda: str(unickpt.verify(path).damage[0]),
    "slice": lambda: each(lambda a: a[tuple(slice(0, 1) for _ in a.shape)].tobytes().hex()),
}
outcomes = {}
for name, action in actions.items():
    started, before = time.monotonic(), megabytes()
    try:
        said = action()
    except unickpt.UnickptError as error:
        said = f"{type(error).__name__}: {error}"
    except BaseException as error:
        said = f"!! {type(error).__name__}: {error}"
    outcomes[name] = [said, time.monotonic() - started, megabytes() - before]
print(json.dumps(outcomes))
"""


def read_all(forks: Forks, path: Path) -> dict[str, str]:
    """What each way of reading says; fails where one crashes, hangs or grows."""
    ended = forks.wait(forks.start(READER, str(path)))
    assert ended.code == 0, f"the process ended with {ended.code}:\n{ended.out[-3000:]}"
    outcomes: dict[str, list[Any]] = ended.last
    for name, (said, seconds, megabytes) in outcomes.items():
        assert not str(said).startswith("!!"), f"{name}: {said}"
        assert seconds < 20, f"{name} took {seconds} s"
        assert megabytes < 60, f"{name} took {megabytes} MB"
    return {name: said for name, (said, *_) in outcomes.items()}


# --- sizes that nothing backs -------------------------------------------------------------------

HUGE = 1 << 50
SHORT = "no bytes stored|not valid for value of size"
CLAIMS: dict[str, tuple[Any, str]] = {
    "one chunk of a petabyte": (index_of(array("w", (HUGE,))), SHORT),
    "a petabyte in chunks of 8 MiB": (
        index_of(array("w", (HUGE,), (1 << 21,)), rows=3),
        "the arrays have 536870912 chunks, the index names 3",
    ),
    "chunks of one element": (
        index_of(array("w", (HUGE,), (1,)), rows=10),
        "the arrays have 1125899906842624 chunks",
    ),
    "a lie about the number of chunks": (
        index_of(array("w", (HUGE,), (1,)), rows=10, chunks=HUGE),
        "the digest table has 120 bytes",
    ),
    "a compressed chunk of a terabyte": (
        index_of(array("w", (1 << 38,), encoding=ZSTD)),
        "a compressed chunk of 1099511627776 bytes is not allowed",
    ),
    "a chunk that its few compressed bytes cannot hold": (
        index_of(array("w", (1 << 28,), encoding=GZIP)),
        SHORT,
    ),
    "a chunk that blosc would have to believe": (
        index_of(array("w", (1 << 24,), encoding=BLOSC)),
        SHORT,
    ),
    "billions of parts": (
        index_of(
            *(array(f"w{i}", (10**6, 10**6), (1, 1), layout=GRID, cut=(0, 1)) for i in range(30)),
            rows=10,
        ),
        "the arrays have 30000000000000 chunks",
    ),
    "as many dimensions as there are": (
        index_of(array("w", (2,) * 32, (1,) * 32), rows=10),
        "the arrays have 4294967296 chunks",
    ),
    "a large chunk behind a small array": (
        index_of(array("w", (3,), (1 << 40,), layout=Layout.replicated(1, 1))),
        SHORT,
    ),
    "no elements of a vast shape": (index_of(array("w", (0, 1 << 61))), "bytes or more"),
    "more elements than can be counted": (index_of(array("w", (1 << 61, 8))), "bytes or more"),
    "more dimensions than there are": (index_of(array("w", (1,) * 33)), "33 dimensions"),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("chunk", [None, b"", b"x" * 1000], ids=["missing", "empty", "short"])
def test_no_memory_is_given_for_a_size_that_nothing_backs(
    claim: str, chunk: bytes | None, forks: Forks, tmp_path: Path
) -> None:
    (index, table), reason = CLAIMS[claim]
    keys = {}
    if chunk is not None:
        for entry in index.arrays.values():
            part = next(iter(chunk_grid.parts(entry)), None) if not entry.cut else None
            if part is not None:
                keys[f"{part.key}/{part.chunk_key(0)}"] = chunk
    forge_index(tmp_path, index, table, **keys)
    said = read_all(forks, tmp_path)
    for way in ("load", "unverified"):
        assert said[way].startswith("CheckpointCorrupt: "), said[way]
    assert re.search(reason, said["load"]), said["load"]


def test_a_compressed_bomb_goes_off_within_its_chunk(forks: Forks, tmp_path: Path) -> None:
    """A stream that unpacks to gigabytes, where a chunk of few bytes is declared."""
    import gzip

    bomb = gzip.compress(bytes(1 << 28), 1)
    index, table = index_of(array("w", (1 << 18,), encoding=GZIP))
    forge_index(tmp_path, index, table, **{"w/part_0/c/0": bomb})
    said = read_all(forks, tmp_path)
    assert said["load"].startswith("CheckpointCorrupt"), said["load"]


# --- an index that contradicts itself -----------------------------------------------------------

W = {
    "shape": [4, 4],
    "dtype": "float32",
    "chunk": [2, 4],
    "codec": 0,
    "layout": 0,
    "extra": {"patches": {"chunks": 1, "patches": 2}, "later": [1]},
}
BODY: dict[str, Any] = {
    "format": 1,
    "features": ["patches", "sections"],
    "library": "x",
    "created": "",
    "attempt": "",
    "processes": 2,
    "metadata": {"note": [1, {"deep": None}]},
    "tree": {"dict": [["w", "*"], ["v", "*"], ["r", "*"], ["t", "*"], ["b", "*"]]},
    "meshes": [{"axes": ["x"], "shape": [2], "processes": [0, 1]}],
    "layouts": [{"mesh": 0, "dims": [["x"], []]}],
    "arrays": {
        "w": W,
        "b": {
            "shape": [4],
            "dtype": "int8",
            "chunk": [4],
            "boxes": [[[0], [1], [0]], [[1], [4], [1]]],
            "extra": {"compress": {"pays": False}},
        },
    },
    "aliases": {"t": "w"},
    "values": {"v": {"int": "0xffffffffffffffffff"}},
    "per_process": {"r": [[1, "0" * 16], [1, "0" * 16, 1]]},
    "codecs": [
        {"name": "zstd", "configuration": {"level": 3}},
        {"name": "gzip", "configuration": {"level": 5}},
    ],
    "chunks": 4,
    "digests": "0" * 16,
    "extra": {
        "incremental": {"reused": 3, "growth": [1, 2, 3, 4, 5]},
        "compress": {"option": "auto"},
        "later": [None],
    },
}


def changed(at: str, value: Any) -> bytes:
    """The body with the value at a path of keys replaced."""
    body = copy.deepcopy(BODY)
    *way, last = [int(key) if key.isdigit() else key for key in at.split(".")]
    inner = body
    for key in way:
        inner = inner[key]
    inner[last] = value
    return sealed(body)


def test_the_body_is_sound_before_it_is_changed() -> None:
    assert list(index_json.decode(sealed(BODY), "here").arrays) == ["w", "b"]


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        ("arrays.w.shape", [4.0, 4], "'shape' contains '4.0'"),
        ("arrays.w.shape", "44", "'shape'"),
        ("arrays.w.shape", [1 << 63, 4], "'shape' contains"),
        ("arrays.w.chunk", [1 << 61, 1 << 61], "do not fit"),
        ("arrays.w.dtype", "O", "unknown dtype"),
        ("arrays.w.dtype", "datetime64[99999999999999999Y]", "array 'w'"),
        ("arrays.w.dtype", "datetime64[s/0]", "unknown dtype"),  # NumPy ends the process
        ("arrays.w.dtype", "datetime64[\ud800]", "unknown dtype"),
        ("arrays.w.dtype", "float32, (1000000,)int8", "unknown dtype"),
        ("arrays.w.layout", -1, "layout -1"),
        ("arrays.w.layout", True, "'layout'"),
        ("arrays.w.cut", [0, 0], "is cut along"),
        ("arrays.w.cut", [9], "is cut along"),
        ("arrays.b.boxes", [[[0], [2], [0]], [[1], [4], [1]]], "overlap"),
        ("arrays.b.boxes", [[[0], [1], [0]], [[2], [4], [1]]], "do not cover"),
        ("arrays.b.boxes", [[[0], [1], [0]], [[4], [1], [1]]], "negative"),
        ("arrays.b.boxes", [[[0], [5], [0]]], "outside"),
        ("arrays.b.boxes", [[[0], [4], []]], "does not fit"),
        ("arrays.b.boxes", [[[0], [4]]], "contain"),
        ("arrays.b.boxes", 7, "'boxes'"),
        ("arrays.b.boxes", [[[0], [4], [0, 2]]], r"'b': process 2 of 2 holds \[0:4\]"),
        ("meshes.0.processes", [0, 2], "a mesh names process 2 of 2"),
        ("per_process.r", [[1, "0" * 16]], "'r' has 1 values of 2"),
        ("format", 1.0, "its format is 1.0, which is no number"),
        ("format", True, "its format is True"),
        ("format", [1], "its format is "),
        ("features", None, "its features are None"),
        ("features", "patches", "its features are 'patches'"),
        ("features", ["sections", "patches"], "its features are "),
        ("features", ["patches", "patches"], "its features are "),
        ("features", [1], "its features are "),
        ("features", ["sections"], "it has 'patches', which its features do not name"),
        ("features", ["patches"], "it has 'sections', which its features do not name"),
        ("values.v", {"int": "1_0"}, "has an unknown type"),
        ("values.v", {"int": "10"}, "has an unknown type"),
        ("values.v", {"float64": "7ff0 00000000 0000"}, "has an unknown type"),
        ("meshes.0.shape", [1 << 60], "lists 2 devices"),
        ("meshes.0.axes", ["x", "x"], "do not fit together"),
        ("meshes.0.processes", [0, -1], "'processes' contains '-1'"),
        ("layouts.0.dims", [["x"], ["x"]], "does not fit"),
        ("layouts.0.dims", [["nobody"], []], "does not fit"),
        ("layouts.0.mesh", 5, "names mesh 5 of 1"),
        ("aliases.t", "b/../w", "is not an array"),
        ("aliases", {"w": "b"}, "two leaves have the same name"),
        ("values.v", {"pickle": "gASV"}, "has an unknown type"),
        ("values.v", {"bytes": "!"}, "malformed"),
        ("values.v", [1], "has an unknown type"),
        ("values", {"\ud800": 1}, "not valid Unicode"),
        ("per_process.r", [[1, "xyz"]], "per-process"),
        ("per_process.r", [[-1, "0" * 16]], "per-process"),
        ("per_process.r", [[1, "-000000000000001"]], "per-process"),
        ("codecs", [{"name": "sharding_indexed", "configuration": {}}], "codecs"),
        ("codecs", [{"name": "transpose", "configuration": {"order": [1, 0]}}], "codecs"),
        ("codecs", [{"name": "zstd", "configuration": {"level": "3"}}], "codecs"),
        ("codecs", [{"name": "zstd", "configuration": {"dictionary": "/etc/passwd"}}], "codecs"),
        ("codecs", [{"name": "zstd", "kvstore": "file:///etc/"}], "codecs"),
        ("codecs", [], "there is no codec 0 of 0"),
        ("codecs", ["zstd"], "codecs"),
        ("codecs", {}, "'codecs'"),
        ("codecs.1.configuration", {"codes": 4}, "codecs hold"),
        ("codecs.1.name", "unickpt.later", "its features do not name"),
        ("arrays.w.codec", 2, "there is no codec 2 of 2"),
        ("arrays.w.codec", -1, "there is no codec -1"),
        ("arrays.w.extra.patches.patches", 0, "'patches' is 0"),
        ("arrays.w.extra.patches.chunks", 3, "has 3 patched chunks, and 2 patches"),
        ("arrays.w.extra.patches", 3, "'patches' is 3"),
        ("arrays.w.extra", [], "'extra'"),
        ("arrays.b.extra.compress", {"pays": 1}, "'pays'"),
        ("extra", [], "'extra'"),
        ("extra.incremental.reused", -1, "'reused'"),
        ("extra.compress", {}, "compress"),
        ("chunks", "4", "'chunks'"),
        ("processes", -1, "-1 processes"),
        ("metadata", [], "'metadata'"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(at: str, value: Any, reason: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=f"here: the index is damaged: .*{reason}"):
        index_json.decode(changed(at, value), "here")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"chunks":4', '"chunks":4,"chunks":4', "a key occurs twice"),
        ('"w":{', '"w":{"shape":[1],"dtype":"int8"},"w":{', "a key occurs twice"),
        ('"note":[', '"note":[NaN,', "NaN, which is not valid JSON"),
        ('"note":[', '"note":[' + "9" * 5000 + ",", "."),
        ('"note":[', '"note":[' + "[" * 100_000 + "]" * 100_000 + ",", "."),
        ('"note":[', '"note":[' + '{"a":' * 100_000 + "1" + "}" * 100_000 + ",", "."),
        ('"format"', '"\\u0000"', "its format is None"),
    ],
)
def test_json_that_is_none_is_refused(old: str, new: str, reason: str) -> None:
    text = json.dumps(BODY, separators=(",", ":"))
    assert old in text
    unsealed = text.replace(old, new, 1).encode()[:-1]
    data = unsealed + b',"xxh3":"%016x"}' % xxhash.xxh3_64_intdigest(unsealed)
    with pytest.raises(CheckpointCorrupt, match=f"the index is damaged: .*{reason}"):
        index_json.decode(data, "here")


def _paths(body: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = body.items() if isinstance(body, dict) else enumerate(body)
    for key, value in items:
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from _paths(value, (*at, key))


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 70), 1 << 70),
        st.sampled_from([0, 1, 2, -1, 1 << 62, 1 << 63, "", "*", "w", "x", "int8", "../../x"]),
        st.floats(),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mutated_index_is_read_or_refused(data: st.DataObject) -> None:
    body = copy.deepcopy(BODY)
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(st.sampled_from(list(_paths(body))))
        inner = body
        for key in way[:-1]:
            inner = inner[key]
        if data.draw(st.booleans()):
            inner[way[-1]] = data.draw(anything)
        else:
            del inner[way[-1]]
        if not body:
            break
    try:
        index = index_json.decode(sealed(body), "here")
    except UnickptError:
        return
    for entry in index.arrays.values():  # what is accepted must be safe to look at
        assert chunk_grid.chunk_count(entry) >= 0
        repr(entry)
    index_json.decode(index_json.encode(index), "here")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_checkpoint_with_a_mutated_index_is_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    body = copy.deepcopy(BODY)
    way = data.draw(st.sampled_from(list(_paths(body))))
    inner = body
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = data.draw(anything)
    path = tmp_path_factory.mktemp("mutated")
    forge(path, {"unickpt.json": sealed(body), "unickpt.digests": bytes(48)})
    for act in (unickpt.load, lambda p: unickpt.load(p, options=LoadOptions(verify=False))):
        with pytest.raises(UnickptError):
            act(path)
    assert not unickpt.verify(path).ok


@given(st.integers(0, 10**6), st.integers(1, 40), st.lists(st.integers(1, 9), max_size=3))
def test_chunks_are_counted_without_listing_them(n: int, chunk: int, sizes: list[int]) -> None:
    axes = tuple("abc"[: len(sizes)])
    mesh = Mesh(axes, tuple(sizes), (0,) * int(np.prod(sizes)))
    n = n % 2000 + 1
    for cut in ((), (0,)):
        entry = array("w", (n, 3), (chunk, 2), layout=Layout(mesh, (axes, ())), cut=cut)
        assert chunk_grid.chunk_count(entry) == sum(part.count for part in chunk_grid.parts(entry))


# --- what is below the index --------------------------------------------------------------------


def small() -> tuple[dict[str, bytes], ArrayEntry]:
    """All keys of a sound little checkpoint."""
    data = np.arange(200, dtype=np.float32)
    entry = array("w", (200,), layout=Layout.replicated(1, 1))
    table = np.array([(chunk_encoding.digest(data), 0)], digest_table.DTYPE).tobytes()
    index, _ = index_of(entry)
    digest = f"{xxhash.xxh3_64_intdigest(table):016x}"
    index = index_module.Index(tree=index.tree, arrays=index.arrays, chunks=1, digests_xxh3=digest)
    keys = {
        **chunk_encoding.zarr_keys(index),
        index_module.INDEX_KEY: index_json.encode(index),
        index_module.DIGESTS_KEY: table,
        "w/c/0": data.tobytes(),
    }
    return keys, entry


def test_a_forged_checkpoint_without_fault_is_read(tmp_path: Path) -> None:
    keys, _ = small()
    forge(tmp_path, keys, plain=True)
    np.testing.assert_array_equal(unickpt.load(tmp_path)["w"], np.arange(200, dtype=np.float32))
    assert unickpt.verify(tmp_path).ok
    redirect(tmp_path, b"data/inside/", b"data/inside/")
    assert unickpt.verify(tmp_path).ok, "mending the checksums changes nothing"
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize(
    "target",
    [b"../outside//", b"/../outside/", b"./../outsid/", b"..\\outside/\\", b"\0../outside/"],
)
def test_a_manifest_does_not_lead_out_of_the_checkpoint(target: bytes, tmp_path: Path) -> None:
    """The nodes name data files beside the checkpoint, where there are such files."""
    keys, _ = small()
    folder = tmp_path / "c"
    forge(folder, keys, plain=True)
    for outside in ("outside", "outsid"):
        os.makedirs(tmp_path / outside)
        for name in os.listdir(folder / "data" / "inside"):
            content = (folder / "data" / "inside" / name).read_bytes()
            (tmp_path / outside / name).write_bytes(content)
    redirect(folder, b"data/inside/", target)
    with pytest.raises(CheckpointCorrupt):
        unickpt.load(folder)
    assert not unickpt.verify(folder).ok


@pytest.mark.parametrize(
    "name", ["../../../etc", "/etc/passwd", "w\0", "..", "a\nb", "%2e%2e/x", "|ocdbt:x"]
)
def test_a_name_is_a_key_and_never_a_path(name: str, forks: Forks, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    entries = (array(name, (200,)), array("big", (1 << 16,)))
    index, table = index_of(*entries, tree={"dict": []})
    forge_index(folder, index, table)
    said = read_all(forks, folder)
    assert said["load"].startswith("CheckpointCorrupt")
    assert sorted(os.listdir(tmp_path)) == ["c"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("unickpt.digests", b"", "has 0 bytes"),
        ("unickpt.digests", b"x" * 12, "does not match its digest"),
        ("unickpt.digests", None, "'unickpt.digests' is missing"),
        ("w/c/0", b"x" * 800, r"array 'w' \[0:200\], written by process 0: .* do not match"),
        ("w/c/0", b"x" * 799, "799 bytes stored, 800 expected"),
        ("w/c/0", None, "no bytes stored, 800 expected"),
    ],
)
def test_a_bad_key_is_named(key: str, value: bytes | None, reason: str, tmp_path: Path) -> None:
    keys, _ = small()
    forge(tmp_path, keys)
    database(tmp_path).write(key, value).result()
    with pytest.raises(CheckpointCorrupt, match=reason):
        unickpt.load(tmp_path)
    assert not unickpt.verify(tmp_path).ok


PER_PROCESS: list[Any] = [
    b"",
    b"\x80\x04\x95\x00",
    b"[]",
    b'{"tree":"*","values":{},"arrays":{}}',
    b'{"tree":"*","values":{"":1,"x":2},"arrays":{}}',
    b'{"tree":"*","values":{},"arrays":{"":{"dtype":"int8","shape":[-1,-4],"data":"AAAA"}}}',
    b'{"tree":"*","values":{},"arrays":{"":{"dtype":"int8","shape":[1e9],"data":"AAAA"}}}',
    b'{"tree":"*","values":{},"arrays":{"":{"dtype":"O","shape":[1],"data":"AAAAAAAAAAA="}}}',
    b'{"tree":"*","values":{},"arrays":{"":{"dtype":"datetime64[s/0]","shape":[],"data":""}}}',
    b'{"tree":"*","values":{},"arrays":{"":{"dtype":"int8","shape":[0,4611686018427387904,8],'
    b'"data":""}}}',
    b'{"tree":"*","values":{},"arrays":{"":{"dtype":"int8","shape":[true],"data":"AA=="}}}',
    b'{"tree":"*","values":{},"arrays":{"":{"dtype":"int8","shape":[1],"data":"AA==","prng":1}}}',
    b'{"tree":"*","values":{},"arrays":{"":[]}}',
    b'{"tree":"*","values":{"":[]},"arrays":{}}',
    b'{"tree":{"namedtuple":[["x","*"]],"type":"__import__(1)"},"values":{"x":1},"arrays":{}}',
    b'{"tree":' + b'{"list":[' * 5000 + b"]}" * 5000 + b',"values":{},"arrays":{}}',
]


@pytest.mark.parametrize("blob", PER_PROCESS)
def test_a_bad_per_process_value_is_refused(blob: bytes, tmp_path: Path) -> None:
    digest = xxhash.xxh3_64_intdigest(blob)
    entry = index_module.PerProcessEntry(((len(blob), digest),))
    index, table = index_of(per_process={"r": entry}, tree={"dict": [["r", "*"]]})
    forge_index(tmp_path / "here/c", index, table, **{"r/process_00000": blob})
    for like in (None, {"r": unickpt.PerProcess(1)}):
        with pytest.raises(CheckpointCorrupt, match="here/c: per-process leaf 'r': "):
            unickpt.load(tmp_path / "here/c", like)
    with pytest.raises(CheckpointCorrupt, match="here/c: per-process leaf 'r': "):
        unickpt.convert(tmp_path / "here/c", tmp_path / "converted")


ARRAY = b'{"tree":"*","values":{},"arrays":{"":{"dtype":"int8","shape":[4],"at":%d,"as":"list"}}}'


def section(text: bytes, data: bytes = b"1234") -> bytes:
    return text + b" " * (-len(text) % 64) + data


def binary(*sections: tuple[str, bytes, int], facts: bool = False) -> tuple[bytes, int]:
    """A value of these sections (key, bytes, size of its JSON), and the size of its head."""
    rows = [[k, len(b), n, f"{xxhash.xxh3_64_intdigest(b):016x}"] for k, b, n in sections]
    head = json.dumps({"sections": rows} | ({"facts": {}} if facts else {})).encode()
    return head + b"".join(b for _, b, _ in sections), len(head)


GOOD = section(ARRAY % 0)
BINARY: list[tuple[bytes, int]] = [
    (b"{}", 2),
    (b"[]", 2),
    (b'{"sections":[]}', 15),
    (b'{"sections":[["",1,1,"0"]]}', 27),
    (b'{"sections":[["",4,4,"0000000000000000"]]}1234', 42),  # another digest
    (b'{"sections":[["",4,5,"0000000000000000"]]}1234', 42),
    (b'{"sections":[["",4,4,"0000000000000000"]]}12345', 42),
    (b'{"sections":[["",5,4,"0000000000000000"]]}1234', 42),
    (b'{"sections":[["",-1,-1,"0000000000000000"]],"facts":{}}', 55),
    (b"[" * 50_000, 50_000),
    binary(("x", GOOD, len(ARRAY % 0))),
    binary(("", GOOD, len(ARRAY % 0)), ("", GOOD, len(ARRAY % 0)), facts=True),
    binary(("", section(ARRAY % 1), len(ARRAY % 1))),
    binary(("", section(ARRAY % -1), len(ARRAY % -1))),
    binary(("", section(ARRAY % (1 << 62)), len(ARRAY % (1 << 62)))),
    binary(("", section((ARRAY % 0).replace(b"[4]", b"[2,2]")), len(ARRAY % 0) + 2)),
    binary(("", section((ARRAY % 0).replace(b"[4]", b"[1e9]")), len(ARRAY % 0) + 2)),
    binary(("", section((ARRAY % 0).replace(b"0,", b"null,")), len(ARRAY % 0) + 3)),
    binary(("", b"{}", 2)),
]


@pytest.mark.parametrize(("blob", "head"), BINARY)
def test_a_bad_binary_per_process_value_is_refused(blob: bytes, head: int, tmp_path: Path) -> None:
    write_binary(tmp_path / "here/c", blob, head)
    for like in (None, {"r": unickpt.PerProcess(1)}):
        with pytest.raises(CheckpointCorrupt, match=r"here/c: .*'r'"):
            unickpt.load(tmp_path / "here/c", like)


def test_a_good_binary_per_process_value_is_read(tmp_path: Path) -> None:
    write_binary(tmp_path / "c", *binary(("", GOOD, len(ARRAY % 0))))
    assert unickpt.load(tmp_path / "c")["r"].values == (list(b"1234"),)


def write_binary(path: Path, blob: bytes, head: int) -> None:
    digest = xxhash.xxh3_64_intdigest(blob[:head])
    entry = index_module.PerProcessEntry(((len(blob), digest),), (head,))
    index, table = index_of(per_process={"r": entry}, tree={"dict": [["r", "*"]]})
    forge_index(path, index, table, **{"r/process_00000": blob})


def test_zeros_that_a_file_system_does_not_store_are_read(tmp_path: Path) -> None:
    """As ZFS with compression does; nodes with holes are refused."""
    zeros = np.zeros(4 << 20, np.uint8)
    unickpt.save(tmp_path, {"r": unickpt.PerProcess(zeros)})
    (file,) = (tmp_path / "processes").glob("*/00000/d/*")
    data = file.read_bytes()
    with open(file, "wb") as sparse:
        sparse.write(data[: 1 << 20])
        sparse.seek(3 << 20)
        sparse.write(data[3 << 20 :])
    assert file.stat().st_blocks * 512 < len(data)
    assert unickpt.load(tmp_path)["r"].values[0].tolist() == zeros.tolist()
    assert unickpt.verify(tmp_path).ok


def test_a_section_that_was_changed_is_named(tmp_path: Path) -> None:
    blob, head = binary(("a", GOOD, len(ARRAY % 0)), ("b", GOOD, len(ARRAY % 0)), facts=True)
    write_binary(tmp_path / "c", blob[:-1] + b"?", head)
    with pytest.raises(CheckpointCorrupt, match="value of process 0 for 'r' does not match its"):
        unickpt.load(tmp_path / "c")
    assert not unickpt.verify(tmp_path / "c").ok
    like = {"r": unickpt.PerProcess(Sections({}, {}), lambda saved, i, n: saved[0].values["a"])}
    assert unickpt.load(tmp_path / "c", like)["r"].value == list(b"1234")  # the other is not read


def test_an_error_of_our_own_is_not_told_as_a_fault_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path / "c", {"r": unickpt.PerProcess({"x": np.arange(3), "y": 1})})

    def broken(*arguments: object) -> object:
        raise ValueError("a bug")

    for module, name in (
        ("tree_json", "value_from_json"),
        ("tree", "leaves"),
        ("dtypes", "from_name"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"unickpt.frameworks.per_process.{module}.{name}", broken)
            with pytest.raises(ValueError, match="a bug") as caught:
                unickpt.load(tmp_path / "c")
        assert type(caught.value) is ValueError


TREES: list[Any] = [
    None,
    [],
    "**",
    {"dict": [["w", "*"], ["w", "*"]]},
    {"dict": [["w", "*"], [True, "*"]]},
    {"dict": [["w", "*"], ["ghost", "*"]]},
    {"dict": []},
    {"dict": [["w", {"set": []}]]},
    {"object": [["w", "*"]], "type": {"module": "os"}},
    {"namedtuple": [["w", "*"]], "type": "a b"},
    {"namedtuple": [["_w", "*"]], "type": "T"},
    {"wrapper": {"wrapper": "*"}},
]


@pytest.mark.parametrize("tree", TREES)
def test_a_bad_tree_is_refused(tree: Any, tmp_path: Path) -> None:
    keys, entry = small()
    index = index_json.decode(keys[index_module.INDEX_KEY], "here")
    body = json.loads(index_json.encode(index))
    del body["xxh3"]
    forge(tmp_path, {**keys, index_module.INDEX_KEY: sealed({**body, "tree": tree})})
    with pytest.raises(CheckpointCorrupt):
        unickpt.load(tmp_path)
    assert not unickpt.verify(tmp_path).ok
    whole = Box.whole(entry.shape)
    assert unickpt.open(tmp_path)["w"].read(whole).shape == (200,), "arrays can still be salvaged"


def test_files_that_are_no_checkpoint_are_refused(forks: Forks, tmp_path: Path) -> None:
    makers: list[Callable[[Path], Any]] = [
        lambda p: (p / "manifest.ocdbt").write_bytes(b""),
        lambda p: (p / "manifest.ocdbt").write_bytes(os.urandom(500)),
        lambda p: (p / "manifest.ocdbt").mkdir(),
        lambda p: (p / "manifest.ocdbt").symlink_to("/dev/null"),
        lambda p: (p / "manifest.ocdbt").symlink_to("manifest.ocdbt"),
        lambda p: forge(p, {"unickpt.json": b""}),
        lambda p: forge(p, {"unickpt.json": b"\x80\x04\x95"}),
        lambda p: forge(p, {"unickpt.json": b"{}"}),
        lambda p: forge(p, {"unickpt.json": b"[" * 100_000}),
        lambda p: forge(p, {"other": b"x"}),
    ]
    for number, make in enumerate(makers):
        path = tmp_path / str(number)
        path.mkdir()
        make(path)
        said = read_all(forks, path)
        kinds = ("CheckpointCorrupt", "CheckpointNotFound", "StorageError")
        assert said["load"].startswith(kinds), f"{number}: {said['load']}"


def test_metadata_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unickpt.save(tmp_path, {"w": np.arange(3)})
    database(tmp_path).write("w/zarr.json", b" " * (8 << 20)).result()
    read, real = [], regular_files.RegularFiles.read

    def counted(self: Any, place: Any, may_be_sparse: bool = False) -> bytes:
        read.append(place.length)
        return real(self, place, may_be_sparse)

    monkeypatch.setattr(regular_files.RegularFiles, "read", counted)
    report = unickpt.verify(tmp_path)
    assert ["'w/zarr.json' differs" in str(d) for d in report.damage] == [True]
    assert max(read) < 1 << 20
