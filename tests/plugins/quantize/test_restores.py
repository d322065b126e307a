"""Bits by how often a run is expected to go on from a quantised checkpoint, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.quantized import codes_of

import unickpt
from unickpt import Checkpointer, Restores, SaveOptions


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"embed": rng.standard_normal((64, 256)).astype(np.float32), "step": 0}


def codes(run: Path, step: int) -> str | None:
    return codes_of(unickpt.open(run / f"step_{step}").index.arrays["embed"])


@pytest.mark.parametrize(
    ("expected", "first"), [(0, "int2"), (1, "int2"), (3, "int3"), (20, "int4"), (21, "uint8")]
)
def test_the_fewest_bits_that_the_number_allows(expected: int, first: str) -> None:
    assert Restores(expected).codes() == Restores(expected).codes(expected) == first
    assert Restores(expected).codes(expected + 1) == "uint8"


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None])
def test_what_is_no_number_of_restores(wrong: Any) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        Restores(wrong)


@pytest.mark.parametrize("reuse", [False, True, "patch"])
def test_a_run_counts_its_restores_and_steps_back(reuse: Any, tmp_path: Path) -> None:
    options = SaveOptions(quantize={"embed": Restores(2)}, fsync=False)
    found, state = [], tree()
    for job in range(5):
        with Checkpointer(tmp_path, reuse=reuse, options=options) as run:
            if job:
                state = run.load()
            for step in (2 * job, 2 * job + 1):
                run.save(step, state, wait=True)
                found.append(codes(tmp_path, step))
                metadata = unickpt.open(tmp_path / f"step_{step}").metadata
                assert metadata["unickpt"]["restores"] == job
        assert unickpt.verify(tmp_path / f"step_{2 * job + 1}").ok
    assert found == ["int3"] * 6 + ["uint8"] * 4


def test_only_restores_from_quantised_steps_count(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=SaveOptions(fsync=False)) as run:
        run.save(0, tree(), wait=True)
    options = SaveOptions(quantize={"embed": Restores(0)}, fsync=False)
    for step, expected in ((1, "int2"), (2, "uint8")):
        with Checkpointer(tmp_path, options=options) as run:
            run.save(step, run.load(), wait=True)
        assert codes(tmp_path, step) == expected


def test_a_plain_save_has_no_restores(tmp_path: Path) -> None:
    options = SaveOptions(quantize={"embed": Restores(3)}, fsync=False)
    unickpt.save(tmp_path / "step_0", tree(), options=options)
    assert codes(tmp_path, 0) == "int3"
