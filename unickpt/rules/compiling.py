"""Compile: a statement -> a `Rule`, whose captures and axes are checked against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unickpt.rules import axes
from unickpt.rules.ast import (
    ELLIPSIS,
    ArrayExpr,
    Axis,
    AxisItem,
    Enumeration,
    Linear,
    NameCapture,
    Nothing,
    RuleLine,
    Side,
    Text,
    rule_text,
    syntax_error,
)
from unickpt.rules.functions import Function
from unickpt.rules.name_patterns import Pattern
from unickpt.rules.optimizer_slots import SharedState
from unickpt.rules.rule import CompiledExpr, Rule, Terms, axes_of_sides, exprs_of

_MOST_PIECES = 1024
Options = tuple[str, ...]


@dataclass(frozen=True)
class Convention:
    """The meaning of the numbers of each side, under a name such as `rope`."""

    name: str
    left: str
    right: str


@dataclass(frozen=True, repr=False)
class CompiledRules:
    """The rules of a text and of those that it includes; users have `Rules`."""

    rules: tuple[Rule, ...]
    shared: tuple[SharedState, ...] = ()
    conventions: tuple[Convention, ...] = ()
    functions: Mapping[str, Function] = field(default_factory=dict)

    @property
    def nameless(self) -> dict[str, str]:
        """Constants whose names only a request could determine, with their rules."""
        return {
            str(expr.pattern.name): str(rule)
            for rule in self.rules
            if isinstance(rule.left, Nothing) and rule.left.value is not None and not rule.lifted
            for expr in exprs_of(rule.right)
            if expr.pattern.texts
        }


def compile_rule(
    line: RuleLine, moves: bool, sizes: Mapping[str, int], overrides: Mapping[str, int]
) -> Rule:
    """Compiles a statement to a rule.

    Arguments:
        line: the statement.
        moves: see `Rule`.
        sizes: those of the whole file; the rule's own take precedence.
        overrides: those of the caller, which take precedence over all others.

    Raises:
        RuleSyntaxError: captures or axes of the two sides do not match.
    """
    rule_sizes = dict(line.sizes)
    written = [
        v for s in (line.left, line.right) if not isinstance(s, Nothing) for t in s for v in t
    ]
    bare = [expr for expr in written if expr.items is None]
    if bare and len(bare) < len(written):
        raise syntax_error(
            "this name has no axes, but another name of the rule has: give axes in brackets "
            "after every name, or after none",
            bare[0].name.position,
        )
    all_sizes = {**sizes, **rule_sizes, **overrides}
    usual = {axis: size for axis, size in line.usual if axis not in all_sizes}
    numbers = _number_axes(written, rule_sizes)
    renamed = _paired_choices(line.left, line.right, written)
    options = _options_of(written)

    def capture(item: str | NameCapture) -> str | NameCapture:
        match item:
            case Linear() if item.lone is not None and item.lone not in numbers:
                return Text(item.lone, options=options.get(item.lone, ()))
            case Enumeration(axis, names, named):
                return Enumeration(renamed.get(axis, axis), names, named)
        return item

    left, right = _compile_side(line.left, "l", capture), _compile_side(line.right, "r", capture)
    rule = Rule(
        position=line.position,
        text=rule_text(line.left, line.right, line.optional, line.default, line.function),
        left=left,
        right=right,
        sizes={
            k: v
            for k, v in all_sizes.items()
            if k in rule_sizes or k in axes_of_sides([left, right])
        },
        usual=usual,
        optional=line.optional or line.default,
        default=line.default,
        function=line.function,
        moves=moves,
    )
    _check_sizes(rule, {**rule_sizes, **usual})
    if line.function is None:
        _check_sides(rule)
    else:
        _check_function(rule)
    return rule


def _number_axes(exprs: Iterable[ArrayExpr], sizes: Mapping[str, int]) -> frozenset[str]:
    """The captures that are numbers: axes in brackets, in sums, or with a size of their rule."""
    names = set(sizes)
    for expr in exprs:
        names.update(axis.name for axis in axes.axes_of(expr.items or ()))
        for item in expr.name.items:
            if isinstance(item, Linear) and item.lone is None:
                names.update(axis for axis, _ in item.terms)
    return frozenset(names)


def _paired_choices(left: Side, right: Side, exprs: Sequence[ArrayExpr]) -> dict[str, str]:
    """Unnamed enumerations of the right side that are the same axis as one of the left."""

    def anonymous(side: Side) -> dict[str, int]:
        if isinstance(side, Nothing):
            return {}
        items = [item for term in side for expr in term for item in expr.name.items]
        return {i.axis: len(i.options) for i in items if isinstance(i, Enumeration) and not i.named}

    def used(side: Side) -> set[str]:
        if isinstance(side, Nothing):
            return set()
        exprs = [expr for term in side for expr in term]
        return set(anonymous(side)) | {a.name for v in exprs for a in axes.axes_of(v.items or ())}

    ours = {a: n for a, n in anonymous(left).items() if a not in used(right)}
    theirs = {a: n for a, n in anonymous(right).items() if a not in used(left)}
    if list(ours.values()) != list(theirs.values()):
        return {}
    return dict(zip(theirs, ours, strict=True))


def _options_of(exprs: Iterable[ArrayExpr]) -> dict[str, Options]:
    """The options of each text capture, wherever in the rule they are written."""
    options_by_key: dict[str, Options] = {}
    for expr in exprs:
        restricted = (i for i in expr.name.items if isinstance(i, Text) and i.options)
        for item in restricted:
            if options_by_key.setdefault(item.key, item.options) != item.options:
                raise syntax_error(
                    f"{item.key!r} has other options elsewhere in the rule", expr.name.position
                )
    return options_by_key


def _compile_side(
    side: Side, tag: str, capture: Callable[[str | NameCapture], str | NameCapture]
) -> Terms | Nothing:
    if isinstance(side, Nothing):
        return side
    terms = []
    for t, term in enumerate(side):
        exprs = []
        for v, expr in enumerate(term):
            name = replace(expr.name, items=tuple(map(capture, expr.name.items)))
            pattern = Pattern(name)
            pattern.check()
            written = (Axis(ELLIPSIS, name.position),) if expr.items is None else expr.items
            prefix = f"{tag}{t}.{v}."
            items = axes.name_pads(written, prefix)
            _check_expr(pattern, items)
            if any(op in "*/" and operand.value == 0 for op, operand in expr.arithmetic):
                raise syntax_error("multiplication by 0 cannot be undone", name.position)
            exprs.append(CompiledExpr(pattern, items, expr.arithmetic, "value", expr.dtype, prefix))
        terms.append(tuple(exprs))
    return tuple(terms)


def _check_expr(pattern: Pattern, items: tuple[AxisItem, ...]) -> None:
    count = axes.count_choices(items)
    if count > _MOST_PIECES:
        raise syntax_error(
            f"its sums divide this array into {count:,} pieces; at most {_MOST_PIECES:,} are "
            "possible: give pieces of one kind an axis, as in `(n i)`",
            pattern.name.position,
        )
    for choice in axes.choices(items):
        block = axes.block_axes(items, choice)
        before: set[str] = set()
        for axis in block:
            if axis.name in before or axis.name in pattern.axes:
                where = "in the name and in the axes" if axis.name in pattern.axes else "twice"
                raise syntax_error(f"axis {axis.name!r} is used {where}", axis.position)
            before.add(axis.name)


def _check_sizes(rule: Rule, rule_sizes: Mapping[str, int]) -> None:
    used_axes = axes_of_sides([rule.left, rule.right])
    for name in rule_sizes:
        if name not in used_axes:
            raise syntax_error(f"the rule has no axis {name!r}", rule.position)
    for expr in rule.exprs:
        for choice in expr.pattern.choices:
            if rule.sizes.get(choice.axis, len(choice.options)) != len(choice.options):
                raise syntax_error(
                    f"axis {choice.axis!r} has {len(choice.options)} names, not "
                    f"{rule.sizes[choice.axis]}",
                    expr.position,
                )


def _check_sides(rule: Rule) -> None:
    """Checks that each block of one side has exactly one counterpart on the other."""
    sides = [side for side in (rule.left, rule.right) if not isinstance(side, Nothing)]
    if len(sides) < 2:
        for expr in exprs_of(sides[0]):
            if axes.has_pad(expr.items):
                raise syntax_error("padding (`_`) needs an array on the other side", expr.position)
        return
    texts = {key for expr in rule.exprs for key in expr.pattern.texts}
    paths: dict[str, bool] = {}
    for expr in rule.exprs:
        for item in expr.pattern.name.items:
            if isinstance(item, Text) and paths.setdefault(item.key, item.path) != item.path:
                raise syntax_error(
                    f"{item.key!r} matches one component in one name, and any number in "
                    "another; write `...` in both, or in none",
                    expr.position,
                )
        missing = texts - expr.pattern.texts
        if missing & {choice.axis for choice in expr.pattern.choices}:
            raise syntax_error(
                f"{min(missing)!r} is an enumeration, which numbers arrays: write it in the other "
                "name too; to match one of its names at a time, write `=` in place of `:`",
                expr.position,
            )
        if missing:
            raise syntax_error(
                f"{{{min(missing)}}} is in another name of the rule, but not in this one: add it "
                f"here; or, if this is one array that the others are stacked into, give its axes, "
                f"including `{min(missing)}`",
                expr.position,
            )
    _check_blocks(*(_blocks(side) for side in sides))


def _check_function(rule: Rule) -> None:
    """Checks that a function makes one array, from arrays that the names determine."""
    if isinstance(rule.left, Nothing) or isinstance(rule.right, Nothing):
        raise syntax_error("a function needs arrays on both sides", rule.position)
    first = rule.exprs[0]
    for expr in rule.exprs:
        if expr.arithmetic or axes.has_pad(expr.items):
            raise syntax_error(
                "a rule with a function (via) cannot have padding or arithmetic",
                expr.position,
            )
        if expr.pattern.texts != first.pattern.texts:
            raise syntax_error(
                "all names in a rule with a function need the same captures", expr.position
            )
        if rule.moves and set(block_keys(expr)) != set(block_keys(first)):
            raise syntax_error(
                "a function without a region works element by element, so all of its arrays need "
                "the same axes; see Function(region=)",
                expr.position,
            )
        if not rule.moves and expr.pattern.axes:
            raise syntax_error(
                "a function with a region makes one array, so names cannot contain axes",
                expr.position,
            )
    if len(exprs_of(rule.right)) > 1:
        raise syntax_error("a function makes one array", exprs_of(rule.right)[1].position)


def _blocks(side: Terms) -> dict[frozenset[str], CompiledExpr]:
    blocks: dict[frozenset[str], CompiledExpr] = {}
    for term in side:
        of_term: set[frozenset[str]] | None = None
        for expr in term:
            keys = set(block_keys(expr))
            if of_term is not None and keys != of_term:
                raise syntax_error("names joined by `=` must have the same axes", expr.position)
            padded = axes.has_pad(expr.items) or axes.has_pad(term[0].items)
            if padded and expr.form != term[0].form:
                raise syntax_error("names joined by `=` must have the same padding", expr.position)
            of_term = keys
        for key in block_keys(term[0]):
            if key in blocks:
                raise syntax_error(
                    f"two pieces have the axes {_named(key)}, so their elements would be "
                    "used twice; give the axes different names, or join names of one array by `=`",
                    term[0].position,
                )
            blocks[key] = term[0]
    return blocks


def block_keys(expr: CompiledExpr) -> list[frozenset[str]]:
    """The axes of each block of an expression, without the blocks of pads."""
    keys = []
    for choice in axes.choices(expr.items):
        names = {axis.name for axis in axes.block_axes(expr.items, choice)}
        if not any(map(axes.is_pad, names)):
            keys.append(frozenset(names) | expr.pattern.axes)
    return keys


def _check_blocks(
    left: Mapping[frozenset[str], CompiledExpr], right: Mapping[frozenset[str], CompiledExpr]
) -> None:
    for ours, theirs in ((left, right), (right, left)):
        for key, expr in ours.items():
            if key in theirs:
                continue
            near = min(theirs, key=lambda k: len(k ^ key))
            ours_only, theirs_only = _named(key - near), _named(near - key)
            where = [f"on this side only: {ours_only}"] if key - near else []
            where += [f"on the other side only: {theirs_only}"] if near - key else []
            raise syntax_error(
                f"every axis must be on both sides under one name ({', '.join(where)}); "
                "write it in brackets, or in braces within names if it numbers arrays",
                expr.position,
            )


def _named(key: Iterable[str]) -> str:
    return ", ".join(sorted(key)) or "(none)"
