"""diffusers 0.42.0: a Flux LoRA of kohya's scripts loses its changes to the embedders and to the
last layer, without a word.

    python benchmarks/zoo/found/diffusers_lora_embedders.py

`_convert_kohya_flux_lora_to_diffusers` writes their names without `transformer.`, which it writes
before all others; `FluxLoraLoaderMixin.load_lora_weights` takes names with it only. Run where
benchmarks/zoo/diffusers.py runs.
"""

import torch
from diffusers.loaders import lora_conversion_utils as loras

from benchmarks.zoo import diffusers_lora_names

_, shapes = diffusers_lora_names.LORAS["kohya-flux"]
converted = loras._convert_kohya_flux_lora_to_diffusers(
    {name: torch.zeros(shape) for name, shape in shapes.items()}
)
lost = sorted(name for name in converted if not name.startswith(("transformer.", "text_encoder.")))
print(f"{len(lost)} of {len(converted)} arrays are not taken by the loader:", *lost, sep="\n  ")
assert lost, "it is mended"
