"""Warns of rules that swap two names: a likely mistake that shapes often cannot show."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from unickpt.rules.ast import Choice, Name, item_text
from unickpt.rules.rule import Rule, views_of

_SEPARATOR = re.compile(r"[/.]")
Components = tuple[str, ...]


def crossings(rules: Sequence[Rule]) -> Iterator[str]:
    """Questions about pairs of rules that differ only in two names, which they swap.

    `q_proj` of one side becomes `k_proj` of the other, and `k_proj` becomes `q_proj`.
    """
    seen: dict[tuple[Components, Components, str, str], Rule] = {}
    for rule in rules:
        for left, right in _names(rule):
            for a, b in itertools.product(set(left) - set(right), set(right) - set(left)):
                if not (_is_word(a) and _is_word(b)):
                    continue
                rest = _without(left, a), _without(right, b)
                other = seen.get((*rest, b, a))
                if other is not None:
                    lines = "" if other is rule else f"\n{other}"
                    swap = f"{a!r} becomes {b!r}, and {b!r} becomes {a!r}: is that intended?"
                    yield f"{rule}{lines}\n  {swap}"
                seen[(*rest, a, b)] = rule


def _names(rule: Rule) -> Iterator[tuple[Components, Components]]:
    """The pairs of names that a rule relates, one for each option of its enumerations."""
    names = itertools.product(views_of(rule.left), views_of(rule.right))
    for ours, theirs in names if not rule.lifted else ():
        options = {c.axis: len(c.options) for c in ours.pattern.choices}
        for at in itertools.product(*map(range, options.values())):
            chosen = dict(zip(options, at, strict=True))
            pair = (_components(view.pattern.name, chosen) for view in (ours, theirs))
            yield next(pair), next(pair)


def _components(name: Name, chosen: dict[str, int]) -> Components:
    text = ""
    for item in name.items:
        if isinstance(item, Choice) and item.axis in chosen:
            text += item.options[chosen[item.axis]]
        else:
            text += item_text(item)
    return tuple(_SEPARATOR.split(text))


def _is_word(component: str) -> bool:
    return "{" not in component and not component.isdigit()


def _without(components: Components, one: str) -> Components:
    return tuple("*" if component == one else component for component in components)
