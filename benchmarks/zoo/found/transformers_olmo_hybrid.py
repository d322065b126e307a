"""transformers 5.24.0: OLMo Hybrid's convolutions of queries, keys and values are saved as three
equal parts, though values are wider: the names of the checkpoint hold rows of each other.

    python benchmarks/zoo/found/transformers_olmo_hybrid.py

`revert_weight_conversion` cuts `linear_attn.conv1d.weight` by `torch.chunk(3)`. transformers itself
joins the parts again, and sees nothing of it; who reads `q_conv1d`, as vLLM does, gets other rows.
Run where benchmarks/zoo/diffusers.py or transformers_mapping.py runs.
"""

import torch
from transformers import AutoModelForCausalLM, OlmoHybridConfig
from transformers.core_model_loading import revert_weight_conversion

config = OlmoHybridConfig(
    hidden_size=48, num_attention_heads=8, num_key_value_heads=8, intermediate_size=44,
    num_hidden_layers=2, vocab_size=53, linear_num_key_heads=8, linear_num_value_heads=8,
    linear_key_head_dim=5, linear_value_head_dim=7, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
saved = revert_weight_conversion(model, model.state_dict())
rows = {part: saved[f"model.layers.0.linear_attn.{part}_conv1d.weight"].shape[0] for part in "qkv"}
print(f"rows of the convolutions as saved: {rows}; the model has 40 of queries, 40 of keys and 56")
assert rows != {"q": 40, "k": 40, "v": 56}, "it is mended"
