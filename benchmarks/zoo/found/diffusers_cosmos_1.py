"""diffusers 0.42.0: single files of Cosmos 1.0 are converted with the names of Cosmos 2.0.

    python benchmarks/zoo/found/diffusers_cosmos_1.py

`convert_cosmos_transformer_checkpoint_to_diffusers` asks whether the checkpoint has a name of
Cosmos 1.0 after it has taken all arrays out of it. Run where benchmarks/zoo/diffusers.py runs.
"""

import torch
from diffusers.loaders import single_file_utils as files

from benchmarks.zoo import diffusers_names

_, shapes = diffusers_names.MODELS["cosmos-1"]
converted = files.convert_cosmos_transformer_checkpoint_to_diffusers(
    {name: torch.zeros(shape) for name, shape in shapes.items()}
)
wrong = [name for name in converted if ".blocks.0.block." in name or ".block." in name]
print(f"{len(wrong)} of {len(converted)} names are none of a model of Cosmos 1.0, as {wrong[0]}")
assert "transformer_blocks.0.attn1.to_q.weight" not in converted, "it is mended"
