"""Flax checkpoints of the Hub, which transformers 5 does not read, into its classes by observed
rules.

    .venv/bin/python -m benchmarks.zoo.flax_hub make FOLDER     # with transformers 4.57
    PYTHON -m benchmarks.zoo.flax_hub load FOLDER --json FILE   # with transformers 5

The first makes, for each Flax class, a checkpoint `flax_model.msgpack` of random numbers, its
rules, and what 4.57's own converter makes of it. The second converts the checkpoint by the
rules to safetensors, has transformers 5 load that, and compares it with what it loads of the
converter's.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import unickpt
from unickpt import Rules


def main() -> None:
    """Makes checkpoints, or loads them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "load"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.what == "make":
        make(arguments.folder, arguments.only)
        return
    rows = [
        loaded(folder)
        for folder in sorted(arguments.folder.iterdir())
        if arguments.only in folder.name
    ]
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    print(f"{sum(row['result'] == 'equal' for row in rows)} of {len(rows)} are equal")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def make(folder: Path, only: str) -> None:
    """Writes a folder for each Flax class."""
    import transformers
    from flax.serialization import msgpack_serialize
    from safetensors.torch import save_file

    from benchmarks.zoo import transformers_flax as source

    transformers.logging.set_verbosity_error()
    for name, flax_class, torch_class, config in source.pairs():
        if only not in name:
            continue
        conversion = next(iter(source.conversions_of(name, flax_class, torch_class, config)))
        random = np.random.default_rng(len(name))
        import jax

        params = jax.tree.map(
            lambda x, random=random: random.standard_normal(x.shape).astype(np.float32),
            conversion.example,
        )
        here = folder / name.replace("/", "+")
        here.mkdir(parents=True, exist_ok=True)
        (here / "flax_model.msgpack").write_bytes(msgpack_serialize(params))
        report = Rules.observe(conversion.function, conversion.example).report
        assert report is not None
        (here / "observed.rules").write_text(report.text)
        state = {key: x.contiguous().clone() for key, x in conversion.function(params).items()}
        save_file(state, str(here / "expected.safetensors"), metadata={"format": "pt"})
        config.architectures = [torch_class.__name__]
        if hasattr(config, "encoder_layers"):
            config.num_hidden_layers = config.encoder_layers  # one and the same since
        config.save_pretrained(here)


def loaded(folder: Path) -> dict[str, Any]:
    """Converts a checkpoint by its rules, and compares what transformers 5 loads of it."""
    import torch
    import transformers
    from safetensors.torch import load_file

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    row: dict[str, Any] = {"name": folder.name.replace("+", "/"), "result": "equal"}
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model_class = getattr(transformers, config.architectures[0])
        by_rules = folder / "by-rules"
        unickpt.convert(
            folder / "flax_model.msgpack", by_rules, to="hf", overwrite=True,
            rules=Rules.load(str(folder / "observed.rules")),
            like=folder / "expected.safetensors",
        )  # fmt: skip
        config.save_pretrained(by_rules)
        ours, info = model_class.from_pretrained(by_rules, output_loading_info=True)
        theirs = model_class.from_pretrained(
            None, config=config, state_dict=load_file(folder / "expected.safetensors")
        )
    except Exception as error:
        return {**row, "result": "failed", "why": f"{type(error).__name__}: {str(error)[:300]}"}
    wanted, found = theirs.state_dict(), ours.state_dict()
    # What the Flax class does not have is random, or computed, after either way.
    random = set(info["missing_keys"])
    differ = [key for key in set(wanted) - random if not torch.equal(wanted[key], found[key])]
    row |= {"arrays": len(wanted), "missing": len(info["missing_keys"]), "differ": len(differ)}
    if differ or len(random) > 2:
        row |= {
            "result": "differ",
            "why": f"{differ[:2]} missing {sorted(info['missing_keys'])[:3]}",
        }
    return row


if __name__ == "__main__":
    main()
