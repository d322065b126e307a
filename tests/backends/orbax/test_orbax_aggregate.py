"""Values in a msgpack file beside the arrays: as Orbax before 0.5 and T5X wrote them.

Orbax writes no such file any more, but reads them: what it restores is what is expected. Their
parts are written by Orbax's own functions, and for T5X as `t5x/checkpoints.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from support import foreign, s3_server
from test_orbax import a, quietly, same_trees, save
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound
from unickpt.backends.orbax import zarr
from unickpt.cli.app import app
from unickpt.errors import UnickptError, UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite, nested, same

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
serialization = pytest.importorskip("flax.serialization")

INLINE = {
    "step": 7,
    "lr": 0.5,
    "flag": True,
    "text": "héllo",
    "none": None,
    "bias": np.arange(5, dtype=np.float32),
    "half": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "number": np.float32(2.5),
}
STORED = {"kernel": a(16, 12), "embed": a(4, 3).astype(ml_dtypes.bfloat16), "scale": a()}


def state() -> dict[str, Any]:
    """A tree of which some is in the file, and some on its own."""
    return {
        "params": {**STORED, "bias": INLINE["bias"], "half": INLINE["half"]},
        "opt": [{"mu": a(3), "count": 3}, {}],
        "step": 7,
        "extra": {key: INLINE[key] for key in ("lr", "flag", "text", "none", "number")},
    }


def is_stored(path: tuple[str, ...]) -> bool:
    return path[-1] in (*STORED, "mu")


def write(path: Path, tree: Any, kind: str, described: bool) -> Path:
    """An item as old versions of Orbax wrote it.

    Arguments:
        path: of the item.
        tree: what is in it.
        kind: of `test_orbax.KINDS`: where arrays are.
        described: whether it has `_METADATA`, as since Orbax 0.2.
    """
    every = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)[0]
    names = {ocp.utils.tuple_path_from_keypath(keys): leaf for keys, leaf in every}
    save(path, tree if described else {
        ".".join(keys): leaf for keys, leaf in names.items() if is_stored(keys)
    }, kind)  # fmt: skip

    def leaf(keys: Any, value: Any) -> Any:
        path = ocp.utils.tuple_path_from_keypath(keys)
        return ocp.utils.leaf_placeholder(".".join(path)) if is_stored(path) else value

    with_texts = jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=lambda x: x is None)
    from orbax.checkpoint import aggregate_handlers

    handler = aggregate_handlers.MsgpackHandler()

    async def serialize() -> Any:
        return await handler.serialize(path / "checkpoint", with_texts)

    asyncio.run(serialize()).result()
    for keys in names:
        if described and not is_stored(keys):  # what is in the file is nowhere else
            shutil.rmtree(path / ".".join(keys), ignore_errors=True)
    for file in ("_CHECKPOINT_METADATA", "commit_success.txt", "_sharding"):
        (path / file).unlink(missing_ok=True)
    if not described:
        (path / "_METADATA").unlink()
        shutil.rmtree(path / "array_metadatas", ignore_errors=True)
    return path


def restored(path: Path, kind: str) -> Any:
    """What Orbax itself reads."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=kind == "ocdbt")
    with quietly(), ocp.Checkpointer(handler) as checkpointer:
        found = checkpointer.restore(path)
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, np.generic) else x, found)


CASES = [(kind, described) for kind in ("ocdbt", "files") for described in (False, True)]


@pytest.mark.parametrize(("kind", "described"), CASES)
def test_every_value_is_as_orbax_restores_it(kind: str, described: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "c", state(), kind, described)
    found = unickpt.open(path)
    assert found.reader.format == "orbax"
    loaded = unickpt.load(path)
    assert same_trees(loaded, restored(path, kind))
    assert same(loaded["params"]["half"], INLINE["half"])
    assert same(loaded["params"]["kernel"], STORED["kernel"])
    assert loaded["extra"]["text"] == "héllo"
    assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 0


def test_all_values_in_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "c", {"w": a(3, 2), "n": 7, "none": None})
    assert same_trees(unickpt.load(path), {"w": a(3, 2), "n": 7, "none": None})


def test_items_and_steps_of_a_run(tmp_path: Path) -> None:
    for step in (3, 5):
        write(tmp_path / f"run/{step}/state", state(), "files", False)
        (tmp_path / f"run/{step}/metrics").mkdir()
        (tmp_path / f"run/{step}/metrics/metrics").write_text('{"loss": 0.5}')
        write(tmp_path / f"flax/checkpoint_{step}", state(), "ocdbt", True)
    assert set(unickpt.load(tmp_path / "run/5")) == {"state"}
    assert same(unickpt.load(tmp_path / "run/3")["state"]["params"]["kernel"], STORED["kernel"])
    for run in ("run", "flax"):
        with pytest.raises(CheckpointNotFound, match=r"contains checkpoints of Orbax .*3, .*5"):
            unickpt.open(tmp_path / run)


# --- T5X ----------------------------------------------------------------------------------------


def written(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(content))
    return folder


def spec_of(name: str, array: np.ndarray, driver: str = "file", **facts: Any) -> dict[str, Any]:
    """As `_get_spec` of T5X, through `ts.Spec` as `register_ts_spec_for_serialization`."""
    path: dict[str, Any] = {"path": name.replace("/", ".")}
    store = {"driver": "file", **path}
    if driver == "gcs":
        store = {"driver": "gcs", "bucket": "t5x-dummy-bucket", **path}
    chunks = [max(1, n // 2) for n in array.shape]
    metadata = {"compressor": {"id": "gzip"}, "shape": list(array.shape), "chunks": chunks}
    spec = {"driver": "zarr", "dtype": array.dtype.name, "kvstore": store, "metadata": metadata}
    found: dict[str, Any] = {**ts.Spec(spec).to_json(), **facts}
    if driver == "old":  # of TensorStore before 0.1.14; T5X reads them, too
        found["path"] = found["kvstore"].pop("path")
    return found


T5X = {
    "target/encoder/wq": a(16, 12),
    "target/token_embedder/embedding": a(6, 4).astype(ml_dtypes.bfloat16),
    "state/param_states/encoder/wq/v_row": a(16),
    "state/param_states/encoder/zeros": np.zeros((4, 4), np.float32),
}


def write_t5x(path: Path, arrays: Mapping[str, np.ndarray], driver: str = "file") -> Path:
    """A checkpoint as `Checkpointer.save` of T5X writes it."""
    content: dict[str, Any] = {"state": {"step": 100}}
    for name, array in arrays.items():
        *above, last = name.split("/")
        level = content
        for key in above:
            level = level.setdefault(key, {})
        level[last] = spec_of(name, array, driver)
        full = spec_of(name, array)
        full["kvstore"]["path"] = f"{path}/{full['kvstore']['path']}"
        if array.size:
            ts.open(full, create=True).result().write(array).result()
    content["target"] = {**content.get("target", {}), "scale": np.float32(2) * np.ones(3)}
    return written(path, {"version": 3, "optimizer": content})


@pytest.mark.parametrize("driver", ["file", "gcs", "old"])
def test_every_bit_of_t5x(driver: str, tmp_path: Path) -> None:
    path = write_t5x(tmp_path / "checkpoint_100", T5X, driver)
    found = unickpt.open(path)
    assert dict(found.values) == {"version": 3, "optimizer/state/step": 100}
    expected = {**T5X, "target/scale": np.float32(2) * np.ones(3)}
    assert set(found) == {f"optimizer/{name}" for name in expected}
    for name, array in expected.items():
        assert same(found[f"optimizer/{name}"][...], array)
    with pytest.raises(CheckpointNotFound, match="checkpoint_100"):
        unickpt.open(tmp_path)


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline = np.arange(300_000, dtype=np.int64)
    path = written(tmp_path / "c", {"a": inline, "b": {"c": inline}})
    reads = foreign.count_reads(monkeypatch)
    found = unickpt.open(path)
    assert sum(count for _, count in reads) < 300_000
    reads.clear()
    assert np.array_equal(found["b/c"][1000:2000], inline[1000:2000])
    assert sum(count for _, count in reads) < 2_500_000


def test_in_an_object_store(tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "aggregate")
    write_t5x(tmp_path / "t5x", T5X)
    write(tmp_path / "run/7/state", state(), "ocdbt", False)
    store = resolve("s3://aggregate/x").store(paths.context())
    for file in tmp_path.rglob("*"):
        if file.is_file():
            store.write(str(file.relative_to(tmp_path)), file.read_bytes()).result()
    found = unickpt.open("s3://aggregate/x/t5x")
    assert same(found["optimizer/target/encoder/wq"][3:5, 1:], T5X["target/encoder/wq"][3:5, 1:])
    loaded = unickpt.load("s3://aggregate/x/run/7")
    assert same(loaded["state"]["params"]["half"], INLINE["half"])
    with pytest.raises(CheckpointNotFound, match=r"contains checkpoints of Orbax .*\(7\)"):
        unickpt.open("s3://aggregate/x/run")


# --- damage -------------------------------------------------------------------------------------


def changed_spec(path: Path, **facts: Any) -> Path:
    content = serialization.msgpack_restore((path / "checkpoint").read_bytes())
    content["optimizer"]["target"]["encoder"]["wq"].update(facts)
    return written(path, content)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"dtype": "float16"}, "float32.*and float16.*of one save"),
        ({"metadata": {"shape": [12, 16]}}, r"\[16, 12\], and float32\[12, 16\].*of one save"),
        ({"metadata": {"shape": "x"}}, "encoder/wq' is damaged"),
        ({"metadata": 5}, "encoder/wq' is damaged"),
        ({"kvstore": {"driver": "file", "path": 5}}, "encoder/wq' is damaged"),
        ({"kvstore": {"driver": "file", "path": "../x"}}, "leads out of the folder"),
        ({"kvstore": {"driver": "file", "path": "/x"}}, "leads out of the folder"),
        ({"kvstore": {"driver": "file", "path": "x"}}, "array 'x': there is no 'x/.zarray'"),
    ],
)
def test_specs_that_contradict_the_arrays(facts: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=says):
        unickpt.open(changed_spec(write_t5x(tmp_path / "c", T5X), **facts))


@pytest.mark.parametrize("facts", [{"driver": "n5"}, {"dtype": "uint16"}])
def test_specs_that_are_not_read(facts: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="'optimizer/target/encoder/wq' is elsewhere"):
        unickpt.open(changed_spec(write_t5x(tmp_path / "c", T5X), **facts))


def test_the_file_alone_says_where_the_arrays_are(tmp_path: Path) -> None:
    path = write_t5x(tmp_path / "c", T5X)
    with pytest.raises(UnsupportedFormat, match="give the path of the folder"):
        unickpt.open(path / "checkpoint")
    with pytest.raises(UnsupportedFormat, match=r"'w' is elsewhere.*GDAPlaceholder"):
        unickpt.open(written(tmp_path / "d", {"w": "//GDAPlaceholder:w"}))


def test_two_names_of_one_place_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c", state(), "files", False)
    with pytest.raises(CheckpointCorrupt, match=r"'a' and 'b' are both in 'params\.kernel'"):
        unickpt.open(written(path, dict.fromkeys("ab", "PLACEHOLDER://params.kernel")))


@pytest.mark.parametrize("described", [False, True])
def test_files_of_other_saves_are_noticed(described: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "c", state(), "files", described)
    others = {**state(), "more": 5} if described else {"params": {"other": "PLACEHOLDER://other"}}
    says = "'more', which _METADATA has not" if described else "array 'other': there is no"
    with pytest.raises(CheckpointCorrupt, match=says):
        unickpt.open(written(path, others))


@pytest.mark.parametrize("kind", ["orbax", "t5x"])
def test_a_damaged_file_is_an_error_or_as_before(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    write(path, state(), "files", True) if kind == "orbax" else write_t5x(path, T5X)
    kept = (path / "checkpoint").read_bytes()
    rng = np.random.default_rng(0)
    for n in range(150):
        damaged = bytearray(kept)
        damaged[rng.integers(len(kept))] = rng.integers(256)
        (path / "checkpoint").write_bytes(bytes(damaged if n % 3 else kept[: len(kept) * n // 150]))
        try:
            unickpt.load(path)
        except UnickptError:
            continue


# --- the suite ----------------------------------------------------------------------------------


class TestSuite(ReaderSuite):
    """Arrays in folders as T5X writes them, and some in the file."""

    has_digests = False

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        content = nested({**arrays, **values})
        for name in ("layers/0/w", "x"):
            if name in arrays:
                *above, last = name.split("/")
                level = content
                for key in above:
                    level = level[key]
                level[last] = spec_of(name, arrays[name])
                full = spec_of(name, arrays[name])
                full["kvstore"]["path"] = f"{path}/{full['kvstore']['path']}"
                ts.open(full, create=True).result().write(arrays[name]).result()
        written(path, content)

    def damage(self, path: Path, name: str) -> None:
        (path / name.replace("/", ".") / "0.0").write_bytes(b"damage")

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        with super().registered(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(zarr, "READ_BYTES", 1)
            yield
