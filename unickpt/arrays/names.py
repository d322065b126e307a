"""Patterns of the names of arrays and other leaves, as options of saves and loads take them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache


def matches(pattern: str, name: str) -> bool:
    """Whether a name matches: `**` is any number of components, `*` any text within one.

    Example:
        >>> matches("params/**/bias", "params/layers/0/bias"), matches("*/w", "a/b/w")
        (True, False)
    """
    return _matches(pattern.split("/"), name.split("/"))


def _matches(pattern: Sequence[str], components: Sequence[str]) -> bool:
    ends = {0}  # how many components what was looked at so far can match
    for part in pattern:
        if part == "**":
            ends = set(range(min(ends, default=len(components) + 1), len(components) + 1))
        else:
            there = (at for at in ends if at < len(components))
            ends = {at + 1 for at in there if _component(part).fullmatch(components[at])}
    return len(components) in ends


@lru_cache(maxsize=1024)
def _component(pattern: str) -> re.Pattern[str]:
    first, *middle = map(re.escape, pattern.split("*"))
    if not middle:
        return re.compile(first)
    *middle, last = middle
    found = "".join(f"(?>.*?{text})" for text in middle)  # the first place is as good as a later
    return re.compile(f"{first}{found}.*{last}", re.DOTALL)
