"""Steps that unickpt exports for Orbax' managers, as Orbax restores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import SaveOptions

jax = pytest.importorskip("jax")
orbax = pytest.importorskip("orbax.checkpoint")
from unickpt.integrations.orbax import Handler  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),  # Orbax's
    pytest.mark.filterwarnings("ignore:Couldn't find sharding info:UserWarning"),
]
FAST = SaveOptions(fsync=False)


def exported(path: Path, to: Path, **options: Any) -> None:
    unickpt.convert(path, to, to="orbax", options=FAST, **options)


def test_layouts(tmp_path: Path) -> None:
    """A tree is for checkpointers, a step for managers, with the metrics of our own."""
    tree, like = {"a": {"w": np.ones(2)}}, {"a": {"w": np.zeros(2)}}
    with unickpt.Checkpointer(tmp_path / "run", options=FAST) as run:
        run.save(3, tree, metrics={"loss": float("nan"), "top": 1.0})
    names: dict[str, tuple[dict[str, Any], list[str]]] = {
        "tree": ({}, ["a.w", "array_metadatas"]),
        "named": ({"layout": "tree"}, ["a.w", "array_metadatas"]),
        "step": ({"layout": "step"}, ["default", "metrics"]),
    }
    for name, (options, folders) in names.items():
        found = tmp_path / "out" / name / "7"
        exported(tmp_path / "run" / "step_3", found, **options)
        assert sorted(p.name for p in found.iterdir() if p.is_dir()) == folders, name
        assert json.loads((found / "_CHECKPOINT_METADATA").read_text())["item_handlers"], name
    out, standard = tmp_path / "out", orbax.StandardCheckpointer()
    for path in (out / "tree" / "7", out / "step" / "7" / "default"):
        assert np.array_equal(standard.restore(path, like)["a"]["w"], [1, 1])
    with orbax.CheckpointManager(out / "step") as manager:
        found = manager.restore(7, args=orbax.args.StandardRestore(like))
        assert np.array_equal(found["a"]["w"], [1, 1])
        assert manager.all_steps() == [7]
        metrics = manager.metrics(7)
        assert (str(metrics["loss"]), metrics["top"]) == ("nan", 1)
    with orbax.v1.training.Checkpointer(out / "step") as checkpointer:
        found = checkpointer.load_checkpointables(7, {"default": like})
        assert np.array_equal(found["default"]["a"]["w"], [1, 1])
    with pytest.raises(ValueError, match="layout='x'"):
        exported(tmp_path / "run" / "step_3", tmp_path / "x", layout="x")


def test_the_metadata_of_a_tree_that_our_handler_saved_go_with_it(tmp_path: Path) -> None:
    with orbax.Checkpointer(Handler()) as checkpointer:
        saved = orbax.args.PyTreeSave({"w": np.ones(2)}, custom_metadata={"by": "me"})
        checkpointer.save(tmp_path / "a", args=saved)
    exported(tmp_path / "a", tmp_path / "b")
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        about = checkpointer.metadata(tmp_path / "b").item_metadata
        assert about.custom_metadata == {"by": "me"}
        assert isinstance(checkpointer.restore(tmp_path / "b")["w"], np.ndarray)


def test_orbax_restores_into_an_nnx_state(tmp_path: Path) -> None:
    nnx, linen = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    box = linen.Partitioned(jax.numpy.ones(3), ("a",))
    unickpt.save(tmp_path / "c", {"model": model, "box": box}, options=FAST)
    exported(tmp_path / "c", tmp_path / "x")
    assert "model/layers/0/kernel/value" in unickpt.open(tmp_path / "x")
    like = {"model": nnx.state(model), "box": box}
    with orbax.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "x", like)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), found, like)
    assert jax.tree.all(same)
    again = unickpt.load(tmp_path / "x", {"model": nnx.state(model)}, unexpected="skip")
    assert np.array_equal(again["model"]["layers"][0]["kernel"], model.layers[0].kernel)
