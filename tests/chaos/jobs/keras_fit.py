"""Keras with `UnickptCheckpoint`, on JAX."""

import keras
import numpy as np
import target

import unickpt
from unickpt.integrations.keras import UnickptCheckpoint


class Began(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        target.resumed(int(self.model.optimizer.iterations))


keras.utils.set_random_seed(7)
layers = keras.layers.Dense(32), keras.layers.Dropout(0.2), keras.layers.Dense(1)
model = keras.Sequential([keras.Input((8,)), *layers])
model.compile(keras.optimizers.Adam(0.01), "mse")
x = np.random.default_rng(0).normal(size=(32 * target.STEPS, 8)).astype("float32")
options = unickpt.SaveOptions(metrics=target.committed)
saves = UnickptCheckpoint(
    target.FOLDER, save_freq=1, max_to_keep=target.KEPT, resume=True, options=options
)
model.fit(x, x.sum(1, keepdims=True), verbose=0, callbacks=[saves, Began()])
target.ended({v.path: np.asarray(v.value) for v in model.variables + model.optimizer.variables})
