"""The examples of docs/integrations/{keras,equinox,flax}.md run as they stand there."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.processes import Processes

import unickpt

pytestmark = pytest.mark.integration
PAGES = Path(TESTS).parent / "docs" / "integrations"


def blocks(name: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / f"{name}.md").read_text(), re.S)


KERAS = """
import os, shlex
import keras, numpy as np
from typer.testing import CliRunner
import unickpt
from unickpt.cli.app import app
inputs = keras.Input((3,))
model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
model.compile("adam", "mse")
x, y, path = np.ones((800, 3)), np.ones((800, 1)), "run"
{by_callback}
assert callback.resume
with unickpt.Checkpointer(path) as run:
    assert run.steps() == [100, 200], run.steps()
path = "c"
{by_functions}
assert report.loaded
{alone}
assert int(model.optimizer.iterations) == 225
model.fit(x, y, epochs=3, verbose=0, callbacks=[UnickptCheckpoint("runs/a")])
done = CliRunner().invoke(app, shlex.split({export!r})[1:])
assert done.exit_code == 0, done.output
assert "left out, because the format has no place for it: fit/" in done.output, done.output
{back}
assert int(model.optimizer.iterations) == 225 + 3 * 25 + 6 * 25
assert sorted(os.listdir("back")) == ["6", "7", "8"]
"""


@pytest.mark.skipif(find_spec("keras") is None, reason="needs keras")
def test_keras(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("orbax.checkpoint")
    by_callback, by_functions, alone, _, back = blocks("keras")
    (export,) = blocks("keras", "sh")
    script = KERAS.format(
        by_callback=by_callback, by_functions=by_functions, alone=alone, export=export, back=back
    )
    monkeypatch.chdir(tmp_path)
    processes.finish([processes.start(script, env={"KERAS_BACKEND": "jax"})])
    assert set(unickpt.load(tmp_path / "c")) == {"model", "optimizer", "metrics"}


def test_equinox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eqx, jax = pytest.importorskip("equinox"), pytest.importorskip("jax")

    def make(key: Any) -> Any:
        return eqx.nn.MLP(4, 8, 8, 1, key=key)

    key = jax.random.key(0)
    names: dict[str, Any] = {"eqx": eqx, "jax": jax, "unickpt": unickpt, "make": make, "key": key}
    names |= {"model": make(key), "path": tmp_path / "c", "folder": tmp_path / "run"}
    names |= {"NamedSharding": jax.sharding.NamedSharding, "P": jax.sharding.PartitionSpec}
    monkeypatch.chdir(tmp_path)
    eqx.tree_serialise_leaves("model.eqx", make(key))
    for block in blocks("equinox"):
        exec(block, names)
        assert bool(eqx.tree_equal(names["model"], make(key), typematch=True))
        names["key"] = jax.random.key(1)  # what is loaded counts, not what is made
    assert Path("back.eqx").read_bytes() == Path("model.eqx").read_bytes()


def test_flax(tmp_path: Path) -> None:
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    def make() -> Any:
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    names: dict[str, Any] = {"nnx": nnx, "unickpt": unickpt, "make": make, "path": tmp_path / "c"}
    names["model"], names["optimizer"] = model, _ = make()
    first, check = blocks("flax")
    exec(first + check, names)
    assert names["model"] is not model
    assert bool((names["model"].kernel[...] == model.kernel[...]).all())
    assert "0/kernel" in unickpt.open(tmp_path / "c")
