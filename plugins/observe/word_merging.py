"""Merging of words: rules whose names differ in one word become one, and then those whose names
differ in a few components."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from unickpt.plugins.observe.notation import Capture, Token, Written, fresh_letter, letters_of

_MOST_PAIRED = 8  # of one line, which shall be read
_MOST_PHRASED = 200  # rules whose pairs of phrases are all compared
_SEPARATORS = ("/", ".", "%2F")
_SEPARATED = re.compile(r"(/|\.|%2F)")
_WORD = re.compile(r"[\w-]*[A-Za-z][\w-]*")


@dataclass(frozen=True)
class _Variant:
    """A rule that differs from others in a word of each side.

    Arguments:
        rule: its number.
        left, right: the words.
        places: where they are, of a word that is not the same on both sides.
        lengths: how many pieces of the names they are: more than one of a phrase, as `in_layers.2`.
    """

    rule: int
    left: str
    right: str
    places: tuple[int, int] | None = None
    lengths: tuple[int, int] = (1, 1)


def merge_words(rules: Sequence[Written], *, phrases: bool = True) -> list[Written]:
    """Rules that differ in one word, as one: `{n=q|k}` where it is the same on both sides, and
    `{w1|w2}` next to `{gate|up}` where it is not; and then those that differ in a phrase of two
    components at most: `{in_layers.2|out_layers.3}` next to `{conv1|conv2}`.

    Arguments:
        rules: no two of which differ only in numbers.
        phrases: whether those that differ in a phrase are merged too.
    """
    result = _merged([rule.renamed(_join_words) for rule in rules], _variants)
    if not phrases or len(result) > _MOST_PHRASED:
        return result
    return _merged(result, partial(_pairs, spans_of=_spans))


def _merged(
    rules: Sequence[Written],
    variants_of: Callable[[int, Written], Iterator[tuple[object, _Variant]]],
) -> list[Written]:
    """Rules, where those that differ in one variant are merged; first as many as possible."""
    current: list[Written | None] = [*rules]
    groups: dict[object, tuple[int, list[_Variant]]] = {}
    several: dict[int, list[_Variant]] = {}

    def add(rule_number: int, rule: Written) -> None:
        for key, variant in variants_of(rule_number, rule):
            number, members = groups.setdefault(key, (len(groups), []))
            members.append(variant)
            if len(members) > 1:
                several[number] = members

    for rule_number, rule in enumerate(rules):
        add(rule_number, rule)
    while True:
        for variants in several.values():
            variants[:] = [v for v in variants if current[v.rule] is not None]
        ordered = (several[number] for number in sorted(several) if several[number])
        best = max(map(_distinct, ordered), key=_worth, default=[])
        if len(best) < 2:
            return [rule for rule in current if rule is not None]
        members = [member for v in best if (member := current[v.rule]) is not None]
        parts = tuple(part for rule in members for part in (rule.parts or (rule,)))
        joined = replace(_as_one(members[0], best), parts=parts)
        for variant in best:
            current[variant.rule] = None
        current.append(joined)
        add(len(current) - 1, joined)


def _join_words(name: Sequence[Token]) -> tuple[Token, ...]:
    """A name whose words are whole: `w1` in place of `w` and `1`."""
    pieces: list[Token] = []
    for token in name:
        before = pieces[-1] if pieces else "/"
        if any(isinstance(t, Capture) or t in _SEPARATORS for t in (before, token)):
            pieces.append(token)
        else:
            pieces[-1] = f"{before}{token}"
    return tuple(pieces)


def _variants(rule_number: int, rule: Written) -> Iterator[tuple[object, _Variant]]:
    """The rule without a word of its own, and that word on each side."""
    if not (rule.left and rule.right):
        return
    for word in sorted(_words(rule)):
        shape = _replaced(rule, word, Capture(""))
        yield (shape.left, shape.right, shape.sizes), _Variant(rule_number, word, word)
    yield from _pairs(rule_number, rule, _places)


def _pairs(
    rule_number: int, rule: Written, spans_of: Callable[[Sequence[Token]], list[tuple[int, int]]]
) -> Iterator[tuple[object, _Variant]]:
    """The rule of one name on each side without a span of each, and these."""
    if len(rule.left) != 1 or len(rule.right) != 1 or len(rule.right[0]) != 1:
        return
    left, right = rule.terms
    spans = itertools.product(spans_of(left.name), spans_of(right.name))
    for (place, count), (other, size) in spans:
        names = _masked(left.name, place, count), _masked(right.name, other, size)
        key = *names, left.tail, right.tail, rule.sizes
        ours = "".join(map(str, left.name[place : place + count]))
        theirs = "".join(map(str, right.name[other : other + size]))
        yield key, _Variant(rule_number, ours, theirs, (place, other), (count, size))


def _spans(name: Sequence[Token]) -> list[tuple[int, int]]:
    """Where one or two whole components of a name begin, and how many of its pieces they are; an
    enumeration takes no `/`."""

    def is_whole(position: int) -> bool:
        around = ["/", *name, "/"][position : position + 3]
        return all(
            isinstance(token, str) and (token in _SEPARATORS) == is_separator
            for token, is_separator in zip(around, (True, False, True), strict=True)
        )

    whole = [position for position in range(len(name)) if is_whole(position)]
    pairs = [position for position in whole if position + 2 in whole and name[position + 1] == "."]
    return [(position, 1) for position in whole] + [(position, 3) for position in pairs]


def _words(rule: Written) -> set[str]:
    """Words that names of both sides have, once in each that has it."""
    sides = []
    for terms in (rule.left, tuple(itertools.chain(*rule.right))):
        words = [[t for t in x.name if isinstance(t, str) and _WORD.fullmatch(t)] for x in terms]
        sides.append(
            {w for name_words in words for w in name_words if all(e.count(w) == 1 for e in words)}
        )
    return sides[0] & sides[1]


def _replaced(rule: Written, word: str, capture: Capture) -> Written:
    """A rule with a capture for a word in its names."""
    return rule.renamed(lambda name: tuple(capture if token == word else token for token in name))


def _places(name: Sequence[Token]) -> list[tuple[int, int]]:
    return [(n, 1) for n, t in enumerate(name) if isinstance(t, str) and _WORD.fullmatch(t)]


def _masked(name: Sequence[Token], place: int, count: int) -> tuple[Token, ...]:
    return *name[:place], Capture(""), *name[place + count :]


def _distinct(variants: Sequence[_Variant]) -> list[_Variant]:
    """The rules of a group that can be merged: no word of a side twice, and not too many."""
    result: list[_Variant] = []
    for v in variants:
        if all(v.rule != o.rule and v.left != o.left and v.right != o.right for o in result):
            result.append(v)
    return result if result[0].places is None else result[:_MOST_PAIRED]


def _worth(variants: Sequence[_Variant]) -> tuple[int, bool]:
    """More rules are better; of as many, those whose words are the same on both sides."""
    return len(variants), bool(variants) and variants[0].places is None


def _as_one(first: Written, variants: Sequence[_Variant]) -> Written:
    """The first of several rules, with captures for their words."""
    if variants[0].places is None:
        letter = fresh_letter("nmk", letters_of(first))
        options = "|".join(v.left for v in variants)
        return _replaced(first, variants[0].left, Capture(f"{letter}={options}"))
    left, right = first.left[0], first.right[0][0]
    is_named = any("|" in t.text for t in left.name if isinstance(t, Capture))
    name = f"{fresh_letter('nmk', letters_of(first))}:" if is_named else ""
    left_place, right_place = variants[0].places
    left_length, other = variants[0].lengths
    ours = _enumerated(left.name, left_place, left_length, [v.left for v in variants], name)
    theirs = _enumerated(right.name, right_place, other, [v.right for v in variants], name)
    terms = replace(left, name=ours), replace(right, name=theirs)
    return replace(first, left=(terms[0],), right=((terms[1],),))


def _enumerated(
    name: Sequence[Token], place: int, count: int, words: Sequence[str], axis: str
) -> tuple[Token, ...]:
    """A name with an enumeration of words, without their common beginnings and endings."""
    before = re.sub(r"[A-Za-z0-9]+\Z", "", _common_start(words))
    turned = _common_start([word[len(before) :][::-1] for word in words])[::-1]
    after = re.sub(r"\A[A-Za-z0-9]+", "", turned)
    options = [word[len(before) : len(word) - len(after)] for word in words]
    if not all(options):
        before = after = ""
        options = [*words]
    pieces: list[Token] = [
        *_SEPARATED.split(before), Capture(axis + "|".join(options)), *_SEPARATED.split(after)
    ]  # fmt: skip
    return (*name[:place], *(piece for piece in pieces if piece), *name[place + count :])


def _common_start(words: Sequence[str]) -> str:
    letters = itertools.takewhile(lambda column: len({*column}) == 1, zip(*words, strict=False))
    return "".join(column[0] for column in letters)
