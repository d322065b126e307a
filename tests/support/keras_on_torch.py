"""Keras with torch, imported by a server of processes."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras  # noqa: F401

import unickpt.integrations.keras  # noqa: F401
