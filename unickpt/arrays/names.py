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
    if not pattern:
        return not components
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return any(_matches(rest, components[at:]) for at in range(len(components) + 1))
    return bool(
        components and _component(first).fullmatch(components[0]) and _matches(rest, components[1:])
    )


@lru_cache(maxsize=1024)
def _component(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
