"""Notation: the text of rules; rules that differ only in numbers or words become one."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from unickpt.plugins.observe.axis_items import (
    Item,
    ItemAxis,
    ItemPlace,
    Padding,
    Single,
    Sum,
    axes_in,
)
from unickpt.plugins.observe.fitting import Draft, NumberExpr, Term, all_axes
from unickpt.plugins.observe.regular_blocks import Irregular

_PLAIN = re.compile(r'[^\s\[\](){}<>,=#"?|:\\-]?[^\s\[\](){}<>,=#"?|:\\]*')
_TOKENS = re.compile(r"([/.]|%2F|(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9]))")
DIGITS = re.compile(r"0|[1-9][0-9]*")
LETTERS = "abcdefghijkmnopqrstuvwyz"


@dataclass(frozen=True)
class Capture:
    """A part of a name in braces."""

    text: str


@dataclass(frozen=True)
class NumberCapture(Capture):
    """A number in braces: multiples of axes, and a constant."""

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0

    @classmethod
    def of(cls, terms: Sequence[tuple[str, int]], constant: int) -> NumberCapture:
        if len(terms) == 1 and terms[0][1] < 0:
            ((axis, factor),) = terms
            text = f"{constant}-" + (f"{-factor}*" if factor < -1 else "") + axis
        else:
            text = "+".join(axis if factor == 1 else f"{factor}*{axis}" for axis, factor in terms)
            text += f"{constant:+d}" if constant else ""
        return cls(text, tuple(terms), constant)


Token = str | Capture


@dataclass(frozen=True)
class WrittenTerm:
    """A name, in pieces, with its axes, arithmetic and dtype."""

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
        left: terms; none where `nothing` replaces them.
        right: for each array its names.
        sizes: of axes; those that follow from shapes of both sides end with `?`.
        nothing: `drop` or a constant, on the side that has no term.
        order: where the rule stands in the file.
        shape: sizes of all axes, or of an array that stays unchanged: numbers become axes only
            where it is the same.
        parts: of a merged rule, the rules that it stands for.
    """

    left: tuple[WrittenTerm, ...]
    right: tuple[tuple[WrittenTerm, ...], ...]
    sizes: tuple[tuple[str, int | str], ...] = ()
    nothing: str = "drop"
    order: int = 0
    shape: tuple[int, ...] = ()
    parts: tuple[Written, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        left = ", ".join(map(str, self.left)) or self.nothing
        right = ", ".join(" = ".join(map(str, names)) for names in self.right) or self.nothing
        sizes = " ".join(f"{axis}={size}" for axis, size in self.sizes)
        return f"{left} <-> {right}" + (f"    {sizes}" if sizes else "")

    @property
    def terms(self) -> list[WrittenTerm]:
        return [*self.left, *itertools.chain(*self.right)]

    def renamed(self, change: Callable[[tuple[Token, ...]], tuple[Token, ...]]) -> Written:
        return self.with_names(change(term.name) for term in self.terms)

    def with_names(self, names: Iterable[tuple[Token, ...]]) -> Written:
        """The rule with other names, in the order of `terms`."""
        following = iter(names)
        left = tuple(replace(term, name=next(following)) for term in self.left)
        right = tuple(tuple(replace(t, name=next(following)) for t in ts) for ts in self.right)
        return replace(self, left=left, right=right)


def tokens(name: str) -> tuple[Token, ...]:
    """A name in pieces: separators, numbers and the texts between them."""
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
    sizes = {} if draft.is_whole else names.sizes(draft.side(True), draft.side(False))

    def term(draft_term: Term, is_left: bool) -> WrittenTerm:
        tail = "" if draft.is_whole else names.tail(draft_term)
        dtype = dtype_of(draft_term, is_left)
        return WrittenTerm(names.name(draft_term), tail + (f" as {dtype}" if dtype else ""))

    return Written(
        tuple(term(draft_term, True) for draft_term in draft.left),
        tuple(tuple(term(draft_term, False) for draft_term in terms) for terms in draft.right),
        tuple(sizes.items()),
        order=order,
        shape=draft.shape or tuple(axis.extent for x in draft.left for axis in all_axes(x)),
    )


class _AxisNames:
    """The names of the axes of a rule."""

    def __init__(self, draft: Draft) -> None:
        self._names: dict[int, str] = {}
        self._used_letters: set[str] = set()
        terms = [*draft.left, *draft.side(False)]
        for alone in (True, False):  # an axis that is a number by itself has the better name
            for term in terms:
                self._name_numbers(term, alone)
        leaves = [axis for term in terms for axis in all_axes(term)]
        unnamed_axes = list(
            {id(axis): axis for axis in leaves if id(axis) not in self._names}.values()
        )
        letters: Iterable[str] = "io" if len(unnamed_axes) == 2 and not self._names else LETTERS
        free = (x for x in itertools.chain(letters, more_letters()) if x not in self._used_letters)
        for axis, letter in zip(unnamed_axes, free, strict=False):
            self._names[id(axis)] = letter

    def _name_numbers(self, term: Term, alone: bool) -> None:
        """Axes in names get the name of the word before them."""
        before = ""
        for item in term.name:
            if isinstance(item, str):
                before = item or before
                continue
            word = re.findall("[A-Za-z]+", before)[-1:] or ["n"]
            for leaf in item.leaves() if not alone or len(item.terms) == 1 else ():
                if id(leaf) not in self._names:
                    self._names[id(leaf)] = letter_after(word[0], self._used_letters)

    def name(self, term: Term) -> tuple[Token, ...]:
        pieces = (tokens(x) if isinstance(x, str) else (self._number(x),) for x in term.name)
        return tuple(itertools.chain(*pieces))

    def _number(self, number: NumberExpr) -> Token:
        places = (ItemPlace(axis, factor) for axis, factor in number.terms)
        parts = [(self._names[id(p.axis)], p.stride) for x in places for p in x.leaves()]
        return NumberCapture.of(parts, number.constant) if parts else str(number.constant)

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
        extents = {axis.extent: self._names[id(axis)] for axis in all_axes(term)}
        if scale > 0:
            for sign, value in (("*", scale), ("/", 1 / scale)):
                if _is_near(value, round(value)) and value >= 1:
                    return f"{sign} {extents.get(round(value), round(value))}"
            for sign, value in (("*", scale**2), ("/", scale**-2)):
                if _is_near(value, round(value)) and value >= 1:
                    return f"{sign} {extents.get(round(value), round(value))}**0.5"
        return f"* {_decimal(scale)}"

    def sizes(self, *sides: Sequence[Term]) -> dict[str, int | str]:
        """The sizes that shapes of one side alone do not tell; those that the shapes of both sides
        tell are usual ones only."""
        together = [term for terms in sides for term in terms]
        firm: dict[str, int] = {}
        for term in together:
            self._sizes_in_name(term, firm)
        alone = _alone(together)
        while new_axes := _deducible(together, alone):
            alone |= new_axes
        self._sizes_of(together, alone, firm)
        usual: dict[str, int] = {}
        for terms in sides:
            self._sizes_of(terms, _alone(terms), usual)
        all_sizes: dict[str, int | str] = {axis: f"{size}?" for axis, size in usual.items()}
        return dict(sorted((all_sizes | firm).items()))

    def _sizes_in_name(self, term: Term, sizes: dict[str, int]) -> None:
        for item in term.name:
            if isinstance(item, NumberExpr):
                leaves = item.leaves()
                if len(leaves) > 1 or item.constant or term.is_one_of_several:
                    sizes |= {self._names[id(leaf)]: leaf.extent for leaf in leaves}

    def _sizes_of(self, terms: Sequence[Term], alone: set[int], sizes: dict[str, int]) -> None:
        """Adds the sizes of dimensions that follow from nothing else, except that of the largest
        axis."""
        for term in terms:
            for items in term.dims:
                self._sizes_of_dim(items, alone, sizes)

    def _sizes_of_dim(self, items: Sequence[Item], alone: set[int], sizes: dict[str, int]) -> None:
        leaves = _leaves(items)
        pads = {piece.extent for item in items for piece in _paddings(item)}
        if len(pads) > 1:
            raise Irregular("it has paddings of several sizes")
        unknown = {id(leaf): leaf for leaf in leaves if id(leaf) not in alone}
        if len(leaves) + len(pads) < 2 or len(unknown) + len(pads) < 2:
            return
        if pads:
            (sizes["_"],) = pads
        for leaf in sorted(unknown.values(), key=lambda leaf: leaf.extent)[: None if pads else -1]:
            sizes[self._names[id(leaf)]] = leaf.extent


def _leaves(items: Sequence[Item]) -> list[ItemAxis]:
    return [leaf for axis in axes_in(items) for leaf in axis.leaves()]


def _alone(terms: Sequence[Term]) -> set[int]:
    """The axes that are a dimension of some term."""
    every = [_leaves(items) for term in terms for items in term.dims if not _has_sum(items)]
    for term in terms:  # a number in names is, too: the arrays that there are tell its extent
        if not term.is_one_of_several:
            every += [item.leaves() for item in term.name if isinstance(item, NumberExpr)]
    return {id(leaves[0]) for leaves in every if len(leaves) == 1}


def _deducible(terms: Sequence[Term], known_axes: set[int]) -> set[int]:
    """The axes whose sizes follow from a dimension where only they are unknown."""
    axes = set()
    for term in terms:
        for items in term.dims:
            unknown = {id(leaf) for leaf in _leaves(items)} - known_axes
            if len(unknown) == 1 and not any(True for item in items for _ in _paddings(item)):
                axes |= unknown
    return axes


def _has_sum(items: Sequence[Item]) -> bool:
    return any(isinstance(item, Sum) for item in items)


def _paddings(item: Item) -> Iterator[Padding]:
    for piece in item.segments if isinstance(item, Sum) else ():
        if isinstance(piece, Padding):
            yield piece
        else:
            for inner in piece.items:
                yield from _paddings(inner)


def letters_of(rule: Written) -> set[str]:
    """The words that a rule has as axes and captures."""
    texts = [term.tail for term in rule.terms]
    texts += [t.text for term in rule.terms for t in term.name if isinstance(t, Capture)]
    return set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", " ".join(texts)))


def fresh_letter(first: str, used_letters: set[str]) -> str:
    """A letter that is not taken, which it is then; one of the first if possible."""
    letters = itertools.chain(first, LETTERS, more_letters())
    letter = next(letter for letter in letters if letter not in used_letters)
    used_letters.add(letter)
    return letter


def letter_after(word: str, used_letters: set[str]) -> str:
    """A letter for a number that stands after a word, which is taken then."""
    first = "x" if word.startswith("expert") else word[0].lower()
    return fresh_letter(first + "lnx", used_letters)


def more_letters() -> Iterator[str]:
    return (f"{letter}{n}" for n in itertools.count(1) for letter in LETTERS)


def _is_near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=3e-6)


def _decimal(value: float) -> str:
    """The shortest number that float32 does not tell from this one, without an exponent."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if math.isclose(short, value, rel_tol=2.5e-7):
            break
    return np.format_float_positional(short, trim="-")
