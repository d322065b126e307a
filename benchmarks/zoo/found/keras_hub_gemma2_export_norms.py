"""KerasHub 0.32.0: the exporter of Gemma writes a model of Gemma 2 as one of Gemma 1: without the
norms after attention and after the feed-forward layers, with the norm before these under the name
of the one after attention, and without a word.

Run it in the environment zoo-keras: python -m benchmarks.zoo.found.keras_hub_gemma2_export_norms
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")


def main() -> None:
    """Shows which norms a model has, and which are exported."""
    from keras_hub.models import GemmaBackbone
    from keras_hub.src.utils.transformers.export.gemma import get_gemma_weights_map

    backbone = GemmaBackbone(
        vocabulary_size=101, num_layers=1, num_query_heads=4, num_key_value_heads=1, hidden_dim=24,
        intermediate_dim=80, head_dim=6, use_post_ffw_norm=True, use_post_attention_norm=True,
    )  # fmt: skip
    own = [weight.path for weight in backbone.weights if "norm/" in weight.path]
    found = [name for name in get_gemma_weights_map(backbone) if "layernorm" in name]
    print(f"the layer has {', '.join(own)}; exported are {', '.join(found)}")
    assert len(own) == 4
    assert len(found) == 2


if __name__ == "__main__":
    main()
