"""litgpt 0.5.13: `convert_lit_checkpoint` has no name for a norm of each layer of OLMo 2.

    python benchmarks/zoo/found/litgpt_olmo2.py

litgpt's OLMo 2 has `post_attention_norm`; the map of the converter has `norm_2` instead, which the
model does not have, so that no OLMo 2 trained in litgpt goes back: KeyError. In the other
direction the names are there. Run where benchmarks/zoo/litgpt.py runs.
"""

import torch
from litgpt.model import GPT

from benchmarks.zoo.litgpt import _to_hf, tiny

config = tiny("OLMo-2-1124-7B")
state = {name: torch.zeros(x.shape) for name, x in GPT(config).state_dict().items()}
try:
    _to_hf(config)(state)
except KeyError as error:
    print(f"no name for {error}")
else:
    raise SystemExit("it is mended")
