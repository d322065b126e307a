"""The options that give commands their rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unickpt import Rules
from unickpt.cli.output import fail

RulesName = Annotated[
    str | None, typer.Option("--rules", help="A file of rules, or the name of a preset.")
]
Inverse = Annotated[
    bool, typer.Option("--inverse", help="Use the rules from their right side to their left.")
]
Sizes = Annotated[
    list[str] | None, typer.Option("--size", help="The size of an axis, as in --size heads=8.")
]


def read_rules(name: str | None, inverse: bool, sizes: list[str] | None) -> Rules | None:
    """The rules that the options ask for."""
    if name is None:
        if inverse or sizes:
            fail("--inverse and --size need --rules")
        return None
    given = _sizes(sizes or [])
    if Path(name).is_file():
        rules = Rules.load(name, sizes=given)
    elif name in Rules.presets():
        rules = Rules.preset(name, sizes=given)
    else:
        fail(f"{name} is neither a file nor a preset; presets are {', '.join(Rules.presets())}")
    return rules.inverse if inverse else rules


def _sizes(given: list[str]) -> dict[str, int]:
    sizes = {}
    for item in given:
        axis, _, number = item.partition("=")
        if not axis or not number.isdigit():
            fail(f"--size {item}: expected an axis and its size, such as heads=8")
        sizes[axis] = int(number)
    return sizes
