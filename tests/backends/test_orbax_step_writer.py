"""Steps that unickpt exports for Orbax' managers, as Orbax restores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import SaveOptions, UnsupportedLeaf

jax = pytest.importorskip("jax")
orbax = pytest.importorskip("orbax.checkpoint")
import unickpt.integrations.orbax as ours  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),  # Orbax's
    pytest.mark.filterwarnings("ignore:Couldn't find sharding info:UserWarning"),
]
FAST = SaveOptions(fsync=False)


def saved(path: Path, args: Any, **more: Any) -> Path:
    """A step that our manager saved."""
    with ours.CheckpointManager(path, unickpt={"options": FAST}) as manager:
        manager.save(3, args=args, **more)
    return path / "step_3"


def exported(path: Path, to: Path, **options: Any) -> None:
    unickpt.convert(path, to, to="orbax", options=FAST, **options)


def test_every_kind_of_item(tmp_path: Path) -> None:
    args = ours.args
    w, state = jax.numpy.arange(6.0), np.random.RandomState(3).get_state()
    each = args.Composite(
        tree=args.PyTreeSave({"w": w, "none": None, "empty": {}, "n": 2**40}),
        array=args.ArraySave(w),
        number=args.ArraySave(5),
        text=args.JsonSave({"a": [1, None, {"b": 2**70}], "e": []}),
        typed=args.JaxRandomKeySave(jax.random.key(3)),
        raw=args.JaxRandomKeySave(jax.random.PRNGKey(3)),
        numpy=args.NumpyRandomKeySave(state),
    )
    metrics = {"loss": float("nan"), "top": 1}
    step = saved(tmp_path / "run", each, metrics=metrics, custom_metadata={"by": "me"})
    exported(step, tmp_path / "back" / "3")
    theirs, read = orbax.args, orbax.CheckpointManager(tmp_path / "back")
    wanted = theirs.Composite(
        tree=theirs.PyTreeRestore(),
        array=theirs.ArrayRestore(),
        number=theirs.ArrayRestore(),
        text=theirs.JsonRestore(),
        typed=theirs.JaxRandomKeyRestore(),
        raw=theirs.JaxRandomKeyRestore(),
        numpy=theirs.NumpyRandomKeyRestore(),
    )
    found = read.restore(3, args=wanted)
    assert np.asarray(found.tree.pop("w")).tobytes() == np.asarray(w).tobytes()
    assert found.tree == {"none": None, "empty": {}, "n": 2**40}
    assert np.array_equal(found.array, w)
    assert found.number == 5
    assert found.text == {"a": [1, None, {"b": 2**70}], "e": []}
    assert found.typed == jax.random.key(3)
    assert np.array_equal(found.raw, jax.random.PRNGKey(3))
    assert found.numpy[0] == "MT19937"
    assert np.array_equal(found.numpy[1], state[1])
    about = read.metadata(3)
    assert about.custom_metadata == {"by": "me"}
    assert (str(about.metrics["loss"]), about.metrics["top"]) == ("nan", 1)
    assert sorted(about.item_handlers) == sorted([*wanted, "metrics"])
    assert read.all_steps() == [3]
    read.close()


def test_a_key_that_orbax_would_mistake_is_refused(tmp_path: Path) -> None:
    key = ours.args.JaxRandomKeySave(jax.random.key(3, impl="rbg"))
    step = saved(tmp_path / "run", ours.args.Composite(key=key))
    with pytest.raises(UnsupportedLeaf, match="'key' is a random key of 'rbg'"):
        exported(step, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_what_handlers_wrote_goes_back_as_their_files(tmp_path: Path) -> None:
    grain = pytest.importorskip("grain.python")

    def loader() -> Any:
        sampler = grain.IndexSampler(9, grain.NoSharding(), shuffle=True, seed=1, num_epochs=1)
        return iter(grain.DataLoader(data_source=range(9), sampler=sampler, worker_count=0))

    data, again = loader(), loader()
    next(data)
    tree = ours.args.StandardSave({"w": np.ones(2)})
    both = ours.args.Composite(tree=tree, data=grain.PyGrainCheckpointSave(data))
    exported(saved(tmp_path / "run", both), tmp_path / "back" / "3")
    with orbax.CheckpointManager(tmp_path / "back") as manager:
        wanted = orbax.args.Composite(data=grain.PyGrainCheckpointRestore(again))
        manager.restore(3, args=wanted)
    assert next(again) == next(data)


def test_layouts(tmp_path: Path) -> None:
    """A manager's step is a step, what a checkpointer or `unickpt.save` saved is a tree."""
    tree, like = {"a": {"w": np.ones(2)}}, {"a": {"w": np.zeros(2)}}
    step = saved(tmp_path / "run", ours.args.StandardSave(tree), metrics={"x": 1})
    ours.PyTreeCheckpointer().save(tmp_path / "alone", tree)
    ours.Checkpointer(ours.JsonCheckpointHandler()).save(tmp_path / "json", {"k": 1})
    unickpt.save(tmp_path / "plain", tree, options=FAST)
    names = {
        "step": (step, {}, ["default", "metrics"]),
        "tree": (step, {"layout": "tree"}, ["a.w", "array_metadatas"]),
        "part": (unickpt.open(step).under("a"), {}, ["array_metadatas", "w"]),
        "alone": (tmp_path / "alone", {}, ["a.w", "array_metadatas"]),
        "json": (tmp_path / "json", {}, []),
        "plain": (tmp_path / "plain", {}, ["a.w", "array_metadatas"]),
        "made": (tmp_path / "plain", {"layout": "step"}, ["default"]),
    }
    for name, (path, options, folders) in names.items():
        exported(path, tmp_path / "out" / name, **options)
        found = tmp_path / "out" / name
        assert sorted(p.name for p in found.iterdir() if p.is_dir()) == folders, name
        assert json.loads((found / "_CHECKPOINT_METADATA").read_text())["item_handlers"], name
    out, standard = tmp_path / "out", orbax.StandardCheckpointer()
    for path in (out / "tree", out / "alone", out / "plain", out / "step" / "default"):
        assert np.array_equal(standard.restore(path, like)["a"]["w"], [1, 1])
    json_of = orbax.Checkpointer(orbax.JsonCheckpointHandler())
    assert json_of.restore(out / "json") == {"k": 1}
    for name in ("step", "made"):
        (tmp_path / name).mkdir()
        (out / name).rename(tmp_path / name / "7")
        with orbax.CheckpointManager(tmp_path / name) as manager:
            found = manager.restore(7, args=orbax.args.StandardRestore(like))
            assert np.array_equal(found["a"]["w"], [1, 1])
        with orbax.v1.training.Checkpointer(tmp_path / name) as checkpointer:
            found = checkpointer.load_checkpointables(7, {"default": like})
            assert np.array_equal(found["default"]["a"]["w"], [1, 1])
    with pytest.raises(ValueError, match="layout='x'"):
        exported(step, tmp_path / "x", layout="x")


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
