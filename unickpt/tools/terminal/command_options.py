"""The options that several commands share: rules, and hints for reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from unickpt.format import writer_registry
from unickpt.frameworks.host_memory import MemoryBudget
from unickpt.options import SaveOptions
from unickpt.reading import checkpoint
from unickpt.reading.checkpoint import Checkpoint
from unickpt.rules.rule_set import Rules
from unickpt.tools.terminal.output import fail

RulesName = Annotated[
    str | None, typer.Option("--rules", help="A file of rules, or the name of a preset.")
]
Inverse = Annotated[
    bool, typer.Option("--inverse", help="Use the rules from their right side to their left.")
]
Sizes = Annotated[
    list[str] | None, typer.Option("--size", help="The size of an axis, as in --size heads=8.")
]
HintOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hint",
        metavar="NAME=VALUE",
        help="Facts that the files of another system's checkpoint lack; may be repeated; the "
        "value is JSON, or a string. Sealed folders: sealed=true refuses one without its seal. "
        "GGUF: dequantize=float32 reads quantized tensors as floats. "
        "Megatron: extra_state=true shows the leaves named _extra_state. DeepSpeed: how "
        "tensor-parallel ranks share parameters, by regular expressions, such as "
        "'tp_replicated_parameter_patterns=[\".*norm.*\"]'; likewise "
        "parameter_to_average_patterns, parameter_with_row_parallelism_patterns, "
        "parameter_with_2_sub_params_cat_dim_0, parameter_with_sub_params, "
        "sub_param_shard_widths, vocabulary_parameter_patterns, and original_vocab_size=50257. "
        "Other formats take none.",
    ),
]

Under = Annotated[
    str,
    typer.Option(
        "--under",
        metavar="NAME",
        help="Only this part of it, as if it were the whole: a container such as model, or a "
        "prefix of names that ends with a dot.",
    ),
]
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Whether to read and check what was written.")
]
BudgetOption = Annotated[
    int | None,
    typer.Option("--budget", help="Bytes of memory for it, in each process.", min=1 << 20),
]
Compression = Annotated[
    str | None, typer.Option("--compression", help="auto, zstd, gzip or blosc.")
]
Quantize = Annotated[
    list[str] | None,
    typer.Option(
        "--quantize",
        help="Store arrays of floats with fewer bits: a pattern of names, and uint8, int4, int3, "
        "int2, bfloat16 or none, as in --quantize 'opt/**=uint8'. The first that matches counts.",
    ),
]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        help=f"The format: {', '.join(writer_registry.names())}. By default, the suffix of the "
        "destination says it.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a checkpoint at the destination.")
]


def save_options(
    budget: int | None, compression: str | None = None, quantize: list[str] | None = None
) -> SaveOptions:
    """The options for writing; `--budget` is that of this process, not of its node."""
    expected = "a pattern and its codes, such as opt/**=uint8"
    codes = named_values("--quantize", quantize, expected)
    try:
        return SaveOptions(
            budget_bytes=None if budget is None else MemoryBudget(budget, "process"),
            compression=cast(Any, compression),  # checked there
            quantize={name: None if code == "none" else code for name, code in codes.items()},
        )
    except ValueError as error:
        fail(str(error))


def read_rules(name: str | None, inverse: bool, sizes: list[str] | None) -> Rules | None:
    """The rules that the options request."""
    if name is None:
        if inverse or sizes:
            fail("--inverse and --size need --rules")
        return None
    axis_sizes = _sizes(sizes)
    if Path(name).is_file():
        rules = Rules.load(name, sizes=axis_sizes)
    elif name in Rules.presets():
        rules = Rules.preset(name, sizes=axis_sizes)
    else:
        fail(f"{name} is neither a file nor a preset; presets are {', '.join(Rules.presets())}")
    return rules.inverse if inverse else rules


def _sizes(assignments: list[str] | None) -> dict[str, int]:
    expected = "an axis and its size, such as heads=8"
    sizes = named_values("--size", assignments, expected)
    for axis, size in sizes.items():
        if type(size) is not int or size < 0:
            fail(f"--size {axis}={size}: expected {expected}")
    return sizes


def source_of(path: str, hints: list[str] | None, under: str = "") -> str | Checkpoint:
    """The source: the path, or the checkpoint opened with the hints, or the part of it."""
    if not hints and not under:
        return path
    expected = "a name and a value, such as dequantize=float32"
    opened = checkpoint.open(path, hints=named_values("--hint", hints, expected))
    return opened.under(under) if under else opened


def named_values(option: str, assignments: list[str] | None, expected: str) -> dict[str, Any]:
    """The `name=value` pairs of a repeated option, with values as JSON, or else as texts.

    Arguments:
        option: its name.
        assignments: of it.
        expected: the expected form of each, for the error.
    """
    values: dict[str, Any] = {}
    for assignment in assignments or ():
        name, separator, text = assignment.partition("=")
        if not name or not separator:
            fail(f"{option} {assignment}: expected {expected}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def checked_format(to: str | None, destination: str) -> str:
    """The format to write; ends the command with a message if there is none."""
    try:
        return writer_registry.chosen(to, destination)
    except ValueError as error:
        fail(str(error))
