"""Merging of rules: those that differ only in numbers become one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from unickpt.plugins.observe.notation import (
    DIGITS,
    Capture,
    NumberCapture,
    Token,
    Written,
    letter_after,
    letters_of,
)
from unickpt.plugins.observe.number_formulas import Formula, Formulas, Values, formulas, solutions
from unickpt.plugins.observe.word_merging import merge_words

_Key = tuple[bool, tuple[str | None, ...]]
_Columns = dict[tuple[int, int], Values]
"""Number of the term and place in its name, with the number that each rule has there."""


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


class LineOverlaps:
    """Knows the names of all rules.

    Arguments:
        groups: the rules, those that differ only in numbers together.
    """

    def __init__(self, groups: Sequence[Sequence[Written]]) -> None:
        self.groups = groups
        self._forms = [list(_forms_of(members)) for members in groups]
        self._by_pieces: dict[_Key, list[tuple[int, NameForm]]] = {}
        for number, forms in enumerate(self._forms):
            for form in forms:
                self._by_pieces.setdefault((form.is_left, form.pieces), []).append((number, form))

    def restricted(self, group: int, captures: _Columns) -> set[Values]:
        """The captures that would match names of other groups, by their values.

        Arguments:
            group: the number of the group.
            captures: the values of those that stand for plain numbers of its names.
        """
        restricted: set[Values] = set()
        for term_number, form in enumerate(self._forms[group]):
            columns = {place: v for (term, place), v in captures.items() if term == term_number}
            if not columns:
                continue
            for number, other in self._by_pieces[form.is_left, form.pieces]:
                if number != group:
                    restricted |= _apart(form, other, columns)
            if self._matches_others(form, columns):
                inner = {values for place, values in columns.items() if not _is_whole(form, place)}
                restricted |= inner or set(columns.values())
        return restricted

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


_MOST_MERGED = 2000


def merged(rules: Sequence[Written], *, words: bool = True, phrases: bool = True) -> list[Written]:
    """Rules, those that differ only in numbers as one, and those that differ in one word, or in a
    phrase, too."""
    result = _merge_numbers(rules)
    if words and len(result) <= _MOST_MERGED:
        result = merge_words(result, phrases=phrases)
    return sorted(result, key=lambda rule: rule.order)


def _skeleton(name: Sequence[Token]) -> tuple[Token, ...]:
    """Equal for names that differ only in numbers."""
    return tuple(
        NumberCapture("", t.terms)
        if isinstance(t, NumberCapture)
        else "0"
        if number_of(t) is not None
        else t
        for t in name
    )


def number_of(token: Token) -> int | None:
    """The number that a piece of a name is, or adds to axes; None if it is no number."""
    if isinstance(token, NumberCapture):
        return token.constant
    return int(token) if isinstance(token, str) and DIGITS.fullmatch(token) else None


def _merge_numbers(rules: Sequence[Written]) -> list[Written]:
    groups: dict[Written, list[Written]] = {}
    for rule in rules:
        form = replace(rule.renamed(_skeleton), order=0, shape=())
        groups.setdefault(form, []).append(rule)
    overlaps = LineOverlaps([*groups.values()])
    result = []
    for number, members in enumerate(overlaps.groups):
        result += _fewest(members, overlaps, number)
    return result


def _fewest(members: Sequence[Written], overlaps: LineOverlaps, group: int) -> list[Written]:
    """Rules that differ in numbers as one; in parts, if not all of them have one form.

    Arguments:
        members: the rules.
        overlaps: knows the names of all rules.
        group: the number of the group of rules.
    """
    if len(members) < 2:
        return [*members]
    single_rule = _as_one(members, overlaps, group)
    if single_rule is not None:
        return [single_rule]
    best: list[Written] = [*members]
    for keys in _divisions(members):
        parts: dict[object, list[Written]] = {}
        for rule, key in zip(members, keys, strict=True):
            parts.setdefault(key, []).append(rule)
        if 1 < len(parts) < min(len(members), len(best) + 1):
            fewer_rules = [x for part in parts.values() for x in _fewest(part, overlaps, group)]
            if len(fewer_rules) < len(best):
                best = fewer_rules
    return best


def _divisions(members: Sequence[Written]) -> Iterator[Sequence[object]]:
    """Ways to tell rules apart: by the numbers that only one side has (`w1` becomes `fc_1`, and
    `w3` `fc_2`), by each of the numbers, and by sizes."""
    left, right = _values(members[0], _columns(members))
    odd = sorted(left ^ right)
    if members[0].left and members[0].right and odd:
        yield list(zip(*odd, strict=True))
    yield from sorted(left | right, key=lambda values: len(set(values)))
    yield [rule.shape for rule in members]


def _forms_of(members: Sequence[Written]) -> Iterator[NameForm]:
    """The names of rules of one form, term by term."""
    every = [rule.terms for rule in members]
    for number, term in enumerate(every[0]):
        pieces = tuple(
            None if isinstance(t, str) and DIGITS.fullmatch(t) else str(t) for t in term.name
        )
        numbers = {
            place: frozenset(int(str(terms[number].name[place])) for terms in every)
            for place, piece in enumerate(pieces)
            if piece is None
        }
        yield NameForm(number < len(members[0].left), pieces, numbers)


def _as_one(members: Sequence[Written], overlaps: LineOverlaps, group: int) -> Written | None:
    """Rules that differ in numbers as one rule, if captures can stand for these."""
    first, terms = members[0], members[0].terms
    columns = _columns(members)
    is_one_sided = not (first.left and first.right)
    if is_one_sided and first.nothing != "drop":
        return _constants(members, columns)
    left, right = _values(first, columns)
    solution = formulas(left | right, left | right) if is_one_sided else formulas(left, right)
    if solution is None or not (is_one_sided or _pairs_all(first, columns, solution)):
        return None
    plain = {
        (term, place): values
        for (term, place), values in columns.items()
        if isinstance(terms[term].name[place], str)
    }
    # Captures whose values must be written, so that names of other forms do not match.
    narrow = {
        variable
        for values in overlaps.restricted(group, plain)
        for variable, _ in solution.of[values].terms
    }
    alike = overlaps.groups[group]
    if not _takes_only(members, alike, columns, solution, narrow):
        narrow = {*range(len(solution.variables))}
        if not _takes_only(members, alike, columns, solution, narrow):
            return None
    return _written(members, columns, solution, narrow)


def _columns(members: Sequence[Written]) -> _Columns:
    """The numbers in names that are not the same in all rules."""
    return {where: values for where, values in _numbers(members) if len({*values}) > 1}


def _numbers(members: Sequence[Written]) -> Iterator[tuple[tuple[int, int], Values]]:
    """All numbers in names."""
    every = [rule.terms for rule in members]
    for term_number, term in enumerate(every[0]):
        for place, token in enumerate(term.name):
            if number_of(token) is not None:
                numbers = (number_of(terms[term_number].name[place]) for terms in every)
                yield (term_number, place), tuple(n for n in numbers if n is not None)


def _values(rule: Written, columns: _Columns) -> tuple[set[Values], set[Values]]:
    """The values of the numbers of the left side, and of the right."""
    sides: tuple[set[Values], set[Values]] = set(), set()
    for (term_number, _), values in columns.items():
        sides[term_number >= len(rule.left)].add(values)
    return sides


def _pairs_all(rule: Written, columns: _Columns, solution: Formulas) -> bool:
    """Whether the numbers of each name tell all variables."""
    variables_by_term = [set[int]() for _ in rule.terms]
    for (term_number, _), values in columns.items():
        variables_by_term[term_number] |= {variable for variable, _ in solution.of[values].terms}
    return all(len(variables) == len(solution.variables) for variables in variables_by_term)


def _takes_only(
    members: Sequence[Written],
    alike: Sequence[Written],
    columns: _Columns,
    solution: Formulas,
    narrow: set[int],
) -> bool:
    """Whether captures for variables, some of them with given values only, match no other rule."""
    if len(members) == len(alike) and not narrow:
        return True
    fixed = dict(_numbers(members[:1]))
    places = [
        (solution.of[columns[where]] if where in columns else Formula((), fixed[where][0]), values)
        for where, values in _numbers(alike)
    ]
    options = {variable: {*solution.variables[variable]} for variable in narrow}
    matches = sum(
        answer is not None and all(answer[v] in values for v, values in options.items())
        for answer in solutions(solution, places)
    )
    return matches == len(members)


def _written(
    members: Sequence[Written], columns: _Columns, solution: Formulas, narrow: set[int]
) -> Written | None:
    """A rule with captures for numbers; None where the notation cannot say it."""
    first, terms = members[0], members[0].terms
    letters: dict[int, str] = {}
    numbers: set[int] = set()
    used_letters = letters_of(first)
    # A variable is called after a number that is a multiple of it alone, if there is one.
    for (term_number, place), values in sorted(
        columns.items(), key=lambda column: len(solution.of[column[1]].terms) > 1
    ):
        formula, name = solution.of[values], terms[term_number].name
        if formula.lone is None or isinstance(name[place], NumberCapture):
            numbers |= {variable for variable, _ in formula.terms}
        for variable, _ in formula.terms:
            if variable not in letters:
                letters[variable] = _letter(name, place, used_letters)
    if _is_twice_in_one_name(columns, solution, numbers):
        return None
    sizes: dict[str, int | str] = dict(first.sizes)
    sizes |= {letters[variable]: size for variable, size in solution.sizes.items()}
    for variable in narrow & numbers:
        values = solution.variables[variable]
        if {*values} != {*range(max(values) + 1)}:
            return None
        sizes[letters[variable]] = max(values) + 1

    def capture(token: Token, values: Values) -> Token:
        formula = solution.of[values]
        factors = [(letters[variable], factor) for variable, factor in formula.terms]
        if isinstance(token, NumberCapture):
            factors += token.terms
        elif formula.lone is not None and formula.lone not in numbers:
            if formula.lone not in narrow:
                return Capture(letters[formula.lone])
            options = "|".join(map(str, sorted({*values})))
            return Capture(f"{letters[formula.lone]}={options}")
        return NumberCapture.of(sorted(factors, key=lambda term: -term[1]), formula.constant)

    captures = {
        (term, place): capture(terms[term].name[place], values)
        for (term, place), values in columns.items()
    }
    parts = tuple(part for rule in members for part in (rule.parts or (rule,)))
    result = replace(_with(first, captures), sizes=tuple(sorted(sizes.items())), parts=parts)
    options = {letters[v]: sorted({*values}) for v, values in enumerate(solution.variables)}
    return _apart_in_components(result, options)


def _is_twice_in_one_name(columns: _Columns, solution: Formulas, numbers: set[int]) -> bool:
    """Whether a name has a variable in two sums, which the notation does not take."""
    uses = Counter(
        (term_number, variable)
        for (term_number, _), values in columns.items()
        for variable, _ in solution.of[values].terms
        if variable in numbers
    )
    return max(uses.values(), default=0) > 1


def _apart_in_components(rule: Written, options: Mapping[str, Sequence[int]]) -> Written | None:
    """A rule in which all but one of the captures in one component of a name are axes; None if
    these would be in a name twice."""
    axes: set[str] = set()
    for term in rule.terms:
        inside: list[str] = []
        for token in (*term.name, "/"):
            if isinstance(token, NumberCapture):
                continue
            if isinstance(token, Capture):
                key = token.text.partition("=")[0]
                inside += [key] if key in options and key not in axes else []
            elif "/" in token or "." in token:
                inside.sort(key=lambda key: (_is_twice(key, rule), len(options[key])))
                axes.update(inside[:-1])
                inside = []
    if any(_is_twice(axis, rule) for axis in axes):
        return None
    sizes = {
        key: len(options[key]) for key in axes if [*options[key]] == [*range(len(options[key]))]
    }

    def changed(token: Token) -> Token:
        if isinstance(token, Capture) and not isinstance(token, NumberCapture):
            key = token.text.partition("=")[0]
            if key in sizes:
                return Capture(key)
            if key in axes:
                return Capture(f"{key}:" + "|".join(map(str, options[key])))
        return token

    result = rule.renamed(lambda name: tuple(map(changed, name)))
    return replace(result, sizes=tuple(sorted({**dict(rule.sizes), **sizes}.items())))


def _is_twice(key: str, rule: Written) -> bool:
    """Whether a capture is in a name of a rule twice."""
    captures = ([t.text for t in x.name if isinstance(t, Capture)] for x in rule.terms)
    return any([text.partition("=")[0] for text in texts].count(key) > 1 for texts in captures)


def _with(rule: Written, captures: Mapping[tuple[int, int], Token]) -> Written:
    """A rule with captures at some places of its names."""
    return rule.with_names(
        tuple(captures.get((number, place), token) for place, token in enumerate(term.name))
        for number, term in enumerate(rule.terms)
    )


def _letter(name: Sequence[Token], place: int, used_letters: set[str]) -> str:
    """A name for a capture, after the word before it."""
    before = [re.sub("[^A-Za-z]", "", t) for t in name[:place] if isinstance(t, str)]
    return letter_after(next((text for text in reversed(before) if text), "n"), used_letters)


def _is_grid(base: Sequence[Values]) -> bool:
    """Whether numbers take all combinations of values, each without gaps."""
    ranges = [max(values) - min(values) + 1 for values in base]
    return len(set(zip(*base, strict=True))) == math.prod(ranges) == len(base[0])


def _constants(members: Sequence[Written], columns: _Columns) -> Written | None:
    """Constants whose names differ in numbers: these are axes, so that all names are known."""
    base = sorted(set(columns.values()))
    if not base or not _is_grid(base) or any(min(values) for values in base):
        return None
    letters, axes = letters_of(members[0]), {}
    for (term_number, place), values in columns.items():
        if values not in axes:
            axes[values] = _letter(members[0].terms[term_number].name, place, letters)
    sizes = {**dict(members[0].sizes), **{axes[v]: max(v) + 1 for v in base}}
    captures = {where: Capture(axes[values]) for where, values in columns.items()}
    parts = tuple(members)
    return replace(_with(members[0], captures), sizes=tuple(sorted(sizes.items())), parts=parts)
