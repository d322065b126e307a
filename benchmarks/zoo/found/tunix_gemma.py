"""google-tunix 0.1.7: Gemma 1 from safetensors misses a norm of each layer.

    python benchmarks/zoo/found/tunix_gemma.py

What Gemma 1 calls `post_attention_layernorm` is its norm before the feed-forward: tunix's
`pre_ffw_norm`. The map is that of Gemma 2, and puts it into `post_attn_norm`, which the model of
Gemma 1 does not have. The loader "original" drops it without a word and leaves `pre_ffw_norm` as
it was made, without values; "optimized" raises. Run where benchmarks/zoo/tunix.py runs.
"""

from benchmarks.zoo import tunix
from unickpt.plugins.observe.converters import Converter, Example

for conversion in tunix.conversions():
    if conversion.name == "gemma/original":
        example = Example.of(conversion.example, "numpy")
        import numpy as np

        made = Converter(conversion.function, example)(
            {name: np.ones(shape, np.float32) for name, (shape, _) in example.arrays.items()}
        )
        norms = sorted(name for name in made if ".0." in name and "norm" in name)
        print(f"of layer 0 these norms have values: {norms}")
        assert not any("pre_ffw_norm" in name for name in norms), "it is mended"
