"""KerasHub: its converters from checkpoints of the Hub (`convert_weights`), and its exporters.

A checkpoint of a tiny model of transformers lies in a folder, as the converters want it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo import vision_operators
from benchmarks.zoo.conversion import Conversion
from benchmarks.zoo.keras_models import MODELS, Tiny
from benchmarks.zoo.mlx_lm import _older, hub_state

os.environ.setdefault("KERAS_BACKEND", "jax")
if importlib.util.find_spec("torchvision"):  # before transformers imports it
    vision_operators.defined()

CLASSES = [
    "AlbertForPreTraining",
    "BartModel",
    "BertModel",
    "Blip2ForConditionalGeneration",
    "DeiTForImageClassification",
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "DINOv3ViTModel",
    "DistilBertForMaskedLM",
    "EsmModel",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4AssistantForCausalLM",
    "GPT2Model",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MetaClip2Model",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "PaliGemmaForConditionalGeneration",
    "ViTForImageClassification",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "RobertaForMaskedLM",
    "XLMRobertaModel",
    "Sam3VideoModel",
    "SmolLM3ForCausalLM",
    "SwinModel",
    "T5GemmaForConditionalGeneration",
    "T5Gemma2ForConditionalGeneration",
]


def conversions() -> Iterator[Conversion]:
    """Each model that KerasHub takes from transformers; back where it has an exporter."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in CLASSES:
        try:
            yield from conversions_of(name)
        except Exception as error:
            print(f"# {name}: not run: {type(error).__name__}: {str(error)[:300]}", flush=True)


def conversions_of(name: str) -> Iterator[Conversion]:
    """Both directions of a model.

    Arguments:
        name: of its class in transformers.
    """
    from keras_hub.src.utils.transformers.export import hf_exporter

    tiny = MODELS.get(name, Tiny())
    to_keras, state = converter_of(name, tiny.made(name), tiny)
    to_keras({key: np.zeros(x.shape, x.dtype) for key, x in state.items()})
    backbone = to_keras.backbone  # type: ignore[attr-defined]
    if type(backbone).__name__ not in hf_exporter.MODEL_EXPORTERS:
        yield Conversion(f"{name}/to-keras", to_keras, state)
        return

    def to_hub(arrays: Any) -> Any:
        for path, weight in weights_of(backbone).items():
            found = arrays
            for key in path.split("/"):
                found = found[key]
            weight.assign(found)
        exporter = hf_exporter.MODEL_EXPORTERS[type(backbone).__name__]
        is_tied = "token_embedding/reverse_embeddings" not in weights_of(backbone)
        return hf_exporter._to_numpy_dict(exporter(backbone, include_lm_head=not is_tied))

    own = {
        path: np.zeros(tuple(weight.shape), np.float32)
        for path, weight in weights_of(backbone).items()
    }
    yield Conversion(f"{name}/to-keras", to_keras, state, to_hub)
    yield Conversion(f"{name}/to-hub", to_hub, nested(own), to_keras)


def converter_of(
    name: str, model: Any, tiny: Tiny | None = None
) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """A function from a checkpoint of the Hub to the weights of KerasHub's model, and an example.

    Arguments:
        name: of the class, as configurations of the Hub have it.
        model: a tiny one of transformers.
        tiny: what is otherwise in its checkpoint.
    """
    from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader
    from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader
    from safetensors.numpy import save_file

    config = _older(json.loads(model.config.to_json_string(use_diff=False)))
    config["architectures"] = [name]
    tiny = tiny or Tiny()
    for key, value in tiny.config.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    if tiny.within is not None:
        config = {"model_type": tiny.within[0], tiny.within[1]: config, "architectures": [name]}
    if "hidden_size" in config and "num_attention_heads" in config and not config.get("head_dim"):
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if "encoder_layers" in config:
        config.setdefault("num_hidden_layers", config["encoder_layers"])
    with tempfile.TemporaryDirectory() as folder:
        loader = TransformersPresetLoader(folder, config)
        backbone = loader.load_backbone(loader.check_backbone_class(), load_weights=False)

    def to_keras(arrays: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            save_file(dict(arrays), f"{folder}/model.safetensors")
            if tiny.shards:
                index = {"weight_map": dict.fromkeys(arrays, "model.safetensors")}
                (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
            with SafetensorLoader(folder) as files, redirect_stdout(None):
                loader.converter.convert_weights(backbone, files, config)
        return nested({path: np.array(weight) for path, weight in weights_of(backbone).items()})

    to_keras.backbone = backbone  # type: ignore[attr-defined]
    return to_keras, tiny.hub(hub_state(model))


def weights_of(backbone: Any) -> dict[str, Any]:
    """The weights of a model by their paths; those of one path are numbered from the second on."""
    found: dict[str, Any] = {}
    for weight in backbone.weights:
        paths = (f"{weight.path}_{n}" if n else weight.path for n in itertools.count())
        found[next(path for path in paths if path not in found)] = weight
    return found


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The tree that paths describe."""
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, last = path.split("/")
        here = found
        for folder in folders:
            here = here.setdefault(folder, {})
        here[last] = value
    return found


def flattened(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    """The paths of a tree."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        is_folder = isinstance(value, dict)
        found |= flattened(value, f"{before}{key}/") if is_folder else {f"{before}{key}": value}
    return found
