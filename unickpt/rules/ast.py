"""The syntax tree of a rule file, as dataclasses; `parser` builds it from the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from unickpt.errors import RuleSyntaxError


@dataclass(frozen=True)
class SourcePosition:
    """A position in a rule file: file, line and column from 1, and the text of that line."""

    file: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"

    def pointed(self) -> str:
        """The line with a caret below the column."""
        return f"  {self.text}\n  {' ' * (self.column - 1)}^"


def syntax_error(message: str, position: SourcePosition) -> RuleSyntaxError:
    """An error that shows its line with a caret."""
    return RuleSyntaxError(f"{position}: {message}\n{position.pointed()}")


# --- names ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """`{m}`: one component of a name or a piece of one; with `path`, `{m...}`: any number; with
    `options`, `{m=up|down}`: one of these."""

    key: str
    path: bool = False
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Linear:
    """`{6*b+j}`: a number in a name, computed from axes; a lone `{l}` may turn out to be `Text`.

    The factor may be negative only for a single axis, as in `{3-j}`.
    """

    terms: tuple[tuple[str, int], ...]
    constant: int = 0

    @property
    def lone(self) -> str | None:
        """The axis of `{l}`."""
        alone = len(self.terms) == 1 and self.terms[0][1] == 1 and self.constant == 0
        return self.terms[0][0] if alone else None


@dataclass(frozen=True)
class Enumeration:
    """`{query|key|value}` or `{qkv:query|key|value}`: an axis whose indices are spelled out."""

    axis: str
    options: tuple[str, ...]
    named: bool = False


NameCapture = Text | Linear | Enumeration


@dataclass(frozen=True)
class Name:
    """A name with captures, which matches whole names only."""

    items: tuple[str | NameCapture, ...]
    position: SourcePosition = field(compare=False)

    def __str__(self) -> str:
        return "".join(map(item_text, self.items))


def item_text(item: str | NameCapture) -> str:
    """A piece of a name as it is written."""
    match item:
        case str():
            return item.replace("{", "{{").replace("}", "}}")
        case Text(key, path, options):
            return "{" + key + ("..." if path else "=" * bool(options) + "|".join(options)) + "}"
        case Enumeration(axis, options, named):
            return "{" + (f"{axis}:" if named else "") + "|".join(options) + "}"
        case Linear(((axis, factor),), constant) if factor < 0:
            return "{" + f"{constant}-" + (f"{-factor}*" if factor < -1 else "") + axis + "}"
        case Linear(terms, constant):
            parts = [axis if factor == 1 else f"{factor}*{axis}" for axis, factor in terms]
            text = "+".join(parts)
            return "{" + text + (f"{constant:+d}" if constant else "") + "}"


# --- axes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A named axis; `...` matches any number of them."""

    name: str
    position: SourcePosition = field(compare=False)

    def __str__(self) -> str:
        if self.name.startswith("_"):
            return "_"
        return "{" + self.name + "}" if "|" in self.name else self.name


@dataclass(frozen=True)
class One:
    """An extent of 1."""

    def __str__(self) -> str:
        return "1"


@dataclass(frozen=True)
class Pad:
    """`_`: elements that have no counterpart."""

    position: SourcePosition = field(compare=False)

    def __str__(self) -> str:
        return "_"


@dataclass(frozen=True)
class Flip:
    """`-h`: an axis in reverse order."""

    item: AxisItem

    def __str__(self) -> str:
        return f"-{self.item}"


@dataclass(frozen=True)
class AxisGroup:
    """`(a b + c)`: consecutive segments, each the product of its items."""

    segments: tuple[tuple[AxisItem, ...], ...]

    def __str__(self) -> str:
        return "(" + " + ".join(" ".join(map(str, s)) for s in self.segments) + ")"


AxisItem = Axis | One | Pad | Flip | AxisGroup

ELLIPSIS = "..."


# --- sides and statements -----------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A number or an axis, to a power."""

    value: float | str
    power: float = 1.0

    def __str__(self) -> str:
        base = self.value if isinstance(self.value, str) else f"{self.value:g}"
        return base if self.power == 1 else f"{base}**{self.power:g}"


@dataclass(frozen=True)
class ArrayExpr:
    """A name with its axes, arithmetic and dtype; `items` is None if no axes are given."""

    name: Name
    items: tuple[AxisItem, ...] | None = None
    arithmetic: tuple[tuple[str, Operand], ...] = ()
    dtype: str | None = None

    def __str__(self) -> str:
        text = str(self.name)
        if self.items is not None:
            text += " [" + " ".join(map(str, self.items)) + "]"
        text += "".join(f" {op} {operand}" for op, operand in self.arithmetic)
        return text + (f" as {self.dtype}" if self.dtype else "")


@dataclass(frozen=True)
class Nothing:
    """A side without arrays: `drop`, a constant (`0`), or both (`drop 0`).

    Arguments:
        value: the constant of the other side's arrays; None if nothing makes them.
        unchecked: whether the other side's arrays are dropped without a check of their values.
    """

    value: float | None
    unchecked: bool

    def __str__(self) -> str:
        value = "" if self.value is None else f"{self.value:g}"
        return f"{'drop ' if self.unchecked else ''}{value}".strip()


Term = tuple[ArrayExpr, ...]
"""Expressions of one array under several names (`a = b`); usually one."""
Side = tuple[Term, ...] | Nothing


def rule_text(
    left: Nothing | Iterable[Iterable[object]],
    right: Nothing | Iterable[Iterable[object]],
    optional: bool,
    default: bool,
    function: str | None,
) -> str:
    """A rule as it is written, without its sizes."""
    keyword = "default " if default else "optional " * optional
    sides = (
        str(side)
        if isinstance(side, Nothing)
        else ", ".join(" = ".join(map(str, term)) for term in side)
        for side in (left, right)
    )
    return keyword + " <-> ".join(sides) + ("" if function is None else f" via {function}")


@dataclass(frozen=True)
class RuleLine:
    """`left <-> right`, with the sizes that follow it; `usual` holds those that end with `?`."""

    position: SourcePosition = field(compare=False)
    left: Side
    right: Side
    optional: bool = False
    default: bool = False
    function: str | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    usual: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class LiftLine:
    """`lift left <-> right for prefix <-> prefix law=...`: applies rules of parameters to slots."""

    position: SourcePosition = field(compare=False)
    left: ArrayExpr
    right: ArrayExpr
    domain: tuple[Name, Name] | None
    law: str | None


@dataclass(frozen=True)
class WhereLine:
    """`where a=1, b=2`: sizes for all rules of the file."""

    position: SourcePosition = field(compare=False)
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class IncludeLine:
    """`include target under left <-> right for prefix <-> prefix`: another file, or a preset.

    With `inverse`, its sides are exchanged before prefixes are put before its names.
    """

    position: SourcePosition = field(compare=False)
    target: str
    under: tuple[str, str]
    domain: tuple[Name, Name] | None = None
    default: bool = False
    sizes: tuple[tuple[str, int], ...] = ()
    inverse: bool = False


@dataclass(frozen=True)
class ConventionLine:
    """`convention rope: interleaved <-> half`: the meaning of the numbers of each side."""

    position: SourcePosition = field(compare=False)
    name: str
    left: str
    right: str


Statement = RuleLine | LiftLine | WhereLine | IncludeLine | ConventionLine


def included(statement: Statement, line: IncludeLine) -> Statement:
    """A statement of an included file: its names after prefixes, its lifts for some parameters."""
    under = line.under
    statement = _inverse(statement, line) if line.inverse else statement
    match statement:
        case RuleLine(left=left, right=right):
            sides = [_prefixed_side(s, p) for s, p in zip((left, right), under, strict=True)]
            default = statement.default or line.default
            return replace(statement, left=sides[0], right=sides[1], default=default)
        case LiftLine(left=left, right=right, domain=domain):
            exprs = [_prefixed_expr(v, p) for v, p in zip((left, right), under, strict=True)]
            if domain is None and line.domain is not None:
                domain = line.domain
            else:
                inner = domain or _own_domain(statement)
                names = [_prefixed_name(n, p) for n, p in zip(inner, under, strict=True)]
                domain = (names[0], names[1])
            return replace(statement, left=exprs[0], right=exprs[1], domain=domain)
        case IncludeLine(under=(a, b)):
            return replace(
                statement,
                under=(under[0] + a, under[1] + b),
                domain=statement.domain or line.domain,
                default=statement.default or line.default,
            )
    return statement


def _inverse(statement: Statement, line: IncludeLine) -> Statement:
    """A statement with its sides exchanged.

    Raises:
        RuleSyntaxError: it has a function, whose inverse is known only to the call that passes it.
    """
    match statement:
        case RuleLine(function=function) if function is not None:
            raise syntax_error(
                f"{line.target!r} cannot be included as its inverse: a rule in it calls "
                f"{function!r}. Use the property `inverse` of its Rules",
                line.position,
            )
        case LiftLine(domain=domain) | IncludeLine(domain=domain) if domain is not None:
            statement = replace(statement, domain=(domain[1], domain[0]))
    match statement:
        case RuleLine(left=left, right=right):
            return replace(statement, left=right, right=left)
        case LiftLine(left=expr, right=other):
            return replace(statement, left=other, right=expr)
        case ConventionLine(left=meaning, right=opposite):
            return replace(statement, left=opposite, right=meaning)
        case IncludeLine(under=(a, b)):
            return replace(statement, under=(b, a), inverse=not statement.inverse)
    return statement


def _own_domain(line: LiftLine) -> tuple[Name, Name]:
    """The names of parameters for a lift that does not state them: all that its capture takes."""
    captures = [
        item for expr in (line.left, line.right) for item in expr.name.items
        if not isinstance(item, str)
    ]  # fmt: skip
    name = Name(tuple(captures[:1]), line.position)
    return name, name


def _prefixed_side(side: Side, prefix: str) -> Side:
    if isinstance(side, Nothing):
        return side
    return tuple(tuple(_prefixed_expr(expr, prefix) for expr in term) for term in side)


def _prefixed_expr(expr: ArrayExpr, prefix: str) -> ArrayExpr:
    return replace(expr, name=_prefixed_name(expr.name, prefix))


def _prefixed_name(name: Name, prefix: str) -> Name:
    items = list(name.items)
    if prefix and items and isinstance(items[0], str):
        items[0] = prefix + items[0]
    elif prefix:
        items.insert(0, prefix)
    return replace(name, items=tuple(items))
