"""Models from checkpoints alone: their configuration is stored beside their variables."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, LoadMismatch
from unickpt.reading import checkpoint
from unickpt.runs.checkpointer import Checkpointer

_KEY = "keras"
_log = logging.getLogger("unickpt")


def metadata(model: Any) -> dict[str, Any]:
    """The configuration of a model, as it is stored; nothing, if Keras cannot tell it."""
    try:
        with warnings.catch_warnings(action="ignore"):
            config = json.dumps(keras.saving.serialize_keras_object(model))
    except Exception as error:  # whatever the code of a user's layer raises
        _log.info("the configuration of the model is not stored: %s", error)
        return {}
    return {_KEY: json.loads(config)}


def newest(source: checkpoint.Source) -> checkpoint.Checkpoint:
    """A checkpoint; of a directory of steps, the newest.

    Raises:
        CheckpointNotFound: there is none.
    """
    try:
        return checkpoint.opened(source)
    except CheckpointNotFound:
        assert not isinstance(source, checkpoint.Checkpoint), "it is open"
        run = Checkpointer(source)
        latest = run.latest()
        if latest is None:
            raise
        return checkpoint.open(run.path(latest))


def made(
    stored: checkpoint.Checkpoint, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> Any:
    """The model that a checkpoint's configuration describes, with new variables.

    Raises:
        LoadMismatch: there is no configuration.
        CheckpointCorrupt: Keras makes nothing of it.
        ValueError, TypeError: as Keras, for classes that it does not know or that are not safe.
    """
    config = stored.metadata.get(_KEY)
    if config is None:
        raise LoadMismatch(
            f"{stored.location} has no configuration of its model, as of a class that Keras cannot "
            "serialise, or in a checkpoint of an earlier unickpt: build the model in the program, "
            "and call unickpt.integrations.keras.load(path, model)"
        )
    if not isinstance(config, dict):
        raise CheckpointCorrupt(f"{stored.location}: the configuration of its model is no object")
    found = keras.saving.deserialize_keras_object(
        config, custom_objects=dict(custom_objects or {}), safe_mode=safe_mode
    )
    if not isinstance(found, keras.Model):
        raise CheckpointCorrupt(f"{stored.location}: its configuration is that of no model")
    return found
