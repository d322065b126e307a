"""torchtune 0.6.1: `convert_weights`, those of single models, of reward models and of adapters."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


# Its packages of models import torchvision for the sake of images; of PyPI's there is no build
# for CPUs, and no converter asks it for anything.
class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        return _stand_in(name)


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


if importlib.util.find_spec("torchvision") is None:
    for _name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        _module = types.ModuleType(_name)
        _module.__getattr__ = _stand_in  # type: ignore[method-assign]
        _module.__path__ = []
        _module.__spec__ = importlib.machinery.ModuleSpec(_name, None)
        sys.modules[_name] = _module

from torchtune.models import convert_weights
from torchtune.models.clip._convert_weights import clip_text_hf_to_tune
from torchtune.models.flux import flux_1_autoencoder
from torchtune.models.flux._convert_weights import flux_ae_hf_to_tune
from torchtune.models.gemma import gemma
from torchtune.models.gemma2 import gemma2
from torchtune.models.gemma2._convert_weights import gemma2_hf_to_tune, gemma2_tune_to_hf
from torchtune.models.llama2 import llama2, llama2_classifier
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.llama3_2_vision import llama3_2_vision_decoder, llama3_2_vision_encoder
from torchtune.models.llama3_2_vision._convert_weights import (
    llama3_vision_hf_to_tune,
    llama3_vision_meta_to_tune,
    llama3_vision_tune_to_hf,
    llama3_vision_tune_to_meta,
)  # fmt: skip
from torchtune.models.mistral import mistral
from torchtune.models.phi3 import phi3
from torchtune.models.phi3._convert_weights import phi3_hf_to_tune, phi3_tune_to_hf
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune, qwen2_tune_to_hf
from torchtune.models.t5._convert_weights import t5_encoder_hf_to_tune
from torchtune.modules.model_fusion import DeepFusionModel
from torchtune.modules.peft import get_adapter_state_dict
from torchtune.rlhf.utils import reward_hf_to_tune, reward_tune_to_hf

from benchmarks.zoo.conversion import Conversion

Function = Callable[[Any], Any]

_SIZES: dict[str, Any] = {
    "vocab_size": 53, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "embed_dim": 24,
    "max_seq_len": 8, "intermediate_dim": 44,
}  # fmt: skip
_HEADS = {"num_heads": 6, "num_kv_heads": 2, "dim": 24}
_OWN_HEADS = {**_HEADS, "head_dim": 8}


def conversions() -> Iterator[Conversion]:
    """All of them, in both directions where there are two."""
    to_hf = partial(convert_weights.tune_to_hf, **_HEADS)
    from_hf = partial(convert_weights.hf_to_tune, **_HEADS)
    for build in (llama2, llama3, llama3_1, llama3_2, mistral):
        yield from _both(f"{build.__name__}/hf", partial(build, **_SIZES), to_hf, from_hf)
    for build in (llama2, llama3, llama3_1):
        yield from _both(
            f"{build.__name__}/meta", partial(build, **_SIZES), convert_weights.tune_to_meta,
            convert_weights.meta_to_tune,
        )  # fmt: skip
    yield from _both(
        "gemma/hf", partial(gemma, head_dim=8, **_SIZES),
        partial(convert_weights.tune_to_hf, **_OWN_HEADS),
        partial(convert_weights.hf_to_tune, **_OWN_HEADS),
    )  # fmt: skip
    yield from _both(
        "gemma2/hf", partial(gemma2, head_dim=8, **_SIZES),
        partial(gemma2_tune_to_hf, **_OWN_HEADS), partial(gemma2_hf_to_tune, **_OWN_HEADS),
    )  # fmt: skip
    for tied in (False, True):
        yield from _both(
            f"qwen2{'-tied' if tied else ''}/hf",
            partial(qwen2, tie_word_embeddings=tied, **_SIZES),
            partial(qwen2_tune_to_hf, tie_word_embeddings=tied, **_HEADS),
            partial(qwen2_hf_to_tune, tie_word_embeddings=tied, **_HEADS),
        )
    yield from _both(
        "phi3/hf", partial(phi3, **_SIZES), phi3_tune_to_hf, partial(phi3_hf_to_tune, **_HEADS)
    )
    classes = {key: value for key, value in _SIZES.items() if key != "vocab_size"}
    yield from _both(
        "llama2-reward/hf",
        partial(llama2_classifier, num_classes=1, vocab_size=53, **classes),
        partial(reward_tune_to_hf, **_HEADS), partial(reward_hf_to_tune, **_HEADS),
    )  # fmt: skip
    yield from _both(
        "llama3-2-vision/hf", _vision, partial(llama3_vision_tune_to_hf, **_VISION),
        partial(llama3_vision_hf_to_tune, **_VISION),
    )  # fmt: skip
    yield from _both(
        "llama3-2-vision/meta", _vision, llama3_vision_tune_to_meta, llama3_vision_meta_to_tune
    )
    yield Conversion(
        "llama3-lora/to-peft", partial(convert_weights.tune_to_peft_adapter_weights, **_HEADS),
        _adapter(),
    )  # fmt: skip
    yield from _one_way()


def _both(name: str, build: Callable[..., Any], there: Function, back: Function) -> Any:
    """There and back again, with the shapes that the first direction gives."""
    example = _state(build)
    zeros = {key: torch.zeros(x.shape) for key, x in example.items()}
    yield Conversion(f"{name}/tune-to", there, example, back)
    try:
        other = {key: _meta(x.shape) for key, x in there(zeros).items()}
    except Exception:  # the runner has said why
        return
    yield Conversion(f"{name}/to-tune", back, other, there)


def _state(build: Callable[..., Any]) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return {key: _meta(x.shape) for key, x in build().state_dict().items()}


def _meta(shape: Any) -> torch.Tensor:
    return torch.empty(tuple(shape), device="meta")


_VISION = {
    **_HEADS, "vocab_size": 53, "cross_attention_layers": [1, 4], "encoder_dim": 12,
    "tile_size": 8, "num_tiles": 4,
    "supported_aspect_ratios": [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)],
}  # fmt: skip


def _vision() -> Any:
    encoder = llama3_2_vision_encoder(
        patch_size=2, num_heads=3, clip_embed_dim=12, clip_num_layers=2, clip_hidden_states=[0],
        num_layers_projection=2, decoder_embed_dim=24, tile_size=8, max_num_tiles=4,
    )  # fmt: skip
    decoder = llama3_2_vision_decoder(
        vocab_size=53, num_layers=4, fusion_interval=2, num_special_tokens=5, num_heads=6,
        num_kv_heads=2, embed_dim=24, max_seq_len=8, encoder_max_seq_len=8, intermediate_dim=44,
    )  # fmt: skip
    return DeepFusionModel(decoder=decoder, encoder=encoder)


def _adapter() -> dict[str, torch.Tensor]:
    model = lora_llama3(
        lora_attn_modules=["q_proj", "k_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True,
        apply_lora_to_output=True, lora_rank=4, lora_alpha=8.0, **_SIZES,
    )  # fmt: skip
    return {key: _meta(x.shape) for key, x in get_adapter_state_dict(model.state_dict()).items()}


def _one_way() -> Iterator[Conversion]:
    """Those that only load; the checkpoints are of transformers, and of the first Flux."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    text = CLIPTextConfig(
        vocab_size=53, hidden_size=24, intermediate_size=44, num_hidden_layers=3,
        num_attention_heads=6, max_position_embeddings=8, projection_dim=10,
    )  # fmt: skip
    t5 = T5Config(
        vocab_size=53, d_model=24, d_kv=8, d_ff=44, num_layers=3, num_heads=6,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    with torch.device("meta"):
        clip_state, t5_state = CLIPTextModel(text).state_dict(), T5EncoderModel(t5).state_dict()
    yield Conversion("clip-text/to-tune", clip_text_hf_to_tune, _metas(clip_state))
    yield Conversion("t5-encoder/to-tune", t5_encoder_hf_to_tune, _metas(t5_state))
    yield Conversion("flux-autoencoder/to-tune", flux_ae_hf_to_tune, _flux_autoencoder())


def _metas(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: _meta(x.shape) for key, x in state.items()}


def _flux_autoencoder() -> dict[str, torch.Tensor]:
    """The names of Flux's own checkpoint, with the shapes of torchtune's model."""
    with torch.device("meta"):
        state = flux_1_autoencoder().state_dict()
    found: dict[str, torch.Tensor] = {}
    resnet = {"main.0": "norm1", "main.2": "conv1", "main.3": "norm2", "main.5": "conv2",
              "shortcut": "nin_shortcut"}  # fmt: skip
    attention = {"attn.q_proj": "q", "attn.k_proj": "k", "attn.v_proj": "v",
                 "attn.output_proj": "proj_out", "norm": "norm"}  # fmt: skip
    for key, x in state.items():
        half, section, *rest, kind = key.split(".")
        shape = tuple(n // 32 if n >= 32 else n for n in x.shape)
        if section in ("down", "up"):
            at = rest[0] if section == "down" else str(3 - int(rest[0]))
            if rest[1] == "layers":
                part = resnet[".".join(rest[3:])]
                name = f"{half}.{section}.{at}.block.{rest[2]}.{part}.{kind}"
            else:
                name = f"{half}.{section}.{at}.{'.'.join(rest[1:])}.{kind}"
        elif section == "mid":
            place, part = rest[0], ".".join(rest[1:])
            names = attention if place == "1" else resnet
            name = f"{half}.mid.{['block_1', 'attn_1', 'block_2'][int(place)]}.{names[part]}.{kind}"
            if "proj" in part and kind == "weight":
                shape += (1, 1)
        elif section == "end":
            name = f"{half}.{'norm_out' if rest[0] == '0' else 'conv_out'}.{kind}"
        else:
            name = key
        found[name] = _meta(shape)
    return found
