"""Which arrays a save quantises, by their names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from unickpt.extend import ArrayEntry, name_matches, quoted
from unickpt.plugins.quantize import codes as kinds
from unickpt.plugins.quantize.restores import Restores

# The last word of the names of arrays that count steps, also where they are floats, as in torch.
_COUNTS = frozenset({"step", "steps", "count"})

QuantizePatterns = Mapping[str, str | Restores | None]
"""The codes of the arrays that each pattern matches; None leaves them unchanged."""


def check(patterns: QuantizePatterns) -> None:
    """Checks the patterns of `SaveOptions.quantize`.

    Raises:
        TypeError, ValueError: they are not a dict of patterns and codes.
    """
    if not isinstance(patterns, Mapping) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            'quantize must be a dict of patterns of names, such as {"optim/**": "uint8"}, not '
            f"{quoted(patterns)}"
        )
    for pattern, codes in patterns.items():
        if isinstance(codes, Restores):
            continue
        if codes is not None and codes not in kinds.NAMES:
            names = ", ".join(kinds.NAMES)
            raise ValueError(
                f"quantize[{pattern!r}] is {quoted(codes)}, not one of {names} or None"
            )


def codes_for(patterns: QuantizePatterns, entry: ArrayEntry) -> str | None:
    """The codes to store an array in; None to store it unchanged. The first match counts.

    Raises:
        ValueError: it is to be quantised, but cannot be; names the pattern.
    """
    pattern = _first(patterns, entry.name)
    codes = None if pattern is None else patterns[pattern]
    if isinstance(codes, Restores):
        codes = codes.codes()
    if codes is None:
        return None
    codes = str.__str__(codes)
    problem = "it holds PRNG keys" if entry.prng is not None else _problem(codes, entry)
    if problem is None:
        return codes
    raise ValueError(
        f"SaveOptions.quantize[{pattern!r}] would store it as {codes}, but {problem}. "
        "Name fewer arrays, or put a pattern that matches this one before, with None"
    )


def _problem(codes: str, entry: ArrayEntry) -> str | None:
    if re.split(r"[/.]", entry.name)[-1] in _COUNTS and math.prod(entry.shape) == 1:
        return "it counts steps"
    try:
        kinds.check(codes, entry.dtype)
    except TypeError as error:
        return str(error)
    return None


def check_used(patterns: QuantizePatterns, names: Iterable[str]) -> None:
    """Checks that every pattern is the first match of an array.

    Arguments:
        patterns: of `SaveOptions.quantize`.
        names: of all arrays.

    Raises:
        ValueError: names the patterns, and some arrays.
    """
    if not patterns:
        return
    all_names = list(names)
    unused = patterns.keys() - {_first(patterns, name) for name in all_names}
    if unused:
        shown = ", ".join(repr(pattern) for pattern in patterns if pattern in unused)
        raise ValueError(
            f"SaveOptions.quantize: {shown} match{'es' * (len(unused) == 1)} no array, or only "
            f"arrays that an earlier pattern matches; there are {quoted(all_names)}"
        )


def _first(patterns: QuantizePatterns, name: str) -> str | None:
    return next((p for p in patterns if name_matches(p, name)), None)
