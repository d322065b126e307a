"""rules: write rules by observing a converter or by comparing two checkpoints, and check them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

import unickpt
from unickpt import Rules
from unickpt.extend import rebuild_tree, tree_from_names
from unickpt.extend import terminal_options as options
from unickpt.extend import terminal_output as terminal

app = terminal.command_app(
    no_args_is_help=True, help="Derive rules from converters or checkpoints, and check them."
)
_Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="The file; without it, they are printed.")
]


@app.command("observe")
def observe(
    function: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="The converter, or FILE.py:FUNCTION.")
    ],
    example: Annotated[
        str,
        typer.Option(
            "--example",
            metavar="CHECKPOINT|SHAPES",
            help="Its input: a checkpoint, for its names, shapes and dtypes; or a JSON file "
            "with {name: shape}, or {name: {shape, dtype}}.",
        ),
    ],
    output: _Output = None,
    under: options.Under = "",
    framework: Annotated[
        str, typer.Option("--framework", help="Whose arrays it gets: numpy, torch or jax.")
    ] = "numpy",
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Write rules even if they do not cover everything."),
    ] = False,
    as_json: terminal.AsJson = False,
) -> None:
    """Derive the rules of a converter by running it.

    The converter takes a dict of arrays and returns another. It is called a few times with numbered
    elements, then with random ones, on which the rules must give the same in both directions. Its
    code runs: use only code that you trust.

    \b
    unickpt rules observe convert_llama:to_hf --example runs/jax/step_100 -o llama.rules
    unickpt rules observe convert_llama:to_hf --example runs/jax/step_100 --under params
    unickpt rules observe ./convert.py:to_hf --example shapes.json --framework torch

    An operation that no rule expresses, such as a quantiser, is refused with the element that shows
    it; then nothing is written, unless --partial is given.

    --json prints {rules, report: {moved, scaled, constant, not_made, dropped, refused, runs,
    lines}}. Fields are only ever added.
    """
    rules = Rules.observe(
        _function(function),
        _example(example, under),
        strict=not partial,
        framework=framework,
        name=function,
    )
    _write(rules, output, as_json)


@app.command("draft")
def draft(
    left: terminal.Where,
    right: terminal.Where,
    output: _Output = None,
    hint: options.HintOption = None,
    as_json: terminal.AsJson = False,
) -> None:
    """Draft rules from two checkpoints of one model, by values, names and shapes.

    If both hold the same weights, values decide, even which axes of a square array are exchanged.
    Uncertain rules are comments that begin with `#?`: remove it from the lines that are right.

    \b
    unickpt rules draft runs/jax/step_100 model.safetensors -o my.rules

    --json prints {rules, report: {certain, guesses: {rule: others}, left_over, right_over}}. Fields
    are only ever added.
    """
    _write(
        Rules.draft(options.source_of(left, hint), right, name=f"{left} and {right}"),
        output,
        as_json,
    )


@app.command("check")
def check(
    rules: Annotated[str, typer.Argument(help="A file of rules, or the name of a preset.")],
    left: terminal.Where,
    right: terminal.Where,
    inverse: options.Inverse = False,
    size: options.Sizes = None,
    probes: Annotated[
        int, typer.Option("--probes", help="How many elements of each array to compare.", min=1)
    ] = 64,
    hint: options.HintOption = None,
    as_json: terminal.AsJson = False,
) -> None:
    """Check rules with two checkpoints that hold the same weights, by a few elements of each array.

    Finds errors that names and shapes do not show: a wrong transpose of a square kernel, exchanged
    q and k, heads in another order. Exits with 1 if something differs. `unickpt diff --rules`
    compares every element.

    \b
    unickpt rules check my.rules runs/jax/step_100 model.safetensors

    --json prints {same, arrays, elements, differences: {name: why}}. Fields are only ever added.
    """
    parsed_rules = options.read_rules(rules, inverse, size)
    assert parsed_rules is not None
    result = parsed_rules.check(options.source_of(left, hint), right, probes=probes)
    with terminal.verdict(0 if result else terminal.DIFFERENT):
        if as_json:
            terminal.print_json({"same": bool(result), **asdict(result)})
        else:
            terminal.console().print(str(result))


def _write(rules: Rules, output: Path | None, as_json: bool) -> None:
    """Writes rules that were found, and prints what they cover."""
    report = rules.report
    assert report is not None
    if output is not None:
        output.write_text(report.text, encoding="utf-8")
    if as_json:
        body = asdict(report)
        terminal.print_json({"rules": body.pop("text"), "report": body})
        return
    if output is None:
        print(report.text)
    terminal.console(stderr=True).print(str(report))


def _function(target: str) -> Callable[[Any], Any]:
    """The function of a module or of a file."""
    module_name, colon, path = target.rpartition(":")
    if not colon or not path:
        terminal.fail(f"{target} is not MODULE:FUNCTION, such as convert_llama:to_hf")
    sys.path.insert(0, os.getcwd())
    try:
        attribute = attrgetter(path)(_module(module_name))
    except ImportError as error:
        terminal.fail(f"{module_name} cannot be imported: {error}")
    except AttributeError:
        terminal.fail(f"{module_name} has no {path}")
    if not callable(attribute):
        terminal.fail(f"{target} is of type {type(attribute).__name__}, not a function")
    function: Callable[[Any], Any] = attribute
    return function


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    if not Path(name).is_file():
        terminal.fail(f"there is no file {name}")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(module.__name__, module)
    spec.loader.exec_module(module)
    return module


def _example(source: str, under: str) -> Any:
    """A checkpoint or a part of it, or a tree of shapes."""
    if not source.endswith(".json") or not Path(source).is_file():
        checkpoint = unickpt.open(source)
        return checkpoint.under(under) if under else checkpoint
    if under:
        terminal.fail(f"--under is for a checkpoint; {source} is a file of shapes")
    try:
        shapes = json.loads(Path(source).read_text(encoding="utf-8"))
        leaves = {name: _leaf(shape) for name, shape in shapes.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        terminal.fail(f"{source} must have {{name: shape}}, or {{name: {{shape, dtype}}}}: {error}")
    return rebuild_tree(tree_from_names(list(leaves)), leaves.__getitem__)


def _leaf(shape: Any) -> Any:
    if isinstance(shape, dict):
        return SimpleNamespace(shape=tuple(map(int, shape["shape"])), dtype=shape["dtype"])
    return tuple(map(int, shape))
