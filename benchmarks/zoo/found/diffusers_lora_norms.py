"""diffusers 0.42.0: LoRAs of the last norm (`adaLN_modulation`) of Flux, Flux 2 and Hunyuan Video
do another thing after their conversion.

    python benchmarks/zoo/found/diffusers_lora_norms.py

The two halves of `final_layer.adaLN_modulation.1` change places, as its model has them the other
way round. Of a LoRA, whose product is added to the weight, the rows of the second factor
(`lora_B`) have to change places, and nothing else. The converters of Flux Control and Hunyuan
Video turn the rows of both factors, so that the rank's rows of the first no longer belong to the
columns of the second; that of Flux 2 turns neither. Run where benchmarks/zoo/diffusers.py runs.
"""

import torch
from diffusers.loaders import lora_conversion_utils as loras
from diffusers.loaders import single_file_utils as files

from benchmarks.zoo import diffusers_lora, diffusers_lora_names

KEY = "final_layer.adaLN_modulation.1"
TURNED = "norm_out.linear"


def lora(shapes, prefix):
    """A LoRA with random numbers, and what it adds to the weight of the norm."""
    torch.manual_seed(1)
    arrays = {name: torch.randn(shape) for name, shape in shapes.items()}
    down, up = (arrays[f"{prefix}{KEY}.lora_{each}.weight"] for each in "AB")
    return arrays, up @ down


def wanted(change):
    """The change as the converter of the whole model has it."""
    return files.swap_scale_shift(change, 0)


def is_right(converted, change):
    down, up = (converted[f"transformer.{TURNED}.lora_{each}.weight"] for each in "AB")
    return torch.allclose(up @ down, wanted(change), atol=1e-5)


def control():
    for name, convert, shapes in diffusers_lora.loras():
        if name == "flux-control":
            return convert, shapes, ""
    raise LookupError


for name, (convert, shapes, prefix) in {
    "Flux Control": control(),
    "Hunyuan Video": (
        loras._convert_hunyuan_video_lora_to_diffusers,
        diffusers_lora_names.LORAS["hunyuan-video"][1], "",
    ),
    "Flux 2": (
        loras._convert_non_diffusers_flux2_lora_to_diffusers,
        diffusers_lora_names.LORAS["flux-2"][1], "diffusion_model.",
    ),
}.items():  # fmt: skip
    arrays, change = lora(shapes, prefix)
    right = is_right(convert(arrays), change)
    print(f"{name}: what the LoRA adds to the last norm is {'right' if right else 'wrong'}")
    assert not right, "it is mended"
