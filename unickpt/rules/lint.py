"""Warns of likely mistakes that shapes often cannot show: two names swapped, layers misnumbered."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from unickpt.rules.ast import Enumeration, Linear, Name, item_text
from unickpt.rules.name_patterns import Components
from unickpt.rules.rule import Rule, exprs_of
from unickpt.trees.name_ranges import skeleton

_SEPARATOR = re.compile(r"[/.]")

_MOST_PAIRS = 4096  # of names of a rule that are compared


def swapped_names(rules: Sequence[Rule]) -> Iterator[str]:
    """Questions about pairs of rules that differ only in two names, which they swap.

    `q_proj` of one side becomes `k_proj` of the other, and `k_proj` becomes `q_proj`.
    """
    seen: dict[tuple[Components, Components, str, str], Rule] = {}
    for rule in rules:
        for left, right in itertools.islice(_names(rule), _MOST_PAIRS):
            for a, b in itertools.product(set(left) - set(right), set(right) - set(left)):
                if not (_is_word(a) and _is_word(b)):
                    continue
                remainders = _without(left, a), _without(right, b)
                other = seen.get((*remainders, b, a))
                if other is not None:
                    lines = "" if other is rule else f"\n{other}"
                    swap = f"{a!r} becomes {b!r}, and {b!r} becomes {a!r}: is that intended?"
                    yield f"{rule}{lines}\n  {swap}"
                seen[(*remainders, a, b)] = rule


def _names(rule: Rule) -> Iterator[tuple[Components, Components]]:
    """The pairs of names that a rule relates, one for each option of its enumerations."""
    names = itertools.product(exprs_of(rule.left), exprs_of(rule.right))
    for ours, theirs in names if not rule.lifted else ():
        options = {c.axis: len(c.options) for c in ours.pattern.choices}
        for indices in itertools.product(*map(range, options.values())):
            chosen = dict(zip(options, indices, strict=True))
            pair = (_components(expr.pattern.name, chosen) for expr in (ours, theirs))
            yield next(pair), next(pair)


def _components(name: Name, chosen: dict[str, int]) -> Components:
    text = ""
    for item in name.items:
        if isinstance(item, Enumeration) and item.axis in chosen:
            text += item.options[chosen[item.axis]]
        else:
            text += item_text(item)
    return tuple(_SEPARATOR.split(text))


def _is_word(component: str) -> bool:
    return "{" not in component and not component.isdigit()


def _without(components: Components, dropped: str) -> Components:
    return tuple("*" if component == dropped else component for component in components)


# --- numbers of layers ------------------------------------------------------------------------


def questionable_numbers(rules: Sequence[Rule], made: Iterable[str]) -> Iterator[str]:
    """Questions about the numbers in the names of made arrays.

    Used if the names of the other side are not known. Gaps in the numbers are suspicious, and so
    are layers with far fewer arrays than others: a rule may take the wrong axis for the layers.
    """
    prefixes = {prefix for rule in rules for prefix in _prefixes(rule)}
    names = list(made)
    for prefix in sorted(prefixes):
        layers: dict[int, set[str]] = {}
        for name in names:
            match = re.match(rf"{re.escape(prefix)}(\d+)(.*)", name)
            if match:
                layers.setdefault(int(match[1]), set()).add(skeleton(match[2]))
        holes = sorted(set(range(max(layers, default=-1) + 1)) - layers.keys())
        if holes:
            yield f"{prefix}{max(layers)} is made, but {_named(prefix, holes)}: is that intended?"
        most = max(map(len, layers.values()), default=0)
        thin = sorted(n for n, arrays in layers.items() if 2 * len(arrays) < most)
        if thin:
            yield (
                f"{prefix}{thin[0]} has {len(layers[thin[0]])} arrays, and others under {prefix!r} "
                f"have up to {most}: is that intended?"
            )


def _named(prefix: str, holes: Sequence[int]) -> str:
    more = f" and {len(holes) - 1} more are" if len(holes) > 1 else " is"
    return f"{prefix}{holes[0]}{more} not"


def _prefixes(rule: Rule) -> Iterator[str]:
    """The part before the first number of the names that a rule makes."""
    for expr in exprs_of(rule.right):
        first, *following = [*expr.pattern.name.items, "", ""][:2]
        if isinstance(first, str) and isinstance(following[0], Linear) and not rule.lifted:
            yield first
