"""docs/format.md and its schema say what the code does."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import xxhash
from support import TESTS
from support.format_1 import names, unpacked

import unickpt
from unickpt import PerProcess, SaveOptions
from unickpt.arrays import dtypes
from unickpt.display import tree_table
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.format import chunk_encoding, chunk_grid, index_json
from unickpt.format.index import INDEX_KEY, ArrayEntry, Index
from unickpt.plugins.incremental import patches
from unickpt.plugins.parity.codes import ParitySums
from unickpt.plugins.quantize import quantized_chunk
from unickpt.plugins.quantize.blocks import Blocks
from unickpt.trees import tree, tree_json
from unickpt.types import Layout, LocalFragments, Mesh

HERE = Path(TESTS)
DOCS = HERE.parent / "docs"
FORMAT = (DOCS / "format.md").read_text()
SCHEMA = json.loads((DOCS / "index.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


# --- the examples of format.md ------------------------------------------------------------------


def after_mark(name: str) -> str:
    """What stands in format.md below `<!-- test: name -->`: a table, or the inside of a block."""
    mark = f"<!-- test: {name} -->\n"
    assert mark in FORMAT, f"format.md has no example {name!r}"
    rest = FORMAT.partition(mark)[2]
    if rest.startswith("```"):
        return rest.partition("\n")[2].partition("```")[0]
    return rest.partition("\n\n")[0]


def table(name: str) -> list[list[str]]:
    """The cells of a table's rows, without the quotes of code."""
    rows = [line[1:-1].split("|") for line in after_mark(name).splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def test_names_of_the_format() -> None:
    for key, others, expected in table("names"):
        numbers = {str(k) for c in code(others) if isinstance(k := json.loads(c), int)}
        assert tree.component(json.loads(code(key)[0]), numbers) == code(expected)[0]


def test_values_of_the_format() -> None:
    for python, stored in table("values"):
        value = eval(code(python)[0])
        assert json.dumps(tree_json.value_to_json(value)) == code(stored)[0]
        assert repr(tree_json.value_from_json(json.loads(code(stored)[0]))) == repr(value)


def test_layouts_of_the_format() -> None:
    mesh = Mesh(("dp", "tp"), (3, 2), tuple(range(6)))
    header = after_mark("layout").splitlines()[0]
    layouts = [Layout(mesh, (tuple(json.loads(axes)),)) for axes in code(header)]
    rows = table("layout")
    assert len(rows) == 6
    for dp, tp, *expected in rows:
        boxes = [layout.box((7,), (int(dp), int(tp))) for layout in layouts]
        assert [f"[{b.start[0]}, {b.stop[0]})" for b in boxes] == [code(e)[0] for e in expected]


def entry_of(body: dict[str, Any]) -> ArrayEntry:
    """An array of format.md's table; a layout that splits 122 in two where the text says so."""
    size = 2 if body.get("cut") else 1
    mesh = Mesh(("x",), (size,), tuple(range(size)))
    dims = tuple(("x",) if d in body.get("cut", ()) else () for d in range(len(body["shape"])))
    body = {"dtype": "float32", **body}
    if "boxes" not in body:
        body["layout"] = 0
    layouts = [Layout(mesh, dims)]
    name = body.pop("name")
    shared = index_json._SharedParts(layouts, [])
    return index_json._array(
        name, tree_json.typed(body, index_json._ArrayBody, name), shared, False
    )


def test_parts_of_the_format() -> None:
    parts: dict[str, chunk_grid.Part] = {}
    for array, expected in table("parts"):
        entry = entry_of(json.loads(code(array)[0]))
        found = chunk_grid.parts(entry)
        parts |= {part.key: part for part in found}
        described = "; ".join(
            f"`{part.key}` `{part.box}` `{list(part.chunk)}` `{list(part.grid)}`" for part in found
        )
        assert described == expected
    sentence = " ".join(FORMAT[FORMAT.index("Chunk 1 of `w`") :].partition("\n\n")[0].split())
    w, v, s = parts["w"], parts["v/part_61_0"], parts["s"]
    assert f"`w/{w.chunk_key(1)}` and the box `{w.chunk_box(1)}`" in sentence
    assert f"`v/part_61_0/{v.chunk_key(2)}` and the box `{v.chunk_box(2)}`" in sentence
    assert f"the chunk of `s` has the key `s/{s.chunk_key(0)}`" in sentence


def test_the_quantised_chunk_of_the_format() -> None:
    x = np.array([1.0, 1.5, 2.0, 2.5], np.float32)
    stored = bytes.fromhex("".join(code(row[0])[0] for row in table("quantised")))
    assert quantized_chunk.encode(x, "int2").data.tobytes() == stored
    out = np.empty_like(x)
    quantized_chunk.decode(np.frombuffer(stored, np.uint8), out, "int2")
    assert (out == x).all()
    assert Blocks.of((40, 300)) == Blocks(40, 300)
    assert Blocks.of((8, 40, 3, 3)) == Blocks(8, 360)


def test_the_patched_chunk_of_the_format() -> None:
    full = np.arange(10, 15, dtype=np.uint16)
    chunk = full.copy()
    chunk[[1, 4]] = 14, 12
    stored = bytes.fromhex("".join(code(row[0])[0] for row in table("patched")))
    of = patches.PatchedState(chunk_encoding.digest(full))
    assert patches.encode(full, chunk, of, 1, 100) == stored
    patches.apply(stored, full)
    assert np.array_equal(full, chunk)


def test_the_parity_of_the_format() -> None:
    sums = ParitySums(2)
    for file in (b"\x01\x80", b"\x03"):
        sums.add([memoryview(file)], len(file))
    stored = [bytes.fromhex(code(row[1])[0]) for row in table("parity")]
    assert [b"".join(part.tobytes() for part in parts) for parts in sums.sums()] == stored


def test_zarr_metadata_of_the_format() -> None:
    entry = entry_of({"name": "w", "shape": [6, 10], "chunk": [4, 10]})
    expected = json.loads(after_mark("zarr"))
    assert chunk_encoding.zarr_metadata(entry, chunk_grid.parts(entry)[0]) == expected
    group = re.search(r"A group's is `(.*?)`", FORMAT)
    assert group is not None
    assert json.loads(group[1]) == json.loads(chunk_encoding.GROUP_JSON)


def test_dtypes_of_the_format() -> None:
    section = FORMAT[FORMAT.index("## 9.") : FORMAT.index("### Quantised arrays")]
    rows = [line[1:-1].split("|") for line in section.splitlines() if line.startswith("|`")]
    told = {}
    for cells, stored, size in rows:
        for name in (n for n in code(cells) if n != "U"):
            same_name = stored.strip() == "the same"
            told[name] = (name if same_name else code(stored)[0], int(size.split(",")[0]))
    for name in ("datetime64", "timedelta64"):
        assert told.pop(f"{name}[U]") == ("int64", 8)
        assert told.pop(name) == (dtypes.stored_as(f"{name}[ns]"), 8)
    assert told == {
        name: (dtypes.stored_as(name), dtypes.from_name(name).itemsize)
        for name in dtypes.supported()
    }
    assert set(told) == set(SCHEMA["$defs"]["dtype"]["anyOf"][0]["enum"])


def test_index_of_the_format() -> None:
    body = json.loads(after_mark("index"))
    VALIDATOR.validate(body)
    mesh = Mesh(("data",), (2,), (0, 1))
    layout, encoding = Layout(mesh, (("data",), ())), chunk_encoding.encoding_for("zstd")
    w = ArrayEntry("w", (6, 4), "float32", (3, 4), layout, encoding=encoding)
    ours = Index(
        tree={"dict": [["w", "*"], ["step", "*"]]},
        arrays={"w": w},
        compression="zstd",
        extra={"timing": {}},
        values={"step": 7},
        processes=2,
        chunks=2,
        **{name: body[name] for name in ("library", "created", "attempt", "metadata")},
        digests_xxh3=body["digests"],
    )
    ours_json = json.loads(index_json.encode(ours))
    del body["xxh3"], ours_json["xxh3"]
    assert ours_json == body
    assert list(ours_json) == list(body)


def test_digest_table_and_digests_of_the_format(tmp_path: Path) -> None:
    array = np.arange(10, dtype=np.int16).reshape(5, 2)
    unickpt.save(tmp_path / "x", {"b": array, "a": array[0]}, options=SaveOptions(chunk_bytes=8))
    stored = unickpt.open(tmp_path / "x")
    data = stored.reader.chunks.read_key("unickpt.digests")
    pieces = [array[0:2], array[2:4], array[4:5], array[0]]
    assert stored["b"].chunk == (2, 2)
    assert len(data) == 12 * len(pieces)
    for at, piece in enumerate(pieces):
        row = data[12 * at : 12 * at + 12]
        assert int.from_bytes(row[:8], "little") == xxhash.xxh3_64_intdigest(piece.tobytes())
        assert int.from_bytes(row[8:], "little") == 0


def test_per_process_value_of_the_format(tmp_path: Path) -> None:
    value = {"seed": 7, "state": np.array([1, 2], np.uint8)}
    unickpt.save(tmp_path / "x", {"rng": PerProcess(value)})
    body = json.loads(unickpt.open(tmp_path / "x").reader.chunks.read_key("rng/process_00000"))
    assert body == {
        "tree": {"dict": [["seed", "*"], ["state", "*"]]},
        "values": {"seed": 7},
        "arrays": {"state": {"dtype": "uint8", "shape": [2], "data": "AQI="}},
    }


# --- the schema ---------------------------------------------------------------------------------


def stored_index(path: Any) -> Any:
    return json.loads(unickpt.open(path).reader.chunks.read_key(INDEX_KEY))


TREES: dict[str, Any] = {
    "empty": {},
    "root array": np.zeros(3),
    "root value": 7,
    "nested": {"a": [{"b": (np.zeros(2), None)}, [], ()], 3: np.zeros((0, 2)), "3": 1.5},
    "values": [None, True, -7, 2**80, 1.5, float("nan"), "text", "\udfff", b"\x00"],
    "dtypes": {name: np.zeros(2, dtypes.from_name(name)) for name in dtypes.supported()},
    "dates": [np.zeros(2, "M8[ns]"), np.zeros(2, "m8[10D]"), np.zeros(2, "M8")],
    "boxes": LocalFragments.flat((4, 3), [(0, np.arange(7.0)), (7, np.arange(5.0))]),
    "processes": {"rng": PerProcess({"seed": 1})},
    "binary": {"rng": PerProcess(np.arange(5000))},
}


@pytest.mark.parametrize("name", TREES)
def test_schema_accepts_real_indexes(name: str, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "x", TREES[name], options=SaveOptions(compression="gzip"))
    VALIDATOR.validate(stored_index(tmp_path / "x"))


@pytest.mark.parametrize("name", names())
def test_schema_accepts_the_fixtures(name: str) -> None:
    VALIDATOR.validate(stored_index(unpacked() / name))


def replaced(path: str, value: Any) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            body = body[int(parent) if isinstance(body, list) else parent]
        body[int(last) if isinstance(body, list) else last] = value

    return change


BAD: dict[str, Callable[[Any], None]] = {
    "a member missing": lambda body: body.pop("chunks"),
    "a format that is no number": replaced("format", "1"),
    "another format": replaced("format", 2),
    "no features": lambda body: body.pop("features"),
    "a feature twice": replaced("features", ["patches", "patches"]),
    "an unknown feature": replaced("features", ["telepathy"]),
    "a process too few": replaced("processes", 0),
    "a negative extent": replaced("arrays.w.shape", [-6, 4]),
    "an extent that is no integer": replaced("arrays.w.shape", [6.5, 4]),
    "an extent that is a truth value": replaced("arrays.w.shape", [True, 4]),
    "a huge extent": replaced("arrays.w.shape", [1 << 62, 4]),
    "an empty chunk": replaced("arrays.w.chunk", [0, 4]),
    "too many dimensions": replaced("arrays.w.shape", [1] * 33),
    "an unknown dtype": replaced("arrays.w.dtype", "object"),
    "a date without unit": replaced("arrays.w.dtype", "datetime64[]"),
    "neither layout nor boxes": lambda body: body["arrays"]["w"].pop("layout"),
    "layout and boxes": replaced("arrays.w.boxes", [[[0, 0], [6, 4], [0]]]),
    "a box of two items": replaced("arrays.v.boxes", [[[0], [3]]]),
    "a box that nobody held": replaced("arrays.v.boxes", [[[0], [3], []]]),
    "cut without a layout": replaced("arrays.v.cut", [0]),
    "a mesh with an empty axis": replaced("meshes.0.shape", [0]),
    "a mesh without processes": lambda body: body["meshes"][0].pop("processes"),
    "a layout that is a list": replaced("layouts.0", []),
    "an alias to a number": replaced("aliases", {"a": 3}),
    "a value of unknown type": replaced("values.step", {"complex": "1"}),
    "a value of two types": replaced("values.step", {"int": "0x1", "bytes": ""}),
    "bytes that are no base64": replaced("values.step", {"bytes": "?"}),
    "a digest that is a number": replaced("digests", 7),
    "patches of no chunk": replaced("arrays.w.extra", {"patches": {"chunks": 0, "patches": 1}}),
    "a negative number of reused bytes": replaced("extra.incremental", {"reused": -1}),
    "a per-process value without digest": replaced("per_process.rng", [[3]]),
    "a per-process value with a head of 0": replaced("per_process.rng", [[3, "0" * 16, 0]]),
    "a per-process value of four": replaced("per_process.rng", [[3, "0" * 16, 1, 1]]),
    "an unknown codec": replaced("codecs", [{"name": "crc32c", "configuration": {}}]),
    "a codec without its settings": replaced("codecs", [{"name": "zstd"}]),
    "a codec with an unknown setting": replaced(
        "codecs", [{"name": "zstd", "configuration": {"file": "x"}}]
    ),
    "codes that are none": replaced(
        "codecs", [{"name": "unickpt.quantized", "configuration": {"codes": "int5"}}]
    ),
    "a codec below the first": replaced("arrays.w.codec", -1),
    "an unknown container": replaced("tree", {"set": []}),
    "a container of two kinds": replaced("tree", {"list": [], "tuple": []}),
    "a key that is no key": replaced("tree", {"dict": [[None, "*"]]}),
    "a leaf that is none": replaced("tree", "?"),
}


@pytest.fixture(scope="module")
def sound() -> Any:
    path = "memory://docs/sound"
    mesh = {"axes": ["x"], "shape": [2], "processes": [0, 0]}
    unickpt.save(
        path,
        {
            "w": np.zeros((6, 4)),
            "v": LocalFragments.whole(np.zeros(3)),
            "step": 7,
            "rng": PerProcess(1),
        },
        overwrite=True,
        options=SaveOptions(timing=True),
    )
    body = stored_index(path)
    body["meshes"], body["layouts"] = [mesh], [{"mesh": 0, "dims": [["x"], []]}]
    return body


def sealed(body: Any) -> bytes:
    unsealed = json.dumps({k: v for k, v in body.items() if k != "xxh3"}).encode()[:-1]
    return unsealed + b',"xxh3":"%016x"}' % xxhash.xxh3_64_intdigest(unsealed)


def test_schema_and_reader_accept_what_the_bad_ones_change(sound: Any) -> None:
    VALIDATOR.validate(sound)
    index_json.decode(sealed(sound), "here")


@pytest.mark.parametrize("what", BAD)
def test_schema_and_readers_reject_bad_indexes(what: str, sound: Any) -> None:
    body = copy.deepcopy(sound)
    BAD[what](body)
    assert not VALIDATOR.is_valid(body)
    with pytest.raises((CheckpointCorrupt, UnsupportedFormat)):
        read_all(sealed(body))


def read_all(data: bytes) -> None:
    """What a reader does with an index."""
    index = index_json.decode(data, "here")
    tree_table.outline(index, "here")


def test_members_and_extra_that_are_not_known_are_accepted(sound: Any) -> None:
    body = copy.deepcopy(sound)
    body["later"], body["extra"]["later"] = {"x": 1}, 3
    body["arrays"]["w"]["extra"] = {"later": None}
    for part in (body["meshes"][0], body["layouts"][0], body["arrays"]["w"]):
        part["later"] = [1]
    VALIDATOR.validate(body)
    assert set(index_json.decode(sealed(body), "here").arrays) == {"w", "v"}
