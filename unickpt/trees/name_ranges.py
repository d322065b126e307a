"""Folds names that differ only in numbers: layers/0/w and layers/1/w are layers/{0..1}/w."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from unickpt.arrays.names import natural
from unickpt.quoting import printable

# Names may come from untrusted storage: Python refuses to convert thousands of digits to an int.
_NUMBER = re.compile(r"(\d{1,18})")


def skeleton(name: str, number: str = "0") -> str:
    """The part that names must share to fold into one; `number` stands for each number.

    Example:
        >>> skeleton("layers_12/w"), skeleton("layers_12/w", "{}")
        ('layers_0/w', 'layers_{}/w')
    """
    return _NUMBER.sub(number, name)


def pieces(name: str) -> list[str]:
    """A name's alternating texts and numbers; equally many for all names of one skeleton."""
    return _NUMBER.split(name)


def fold_all(names: Iterable[str]) -> list[str]:
    """Names with any skeletons, folded and sorted.

    Example:
        >>> fold_all(["h.1.w", "b", "h.0.w"])
        ['b', 'h.{0..1}.w']
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=natural):
        groups.setdefault(skeleton(name), []).append(name)
    return [folded for group in groups.values() for folded in fold(group)]


def listed(names: Iterable[str], most: int = 5) -> str:
    """Folded names on one line; only the first few of many.

    Example:
        >>> listed(["h.1.w", "b", "h.0.w"]), listed(["a", "b", "c"], 2)
        ('b, h.{0..1}.w', 'a, b and 1 more')
    """
    folded = fold_all(names)
    more = len(folded) - most
    return ", ".join(folded[:most]) + (f" and {more} more" if more > 0 else "")


def fold(names: Sequence[str]) -> list[str]:
    """Names of one skeleton as one name, if they are exactly the product of their numbers; in
    printable characters, for tables and messages.

    Example:
        >>> fold(["h.0.w", "h.1.w", "h.2.w"]), fold(["h.0.a.1", "h.1.a.0"])
        (['h.{0..2}.w'], ['h.0.a.1', 'h.1.a.0'])
    """
    columns = list(zip(*map(pieces, names), strict=True))
    values = [sorted(set(column), key=lambda p: (len(p), p)) for column in columns]
    if len(set(names)) != math.prod(map(len, values)):
        return list(map(printable, names))
    return [printable("".join(map(_range, values)))]


def _range(values: Sequence[str]) -> str:
    if len(values) == 1:
        return values[0]
    plain = all(str(int(v)) == v for v in values)  # without leading zeros
    texts = runs(values) if plain else values
    return "{" + ",".join(texts if len(texts) == 1 else values) + "}"


def runs(numbers: Sequence[str], dash: str = "..") -> list[str]:
    """Ascending numbers, consecutive ones as one text, with `dash` between first and last.

    Example:
        >>> runs(["0", "1", "2", "5"])
        ['0..2', '5']
    """
    groups: list[list[str]] = []
    for number in numbers:
        if groups and int(number) == int(groups[-1][-1]) + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return [f"{run[0]}{dash}{run[-1]}" if len(run) > 1 else run[0] for run in groups]
