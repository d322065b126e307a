"""Models from checkpoints alone: the configuration and the names of trained variables are stored
next to the variables, since Keras' own checkpoints separate trained ones."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Mapping
from typing import Any

import keras
from keras.src.saving.serialization_lib import ObjectSharingScope, SafeModeScope

import unickpt
from unickpt import Checkpoint, Checkpointer
from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, LoadMismatch
from unickpt.extend import Source

# As the format of Keras (`unickpt convert --to keras`) knows them: in the metadata, the model's
# configuration, and the paths of its variables, by Keras' two groups and in its order.
CONFIG, VARIABLES = "keras", "keras_variables"
TRAINED, OTHERS = "trainable_variables", "non_trainable_variables"
_SHARED = "shared_object_id"
_COUNTED = re.compile(r"_\d+(?=/|$)")
_log = logging.getLogger("unickpt")


def config(model: Any) -> dict[str, Any]:
    """The configuration of a model, as it is stored in the metadata; nothing, if Keras cannot
    serialize it."""
    try:
        with warnings.catch_warnings(action="ignore"), ObjectSharingScope():
            text = json.dumps(keras.saving.serialize_keras_object(model))
    except Exception as error:  # whatever the code of a user's layer raises
        _log.info("the configuration of the model is not stored: %s", error)
        return {}
    return {CONFIG: _numbered(json.loads(text), {})}


def variables(model: Any) -> dict[str, Any]:
    """The paths of the variables of a model, as they are stored in the metadata."""
    groups = {TRAINED: model.trainable_variables, OTHERS: model.non_trainable_variables}
    return {
        VARIABLES: {key: [variable.path for variable in group] for key, group in groups.items()}
    }


def _numbered(config: Any, numbers: dict[int, int]) -> Any:
    """A configuration with small numbers for objects that occur in it twice, in place of their
    addresses: it is the same on all processes."""
    if isinstance(config, list):
        return [_numbered(part, numbers) for part in config]
    if not isinstance(config, dict):
        return config
    result = {key: _numbered(part, numbers) for key, part in config.items()}
    shared = result.get(_SHARED)
    if type(shared) is int:
        result[_SHARED] = numbers.setdefault(shared, len(numbers) + 1)
    return result


def newest(source: Source) -> Checkpoint:
    """A checkpoint; of a directory of steps, the newest.

    Raises:
        CheckpointNotFound: there is none.
    """
    if isinstance(source, Checkpoint):
        return source
    try:
        return unickpt.open(source)
    except CheckpointNotFound:
        run = Checkpointer(source)
        latest = run.latest()
        if latest is None:
            raise
        return unickpt.open(run.path(latest))


def made(stored: Checkpoint, custom_objects: Mapping[str, Any] | None, safe_mode: bool) -> Any:
    """The model that a checkpoint's configuration describes, with new variables.

    Raises:
        LoadMismatch: there is no configuration.
        CheckpointCorrupt: Keras makes nothing of it.
        ValueError, TypeError: as Keras, for classes that it does not know or that are not safe.
    """
    config = stored.metadata.get(CONFIG)
    if config is None:
        raise LoadMismatch(
            f"{stored.location} has no configuration of its model, as of a class that Keras cannot "
            "serialise, or in a checkpoint of an earlier unickpt: build the model in the program, "
            "and call unickpt.integrations.keras.load(path, model)"
        )
    if not isinstance(config, dict):
        raise CheckpointCorrupt(f"{stored.location}: the configuration of its model is no object")
    compiled = config.get("compile_config")
    with ObjectSharingScope():
        model = keras.saving.deserialize_keras_object(
            {**config, "compile_config": None},
            custom_objects=dict(custom_objects or {}),
            safe_mode=safe_mode,
        )
        if not isinstance(model, keras.Model):
            raise CheckpointCorrupt(f"{stored.location}: its configuration describes no model")
        _give_paths(model, stored.metadata.get(VARIABLES))
        if compiled:  # after that: the optimizer names its variables by these paths
            scope = keras.saving.custom_object_scope(dict(custom_objects or {}))
            with scope, SafeModeScope(safe_mode):
                model.compile_from_config(compiled)
    return model


def _give_paths(model: Any, noted: Any) -> None:
    """Gives variables the paths that they had when they were saved.

    Keras builds layers by themselves from a configuration, so that the path of `dense/kernel` lacks
    the model's name, but for functional models; and it counts seed generators again. If a path does
    not end with the one that Keras gives, all stay unchanged, and the load reports the mismatch.
    """
    if not isinstance(noted, dict):
        return
    groups = {TRAINED: model.trainable_variables, OTHERS: model.non_trainable_variables}
    pairs = list[tuple[Any, str]]()
    for key, group in groups.items():
        paths = noted.get(key)
        if not isinstance(paths, list) or len(paths) != len(group):
            return
        pairs += zip(group, paths, strict=True)
    if not all(_ends_with(path, variable.path) for variable, path in pairs):
        return
    for variable, path in pairs:
        variable._path = path
    for layer in model._flatten_layers():
        if hasattr(layer, "_torch_params"):  # has them by their paths
            layer._track_variables()


def _ends_with(path: Any, end: str) -> bool:
    """Whether a path ends with another one, whatever was counted in it."""
    path, end = (_COUNTED.sub("", f"/{text}") for text in (path, end))
    return bool(path.endswith(end))
