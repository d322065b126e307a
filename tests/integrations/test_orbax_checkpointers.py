"""The checkpointers of Orbax's version 0 over unickpt, beside Orbax's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt.errors import CheckpointExists, CheckpointNotFound, UnsupportedLeaf

jax = pytest.importorskip("jax")
theirs = pytest.importorskip("orbax.checkpoint")
import unickpt.integrations.orbax as ours  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),  # Orbax's
]
jnp = jax.numpy


def state() -> dict[str, Any]:
    return {"a": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}, "n": 7}


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())


def test_each_restores_what_it_saved_and_what_orbax_saved(tmp_path: Path) -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state()["a"])
    for who in (ours, theirs):
        path = tmp_path / who.__name__
        plain = who.PyTreeCheckpointer()
        how = {"a": {"w": who.SaveArgs(), "b": who.SaveArgs()}, "n": who.SaveArgs()}
        plain.save(path / "tree", state(), save_args=how)
        with who.StandardCheckpointer() as behind:
            behind.save(path / "standard", state(), custom_metadata={"by": "me"})
            behind.wait_until_finished()
        with who.Checkpointer(who.JsonCheckpointHandler()) as checkpointer:
            checkpointer.save(path / "json", {"a": [1, None]})
        with who.AsyncCheckpointer(who.CompositeCheckpointHandler()) as checkpointer:
            args = who.args
            both = args.Composite(x=args.StandardSave(state()), y=args.JsonSave({"z": 1}))
            checkpointer.save(path / "both", both)

        again = ours.PyTreeCheckpointer()
        same(again.restore(path / "tree"), jax.tree.map(np.asarray, state()) | {"n": 7})
        how = ours.checkpoint_utils.construct_restore_args(state())
        found = again.restore(path / "tree", item=state(), restore_args=how)
        same(found, state())
        assert isinstance(found["a"]["w"], jax.Array)
        part = again.restore(path / "tree", {"n": 0}, transforms={}, restore_args={"n": how["n"]})
        assert part == {"n": 7}
        with ours.StandardCheckpointer() as standard:
            same(standard.restore(path / "standard", {"a": shapes, "n": 0}), state())
            known = standard.metadata(path / "standard")
            assert known.custom_metadata == {"by": "me"}
            assert known.item_metadata.tree["a"]["w"].shape == (2, 3)
        json_of = ours.Checkpointer(ours.JsonCheckpointHandler())
        assert json_of.restore(path / "json") == {"a": [1, None]}
        composite = ours.Checkpointer(ours.CompositeCheckpointHandler())
        found = composite.restore(path / "both", ours.args.Composite(y=ours.args.JsonRestore()))
        assert found.y == {"z": 1}
        assert "x" not in found
        same(composite.restore(path / "both").x, jax.tree.map(np.asarray, state()))


def test_force_replaces_also_what_orbax_wrote(tmp_path: Path) -> None:
    path = tmp_path / "c"
    theirs.PyTreeCheckpointer().save(path, state())
    checkpointer = ours.PyTreeCheckpointer()
    with pytest.raises(ValueError, match="force=True") as caught:
        checkpointer.save(path, {"w": np.ones(2)})
    assert isinstance(caught.value, CheckpointExists)
    same(theirs.PyTreeCheckpointer().restore(path), state())
    with pytest.raises(UnsupportedLeaf):
        checkpointer.save(path, {"w": object()}, force=True)
    same(theirs.PyTreeCheckpointer().restore(path)["a"], jax.tree.map(np.asarray, state()["a"]))
    for n in (1.0, 2.0):
        checkpointer.save(path, {"w": np.full(2, n)}, force=True)
        assert unickpt.load(path)["w"].tolist() == [n, n]
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_save_in_the_background_replaces_only_with_force() -> None:
    path = "memory://checkpointers/twice"
    with ours.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"w": np.ones(2)})
        with pytest.raises(ValueError, match="force=True") as caught:
            checkpointer.save(path, {"w": np.zeros(2)})
        assert isinstance(caught.value, CheckpointExists)
        assert checkpointer.restore(path)["w"].tolist() == [1, 1]
        checkpointer.save(path, {"w": np.zeros(2)}, force=True)
        checkpointer.wait_until_finished()
        checkpointer.check_for_errors()
        assert checkpointer.restore(path)["w"].tolist() == [0, 0]
        for error in (CheckpointNotFound, FileNotFoundError):
            with pytest.raises(error):
                checkpointer.restore("memory://checkpointers/none")


def test_users_own_handlers(tmp_path: Path) -> None:
    class Old:
        def save(self, directory: Any, item: Any, indent: int = 0) -> None:
            (directory / "x.json").write_text(json.dumps(item, indent=indent))

        def restore(self, directory: Any) -> Any:
            return json.loads((directory / "x.json").read_text())

    @ours.args.register_with_handler(Old, for_save=True)
    class Save(ours.args.CheckpointArgs):
        pass

    class Plain(Old):
        pass

    checkpointer = ours.Checkpointer(Plain())
    checkpointer.save(tmp_path / "c", {"a": 1}, indent=2)
    assert checkpointer.restore(tmp_path / "c") == {"a": 1}
    assert list(unickpt.load(tmp_path / "c")) == ["x.json"]


def test_what_cannot_be_honoured_is_named() -> None:
    handler = ours.PyTreeCheckpointHandler(use_zarr3=True, save_concurrent_gb=96)
    with pytest.raises(ValueError, match="primary_host=None"):
        ours.PyTreeCheckpointer(primary_host=None)
    with pytest.raises(ValueError, match="path_permission_mode"):
        ours.Checkpointer(handler, file_options=theirs.options.FileOptions(path_permission_mode=1))
    with pytest.raises(ValueError, match="checkpoint_metadata_store"):
        ours.StandardCheckpointer(checkpoint_metadata_store=object())
    with pytest.raises(TypeError, match="has no 'reuse'"):
        ours.Checkpointer(handler, unickpt={"reuse": True})
    with pytest.raises(TypeError, match="handler"):
        ours.Checkpointer(3).save("memory://x", 1)


def test_managers_of_older_programs(tmp_path: Path) -> None:
    """With checkpointers, and items instead of arguments, as Flax's older pages have them."""
    for who, path in ((theirs, tmp_path / "theirs"), (ours, tmp_path / "ours")):
        manager = who.CheckpointManager(path, who.PyTreeCheckpointer())
        manager.save(1, state(), save_kwargs={"save_args": None})
        manager.wait_until_finished()
        found = manager.restore(1, items=state())
        same(found["a"], state()["a"])
        both = {"s": who.AsyncCheckpointer(who.PyTreeCheckpointHandler()),
                "j": who.Checkpointer(who.JsonCheckpointHandler())}  # fmt: skip
        manager = who.CheckpointManager(path / "both", both)
        manager.save(1, {"s": state(), "j": {"k": 1}})
        manager.wait_until_finished()
        how = who.checkpoint_utils.construct_restore_args(state())
        kwargs = {"s": {"restore_args": how}}
        found = manager.restore(1, {"s": state(), "j": None}, restore_kwargs=kwargs)
        same(found["s"], state())
        assert found["j"] == {"k": 1}
    with pytest.raises(TypeError, match="orbax"):
        ours.CheckpointManager(tmp_path / "x", theirs.PyTreeCheckpointer())


def test_a_manager_of_checkpointers_that_wait_waits(tmp_path: Path) -> None:
    saved = {"a": jnp.ones(1 << 24)}  # takes a while
    for given, items in (
        (ours.PyTreeCheckpointer(), saved),
        ({"s": ours.PyTreeCheckpointer()}, {"s": saved}),
    ):
        with ours.CheckpointManager(tmp_path, given) as manager:
            step = len(manager.all_steps())
            manager.save(step, items)
            assert not manager.is_saving_in_progress()
            assert len(unickpt.open(tmp_path / f"step_{step}")) == 1
    with ours.CheckpointManager(tmp_path, {"s": ours.AsyncCheckpointer(None)}) as manager:
        manager.save(2, args=ours.args.Composite(s=ours.args.StandardSave(saved)))
        assert manager.is_saving_in_progress()


def test_an_item_that_item_names_lacks(tmp_path: Path) -> None:
    with ours.CheckpointManager(tmp_path, item_names=("params", "data")) as manager:
        args = ours.args.Composite(parms=ours.args.StandardSave(state()))
        with pytest.raises(ValueError, match=r"'parms' does not match.*params, data"):
            manager.save(1, args=args)
        assert manager.all_steps() == []
        args = ours.args.Composite(params=ours.args.StandardSave(state()))
        assert manager.save(1, args=args)


def test_a_logger_is_told_of_saves_and_restores(tmp_path: Path) -> None:
    class Logger(theirs.logging.AbstractLogger):
        def log_entry(self, entry: dict[str, Any]) -> None:
            self.entries = [*getattr(self, "entries", []), entry]

    keys = {}
    for who in (theirs, ours):
        logger = Logger()
        with who.CheckpointManager(tmp_path / who.__name__, logger=logger) as manager:
            manager.save(3, args=who.args.StandardSave(state()))
            manager.wait_until_finished()
            manager.restore(3, args=who.args.StandardRestore(state()))
        keys[who] = [set(entry) for entry in logger.entries]
        assert [entry["event_type"] for entry in logger.entries] == ["save", "restore"]
        assert all(entry["step"] == 3 for entry in logger.entries)
    for mine, orbaxs in zip(keys[ours], keys[theirs], strict=True):
        assert mine <= orbaxs
