"""Overlaps: which captures of a rule must be told their values, lest they match names of others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Values = tuple[int, ...]
"""What a number is in each of several names."""
_Key = tuple[bool, tuple[str | None, ...]]


@dataclass(frozen=True)
class NameForm:
    """Names that differ only in numbers.

    Arguments:
        is_left: the side they are on.
        pieces: of a name; None where there is a number.
        numbers: the values of each number, by its place.
    """

    is_left: bool
    pieces: tuple[str | None, ...]
    numbers: Mapping[int, frozenset[int]]


@dataclass
class Overlaps:
    """Knows the names of all rules.

    Arguments:
        forms: for each group of rules the forms of its names.
    """

    forms: Sequence[Sequence[NameForm]]
    _by_pieces: dict[_Key, list[tuple[int, NameForm]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for number, forms in enumerate(self.forms):
            for form in forms:
                self._by_pieces.setdefault((form.is_left, form.pieces), []).append((number, form))

    def restricted(
        self, group: int, captures: Callable[[int], Mapping[int, Values]]
    ) -> set[Values]:
        """The captures that would match names of other groups, by their values.

        Arguments:
            group: its number.
            captures: gives for the number of a term the captures, by their places.
        """
        found: set[Values] = set()
        for at, form in enumerate(self.forms[group]):
            columns = captures(at)
            if not columns:
                continue
            for number, other in self._by_pieces[form.is_left, form.pieces]:
                if number != group:
                    found |= _apart(form, other, columns)
            if self._matches_others(form, columns):
                inner = {values for place, values in columns.items() if not _is_whole(form, place)}
                found |= inner or set(columns.values())
        return found

    def _matches_others(self, form: NameForm, columns: Iterable[int]) -> bool:
        """Whether a name of another form matches, as a capture stands for words too."""
        pattern = re.compile("".join(
            "[^/.]+" if place in columns else "[0-9]+" if piece is None else re.escape(piece)
            for place, piece in enumerate(form.pieces)
        ))  # fmt: skip
        return any(
            is_left == form.is_left
            and pieces != form.pieces
            and pattern.fullmatch("".join("0" if piece is None else piece for piece in pieces))
            for is_left, pieces in self._by_pieces
        )


def _apart(form: NameForm, other: NameForm, columns: Mapping[int, Values]) -> set[Values]:
    """The captures whose values tell the names of two forms apart; all, if no single one does."""
    differ = [
        place
        for place, values in form.numbers.items()
        if not values & other.numbers.get(place, frozenset())
    ]
    if any(place not in columns for place in differ):
        return set()
    return {columns[differ[0]]} if differ else set(columns.values())


def _is_whole(form: NameForm, place: int) -> bool:
    """Whether a number is a component of a name by itself."""
    around = [form.pieces[k] for k in (place - 1, place + 1) if 0 <= k < len(form.pieces)]
    return all(piece in ("/", ".") for piece in around)
