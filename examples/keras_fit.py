"""KERAS_BACKEND=jax python examples/keras_fit.py runs/keras 4

Killed at any moment and started again, also with KERAS_BACKEND=torch, it goes on where it was."""

import sys

import keras
import numpy as np

from unickpt.integrations.keras import UnickptCheckpoint

keras.utils.set_random_seed(7)
model = keras.Sequential(
    [
        keras.Input((16,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])


class Log(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        line = f"iteration {int(self.model.optimizer.iterations)} loss {float(logs['loss']).hex()}"
        print(line, flush=True)


x = np.random.default_rng(0).normal(size=(320, 16)).astype("float32")
model.fit(
    x,
    x.sum(1, keepdims=True),
    epochs=int(sys.argv[2]),
    verbose=0,
    callbacks=[UnickptCheckpoint(sys.argv[1], save_freq=3, resume=True), Log()],
)
