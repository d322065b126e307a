"""KerasHub 0.32.0: the converters of Mistral and others cast all weights to float16, whatever
they were: a bfloat16 or float32 weight is rounded, flushed to 0 below 6e-8, and infinite
above 65,504.

Run it in the environment zoo-keras: python -m
benchmarks.zoo.found.keras_hub_mistral_half
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np

from benchmarks.zoo.keras_hub import converter_of
from benchmarks.zoo.transformers_mapping import tiny_model


def main() -> None:
    """Shows what becomes of three numbers."""
    import transformers

    to_keras, state = converter_of(
        "MistralForCausalLM", tiny_model(transformers.MistralForCausalLM)
    )
    state["model.norm.weight"][:3] = [70_000.0, 1e-8, 1.0001]
    found = np.asarray(to_keras(state)["sequence_output_layernorm"]["scale"][:3])
    print(f"70,000, 1e-8 and 1.0001 became {found.tolist()}")
    assert np.isinf(found[0])
    assert found[1] == 0


if __name__ == "__main__":
    main()
