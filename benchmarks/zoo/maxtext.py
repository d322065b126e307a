"""MaxText 0.2.5: `param_mapping` of 55 models, scanned and not, to and from Hugging Face's names.

The functions are those that `to_huggingface` and `to_maxtext` call between reading and writing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

import jax
import numpy as np
from maxtext.checkpoint_conversion import to_huggingface, to_maxtext
from maxtext.checkpoint_conversion.utils.hf_model_configs import HF_MODEL_CONFIGS
from maxtext.checkpoint_conversion.utils.hf_shape import HF_SHAPE
from maxtext.checkpoint_conversion.utils.param_mapping import HOOK_FNS, PARAM_MAPPING
from maxtext.checkpoint_conversion.utils.utils import validate_and_filter_param_map_keys
from maxtext.configs import pyconfig
from maxtext.utils import max_logging
from pydantic import ValidationError

from benchmarks.zoo.conversion import Conversion

Arrays = dict[str, Any]
Function = Callable[[Arrays], Arrays]

ALIASES = {
    "qwen3-1.7b": "qwen3-0.6b", "qwen3-1.7b-base": "qwen3-0.6b", "qwen3-4b-base": "qwen3-4b",
    "qwen3-8b-base": "qwen3-8b", "qwen3-14b-base": "qwen3-14b",
    "qwen3-coder-480b-a35b": "qwen3-480b-a35b", "weaver-mini": "qwen3-vl-2b",
    "weaver-max": "qwen3-vl-2b", "qwen3-omni-30b-a3b": "qwen3-30b-a3b",
}  # fmt: skip
"""Models for which the package has no shapes of the other side, and one with the same."""


WEAVER = (
    ("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"), ("o_proj", "to_out"),
    ("q_norm", "norm_q"), ("k_norm", "norm_k"),
)  # fmt: skip
"""Its names, where those of Qwen 3 VL are others."""


def conversions() -> Iterator[Conversion]:
    """All of them: to Hugging Face's names where the package has these, and back."""
    only = os.environ.get("ZOO_MODELS", "").split(",")
    for name in PARAM_MAPPING:
        if only != [""] and name not in only:
            continue
        for scanned in (True, False):
            label = f"{name}/{'scanned' if scanned else 'unscanned'}"
            try:
                model = Model(name, scanned)
                hf = model.hf_shapes()
            except ValidationError as error:  # MaxText has no such model, such as one scanned
                print(label, str(error)[:200], file=sys.stderr)
                continue
            except Exception as error:
                yield Conversion(f"{label}/to-hf", _raiser(error), {"none": np.zeros(1)})
                yield Conversion(f"{label}/from-hf", _raiser(error), {"none": np.zeros(1)})
                continue
            from_hf = model.from_hf
            if name in HF_SHAPE:
                yield Conversion(f"{label}/to-hf", model.to_hf, model.example, from_hf)
            yield Conversion(
                f"{label}/from-hf", from_hf, hf, model.to_hf if name in HF_SHAPE else None
            )


class Model:
    """A model with small sizes.

    Arguments:
        name: MaxText's.
        scanned: whether its layers are stacked.
    """

    def __init__(self, name: str, scanned: bool) -> None:
        self.name = name
        known = name.replace("-Instruct", "").replace("qwen3-coder-", "qwen3-")
        if name == "qwen3.5-35b-fp8":
            known = "qwen3.5-35b-a3b-fp8"
        with _quiet():
            plain = _initialize(known, scanned, {})
            self.config = _initialize(known, scanned, sizes(plain))
            hf_name = name if name in HF_MODEL_CONFIGS else known
            hf = copy.deepcopy(HF_MODEL_CONFIGS[hf_name])
            _shrink(hf, self.config)
            to_huggingface._validate_or_update_architecture(hf, self.config, override=True)
            self.hf_config = hf.to_dict()
            _shrink_values(self.hf_config, self.config)
            self.abstract, _ = to_maxtext.get_maxtext_model_info(self.config)
        self.scanned = scanned
        self.example = {key: shape for key, (_, shape) in self.abstract.items()}

    def _mappings(self) -> tuple[Any, Any, Any]:
        name = self.name
        known = HF_SHAPE[ALIASES.get(name, name)]

        def shape(hf: dict[str, Any]) -> dict[str, Any]:
            if name.startswith("weaver"):  # as Qwen 3 VL, without its first words
                first, found = "model.language_model.", {}
                for key, x in known(hf).items():
                    for one, other in WEAVER:
                        key = key.replace(f"self_attn.{one}", f"self_attn.{other}")
                    found[key.removeprefix(first)] = x
                return found
            if "thinker_config" in hf:
                text = known(hf["thinker_config"]["text_config"])
                return {f"thinker.{key}": x for key, x in text.items()}
            return dict(known(hf))

        with mock.patch.dict(to_huggingface.HF_SHAPE, {name: shape}):
            found = to_huggingface._get_model_mappings(
                name, self.scanned, self.hf_config, self.config
            )
        return found["param_mapping"], found["hook_fn_mapping"], found["shape_mapping"]

    def to_hf(self, state: Arrays) -> Arrays:
        """What `to_huggingface` makes."""
        names, hooks, shapes = self._mappings()
        with _quiet():
            keys = validate_and_filter_param_map_keys(names, {*state})
            given = {key: jax.numpy.asarray(x) for key, x in state.items()}
            return dict(
                to_huggingface._transform_weights_to_full_model(
                    self.config, keys, given, names, hooks, shapes
                )
            )

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the other side."""
        if self.name.startswith("olmo3"):  # for which the package has none
            return _olmo3(self.config)
        zeros = {key: np.zeros(shape, np.float32) for key, shape in self.example.items()}
        return {key: x.shape for key, x in self.to_hf(zeros).items()}

    def from_hf(self, state: Arrays) -> Arrays:
        """What `to_maxtext` makes, without the lazy reading."""
        config, found = self.config, [None] * len(self.abstract)
        names = PARAM_MAPPING[self.name](self.hf_config, config, config.scan_layers)
        hooks = HOOK_FNS[self.name](self.hf_config, config, config.scan_layers, saving_to_hf=False)

        def getter(key: str | None) -> Any:
            if key is None:
                return None
            key = to_maxtext.resolve_scale_key(key, state)
            return to_maxtext._convert_tensor_to_numpy(np.asarray(state[key]), "float32")

        with _quiet():
            keys = validate_and_filter_param_map_keys(names.keys(), self.abstract.keys())
            for key in keys:
                at, shape = to_maxtext._get_maxtext_indices_and_shapes(key, self.abstract)
                load = to_maxtext._get_hf_loading_function(
                    names.get(key), getter, hooks.get(key), shape, config, key
                )
                to_maxtext._get_maxtext_weight(load, at, shape, key, found, "float32", False)
        return {
            key: np.asarray(found[at])
            for key, (at, _) in self.abstract.items()
            if found[at] is not None
        }


def _initialize(name: str, scanned: bool, extra: dict[str, Any]) -> Any:
    base = os.path.join(os.path.dirname(pyconfig.__file__), "base.yml")
    options = {
        "run_name": "zoo", "model_name": name, "scan_layers": scanned,
        "skip_jax_distributed_system": True, "override_model_config": True,
        "weight_dtype": "float32", "attention": "dot_product",
        "per_device_batch_size": 1, "max_target_length": 16, "enable_checkpointing": False,
        "log_config": False, "megablox": False, "sparse_matmul": False, **extra,
    }  # fmt: skip
    return pyconfig.initialize(["zoo", base, *(f"{key}={x}" for key, x in options.items())])


def sizes(full: Any) -> dict[str, Any]:
    """Small sizes for a model, that differ from each other."""
    same = full.base_num_query_heads == full.base_num_kv_heads
    layers = {"gemma2": 2, "gemma3": 7, "gemma4": 7, "qwen3_next": 8, "qwen3_5": 8, "olmo3": 4,
              "gpt_oss": 4, "deepseek": 4}  # fmt: skip
    block = str(getattr(full.decoder_block, "value", full.decoder_block))
    found: dict[str, Any] = {
        "base_emb_dim": 48 if block in ("qwen2", "qwen3", "olmo3", "mixtral") else 20,
        "base_num_query_heads": 6, "base_num_kv_heads": 6 if same else 2,
        "base_mlp_dim": 44, "head_dim": 8, "vocab_size": 53,
        "base_num_decoder_layers": layers.get(block, 3),
    }  # fmt: skip
    if block.startswith("gemma4"):
        found |= {"global_head_dim": 12, "base_num_decoder_layers": 6 if block == "gemma4" else 10}
        if full.global_num_kv_heads:
            found["global_num_kv_heads"] = 3
        if full.hidden_size_per_layer_input:
            found |= {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 53,
                      "num_kv_shared_layers": 4}  # fmt: skip
    if full.use_multimodal:
        found["use_multimodal"] = False
    if full.out_hidden_size_for_vit == full.base_emb_dim:
        found["out_hidden_size_for_vit"] = found["base_emb_dim"]
    if full.use_mrope:
        found["use_mrope"] = False
    if full.num_experts > 1:
        found |= {"num_experts": 5, "num_experts_per_tok": 2, "base_moe_mlp_dim": 14}
        if full.base_mlp_dim == full.base_moe_mlp_dim:
            found["base_mlp_dim"] = 14
    if full.attention_type == "mla":
        found |= {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
        if full.q_lora_rank:
            found["q_lora_rank"] = 9
    if block == "deepseek4":
        found |= {"qk_rope_head_dim": 4, "base_num_kv_heads": 1}
    if block == "deepseek":
        found["first_num_dense_layers"] = 1
    if block in ("qwen3_next", "qwen3_5"):
        found |= {"gdn_key_head_dim": 5, "gdn_value_head_dim": 7, "gdn_num_key_heads": 2,
                  "gdn_num_value_heads": 6, "base_mlp_dim": 14}  # fmt: skip
    return found


def _shrink(hf: Any, config: Any) -> None:
    """Sizes of the other side's configuration that the package does not take from its own."""
    text = getattr(hf, "text_config", hf) or hf
    small = {
        "first_k_dense_replace": 1, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "shared_expert_intermediate_size":
        14, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    for key, value in small.items():
        if getattr(text, key, None) is not None:
            setattr(text, key, value)
    layered = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    for key in (*layered, "num_kv_shared_layers"):
        if getattr(text, key, None):
            setattr(text, key, getattr(config, key))
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: config.num_decoder_layers]


def _shrink_values(hf: dict[str, Any], config: Any) -> None:
    """As `_shrink`, for what the configuration's class does not let be set."""
    hf = hf.get("thinker_config") or hf
    text = hf.get("text_config") or hf
    if (text is not hf and "layer_types" not in text) or "thinker_config" in hf:
        text |= {
            "hidden_size": config.emb_dim, "intermediate_size": config.mlp_dim,
            "num_hidden_layers": config.num_decoder_layers, "head_dim": config.head_dim,
            "num_attention_heads": config.num_query_heads, "vocab_size": config.vocab_size,
            "num_key_value_heads": config.num_kv_heads,
        }  # fmt: skip
        if config.num_experts > 1:
            text |= {"num_experts": 5, "moe_intermediate_size": config.moe_mlp_dim}
    if "qk_head_dim" in text:
        text["qk_head_dim"] = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.decoder_block.value == "qwen3_next":  # transformers 5.24 has `layer_types` instead
        text.setdefault("full_attention_interval", config.inhomogeneous_layer_cycle_interval)
    if not config.decoder_block.value.startswith("gemma4"):
        return
    text |= {
        "head_dim": config.head_dim, "global_head_dim": config.global_head_dim,
        "num_key_value_heads": config.num_kv_heads, "per_layer_config": {},
    }  # fmt: skip
    if config.global_num_kv_heads:
        text["num_global_key_value_heads"] = config.global_num_kv_heads


def _olmo3(config: Any) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import Olmo3Config, Olmo3ForCausalLM

    sizes = Olmo3Config(
        hidden_size=config.emb_dim, intermediate_size=config.mlp_dim, vocab_size=config.vocab_size,
        num_hidden_layers=config.num_decoder_layers, num_attention_heads=config.num_query_heads,
        num_key_value_heads=config.num_kv_heads, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        return {key: tuple(x.shape) for key, x in Olmo3ForCausalLM(sizes).state_dict().items()}


def _raiser(error: Exception) -> Function:
    def function(state: Arrays) -> Arrays:
        raise error

    return function


def _quiet() -> contextlib.AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
    stack.enter_context(mock.patch.object(max_logging, "log", return_value=None))
    # It collects after each array.
    stack.enter_context(mock.patch.object(to_huggingface.gc, "collect", return_value=0))
    return stack
