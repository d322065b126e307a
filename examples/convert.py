"""Converts a checkpoint of train_jax.py for PyTorch, or back, without JAX and without PyTorch.

    python examples/convert.py runs/jax runs/jax_for_torch
    python examples/convert.py runs/torch runs/torch_for_jax --inverse

`unickpt convert SRC DST --rules examples/llama.rules` does the same; `--dry-run` shows the plan.
"""

import argparse
from pathlib import Path

import unickpt

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("source")
parser.add_argument("destination")
parser.add_argument("--inverse", action="store_true", help="from PyTorch to JAX")
arguments = parser.parse_args()

rules = unickpt.Rules.load(Path(__file__).with_name("llama.rules"))
report = unickpt.convert(
    arguments.source, arguments.destination, rules=rules.inverse if arguments.inverse else rules
)
print(f"{report.arrays} arrays, {report.bytes / 1e6:.1f} MB in {report.seconds:.2f} s")
