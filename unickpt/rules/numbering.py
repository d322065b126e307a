"""Warns of layer numbers that look as if a rule has them wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from unickpt.rules.ast import Linear
from unickpt.rules.rule import Rule, views_of
from unickpt.trees.name_ranges import skeleton


def doubts(rules: Sequence[Rule], made: Iterable[str]) -> Iterator[str]:
    """Questions about the numbers in the names of all that is made.

    Used where the names of the other side are not known. Gaps in the numbers are suspicious, and so
    are layers with far fewer arrays than others: a rule may take the wrong axis for the layers.
    """
    prefixes = {prefix for rule in rules for prefix in _prefixes(rule)}
    names = list(made)
    for prefix in sorted(prefixes):
        layers: dict[int, set[str]] = {}
        for name in names:
            found = re.match(rf"{re.escape(prefix)}(\d+)(.*)", name)
            if found:
                layers.setdefault(int(found[1]), set()).add(skeleton(found[2]))
        holes = sorted(set(range(max(layers, default=-1) + 1)) - layers.keys())
        if holes:
            yield f"{prefix}{max(layers)} is made, but {_named(prefix, holes)}: is that intended?"
        most = max(map(len, layers.values()), default=0)
        poor = sorted(n for n, arrays in layers.items() if 2 * len(arrays) < most)
        if poor:
            yield (
                f"{prefix}{poor[0]} has {len(layers[poor[0]])} arrays, and others under {prefix!r} "
                f"have up to {most}: is that intended?"
            )


def _named(prefix: str, holes: Sequence[int]) -> str:
    more = f" and {len(holes) - 1} more are" if len(holes) > 1 else " is"
    return f"{prefix}{holes[0]}{more} not"


def _prefixes(rule: Rule) -> Iterator[str]:
    """The part before the first number of the names that a rule makes."""
    for view in views_of(rule.right):
        first, *rest = [*view.pattern.name.items, "", ""][:2]
        if isinstance(first, str) and isinstance(rest[0], Linear) and not rule.lifted:
            yield first
