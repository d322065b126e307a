"""Parse: the text of a rule file -> statements; every error shows the line with a caret.

The grammar is in docs/rules.md.
"""

from __future__ import annotations

import re
from dataclasses import replace

from unickpt.arrays import dtypes
from unickpt.errors import RuleSyntaxError
from unickpt.rules.ast import (
    ELLIPSIS,
    ArrayExpr,
    Axis,
    Capture,
    Choice,
    Composite,
    ConventionLine,
    Flip,
    IncludeLine,
    Item,
    LiftLine,
    Linear,
    Name,
    Nothing,
    One,
    Operand,
    Pad,
    Position,
    RuleLine,
    Side,
    Statement,
    Term,
    Text,
    WhereLine,
    axes_of,
    syntax_error,
)
from unickpt.rules.lines import LogicalLine, logical_lines

LAWS = ("value", "gradient", "square")
_SPACE = re.compile(r"[ \t]*")
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?")
_INTEGER = re.compile(r"\d+")
_LITERAL = re.compile(r"(?:(?!<->)[^\s\[\](){}<>,=#\"?])+")
_QUOTED_LITERAL = re.compile(r'(?:[^"\\{}]|\\["\\])+')
_ONE_OF = re.compile(r"[ \t]*([A-Za-z][A-Za-z0-9_]*)[ \t]*=")
_OPTION = re.compile(r"[^\s|{}/\[\](),:]+")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\b(?![./])")
_ARROW = re.compile(r"<?[-=~]*>|<[-=~]+>?|[\u2190-\u21ff\u27f0-\u27ff]|:=?")
_NO_PATTERN = (
    "regular expressions are not supported: `{n}` matches one component of a name, `{m...}` any "
    "number of them"
)
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
    return [_Parser(line, file).statement() for line in logical_lines(text)]


class _Parser:
    """A recursive-descent parser of one logical line."""

    def __init__(self, line: LogicalLine, file: str) -> None:
        self._line, self._text, self._file, self._at = line, line.text, file, 0

    # --- the text ---------------------------------------------------------------------------

    def _position(self, at: int | None = None) -> Position:
        return self._line.position(self._file, self._at if at is None else at)

    def _fail(self, message: str, at: int | None = None) -> RuleSyntaxError:
        return syntax_error(message, self._position(at))

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _sees(self, text: str) -> bool:
        self._skip()
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        if not self._sees(text):
            return False
        self._at += len(text)
        return True

    def _expect(self, text: str, why: str = "") -> None:
        if not self._take(text):
            hint = self._no_arrow() if text == "<->" else ""
            raise self._fail(f"expected `{text}`{why}{hint}")

    def _no_arrow(self) -> str:
        """What probably went wrong where `<->` is missing."""
        self._skip()
        before, rest = self._text[: self._at].rstrip(), self._text[self._at :]
        arrow = _ARROW.match(rest)
        if arrow or before.endswith(":"):
            wrong = arrow[0] if arrow else ":"
            return f": write it in place of `{wrong}`; a rule serves both directions"
        if rest.startswith("["):
            return "; put a name with brackets in quotes"
        if rest.startswith(("(", "?")):
            return f"; {_NO_PATTERN}"
        if rest.startswith("<"):
            return "; write a capture in braces, such as {l}"
        if rest:
            return "; write axes in brackets, as in `name [i o]`, and a name with spaces in quotes"
        if " = " in before:
            return "; `=` joins several names of one array on the same side"
        if before.endswith((".rules", ".txt")):
            return "; Rules.load(file) reads a file of rules"
        return ": a rule is `stored name <-> name to load as`"

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        self._skip()
        found = pattern.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _word(self, *words: str) -> str | None:
        """One of some words, if it comes next and is not a name in front of an arrow."""
        self._skip()
        found = _WORD.match(self._text, self._at)
        if found is None or found[0] not in words:
            return None
        self._at = found.end()
        return found[0]

    def _identifier(self, what: str) -> str:
        found = self._match(_IDENTIFIER)
        if found is None:
            raise self._fail(f"expected {what}")
        return found

    def _end(self) -> None:
        self._skip()
        rest = self._text[self._at :]
        if not rest:
            return
        hint = ""
        if rest.startswith("<->"):
            hint = "; a rule has one `<->`: a line before this one may lack its second side"
        elif "<->" in rest:
            hint = "; write each rule on a line of its own"
        elif rest.startswith(("//", "--", "%")):
            hint = "; a comment begins with `#`"
        raise self._fail(f"this is not expected here{hint}")

    # --- statements -------------------------------------------------------------------------

    def statement(self) -> Statement:
        begin = self._at
        keyword = self._word("optional", "default", "lift", "where", "include", "convention")
        if keyword and (self._sees("<->") or self._sees("[") or self._sees("=")):
            self._at, keyword = begin, None  # it is a name
        position = self._position(begin)
        statement: Statement
        match keyword:
            case "lift":
                statement = self._lift(position)
            case "where":
                statement = WhereLine(position, self._sizes())
            case "include":
                statement = self._include(position)
            case "default" if self._word("include"):
                statement = replace(self._include(position), default=True)
            case "convention":
                statement = self._convention(position)
            case _:
                statement = self._rule(position, keyword)
        self._end()
        return statement

    def _rule(self, position: Position, keyword: str | None) -> RuleLine:
        left = self._side()
        self._expect("<->", " between the two sides")
        right = self._side()
        if isinstance(left, Nothing) and isinstance(right, Nothing):
            raise self._fail("neither side names an array", 0)
        function = self._identifier("the name of a function") if self._word("via") else None
        sizes = self._sizes() if self._word("where") or self._sees_size() else ()
        optional, default = keyword == "optional", keyword == "default"
        return RuleLine(position, left, right, optional, default, function, sizes)

    def _lift(self, position: Position) -> LiftLine:
        left = self._expr()
        self._expect("<->", " between the two sides")
        right = self._expr()
        for expr in (left, right):
            if expr.items is not None or expr.arithmetic:
                raise syntax_error(
                    "a lifted name has no axes of its own: the rule of the parameter has them",
                    expr.name.position,
                )
        domain, law = self._domain(), None
        if self._word("law"):
            self._expect("=")
            law = self._identifier("a law: value, gradient or square")
            if law not in LAWS:
                raise self._fail(f"a law is one of {', '.join(LAWS)}", self._at - len(law))
        return LiftLine(position, left, right, domain, law)

    def _domain(self) -> tuple[Name, Name] | None:
        if not self._word("for"):
            return None
        left = self._name()
        self._expect("<->", " between the names of parameters")
        return left, self._name()

    def _include(self, position: Position) -> IncludeLine:
        target = self._quoted() if self._sees('"') else self._match(_TARGET)
        if not target:
            raise self._fail("expected the name of a preset, or of a file in quotes")
        under = ("", "")
        if self._word("under"):
            left = self._prefix()
            self._expect("<->", " between the two prefixes")
            under = (left, self._prefix())
        domain = self._domain()
        sizes = self._sizes() if self._word("where") or self._sees_size() else ()
        return IncludeLine(position, target, under, domain, sizes=sizes)

    def _prefix(self) -> str:
        prefix = self._match(_LITERAL) or ""
        if self._text.startswith("{", self._at):
            raise self._fail("a prefix cannot contain captures")
        return prefix

    def _convention(self, position: Position) -> ConventionLine:
        name = self._identifier("the name of a convention")
        self._expect(":", " and what it is on each side")
        left = self._identifier("what it is on the left")
        self._expect("<->")
        return ConventionLine(position, name, left, self._identifier("what it is on the right"))

    def _sees_size(self) -> bool:
        self._skip()
        return re.compile(r"[A-Za-z_]\w*\s*=\s*\d").match(self._text, self._at) is not None

    def _sizes(self) -> tuple[tuple[str, int], ...]:
        sizes: dict[str, int] = {}
        while not sizes or self._take(",") or self._sees_size():
            at = self._at
            name = "_" if self._take("_") else self._identifier("a size, such as `half=2`")
            self._expect("=", " and the size of the axis")
            number = self._match(_INTEGER)
            if number is None:
                raise self._fail("a size must be an integer")
            if name in sizes:
                raise self._fail(f"the size of {name!r} is given twice", at)
            sizes[name] = int(number)
        return tuple(sizes.items())

    # --- sides ------------------------------------------------------------------------------

    def _side(self) -> Side:
        begin = self._at
        unchecked = self._word("drop") is not None
        number = self._number()
        self._skip()
        if (unchecked or number is not None) and self._nothing_ends():
            return Nothing(number, unchecked)
        self._at = begin
        terms = [self._term()]
        while self._take(","):
            terms.append(self._term())
        return tuple(terms)

    def _nothing_ends(self) -> bool:
        rest = self._text[self._at :]
        return not rest or rest.startswith(("<->", "where ")) or self._sees_size()

    def _number(self) -> float | None:
        begin = self._at
        negative = self._take("-")
        found = self._match(_NUMBER)
        if found is None:
            self._at = begin
            return None
        return -float(found) if negative else float(found)

    def _term(self) -> Term:
        exprs = [self._expr()]
        while not self._sees_size() and not self._sees("=>") and self._take("="):
            exprs.append(self._expr())
        return tuple(exprs)

    def _expr(self) -> ArrayExpr:
        name = self._name()
        items = self._axes() if self._take("[") else None
        arithmetic: list[tuple[str, Operand]] = []
        while op := self._operator():
            if items is None:
                raise self._fail(
                    f"arithmetic needs axes: write `{name} [...] {op} ...`, where [...] means "
                    "any axes",
                    self._at - len(op),
                )
            arithmetic.append((op, self._operand()))
        dtype = self._dtype() if self._word("as") else None
        return ArrayExpr(name, items, tuple(arithmetic), dtype)

    def _operator(self) -> str | None:
        if self._sees("->") or self._sees("//"):
            return None
        return next((op for op in "+-*/" if self._take(op)), None)

    def _operand(self) -> Operand:
        self._skip()
        begin = self._at
        found = self._match(_NUMBER)
        value: float | str
        value = float(found) if found else self._identifier("a number or an axis")
        power = 1.0
        if self._take("**"):
            number = self._number()
            if number is None:
                raise self._fail("expected a number as the power")
            power = number
        if value == 0 and power < 0:
            raise self._fail("this divides by zero", begin)
        return Operand(value, power)

    def _dtype(self) -> str:
        name = self._identifier("a dtype, such as bfloat16")
        try:
            dtypes.from_name(name)
        except TypeError:
            raise self._fail(f"unknown dtype {name!r}", self._at - len(name)) from None
        return name

    # --- names ------------------------------------------------------------------------------

    def _quoted(self) -> str:
        self._expect('"')
        found = re.compile(r'(?:[^"\\]|\\.)*').match(self._text, self._at)
        assert found is not None, "the pattern matches nothing, too"
        self._at = found.end()
        self._expect('"', " at the end of the quoted text")
        return re.sub(r"\\(.)", r"\1", found[0])

    def _name(self) -> Name:
        self._skip()
        position, begin = self._position(), self._at
        quoted = self._take('"')
        items: list[str | Capture] = []
        literal = _QUOTED_LITERAL if quoted else _LITERAL
        while self._at < len(self._text):
            found = literal.match(self._text, self._at)
            if found:
                self._at = found.end()
                _add(items, re.sub(r"\\(.)", r"\1", found[0]) if quoted else found[0])
            elif self._text.startswith(("{{", "}}"), self._at):
                _add(items, self._text[self._at])
                self._at += 2
            elif self._text.startswith("{", self._at):
                if items and not isinstance(items[-1], str):
                    raise self._fail("two captures need text between them, such as `/`")
                items.append(self._capture())
            else:
                break
        if quoted and not self._take('"'):
            raise self._fail("this quoted name has no closing quote", begin)
        if not items and not quoted:
            raise self._fail("expected a name")
        if not quoted and any("*" in item for item in items if isinstance(item, str)):
            raise self._fail(
                "`*` has no meaning in a name: `{n}` matches one component, `{m...}` any number "
                "of them; put a name that contains `*` in quotes",
                begin,
            )
        return Name(tuple(items), position)

    def _capture(self) -> Capture:
        begin = self._at
        self._expect("{")
        body_end = self._text.find("}", self._at)
        if body_end < 0:
            raise self._fail("this capture has no closing `}`", begin)
        body = self._text[self._at : body_end]
        capture: Capture
        if found := _ONE_OF.match(self._text, self._at):
            self._at = found.end()
            capture = Text(found[1], options=self._options())
        elif "|" in body:
            capture = self._choice()
        elif body.strip().endswith(ELLIPSIS):
            capture = Text(self._identifier("the name of a capture"), path=True)
            self._expect(ELLIPSIS)
        else:
            capture = self._linear()
        if not self._take("}"):
            raise self._fail("expected `}` at the end of the capture")
        return capture

    def _choice(self) -> Choice:
        begin = self._at
        axis = self._match(_IDENTIFIER)
        if axis is None or not self._take(":"):
            self._at, axis = begin, None
        options = self._options()
        return Choice(axis or "|".join(options), options, axis is not None)

    def _options(self) -> tuple[str, ...]:
        self._skip()
        begin = self._at
        options: list[str] = []
        while not options or self._take("|"):
            found = self._match(_OPTION)
            if found is None:
                raise self._fail("expected one of the names of the enumeration")
            options.append(found)
        if len(set(options)) < len(options):
            raise self._fail("a name occurs twice in the enumeration", begin)
        return tuple(options)

    def _linear(self) -> Linear:
        terms: dict[str, int] = {}
        constant, sign = 0, 1
        begin = self._at
        while True:
            number = self._match(_INTEGER)
            factor = sign * int(number or 1)
            if number is None or self._take("*"):
                axis = self._identifier("the name of a capture")
                if number is None and self._take("*"):
                    found = self._match(_INTEGER)
                    if found is None:
                        raise self._fail("expected a number")
                    factor *= int(found)
                if axis in terms:
                    raise self._fail(f"axis {axis!r} occurs twice in this capture", begin)
                terms[axis] = factor
            else:
                constant += factor
            if not (op := "+" if self._take("+") else "-" if self._take("-") else None):
                break
            sign = 1 if op == "+" else -1
        if not terms or min(terms.values()) < 1:
            raise self._fail("a capture such as {6*b+j} adds multiples of axes", begin)
        return Linear(tuple(terms.items()), constant)

    # --- axes -------------------------------------------------------------------------------

    def _axes(self) -> tuple[Item, ...]:
        items: list[Item] = []
        while not self._take("]"):
            if self._at >= len(self._text):
                raise self._fail("expected `]` at the end of the axes")
            if self._sees("+"):
                raise self._fail("write concatenated pieces in parentheses: `(q + k)`")
            if self._sees(","):
                raise self._fail("axes are separated by spaces, as in `[i o]`")
            if self._sees("<") or self._sees("["):
                raise self._fail("expected an axis, or `]` at the end of the axes")
            items.append(self._item())
        return tuple(items)

    def _item(self) -> Item:
        self._skip()
        begin = self._at
        if self._take("-"):
            if self._text[begin - 1].isalnum():
                raise self._fail(
                    "put a space before `-`; axis names consist of letters and digits", begin
                )
            item = self._item()
            if not isinstance(item, Axis):
                raise self._fail("only an axis can be reversed", begin)
            return Flip(item)
        if self._take("("):
            return self._composite()
        if self._take(ELLIPSIS):
            return Axis(ELLIPSIS, self._position(begin))
        if self._sees("{"):
            self._take("{")
            choice = self._choice()
            self._expect("}", " at the end of the enumeration")
            return Axis(choice.axis, self._position(begin))
        if self._take("_"):
            if re.compile(r"\w").match(self._text, self._at):
                raise self._fail("the name of an axis begins with a letter", begin)
            return Pad(self._position(begin))
        number = self._match(_INTEGER)
        if number is not None:
            if number != "1":
                raise self._fail(
                    "the only number that can be an axis is 1: name the axis, and give its size "
                    f"after the rule, as in `n={number}`",
                    begin,
                )
            return One()
        return Axis(self._identifier("an axis"), self._position(begin))

    def _composite(self) -> Composite:
        begin = self._at - 1
        segments: list[list[Item]] = [[]]
        while not self._take(")"):
            if self._at >= len(self._text) or self._sees("]"):
                raise self._fail("this parenthesis is not closed", begin)
            if self._take("+"):
                segments.append([])
            else:
                segments[-1].append(self._item())
        if not all(segments):
            raise self._fail("a piece of the sum is empty", begin)
        if any(ELLIPSIS in map(str, axes_of(segment)) for segment in segments):
            raise self._fail("`...` cannot be in parentheses", begin)
        return Composite(tuple(map(tuple, segments)))


def _add(items: list[str | Capture], text: str) -> None:
    if items and isinstance(items[-1], str):
        items[-1] += text
    else:
        items.append(text)
