"""vLLM 0.32.0: no checkpoint of DBRX loads: its loader asks for `ffn.experts.w13_weight`, which its
model calls `ffn.experts.routed_experts.w13_weight`.

    python benchmarks/zoo/found/vllm_dbrx_experts.py

Run where benchmarks/zoo/vllm.py runs.
"""

import torch

from benchmarks.zoo import vllm

loader = vllm.Loader("DbrxForCausalLM", 0, 1)
try:
    loader.load(
        loader.model, ((name, torch.zeros(x.shape)) for name, x in loader.checkpoint.items())
    )
except KeyError as error:
    print(f"{error} is none of the parameters:")
    print(*(n for n, _ in loader.model.named_parameters() if ".0.ffn.experts" in n), sep="\n")
else:
    raise AssertionError("it is mended")
