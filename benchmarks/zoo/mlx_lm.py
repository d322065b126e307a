"""mlx-lm: `sanitize` of each of its models, on what transformers 5 saves of a tiny model of the
type, or on what `benchmarks.zoo.mlx_models` says of it.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pkgutil
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.zoo.conversion import Conversion
from benchmarks.zoo.mlx_models import MODELS
from benchmarks.zoo.mlx_steps import BASE, Shapes
from benchmarks.zoo.tiny import MORE_SIZES, SIZES
from benchmarks.zoo.transformers_mapping import HEADS, tiny_model


def conversions() -> Iterator[Conversion]:
    """Each model that has a `sanitize`."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in _models():
        try:
            conversion = conversion_of(name)
        except (Exception, SystemExit) as error:  # one asks for a package so
            print(f"# {name}: not run: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        if conversion is not None:
            yield conversion


def _models() -> list[str]:
    import mlx_lm.models

    found = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}
    return sorted(found | {*MODELS})


def conversion_of(name: str) -> Conversion | None:
    """The `sanitize` of a model; None if it has none.

    Arguments:
        name: of its module; after `-` may be what is special of a configuration.
    """
    import mlx.core as mx

    if not hasattr(getattr(_module(name), "Model", None), "sanitize"):
        return None
    hub = None if name in MODELS else _torch_model(name)
    config = _config(name, hub)

    def sanitize(weights: Any) -> Any:
        # A new model for each call: some take a part away from their model or configuration.
        found = _new(name, config).sanitize({key: mx.array(x) for key, x in weights.items()})
        return {key: np.array(x) for key, x in dict(found).items()}

    if hub is not None:
        return Conversion(f"{name}/sanitize", sanitize, hub_state(hub))
    shapes = parameters(_new(name, config))
    for step in MODELS[name][1]:
        shapes = step(shapes)
    example = {key: np.zeros(shape, _dtype(key)) for key, shape in shapes.items()}
    return Conversion(f"{name}/sanitize", sanitize, example)


def _dtype(key: str) -> Any:
    return np.uint8 if key.endswith(("_blocks", "_scales")) else np.float32


def model_of(name: str) -> Any:
    """The tiny model of mlx-lm of a name in `MODELS`."""
    return _new(name, _config(name, None))


def parameters(model: Any) -> Shapes:
    """The shapes of a model's parameters."""
    from mlx.utils import tree_flatten

    return {key: tuple(x.shape) for key, x in tree_flatten(model.parameters())}


def _config(name: str, hub: Any) -> dict[str, Any]:
    """The configuration of a model: of one of transformers, or of `MODELS`."""
    of_model = BASE | MODELS[name][0] if hub is None else _older(hub.config.to_dict())
    config = {**copy.deepcopy(of_model), "model_type": name}
    text = config.get("text_config")
    if isinstance(text, dict):
        text.setdefault("model_type", f"{name}_text")
    return _filled(_module(name).ModelArgs, config)


def _new(name: str, config: dict[str, Any]) -> Any:
    module = _module(name)
    return module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"mlx_lm.models.{name}")
    except ModuleNotFoundError:
        if name not in MODELS:
            raise
        return importlib.import_module(f"mlx_lm.models.{name.rpartition('-')[0]}")


def _torch_model(name: str) -> Any:
    """A tiny model of a type, of transformers."""
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    kind = name
    if kind not in configuration_auto.CONFIG_MAPPING_NAMES:
        kind = name.replace("_", "-")
    if kind not in configuration_auto.CONFIG_MAPPING_NAMES:
        raise LookupError("transformers has no such type")
    for head in HEADS:
        found = getattr(modeling_auto, head, {}).get(kind)
        if found:
            return tiny_model(getattr(transformers, found if isinstance(found, str) else found[0]))
    raise LookupError("transformers has no such model")


def _older(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as files of the Hub have it: rope is told apart in newer ones only."""
    rope = config.get("rope_parameters") or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            config.setdefault(key, rope[key])
    for part in ("text_config", "vision_config"):
        if isinstance(config.get(part), dict):
            _older(config[part])
    return config


def _filled(kind: Any, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with what mlx-lm requires and transformers has no longer."""
    sizes = {**SIZES, **MORE_SIZES}
    for field in dataclasses.fields(kind):
        if field.name in config and config[field.name] is not None:
            continue
        missing = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if not missing:
            continue
        if field.name == "text_config":
            config[field.name] = {**config}
            continue
        of_type = str(field.type)
        plain = True if "bool" in of_type else 1.0 if "float" in of_type else None
        config[field.name] = sizes.get(field.name, 2 if "int" in of_type else plain)
    return config


def hub_state(model: Any) -> dict[str, Any]:
    """What transformers saves of a model, with zeros."""
    from transformers.core_model_loading import revert_weight_conversion

    own: dict[int, str] = {}
    state = {
        key: value.detach()
        for key, value in model.state_dict(keep_vars=True).items()
        if own.setdefault(id(value), key) == key
    }
    hub = revert_weight_conversion(model, state)
    return {key: np.zeros(tuple(x.shape), np.float32) for key, x in hub.items()}
