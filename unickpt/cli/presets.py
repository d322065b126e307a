"""presets: the rule files that come with unickpt."""

from __future__ import annotations

from typing import Annotated

import typer

from unickpt import Rules
from unickpt.rules.rule_files import preset_text
from unickpt.tools.terminal.output import AsJson, print_json


def command(
    name: Annotated[str | None, typer.Argument(help="Print this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the built-in rule files, or print one to copy and change.

    \b
    unickpt presets
    unickpt presets transformers-llama > my.rules

    --json prints {presets: {name: text}}. Fields are only ever added.
    """
    names = Rules.presets() if name is None else [name]
    texts = {preset: preset_text(preset) for preset in names}
    if as_json:
        print_json({"presets": texts})
    elif name is not None:
        print(texts[name], end="")
    else:
        width = max(map(len, texts))
        for preset, text in texts.items():
            print(preset.ljust(width), "", _about(text))


def _about(text: str) -> str:
    """The first sentence of a rule file."""
    comment = " ".join(
        line.lstrip("# ") for line in text.partition("\n\n")[0].splitlines() if line.startswith("#")
    )
    return comment.partition(". ")[0].rstrip(".")
