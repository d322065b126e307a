"""What is small on the disk stays small in memory, and only files are opened as files."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.forging import array, database, forge, index_of, sealed
from support.forks import Forks
from support.nodes import Away, files, inner, leaf, leaf_body, manifest, node, plain, varint, zstd

import unickpt
from unickpt import Box, CheckpointCorrupt, LoadOptions, UnsupportedLeaf
from unickpt.arrays import box
from unickpt.format import digest_table, index_json
from unickpt.storage import bounded_zstd
from unickpt.storage import ocdbt_nodes as decoder
from unickpt.storage.kvstore import Damaged
from unickpt.storage.locations import resolve
from unickpt.trees import tree

# Reads a checkpoint in all ways; prints how much more memory that took at its peak than before.
READER = """
import json, resource
import numpy as np
import unickpt
from unickpt import Box, LoadOptions

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

def unverified(stored):
    return [a.read(Box.whole(a.shape), verify=False) for a in map(stored.get, stored)]

def tensorstore(stored):
    return [a.tensorstore().read().result() for a in map(stored.get, stored)]

path, first, said = ARGS[0], peak(), []
for act in (
    lambda: unickpt.load(path),
    lambda: unickpt.load(path, options=LoadOptions(verify=False)),
    lambda: unverified(unickpt.open(path)),
    lambda: tensorstore(unickpt.open(path)),
    lambda: [str(d.reason) for d in unickpt.verify(path).damage],
):
    try:
        said.append(str(act())[:2000])
    except unickpt.UnickptError as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps([said, peak() - first]))
"""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    running = Forks(tmp_path_factory.mktemp("output"))
    yield running
    running.close()


def read_all(forks: Forks, path: Path, most_mb: int = 100) -> list[str]:
    """What each way of reading says; fails where one takes more memory than that, or hangs."""
    ended = forks.wait(forks.start(READER, str(path)))
    assert ended.code == 0, ended.out[-3000:]
    said, grown = ended.last
    assert grown < most_mb, f"{grown} MB"
    found: list[str] = said
    return found


# --- nodes and manifests ------------------------------------------------------------------------


def written(path: Path, root: bytes, height: int = 0, **more: bytes) -> Path:
    """A database whose root node is given; further files by name."""
    path.mkdir()
    (path / "root").write_bytes(root)
    (path / "manifest.ocdbt").write_bytes(manifest("root", 0, len(root), height))
    for name, data in more.items():
        (path / name).write_bytes(data)
    return path


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
    "inline values of 100 MiB": lambda: node(zeros(100), packed=True),
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
    values = resolve(path).values(ts.Context())
    assert values.tree.files("") == set(data)
    assert values.read("k") == b""


MANIFESTS = {
    "2 GB of holes": (b"", 2 << 30),
    "a stream of 100 MB": (
        manifest("x", 0, 9)[:13]
        + b"\x01"
        + zstd((0, bytes(20), 20), *[(1, b"\x01", 1 << 17)] * 800),
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


@given(st.binary(max_size=300), st.integers(0, 300))
def test_a_stream_is_unpacked_as_far_as_asked(data: bytes, size: int) -> None:
    stream = plain(data) if data else zstd((0, b"", 0))
    told, most = bounded_zstd.zstd_sizes(stream)
    assert told <= len(data) <= most or most == len(data)
    if size:
        assert bounded_zstd.zstd_prefix(stream, size) == (
            data[:size] if size <= len(data) else None
        )


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_a_checksum_is_checked(size: int) -> None:
    sound = node(bytes(size))
    assert bounded_zstd.is_sound(sound)
    for at in (0, size // 2, len(sound) - 1):
        changed = bytearray(sound)
        changed[at] ^= 1
        assert not bounded_zstd.is_sound(bytes(changed))


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
    values = resolve(tmp_path).values(ts.Context())
    for key, i in list(keys.items())[::97]:
        assert values.read(key) == str(i).encode() * (1 + i % 40)
        assert values.read(key + "x") is None
    assert resolve(tmp_path).database_facts(ts.Context()).keys == count
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert values.tree.files("") == found - {"manifest.ocdbt"}


# --- what the index vouches for -----------------------------------------------------------------


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


# --- boxes, names, meshes -----------------------------------------------------------------------


def quadratic(boxes: list[Box]) -> bool:
    return any(a.intersect(b) is not None for i, a in enumerate(boxes) for b in boxes[:i])


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    """A shape cut into disjoint boxes, of which one may then be moved."""
    rank = draw(st.integers(1, 4))
    boxes = [Box((0,) * rank, tuple(draw(st.integers(1, 6)) for _ in range(rank)))]
    whole = boxes[0]
    for _ in range(draw(st.integers(0, 8))):
        at = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, rank - 1))
        b = boxes[at]
        if b.shape[dim] > 1:
            middle = draw(st.integers(b.start[dim] + 1, b.stop[dim] - 1))
            stop = (*b.stop[:dim], middle, *b.stop[dim + 1 :])
            start = (*b.start[:dim], middle, *b.start[dim + 1 :])
            boxes[at : at + 1] = [Box(b.start, stop), Box(start, b.stop)]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(boxes) - 1))
        start = [draw(st.integers(0, n - 1)) for n in whole.stop]
        stop = [draw(st.integers(a + 1, n)) for a, n in zip(start, whole.stop, strict=True)]
        boxes[at] = Box(tuple(start), tuple(stop))
    return whole, draw(st.permutations(boxes))


@given(cut_up())
def test_boxes_are_judged_as_by_comparing_all(case: tuple[Box, list[Box]]) -> None:
    whole, boxes = case
    pair = box.overlap(boxes)
    assert (pair is not None) == quadratic(boxes)
    if pair is not None:
        assert boxes[pair[0]].intersect(boxes[pair[1]]) is not None
    size = sum(b.size for b in boxes)
    assert box.fill_exactly(whole, boxes) == (size == whole.size and pair is None)
    hole = box.uncovered(whole, boxes)
    canvas = np.zeros(whole.shape, bool)
    for b in boxes:
        canvas[b.slices] = True
    assert (hole is None) == bool(canvas.all())
    assert hole is None or (hole.size and not canvas[hole.slices].any())


def staircase(n: int) -> list[Box]:
    return [Box((i, i), (2 * n, i + 1)) for i in range(n)]


def pinwheels(n: int) -> list[Box]:
    """Disjoint boxes that no straight cut separates: a ring of four within a ring of four."""
    out = []
    for k in range(n // 4):
        a, b = k, n - k
        out += [Box((a, a), (a + 1, b - 1)), Box((a, b - 1), (b - 1, b))]
        out += [Box((b - 1, a + 1), (b, b)), Box((a + 1, a), (b, a + 1))]
    return out


@pytest.mark.parametrize("make", [staircase, pinwheels])
def test_many_boxes_take_little_time(make: Callable[[int], list[Box]], counted: Any) -> None:
    """The work for twenty times as many boxes is some twenty times more, not four hundred."""
    few, many = make(400), make(8000)
    work = [counted(lambda boxes=boxes: box.overlap(boxes)) for boxes in (few, many)]
    assert work[1] < 60 * work[0], work
    started = time.process_time()  # of what NumPy does within a line, too: it was 10 to 30 s
    assert box.overlap(make(20_000)) is None
    assert time.process_time() - started < 5
    size = max(max(b.stop) for b in few)
    assert box.uncovered(Box.whole((size, size)), few[1:]) is not None


@pytest.fixture
def counted() -> Callable[[Callable[[], Any]], int]:
    """Counts the lines of box.py and the functions in C that a call executes."""
    import sys

    def count(act: Callable[[], Any]) -> int:
        events = [0]

        def trace(frame: Any, event: str, argument: Any) -> Any:
            events[0] += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            act()
        finally:
            sys.settrace(before)
        return events[0]

    return count


def test_keys_of_both_types_take_little_time(counted: Any) -> None:
    keys = [tuple(range(n)) + tuple(f"a{i}" for i in range(n)) for n in (100, 2000)]
    work = [counted(lambda k=k: tree.child_names("dict", k, "")) for k in keys]
    assert work[1] < 30 * work[0], work
    assert tree.child_names("dict", (1, "1", "2", -1, "-1"), "") == [
        "1", "%31", "2", "-1", "%2D1",
    ]  # fmt: skip


def bodied(**fields: Any) -> dict[str, Any]:
    return {
        "format": "1.1", "library": "x", "created": "", "attempt": "", "processes": 1,
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
    tree = {"namedtuple": [[field, "*"] for field in fields], "type": "T"}
    values = {tree.component(field): 1 for field in fields}
    forge(
        tmp_path / "c",
        {"unickpt.json": sealed(bodied(tree=tree, values=values)), "unickpt.digests": b""},
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


# --- files that are none ------------------------------------------------------------------------

ZSTD = unickpt.SaveOptions(compression="zstd", fsync=False)


@pytest.fixture(params=[None, "zstd"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    options = unickpt.SaveOptions(compression=request.param, fsync=False)
    unickpt.save(tmp_path / "c", {"w": np.arange(50_000.0)}, options=options)
    return tmp_path / "c"


def leads(path: Path) -> list[Path]:
    """The files that a reader opens: the manifest, nodes, and data."""
    values = resolve(path).values(ts.Context())
    return [path / "manifest.ocdbt", *(path / name for name in sorted(values.tree.files("")))]


def test_only_files_are_opened(saved: Path, forks: Forks) -> None:
    def bind(file: Path) -> None:
        here = os.getcwd()
        os.chdir(file.parent)  # a socket's path must be short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(file.name)
        finally:
            os.chdir(here)

    makers: dict[str, Callable[[Path], object]] = {
        "a FIFO": os.mkfifo,
        "a socket": bind,
        "a directory": os.mkdir,
    }
    opened = leads(saved)
    assert len(opened) == 3
    for file in opened:
        kept = file.with_suffix(".kept")
        file.rename(kept)
        for kind, make in makers.items():
            make(file)
            for said in read_all(forks, saved):
                assert f"{file} is {kind}, not a file" in said, said
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        kept.rename(file)
    assert unickpt.verify(saved).ok


def test_a_lock_is_a_file(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name, act in {
        "run/.unickpt.lock": lambda: unickpt.Checkpointer(tmp_path / "run").save(
            1, {"w": 1}, wait=True
        ),
        "c/manifest.ocdbt.__lock": lambda: unickpt.save(tmp_path / "c", {"w": 1}),
    }.items():
        lock = tmp_path / name
        lock.parent.mkdir()
        for make in (lambda f: f.symlink_to(precious), lambda f: os.mkfifo(f)):
            make(lock)
            with pytest.raises(unickpt.UnickptError, match="is not a regular file; remove it"):
                act()
            assert stat.S_ISLNK(lock.lstat().st_mode) or stat.S_ISFIFO(lock.lstat().st_mode)
            lock.unlink()
    assert precious.read_text() == "mine"


SAVED_BY_TWO = """
import numpy as np, unickpt
path, index = ARGS
group = unickpt.ProcessGroup(index, 2, "s")
options = unickpt.SaveOptions(group=group, timeout_s=20, fsync=False)
try:
    print(unickpt.save(path, {"w": np.ones(3)}, options=options).arrays)
except unickpt.UnickptError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "who"),
    [("records/00001.ok", 0), ("notes/error-00001", 0), ("notes/request", 1)],
)
def test_what_processes_tell_each_other_is_in_files(
    name: str, who: int, forks: Forks, tmp_path: Path
) -> None:
    """A FIFO would block a process for ever; a link may lead to any file."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for number, make in enumerate((os.mkfifo, lambda f: f.symlink_to(precious))):
        path = tmp_path / str(number)
        file = path / "processes/s-000000" / name
        file.parent.mkdir(parents=True)
        make(file)
        out = forks.wait(forks.start(SAVED_BY_TWO, str(path), who)).out
        assert f"{file} is " in out, out
        assert "a FIFO, not a file" in out or "outside of the checkpoint's folder" in out
    assert precious.read_text() == "mine"


def test_a_reader_of_locks_is_not_blocked(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run/.unickpt.lock")
    os.mkfifo(tmp_path / "run/manifest.ocdbt.exclusive.__lock")
    out = forks.wait(
        forks.start(
            """

from unickpt.runs import remnants
from unickpt.storage import local_locks
print(remnants.find(ARGS[0]).holder)
print(local_locks._why_held(ARGS[0] + "/manifest.ocdbt.exclusive.__lock"))
""",
            str(tmp_path / "run"),
        )
    ).out
    assert "None\n" in out
    assert "another process has held it" in out


def test_a_link_does_not_lead_out(saved: Path, forks: Forks, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folders = {file.parent for file in leads(saved)} - {saved}
    for entry in [*leads(saved), *folders]:
        moved = outside / entry.name
        shutil.move(entry, moved)
        entry.symlink_to(moved)
        for said in read_all(forks, saved):
            assert "outside of the checkpoint's folder" in said, said
        entry.unlink()
        inside = saved / "inside"
        shutil.move(moved, inside)
        entry.symlink_to(inside)
        assert unickpt.verify(saved).ok, "a link that stays inside is fine"
        entry.unlink()
        shutil.move(inside, entry)
    for file in leads(saved):
        os.link(file, outside / file.name)
    assert unickpt.verify(saved).ok, "a file may have several names"
    saved.rename(tmp_path / "elsewhere")
    saved.symlink_to(tmp_path / "elsewhere")
    assert unickpt.verify(saved).ok, "the folder itself may be a link"
    (tmp_path / "above").symlink_to(tmp_path)
    assert unickpt.verify(tmp_path / "above" / "c").ok, "and lie below one"
    options = LoadOptions(verify=False)
    assert unickpt.load(tmp_path / "above" / "c", options=options)["w"][9] == 9


def test_the_decoder_ends_where_bytes_do() -> None:
    """Every beginning of a node is refused, never misread."""
    body = leaf({f"k{i}": Away("f", i, 1) if i % 2 else b"v" for i in range(40)})[14:-4]
    place = decoder.Place("x", 0, 0)
    for size in range(len(body)):
        for packed in (False, True):
            data = node(plain(body[:size]) if packed and size else body[:size], packed=packed)
            with pytest.raises(Damaged):
                decoder.node(data, place, 0, b"", decoder.Budget())
    assert decoder.node(node(body), place, 0, b"", decoder.Budget()).keys[0] == b"k0"
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
        decoder.node(data, decoder.Place("x", 0, 0), 0, b"", decoder.Budget())
