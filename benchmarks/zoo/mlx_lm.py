"""mlx-lm: `sanitize` of each of its models, on what transformers 5 saves of a tiny model of the
type.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.zoo.conversion import Conversion
from benchmarks.zoo.tiny import MORE_SIZES, SIZES
from benchmarks.zoo.transformers_mapping import HEADS, tiny_model


def conversions() -> Iterator[Conversion]:
    """Each model that has a `sanitize`, and whose type transformers has."""
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

    return sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))


def conversion_of(name: str) -> Conversion | None:
    """The `sanitize` of a model; None if it has none."""
    import mlx.core as mx

    module = importlib.import_module(f"mlx_lm.models.{name}")
    if not hasattr(getattr(module, "Model", None), "sanitize"):
        return None
    model = _torch_model(name)
    config = {**model.config.to_dict(), "model_type": name}
    text = config.get("text_config")
    if isinstance(text, dict):
        text.setdefault("model_type", f"{name}_text")
    args = module.ModelArgs.from_dict(_filled(module.ModelArgs, _older(config)))
    module.Model(args)

    def sanitize(weights: Any) -> Any:
        # A new model for each call: some take a part away from their model.
        found = module.Model(args).sanitize({key: mx.array(x) for key, x in weights.items()})
        return {key: np.array(x) for key, x in dict(found).items()}

    example = hub_state(model)
    return Conversion(f"{name}/sanitize", sanitize, example)


def _torch_model(name: str) -> Any:
    """A tiny model of a type, of transformers."""
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    kind = {"phi3small": "phi3", "qwen3_5": "qwen3_5"}.get(name, name)
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
