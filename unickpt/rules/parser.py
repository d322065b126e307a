"""Parse: the text of a rule file -> statements; every error shows the line with a caret.

The grammar is in docs/rules.md.
"""

from __future__ import annotations

import re
from dataclasses import replace

from unickpt.arrays import dtypes
from unickpt.rules.ast import (
    ELLIPSIS,
    ArrayExpr,
    Axis,
    AxisGroup,
    AxisItem,
    ConventionLine,
    Enumeration,
    Flip,
    IncludeLine,
    LiftLine,
    Linear,
    Name,
    NameCapture,
    Nothing,
    One,
    Operand,
    Pad,
    RuleLine,
    Side,
    SourcePosition,
    Statement,
    Term,
    Text,
    WhereLine,
    syntax_error,
)
from unickpt.rules.axes import axes_of
from unickpt.rules.scanner import IDENTIFIER, LineScanner, logical_lines

LAWS = ("value", "gradient", "square")
_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?")
_INTEGER = re.compile(r"\d+")
_LITERAL = re.compile(r"(?:(?!<->)[^\s\[\](){}<>,=#\"?])+")
_QUOTED_LITERAL = re.compile(r'(?:[^"\\{}]|\\["\\])+')
_ONE_OF = re.compile(r"[ \t]*([A-Za-z][A-Za-z0-9_]*)[ \t]*=")
_OPTION = re.compile(r"[^\s|{}/\[\](),:]+")
_MOST_DIGITS, _DEEPEST = 18, 30
_TARGET = re.compile(r"[^\s\"#]+")


def parse(text: str, file: str = "rules") -> list[Statement]:
    """Parses a rule file.

    Arguments:
        text: its text.
        file: its name, for messages.

    Raises:
        RuleSyntaxError: with the line and a caret.

    Example:
        >>> parse("params/w [i o] <-> w [o i]")[0].left[0][0].name.items
        ('params/w',)
    """
    return [_StatementParser(line, file).statement() for line in logical_lines(text)]


class _ExprParser(LineScanner):
    """A recursive-descent parser of array expressions: names, axes, arithmetic and a dtype."""

    _depth = 0  # of the item that is read

    def _expr(self) -> ArrayExpr:
        name = self._name()
        items = self._axes() if self.take("[") else None
        arithmetic: list[tuple[str, Operand]] = []
        while op := self._operator():
            if items is None:
                raise self.fail(
                    f"arithmetic needs axes: write `{name} [...] {op} ...`, where [...] means "
                    "any axes",
                    self.at - len(op),
                )
            arithmetic.append((op, self._operand()))
        dtype = self._dtype() if self.word("as") else None
        return ArrayExpr(name, items, tuple(arithmetic), dtype)

    def _operator(self) -> str | None:
        if self.sees("->") or self.sees("//"):
            return None
        return next((op for op in "+-*/" if self.take(op)), None)

    def _operand(self) -> Operand:
        self.skip()
        begin = self.at
        number = self._number()
        value: float | str
        value = number if number is not None else self.identifier("a number or an axis")
        power = 1.0
        if self.take("**"):
            exponent = self._number()
            if exponent is None:
                raise self.fail("expected a number as the power")
            power = exponent
        if value == 0 and power < 0:
            raise self.fail("this divides by zero", begin)
        return Operand(value, power)

    def _dtype(self) -> str:
        name = self.identifier("a dtype, such as bfloat16")
        try:
            dtypes.from_name(name)
        except TypeError:
            raise self.fail(f"unknown dtype {name!r}", self.at - len(name)) from None
        return name

    def _integer(self) -> int | None:
        begin = self.at
        digits = self.match(_INTEGER)
        if digits is not None and len(digits) > _MOST_DIGITS:
            raise self.fail(f"an integer has at most {_MOST_DIGITS} digits", begin)
        return None if digits is None else int(digits)

    def _number(self) -> float | None:
        begin = self.at
        negative = self.take("-")
        digits = self.match(_NUMBER)
        if digits is None:
            self.at = begin
            return None
        return -float(digits) if negative else float(digits)

    def _name(self) -> Name:
        self.skip()
        position, begin = self.position(), self.at
        quoted = self.take('"')
        items: list[str | NameCapture] = []
        literal = _QUOTED_LITERAL if quoted else _LITERAL
        while self.at < len(self.text):
            match = literal.match(self.text, self.at)
            if match:
                self.at = match.end()
                _add(items, re.sub(r"\\(.)", r"\1", match[0]) if quoted else match[0])
            elif self.text.startswith(("{{", "}}"), self.at):
                _add(items, self.text[self.at])
                self.at += 2
            elif self.text.startswith("{", self.at):
                if items and not isinstance(items[-1], str):
                    raise self.fail("two captures need text between them, such as `/`")
                items.append(self._capture())
            else:
                break
        if quoted and not self.take('"'):
            raise self.fail("this quoted name has no closing quote", begin)
        if not items and not quoted:
            raise self.fail("expected a name")
        if not quoted and any("*" in item for item in items if isinstance(item, str)):
            raise self.fail(
                "`*` has no meaning in a name: `{n}` matches one component, `{m...}` any number "
                "of them; put a name that contains `*` in quotes",
                begin,
            )
        return Name(tuple(items), position)

    def _capture(self) -> NameCapture:
        begin = self.at
        self.expect("{")
        body_end = self.text.find("}", self.at)
        if body_end < 0:
            raise self.fail("this capture has no closing `}`", begin)
        body = self.text[self.at : body_end]
        capture: NameCapture
        if match := _ONE_OF.match(self.text, self.at):
            self.at = match.end()
            capture = Text(match[1], options=self._options())
        elif "|" in body:
            capture = self._choice()
        elif body.strip().endswith(ELLIPSIS):
            capture = Text(self.identifier("the name of a capture"), path=True)
            self.expect(ELLIPSIS)
        else:
            capture = self._linear()
        if not self.take("}"):
            raise self.fail("expected `}` at the end of the capture")
        return capture

    def _choice(self) -> Enumeration:
        begin = self.at
        axis = self.match(IDENTIFIER)
        if axis is None or not self.take(":"):
            self.at, axis = begin, None
        options = self._options()
        return Enumeration(axis or "|".join(options), options, axis is not None)

    def _options(self) -> tuple[str, ...]:
        self.skip()
        begin = self.at
        options: list[str] = []
        while not options or self.take("|"):
            option = self.match(_OPTION)
            if option is None:
                raise self.fail("expected one of the names of the enumeration")
            options.append(option)
        if len(set(options)) < len(options):
            raise self.fail("a name occurs twice in the enumeration", begin)
        return tuple(options)

    def _linear(self) -> Linear:
        terms: dict[str, int] = {}
        constant, sign = 0, 1
        begin = self.at
        while True:
            number = self._integer()
            factor = sign * (1 if number is None else number)
            if number is None or self.take("*"):
                axis = self.identifier("the name of a capture")
                if number is None and self.take("*"):
                    multiplier = self._integer()
                    if multiplier is None:
                        raise self.fail("expected a number")
                    factor *= multiplier
                if axis in terms:
                    raise self.fail(f"axis {axis!r} occurs twice in this capture", begin)
                terms[axis] = factor
            else:
                constant += factor
            if not (op := "+" if self.take("+") else "-" if self.take("-") else None):
                break
            sign = 1 if op == "+" else -1
        if not terms or 0 in terms.values() or (len(terms) > 1 and min(terms.values()) < 0):
            raise self.fail(
                "a capture such as {6*b+j} adds multiples of axes; only one that is alone, as in "
                "{3-j}, may be subtracted",
                begin,
            )
        return Linear(tuple(terms.items()), constant)

    def _axes(self) -> tuple[AxisItem, ...]:
        items: list[AxisItem] = []
        while not self.take("]"):
            if self.at >= len(self.text):
                raise self.fail("expected `]` at the end of the axes")
            if self.sees("+"):
                raise self.fail("write concatenated pieces in parentheses: `(q + k)`")
            if self.sees(","):
                raise self.fail("axes are separated by spaces, as in `[i o]`")
            if self.sees("<") or self.sees("["):
                raise self.fail("expected an axis, or `]` at the end of the axes")
            items.append(self._item())
        return tuple(items)

    def _item(self) -> AxisItem:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self.fail(f"parentheses are nested more than {_DEEPEST} deep")
        item = self._one_item()
        self._depth -= 1
        return item

    def _one_item(self) -> AxisItem:
        self.skip()
        begin = self.at
        if self.take("-"):
            if self.text[begin - 1].isalnum():
                raise self.fail(
                    "put a space before `-`; axis names consist of letters and digits", begin
                )
            item = self._item()
            if not isinstance(item, Axis):
                raise self.fail("only an axis can be reversed", begin)
            return Flip(item)
        if self.take("("):
            return self._composite()
        if self.take(ELLIPSIS):
            return Axis(ELLIPSIS, self.position(begin))
        if self.sees("{"):
            self.take("{")
            choice = self._choice()
            self.expect("}", " at the end of the enumeration")
            return Axis(choice.axis, self.position(begin))
        if self.take("_"):
            if re.compile(r"\w").match(self.text, self.at):
                raise self.fail("the name of an axis begins with a letter", begin)
            return Pad(self.position(begin))
        number = self.match(_INTEGER)
        if number is not None:
            if number != "1":
                raise self.fail(
                    "the only number that can be an axis is 1: name the axis, and give its size "
                    f"after the rule, as in `n={number}`",
                    begin,
                )
            return One()
        return Axis(self.identifier("an axis"), self.position(begin))

    def _composite(self) -> AxisGroup:
        begin = self.at - 1
        segments: list[list[AxisItem]] = [[]]
        while not self.take(")"):
            if self.at >= len(self.text) or self.sees("]"):
                raise self.fail("this parenthesis is not closed", begin)
            if self.take("+"):
                segments.append([])
            else:
                segments[-1].append(self._item())
        if not all(segments):
            raise self.fail("a piece of the sum is empty", begin)
        if any(ELLIPSIS in map(str, axes_of(segment)) for segment in segments):
            raise self.fail("`...` cannot be in parentheses", begin)
        return AxisGroup(tuple(map(tuple, segments)))


class _StatementParser(_ExprParser):
    """A parser of one logical line: a statement, with the attributes of its sides."""

    def statement(self) -> Statement:
        begin = self.at
        keyword = self.word("optional", "default", "lift", "where", "include", "convention")
        if keyword and (self.sees("<->") or self.sees("[") or self.sees("=")):
            self.at, keyword = begin, None  # it is a name
        position = self.position(begin)
        statement: Statement
        match keyword:
            case "lift":
                statement = self._lift(position)
            case "where":
                statement = WhereLine(position, self._sizes())
            case "include":
                statement = self._include(position)
            case "default" if self.word("include"):
                statement = replace(self._include(position), default=True)
            case "convention":
                statement = self._convention(position)
            case _:
                statement = self._rule(position, keyword)
        self.end()
        return statement

    def _rule(self, position: SourcePosition, keyword: str | None) -> RuleLine:
        left = self._side()
        self.expect("<->", " between the two sides")
        right = self._side()
        if isinstance(left, Nothing) and isinstance(right, Nothing):
            raise self.fail("neither side names an array", 0)
        function = self.identifier("the name of a function") if self.word("via") else None
        usual: dict[str, int] = {}
        sizes = self._sizes(usual) if self.word("where") or self._sees_size() else ()
        optional, default = keyword == "optional", keyword == "default"
        more = tuple(usual.items())
        return RuleLine(position, left, right, optional, default, function, sizes, more)

    def _lift(self, position: SourcePosition) -> LiftLine:
        left = self._expr()
        self.expect("<->", " between the two sides")
        right = self._expr()
        for expr in (left, right):
            if expr.items is not None or expr.arithmetic:
                raise syntax_error(
                    "a lifted name has no axes of its own: the rule of the parameter has them",
                    expr.name.position,
                )
        domain, law = self._domain(), None
        if self.word("law"):
            self.expect("=")
            law = self.identifier("a law: value, gradient or square")
            if law not in LAWS:
                raise self.fail(f"a law is one of {', '.join(LAWS)}", self.at - len(law))
        return LiftLine(position, left, right, domain, law)

    def _domain(self) -> tuple[Name, Name] | None:
        if not self.word("for"):
            return None
        left = self._name()
        self.expect("<->", " between the names of parameters")
        return left, self._name()

    def _include(self, position: SourcePosition) -> IncludeLine:
        target = self._quoted() if self.sees('"') else self.match(_TARGET)
        if not target:
            raise self.fail("expected the name of a preset, or of a file in quotes")
        inverse = bool(self.word("inverse"))
        under = ("", "")
        if self.word("under"):
            left = self._prefix()
            self.expect("<->", " between the two prefixes")
            under = (left, self._prefix())
        domain = self._domain()
        sizes = self._sizes() if self.word("where") or self._sees_size() else ()
        return IncludeLine(position, target, under, domain, sizes=sizes, inverse=inverse)

    def _prefix(self) -> str:
        prefix = self.match(_LITERAL) or ""
        if self.text.startswith("{", self.at):
            raise self.fail("a prefix cannot contain captures")
        return prefix

    def _convention(self, position: SourcePosition) -> ConventionLine:
        name = self.identifier("the name of a convention")
        self.expect(":", " and what it is on each side")
        left = self.identifier("what it is on the left")
        self.expect("<->")
        return ConventionLine(position, name, left, self.identifier("what it is on the right"))

    def _sees_size(self) -> bool:
        self.skip()
        return re.compile(r"[A-Za-z_]\w*\s*=\s*\d").match(self.text, self.at) is not None

    def _sizes(self, usual: dict[str, int] | None = None) -> tuple[tuple[str, int], ...]:
        """Sizes of axes; those that end with `?` go to `usual` instead, if it is given."""
        sizes: dict[str, int] = {}
        while not sizes | (usual or {}) or self.take(",") or self._sees_size():
            begin = self.at
            name = "_" if self.take("_") else self.identifier("a size, such as `half=2`")
            self.expect("=", " and the size of the axis")
            number = self._integer()
            if number is None:
                raise self.fail("a size must be an integer")
            if name in sizes or name in (usual or {}):
                raise self.fail(f"the size of {name!r} is given twice", begin)
            if usual is not None and self.take("?"):
                usual[name] = number
            else:
                sizes[name] = number
        return tuple(sizes.items())

    def _quoted(self) -> str:
        self.expect('"')
        match = re.compile(r'(?:[^"\\]|\\.)*').match(self.text, self.at)
        assert match is not None, "the pattern matches nothing, too"
        self.at = match.end()
        self.expect('"', " at the end of the quoted text")
        return re.sub(r"\\(.)", r"\1", match[0])

    def _side(self) -> Side:
        begin = self.at
        unchecked = self.word("drop") is not None
        number = self._number()
        self.skip()
        if (unchecked or number is not None) and self._nothing_ends():
            return Nothing(number, unchecked)
        self.at = begin
        terms = [self._term()]
        while self.take(","):
            terms.append(self._term())
        return tuple(terms)

    def _nothing_ends(self) -> bool:
        remaining = self.text[self.at :]
        return not remaining or remaining.startswith(("<->", "where ")) or self._sees_size()

    def _term(self) -> Term:
        exprs = [self._expr()]
        while not self._sees_size() and not self.sees("=>") and self.take("="):
            exprs.append(self._expr())
        return tuple(exprs)


def _add(items: list[str | NameCapture], text: str) -> None:
    if items and isinstance(items[-1], str):
        items[-1] += text
    else:
        items.append(text)
