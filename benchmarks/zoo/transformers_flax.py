"""transformers 4.57: each of its Flax classes with its PyTorch class, in both directions.

`load_flax_weights_in_pytorch_model` and `convert_pytorch_state_dict_to_flax` run on tiny
models of each class; nothing of these functions is copied. transformers 5 has neither.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.zoo.conversion import Conversion
from benchmarks.zoo.tiny import tiny_config

FAMILIES = [
    "albert",
    "bart",
    "beit",
    "bert",
    "big_bird",
    "blenderbot",
    "blenderbot_small",
    "bloom",
    "clip",
    "dinov2",
    "distilbert",
    "electra",
    "gemma",
    "gpt2",
    "gpt_neo",
    "gptj",
    "llama",
    "longt5",
    "marian",
    "mbart",
    "mistral",
    "mt5",
    "opt",
    "pegasus",
    "regnet",
    "resnet",
    "roberta",
    "roberta_prelayernorm",
    "roformer",
    "t5",
    "vit",
    "wav2vec2",
    "whisper",
    "xglm",
    "xlm_roberta",
]
PAIRS = [
    "encoder_decoder",
    "speech_encoder_decoder",
    "vision_encoder_decoder",
    "vision_text_dual_encoder",
]

VARIANTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "albert": [("groups", {"num_hidden_groups": 2, "inner_group_num": 2})],
    "electra": [("one-size", {"embedding_size": 24})],
    "longt5": [("global", {"encoder_attention_type": "transient-global"})],
    "mbart": [("tied", {"tie_word_embeddings": True})],
    "opt": [("projected", {"word_embed_proj_dim": 14})],
    "resnet": [("basic", {"layer_type": "basic"})],
    "t5": [("v1.1", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False})],
    "wav2vec2": [("adapter", {"add_adapter": True})],
}
"""Other configurations, whose weights have other names or shapes."""


def conversions(only: str = "") -> Iterator[Conversion]:
    """Each class in both directions, then again for each variant of its family.

    Arguments:
        only: a part of the names; others are not made.
    """
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name, flax_class, torch_class, config in pairs():
        if only in name:
            yield from conversions_of(name, flax_class, torch_class, config)


def pairs() -> Iterator[tuple[str, Any, Any, Any]]:
    """Names, both classes and a configuration."""
    for family in FAMILIES:
        for title, change in [("", {}), *VARIANTS.get(family, [])]:
            for flax_class, torch_class in classes(family):
                if title and not _is_main(torch_class):
                    continue
                name = f"{family}{'-' + title if title else ''}/{torch_class.__name__}"
                yield name, flax_class, torch_class, tiny_config(torch_class, change)
    for family in PAIRS:
        for flax_class, torch_class in classes(family):
            for title, config in _composed(family):
                yield f"{family}-{title}/{torch_class.__name__}", flax_class, torch_class, config


def classes(family: str) -> list[tuple[Any, Any]]:
    """The Flax classes of a family, each with its PyTorch class."""
    import importlib

    module = f"transformers.models.{family}.modeling_"
    flax = importlib.import_module(f"{module.replace('modeling_', '')}modeling_flax_{family}")
    torch = importlib.import_module(f"{module}{family}")
    found = []
    for name in flax.__all__:
        plain = name.removeprefix("Flax")
        if plain.endswith("PreTrainedModel"):
            continue
        other = next(
            (
                getattr(torch, each)
                for each in (plain, plain.replace("ForCausalLM", "LMHeadModel"))
                if hasattr(torch, each)
            ),
            None,
        )
        if other is None:
            raise LookupError(f"{name} has no PyTorch class")
        found.append((getattr(flax, name), other))
    return found


def _is_main(torch_class: Any) -> bool:
    """Whether variants are observed of it: of each family one class with a head."""
    name = torch_class.__name__
    return name.endswith(
        ("ForConditionalGeneration", "ForPreTraining", "ForImageClassification")
    ) or (name.endswith("ForCausalLM") and "OPT" in name)


def _composed(family: str) -> list[tuple[str, Any]]:
    """Configurations of the classes that are made of two models."""
    import transformers as t

    bert = tiny_config(t.BertModel)
    as_decoder = {"is_decoder": True, "add_cross_attention": True}
    decoder = tiny_config(t.BertModel, as_decoder)
    gpt2 = tiny_config(t.GPT2Model, {**as_decoder, "n_positions": 137})
    bart = tiny_config(t.BartForCausalLM, {**as_decoder, "max_position_embeddings": 137})
    vit, clip = tiny_config(t.ViTModel), tiny_config(t.CLIPModel)
    wav = tiny_config(t.Wav2Vec2Model)
    if family == "encoder_decoder":
        both = t.EncoderDecoderConfig.from_encoder_decoder_configs
        return [("bert-bert", both(bert, decoder)), ("bert-gpt2", both(bert, gpt2))]
    if family == "vision_encoder_decoder":
        both = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs
        return [("vit-gpt2", both(vit, gpt2))]
    if family == "speech_encoder_decoder":
        both = t.SpeechEncoderDecoderConfig.from_encoder_decoder_configs
        return [("wav2vec2-gpt2", both(wav, gpt2)), ("wav2vec2-bart", both(wav, bart))]
    both = t.VisionTextDualEncoderConfig.from_vision_text_configs
    change = {"projection_dim": 14}
    return [
        ("vit-bert", both(vit, bert, **change)),
        ("clip-bert", both(clip.vision_config, bert, **change)),
    ]


def conversions_of(
    name: str, flax_class: Any, torch_class: Any, config: Any
) -> Iterator[Conversion]:
    """Both directions of a class.

    Arguments:
        name: of the conversions.
        flax_class, torch_class: of transformers.
        config: of both.
    """
    import jax
    import torch
    from flax.traverse_util import flatten_dict, unflatten_dict
    from transformers import modeling_flax_pytorch_utils as utils

    with _older_clip():
        flax_model = flax_class(config, _do_init="EncoderDecoder" in name or "Dual" in name)
    # Shapes are enough: the converter asks the Flax model for its names and shapes only.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _tree_of(flax_model))
    flax_model._is_initialized, flax_model._params = True, shapes
    torch.manual_seed(0)
    model = torch_class(config)
    known = set(flatten_dict(shapes))

    def to_torch(params: Any) -> Any:
        utils.load_flax_weights_in_pytorch_model(model, params)
        return {key: value.clone() for key, value in model.state_dict().items()}

    def to_flax(state: Any) -> Any:
        found = flatten_dict(utils.convert_pytorch_state_dict_to_flax(dict(state), flax_model))
        # As from_pretrained(from_pt=True) does with what the model does not have.
        return unflatten_dict({key: np.asarray(x) for key, x in found.items() if key in known})

    flax_example = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    yield Conversion(f"{name}/to-torch", to_torch, flax_example, to_flax)
    state = {key: torch.empty_like(value) for key, value in model.state_dict().items()}
    yield Conversion(f"{name}/to-flax", to_flax, state, to_torch)


def _tree_of(flax_model: Any) -> Any:
    return flax_model.params if flax_model._is_initialized else flax_model.params_shape_tree


@contextmanager
def _older_clip() -> Iterator[None]:
    """T5 calls `jnp.clip` with a keyword that JAX has renamed since."""
    import jax.numpy as jnp

    newer = jnp.clip
    jnp.clip = lambda x, *limits, a_max=None: newer(
        x, *limits, **{} if a_max is None else {"max": a_max}
    )
    try:
        yield
    finally:
        jnp.clip = newer
