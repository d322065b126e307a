"""CheckpointManager of unickpt.integrations.orbax: does as Orbax's own, and restores its steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server

import unickpt
from unickpt import CheckpointExists, HintError, LaterStepsExist, LoadMismatch, UnsupportedLeaf
from unickpt.storage import paths

jax = pytest.importorskip("jax")
theirs = pytest.importorskip("orbax.checkpoint")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import unickpt.integrations.orbax as ours  # noqa: E402

pytestmark = [
    pytest.mark.integration,  # imports Orbax
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]
BOTH = pytest.mark.parametrize("ocp", [theirs, ours], ids=["orbax", "unickpt"])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Orbax logs each step."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def tree(number: int) -> dict[str, Any]:
    return {"w": jnp.full((8, 2), number, jnp.bfloat16), "n": number, "x": [np.arange(3.0)]}


def abstract(spec: PartitionSpec) -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    w = jax.ShapeDtypeStruct((8, 2), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    return {"w": w, "n": 0, "x": [np.zeros(3)]}


def equal(found: Any, wanted: Any) -> bool:
    return jax.tree.structure(found) == jax.tree.structure(wanted) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    )


# --- the same with both -------------------------------------------------------------------------


@BOTH
def test_restore_args_of_a_whole_tree_and_leaves_that_only_say_what_is_wanted(
    ocp: Any, tmp_path: Path
) -> None:
    saved = {"a": np.arange(4, dtype=np.float32), "b": np.ones(3, np.float32), "step": 3}
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec())
    hows = {name: ocp.ArrayRestoreArgs(sharding=sharding) for name in ("a", "b")}
    hows["step"] = ocp.RestoreArgs()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=ocp.args.PyTreeSave(saved))
        manager.wait_until_finished()
        part = ocp.args.PyTreeRestore({"a": 0}, restore_args=hows, partial_restore=True)
        found = manager.restore(0, args=part)
        assert list(found) == ["a"]
        assert found["a"].sharding == sharding
        assert np.array_equal(found["a"], saved["a"])
        wanted = {"a": object(), "b": object(), "step": object()}
        found = manager.restore(0, args=ocp.args.PyTreeRestore(wanted, restore_args=hows))
        assert all(np.array_equal(found[name], saved[name]) for name in saved)
        assert found["b"].sharding == sharding
        if ocp is ours:
            hows.pop("b")
            with pytest.raises(ValueError, match=r"restore_args= has nothing for \['b'\]"):
                manager.restore(0, args=ocp.args.PyTreeRestore(wanted, restore_args=hows))


@BOTH
def test_one_item_on_another_mesh(ocp: Any, tmp_path: Path) -> None:
    like = abstract(PartitionSpec("b", None))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() is None
        assert manager.all_steps() == []
        assert manager.save(3, args=ocp.args.StandardSave(tree(3))) is True
        assert manager.latest_step() == 3
        manager.wait_until_finished()
        manager.check_for_errors()
        found = manager.restore(3, args=ocp.args.StandardRestore(like))
    assert equal(found, tree(3))
    assert found["w"].sharding == like["w"].sharding
    assert like["x"][0].tolist() == [0, 0, 0]  # the user's own is not filled


@BOTH
def test_what_is_kept_and_what_is_best(ocp: Any, tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        keep_period=4,
        save_interval_steps=2,
        save_on_steps=[3],
        best_fn=lambda metrics: metrics["loss"],
        best_mode="min",
    )
    run = tmp_path / "run"
    with ocp.CheckpointManager(run, options=options, metadata={"a": 1}) as manager:
        saved = [
            manager.save(
                step,
                args=ocp.args.StandardSave(tree(step)),
                metrics={"loss": abs(step - 5)},
                custom_metadata={"at": step},
            )
            for step in range(1, 9)
        ]
        manager.wait_until_finished()
        # 1: the first; 3: asked for. 8 is a multiple of 4.
        assert saved == [True, True, True, True, False, True, False, True]
        assert manager.all_steps() == [4, 6, 8]
        assert manager.best_step() == 6
        assert manager.latest_step() == 8
        assert manager.metrics(6) == {"loss": 1}
        assert manager.metadata(6).custom_metadata == {"at": 6}
        assert manager.metadata().custom_metadata == {"a": 1}
    with ocp.CheckpointManager(run, options=options, metadata={"a": 2}) as manager:
        assert manager.all_steps() == [4, 6, 8]
        assert manager.best_step() == 6
        assert manager.metadata().custom_metadata == {"a": 1}
        assert manager.should_save(10)
        assert not manager.should_save(8)
        manager.delete(6)
        with pytest.raises(FileNotFoundError):
            manager.delete(6)
        assert manager.all_steps() == [4, 8]


@BOTH
def test_items_with_names(ocp: Any, tmp_path: Path) -> None:
    extra = {"lr": 0.5, "names": ["a", None], "deep": {"empty": {}, "flag": True}}
    with ocp.CheckpointManager(
        tmp_path, item_names=("state", "extra", "key", "rng", "a")
    ) as manager:
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree(1)),
            extra=ocp.args.JsonSave(extra),
            key=ocp.args.JaxRandomKeySave(jax.random.key(5)),
            rng=ocp.args.NumpyRandomKeySave(np.random.RandomState(3).get_state()),
            a=ocp.args.ArraySave(jnp.ones(3)),
        )
        assert manager.save(1, args=args)
        manager.wait_until_finished()
        found = manager.restore(
            1,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(tree(0)),
                extra=ocp.args.JsonRestore(),
                key=ocp.args.JaxRandomKeyRestore(),
                rng=ocp.args.NumpyRandomKeyRestore(),
                a=ocp.args.ArrayRestore(),
            ),
        )
        assert sorted(found) == ["a", "extra", "key", "rng", "state"]
        assert equal(found.state, tree(1))
        assert found.extra == extra
        assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(5))).all()
        again = np.random.RandomState()
        again.set_state(found.rng)
        assert again.random() == np.random.RandomState(3).random()
        assert np.asarray(found.a).tolist() == [1, 1, 1]
        only = manager.restore(1, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))
        assert list(only) == ["extra"]
        with pytest.raises(ValueError, match="Composite"):
            manager.save(2, args=ocp.args.StandardSave(tree(2)))


@BOTH
def test_restore_args_say_dtype_sharding_and_type(ocp: Any, tmp_path: Path) -> None:
    like = abstract(PartitionSpec("a", "b"))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(tree(7)))
        manager.wait_until_finished()
        how = ocp.checkpoint_utils.construct_restore_args(like)
        found = manager.restore(1, args=ocp.args.PyTreeRestore(like, restore_args=how))
        assert equal(found, tree(7))
        assert found["w"].sharding == like["w"].sharding
        one = {"w": ocp.ArrayRestoreArgs(sharding=like["w"].sharding, dtype=jnp.float32)}
        part = ocp.args.PyTreeRestore({"w": like["w"]}, restore_args=one, partial_restore=True)
        found = manager.restore(1, args=part)
        assert list(found) == ["w"]
        assert found["w"].dtype == jnp.float32
        assert (np.asarray(found["w"]) == 7).all()
        with pytest.raises(ValueError, match=r"structure|unexpected"):
            manager.restore(1, args=ocp.args.PyTreeRestore({"w": like["w"]}))


@BOTH
def test_a_step_is_not_saved_twice(ocp: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.save(1, args=ocp.args.StandardSave(tree(1)))
        assert not manager.save(1, args=ocp.args.StandardSave(tree(1)))
        with pytest.raises(ValueError, match="exists"):
            manager.save(1, args=ocp.args.StandardSave(tree(1)), force=True)
        manager.wait_until_finished()


@BOTH
def test_a_manager_that_only_reads(ocp: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree(1)))
    before = sorted(tmp_path.rglob("*"))
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert not manager.should_save(2)
        assert not manager.save(2, args=ocp.args.StandardSave(tree(2)))
        manager.delete(1)
        assert equal(manager.restore(1, args=ocp.args.StandardRestore(tree(0))), tree(1))
    assert sorted(tmp_path.rglob("*")) == before


@BOTH
def test_grains_iterator_goes_on(ocp: Any, tmp_path: Path) -> None:
    grain = pytest.importorskip("grain.python")

    def iterator() -> Any:
        sampler = grain.IndexSampler(30, grain.NoSharding(), shuffle=True, seed=1, num_epochs=1)
        return iter(grain.DataLoader(data_source=range(30), sampler=sampler, worker_count=0))

    data = iterator()
    first = [next(data) for _ in range(4)]
    with ocp.CheckpointManager(tmp_path) as manager:
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(tree(1)), data=grain.PyGrainCheckpointSave(data)
        )
        manager.save(4, args=args)
    rest = [next(data) for _ in range(4)]
    again = iterator()
    with ours.CheckpointManager(tmp_path) as manager:
        args = ours.args.Composite(data=grain.PyGrainCheckpointRestore(again))
        assert manager.restore(4, args=args).data is again
    assert [next(again) for _ in range(4)] == rest != first


# --- Orbax's steps, in the same folder ----------------------------------------------------------


def test_a_run_of_orbax_goes_on(tmp_path: Path) -> None:
    names = {"item_names": ("state", "extra")}
    options = theirs.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=6)
    with theirs.CheckpointManager(tmp_path, options=options, **names) as manager:
        for step in (10, 20):
            args = theirs.args.Composite(
                state=theirs.args.StandardSave(tree(step)), extra=theirs.args.JsonSave({"s": step})
            )
            manager.save(step, args=args)
    keep = ours.CheckpointManagerOptions(max_to_keep=1)
    with ours.CheckpointManager(tmp_path, options=keep, **names) as manager:
        assert manager.all_steps() == [10, 20]
        restore = ours.args.Composite(
            state=ours.args.StandardRestore(tree(0)), extra=ours.args.JsonRestore()
        )
        found = manager.restore(None, args=restore)
        assert equal(found.state, tree(20))
        assert found.extra == {"s": 20}
        assert sorted(manager.restore(10)) == ["extra", "state"]
        assert not manager.should_save(20)
        with pytest.raises(LaterStepsExist, match="Orbax saved"):
            manager.save(15, args=_composite(15), force=True)
        with pytest.raises(ours.StepAlreadyExistsError, match="saved by Orbax"):
            manager.save(20, args=_composite(20), force=True)
        # Orbax's own arguments are taken as well.
        args = theirs.args.Composite(state=theirs.args.StandardSave(tree(30)))
        assert manager.save(30, args=args)
        assert manager.save(40, args=args)
        manager.wait_until_finished()
        assert manager.all_steps() == [10, 20, 40]  # never Orbax's own
        with pytest.raises(CheckpointExists, match="written by Orbax"):
            manager.delete(10)
        wanted = theirs.args.Composite(state=theirs.args.StandardRestore(tree(0)))
        assert equal(manager.restore(40, args=wanted).state, tree(30))
    with theirs.CheckpointManager(tmp_path, options=options) as manager:
        assert list(manager.all_steps()) == [10, 20]


def _composite(step: int) -> Any:
    return ours.args.Composite(state=ours.args.StandardSave(tree(step)))


def test_a_step_of_orbax_that_was_not_committed_does_not_count(tmp_path: Path) -> None:
    with theirs.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=theirs.args.StandardSave(tree(1)))
    (tmp_path / "1").rename(tmp_path / "2.orbax-checkpoint-tmp-3")
    (tmp_path / "7").mkdir()
    with ours.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == []


def test_steps_of_orbax_with_our_names_stay(tmp_path: Path) -> None:
    options = theirs.CheckpointManagerOptions(step_prefix="step")
    with theirs.CheckpointManager(tmp_path, options=options) as manager:
        for step in (1, 2):
            manager.save(step, args=theirs.args.StandardSave(tree(step)))
    keep = theirs.CheckpointManagerOptions(step_prefix="step", max_to_keep=1)
    before = sorted(tmp_path.glob("step_[12]/**/*"))
    with ours.CheckpointManager(tmp_path, options=keep) as manager:
        for step in (3, 4):
            manager.save(step, args=ours.args.StandardSave(tree(step)))
            manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 4]
        assert equal(manager.restore(2, args=ours.args.StandardRestore(tree(0))), tree(2))
    assert sorted(tmp_path.glob("step_[12]/**/*")) == before
    assert not (tmp_path / "step_3").exists()


def test_a_step_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    for ocp in (ours, theirs):
        with ocp.CheckpointManager(tmp_path) as manager:
            if ocp is theirs:
                manager.save(1, args=ocp.args.StandardSave(tree(1)))
            else:
                manager.save(1, args=ocp.args.StandardSave(tree(2)))
    with pytest.raises(CheckpointExists, match="step 1 is there twice"):
        ours.CheckpointManager(tmp_path)


def test_object_storage(tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "orbax-run")
    with theirs.CheckpointManager(tmp_path) as manager:
        args = theirs.args.Composite(
            state=theirs.args.StandardSave(tree(1)), extra=theirs.args.JsonSave({"s": 1})
        )
        manager.save(1, args=args)
    store = paths.resolve("s3://orbax-run/run/").store(paths.context())
    for path in tmp_path.rglob("*"):
        if path.is_file():
            store.write(str(path.relative_to(tmp_path)), path.read_bytes()).result()
    keep = ours.CheckpointManagerOptions(max_to_keep=2)
    with ours.CheckpointManager("s3://orbax-run/run", options=keep) as manager:
        assert manager.all_steps() == [1]
        restore = ours.args.Composite(
            state=ours.args.StandardRestore(tree(0)), extra=ours.args.JsonRestore()
        )
        found = manager.restore(None, args=restore)
        assert equal(found.state, tree(1))
        assert found.extra == {"s": 1}
        for step in (2, 3, 4):
            manager.save(step, args=_composite(step))
        manager.wait_until_finished()
    with ours.CheckpointManager("s3://orbax-run/run") as manager:
        assert manager.all_steps() == [1, 3, 4]
        assert str(manager.directory) == "s3://orbax-run/run"
        wanted = ours.args.Composite(state=ours.args.StandardRestore(tree(0)))
        assert equal(manager.restore(4, args=wanted).state, tree(4))


# --- ours ---------------------------------------------------------------------------------------


def test_a_step_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ours.args.StandardSave(tree(3)))
    found = unickpt.load(tmp_path / "step_3")
    assert found["n"] == 3
    assert found["w"].shape == (8, 2)
    unickpt.verify(tmp_path / "step_3")


def test_a_placeholder_is_not_restored(tmp_path: Path) -> None:
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ours.args.StandardSave(tree(3)))
        like = tree(0) | {"w": ours.PLACEHOLDER}
        found = manager.restore(3, args=ours.args.StandardRestore(like))
    assert found["w"] is ...
    assert found["n"] == 3


def test_metadata_can_be_restored_into(tmp_path: Path) -> None:
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ours.args.StandardSave(tree(3)))
        known = manager.item_metadata(3)
        assert known.tree["w"].shape == (8, 2)
        assert known.tree["n"].dtype is int
        found = manager.restore(3, args=ours.args.StandardRestore(known))
    assert equal(found, tree(3))
    assert isinstance(found["w"], jax.Array)


def test_a_failed_save_is_raised_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ours.CheckpointManagerOptions(max_to_keep=1)
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=ours.args.StandardSave(tree(1)))
        manager.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr("unickpt.saving.task.SaveTask.run", _full)
            manager.save(2, args=ours.args.StandardSave(tree(2)))
            with pytest.raises(OSError, match="disk is full"):
                manager.wait_until_finished()
        assert manager.all_steps() == [1]
        assert manager.save(2, args=ours.args.StandardSave(tree(2)))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]


def _full(*_: Any) -> Any:
    raise OSError("the disk is full")


def test_the_best_step_goes_only_when_a_better_one_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ours.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda m: m["score"])
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        for step, score in ((1, 5), (2, 1), (3, 1)):
            args = ours.args.StandardSave(tree(step))
            manager.save(step, args=args, metrics={"score": score})
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]  # the best, and the newest
        monkeypatch.setattr("unickpt.saving.task.SaveTask.run", _full)
        manager.save(4, args=ours.args.StandardSave(tree(4)), metrics={"score": 9})
        with pytest.raises(OSError, match="disk is full"):
            manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_1", "step_3"]


def test_what_was_saved_otherwise_is_named(tmp_path: Path) -> None:
    with ours.CheckpointManager(tmp_path, item_names=("a", "b")) as manager:
        args = ours.args.Composite(a=ours.args.JsonSave({"x": 1}), b=ours.args.StandardSave([1]))
        manager.save(1, args=args)
        manager.wait_until_finished()
        with pytest.raises(LoadMismatch, match="'a' was saved with JsonSave"):
            manager.restore(1, args=ours.args.Composite(a=ours.args.StandardRestore()))
        with pytest.raises(LoadMismatch, match="no item 'c'; there are a, b"):
            manager.restore(1, args=ours.args.Composite(c=ours.args.StandardRestore()))
        with pytest.raises(ours.StepNotFoundError, match="no step 2"):
            manager.restore(2)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (ours.args.StandardRestore(strict=False), "strict=False"),
        (ours.args.StandardRestore(support_layout=True), "support_layout=True"),
        (ours.args.PyTreeRestore(transforms={"a": 1}), r"transforms="),
        (theirs.args.PyTreeRestore(legacy_transform_fn=print), "legacy_transform_fn="),
    ],
)
def test_arguments_of_restore_that_are_refused(args: Any, match: str, tmp_path: Path) -> None:
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ours.args.StandardSave(tree(1)))
        with pytest.raises(ValueError, match=match):
            manager.restore(1, args=args)


def test_arguments_of_save_that_are_refused(tmp_path: Path) -> None:
    with ours.CheckpointManager(tmp_path) as manager:
        cast = ours.args.PyTreeSave({"w": jnp.ones(2)}, {"w": theirs.SaveArgs(dtype=jnp.bfloat16)})
        with pytest.raises(ValueError, match="dtype"):
            manager.save(1, args=cast)
        with pytest.raises(ValueError, match="items="):
            manager.save(1, {"w": jnp.ones(2)})
        with pytest.raises(TypeError, match="ProtoSave"):
            manager.save(1, args=theirs.args.ProtoSave(None))
        assert manager.all_steps() == []
    with ours.CheckpointManager(tmp_path) as manager:
        with pytest.raises(TypeError, match="'x': NoneType"):
            manager.save(1, args=ours.args.Composite(x=None))
        with pytest.raises(ValueError, match=r"the item 'a/b' needs a name"):
            manager.save(1, args=ours.args.Composite(**{"a/b": ours.args.StandardSave([1])}))
        bad = ours.args.Composite(x=ours.args.JsonSave({"f": object()}))
        with pytest.raises(UnsupportedLeaf, match="'x' is not JSON"):
            manager.save(1, args=bad)
    with pytest.raises(TypeError, match="handler_registry"):
        ours.CheckpointManager(tmp_path, handler_registry=object())


def test_another_run_is_restored_from(tmp_path: Path) -> None:
    with ours.CheckpointManager(tmp_path / "a") as manager:
        manager.save(5, args=ours.args.StandardSave(tree(5)))
    with ours.CheckpointManager(tmp_path / "b") as manager:
        args = ours.args.StandardRestore(tree(0))
        found = manager.restore(None, directory=tmp_path / "a", args=args)
        assert equal(found, tree(5))
        assert manager.all_steps() == []


def test_further_arguments_are_unickpts(tmp_path: Path) -> None:
    seen: list[Any] = []
    options = unickpt.SaveOptions(metrics=seen.append)
    further = {"reuse": True, "options": options}
    with ours.CheckpointManager(tmp_path, unickpt=further) as manager:
        for step in (1, 2):
            manager.save(step, args=ours.args.StandardSave({"w": jnp.ones(1 << 18)}))
    assert [report.reused_bytes > 0 for report in seen] == [False, True]


def test_rules_are_for_the_steps_that_orbax_saved(tmp_path: Path) -> None:
    """A run of another model layout goes on: what is saved here has the new names already."""
    w, b = jnp.arange(6.0).reshape(2, 3), jnp.ones(3)
    with theirs.CheckpointManager(tmp_path) as manager:
        both = theirs.args.Composite(
            state=theirs.args.StandardSave({"dense": {"kernel": w, "bias": b}}),
            data=theirs.args.JsonSave({"seen": 4}),
        )
        manager.save(1, args=both)
    rules = unickpt.Rules.parse(
        "dense/kernel[i o] <-> linear/weight[o i]\ndense/bias <-> linear/bias"
    )
    like = {"linear": {"weight": jnp.zeros((3, 2)), "bias": jnp.zeros(3)}}
    args = ours.args
    wanted = args.Composite(state=args.StandardRestore(like), data=args.JsonRestore())
    with ours.CheckpointManager(tmp_path, unickpt={"rules": rules}) as manager:
        for step in (1, 2):
            found = manager.restore(step, args=wanted)
            assert np.array_equal(found.state["linear"]["weight"], w.T)
            assert found.data == {"seen": 4}
            saving = args.Composite(
                state=args.StandardSave(found.state), data=args.JsonSave({"seen": 4})
            )
            manager.save(step + 1, args=saving)
    with ours.CheckpointManager(tmp_path / "new", unickpt={"rules": rules.inverse}) as other:
        back = args.Composite(state=args.StandardRestore({"dense": {"kernel": w, "bias": b}}))
        found = other.restore(3, directory=tmp_path, args=back)
        assert np.array_equal(found.state["dense"]["kernel"], w)
    path = tmp_path / "1" / "state"
    alone = ours.PyTreeCheckpointer(unickpt={"rules": rules}).restore(path, like)
    assert np.array_equal(alone["linear"]["weight"], w.T)
    with pytest.raises(HintError, match="takes no hints"):
        ours.CheckpointManager(tmp_path, unickpt={"hints": {"x": 1}})


def test_an_idle_manager_gives_way_to_another(tmp_path: Path) -> None:
    """As in notebooks, where the first is not closed; and the first may save again."""
    state = ours.args.StandardSave({"w": jnp.ones(2)})
    options = ours.CheckpointManagerOptions(max_to_keep=2)
    first = ours.CheckpointManager(tmp_path, options=options)
    first.save(0, args=state)
    first.wait_until_finished()
    second = ours.CheckpointManager(tmp_path, options=options)
    second.save(1, args=state)
    assert first.save(2, args=state)  # after the other's save
    first.wait_until_finished()
    assert unickpt.Checkpointer(tmp_path).steps() == [1, 2]
    second.reload()
    assert second.all_steps() == [1, 2]
    second.close()
    first.close()


def test_names_of_orbaxs_steps(tmp_path: Path) -> None:
    """Options that name Orbax's folders say which of them are the run's; ours are `step_<n>`."""
    naming = {"step_prefix": "train", "step_format_fixed_length": 4}
    for prefix in ("train", "eval"):
        options = theirs.CheckpointManagerOptions(**naming | {"step_prefix": prefix})
        with theirs.CheckpointManager(tmp_path, options=options) as manager:
            manager.save(1, args=theirs.args.StandardSave({"w": prefix == "train"}))
    by_format = {"step_name_format": theirs.step.standard_name_format(**naming)}
    for step, given in ((2, naming), (3, by_format)):
        with ours.CheckpointManager(
            tmp_path, options=theirs.CheckpointManagerOptions(**given)
        ) as manager:
            assert manager.all_steps() == list(range(1, step))
            assert manager.restore(1) == {"w": True}
            manager.save(step, args=ours.args.StandardSave({"w": False}))
    assert sorted(p.name for p in tmp_path.glob("*_*")) == [
        "eval_0001", "step_2", "step_3", "train_0001",
    ]  # fmt: skip
    with pytest.raises(TypeError, match="step_name_format= has no build_name"):
        ours.CheckpointManagerOptions(step_name_format=object())


def test_metadata_that_orbax_stored_of_the_run(tmp_path: Path) -> None:
    with theirs.CheckpointManager(tmp_path, metadata={"by": "orbax"}) as manager:
        manager.save(1, args=theirs.args.StandardSave({"w": 1}))
    with ours.CheckpointManager(tmp_path, metadata={"by": "me"}) as manager:
        assert manager.metadata().custom_metadata == {"by": "orbax"}
        manager.save(2, args=ours.args.StandardSave({"w": 1}))
    with ours.CheckpointManager(tmp_path) as manager:
        assert manager.metadata().custom_metadata == {"by": "orbax"}


def test_handlers_in_a_registry(tmp_path: Path) -> None:
    class Text(theirs.CheckpointHandler):
        def save(self, directory: Any, args: Any) -> None:
            (directory / "x").write_text(args.text)

        def restore(self, directory: Any, args: Any) -> Any:
            return (directory / "x").read_text()

        def finalize(self, directory: Any) -> None:
            (directory / "x").write_text((directory / "x").read_text() + "!")

    class Save(ours.args.CheckpointArgs):
        text = "hello"

    registry = theirs.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("a", theirs.args.JsonSave, Text())
    registry.add(None, Save, Text())
    registry.add("c", theirs.args.StandardSave, theirs.StandardCheckpointHandler())
    with ours.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        each = ours.args.Composite(b=Save(), c=ours.args.StandardSave({"w": 1}))
        manager.save(1, args=each)
        found = manager.restore(1, args=ours.args.Composite(b=Save(), c=None))
        assert (found.b, found.c) == ("hello!", {"w": 1})
