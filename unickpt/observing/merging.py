"""Merging of rules: those that differ only in numbers, or in one word, become one."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from unickpt.observing.name_overlaps import NameForm, Overlaps
from unickpt.observing.notation import (
    DIGITS,
    LETTERS,
    Capture,
    Token,
    Written,
    WrittenTerm,
    more_letters,
)

_MOST_MERGED = 2000


def merged(rules: Sequence[Written], *, words: bool = True) -> list[Written]:
    """Rules, those that differ only in numbers as one, and those that differ in one word too."""
    found = _merge_numbers(rules)
    if words and len(found) <= _MOST_MERGED:
        found = _merge_words(found)
    return sorted(found, key=lambda rule: rule.order)


def _skeleton(name: Sequence[Token]) -> tuple[object, ...]:
    return tuple(None if isinstance(t, str) and DIGITS.fullmatch(t) else t for t in name)


def _form(rule: Written) -> tuple[object, ...]:
    """Equal for rules that differ only in numbers."""
    return (
        tuple((_skeleton(t.name), t.tail) for t in rule.left),
        tuple(tuple((_skeleton(t.name), t.tail) for t in names) for names in rule.right),
        rule.sizes,
        rule.nothing,
    )


def _merge_numbers(rules: Sequence[Written]) -> list[Written]:
    groups: dict[object, list[Written]] = {}
    for rule in rules:
        groups.setdefault(_form(rule), []).append(rule)
    overlaps = Overlaps([list(_forms_of(members)) for members in groups.values()])
    found = []
    for number, members in enumerate(groups.values()):
        found += _fewest(members, overlaps, number)
    return found


def _fewest(
    members: list[Written], overlaps: Overlaps, group: int, *, is_part: bool = False
) -> list[Written]:
    """Rules that differ in numbers as one; in parts, if not all of them have one form."""
    one = _as_one(members, overlaps, group, is_part) if len(members) > 1 else None
    if one is not None:
        return [one]
    for is_by_number, keys in ((False, [rule.shape for rule in members]), (True, _kinds(members))):
        parts: dict[object, list[Written]] = {}
        for rule, key in zip(members, keys, strict=True):
            parts.setdefault(key, []).append(rule)
        if 1 < len(parts) < len(members):
            is_inner = is_part or is_by_number
            return [
                one
                for part in parts.values()
                for one in _fewest(part, overlaps, group, is_part=is_inner)
            ]
    return members


def _kinds(members: Sequence[Written]) -> list[object]:
    """Of each rule the numbers that only one side has: `w1` becomes `fc_1`, and `w3` `fc_2`."""
    columns = _columns(members)
    left, right = _values(columns)
    odd = sorted(left ^ right)
    if members[0].left and members[0].right:
        return list(zip(*odd, strict=True)) if odd else [()] * len(members)
    return list(next(iter(columns.values()), (0,) * len(members)))  # names of one side only


def _forms_of(members: Sequence[Written]) -> Iterator[NameForm]:
    """The names of rules of one form, term by term."""
    for is_left in (True, False):
        every = [_side(rule, is_left) for rule in members]
        for at, term in enumerate(every[0]):
            pieces = tuple(
                None if isinstance(t, str) and DIGITS.fullmatch(t) else str(t) for t in term.name
            )
            numbers = {
                place: frozenset(int(str(terms[at].name[place])) for terms in every)
                for place, piece in enumerate(pieces)
                if piece is None
            }
            yield NameForm(is_left, pieces, numbers)


def _as_one(
    members: Sequence[Written], overlaps: Overlaps, group: int, is_part: bool
) -> Written | None:
    """Rules that differ in numbers as one rule, if captures can stand for these.

    Arguments:
        members: the rules.
        overlaps: knows the names of all rules.
        group: the number of the group of rules.
        is_part: whether others have names that differ from theirs in numbers only.
    """
    first = members[0]
    columns = _columns(members)
    left, right = _values(columns)
    if first.left and first.right and left != right:
        if len({rule.shape for rule in members}) > 1:
            return None
        sides = sorted((left, right), key=len, reverse=True)
        found = (_as_axes(members, columns, *pair) for pair in (sides, sides[::-1]))
        return next((one for one in found if one is not None), None)
    if not (first.left and first.right) and first.nothing not in ("drop",):
        return _constants(members, columns)
    before = len(first.left)
    restricted = (
        set(columns.values())
        if is_part
        else overlaps.restricted(
            group,
            lambda number: {
                place: values
                for (is_left, at, place), values in columns.items()
                if (at if is_left else before + at) == number
            },
        )
    )
    captures: dict[tuple[int, ...], Capture] = {}
    taken = _taken(first)
    for (is_left, at, place), values in columns.items():
        if values not in captures:
            key = _letter(_side(first, is_left)[at].name, place, taken)
            options = "|".join(map(str, sorted(set(values)))) if values in restricted else ""
            captures[values] = Capture(f"{key}={options}" if options else key)
    return _with(first, {where: captures[values] for where, values in columns.items()})


_Columns = dict[tuple[bool, int, int], tuple[int, ...]]
"""Side, number of the term and place in its name, with the number that each rule has there."""


def _columns(members: Sequence[Written]) -> _Columns:
    """The numbers in names that are not the same in all rules."""
    columns: _Columns = {}
    for is_left in (True, False):
        every = [_side(rule, is_left) for rule in members]
        for at, term in enumerate(every[0]):
            for place, token in enumerate(term.name):
                if isinstance(token, str) and DIGITS.fullmatch(token):
                    values = tuple(int(str(terms[at].name[place])) for terms in every)
                    if len(set(values)) > 1:
                        columns[is_left, at, place] = values
    return columns


def _values(columns: _Columns) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Those of the left side, and of the right."""
    sides: tuple[set[tuple[int, ...]], set[tuple[int, ...]]] = set(), set()
    for (is_left, *_), values in columns.items():
        sides[not is_left].add(values)
    return sides


def _side(rule: Written, is_left: bool) -> tuple[WrittenTerm, ...]:
    return rule.left if is_left else tuple(itertools.chain(*rule.right))


def _with(rule: Written, captures: Mapping[tuple[bool, int, int], Capture]) -> Written:
    """A rule with captures at some places of its names."""

    def changed(is_left: bool, at: int, term: WrittenTerm) -> WrittenTerm:
        name = tuple(
            captures.get((is_left, at, place), token) for place, token in enumerate(term.name)
        )
        return replace(term, name=name)

    left = tuple(changed(True, at, term) for at, term in enumerate(rule.left))
    count, right = 0, []
    for names in rule.right:
        right.append(tuple(changed(False, count + k, term) for k, term in enumerate(names)))
        count += len(names)
    return replace(rule, left=left, right=tuple(right))


def _taken(rule: Written) -> set[str]:
    """The letters that a rule has."""
    texts = [term.tail for term in rule.terms]
    texts += [t.text for term in rule.terms for t in term.name if isinstance(t, Capture)]
    return set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", " ".join(texts)))


def _letter(name: Sequence[Token], place: int, taken: set[str]) -> str:
    """A name for a capture, after the word before it."""
    before = [re.sub("[^A-Za-z]", "", t) for t in name[:place] if isinstance(t, str)]
    word = next((text for text in reversed(before) if text), "n")
    first = "x" if word.startswith("expert") else word[0].lower()
    found = next(
        n for n in itertools.chain(first, "lnx", LETTERS, more_letters()) if n not in taken
    )
    taken.add(found)
    return found


def _as_axes(
    members: Sequence[Written],
    columns: _Columns,
    few: set[tuple[int, ...]],
    many: set[tuple[int, ...]],
) -> Written | None:
    """Numbers of one side (`many`) that are sums of multiples of those of the other (`few`)."""
    base = sorted(few)
    if not base or not _is_grid(base):
        return None
    matrix = np.asarray([[*numbers, 1] for numbers in zip(*base, strict=True)], float)
    taken = _taken(members[0])
    axes: dict[tuple[int, ...], str] = {}
    sizes: dict[str, int | str] = dict(members[0].sizes)
    for where, values in columns.items():
        if values in few and values not in axes:
            axes[values] = _letter(_side(members[0], where[0])[where[1]].name, where[2], taken)
            sizes[axes[values]] = max(values) - min(values) + 1
    texts = {values: _linear([axes[values]], [1], min(values)) for values in base}
    for values in many:
        found = np.rint(np.linalg.lstsq(matrix, np.asarray(values, float), rcond=None)[0])
        if (matrix @ found != values).any() or (found[:-1] < 0).any():
            return None
        factors = [int(x) for x in found[:-1]]
        low = int(found[-1]) + sum(f * min(b) for f, b in zip(factors, base, strict=True))
        texts[values] = _linear([axes[b] for b in base], factors, low)
    captures = {where: Capture(texts[values]) for where, values in columns.items()}
    return replace(_with(members[0], captures), sizes=tuple(sorted(sizes.items())))


def _is_grid(base: Sequence[tuple[int, ...]]) -> bool:
    """Whether numbers take all combinations of values, each without gaps."""
    ranges = [max(values) - min(values) + 1 for values in base]
    return len(set(zip(*base, strict=True))) == math.prod(ranges) == len(base[0])


def _linear(axes: Sequence[str], factors: Sequence[int], constant: int) -> str:
    parts = [
        axis if factor == 1 else f"{factor}*{axis}"
        for axis, factor in zip(axes, factors, strict=True)
        if factor
    ]
    return "+".join(parts) + (f"{constant:+d}" if constant else "")


def _constants(members: Sequence[Written], columns: _Columns) -> Written | None:
    """Constants whose names differ in numbers: these are axes, so that all names are known."""
    base = sorted(set(columns.values()))
    if not base or not _is_grid(base) or any(min(values) for values in base):
        return None
    taken, axes = _taken(members[0]), {}
    for (is_left, at, place), values in columns.items():
        if values not in axes:
            axes[values] = _letter(_side(members[0], is_left)[at].name, place, taken)
    sizes = {**dict(members[0].sizes), **{axes[v]: max(v) + 1 for v in base}}
    captures = {where: Capture(axes[values]) for where, values in columns.items()}
    return replace(_with(members[0], captures), sizes=tuple(sorted(sizes.items())))


def _merge_words(rules: Sequence[Written]) -> list[Written]:
    """Rules that differ in one word, which is the same on both sides, as one."""
    found = list(rules)
    while True:
        groups: dict[object, list[tuple[int, str]]] = {}
        for at, rule in enumerate(found):
            for word in sorted(_words(rule)) if rule.left and rule.right else ():
                shape = _replaced(rule, word, Capture(""))
                groups.setdefault((shape.left, shape.right, shape.sizes), []).append((at, word))
        best = max(groups.values(), key=len, default=[])
        if len(best) < 2:
            return found
        (at, word), *others = best
        taken = _taken(found[at])
        letter = next(n for n in itertools.chain("nmk", more_letters()) if n not in taken)
        one = _replaced(found[at], word, Capture(f"{letter}=" + "|".join(w for _, w in best)))
        found[at] = one
        gone = {k for k, _ in others}
        found = [rule for k, rule in enumerate(found) if k not in gone]


def _replaced(rule: Written, word: str, capture: Capture) -> Written:
    """A rule with a capture for a word in its names."""
    return rule.renamed(lambda name: tuple(capture if token == word else token for token in name))


def _words(rule: Written) -> set[str]:
    """Words that names of both sides have, once in each that has it."""
    sides = []
    for is_left in (True, False):
        words = [
            [
                t
                for t in term.name
                if isinstance(t, str) and re.fullmatch(r"[\w-]*[A-Za-z][\w-]*", t)
            ]
            for term in _side(rule, is_left)
        ]
        sides.append({w for each in words for w in each if all(e.count(w) == 1 for e in words)})
    return sides[0] & sides[1]
