"""transformers 5: its conversion mapping, by which it reads checkpoints of the Hub and writes
them.

For each model of the mapping a tiny one is made. What it saves is the form on the Hub
(`revert_weight_conversion`); from it the model is loaded (`from_pretrained` with a state).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

from benchmarks.zoo.conversion import Conversion
from benchmarks.zoo.tiny import MORE_SIZES, OF_FAMILY_5, SIZES

MOST_NUMBERS = 5_000_000
"""Models that stay larger than this are not observed."""

HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


def conversions() -> Iterator[Conversion]:
    """Each model that the mapping changes, in both directions."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for model_type, model_class in models():
        try:
            model = tiny_model(model_class)
        except Exception as error:
            print(
                f"# {model_type}: no tiny model: {type(error).__name__}: {str(error)[:200]}",
                flush=True,
            )
            continue
        yield from conversions_of(f"{model_type}/{model_class.__name__}", model)


def models() -> list[tuple[str, Any]]:
    """Model types and names of classes of the mapping, each with its class."""
    import transformers
    from transformers import conversion_mapping
    from transformers.models.auto import configuration_auto, modeling_auto

    found: dict[Any, str] = {}
    for key in conversion_mapping._build_checkpoint_conversion_mapping():
        names = [key]
        if key in configuration_auto.CONFIG_MAPPING_NAMES:
            names = [_names(getattr(modeling_auto, each, {}).get(key)) for each in HEADS]
        model_class = next((getattr(transformers, name, None) for name in names if name), None)
        if inspect.isclass(model_class) and model_class not in found:
            found[model_class] = key
    return [(key, model_class) for model_class, key in found.items()]


def _names(found: Any) -> str | None:
    return found[0] if isinstance(found, tuple | list) else found


def tiny_model(model_class: Any, change: dict[str, Any] | None = None) -> Any:
    """A tiny model of a class.

    Arguments:
        model_class: of transformers.
        change: of its configuration, where that has such a name.

    Raises:
        ValueError: it stays large.
    """
    import torch

    values = tiny_values(model_class.config_class)
    config = model_class.config_class(
        **{**values, **{k: v for k, v in (change or {}).items() if k in values}}
    )
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > MOST_NUMBERS:
        raise ValueError(f"it has {count:,} numbers")
    torch.manual_seed(0)
    return model_class(config)


def tiny_values(kind: Any, depth: int = 0) -> dict[str, Any]:
    """What a configuration is made of, with those that are in it."""
    default = kind()
    names = {*default.to_dict()} - {*getattr(kind, "attribute_map", {})}
    values: dict[str, Any] = {}
    for name in names:
        value, wanted = getattr(default, name, None), {**SIZES, **MORE_SIZES}.get(name)
        if wanted is None or isinstance(value, list | tuple | dict):
            continue
        if value is None and name not in ("num_key_value_heads", "head_dim"):
            continue
        values[name] = float(wanted) if isinstance(value, float) else wanted
    for name in {*(getattr(kind, "sub_configs", None) or {})} if depth < 3 else ():
        part = getattr(default, name, None)
        if part is not None and not isinstance(part, dict):
            values[name] = type(part)(**tiny_values(type(part), depth + 1))
    return values | OF_FAMILY_5.get(kind.model_type, {})


def conversions_of(name: str, model: Any) -> Iterator[Conversion]:
    """Both directions of a model."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    model_class, config = type(model), model.config

    def to_hub(state: Any) -> Any:
        return revert_weight_conversion(model, dict(state))

    def from_hub(state: Any) -> Any:
        loaded = model_class.from_pretrained(None, config=config, state_dict=dict(state))
        return {key: value.clone() for key, value in loaded.state_dict().items()}

    # As it is saved: of those that are tied, the first.
    own: dict[int, str] = {}
    state = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if value.numel() and own.setdefault(id(value), key) == key:
            state[key] = torch.empty_like(value.detach())
    hub = {key: torch.empty_like(value) for key, value in to_hub(state).items()}
    yield Conversion(f"{name}/from-hub", from_hub, hub, to_hub)
    yield Conversion(f"{name}/to-hub", to_hub, state, from_hub)
