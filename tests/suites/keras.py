"""Keras 3.15.1: keras/src/callbacks/orbax_checkpoint_test.py, with `OrbaxCheckpoint`, `load_model`
and `Model.load_weights` replaced by `UnickptCheckpoint`, `load_model` and `load`.

KERAS_BACKEND says which backend; XLA_FLAGS=--xla_force_host_platform_device_count=2 gives JAX the
devices that two of the tests need.
"""

from __future__ import annotations

from typing import Any

FILES = ("keras/src/callbacks/orbax_checkpoint_test.py",)
REASONS = {
    "*::test_save_freq_epoch": "lists the directory for one name, of digits; here it is step_2, "
    "beside the lock file",
}


def redirect() -> None:
    import keras.src.callbacks.orbax_checkpoint as theirs
    from keras.src import models, saving

    from unickpt.integrations import keras as ours
    from unickpt.integrations.keras.models import newest

    def load_weights(model: Any, filepath: Any) -> None:
        ours.load(newest(filepath), model, weights_only=True)

    theirs.OrbaxCheckpoint = ours.UnickptCheckpoint
    saving.load_model = ours.load_model
    models.Model.load_weights = load_weights
