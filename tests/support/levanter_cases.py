"""What one process does with levanter's functions and unickpt.integrations.levanter.

python -m support.levanter_cases FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.checkpoint as theirs
import numpy as np
import pytest

import unickpt
from unickpt.errors import CheckpointExists, LoadMismatch
from unickpt.integrations import levanter

Embed, Heads = hax.Axis("embed", 6), hax.Axis("heads", 5)


class Model(eqx.Module):
    named: hax.NamedArray
    layers: list[Any]
    half: jax.Array
    nothing: Any = None


def model(start: float) -> Model:
    named = hax.named(jnp.arange(30.0).reshape(6, 5) + start, (Embed, Heads))
    layers = [{"w": jnp.arange(3) + int(start)}, (jnp.uint32([7, 8]),)]
    return Model(named, layers, jnp.arange(4, dtype=jnp.bfloat16) / 3)


def check(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def main(folder: Path) -> None:
    state = {"model": model(1), "step": jnp.int32(4), "note": "not saved"}
    like = eqx.filter_eval_shape(lambda: {**state, "model": model(0)})
    arrays, short = {k: like[k] for k in ("model", "step")}, {"model": like["model"]}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    here: dict[str, Any] = {"axis_mapping": {}, "mesh": mesh, "discover_latest": False}
    theirs.save_checkpoint(state, 4, folder / "run" / "step-4", is_temporary=False)
    levanter.install()

    # What levanter saved is loaded, and not overwritten.
    found = theirs.load_checkpoint(like, folder / "run", axis_mapping={}, mesh=mesh)
    check(found["model"], state["model"])
    with pytest.raises(CheckpointExists, match="saved by levanter itself"):
        theirs.save_checkpoint(state, 4, folder / "run" / "step-4")

    # All of it, a part, and again in place.
    state["model"], path = model(2), folder / "run" / "step-5"
    for number in (1, 2):
        theirs.save_checkpoint({**state, "model": model(number)}, 5, path, is_temporary=False)
    assert theirs.discover_latest_checkpoint(folder / "run") == str(path)
    found = theirs.load_checkpoint(like, folder / "run", axis_mapping={}, mesh=mesh)
    check(found["model"], state["model"])
    assert found["note"] == like["note"]
    check(theirs.load_checkpoint(like["model"], path, subpath="model", **here), state["model"])
    stored = unickpt.load(path / "unickpt")
    assert set(stored) == {"model", "step"}
    np.testing.assert_array_equal(stored["model"]["layers"]["1"]["0"], [7, 8])

    # What does not fit.
    wrong = eqx.tree_at(lambda m: m.half, like["model"], jax.ShapeDtypeStruct((4,), jnp.float32))
    with pytest.raises(LoadMismatch, match="model/half"):
        theirs.load_checkpoint({"model": wrong}, path, **here)
    levanter.install(cast=True)
    assert theirs.load_checkpoint({"model": wrong}, path, **here)["model"].half.dtype == jnp.float32
    levanter.install()
    wrong = eqx.tree_at(lambda m: m.half, like["model"], jax.ShapeDtypeStruct((5,), jnp.bfloat16))
    with pytest.raises(LoadMismatch, match="model/half"):
        theirs.load_checkpoint({"model": wrong}, path, **here)
    more = {**short, "more": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(LoadMismatch, match="more"):
        theirs.load_checkpoint(more, path, **here)
    found = theirs.load_checkpoint(more, path, allow_partial=True, **here)
    check(found["model"], state["model"])
    assert found["more"] is more["more"]
    with pytest.raises(FileNotFoundError):
        theirs.load_checkpoint(like, folder / "nothing", axis_mapping={}, mesh=mesh)

    # An error in the background is raised by the next save, or by waiting.
    manager = levanter.AsyncManager()
    manager.save(str(folder / "failing"), {"a": jnp.ones(2)}, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        manager.wait_until_finished()

    # The way back.
    levanter.export(path, folder / "back" / "step-5")
    with pytest.raises(CheckpointExists):
        levanter.export(path, folder / "back" / "step-5")
    original, _ = levanter._originals(sys.modules["levanter.tensorstore_serialization"])
    found = original(str(folder / "back" / "step-5"), arrays, {}, mesh)
    check(found["model"], state["model"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
