"""Orbax checkpoints: as Orbax wrote them, and damaged ones."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import tarfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from support import foreign, s3_server
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound, LoadMismatch
from unickpt.backends.orbax import zarr
from unickpt.cli.app import app
from unickpt.errors import UnickptError, UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite, same

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
P = jax.sharding.PartitionSpec

# The checkpoint or item of each case.
CASES = {
    "ox-v0": "",
    "ox-v0-2procs": "",
    "ox-v0-files": "",
    "ox-v0-zarr3": "",
    "ox-v1": "",
    "ox-v1-checkpointer": "5/state",
}


def unpacked(case: str, folder: Path) -> Path:
    with tarfile.open(foreign.FOLDER / case / "ckpt.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder / "ckpt"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


KINDS: Mapping[str, Mapping[str, Any]] = {
    "ocdbt": {},
    "zarr3": {"use_zarr3": True},
    "files": {"use_ocdbt": False},
    "files of zarr3": {"use_ocdbt": False, "use_zarr3": True},
}


def save(path: Path, tree: Any, kind: str = "ocdbt", chunk_bytes: int = 0, **options: Any) -> Path:
    """Writes an item with `Checkpointer`, or with the functions of version 1."""
    with quietly():
        if kind == "v1":
            from orbax.checkpoint import v1

            v1.save(path, tree)
            return path
        args = None
        if chunk_bytes:
            args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=chunk_bytes), tree)
        handler = ocp.PyTreeCheckpointHandler(**KINDS[kind], **options)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree, save_args=args))
    return path


def restored(path: Path) -> Any:
    """What Orbax itself reads."""
    with quietly(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path)


def keys_of(path: Path) -> Any:
    """The keys of the arrays, to damage them."""
    base = f"file://{path}/"
    is_ocdbt = (path / "manifest.ocdbt").exists()
    return ts.KvStore.open({"driver": "ocdbt", "base": base} if is_ocdbt else base).result()


def edited(path: Path, file: str, change: Callable[[Any], None]) -> Path:
    """Changes a JSON file."""
    content = json.loads((path / file).read_text())
    change(content)
    (path / file).write_text(json.dumps(content))
    return path


def a(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


# --- what Orbax wrote ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_bit_and_value_is_as_orbax_says(case: str, tmp_path: Path) -> None:
    found = unickpt.open(unpacked(case, tmp_path) / CASES[case])
    assert found.reader.format == "orbax"
    assert foreign.differences(case, found) == []
    values = {"opt/1": None, **foreign.expected(case)["values"]}
    assert dict(found.values) == values


def test_layouts_are_those_of_the_mesh(tmp_path: Path) -> None:
    found = unickpt.open(unpacked("ox-v0-2procs", tmp_path)).index.entries
    kernel = found["params/dense/kernel"].layout
    assert kernel is not None
    assert str(kernel.mesh) == "Mesh(data=4, model=2)"
    assert kernel.spec == ("data", "model")
    embed, norm = found["params/embed"].layout, found["params/norm"].layout
    assert embed is not None
    assert norm is not None
    assert (embed.spec, norm.spec) == ((("data", "model"), None), (None,))


def test_a_step_has_its_items(tmp_path: Path) -> None:
    found = unickpt.open(unpacked("ox-v1-checkpointer", tmp_path) / "3")
    assert (found.values["extra/foo/1"], found.values["extra/step"]) == ("bar", 3)
    state = unickpt.open(tmp_path / "ckpt/3/state")
    assert [name.removeprefix("state/") for name in found] == list(state)
    assert found.index.created.startswith("2026-")


def test_a_run_names_its_steps(tmp_path: Path) -> None:
    path = unpacked("ox-v1-checkpointer", tmp_path)
    (path / "7.orbax-checkpoint-tmp-123").mkdir()
    with pytest.raises(CheckpointNotFound, match=r"not one itself \(3, 5\); .*ckpt/5'"):
        unickpt.open(path)


@pytest.mark.parametrize("case", ["ox-v0", "ox-v1", "ox-v1-checkpointer"])
def test_the_tools(case: str, tmp_path: Path) -> None:
    path = unpacked(case, tmp_path) / CASES[case]
    unickpt.convert(path, tmp_path / "own")
    assert unickpt.open(tmp_path / "own").index.entries["key"].prng == "threefry2x32"
    assert not unickpt.diff(path, tmp_path / "own").differences
    assert unickpt.verify(path).ok
    told = CliRunner().invoke(app, ["inspect", str(path)]).output
    assert "uint32 key" in told
    assert "(data, model)" in told


def test_ls_lists_the_steps(tmp_path: Path) -> None:
    path = unpacked("ox-v1-checkpointer", tmp_path)
    shutil.rmtree(path / "5/state")
    (path / "7.orbax-checkpoint-tmp-123").mkdir()
    found = json.loads(CliRunner().invoke(app, ["ls", str(path), "--json"]).output)
    assert [(c["name"], c["arrays"]) for c in found["checkpoints"]] == [("3", 14), ("5", None)]
    assert "'state' is missing" in found["checkpoints"][1]["error"]
    assert CliRunner().invoke(app, ["ls", str(path / "3")]).exit_code == 0


@pytest.mark.parametrize("case", ["ox-v0-2procs", "ox-v0-files", "ox-v1-checkpointer"])
def test_in_an_object_store(
    case: str, tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, case)
    path = unpacked(case, tmp_path)
    store = resolve(f"s3://{case}/run/").store(paths.context())
    for file in path.rglob("*"):
        if file.is_file():
            store.write(str(file.relative_to(path)), file.read_bytes()).result()
    found = unickpt.open(f"s3://{case}/run/{CASES[case]}")
    assert foreign.differences(case, found) == []
    if case == "ox-v1-checkpointer":
        assert "extra/foo/0" in unickpt.open(f"s3://{case}/run/3").values
        with pytest.raises(CheckpointNotFound, match=rf"\(3, 5\).*s3://{case}/run/5"):
            unickpt.open(f"s3://{case}/run")


# --- what Orbax writes here ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "v1"])
def test_every_dtype(kind: str, tmp_path: Path) -> None:
    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
    names += " complex64 complex128 bfloat16 float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn"
    names += " float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int2 int4 float4_e2m1fn"
    state = {
        name: (a(3, 5) % 2).astype(getattr(ml_dtypes, name, None) or np.dtype(name))
        for name in names.split()
    }
    found = unickpt.open(save(tmp_path / "c", state, kind))
    assert list(found) == sorted(state)
    for name, array in state.items():
        assert same(found[name][...], array), name


@pytest.mark.parametrize("kind", [*KINDS, "v1"])
def test_names_are_the_keys_of_the_tree(kind: str, tmp_path: Path) -> None:
    tree = {
        "a.b": a(2),
        "a": {"c": a(3), "b.c": a(7)},
        "x/y": a(4),
        "sp ace": a(2, 2),
        "ünï": {"%2F": a(5), "日本": "語"},
        "": a(6),
        "__x": a(8),
        "list": [a(2), (a(3), 4)],
        "ints": {1: a(1), 10: 2.5},
        "te.x/t~1": "slash",
    }
    found = unickpt.open(save(tmp_path / "c", tree, kind))
    assert {name: found[name].shape for name in found} == {
        "a.b": (2,),
        "a/c": (3,),
        "a/b.c": (7,),
        "x%2Fy": (4,),
        "sp ace": (2, 2),
        "ünï/%252F": (5,),
        "%": (6,),
        "%5F_x": (8,),
        "list/0": (2,),
        "list/1/0": (3,),
        "ints/1": (1,),
    }
    assert found.values == {
        "ünï/日本": "語",
        "list/1/1": 4,
        "ints/10": 2.5,
        "te.x%2Ft~1": "slash",
    }
    assert same(unickpt.load(tmp_path / "c")["x/y"], a(4))


MuNu = collections.namedtuple("MuNu", "mu nu")


def nested() -> Any:
    return {
        "opt": (MuNu(a(2), [a(3), {}]), ()),
        "none": None,
        "empty": {"list": [], "tuple": (), "dict": {}},
        "number": 1 << 40,
        "real": 0.1,
        "flag": True,
        "complex": np.complex64(1 + 2j),
        "half": np.float16(1.5),
        "zero": np.array(3.5),
    }


def same_trees(found: Any, expected: Any) -> bool:
    leaves, shape = jax.tree.flatten(expected)
    others, other_shape = jax.tree.flatten(found)
    return shape == other_shape and all(
        type(x) is type(y) and same(x, np.asarray(y)) for x, y in zip(others, leaves, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_containers_are_those_that_orbax_restores(kind: str, tmp_path: Path) -> None:
    found = unickpt.load(save(tmp_path / "c", nested(), kind))
    expected = restored(tmp_path / "c")
    assert found["complex"].dtype == np.complex64
    expected["complex"] = np.asarray(expected["complex"], np.complex64)
    assert same_trees(found, expected)
    assert found["opt"][0]["nu"][1] == {}
    assert type(found["flag"]) is bool


@pytest.mark.parametrize("kind", ["ocdbt", "v1"])
def test_a_state_of_optax_loads_into_its_own_classes(kind: str, tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    params = {"kernel": jax.numpy.ones((4, 3)), "bias": jax.numpy.zeros(3)}
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {"params": params, "opt": adam.init(params), "step": 3}
    save(tmp_path / "c", state, kind)
    assert unickpt.load(tmp_path / "c")["opt"][0] is None  # an empty namedtuple
    found = unickpt.load(tmp_path / "c", state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert same(found["opt"][1][0].mu["kernel"], np.zeros((4, 3), np.float32))
    with pytest.raises(unickpt.LoadMismatch, match="opt/0"):
        unickpt.load(tmp_path / "c", {**state, "opt": state["opt"][1:]})


def test_containers_with_their_types(tmp_path: Path) -> None:
    from orbax.checkpoint._src.metadata import pytree_metadata_options

    options = pytree_metadata_options.PyTreeMetadataOptions(support_rich_types=True)
    save(tmp_path / "c", nested(), pytree_metadata_options=options)
    opt = unickpt.load(tmp_path / "c")["opt"]
    assert isinstance(opt, tuple)
    assert (type(opt[0]).__name__, opt[0]._fields, opt[1]) == ("MuNu", ("mu", "nu"), ())
    assert same(opt[0].nu[0], a(3))
    like = {"opt": (MuNu(np.empty(2, np.float32), [np.empty(3, np.float32), {}]), ())}
    loaded = unickpt.load(tmp_path / "c", like, strict=False)["opt"]
    assert same(loaded[0].mu, a(2))


@pytest.mark.parametrize("kind", [*KINDS, "v1"])
def test_an_array_without_a_tree(kind: str, tmp_path: Path) -> None:
    found = unickpt.load(save(tmp_path / "c", a(3, 4), kind))
    assert same(found, a(3, 4))


def on_mesh(array: np.ndarray, *spec: Any) -> Any:
    mesh = jax.make_mesh((4, 2), ("x", "y"), devices=jax.devices()[:8])
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("kind", [*KINDS, "v1"])
def test_shards_onto_other_meshes_and_numpy(kind: str, tmp_path: Path) -> None:
    whole = {"w": a(24, 40), "b": a(24, dtype=ml_dtypes.bfloat16), "r": a(5, 3), "s": a()}
    specs = {"w": ("x", "y"), "b": (("y", "x"),), "r": (), "s": ()}
    tree = {name: on_mesh(whole[name], *specs[name]) for name in whole}
    path = save(tmp_path / "c", tree, kind, 0 if kind == "v1" else 64)
    for name, found in unickpt.load(path).items():
        assert same(found, whole[name])
    mesh = jax.make_mesh((2, 3), ("x", "y"), devices=jax.devices()[:6])
    like = {
        name: jax.ShapeDtypeStruct(
            whole[name].shape,
            whole[name].dtype,
            sharding=jax.sharding.NamedSharding(mesh, P("y") if whole[name].ndim else P()),
        )
        for name in ("w", "b", "s")
    }
    for name, found in unickpt.load(path, like, strict=False).items():
        assert found.sharding == like[name].sharding
        assert same(found, whole[name])
    assert same(unickpt.open(path)["w"][5:19:3, 7:], whole["w"][5:19:3, 7:])


def test_into_dtensors(tmp_path: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    save(tmp_path / "c", {"w": on_mesh(a(24, 40), "x", "y")})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        like = {"w": zeros(24, 40, device_mesh=mesh, placements=[Shard(1)])}
        found = unickpt.load(tmp_path / "c", like)["w"]
        assert found is like["w"]
        assert same(found.to_local().numpy(), a(24, 40))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [*KINDS, "v1"])
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_keys_load_as_keys(implementation: str, kind: str, tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(5, impl=implementation), 8)
    one = jax.random.key(3, impl=implementation)
    save(tmp_path / "c", {"many": on_mesh(keys, "x"), "one": one}, kind)
    found = unickpt.load(tmp_path / "c", {"many": keys, "one": one})
    assert (found["many"].dtype, found["one"].dtype) == (keys.dtype, one.dtype)
    assert same(jax.random.key_data(found["many"]), np.asarray(jax.random.key_data(keys)))
    assert same(jax.random.key_data(found["one"]), np.asarray(jax.random.key_data(one)))
    assert unickpt.open(tmp_path / "c").index.entries["many"].prng == implementation


# --- steps and items ----------------------------------------------------------------------------


def manager(path: Path, steps: Mapping[int, Any], **options: Any) -> Path:
    with quietly():
        chosen = ocp.CheckpointManagerOptions(**options)
        with ocp.CheckpointManager(path, options=chosen) as found:
            for step, (args, metrics) in steps.items():
                found.save(step, args=args, metrics=metrics, custom_metadata={"by": "me"})
            found.wait_until_finished()
    return path


def test_items_of_several_kinds(tmp_path: Path) -> None:
    note = {"foo": [1, "bar", None, 1.5, True], "empty": {}, "deep": {"er": []}}
    args = ocp.args.Composite(
        state=ocp.args.StandardSave({"w": a(3)}),
        note=ocp.args.JsonSave(note),
        key=ocp.args.JaxRandomKeySave(jax.random.key(3)),
        numpy=ocp.args.NumpyRandomKeySave(np.random.get_state()),
        array=ocp.args.ArraySave(a(4)),
    )
    path = manager(tmp_path / "run", {4: (args, None)}) / "4"
    (path / "loader").mkdir()
    (path / "loader" / "process_0-of-1.json").write_bytes(b"{}\xff")
    found = unickpt.load(path)
    assert same(found["state"]["w"], a(3))
    assert found["note"] == note
    assert same(found["array"]["checkpoint"], a(4))
    expected = np.asarray(jax.random.key_data(jax.random.key(3)))
    assert same(found["key"]["jax_random_key"]["checkpoint"], expected)
    assert same(found["numpy"]["np_random_key"][1], np.random.get_state()[1])
    assert found["loader"] == {"process_0-of-1.json": b"{}\xff"}
    assert unickpt.open(path).metadata == {"by": "me"}
    assert same(unickpt.load(path / "state")["w"], a(3))


def test_a_state_without_a_name_and_metrics(tmp_path: Path) -> None:
    steps = {step: (ocp.args.StandardSave({"w": a(step)}), {"loss": 0.5}) for step in (9, 10)}
    path = manager(tmp_path / "run", steps, best_fn=lambda m: m["loss"], step_prefix="ckpt")
    found = unickpt.open(path / "ckpt_10")
    assert list(found) == ["w"]
    assert found.metadata == {"by": "me", "metrics": {"loss": 0.5}}
    with pytest.raises(CheckpointNotFound, match=r"\(ckpt_9, ckpt_10\); .*run/ckpt_10'"):
        unickpt.open(path)


def test_json_alone(tmp_path: Path) -> None:
    with quietly(), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "c", {"a": [1, "x"]})
    assert unickpt.load(tmp_path / "c") == {"a": [1, "x"]}


def test_an_item_without_its_list_of_arrays(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": a(3)})
    (path / "_METADATA").unlink()
    with pytest.raises(CheckpointCorrupt, match="_METADATA is missing"):
        unickpt.open(path)


def test_what_is_not_committed_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": a(3)})
    for name in ("c.orbax-checkpoint-tmp", "c.orbax-checkpoint-tmp-1234"):
        shutil.copytree(path, tmp_path / name)
        with pytest.raises(CheckpointNotFound, match=f"{name}: Orbax has not committed it"):
            unickpt.open(tmp_path / name)
    edited(path, "_CHECKPOINT_METADATA", lambda c: c.update(commit_timestamp_nsecs=None))
    with pytest.raises(CheckpointNotFound, match="Orbax has not committed it"):
        unickpt.open(path)
    edited(path, "_CHECKPOINT_METADATA", lambda c: c.pop("commit_timestamp_nsecs"))
    assert same(unickpt.load(path)["w"], a(3))  # as Orbax


def test_the_other_items_are_read_if_one_was_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    v1, path = pytest.importorskip("orbax.checkpoint.experimental.v1"), tmp_path / "c"
    v1.save_checkpointables(path, {"params": {"w": a(3)}, "opt": {"m": a(2)}})
    shutil.rmtree(path / "opt")
    assert list(v1.load_checkpointables(path)) == ["params"]
    found = unickpt.load(path)
    assert list(found) == ["params"]
    assert same(found["params"]["w"], a(3))
    assert "'opt' is missing; was the folder copied as a whole?" in caplog.text
    with pytest.raises(LoadMismatch, match="item 'opt' is missing"):
        unickpt.load(path, {"params": {"w": a(3)}, "opt": {"m": a(2)}})
    shutil.rmtree(path / "params")
    with pytest.raises(CheckpointCorrupt, match="'opt', 'params' are missing"):
        unickpt.open(path)


def test_older_checkpoints_have_fewer_files(tmp_path: Path) -> None:
    path = manager(tmp_path / "run", {4: (ocp.args.StandardSave({"w": a(3)}), None)}) / "4"
    for file in ("_CHECKPOINT_METADATA", "commit_success.txt", "default/commit_success.txt"):
        (path / file).unlink()
    edited(path / "default", "_METADATA", lambda c: c.pop("use_ocdbt"))
    assert same(unickpt.load(path)["w"], a(3))
    with pytest.raises(CheckpointNotFound, match=r"\(4\)"):
        unickpt.open(path.parent)


def test_an_older_step_has_items_of_all_kinds(tmp_path: Path) -> None:
    """Older managers did not record them."""
    args = ocp.args.Composite(
        state=ocp.args.StandardSave({"w": a(3)}), note=ocp.args.JsonSave({"of": [1]})
    )
    path = manager(tmp_path / "run", {4: (args, None)}) / "4"
    (path / "_CHECKPOINT_METADATA").unlink()
    found = unickpt.load(path)
    assert same(found["state"]["w"], a(3))
    assert found["note"] == {"of": [1]}
    (path / "loader.orbax-checkpoint-tmp-3").mkdir()
    with pytest.raises(CheckpointNotFound, match="not committed"):
        unickpt.open(path)


def test_folders_beside_each_other_are_no_items(tmp_path: Path) -> None:
    for name in ("best", "last"):
        save(tmp_path / name, {"w": a(3)})
    with pytest.raises(CheckpointNotFound, match="contains checkpoints"):
        unickpt.open(tmp_path)


# --- parts --------------------------------------------------------------------------------------


def bytes_read() -> int:
    (metric,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return int(metric["values"][0]["value"])


@pytest.mark.parametrize("kind", [*KINDS, "v1"])
def test_a_quarter_reads_a_quarter(kind: str, tmp_path: Path) -> None:
    whole = np.random.default_rng(0).integers(0, 256, (4096, 2048), np.uint8)
    path = save(tmp_path / "c", {"w": on_mesh(whole, "x", "y"), "other": whole.T.copy()}, kind)
    before = bytes_read()
    array = unickpt.open(path)["w"]
    assert bytes_read() - before < 20_000
    before = bytes_read()
    assert same(array[1024:2048], whole[1024:2048])
    assert bytes_read() - before < whole.nbytes / 4 + 20_000


def test_small_chunks_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "c", {"w": a(600, 50), "v": a(70)}, chunk_bytes=200)
    entries = unickpt.open(path).index.entries
    assert (entries["w"].chunk, entries["v"].chunk) == ((600, 50), (70,))
    monkeypatch.setattr(zarr, "READ_BYTES", 1000)
    found = unickpt.open(path)
    assert found.index.entries["w"].chunk == (8, 30)
    assert same(found["w"][3:9, 4:7], a(600, 50)[3:9, 4:7])


# --- the suite ----------------------------------------------------------------------------------


class TestSuite(ReaderSuite):
    has_digests = False
    kind = "ocdbt"

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        state: dict[str, Any] = {}
        for name, value in {**arrays, **values}.items():
            *above, last = name.split("/")
            level = state
            for key in above:
                level = level.setdefault(key, {})
            # Orbax refuses arrays without elements; one that has some becomes one below.
            is_empty = isinstance(value, np.ndarray) and not value.size
            level[last] = np.ones((1, *value.shape[1:]), value.dtype) if is_empty else value
        save(path, state, self.kind, chunk_bytes=1024)
        store = keys_of(path)
        for name in (name for name, array in arrays.items() if not array.size):
            facts = json.loads(store[f"{name}/.zarray"])
            store[f"{name}/.zarray"] = json.dumps({**facts, "shape": list(arrays[name].shape)})

    def damage(self, path: Path, name: str) -> None:
        keys_of(path)[name.replace("/", ".") + "/0.0"] = b"damage"

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zarr, "READ_BYTES", 1)
            yield


class TestSuiteOfFiles(TestSuite):
    kind = "files"


# --- damage -------------------------------------------------------------------------------------


def test_a_missing_chunk_is_an_error_unless_zeros_are_left_out(tmp_path: Path) -> None:
    for kind, key in {"ocdbt": "w/1", "files": "w/1", "zarr3": "w/c/1"}.items():
        path = save(tmp_path / kind, {"w": on_mesh(a(8), "x")}, kind)
        del keys_of(path)[key]
        with pytest.raises(CheckpointCorrupt, match="array 'w'"):
            unickpt.load(path)
        edited(path, "_METADATA", lambda c: c.update(store_array_data_equal_to_fill_value=False))
        assert unickpt.load(path)["w"].tolist() == [1, 0, 3, 4, 5, 6, 7, 8]


def test_a_missing_or_shorter_file_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": a(4000), "v": a(3), "n": 7})
    expected, needed = unickpt.load(path), 0
    for file in sorted(path.glob("**/d/*")):  # not all of them: the database was merged
        kept = file.read_bytes()
        for damage in (file.unlink, lambda f=file, k=kept: f.write_bytes(k[:-20])):
            damage()
            try:
                assert same_trees(unickpt.load(path), expected)
            except CheckpointCorrupt:
                needed += 1
            file.write_bytes(kept)
    assert needed >= 3
    (path / "manifest.ocdbt").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"no manifest\.ocdbt"):
        unickpt.open(path)


def test_files_of_other_saves_are_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "a", {"w": a(4), "v": a(3)}, "files")
    other = save(tmp_path / "b", {"w": a(4), "u": "text"}, "files")
    shutil.copy(other / "_METADATA", path / "_METADATA")
    with pytest.raises(CheckpointCorrupt, match=r"_strings\.json"):
        unickpt.open(path)
    shutil.rmtree(other / "w")
    with pytest.raises(CheckpointCorrupt, match=r"array 'w': there is no 'w/\.zarray'"):
        unickpt.open(other)


def test_an_item_that_is_missing_is_named(tmp_path: Path) -> None:
    path = unpacked("ox-v1-checkpointer", tmp_path) / "5"
    shutil.rmtree(path / "state")
    with pytest.raises(CheckpointCorrupt, match="item 'state' is missing"):
        unickpt.open(path)


def test_two_leaves_in_one_place_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a.b": a(2)})
    entry = {
        "key_metadata": [{"key": "a", "key_type": 2}, {"key": "b", "key_type": 2}],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
    edited(path, "_METADATA", lambda c: c["tree_metadata"].update({"('a', 'b')": entry}))
    with pytest.raises(CheckpointCorrupt, match=r"\['a\.b'\] and \['a', 'b'\] were both written"):
        unickpt.open(path)


def facts(**changes: Any) -> Callable[[Any], None]:
    return lambda content: content.update(changes)


BAD_ARRAYS: dict[str, tuple[type[UnickptError], str, Callable[[Any], None]]] = {
    "a dtype": (UnsupportedFormat, "dtype 'uint4'", facts(dtype="uint4")),
    "fields": (UnsupportedFormat, "dtype", facts(dtype=[["a", "<f4"]])),
    "text": (UnsupportedFormat, "dtype '<U4'", facts(dtype="<U4")),
    "a filter": (UnsupportedFormat, "filters", facts(filters=[{"id": "delta"}])),
    "a compressor": (UnsupportedFormat, "'lzma'", facts(compressor={"id": "lzma"})),
    "a shape": (CheckpointCorrupt, "extents", facts(shape=[-1])),
    "a rank": (CheckpointCorrupt, "chunks", facts(shape=[2, 2])),
    "no chunks": (CheckpointCorrupt, "extents", facts(chunks=[0])),
    "huge chunks": (CheckpointCorrupt, "bytes stored", facts(shape=[1 << 50], chunks=[1 << 50])),
    "large chunks": (CheckpointCorrupt, "bytes stored", facts(shape=[1 << 31], chunks=[1 << 31])),
    "no object": (CheckpointCorrupt, "damaged", lambda c: c.clear()),
}


@pytest.mark.parametrize("kind", ["ocdbt", "files"])
@pytest.mark.parametrize("bad", BAD_ARRAYS)
def test_bad_metadata_of_arrays(bad: str, kind: str, tmp_path: Path) -> None:
    expected, told, change = BAD_ARRAYS[bad]
    store = keys_of(save(tmp_path / "c", {"w": a(4)}, kind))
    content = json.loads(store["w/.zarray"])
    change(content)
    store["w/.zarray"] = json.dumps(content)
    with pytest.raises(expected, match=told) as caught:
        unickpt.open(tmp_path / "c")["w"][:1]
    assert "array 'w'" in str(caught.value)


@pytest.mark.parametrize(
    "file", ["_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0"]
)
def test_damaged_small_files(file: str, tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": on_mesh(a(8), "x"), "t": "x", "k": jax.random.key(0)})
    data = (path / file).read_bytes()
    rng = np.random.default_rng(1)
    bad = [b"", b"[]", b"7", b"{}" if file == "_METADATA" else b"{", b"[" * 100_000, data[:-5]]
    for _ in range(60):
        changed = bytearray(data)
        changed[rng.integers(len(data))] = rng.integers(256)
        bad.append(bytes(changed))
    messages = []
    for number, content in enumerate(bad):
        (path / file).write_bytes(content)
        try:
            unickpt.load(path)
        except UnickptError as error:
            messages.append(str(error))
            continue
        assert number >= 6, content
    assert all(str(path) in message for message in messages)


def test_names_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    save(tmp_path / "secret", {"w": a(4)}, "files")
    path = save(tmp_path / "c", {"w": a(4)}, "files")
    for name in ("../secret/w", str(tmp_path / "secret/w")):

        def change(content: Any, name: str = name) -> None:
            (entry,) = content["tree_metadata"].values()
            entry["key_metadata"][0]["key"] = name

        edited(path, "_METADATA", change)
        with pytest.raises(CheckpointCorrupt, match="leads out of the folder"):
            unickpt.open(path)


def test_only_files_are_opened(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": a(4)}, "files")
    (path / "w/0").unlink()
    os.mkfifo(path / "w/0")
    with pytest.raises(CheckpointCorrupt, match="is a FIFO, not a file"):
        unickpt.load(path)


def test_a_database_of_something_else(tmp_path: Path) -> None:
    base = {"driver": "ocdbt", "base": f"file://{tmp_path}/"}
    ts.KvStore.open(base).result()["a"] = b"b"
    with pytest.raises(CheckpointNotFound, match="no unickpt index"):
        unickpt.open(tmp_path)
