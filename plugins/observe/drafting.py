"""Draft: rules from two checkpoints, or from a checkpoint and a model, by values, names and shapes.

Where both sides hold the same weights, values decide, which is certain. Names and sizes alone can
decide where nothing else fits; all the rest is a guess, which no rule says before its user does.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import numpy as np

from unickpt import Checkpoint, Rules
from unickpt.errors import RuleError
from unickpt.extend import Array, DraftReport, LeafFact, dtype_name, plan_rules, stored_leaves
from unickpt.plugins.observe.checking import Side
from unickpt.plugins.observe.converters import Example
from unickpt.plugins.observe.notation import LETTERS, Capture, Token, Written, WrittenTerm, tokens
from unickpt.plugins.observe.rule_merging import merged
from unickpt.plugins.observe.value_matching import (
    Order,
    Region,
    Values,
    equal_orders,
    orders,
    regions,
)

_NEAR, _APART = 0.25, 0.12


def draft(first: Any, second: Any, *, name: str = "draft") -> Rules:
    """See `Rules.draft`."""
    left, right = _side(first, "the left side"), _side(second, "the right side")
    drafted = _Drafted(left[0], right[0], has_values=left[1] and right[1])
    drafted.by_values()
    drafted.by_siblings()
    drafted.by_names()
    return drafted.rules(name)


def _side(source: Any, where: str) -> tuple[Side, bool]:
    """A side, and whether it has values: shapes alone, or a model without memory, have none."""
    if isinstance(source, str | PathLike | Checkpoint):
        return Side.of(source, where), True
    example = Example.of(source, None)
    try:
        side = Side.of(source, where)
        if side.arrays.keys() == example.arrays.keys():
            return side, True
    except (TypeError, NotImplementedError):  # a placeholder of an array without memory
        pass
    facts = {n: LeafFact(s, dtype_name(dtype)) for n, (s, dtype) in example.arrays.items()}
    return Side(facts, lambda name, box: np.zeros(box.shape), where), False


@dataclass
class _Guess:
    """A rule that may be meant, and others that may be as well."""

    rule: Written
    alternatives: list[str]


@dataclass
class _Drafted:
    """The draft of two sides.

    Arguments:
        left, right: the sides.
        has_values: whether both have values.
    """

    left: Side
    right: Side
    has_values: bool
    certain: list[Written] = field(default_factory=list)
    guesses: list[_Guess] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._open = {True: self.left.arrays, False: self.right.arrays}
        self._order = {name: position for position, name in enumerate(self.left.facts)}
        self._values = {True: Values(self.left), False: Values(self.right)}

    # --- values -------------------------------------------------------------------------------

    def by_values(self) -> None:
        """Takes the matches that values decide."""
        if not self.has_values:
            return
        self._equal_arrays()
        for is_left in (True, False):
            opposite = self._open[not is_left].values()
            least = min((math.prod(fact.shape) for fact in opposite), default=0)
            for name, fact in list(self._open[is_left].items()):
                if fact.shape and math.prod(fact.shape) > least:
                    self._parts(is_left, name)

    def _sums(self, is_left: bool) -> dict[str, int]:
        """The sums of a side's remaining arrays whose values are distinctive."""
        values = self._values[is_left]
        return {n: values.sums[n] for n in self._open[is_left]
                if n in values.sums and not values.is_constant[n]}  # fmt: skip

    def _equal_arrays(self) -> None:
        """Pairs of arrays that hold the same numbers; of the right side also ties."""
        by_sum: dict[tuple[int, int], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for is_left in (True, False):
            for name, value in self._sums(is_left).items():
                size = math.prod(self._open[is_left][name].shape)
                by_sum[value, size][not is_left].append(name)
        for lefts, rights in by_sum.values():
            if len(lefts) == 1 and rights:
                self._pair(lefts[0], rights)

    def _pair(self, left: str, rights: Sequence[str]) -> None:
        array = self._values[True].array(left)
        orders_of = ((n, equal_orders(array, self._values[False].array(n))) for n in rights)
        terms = [(right, candidates) for right, candidates in orders_of if candidates]
        if not terms:
            return
        if not all(candidates[0].many for _, candidates in terms):
            terms = terms[:1]
        first = self._of_orders(left, [(right, candidates[0]) for right, candidates in terms])
        right, candidates = terms[0]
        permuted = [self._of_orders(left, [(right, order)]) for order in candidates[1:]]
        self._add([first, *permuted], [left], [right for right, _ in terms])

    def _of_orders(self, left: str, rights: Sequence[tuple[str, Order]]) -> Written:
        """A rule of one array and the names of the other side's."""
        right, order = rights[0]
        shape, right_shape = self.left.facts[left].shape, self.right.facts[right].shape
        is_same = shape == right_shape and order.many and order.order == tuple(range(len(shape)))
        if is_same and len(rights) == 1:
            return Written((WrittenTerm(tokens(left)),), ((WrittenTerm(tokens(right)),),))
        many = shape if order.many else right_shape
        letters = axis_letters(many)
        dims = [grouped_axes(letters, order) for _, order in rights]
        sizes = usual_sizes(dims[:1], dict(zip(letters, many, strict=True)))
        left_dims, right_dims = (letters, dims) if order.many else (dims[0], [letters])
        names = tuple(
            WrittenTerm(tokens(right), tail_of(term_dims))
            for (right, _), term_dims in zip(rights, right_dims, strict=True)
        )
        return Written((WrittenTerm(tokens(left), tail_of(left_dims)),), (names,), sizes)

    def _parts(self, is_left: bool, name: str) -> None:
        """An array whose parts are arrays of the other side."""
        sums = self._sums(not is_left)
        if not sums or name not in self._sums(is_left):
            return
        facts = self._open[not is_left]
        parts = list(regions(name, self._values[is_left], sums, facts))
        size = sum(math.prod(facts[other].shape) for other, _ in parts)
        if not parts or size != math.prod(self._open[is_left][name].shape):
            return
        rule = self._of_regions(is_left, name, parts)
        if rule is not None:
            part_names = [other for other, _ in parts]
            self._add([rule], *(([name], part_names) if is_left else (part_names, [name])))

    def _of_regions(
        self, is_left: bool, name: str, parts: Sequence[tuple[str, Region]]
    ) -> Written | None:
        """The rule for an array and its parts; None if they are not of one pattern."""
        if len({(region.stacked, region.along) for _, region in parts}) > 1:
            return None
        region = parts[0][1]
        x, shape = self._values[is_left].array(name), self._open[is_left][name].shape
        pieces: dict[int, list[tuple[str, Region]]] = defaultdict(list)
        for other, part in parts:
            pieces[part.start].append((other, part))
        letters = axis_letters(shape)
        sizes = dict(zip(letters, shape, strict=True))
        free = iter(c for c in LETTERS if c not in letters)
        dims = list(letters)
        terms, segments = [], []
        for _, members in sorted(pieces.items()):
            members.sort(key=lambda pair: pair[1].index)
            captured = captured_name(members, [letters[axis] for axis in region.stacked])
            order = self._order_of(is_left, x, members)
            if captured is None or order is None or not order.many:
                return None
            part_letters = list(letters)
            if region.along is not None:
                part_letters[region.along] = next(free)
                sizes[part_letters[region.along]] = members[0][1].stop - members[0][1].start
                segments.append(part_letters[region.along])
            inner = [
                letter for axis, letter in enumerate(part_letters) if axis not in region.stacked
            ]
            terms.append(WrittenTerm(captured, tail_of(grouped_axes(inner, order))))
        if region.along is not None:
            dims[region.along] = f"({' + '.join(segments)})"
        large = WrittenTerm(tokens(name), tail_of(dims))
        axis_sizes = usual_sizes([dims, *([t.tail] for t in terms)], sizes)
        return _divided(is_left, large, terms, axis_sizes)

    def _order_of(
        self, is_left: bool, x: Array, members: Sequence[tuple[str, Region]]
    ) -> Order | None:
        """The order that parts have on the other side, if all have the same one, and no other."""
        common: list[Order] | None = None
        for other, region in members:
            matches = equal_orders(region.of(x), self._values[not is_left].array(other))
            common = matches if common is None else [order for order in common if order in matches]
        return common[0] if common is not None and len(common) == 1 else None

    # --- names --------------------------------------------------------------------------------

    def by_siblings(self) -> None:
        """Takes arrays whose containers belong together, according to earlier matches, and that fit
        alone."""
        for _ in range(2):
            parents: dict[str, set[str]] = defaultdict(set)
            back: dict[str, set[str]] = defaultdict(set)
            for left, right in self.pairs:
                parents[parent_of(left)].add(parent_of(right))
                back[parent_of(right)].add(parent_of(left))
            for left, fact in list(self._open[True].items()):
                candidates = parents.get(parent_of(left), set())
                if len(candidates) != 1 or not parent_of(left):
                    continue
                (parent,) = candidates
                if back[parent] != {parent_of(left)}:
                    continue
                matches = [r for r, f in self._open[False].items()
                         if parent_of(r) == parent and orders(fact.shape, f.shape)]  # fmt: skip
                rivals = [n for n, f in self._open[True].items()
                          if n != left and parent_of(n) == parent_of(left) and matches
                          and orders(f.shape, self._open[False][matches[0]].shape)]  # fmt: skip
                if len(matches) == 1 and not rivals:
                    self._by_shape(left, matches[0], is_sure=True, alternatives=[])

    def by_names(self) -> None:
        """Takes the matches that names and shapes decide, and guesses the rest."""
        lefts, rights = _families(self._open[True]), _families(self._open[False])
        if not lefts or not rights:
            return
        likeness = Likeness([f.example for f in (*lefts, *rights)])
        table: list[tuple[float, int, int]] = []
        for i, family in enumerate(lefts):
            for j, other in enumerate(rights):
                if _fits(family, other):
                    table.append((likeness.of(family.example, other.example), i, j))
        table.sort(reverse=True)
        used_families: tuple[set[int], set[int]] = set(), set()
        for score, i, j in table:
            if i in used_families[0] or j in used_families[1] or score <= 0:
                continue
            rivals = [
                (s, a, b) for s, a, b in table
                if (a == i) != (b == j) and a not in used_families[0] and b not in used_families[1]
            ]  # fmt: skip
            apart = score - max((s for s, _, _ in rivals), default=0.0)
            is_sure = score >= _NEAR and apart >= _APART and not self.has_values
            names = [rights[b].example for _, a, b in rivals[:3] if a == i]
            if score >= _NEAR / 2 or not rivals:
                used_families[0].add(i)
                used_families[1].add(j)
                self._family(lefts[i], rights[j], is_sure, names)

    def _family(
        self, left: _NameFamily, right: _NameFamily, is_sure: bool, alternatives: Sequence[str]
    ) -> None:
        if len(left.names) == len(right.names):
            pairs = zip(sorted(left.names.items()), sorted(right.names.items()), strict=True)
            for (_, left_name), (_, other) in pairs:
                self._by_shape(left_name, other, is_sure, alternatives)
            return
        large, small = (left, right) if len(left.names) == 1 else (right, left)
        (name,) = large.names.values()
        stackings = [(axis, order) for axis, order in _stackings(large, small) if order.many]
        rules = [
            self._stacked(large is left, name, axis, small, order) for axis, order in stackings
        ]
        self._add(rules, [*left.names.values()], [*right.names.values()], is_sure, alternatives)

    def _stacked(
        self, is_left: bool, name: str, axis: int, small: _NameFamily, order: Order
    ) -> Written:
        shape = self._open[is_left][name].shape
        letters = axis_letters(shape)
        inner = [letter for k, letter in enumerate(letters) if k != axis]
        members = [(other, Region(name, (axis,), (index,)))
                   for index, (_, other) in enumerate(sorted(small.names.items()))]  # fmt: skip
        captured = captured_name(members, [letters[axis]]) or tokens(small.example)
        dims = grouped_axes(inner, order)
        sizes = usual_sizes([dims], dict(zip(letters, shape, strict=True)))
        large = WrittenTerm(tokens(name), tail_of(letters))
        return _divided(is_left, large, [WrittenTerm(captured, tail_of(dims))], sizes)

    def _by_shape(self, left: str, right: str, is_sure: bool, alternatives: Sequence[str]) -> None:
        """A pair by names: the rule for it, if only one order of axes fits the shapes."""
        fitting_orders = orders(self._open[True][left].shape, self._open[False][right].shape)
        rules = [self._of_orders(left, [(right, order)]) for order in fitting_orders]
        also = [f"{left} <-> {other} ..." for other in alternatives]
        self._add(rules, [left], [right], is_sure, also)

    # --- result -------------------------------------------------------------------------------

    def _add(
        self,
        rules: Sequence[Written],
        lefts: Sequence[str],
        rights: Sequence[str],
        is_sure: bool = True,
        alternatives: Sequence[str] = (),
    ) -> None:
        """Takes the first of some rules; as a guess, if another one may be meant."""
        if not rules:
            return
        rule = replace(rules[0], order=min(self._order[name] for name in lefts))
        if is_sure and len(rules) == 1:
            self.certain.append(rule)
        else:
            self.guesses.append(_Guess(rule, [*map(str, rules[1:]), *alternatives]))
        if len(lefts) == 1 or len(rights) == 1:
            self.pairs += itertools.product(lefts, rights)
        for is_left, names in ((True, lefts), (False, rights)):
            for name in names:
                del self._open[is_left][name]

    def rules(self, name: str) -> Rules:
        """The certain rules, with the report that has all."""
        for words in (True, False):
            lines = merged(self.certain, words=words)
            if self._do_fit(lines, name):
                break
        else:
            lines = sorted(self.certain, key=lambda rule: rule.order)
        both = [name for name in self.left.values if name in self.right.values]
        values = [f"{term} <-> {term}" for term in (WrittenTerm(tokens(name)) for name in both)]
        report = DraftReport(
            (*map(str, lines), *values),
            _merged_guesses(self.guesses),
            (*self._open[True], *(name for name in self.left.values if name not in both)),
            (*self._open[False], *(name for name in self.right.values if name not in both)),
        )
        report = replace(report, text=_text(name, report))
        return replace(Rules.parse("\n".join(report.certain), name=name), report=report)

    def _do_fit(self, lines: Sequence[Written], name: str) -> bool:
        """Whether lines that stand for several still mean the same."""
        lefts = self.left.arrays.keys() - self._open[True].keys()
        rights = self.right.arrays.keys() - self._open[False].keys()
        for guess in self.guesses:
            lefts = lefts - {"".join(map(str, t.name)) for t in guess.rule.left}
            rights = rights - {
                "".join(map(str, t.name)) for t in itertools.chain(*guess.rule.right)
            }
        try:
            rules = Rules.parse("\n".join(map(str, lines)), name=name)
            plan_rules(
                rules,
                stored_leaves({n: self.left.facts[n] for n in lefts}),
                {n: self.right.facts[n] for n in rights},
            )
        except RuleError:
            return False
        return True


@dataclass(frozen=True)
class _NameFamily:
    """Arrays of one shape whose names differ only in numbers, by these."""

    names: Mapping[tuple[int, ...], str]
    shape: tuple[int, ...]

    @property
    def example(self) -> str:
        return next(iter(self.names.values()))


def _families(facts: Mapping[str, LeafFact]) -> list[_NameFamily]:
    families: dict[object, dict[tuple[int, ...], str]] = defaultdict(dict)
    for name, fact in facts.items():
        pieces = tokens(name)
        skeleton = tuple(None if str(t).isdecimal() else t for t in pieces)
        numbers = tuple(int(str(t)) for t in pieces if str(t).isdecimal())
        families[skeleton, fact.shape][numbers] = name
    return [
        _NameFamily(names, facts[next(iter(names.values()))].shape) for names in families.values()
    ]


def _fits(left: _NameFamily, right: _NameFamily) -> bool:
    """Whether shapes allow that one becomes the other: unchanged, or stacked."""
    if len(left.names) == len(right.names):
        return bool(orders(left.shape, right.shape))
    large, small = (left, right) if len(left.names) == 1 else (right, left)
    return len(large.names) == 1 and any(True for _ in _stackings(large, small))


def _stackings(large: _NameFamily, small: _NameFamily) -> Iterator[tuple[int, Order]]:
    """The axes along which an array may be others stacked, with the orders of the other axes."""
    for axis, extent in enumerate(large.shape):
        if extent == len(small.names):
            other_extents = tuple(n for k, n in enumerate(large.shape) if k != axis)
            for order in orders(other_extents, small.shape):
                yield axis, order


def _merged_guesses(guesses: Sequence[_Guess]) -> dict[str, tuple[str, ...]]:
    """Guesses as lines, those that differ only in numbers as one, with the alternatives."""
    by_form: dict[object, list[_Guess]] = defaultdict(list)
    for guess in guesses:
        alternatives = tuple(re.sub(r"\d+", "#", other) for other in guess.alternatives)
        by_form[alternatives].append(guess)
    lines: dict[str, tuple[str, ...]] = {}
    for alike in by_form.values():
        for rule in merged([guess.rule for guess in alike], words=False):
            first = next((g for g in alike if g.rule.order == rule.order), alike[0])
            lines[str(rule)] = tuple(first.alternatives)
    return lines


def _text(name: str, report: DraftReport) -> str:
    lines = [
        f"# Drafted from {name}: {len(report.certain)} rules are certain.",
        "",
        *report.certain,
    ]
    if report.guesses:
        lines += ["", "# Guesses: remove `#?` from those that are right."]
        for line, alternatives in report.guesses.items():
            lines.append(f"#? {line}")
            lines += [f"#     or: {other}" for other in alternatives]
    for side, names in (("left", report.left_over), ("right", report.right_over)):
        if names:
            lines += ["", f"# Left over on the {side}:", *(f"#   {n}" for n in names)]
    return "\n".join([*lines, ""])


# --- which name of one side comes nearest to one of the other -------------------------------------


_SAME = {
    "kernel": "weight", "scale": "weight", "gamma": "weight", "embedding": "weight", "w": "weight",
    "beta": "bias", "b": "bias", "attention": "attn", "self": "attn", "selfattention": "attn",
    "attn": "attn", "query": "q", "key": "k", "value": "v", "wq": "q", "wk": "k", "wv": "v",
    "out": "o", "output": "o", "wo": "o", "dense": "o", "norm": "norm", "ln": "norm",
    "layernorm": "norm", "rms": "norm", "rmsnorm": "norm", "ffn": "mlp", "feed": "mlp",
    "forward": "mlp", "feedforward": "mlp", "embed": "embed", "embeddings": "embed",
    "embedder": "embed", "wte": "embed", "token": "embed", "tok": "embed", "tokens": "embed",
    "h": "layer", "layers": "layer", "block": "layer", "blocks": "layer", "wi0": "gate",
    "w1": "gate", "wi1": "up", "w3": "up", "w2": "down", "experts": "expert", "lm": "head",
    "logits": "head", "mean": "running_mean", "var": "running_var", "input": "pre",
}  # fmt: skip
_SAID_BY_NONE = {"params", "model", "module", "proj", "layer", "transformer", "weight", "linear"}


def words(name: str) -> frozenset[str]:
    """The words of a name, in the spelling that most use; numbers are left out.

    Example:
        >>> sorted(words("params/layers_3/attention/query/kernel"))
        ['attn', 'layer', 'params', 'q', 'weight']
    """
    text = re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("wi_0", "wi0").replace("wi_1", "wi1"))
    matches = re.findall(r"[a-z]+\d?(?![a-z])|[a-z]+", text.lower())
    return frozenset(
        _SAME.get(word, _SAME.get(word.rstrip("0123456789"), word)) for word in matches
    )


class Likeness:
    """How near names are, by the words that they share; rare words count more.

    Arguments:
        names: all of both sides.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._words: dict[str, frozenset[str]] = {name: words(name) for name in names}
        counts = Counter(word for name_words in self._words.values() for word in name_words)
        self._weights: Mapping[str, float] = {
            word: (0.2 if word in _SAID_BY_NONE else 1.0) / math.sqrt(count)
            for word, count in counts.items()
        }

    def of(self, name: str, other: str) -> float:
        """From 0 to 1."""
        a, b = self._words[name], self._words[other]
        total = sum(self._weights[word] for word in a | b)
        return sum(self._weights[word] for word in a & b) / total if total else 0.0


# --- pieces of drafted rules ----------------------------------------------------------------------


def parent_of(name: str) -> str:
    parts = re.split(r"[/.](?=[^/.]*$)", name)
    return parts[0] if len(parts) > 1 else ""


def axis_letters(shape: Sequence[int]) -> list[str]:
    """An axis for each dimension; `1` for those of one element."""
    if len(shape) == 2 and 1 not in shape:
        return ["i", "o"]
    free = iter(LETTERS)
    return ["1" if n == 1 else next(free) for n in shape]


def grouped_axes(letters: Sequence[str], order: Order) -> list[str]:
    dims, position = [], 0
    for count in order.groups:
        part = [letters[axis] for axis in order.order[position : position + count]]
        position += count
        dims.append("1" if not part else part[0] if len(part) == 1 else f"({' '.join(part)})")
    return dims


def _divided(
    is_left: bool,
    large: WrittenTerm,
    parts: Sequence[WrittenTerm],
    sizes: tuple[tuple[str, int | str], ...],
) -> Written:
    """The rule for an array of one side, and its parts on the other."""
    if is_left:
        return Written((large,), tuple((part,) for part in parts), sizes)
    return Written(tuple(parts), ((large,),), sizes)


def tail_of(dims: Iterable[str]) -> str:
    return f" [{' '.join(dims)}]"


def usual_sizes(
    groups: Iterable[Sequence[str]], sizes: Mapping[str, int]
) -> tuple[tuple[str, int | str], ...]:
    """The usual sizes of axes in parentheses, without the largest of each."""
    usual: dict[str, int | str] = {}
    for dims in groups:
        for inside in re.findall(r"\(([^)]*)\)", " ".join(dims)):
            letters = [c for c in re.findall(r"[A-Za-z]\w*", inside) if c in sizes]
            for letter in sorted(letters, key=lambda c: sizes[c])[:-1]:
                usual[letter] = f"{sizes[letter]}?"
    return tuple(sorted(usual.items()))


def captured_name(
    members: Sequence[tuple[str, Region]], letters: Sequence[str]
) -> tuple[Token, ...] | None:
    """The name of parts with their indices as axes; None if they are not in the names."""
    pieces = [tokens(other) for other, _ in members]
    if len({len(name_tokens) for name_tokens in pieces}) > 1:
        return None
    result: list[Token] = []
    used: set[int] = set()
    for column in zip(*pieces, strict=True):
        if len(set(column)) == 1:
            result.append(column[0])
            continue
        if not all(str(token).isdecimal() for token in column):
            return None
        numbers = [int(str(token)) for token in column]
        for position, letter in enumerate(letters):
            shift = {
                n - region.index[position] for n, (_, region) in zip(numbers, members, strict=True)
            }
            if len(shift) == 1 and position not in used:
                used.add(position)
                (constant,) = shift
                result.append(Capture(letter + (f"{constant:+d}" if constant else "")))
                break
        else:
            return None
    varying = {
        position
        for position in range(len(letters))
        if len({r.index[position] for _, r in members}) > 1
    }
    return tuple(result) if used >= varying else None
