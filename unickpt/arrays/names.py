"""Names of arrays and other leaves: patterns for options, and the order of names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache


def matches(pattern: str, name: str) -> bool:
    """Whether a name matches: `**` is any number of components, `*` any text within one.

    Example:
        >>> matches("params/**/bias", "params/layers/0/bias"), matches("*/w", "a/b/w")
        (True, False)
    """
    return _matches(pattern.split("/"), name.split("/"))


class NamePatterns:
    """Patterns of names; those without `*` are looked up together, so that there may be many.

    Arguments:
        patterns: as for `matches`.
    """

    def __init__(self, patterns: Collection[str]) -> None:
        self._patterns = patterns
        self._names = frozenset(pattern for pattern in patterns if "*" not in pattern)
        self._others = [pattern for pattern in patterns if "*" in pattern]

    def match(self, name: str) -> bool:
        """Whether a name matches one of them."""
        return name in self._names or any(matches(pattern, name) for pattern in self._others)

    def unused(self, names: Collection[str]) -> list[str]:
        """The patterns that match none of some names.

        Arguments:
            names: a set or the keys of a dict, since each pattern is looked up.
        """

        def is_used(pattern: str) -> bool:
            if pattern in self._names:
                return pattern in names
            return any(matches(pattern, name) for name in names)

        return [pattern for pattern in self._patterns if not is_used(pattern)]


def _matches(pattern: Sequence[str], components: Sequence[str]) -> bool:
    ends = {0}  # how many components the pattern so far can match
    for part in pattern:
        if part == "**":
            ends = set(range(min(ends, default=len(components) + 1), len(components) + 1))
        else:
            open_ends = (end for end in ends if end < len(components))
            ends = {end + 1 for end in open_ends if _component(part).fullmatch(components[end])}
    return len(components) in ends


@lru_cache(maxsize=1024)
def _component(pattern: str) -> re.Pattern[str]:
    first, *middle = map(re.escape, pattern.split("*"))
    if not middle:
        return re.compile(first)
    *middle, last = middle
    # The first place is as good as any later one.
    inner = "".join(f"(?>.*?{text})" for text in middle)
    return re.compile(f"{first}{inner}.*{last}", re.DOTALL)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that compares numbers within names as numbers.

    Example:
        >>> sorted(["step_10", "step_9", "best"], key=natural)
        ['best', 'step_9', 'step_10']
    """
    # Names may come from untrusted storage: Python refuses to convert thousands of digits.
    pieces = re.split(r"([0-9]{1,18})", name)
    return tuple((0, int(p), p) if p.isdigit() and p.isascii() else (1, 0, p) for p in pieces)
