"""Keras with JAX, imported by a server of processes."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras  # noqa: F401

import unickpt.integrations.keras  # noqa: F401
