"""diffusers 0.42.0: a LoRA with a negative `alpha` is never loaded: its converter does not return.

    python benchmarks/zoo/found/diffusers_alpha.py

A loop halves one scale and doubles the other until the first is as large: with a scale below 0 it
has no end. The file of converters has twelve copies of it. Run where benchmarks/zoo/diffusers.py runs; it gives
the converter 5 seconds, in a process of its own.
"""

import multiprocessing

import torch
from diffusers.loaders import lora_conversion_utils as loras


def convert(alpha):
    name = "lora_unet_double_blocks_0_img_attn_proj"
    loras._convert_kohya_flux_lora_to_diffusers(
        {
            f"{name}.lora_down.weight": torch.zeros(4, 8),
            f"{name}.lora_up.weight": torch.zeros(8, 4),
            f"{name}.alpha": torch.tensor(alpha),
        }
    )


def ends(alpha):
    process = multiprocessing.get_context("fork").Process(target=convert, args=(alpha,))
    process.start()
    process.join(5)
    ended = not process.is_alive()
    process.kill()
    return ended


if __name__ == "__main__":
    for alpha in (4.0, -4.0):
        print(f"alpha {alpha}: {'ends' if ends(alpha) else 'does not end'}")
    assert ends(4.0)
    assert not ends(-4.0), "it is mended"
