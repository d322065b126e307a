"""unickpt.integrations.keras with each backend, in processes that run support/keras_cases.py."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support import TESTS
from support.processes import Processes

# Not imported here: it would look for TensorFlow.
pytestmark = [
    pytest.mark.skipif(find_spec("keras") is None, reason="needs keras"),
    pytest.mark.trainers,
]

SCRIPT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[1:]
runpy.run_module("support.keras_cases", run_name="__main__")
"""


def run(processes: Processes, backend: str, cases: str, folder: Path) -> str:
    env = {
        "KERAS_BACKEND": backend,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "OMP_NUM_THREADS": "1",
    }
    of = [f"keras-{backend}"]
    process = processes.forked(SCRIPT, TESTS, cases, folder, of=of, env=env)
    (output,) = processes.finish([process])
    assert output.rstrip().endswith(" cases")
    return output


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("cases", ["functions", "callback", "resuming", "data"])
def test_models_and_fits(processes: Processes, tmp_path: Path, backend: str, cases: str) -> None:
    run(processes, backend, cases, tmp_path)


@pytest.mark.parametrize(("one", "other"), [("jax", "torch"), ("torch", "jax")])
def test_the_other_backend_loads_every_bit_and_goes_on(
    processes: Processes, tmp_path: Path, one: str, other: str
) -> None:
    run(processes, one, "writes", tmp_path)
    run(processes, other, "goes_on", tmp_path)


def test_sharded_models_move_between_distributions(processes: Processes, tmp_path: Path) -> None:
    run(processes, "jax", "sharded", tmp_path)


OWN_CALLBACK = """
import logging, os, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.ERROR)
import keras, numpy as np
import unickpt
from orbax.checkpoint import v1
from unickpt.integrations.orbax import TreeHandler

def fit(begin, end):
    own = keras.callbacks.OrbaxCheckpoint(sys.argv[1], max_to_keep=2)
    x, y, which = np.ones((4, 3)), np.ones((4, 2)), {"initial_epoch": begin, "epochs": end}
    model.fit(x, y, callbacks=[own], verbose=0, **which)

model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)], name="m")
model.compile("adam", "mse")
fit(0, 1)
v1.handlers.register_handler(TreeHandler, checkpointable_name="pytree")
model.load_weights(sys.argv[1])  # a step of Orbax's own handler
fit(1, 3)
assert sorted(os.listdir(sys.argv[1])) == ["1", "2"], os.listdir(sys.argv[1])
assert os.path.exists(sys.argv[1] + "/2/pytree/UNICKPT.txt")
stored = unickpt.load(sys.argv[1] + "/2/pytree")["trainable_variables"]["m"]["dense"]
assert np.array_equal(stored["kernel"], model.layers[0].kernel)
model.layers[0].kernel.assign(np.zeros((3, 2)))
model.load_weights(sys.argv[1])
assert np.array_equal(stored["kernel"], model.layers[0].kernel)

from unickpt.integrations.keras import UnickptCheckpoint
model.layers[0].kernel.assign(np.zeros((3, 2)))
epochs = []
told = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
ours = UnickptCheckpoint(sys.argv[1], resume=True)
model.fit(np.ones((4, 3)), np.ones((4, 2)), epochs=4, callbacks=[ours, told], verbose=0)
assert (epochs, int(model.optimizer.iterations)) == ([3], 4), epochs
"""


def test_keras_own_callback_stores_in_our_format_by_a_registered_handler(
    processes: Processes, tmp_path: Path
) -> None:
    pytest.importorskip("orbax.checkpoint")
    env = {"KERAS_BACKEND": "jax", "OMP_NUM_THREADS": "1"}
    process = processes.forked(OWN_CALLBACK, tmp_path / "run", of=["keras-jax"], env=env)
    processes.finish([process])
