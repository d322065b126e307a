"""The examples of docs/integrations/orbax.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import TESTS

import unickpt

jax = pytest.importorskip("jax")
grain = pytest.importorskip("grain.python")
pytest.importorskip("orbax.checkpoint")  # else Grain has no arguments for it
pytestmark = pytest.mark.integration  # imports Orbax and Grain
PAGE = Path(TESTS).parent.joinpath("docs", "integrations", "orbax.md").read_text()
HANDLERS, MANAGER, VERSION_1, LOADERS, PART = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_in_orbaxs_own_managers(tmp_path: Path) -> None:
    names: dict[str, Any] = {"path": tmp_path / "run"}
    exec(HANDLERS, names)
    state = {"w": jax.numpy.ones(3)}
    with names["manager"] as manager:
        manager.save(4, args=names["ocp"].args.StandardSave(state))
    assert unickpt.load(tmp_path / "run" / "4" / "default")["w"].tolist() == [1, 1, 1]
    with names["context"]:
        names["v1"].save(tmp_path / "v1", state)
    assert unickpt.load(tmp_path / "v1" / "state")["w"].tolist() == [1, 1, 1]


def test_coming_from_orbax(tmp_path: Path) -> None:
    sampler = grain.IndexSampler(9, grain.NoSharding(), num_epochs=1)
    loader = grain.DataLoader(data_source=range(9), sampler=sampler, worker_count=0)
    state = {"w": jax.numpy.zeros(3)}
    names: dict[str, Any] = {
        "path": str(tmp_path / "run"),
        "state": state,
        "abstract_state": jax.eval_shape(lambda: state),
        "train": lambda state: {"w": state["w"] + 1},
        "iterator": iter(loader),
    }
    exec(MANAGER, names)
    assert names["manager"].all_steps() == [6, 8, 10]
    exec(VERSION_1, names)
    assert names["state"]["w"].tolist() == [10, 10, 10]
    assert unickpt.Checkpointer(tmp_path / "run").steps() == [8, 10, 20]
    exec("import unickpt.integrations.orbax as ocp\n" + LOADERS, names)
    assert unickpt.Checkpointer(tmp_path / "run").latest() == 30


def test_a_part_of_orbaxs_own_step(tmp_path: Path) -> None:
    state = {"w": jax.numpy.ones(3)}
    names: dict[str, Any] = {
        "orbax": pytest.importorskip("orbax.checkpoint.experimental.v1"),
        "path": tmp_path,
        "state": state,
        "abstract_state": jax.eval_shape(lambda: state),
    }
    exec(PART, names)
    assert names["state"]["w"].tolist() == [1, 1, 1]
    assert unickpt.load(tmp_path / "1" / "model" / "unickpt")["w"].tolist() == [1, 1, 1]


def test_every_option_has_a_row() -> None:
    import dataclasses

    from unickpt.integrations.orbax import CheckpointManagerOptions

    options = PAGE.partition("## Options, one by one")[2]
    for each in dataclasses.fields(CheckpointManagerOptions):
        assert f"`{each.name}`" in options, each.name
