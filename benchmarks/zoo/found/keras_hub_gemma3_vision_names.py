"""KerasHub 0.32.0: its converter cannot read what its exporter writes of Gemma 3 with a tower for
pictures: it looks for `vision_tower.vision_model.embeddings`, and `vision_tower.embeddings` is
what there is.

Run it in the environment zoo-keras: python -m benchmarks.zoo.found.keras_hub_gemma3_vision_names
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np


def main() -> None:
    """Shows that the way there and back fails."""
    from safetensors import SafetensorError

    from benchmarks.zoo.keras_hub import conversions_of

    to_keras, to_hub = conversions_of("Gemma3ForConditionalGeneration")
    exported = to_hub.function(to_hub.example)
    print(next(name for name in exported if "vision_tower" in name))
    try:
        to_keras.function({name: np.asarray(x) for name, x in exported.items()})
    except SafetensorError as error:
        print(error)
    else:
        raise AssertionError("it can be read")


if __name__ == "__main__":
    main()
