"""transformers 4.57.6: `load_flax_weights_in_pytorch_model` of a ResNet with basic layers loads
none of the weights of these layers: the Flax names have `layer/layer_0`, the PyTorch ones
`layer.0`. It logs that weights were not used, and returns a model whose layers are random.

Run it in .venv: python -m benchmarks.zoo.found.transformers_resnet_basic
"""

from __future__ import annotations

import jax
import torch
from transformers import (
    FlaxResNetForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)
from transformers.modeling_flax_pytorch_utils import load_flax_weights_in_pytorch_model


def main() -> None:
    """Shows how many arrays differ after both directions."""
    config = ResNetConfig(
        embedding_size=10, hidden_sizes=[12, 24], depths=[2, 3], layer_type="basic", num_labels=5
    )
    flax = FlaxResNetForImageClassification(config)
    ones = jax.tree.map(lambda x: x * 0 + 3, flax.params)
    model = load_flax_weights_in_pytorch_model(ResNetForImageClassification(config), ones)
    state = {k: v for k, v in model.state_dict().items() if "num_batches" not in k}
    lost = [name for name, value in state.items() if not torch.all(value == 3)]
    print(f"{len(lost)} of {len(state)} arrays do not have what was stored, such as {lost[0]}")
    assert lost


if __name__ == "__main__":
    main()
