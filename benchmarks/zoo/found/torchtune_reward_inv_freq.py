"""torchtune 0.6.1: `reward_hf_to_tune` overwrites an array where a checkpoint holds `inv_freq`.

    python benchmarks/zoo/found/torchtune_reward_inv_freq.py

Checkpoints of Llama of before transformers 4.31 hold `rotary_emb.inv_freq` in each layer. The
converter means to skip it, but skips only finding a name: the value goes under the name of the
array before it. Run where benchmarks/zoo/torchtune.py runs.
"""

import torch

from benchmarks.zoo.torchtune import reward_hf_to_tune  # which makes torchtune importable

layer = "model.layers.0.self_attn"
state = {
    f"{layer}.o_proj.weight": torch.ones(8, 8),
    f"{layer}.rotary_emb.inv_freq": torch.full((2,), 7.0),
}
found = reward_hf_to_tune(state, num_heads=2, num_kv_heads=2, dim=8)
output = found["layers.0.attn.output_proj.weight"]
print(f"output_proj has shape {tuple(output.shape)} and holds {output.unique().tolist()}")
assert tuple(output.shape) == (2,), "it is mended: the output projection is (8, 8)"
