"""mlx-lm 0.32.0: `sanitize` of ERNIE 4.5 leaves out `e_score_correction_bias`, which says which
experts tokens go to, without a word; its model has no such bias. transformers' model chooses other
experts.

Run it in the environment zoo-mlx: python -m benchmarks.zoo.found.mlx_lm_ernie_bias
"""

from __future__ import annotations

from typing import Any

import numpy as np

BIAS = "model.layers.{}.mlp.moe_statics.e_score_correction_bias"


def main() -> None:
    """Compares the logits of both, without a bias and with one."""
    import torch
    from transformers import Ernie4_5_MoeForCausalLM

    from benchmarks.zoo.transformers_mapping import tiny_model

    model = tiny_model(Ernie4_5_MoeForCausalLM).eval()
    model.set_experts_implementation("eager")
    torch.manual_seed(0)
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    away = []
    for bias in (0.0, 9.0):
        for name, x in model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                x.data = torch.tensor([[bias, bias, 0.0, 0.0, 0.0, 0.0]])
        tokens = [[5, 7, 11, 13, 17]]
        with torch.no_grad():
            theirs = model(torch.tensor(tokens)).logits.numpy()
        away.append(float(np.abs(_logits(model, tokens) - theirs).max()))
    print(f"logits differ by {away[0]:.2g}, and with a bias by {away[1]:.2g}")
    assert away[0] < 1e-3 < 0.1 < away[1]


def _logits(model: Any, tokens: list[list[int]]) -> np.ndarray:
    import mlx.core as mx
    from mlx_lm.models import ernie4_5_moe
    from transformers.core_model_loading import revert_weight_conversion

    from benchmarks.zoo.mlx_lm import _filled, _older

    config = {**_older(model.config.to_dict()), "moe_num_shared_experts": 2}
    args = ernie4_5_moe.ModelArgs.from_dict(_filled(ernie4_5_moe.ModelArgs, config))
    mine = ernie4_5_moe.Model(args)
    hub = revert_weight_conversion(model, dict(model.state_dict()))
    weights = {
        name: mx.array(x.detach().numpy()) for name, x in hub.items() if name != "lm_head.weight"
    }
    mine.load_weights([*mine.sanitize(weights).items()])
    return np.asarray(mine(mx.array(tokens)))


if __name__ == "__main__":
    main()
