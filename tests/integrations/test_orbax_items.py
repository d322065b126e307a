"""Items of unickpt.integrations.orbax: of handlers, and as damaged or forged metadata has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import CheckpointCorrupt, LoadMismatch, UnsupportedLeaf

pytest.importorskip("jax")
import unickpt.integrations.orbax as ours


def tree(number: int) -> dict[str, Any]:
    return {"w": np.full(3, number)}


class Notes:
    """A handler of somebody's own."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "deep").mkdir()
        (directory / "deep" / "notes.json").write_text(json.dumps(args.item))

    def restore(self, directory: Any, args: Any) -> Any:
        return json.loads((directory / "deep" / "notes.json").read_text())


@ours.args.register_with_handler(Notes, for_save=True, for_restore=True)
class NotesArgs(ours.args.CheckpointArgs):
    def __init__(self, item: Any = None) -> None:
        self.item = item


def test_handlers_of_somebodys_own(tmp_path: Path) -> None:
    with ours.CheckpointManager(tmp_path) as manager:
        args = ours.args.Composite(notes=NotesArgs(["x"]), state=ours.args.StandardSave(tree(1)))
        manager.save(1, args=args)
    with ours.CheckpointManager(tmp_path, item_handlers={"notes": Notes()}) as manager:
        assert manager.restore(1, args=ours.args.Composite(notes=NotesArgs())).notes == ["x"]
        with pytest.raises(ValueError, match="'notes' was saved by a handler"):
            manager.restore(1)


def test_a_file_that_would_lie_elsewhere_is_refused(tmp_path: Path) -> None:
    how = {"items": {"notes": "files"}, "single": None}
    for name in ("../notes.json", "/notes.json"):
        run = tmp_path / str(len(name))
        state = {"notes": {name: b"x"}}
        unickpt.save(run / "step_1", state, metadata={"orbax": how})
        with ours.CheckpointManager(run, item_handlers={"notes": Notes()}) as manager:
            wanted = ours.args.Composite(notes=NotesArgs())
            with pytest.raises(UnsupportedLeaf, match="outside of its folder"):
                manager.restore(1, args=wanted)


@pytest.mark.parametrize(
    "how", ["text", {"items": 3}, {"items": {"x": "StandardSave"}}, {"items": {"w": "Odd"}}, {}]
)
def test_metadata_that_says_anything(how: Any, tmp_path: Path) -> None:
    metadata = {"orbax": how, "custom_metadata": 3}
    unickpt.save(tmp_path / "step_1", tree(1), metadata=metadata)
    with ours.CheckpointManager(tmp_path, metadata={"v": 1}) as manager:
        assert manager.metadata().custom_metadata == {"v": 1}
        try:
            assert manager.restore(1)["w"].tolist() == [1, 1, 1]
            assert manager.metadata(1).custom_metadata == {}
        except (CheckpointCorrupt, LoadMismatch) as error:
            assert "'x'" in str(error)  # noqa: PT017


def test_a_step_of_unickpts_own_checkpointer_is_restored(tmp_path: Path) -> None:
    with unickpt.Checkpointer(tmp_path) as run:
        run.save(5, tree(5))
    with ours.CheckpointManager(tmp_path) as manager:
        found = manager.restore(5, args=ours.args.StandardRestore(tree(0)))
        assert found["w"].tolist() == [5, 5, 5]
        manager.save(6, args=ours.args.StandardSave(tree(6)))
    with unickpt.Checkpointer(tmp_path) as run:
        assert run.load()["w"].tolist() == [6, 6, 6]
