"""A rule: names and axes of two sides that were checked against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from unickpt.errors import RuleError
from unickpt.rules import axes
from unickpt.rules.ast import (
    ELLIPSIS,
    ArrayExpr,
    AxisItem,
    Nothing,
    Operand,
    SourcePosition,
    rule_text,
)
from unickpt.rules.name_patterns import Pattern


@dataclass(frozen=True)
class CompiledExpr:
    """A compiled `ArrayExpr`.

    Arguments:
        pattern: of the names.
        items: its axes; each pad is an axis, `...` is not expanded.
        arithmetic: applied to the elements before they equal the other side's.
        law: how a slot of an optimizer follows the arithmetic; None if not given.
        dtype: of the elements when this side is made.
        tag: distinguishes its pads from those of other expressions.
    """

    pattern: Pattern
    items: tuple[AxisItem, ...]
    arithmetic: tuple[tuple[str, Operand], ...] = ()
    law: str | None = "value"
    dtype: str | None = None
    tag: str = ""

    @property
    def position(self) -> SourcePosition:
        return self.pattern.name.position

    @property
    def arithmetic_axes(self) -> set[str]:
        """The axes whose sizes the arithmetic needs."""
        return {o.value for _, o in self.arithmetic if isinstance(o.value, str)}

    @cached_property
    def form(self) -> tuple[object, ...]:
        """Equal for expressions whose arrays have the same elements in the same places."""
        return " ".join(map(str, self.items)), self.arithmetic, self.law, self.dtype

    def affine(self, sizes: Mapping[str, int]) -> tuple[float, float]:
        """Scale and offset of the arithmetic.

        Raises:
            RuleError: it needs an axis without a size, or a law that was not given; or its result
                is too large.
        """
        try:
            affine = self._affine(sizes)
        except (OverflowError, ZeroDivisionError):
            affine = math.inf, 0.0
        if not all(map(math.isfinite, affine)):
            raise RuleError(
                f"{self.position}: the arithmetic divides by 0, or has a number that does not fit "
                "into a float64: write smaller numbers, or a smaller power"
            )
        return affine

    def _affine(self, sizes: Mapping[str, int]) -> tuple[float, float]:
        scale, offset = 1.0, 0.0
        for op, operand in self.arithmetic:
            value = _value(operand, sizes, self.position)
            if op in "+-":
                offset += value if op == "+" else -value
                continue
            factor = value if op == "*" else 1 / value
            scale, offset = scale * factor, offset * factor
        if self.law == "value":
            return scale, offset
        if self.law is None and scale != 1:
            raise RuleError(
                f"{self.position}: the slot of a parameter that is scaled by {scale:g} needs a "
                "law: add law=gradient, law=square or law=value to the lift"
            )
        return (scale**-2 if self.law == "square" else 1 / scale), 0.0

    def __str__(self) -> str:
        return str(ArrayExpr(self.pattern.name, self.items, self.arithmetic, self.dtype))


def _value(operand: Operand, sizes: Mapping[str, int], position: SourcePosition) -> float:
    base = operand.value
    if isinstance(base, str):
        if base not in sizes:
            raise RuleError(f"{position}: the arithmetic needs the size of {base!r}: give it")
        base = float(sizes[base])
    return float(base**operand.power)


Terms = tuple[tuple[CompiledExpr, ...], ...]


@dataclass(frozen=True)
class Rule:
    """`left <-> right`.

    Arguments:
        position: its place in the file.
        text: as it is written, or the text from which it was lifted.
        left, right: terms, each with the names that are one array; or nothing.
        sizes: of axes, as given.
        usual: sizes of axes that shapes may not determine; used only if they do not.
        optional: whether it may match nothing.
        default: whether it applies only to arrays that no other rule matches.
        function: the name of the function that relates the sides.
        moves: whether axes are moved as the rule says; some functions do that themselves.
        parameter: for a rule of an optimizer's slots, the rule of their parameters, as text.
        variant: how unlikely this rule is among several readings of one text; one is meant.
    """

    position: SourcePosition = field(compare=False)
    text: str
    left: Terms | Nothing
    right: Terms | Nothing
    sizes: Mapping[str, int] = field(default_factory=dict)
    usual: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False
    default: bool = False
    function: str | None = None
    moves: bool = True
    parameter: str | None = None
    variant: int = 0

    def __hash__(self) -> int:
        return hash((self.text, self.parameter, self.variant))

    @property
    def inverse(self) -> Rule:
        return replace(self, left=self.right, right=self.left)

    @property
    def says_shapes(self) -> bool:
        """Whether its axes determine shapes: not if a function knows them better."""
        return self.moves or ELLIPSIS not in axes_of_sides([self.left, self.right])

    @property
    def lifted(self) -> bool:
        """Whether it is a rule of an optimizer's slots."""
        return self.parameter is not None

    @property
    def written(self) -> str:
        """The rule in the notation, in this direction."""
        text = rule_text(self.left, self.right, self.optional, self.default, self.function)
        sizes = "".join(f"  {axis}={size}" for axis, size in self.sizes.items())
        sizes += "".join(f"  {axis}={size}?" for axis, size in self.usual.items())
        return text + sizes

    @property
    def statement(self) -> tuple[SourcePosition, str]:
        """Its position and text; the same for all readings of one statement."""
        return self.position, self.text

    @property
    def exprs(self) -> list[CompiledExpr]:
        return [expr for side in (self.left, self.right) for expr in exprs_of(side)]

    @cached_property
    def pairing(self) -> frozenset[str]:
        """The axes that are in all names and nowhere else: they pair arrays, whose other axes may
        have other sizes for each index."""
        if isinstance(self.left, Nothing) or isinstance(self.right, Nothing) or self.function:
            return frozenset()
        elsewhere = {a.name for expr in self.exprs for a in axes.axes_of(expr.items)}
        elsewhere.update(*(expr.arithmetic_axes for expr in self.exprs))
        return frozenset.intersection(*(e.pattern.axes for e in self.exprs)) - elsewhere

    @cached_property
    def _title(self) -> str:
        return f"{self.position}: {self.text}"

    def __str__(self) -> str:
        return self._title  # which every array that it makes has


def terms_of(side: Terms | Nothing) -> Terms:
    """All terms of a side; none of nothing."""
    return () if isinstance(side, Nothing) else side


def exprs_of(side: Terms | Nothing) -> list[CompiledExpr]:
    """All expressions of a side."""
    return [expr for term in terms_of(side) for expr in term]


def axes_of_sides(sides: Sequence[Terms | Nothing]) -> set[str]:
    """All axes of both sides; pads as one."""
    names: set[str] = set()
    for side in sides:
        for expr in exprs_of(side):
            names |= expr.pattern.axes | {a.name for a in axes.axes_of(expr.items)}
            names |= expr.arithmetic_axes
    if any(map(axes.is_pad, names)):
        names.add(axes.PAD)
    return names
