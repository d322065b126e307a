"""KerasHub 0.32.0: the converter of BART makes a decoder of as many layers as the encoder has. Of a
model whose decoder is deeper, the other layers are left out without a word.

Run it in the environment zoo-keras: python -m benchmarks.zoo.found.keras_hub_bart_depth
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

from benchmarks.zoo.keras_hub import converter_of
from benchmarks.zoo.transformers_mapping import tiny_model


def main() -> None:
    """Shows which layers the decoder has."""
    import transformers

    model = tiny_model(
        transformers.BartModel,
        {
            "encoder_layers": 1, "decoder_layers": 3, "decoder_ffn_dim": 40,
            "decoder_attention_heads": 4,
        },
    )  # fmt: skip
    to_keras, state = converter_of("BartModel", model)
    there = sorted({name.split(".")[2] for name in state if name.startswith("decoder.layers.")})
    found = [name for name in to_keras(state) if name.startswith("transformer_decoder_layer_")]
    print(f"layers {', '.join(there)} of the decoder became {', '.join(found)}")
    assert len(there) == 3
    assert len(found) == 1


if __name__ == "__main__":
    main()
