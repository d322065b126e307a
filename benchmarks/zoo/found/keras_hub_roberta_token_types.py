"""KerasHub 0.32.0: the converter of RoBERTa leaves out the embedding of token types, which
transformers adds to that of each token, without a word. It is 0 in the first checkpoints, and
trained in those that were made of them. (The converter of XLM-RoBERTa adds it to the positions.)

Run it in the environment zoo-keras: python -m benchmarks.zoo.found.keras_hub_roberta_token_types
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np

from benchmarks.zoo.keras_hub import converter_of, flattened
from benchmarks.zoo.transformers_mapping import tiny_model


def main() -> None:
    """Shows that the result is the same with another embedding of token types."""
    import transformers

    to_keras, state = converter_of(
        "RobertaForMaskedLM", tiny_model(transformers.RobertaForMaskedLM)
    )
    before = flattened(to_keras(state))
    state["roberta.embeddings.token_type_embeddings.weight"][:] = 5
    after = flattened(to_keras(state))
    differ = [name for name in before if not np.array_equal(before[name], after[name])]
    print(f"with an embedding of token types of 5 in place of 0, {len(differ)} arrays differ")
    assert not differ


if __name__ == "__main__":
    main()
