"""Jobs of Keras that are killed and go on: examples/keras_fit.py, and variants of it."""

from __future__ import annotations

import re
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.processes import Processes

import unickpt

# Not imported here: it would look for TensorFlow.
pytestmark = [
    pytest.mark.skipif(find_spec("keras") is None, reason="needs keras"),
    pytest.mark.trainers,
]

EXAMPLE = Path(TESTS).parent.joinpath("examples", "keras_fit.py").read_text()
# Slow enough that saves in the background are committed before the job is killed.
SLOW = EXAMPLE.replace("print(line, flush=True)", "print(line, flush=True), time.sleep(0.05)")
SLOW = SLOW.replace("import sys", "import sys, time")


def losses(output: str) -> dict[int, str]:
    """The loss after each iteration, in hexadecimal."""
    return {int(i): x for i, x in re.findall(r"iteration (\d+) loss (\S+)", output)}


def killed_after(process: subprocess.Popen[str], iteration: int) -> dict[int, str]:
    """Kills a job as soon as it has printed an iteration; what it printed until then."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if f"iteration {iteration} " in line:
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL, process.communicate()
    return losses("".join(lines))


def started(processes: Processes, backend: str, script: str, *arguments: object) -> Any:
    """A process that has imported Keras with a backend."""
    env, of = {"KERAS_BACKEND": backend}, [f"keras-{backend}"]
    return processes.forked(script, *arguments, of=of, env=env)


# In the middle of an epoch, and after its last batch, before Keras ends it.
@pytest.mark.parametrize(("backend", "iteration"), [("jax", 8), ("torch", 25), ("jax", 20)])
def test_a_killed_fit_goes_on_with_the_same_losses(
    processes: Processes, tmp_path: Path, backend: str, iteration: int
) -> None:
    assert len(EXAMPLE.splitlines()) <= 40
    script = SLOW if iteration != 20 else SLOW.replace("save_freq=3", "save_freq=10")
    whole = started(processes, backend, script, tmp_path / "whole", 4)
    first = killed_after(started(processes, backend, script, tmp_path / "run", 4), iteration)
    last = newest(tmp_path / "run")
    assert 0 < last <= iteration
    [wanted, rest] = map(
        losses, processes.finish([whole, started(processes, backend, script, tmp_path / "run", 4)])
    )
    rest = {i: x for i, x in rest.items() if i > last}
    assert sorted(rest) == list(range(last + 1, 41))
    assert first == {i: wanted[i] for i in first}
    assert rest == {i: wanted[i] for i in rest}
    found, same = (
        unickpt.load(tmp_path / name / f"step_{newest(tmp_path / name)}")
        for name in ("run", "whole")
    )
    for group in ("model", "optimizer", "metrics"):
        assert_same(found[group], same[group])


OVER = """
import logging, os, signal, sys
path, way, freq = sys.argv[1], sys.argv[2], sys.argv[3]
freq = freq if freq == "epoch" else int(freq)
import keras, numpy as np
from keras.callbacks import LambdaCallback, OrbaxCheckpoint
from unickpt.integrations.keras import UnickptCheckpoint

logging.getLogger("absl").setLevel("CRITICAL")
keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
if keras.backend.backend() == "jax":  # torch's generator is in no step of Orbax
    layers.insert(1, keras.layers.Dropout(0.3))
model = keras.Sequential([keras.Input((3,)), *layers])
model.compile("adam", "mse", metrics=["mae"])
x, y = np.random.default_rng(0).random((40, 3), "float32"), np.ones((40, 1), "float32")
theirs = OrbaxCheckpoint(path, save_freq=freq, max_to_keep=2, save_on_background=False)
ours = UnickptCheckpoint(path, save_freq=freq, max_to_keep=None, resume=True)
done = [0]
def die(batch, logs):
    done[0] += 1
    if done[0] == 15:
        os.kill(os.getpid(), signal.SIGKILL)
killer = LambdaCallback(on_train_batch_end=die)
callbacks = {"whole": [], "theirs": [theirs, killer], "ours": [ours]}[way]
model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
print(int(model.optimizer.iterations), b"".join(w.tobytes() for w in model.get_weights()).hex())
"""


@pytest.mark.parametrize(("backend", "freq"), [("jax", "epoch"), ("torch", "epoch"), ("jax", "4")])
def test_a_killed_fit_with_orbax_goes_on_here(
    processes: Processes, tmp_path: Path, backend: str, freq: str
) -> None:
    pytest.importorskip("orbax.checkpoint")
    run = tmp_path / "run"
    whole = started(processes, backend, OVER, run, "whole", freq)
    killed = started(processes, backend, OVER, run, "theirs", freq)
    assert killed.wait() == -signal.SIGKILL, killed.communicate()
    theirs = sorted(int(found.name) for found in run.iterdir())
    assert theirs == ([0] if freq == "epoch" else [8, 12])
    [wanted, found, again] = processes.finish(
        [whole, started(processes, backend, OVER, run, "ours", freq)]
    ) + processes.finish([started(processes, backend, OVER, run, "ours", freq)])
    assert found.splitlines()[-1] == wanted.splitlines()[-1]
    assert again.splitlines()[-1] == wanted.splitlines()[-1], "from our own last step"
    steps = {found.name for found in run.iterdir() if found.name.startswith("step_")}
    assert steps == {f"step_{n}" for n in ((1, 2) if freq == "epoch" else (16, 20, 24, 28))}


BACK = """
import logging, os, signal, sys
way, run, theirs, out = sys.argv[1:]
import keras, numpy as np
from keras import layers
from keras.callbacks import LambdaCallback, OrbaxCheckpoint

logging.getLogger("absl").setLevel("CRITICAL")
keras.utils.set_random_seed(1)
x, y = np.random.default_rng(0).random((40, 3), "float32"), np.ones((40, 1), "float32")
def make():
    parts = [layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]
    if keras.backend.backend() == "torch":
        model = keras.Sequential([keras.Input((3,)), *parts])
    else:  # what load_model of Keras 3.15 restores; torch drops by a generator of its own
        ends = [keras.Input((3,))]
        for part in [layers.Dropout(0.3), *parts]:
            ends.append(part(ends[-1]))
        model = keras.Model(ends[0], ends[-1])
    model.compile("adam", "mse", metrics=["mae"])
    return model
def fit(model, *callbacks, **more):
    given = {"batch_size": 4, "epochs": 4, "shuffle": False, "verbose": 0} | more
    model.fit(x, y, callbacks=list(callbacks), **given)
def note(model, name):
    groups = {"model": model.variables, "optimizer": model.optimizer.variables,
              "metrics": model.metrics_variables}
    bits = {f"{key}/{v.path}": keras.ops.convert_to_numpy(v.value)
            for key, found in groups.items() for v in found}
    np.savez(f"{out}/{name}.npz", **bits)

if way == "ours":
    from unickpt.integrations.keras import UnickptCheckpoint
    done = [0]
    def die(batch, logs):
        done[0] += 1
        if done[0] == 25:
            os.kill(os.getpid(), signal.SIGKILL)
    saves = UnickptCheckpoint(run, save_on_background=False, max_to_keep=2)
    fit(make(), saves, LambdaCallback(on_train_batch_end=die))
elif way == "theirs":
    model = make()
    fit(model)
    note(model, "whole")
    keras.utils.clear_session()
    if keras.backend.backend() == "jax":
        model = keras.saving.load_model(theirs)
    else:
        model = make()
        model.fit(x[:4], y[:4], verbose=0)  # makes the metrics and the optimizer's variables
        model.load_weights(theirs)
    note(model, "loaded")
    fit(model, OrbaxCheckpoint(theirs, max_to_keep=5), initial_epoch=2)
    assert "unickpt" not in sys.modules
    assert sorted(os.listdir(theirs)) == ["1", "2", "3"]
note(model, way)
"""


@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_killed_fit_goes_back_to_keras_alone(
    processes: Processes, tmp_path: Path, backend: str
) -> None:
    pytest.importorskip("orbax.checkpoint")
    env = {"KERAS_BACKEND": backend}
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    killed = started(processes, backend, BACK, "ours", run, theirs, tmp_path)
    assert killed.wait() == -signal.SIGKILL, killed.communicate()
    report = unickpt.convert(run / "step_1", theirs / "1", to="keras")
    assert set(report.left_out) == {
        *(f"fit/{name}" for name in ("epoch", "batch", "batches", "best", "random"))
    }
    processes.finish([processes.start(BACK, "theirs", run, theirs, tmp_path, env=env)])
    stored = unickpt.open(run / "step_1")
    loaded, again, wanted = (
        dict(np.load(tmp_path / f"{name}.npz")) for name in ("loaded", "theirs", "whole")
    )
    saved = {name for name in stored if not name.startswith("fit/")}
    # Keras makes the metrics of compile(metrics=) with the first batch.
    late = {name for name in saved if backend == "jax" and "/mean_absolute_error/" in name}
    assert loaded.keys() == saved - late
    for name, found in loaded.items():
        assert_same(found, np.asarray(stored[name]))
    assert again.keys() == wanted.keys()
    for name, found in again.items():
        assert_same(found, wanted[name])


MESH = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import jax, keras
devices = keras.distribution.list_devices()
layouts = keras.distribution.LayoutMap(
    keras.distribution.DeviceMesh((2, 4), ("batch", "model"), devices)
)
layouts[".*dense/kernel"] = (None, "model")
keras.distribution.set_distribution(keras.distribution.ModelParallel(
    layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False
))
"""
# Each process has its part of each batch.
PART = """
x = x.reshape(10, jax.process_count(), -1, 16)[:, jax.process_index()].reshape(-1, 16)
"""


def test_processes_of_a_distribution_that_are_killed(processes: Processes, tmp_path: Path) -> None:
    """Two processes of four devices go on, with the same losses; and one process of eight."""
    script = MESH + SLOW.replace("model.fit(", PART + "model.fit(").replace(
        "epochs=", "shuffle=False, batch_size=32 // jax.process_count(), epochs="
    )
    whole = processes.jax(2, 4, script, tmp_path / "whole", 3)
    job = processes.jax(2, 4, script, tmp_path / "run", 3)
    first = killed_after(job[0], 15)
    job[1].send_signal(signal.SIGKILL)
    job[1].wait()
    last = newest(tmp_path / "run")
    assert 0 < last <= 15
    kernel = unickpt.open(tmp_path / "run" / f"step_{last}")["model/sequential/dense/kernel"]
    assert kernel.layout is not None
    unickpt.copy(tmp_path / "run" / f"step_{last}", tmp_path / "one" / f"step_{last}")
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    one = processes.start(script, tmp_path / "one", 3, env=env)
    going = processes.jax(2, 4, script, tmp_path / "run", 3)
    outputs = processes.finish([*whole, *going, one])
    wanted, _, rest, _, other = map(losses, outputs)
    rest, other = ({i: x for i, x in found.items() if i > last} for found in (rest, other))
    assert sorted(rest) == sorted(other) == list(range(last + 1, 31))
    assert {**first, **rest} == {i: wanted[i] for i in {**first, **rest}}
    floats = [[float.fromhex(found[i]) for i in rest] for found in (wanted, other)]
    np.testing.assert_allclose(*floats, rtol=1e-3)


def newest(run: Path) -> int:
    with unickpt.Checkpointer(run) as checkpointer:
        return checkpointer.latest() or 0


def assert_same(a: object, b: object) -> None:
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert isinstance(a, np.ndarray)
        assert isinstance(b, np.ndarray)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
