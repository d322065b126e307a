"""What the index says is small to check: memory, time, messages, names."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import xxhash
from support.forging import array, forge, index_of, sealed
from support.forks import Forks
from support.nodes import Away, leaf
from support.reading import read_all, written

import unickpt
from unickpt import CheckpointCorrupt, UnsupportedLeaf
from unickpt.format import index_json
from unickpt.trees import tree


@pytest.mark.parametrize("key", ["unickpt.json", "unickpt.digests"])
def test_bytes_that_were_never_written_take_no_memory(
    key: str, forks: Forks, tmp_path: Path
) -> None:
    """Files of 3 GB that take a few kilobytes on the disk."""
    path, size = tmp_path / "c", 12 << 28
    index, _ = index_of(array("w", (1 << 28,), (1,), dtype="int8"), rows=0)
    text = index_json.encode(index).replace(b'"chunks":0', b'"chunks":268435456')
    text = sealed(__import__("json").loads(text[: text.rindex(b',"xxh3"')] + b"}"))
    there = {"unickpt.json": text, "unickpt.digests": Away("hole", 0, size)}
    if key == "unickpt.json":
        there = {"unickpt.json": Away("hole", 0, size)}
    written(path, leaf(there), hole=b"{")
    os.truncate(path / "hole", size)
    for said in read_all(forks, path):
        assert "hole" in said, said


def test_a_digest_table_of_another_length_is_not_read(forks: Forks, tmp_path: Path) -> None:
    index, _ = index_of(array("w", (4,)))
    text = index_json.encode(index)
    size = 1 << 28
    path = written(
        tmp_path / "c", leaf({"unickpt.json": text, "unickpt.digests": Away("t", 0, size)})
    )
    (path / "t").write_bytes(os.urandom(1 << 20) * 256)
    for said in read_all(forks, path):
        assert f"the digest table has {size} bytes" in said or "no bytes stored" in said, said


def bodied(**fields: Any) -> dict[str, Any]:
    return {
        "format": 1, "features": [], "library": "x", "created": "", "attempt": "", "processes": 1,
        "metadata": {}, "tree": {"dict": []}, "meshes": [], "layouts": [], "arrays": {},
        "aliases": {}, "values": {}, "per_process": {}, "codecs": [], "chunks": 0,
        "digests": f"{xxhash.xxh3_64_intdigest(b''):016x}", **fields,
    }  # fmt: skip


LONG = "x" * (1 << 20)

ENTRY = {"shape": [4], "dtype": "int8", "chunk": [4], "boxes": [[[0], [4], [0]]]}


@pytest.mark.parametrize(
    "fields",
    [
        {"tree": LONG},
        {"tree": {"dict": [[LONG, LONG]]}},
        {"tree": {LONG: 1, "y": 2}},
        {"tree": {"namedtuple": [[LONG, "*"], ["_", "*"]], "type": LONG}},
        {"tree": {"dict": [[LONG, {"set": 1}]]}},
        {"tree": {"dict": [[LONG, "*"]]}},
        {"values": {LONG: {"pickle": LONG}}},
        {"values": {LONG: {"bytes": LONG + "!"}}},
        {"aliases": {LONG: LONG}},
        {"arrays": {LONG: {**ENTRY, "dtype": LONG}}},
        {"arrays": {LONG: {**ENTRY, "shape": [1] * 100_000}}},
        {"arrays": {LONG: {**ENTRY, "boxes": [LONG]}}},
        {"arrays": {LONG: ENTRY}, "tree": {"dict": [[LONG, "*"]]}, "chunks": 1},
        {"meshes": [{"axes": [LONG, LONG], "shape": [1, 1], "processes": [0]}]},
        {"meshes": [{"axes": [], "shape": [1] * 100_000, "processes": [0]}]},
        {"codecs": [{"name": LONG}]},
        {"per_process": {LONG: [LONG]}},
        {"format": LONG},
        {"chunks": LONG},
    ],
)
def test_no_message_is_endless(fields: dict[str, Any], tmp_path: Path) -> None:
    forge(tmp_path, {"unickpt.json": sealed(bodied(**fields)), "unickpt.digests": b""})
    with pytest.raises(unickpt.UnickptError) as caught:
        unickpt.load(tmp_path)
    assert 20 < len(str(caught.value)) < 1500
    with pytest.raises((KeyError, unickpt.UnickptError)) as found:
        unickpt.open(tmp_path)["w"]
    assert len(str(found.value)) < 1500


@pytest.mark.parametrize(
    "fields",
    [
        ["fi", "\ufb01"], ["\u2170f", "x"], ["class"], ["a", "a"], ["_a"], ["__len__"], ["a b"],
        [""], ["1a"], ["a\0"], ["\uff49\uff46"], [1], ["a" * 1000, "b"], ["count", "index"],
    ],
)  # fmt: skip
def test_names_of_fields_come_back_or_are_refused(fields: list[Any], tmp_path: Path) -> None:
    described = {"namedtuple": [[field, "*"] for field in fields], "type": "T"}
    values = {tree.component(field): 1 for field in fields}
    forge(
        tmp_path / "c",
        {"unickpt.json": sealed(bodied(tree=described, values=values)), "unickpt.digests": b""},
    )
    try:
        loaded = unickpt.load(tmp_path / "c")
    except CheckpointCorrupt:
        made = type("T", (tuple,), {"_fields": tuple(fields)})((1,) * len(fields))
        with pytest.raises(UnsupportedLeaf):
            unickpt.save(tmp_path / "d", made)
        return
    assert list(loaded._fields) == fields
    unickpt.save(tmp_path / "d", loaded)
    assert unickpt.load(tmp_path / "d") == namedtuple("T", fields)(*[1] * len(fields))  # type: ignore[misc]


def test_a_mesh_of_very_many_axes_is_refused(tmp_path: Path) -> None:
    mesh = {"axes": [f"a{i}" for i in range(50_000)], "shape": [1] * 50_000, "processes": [0]}
    with pytest.raises(CheckpointCorrupt, match="a mesh has 50000 axes, more than 32"):
        index_json.decode(sealed(bodied(meshes=[mesh])), "here")
