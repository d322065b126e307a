"""Notation: rules as they are written, and those that differ only in numbers or words as one."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unickpt.observing.axis_items import Axis, Item, Padding, Single, Sum, axes_in
from unickpt.observing.components import Draft, NumberExpr, Term, all_axes
from unickpt.observing.name_overlaps import NameForm, Overlaps
from unickpt.observing.regular_blocks import Irregular

_PLAIN = re.compile(r'[^\s\[\](){}<>,=#"?|:\\-]?[^\s\[\](){}<>,=#"?|:\\]*')
_TOKENS = re.compile(r"([/.]|(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9]))")
_DIGITS = re.compile(r"0|[1-9][0-9]*")
_LETTERS = "abcdefghijkmnopqrstuvwyz"
_MOST_MERGED = 2000


@dataclass(frozen=True)
class Capture:
    """A part of a name in braces."""

    text: str


Token = str | Capture


@dataclass(frozen=True)
class WrittenTerm:
    """A name, in pieces, and what follows it: axes, arithmetic and dtype."""

    name: tuple[Token, ...]
    tail: str = ""

    def __str__(self) -> str:
        name = "".join(
            "{" + t.text + "}"
            if isinstance(t, Capture)
            else t.replace("{", "{{").replace("}", "}}")
            for t in self.name
        )
        plain = "".join(t for t in self.name if isinstance(t, str))
        if not _PLAIN.fullmatch(plain) or plain in ("drop", "as") or name[:1].isdecimal():
            name = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return name + self.tail


@dataclass(frozen=True)
class Written:
    """A rule as it is written.

    Arguments:
        left: terms; none where `nothing` says what is there instead.
        right: for each array its names.
        sizes: of axes; those that shapes of both sides tell end with `?`.
        nothing: `drop` or a constant, on the side that has no term.
        order: where the rule stands in the file.
        arrays: how many of both sides it is about.
        shape: sizes of all axes, or of an array that stays as it is: numbers become axes only where
            it is the same.
    """

    left: tuple[WrittenTerm, ...]
    right: tuple[tuple[WrittenTerm, ...], ...]
    sizes: tuple[tuple[str, int | str], ...] = ()
    nothing: str = "drop"
    order: int = 0
    arrays: int = 1
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        left = ", ".join(map(str, self.left)) or self.nothing
        right = ", ".join(" = ".join(map(str, names)) for names in self.right) or self.nothing
        sizes = " ".join(f"{axis}={size}" for axis, size in self.sizes)
        return f"{left} <-> {right}" + (f"    {sizes}" if sizes else "")

    @property
    def terms(self) -> list[WrittenTerm]:
        return [*self.left, *itertools.chain(*self.right)]

    def renamed(self, change: Callable[[tuple[Token, ...]], tuple[Token, ...]]) -> Written:
        left = tuple(replace(term, name=change(term.name)) for term in self.left)
        right = tuple(tuple(replace(t, name=change(t.name)) for t in names) for names in self.right)
        return replace(self, left=left, right=right)


def tokens(name: str) -> tuple[Token, ...]:
    """A name in pieces: separators, numbers and what is between them."""
    return tuple(filter(None, _TOKENS.split(name)))


# --- one rule -------------------------------------------------------------------------------------


def written(draft: Draft, order: int, dtype_of: Callable[[Term, bool], str | None]) -> Written:
    """A draft as it is written.

    Arguments:
        draft: the rule.
        order: where it stands.
        dtype_of: says which dtype a term has when it is made, if that must be said; with whether it
            is on the left side.
    """
    names = _AxisNames(draft)
    sides = [draft.left, [term for terms in draft.right for term in terms]]
    sizes = {} if draft.is_whole else names.sizes(sides)

    def term(one: Term, is_left: bool) -> WrittenTerm:
        tail = "" if draft.is_whole else names.tail(one)
        dtype = dtype_of(one, is_left)
        return WrittenTerm(names.name(one), tail + (f" as {dtype}" if dtype else ""))

    return Written(
        tuple(term(one, True) for one in draft.left),
        tuple(tuple(term(one, False) for one in terms) for terms in draft.right),
        tuple(sizes.items()),
        order=order,
        arrays=sum(len(one.names) for side in sides for one in side),
        shape=draft.shape
        or tuple(
            leaf.extent for one in draft.left for axis in all_axes(one) for leaf in axis.leaves()
        ),
    )


class _AxisNames:
    """The names of the axes of a rule."""

    def __init__(self, draft: Draft) -> None:
        self._names: dict[int, str] = {}
        self._taken: set[str] = set()
        terms = [*draft.left, *itertools.chain(*draft.right)]
        for alone in (True, False):  # an axis that is a number by itself has the better name
            for term in terms:
                self._name_numbers(term, alone)
        leaves = [axis for term in terms for axis in all_axes(term)]
        rest = list({id(axis): axis for axis in leaves if id(axis) not in self._names}.values())
        letters: Iterable[str] = "io" if len(rest) == 2 and not self._names else _LETTERS
        free = (x for x in itertools.chain(letters, _more()) if x not in self._taken)
        for axis, letter in zip(rest, free, strict=False):
            self._names[id(axis)] = letter

    def _name_numbers(self, term: Term, alone: bool) -> None:
        """Axes in names are called after the word before them."""
        before = ""
        for item in term.name:
            if isinstance(item, str):
                before = item or before
                continue
            word = re.findall("[A-Za-z]+", before)[-1:] or ["n"]
            if alone and len(item.terms) > 1:
                continue
            for axis, _ in item.terms:
                for leaf in axis.leaves():
                    if id(leaf) not in self._names:
                        self._names[id(leaf)] = self._fresh(word[0])

    def _fresh(self, word: str) -> str:
        first = "x" if word.startswith("expert") else word[0].lower()
        found = next(
            n for n in itertools.chain(first, "lnx", _LETTERS, _more()) if n not in self._taken
        )
        self._taken.add(found)
        return found

    def name(self, term: Term) -> tuple[Token, ...]:
        found: list[Token] = []
        for item in term.name:
            if isinstance(item, str):
                found += tokens(item)
            else:
                found.append(self._number(item))
        return tuple(found)

    def _number(self, number: NumberExpr) -> Token:
        parts = []
        for axis, factor in number.terms:
            stride = factor * axis.representative.extent
            for leaf in axis.leaves():
                stride //= leaf.extent
                letter = self._names[id(leaf)]
                parts.append(letter if stride == 1 else f"{stride}*{letter}")
        if not parts:
            return str(number.constant)
        return Capture("+".join(parts) + (f"+{number.constant}" if number.constant else ""))

    def tail(self, term: Term) -> str:
        dims = " ".join(self._dim(items) for items in term.dims)
        return f" [{dims}]" + self._arithmetic(term)

    def _dim(self, items: Sequence[Item]) -> str:
        if not items:
            return "1"
        text = self._product(items)
        is_sum = len(items) == 1 and isinstance(items[0], Sum)
        return f"({text})" if " " in text and not is_sum else text

    def _product(self, items: Sequence[Item]) -> str:
        return " ".join(map(self._item, items))

    def _item(self, item: Item) -> str:
        if isinstance(item, Single):
            sign = "-" if item.reverse else ""
            return " ".join(sign + self._names[id(leaf)] for leaf in item.axis.leaves())
        pieces = [
            "_" if isinstance(piece, Padding) else self._product(piece.items)
            for piece in item.segments
        ]
        return "(" + " + ".join(pieces) + ")"

    def _arithmetic(self, term: Term) -> str:
        text = "" if term.scale == 1 else " " + self._factor(term)
        if term.offset:
            sign, size = ("-", -term.offset) if term.offset < 0 else ("+", term.offset)
            text += f" {sign} {_decimal(size)}"
        return text

    def _factor(self, term: Term) -> str:
        scale = term.scale
        extents = {
            leaf.extent: self._names[id(leaf)] for axis in all_axes(term) for leaf in axis.leaves()
        }
        if scale > 0:
            for sign, value in (("*", scale), ("/", 1 / scale)):
                if _is_near(value, round(value)) and value >= 1:
                    return f"{sign} {extents.get(round(value), round(value))}"
            for sign, value in (("*", scale**2), ("/", scale**-2)):
                if _is_near(value, round(value)) and value >= 1:
                    return f"{sign} {extents.get(round(value), round(value))}**0.5"
        return f"* {_decimal(scale)}"

    def sizes(self, sides: Sequence[Sequence[Term]]) -> dict[str, int | str]:
        """The sizes that shapes of one side alone do not tell; those that the shapes of both sides
        tell are usual ones only."""
        together = [term for terms in sides for term in terms]
        firm: dict[str, int] = {}
        for term in together:
            self._sizes_in_name(term, firm)
        alone = _alone(together)
        grown = True
        while grown:
            told = _told(together, alone)
            grown = bool(told - alone)
            alone |= told
        for term in together:
            for items in term.dims:
                self._sizes_of(items, alone, firm)
        usual: dict[str, int] = {}
        for terms in sides:
            one_side = _alone(terms)
            for term in terms:
                for items in term.dims:
                    self._sizes_of(items, one_side, usual)
        found: dict[str, int | str] = {axis: f"{size}?" for axis, size in usual.items()}
        return dict(sorted((found | firm).items()))

    def _sizes_in_name(self, term: Term, found: dict[str, int]) -> None:
        for item in term.name:
            if not isinstance(item, NumberExpr):
                continue
            leaves = [leaf for axis, _ in item.terms for leaf in axis.leaves()]
            if len(leaves) > 1 or item.constant or term.is_one_of_several:
                for leaf in leaves:
                    found[self._names[id(leaf)]] = leaf.extent

    def _sizes_of(self, items: Sequence[Item], alone: set[int], found: dict[str, int]) -> None:
        """Adds the sizes of a dimension that nothing else tells, but that of the largest axis."""
        leaves = _leaves(items)
        pads = {piece.extent for item in items for piece in _paddings(item)}
        if len(pads) > 1:
            raise Irregular("it has paddings of several sizes")
        unknown = {id(leaf): leaf for leaf in leaves if id(leaf) not in alone}
        if len(leaves) + len(pads) < 2 or len(unknown) + len(pads) < 2:
            return
        if pads:
            (found["_"],) = pads
        for leaf in sorted(unknown.values(), key=lambda leaf: leaf.extent)[: None if pads else -1]:
            found[self._names[id(leaf)]] = leaf.extent


def _leaves(items: Sequence[Item]) -> list[Axis]:
    return [leaf for axis in axes_in(items) for leaf in axis.leaves()]


def _alone(terms: Sequence[Term]) -> set[int]:
    """The axes that are a dimension of some term."""
    every = [_leaves(items) for term in terms for items in term.dims if not _has_sum(items)]
    for term in terms:  # a number in names is, too: the arrays that there are tell its extent
        numbers = [item for item in term.name if isinstance(item, NumberExpr)]
        every += [
            [leaf for axis, _ in item.terms for leaf in axis.leaves()]
            for item in numbers
            if not term.is_one_of_several
        ]
    return {id(leaves[0]) for leaves in every if len(leaves) == 1}


def _told(terms: Sequence[Term], known: set[int]) -> set[int]:
    """The axes whose sizes follow from a dimension in which they alone are not known."""
    found = set()
    for term in terms:
        for items in term.dims:
            unknown = {id(leaf) for leaf in _leaves(items)} - known
            if len(unknown) == 1 and not any(True for item in items for _ in _paddings(item)):
                found |= unknown
    return found


def _has_sum(items: Sequence[Item]) -> bool:
    return any(isinstance(item, Sum) for item in items)


def _paddings(item: Item) -> Iterator[Padding]:
    for piece in item.segments if isinstance(item, Sum) else ():
        if isinstance(piece, Padding):
            yield piece
        else:
            for inner in piece.items:
                yield from _paddings(inner)


def _more() -> Iterator[str]:
    return (f"{letter}{n}" for n in itertools.count(1) for letter in _LETTERS)


def _is_near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=3e-6)


def _decimal(value: float) -> str:
    """The shortest number that float32 does not tell from this one, without an exponent."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if math.isclose(short, value, rel_tol=2.5e-7):
            break
    return np.format_float_positional(short, trim="-")


# --- several as one -------------------------------------------------------------------------------


def merged(rules: Sequence[Written], *, words: bool = True) -> list[Written]:
    """Rules, those that differ only in numbers as one, and those that differ in one word too."""
    found = _merge_numbers(rules)
    if words and len(found) <= _MOST_MERGED:
        found = _merge_words(found)
    return sorted(found, key=lambda rule: rule.order)


def _skeleton(name: Sequence[Token]) -> tuple[object, ...]:
    return tuple(None if isinstance(t, str) and _DIGITS.fullmatch(t) else t for t in name)


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


def _fewest(members: list[Written], overlaps: Overlaps, group: int) -> list[Written]:
    """Rules that differ in numbers as one; in parts, if not all of them have one form."""
    one = _as_one(members, overlaps, group) if len(members) > 1 else None
    if one is not None:
        return [one]
    parts: dict[object, list[Written]] = {}
    for member in members:
        parts.setdefault(member.shape, []).append(member)
    if len(parts) == 1 and len(members) > 2:
        parts = {}
        for value, member in zip(_telling(members), members, strict=True):
            parts.setdefault(value, []).append(member)
    if not 1 < len(parts) < len(members):
        return members
    return [one for part in parts.values() for one in _fewest(part, overlaps, group)]


def _telling(members: Sequence[Written]) -> tuple[int, ...]:
    """A number that differs, by which rules are taken apart: of one side only, of few values."""
    columns = _columns(members)
    sides = [
        {v for (is_left, *_), v in columns.items() if is_left == side} for side in (True, False)
    ]
    lone = sides[0] ^ sides[1] if members[0].left and members[0].right else set(columns.values())
    few = [values for values in columns.values() if values in lone]
    if members[0].left and members[0].right:
        few.sort(key=lambda values: len(set(values)))
    return few[0] if few else (0,) * len(members)


def _forms_of(members: Sequence[Written]) -> Iterator[NameForm]:
    """The names of rules of one form, term by term."""
    for is_left in (True, False):
        every = [_side(rule, is_left) for rule in members]
        for at, term in enumerate(every[0]):
            pieces = tuple(
                None if isinstance(t, str) and _DIGITS.fullmatch(t) else str(t) for t in term.name
            )
            numbers = {
                place: frozenset(int(str(terms[at].name[place])) for terms in every)
                for place, piece in enumerate(pieces)
                if piece is None
            }
            yield NameForm(is_left, pieces, numbers)


def _columns(members: Sequence[Written]) -> dict[tuple[bool, int, int], tuple[int, ...]]:
    """The numbers that differ, by side, term and place."""
    columns: dict[tuple[bool, int, int], tuple[int, ...]] = {}
    for is_left in (True, False):
        every = [_side(rule, is_left) for rule in members]
        for at, term in enumerate(every[0]):
            for place, token in enumerate(term.name):
                if isinstance(token, str) and _DIGITS.fullmatch(token):
                    values = tuple(int(str(terms[at].name[place])) for terms in every)
                    if len(set(values)) > 1:
                        columns[is_left, at, place] = values
    return columns


def _as_one(members: Sequence[Written], overlaps: Overlaps, group: int) -> Written | None:
    """Rules that differ in numbers as one rule, if captures can stand for these."""
    first = members[0]
    columns = _columns(members)
    left = {values for (is_left, *_), values in columns.items() if is_left}
    right = {values for (is_left, *_), values in columns.items() if not is_left}
    if first.left and first.right and left != right:
        if len({rule.shape for rule in members}) > 1:
            return None
        return _as_axes(members, columns, left, right)
    if not (first.left and first.right) and first.nothing not in ("drop",):
        return _constants(members, columns)
    before = len(first.left)
    restricted = overlaps.restricted(
        group,
        lambda number: {
            place: values
            for (is_left, at, place), values in columns.items()
            if (at if is_left else before + at) == number
        },
    )
    captures: dict[tuple[int, ...], Capture] = {}
    taken = _taken(first)
    for (is_left, at, place), values in columns.items():
        if values not in captures:
            key = _letter(_side(first, is_left)[at].name, place, taken)
            options = "|".join(map(str, sorted(set(values)))) if values in restricted else ""
            captures[values] = Capture(f"{key}={options}" if options else key)
    return _with(first, {where: captures[values] for where, values in columns.items()}, members)


def _side(rule: Written, is_left: bool) -> tuple[WrittenTerm, ...]:
    return rule.left if is_left else tuple(itertools.chain(*rule.right))


def _with(
    rule: Written, captures: Mapping[tuple[bool, int, int], Capture], members: Sequence[Written]
) -> Written:
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
    return replace(
        rule, left=left, right=tuple(right), arrays=sum(member.arrays for member in members)
    )


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
    found = next(n for n in itertools.chain(first, "lnx", _LETTERS, _more()) if n not in taken)
    taken.add(found)
    return found


def _as_axes(
    members: Sequence[Written],
    columns: Mapping[tuple[bool, int, int], tuple[int, ...]],
    left: set[tuple[int, ...]],
    right: set[tuple[int, ...]],
) -> Written | None:
    """Numbers of one side that are sums of multiples of those of the other, from 0 or later."""
    few, many = (left, right) if len(left) >= len(right) else (right, left)
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
    return replace(_with(members[0], captures, members), sizes=tuple(sorted(sizes.items())))


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


def _constants(
    members: Sequence[Written], columns: Mapping[tuple[bool, int, int], tuple[int, ...]]
) -> Written | None:
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
    return replace(_with(members[0], captures, members), sizes=tuple(sorted(sizes.items())))


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
        letter = next(n for n in itertools.chain("nmk", _more()) if n not in taken)
        one = _replaced(found[at], word, Capture(f"{letter}=" + "|".join(w for _, w in best)))
        found[at] = replace(one, arrays=sum(found[k].arrays for k, _ in best))
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
