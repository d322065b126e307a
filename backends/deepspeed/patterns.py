"""The regular expressions with which universal checkpoints name parameters, in bounded time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unickpt.backends.deepspeed.sources import is_number
from unickpt.extend import quoted

_MOST_PATTERN = 2000
# Steps that matching may take at worst, by a rough estimate; a step takes about 10 ns.
_MOST_STEPS = 10_000_000_000
# `^blocks\.0\.weight$`: DeepSpeed writes one for each parameter, which must not be tried for each.
_LITERAL = re.compile(r"\^((?:[\w/-]|\\[^\w])*)\$")
_REPEAT, _CHOICE = re.compile(r"(?<!\()[*+{?]"), re.compile(r"\|")
# Repeats of groups, which can contain repeats; references to groups; comments and spaces without
# a meaning, which would hide them.
_NESTED = re.compile(r"\)[*+{?]|\\[1-9]|\(\?P=|\(\?#|\(\?[A-Za-z]*x")


class BadPattern(ValueError):
    """A pattern that is none, or takes too long to match."""


class PatternTable:
    """A set of patterns, each with a value.

    Arguments:
        values: by pattern; untrusted.

    Raises:
        BadPattern: one is not valid, or could take too long.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._literals: dict[str, list[str]] = {}
        self._others: list[tuple[str, re.Pattern[str]]] = []
        self._steps = _MOST_STEPS
        self._values = dict(values)
        for pattern in self._values:
            literal = _LITERAL.fullmatch(pattern)
            if literal:
                name = re.sub(r"\\(.)", r"\1", literal[1])
                self._literals.setdefault(name, []).append(pattern)
            else:
                self._others.append((pattern, _compiled(pattern)))
        self.unused = set(self._values)
        """The patterns that have matched no name yet."""

    def find(self, name: str) -> tuple[str, Any] | None:
        """The pattern that matches the beginning of a name, and its value; None if none does.

        Raises:
            BadPattern: several do, or it could take too long.
        """
        matches = [*self._literals.get(name, ())]
        for pattern, compiled in self._others:
            self._steps -= _steps(pattern, len(name))
            if self._steps < 0:
                raise BadPattern(f"the pattern {quoted(pattern)} could take too long to match")
            if compiled.match(name):
                matches.append(pattern)
        self.unused.difference_update(matches)
        if len(matches) > 1:
            both = f"{quoted(matches[0])} and {quoted(matches[1])}"
            raise BadPattern(f"{quoted(name)} is matched by {both}")
        return (matches[0], self._values[matches[0]]) if matches else None


def _steps(pattern: str, length: int) -> int:
    """About how many steps it takes at worst to match a name of so many letters."""
    pattern = _without_escapes(pattern)
    repeats, choices = len(_REPEAT.findall(pattern)), len(_CHOICE.findall(pattern))
    ways = math.comb(max(2, length) + repeats, repeats)  # to divide the name among the repeats
    return ways << min(choices, 64)


def _without_escapes(pattern: str) -> str:
    """A pattern without escaped characters; references to groups keep their backslash."""
    return re.sub(r"\\[^1-9]", "-", pattern, flags=re.DOTALL)


def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > _MOST_PATTERN or _NESTED.search(_without_escapes(pattern)):
        raise BadPattern(f"the pattern {quoted(pattern)} could take too long to match")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadPattern(f"the pattern {quoted(pattern)} is not valid: {error}") from error


def items(value: Any) -> Sequence[Any]:
    """The items of a list; none of anything else."""
    return value if isinstance(value, list | tuple) else ()


def steps_of(groups: Iterable[Mapping[Any, Any]]) -> Iterator[tuple[int, int | float]]:
    """The steps that some optimizers, such as FusedAdam, count by group, for each parameter."""
    for group in groups:
        step: Any = group.get("step")
        for number in items(group.get("params")) if is_number(step) else ():
            if type(number) is int:
                yield number, step
