"""KerasHub 0.32.0: the exporter of Gemma writes the first head of keys and of values only. A
model with several of these (Gemma 7B has 16, Gemma 2 has 4 to 8) is exported without the
others, and without a word.

Run it in the environment zoo-keras: python -m
benchmarks.zoo.found.keras_hub_gemma_export
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")


def main() -> None:
    """Shows the shape of what is exported."""
    from keras_hub.models import GemmaBackbone
    from keras_hub.src.utils.transformers.export.gemma import get_gemma_weights_map

    backbone = GemmaBackbone(
        vocabulary_size=101, num_layers=1, num_query_heads=4, num_key_value_heads=2, hidden_dim=24,
        intermediate_dim=80, head_dim=6,
    )  # fmt: skip
    kernel = backbone.get_layer("decoder_block_0").attention.key_dense.weights[0]
    found = get_gemma_weights_map(backbone)["model.layers.0.self_attn.k_proj.weight"]
    print(
        f"the keys' kernel is {tuple(kernel.shape)}: 2 heads of 6; exported is {tuple(found.shape)}"
    )
    assert tuple(found.shape) == (6, 24)


if __name__ == "__main__":
    main()
