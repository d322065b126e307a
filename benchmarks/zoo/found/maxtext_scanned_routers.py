"""MaxText 0.2.5: `to_maxtext` fails for scanned Mixtral and DeepSeek 2.

    python benchmarks/zoo/found/maxtext_scanned_routers.py

It stacks the routers of the layers along axis 0, and the model has the layers in axis
`param_scan_axis`. Where the sizes of both axes are equal, the layers of all routers are mixed up
instead, without a word: here a model with as many layers as its width.

Run where benchmarks/zoo/maxtext.py runs.
"""

from unittest import mock

import numpy as np

from benchmarks.zoo import maxtext

ROUTER = "params-decoder-layers-MoeBlock_0-gate-kernel"


def back_and_forth(layers: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The routers of a model, and what comes back of them from Hugging Face's names."""
    own = maxtext.sizes

    def sizes(full: object) -> dict[str, object]:
        return own(full) | {"base_num_decoder_layers": layers, "base_emb_dim": width}

    with mock.patch.object(maxtext, "sizes", sizes):
        model = maxtext.Model("mixtral-8x7b", scanned=True)
    random = np.random.default_rng(0)
    state = {
        key: random.standard_normal(shape).astype(np.float32)
        for key, shape in model.example.items()
    }
    return state[ROUTER], model.from_hf(model.to_hf(state))[ROUTER]


try:
    back_and_forth(3, 48)
except ValueError as error:
    print(f"3 layers: {error}")
else:
    raise SystemExit("it is mended")
given, found = back_and_forth(48, 48)
if np.array_equal(given, found):
    raise SystemExit("it is mended")
print(f"48 layers of width 48: {np.array_equal(given.swapaxes(0, 1), found) = }")
