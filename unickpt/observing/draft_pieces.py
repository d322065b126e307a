"""Pieces of drafted rules: names with captures, axes in the order that values or shapes tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from unickpt.observing.notation import LETTERS, Capture, Token, tokens
from unickpt.observing.value_matching import Order, Region


def parent_of(name: str) -> str:
    found = re.split(r"[/.](?=[^/.]*$)", name)
    return found[0] if len(found) > 1 else ""


def axis_letters(shape: Sequence[int]) -> list[str]:
    """An axis for each dimension; `1` for those of one element."""
    if len(shape) == 2 and 1 not in shape:
        return ["i", "o"]
    free = iter(LETTERS)
    return ["1" if n == 1 else next(free) for n in shape]


def grouped_axes(letters: Sequence[str], order: Order) -> list[str]:
    found, at = [], 0
    for count in order.groups:
        part = [letters[axis] for axis in order.order[at : at + count]]
        at += count
        found.append("1" if not part else part[0] if len(part) == 1 else f"({' '.join(part)})")
    return found


def tail_of(dims: Iterable[str]) -> str:
    return f" [{' '.join(dims)}]"


def usual_sizes(
    groups: Iterable[Sequence[str]], sizes: Mapping[str, int]
) -> tuple[tuple[str, int | str], ...]:
    """The usual sizes of axes in parentheses, without the largest of each."""
    found: dict[str, int | str] = {}
    for dims in groups:
        for inside in re.findall(r"\(([^)]*)\)", " ".join(dims)):
            letters = [c for c in re.findall(r"[A-Za-z]\w*", inside) if c in sizes]
            for letter in sorted(letters, key=lambda c: sizes[c])[:-1]:
                found[letter] = f"{sizes[letter]}?"
    return tuple(sorted(found.items()))


def captured_name(
    members: Sequence[tuple[str, Region]], letters: Sequence[str]
) -> tuple[Token, ...] | None:
    """The name of parts with their indices as axes; None if they are not in the names."""
    pieces = [tokens(other) for other, _ in members]
    if len({len(each) for each in pieces}) > 1:
        return None
    found: list[Token] = []
    used: set[int] = set()
    for column in zip(*pieces, strict=True):
        if len(set(column)) == 1:
            found.append(column[0])
            continue
        if not all(str(token).isdecimal() for token in column):
            return None
        numbers = [int(str(token)) for token in column]
        for at, letter in enumerate(letters):
            shift = {n - region.index[at] for n, (_, region) in zip(numbers, members, strict=True)}
            if len(shift) == 1 and at not in used:
                used.add(at)
                (constant,) = shift
                found.append(Capture(letter + (f"{constant:+d}" if constant else "")))
                break
        else:
            return None
    varying = {at for at in range(len(letters)) if len({r.index[at] for _, r in members}) > 1}
    return tuple(found) if used >= varying else None
