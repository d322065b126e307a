"""KerasHub 0.32.0: the converter of Gemma 3n leaves out the bias of the first convolution of the
network for pictures, `conv_stem.conv.bias`, without a word: it stays 0.

Run it in the environment zoo-keras: python -m benchmarks.zoo.found.keras_hub_gemma3n_stem_bias
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np

NAME = "Gemma3nForConditionalGeneration"


def main() -> None:
    """Shows what becomes of the bias."""
    from benchmarks.zoo.keras_hub import converter_of
    from benchmarks.zoo.keras_models import MODELS

    to_keras, state = converter_of(NAME, MODELS[NAME].made(NAME), MODELS[NAME])
    state["model.vision_tower.timm_model.conv_stem.conv.bias"][:] = 5
    found = np.asarray(to_keras(state)["conv_stem"]["conv2d"]["bias"])
    print(f"a bias of 5 became {np.unique(found).tolist()}")
    assert not found.any()


if __name__ == "__main__":
    main()
