"""MaxText 0.2.5: models whose `to_huggingface` fails before or at the first array.

    python benchmarks/zoo/found/maxtext_hf_shapes.py

- qwen3-next-80b-a3b: `QWEN3_NEXT_HF_WEIGHTS_TO_SHAPE` fills a dict and returns nothing; it asks for
  `full_attention_interval`, which the configuration of transformers 5.24 has no more.
- qwen3-vl-30b-a3b: `HF_SHAPE` has no shapes of the experts, which `PARAM_MAPPING` names.
- deepseek3-671b, deepseek3.2-671b: the routers' biases are in the collection `MoEBiasVar`, and
  `PARAM_MAPPING` names them under `params`: `to_maxtext` fails as well.

Run where benchmarks/zoo/maxtext.py runs.
"""

from benchmarks.zoo.maxtext import Model

for name in ("qwen3-next-80b-a3b", "qwen3-vl-30b-a3b", "deepseek3-671b", "deepseek3.2-671b"):
    try:
        Model(name, scanned=False).hf_shapes()
    except (TypeError, ValueError) as error:
        print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}")
    else:
        raise SystemExit(f"{name}: it is mended")
