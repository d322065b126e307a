"""Orbax checkpoints that unickpt writes, as Orbax restores them."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.saving import files, in_job

import unickpt
from unickpt import SaveOptions, UnsupportedLeaf
from unickpt.backends.orbax import step_writer

FAST = SaveOptions(fsync=False)
Pair = namedtuple("Pair", "left right")


def state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    w = rng.random((37, 24), np.float32)
    return {
        "params": {
            "dense": {"kernel": w, "bias": rng.random(5).astype(ml_dtypes.bfloat16)},
            "f8": rng.random((3, 4)).astype(ml_dtypes.float8_e4m3fn),
            "i4": np.arange(-8, 8).astype(ml_dtypes.int4),
            "none": np.zeros((0, 3), np.float32),
            "tied": w,
        },
        "opt": [Pair(np.arange(5.0), np.float32(2.5)), (np.ones((2, 3, 4), bool), None), []],
        "empty": {},
        "step": 7,
        "lr": 0.5,
        "flag": True,
        "note": "héllo",
    }


def save(path: Path, tree: Any) -> None:
    unickpt.save(path, tree, options=FAST)


def check(found: Any, expected: Any) -> None:
    if isinstance(expected, Pair):
        expected = found if isinstance(found, Pair) else expected._asdict()
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key, value in expected.items():
            check(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)
    elif isinstance(expected, np.ndarray | np.generic):
        found = np.asarray(found)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == np.asarray(expected).tobytes()
    else:
        assert found == expected


@pytest.mark.integration
@pytest.mark.parametrize("most", [64 << 20, 500])
def test_orbax_restores_a_tree(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import orbax.checkpoint as ocp

    monkeypatch.setattr(step_writer, "CHUNK_BYTES", most)
    save(tmp_path / "c", state())
    unickpt.convert(tmp_path / "c", tmp_path / "ox", to="orbax", options=FAST)
    with ocp.StandardCheckpointer() as checkpointer:
        check(checkpointer.restore(tmp_path / "ox"), state())


@pytest.mark.integration
def test_orbax_restores_onto_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax
    import orbax.checkpoint as ocp

    monkeypatch.setattr(step_writer, "CHUNK_BYTES", 500)
    tree = {
        "w": np.random.default_rng(0).random((16, 24), np.float32),
        "b": np.arange(8, dtype=ml_dtypes.bfloat16),
        "key": jax.random.key(3),
    }
    save(tmp_path / "c", tree)
    unickpt.convert(tmp_path / "c", tmp_path / "ox", to="orbax", options=FAST)
    mesh = jax.make_mesh((2, 4), ("x", "y"), devices=jax.devices()[:8])

    def like(name: str, *axes: str | None) -> Any:
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(tree[name].shape, tree[name].dtype, sharding=spec)

    wanted = {"w": like("w", "y", "x"), "b": like("b", "x"), "key": like("key")}
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "ox", wanted)
    assert found["w"].sharding == wanted["w"].sharding
    check(found["w"], tree["w"])
    check(found["b"], tree["b"])
    assert found["key"].dtype == tree["key"].dtype
    check(jax.random.key_data(found["key"]), np.asarray(jax.random.key_data(tree["key"])))
    assert unickpt.open(tmp_path / "ox").index.arrays["key"].prng is not None


def test_chunks_are_files_of_their_own_from_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_writer, "CHUNK_BYTES", 1 << 17)
    rng = np.random.default_rng(0)
    tree = {"a": {"w": rng.random((300, 301)), "deep": rng.random((2, 3, 150, 151))}, "step": 3}
    save(tmp_path / "c", tree)
    unickpt.convert(tmp_path / "c", tmp_path / "one", to="orbax", options=FAST)

    def run(group: unickpt.ProcessGroup) -> Any:
        mine = SaveOptions(group=group, timeout_s=20, fsync=False)
        return unickpt.convert(tmp_path / "c", tmp_path / "three", to="orbax", options=mine)

    reports = in_job(3, run)
    assert all(report.written_bytes < reports[0].bytes // 2 for report in reports)
    names = files(tmp_path / "one")
    assert "a.deep/1.2.1.0" in names
    assert names == files(tmp_path / "three")
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()
    assert unickpt.diff(tmp_path / "c", tmp_path / "three").same
    unickpt.convert(tmp_path / "c", "memory://orbax/written", to="orbax", options=FAST)
    assert unickpt.diff(tmp_path / "c", "memory://orbax/written").same


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (np.ones(2), "single leaf"),
        ({"a": {"b": np.ones(2)}, "a.b": np.ones(2)}, "'a.b'"),
        ({"a": np.ones(2), "a/0": np.ones(2)}, "'a/0'"),
        ({"..": np.ones(2)}, "rename"),
        ({"x": np.ones(2, ml_dtypes.float8_e4m3), "b": b"1", "i": 1 << 70}, "float8_e4m3"),
        ({"t": np.zeros(2, "M8[s]")}, "datetime64"),
    ],
)
def test_what_orbax_cannot_hold(tree: Any, words: str, tmp_path: Path) -> None:
    save(tmp_path / "c", tree)
    with pytest.raises(UnsupportedLeaf, match=words):
        unickpt.convert(tmp_path / "c", tmp_path / "x", to="orbax", options=FAST)
    assert not (tmp_path / "x").exists()


def test_texts_are_restored_into_targets(tmp_path: Path) -> None:
    """`StandardCheckpointer` takes no text in a target, nor saves one; None in its place restores
    all arrays."""
    import jax
    import orbax.checkpoint as ocp

    w = np.arange(3, dtype=np.float32)
    unickpt.save(tmp_path / "c", {"w": w, "names": ["w", "b"], "step": 3})
    unickpt.convert(tmp_path / "c", tmp_path / "o", to="orbax")
    like = jax.ShapeDtypeStruct((3,), np.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        target = {"w": like, "names": [None, None], "step": 0}
        found = checkpointer.restore(tmp_path / "o", target)
        assert np.array_equal(found["w"], w)
        assert (found["names"], int(found["step"])) == ([None, None], 3)
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "o", item={"w": w, "names": ["", ""], "step": 0})
        assert (found["names"], int(found["step"])) == (["w", "b"], 3)
