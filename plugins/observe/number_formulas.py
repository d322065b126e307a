"""Formulas: numbers in the names of both sides as sums of multiples of a few variables.

Of `layers.5 <-> blocks.1/2` and its like, `5 = 3 b + j` with `b = 1`, `j = 2`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

Values = tuple[int, ...]
"""A number's value in each of several names."""


@dataclass(frozen=True)
class Formula:
    """A number: multiples of variables, by their numbers, and a constant."""

    terms: tuple[tuple[int, int], ...]
    constant: int = 0

    @property
    def lone(self) -> int | None:
        """The variable, if it is the number."""
        alone = len(self.terms) == 1 and self.terms[0][1] == 1 and not self.constant
        return self.terms[0][0] if alone else None


@dataclass
class Formulas:
    """The variables that numbers are formulas of.

    Arguments:
        variables: the values of each.
        of: for the values of a number its formula.
        sizes: of variables that formulas of several need to be solved.
    """

    variables: list[Values] = field(default_factory=list)
    of: dict[Values, Formula] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)


def formulas(left: Iterable[Values], right: Iterable[Values]) -> Formulas | None:
    """The simplest formulas for the numbers of both sides; None if there are none.

    Arguments:
        left, right: the values of each number in the names of a side.

    Example:
        >>> formulas([(0, 1, 2)], [(3, 2, 1)]).of[3, 2, 1]
        Formula(terms=((0, -1),), constant=3)
    """
    sides = set(left), set(right)
    classes: dict[Values, list[Values]] = {}
    for values in sorted(sides[0] | sides[1]):
        classes.setdefault(_direction(values), []).append(values)
    shared = [c for c in classes.values() if {*c} & sides[0] and {*c} & sides[1]]
    unshared_values = [
        [v for c in classes.values() if c not in shared for v in c if v in s] for s in sides
    ]
    if not any(unshared_values):
        return _formulas_of([_line(members) for members in shared])
    for odd, base in (unshared_values, unshared_values[::-1]):
        lines = [_line(members) for members in (*shared, *([v] for v in base))]
        result = _formulas_of(lines)
        if all(_express(values, result) for values in odd):
            return result
    if not shared and len(unshared_values[0]) == len(unshared_values[1]) == 1:
        return _in_two_digits(unshared_values[0][0], unshared_values[1][0])
    return None


def _direction(values: Values) -> Values:
    """Equal for numbers where one is a multiple of the other plus a constant."""
    moved = [value - values[0] for value in values]
    step = math.gcd(*moved) * (1 if next(filter(None, moved), 1) > 0 else -1)
    return tuple(value // step for value in moved)


@dataclass(frozen=True)
class _Line:
    """Numbers that are multiples of one variable, and constants."""

    values: Values
    of: dict[Values, tuple[int, int]]


def _line(members: Sequence[Values]) -> _Line:
    direction = _direction(members[0])
    low = min(direction)
    unit = tuple(value - low for value in direction)
    highest, first = unit.index(max(unit)), unit.index(0)
    factors = {v: ((v[highest] - v[first]) // unit[highest], v[first]) for v in members}
    common = math.gcd(*(factor for factor, _ in factors.values()))
    unit = tuple(value * common for value in unit)
    factors = {v: (factor // common, constant) for v, (factor, constant) in factors.items()}
    # The smallest possible constants: `{l+1}` next to `{l}`, and not `{l}` next to `{l-1}`.
    shift = min((c // f for f, c in factors.values() if f > 0), default=0)
    if shift > 0 and all(f > 0 for f, _ in factors.values()):
        unit = tuple(value + shift for value in unit)
        factors = {values: (f, c - f * shift) for values, (f, c) in factors.items()}
    return _Line(unit, factors)


def _formulas_of(lines: Sequence[_Line]) -> Formulas:
    result = Formulas()
    for number, line in enumerate(lines):
        result.variables.append(line.values)
        for values, (factor, constant) in line.of.items():
            result.of[values] = Formula(((number, factor),), constant)
    return result


def _express(values: Values, known_formulas: Formulas) -> bool:
    """Adds the formula for a number as a sum of multiples of the variables, if there is one."""
    if not known_formulas.variables:
        return False
    matrix = np.asarray([[*row, 1] for row in zip(*known_formulas.variables, strict=True)], float)
    factors = np.rint(np.linalg.lstsq(matrix, np.asarray(values, float), rcond=None)[0])
    if (matrix @ factors != values).any() or (factors[:-1] < 0).any():
        return False
    terms = tuple((variable, int(f)) for variable, f in enumerate(factors[:-1]) if f)
    if not terms or factors[-1] < 0:
        return False
    known_formulas.of[values] = Formula(terms, int(factors[-1]))
    return _add_sizes(terms, known_formulas)


def _add_sizes(terms: Sequence[tuple[int, int]], known_formulas: Formulas) -> bool:
    """Adds the sizes of all variables but that of the largest factor; False if they overlap."""
    ordered, reach = sorted(terms, key=lambda term: term[1]), 0
    for position, (variable, factor) in enumerate(ordered):
        size = max(known_formulas.variables[variable]) + 1
        if factor <= reach:
            return False
        reach += factor * (size - 1)
        if position < len(ordered) - 1:
            known_formulas.sizes[variable] = size
    return True


def _in_two_digits(left: Values, right: Values) -> Formulas | None:
    """Both numbers as sums of two variables: `{3*b+2*j}` and `{2*b+j}`."""
    order = np.argsort(right, kind="stable")
    sides = [np.asarray(values)[order] for values in (left, right)]
    if len({*right}) < len(right):
        return None
    for inner in range(2, len(left) // 2 + 1):
        if len(left) % inner:
            continue
        outer, digit = np.divmod(np.arange(len(left)), inner)
        result = Formulas([_put(outer, order), _put(digit, order)])
        for values, ordered in zip((left, right), sides, strict=True):
            first, big, small = ordered[0], ordered[inner] - ordered[0], ordered[1] - ordered[0]
            if (ordered != first + big * outer + small * digit).any() or min(big, small) <= 0:
                break
            terms = (0, int(big)), (1, int(small))
            result.of[values] = Formula(terms, int(first))
            if not _add_sizes(terms, result):
                break
        else:
            return result
    return None


def _put(values: np.ndarray, order: np.ndarray) -> Values:
    result = np.empty(len(order), np.int64)
    result[order] = values
    return tuple(map(int, result))


def solutions(
    known_formulas: Formulas, numbers: Iterable[tuple[Formula, Values]]
) -> list[Values | None]:
    """For each of several names the values of all variables that its numbers have; None where no
    values do.

    Arguments:
        known_formulas: the formulas.
        numbers: the number at each place of the names, for all of these, and its expected value.
    """
    places = sorted(numbers, key=lambda place: len(place[0].terms))
    count = len(places[0][1]) if places else 0
    return [
        _solution(known_formulas, [(formula, values[number]) for formula, values in places])
        for number in range(count)
    ]


def _solution(known_formulas: Formulas, numbers: Sequence[tuple[Formula, int]]) -> Values | None:
    value_by_variable: dict[int, int] = {}
    for formula, number in numbers:
        remainder = number - formula.constant
        for variable, factor in sorted(formula.terms, key=lambda term: -term[1]):
            value, remainder = divmod(remainder, factor)
            is_in_range = 0 <= value < known_formulas.sizes.get(variable, value + 1)
            if not is_in_range or value_by_variable.setdefault(variable, value) != value:
                return None
        if remainder:
            return None
    is_solved = len(value_by_variable) == len(known_formulas.variables)
    return tuple(value_by_variable[v] for v in sorted(value_by_variable)) if is_solved else None
