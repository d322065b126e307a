"""Scan: reads the logical lines of a rule file word by word, and reports errors at their place."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from unickpt.errors import RuleSyntaxError
from unickpt.rules.ast import SourcePosition, syntax_error

IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_SPACE = re.compile(r"[ \t]*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\b(?![./])")
_ARROW = re.compile(r"<?[-=~]*>|<[-=~]+>?|[\u2190-\u21ff\u27f0-\u27ff]|:=?")
_NO_PATTERN = (
    "regular expressions are not supported: `{n}` matches one component of a name, `{m...}` any "
    "number of them"
)


@dataclass(frozen=True)
class LogicalLine:
    """A logical line: the physical lines that were joined to it."""

    text: str
    starts: tuple[tuple[int, int, int, str], ...]  # offset, line number, indentation, its text

    def position(self, file: str, index: int) -> SourcePosition:
        offset, number, cut, text = next(s for s in reversed(self.starts) if s[0] <= index)
        return SourcePosition(file, number, index - offset + cut + 1, text)


def logical_lines(text: str) -> Iterator[LogicalLine]:
    """Lines without comments; an incomplete line is joined with the next one."""
    logical, starts = "", []
    pending: list[tuple[int, str]] = [
        (number, line)
        for number, line in enumerate(textwrap.dedent(text).splitlines(), 1)
        if _without_comment(line).strip()
    ]
    for index, (number, raw) in enumerate(pending):
        line = _without_comment(raw).rstrip()
        stripped = line.lstrip()
        logical += " " if logical else ""
        starts.append((len(logical), number, len(line) - len(stripped), raw.rstrip()))
        logical += stripped
        following = pending[index + 1][1].lstrip() if index + 1 < len(pending) else ""
        if following and (_is_open(logical) or following.startswith(("<->", ",", "="))):
            continue
        yield LogicalLine(logical, tuple(starts))
        logical, starts = "", []


def _without_comment(line: str) -> str:
    return re.sub(r'("(?:[^"\\]|\\.)*")|(?:^|(?<=\s))#.*', lambda match: match[1] or "", line)


def _is_open(text: str) -> bool:
    depth = sum(text.count(c) for c in "[(") - sum(text.count(c) for c in ")]")
    ends = (",", "+", "=") if text.startswith("include ") else ("<->", ",", "+", "=")
    return depth > 0 or text.endswith(ends)


class LineScanner:
    """A place in one logical line.

    Arguments:
        line: the line.
        file: the name of its file, for messages.

    Attributes:
        text: of the line.
        at: how many characters of it are taken.
    """

    def __init__(self, line: LogicalLine, file: str) -> None:
        self._line, self.text, self._file, self.at = line, line.text, file, 0

    def position(self, index: int | None = None) -> SourcePosition:
        """The position of the scanner, or another one in the line."""
        return self._line.position(self._file, self.at if index is None else index)

    def fail(self, message: str, index: int | None = None) -> RuleSyntaxError:
        """The error that shows the place with a caret."""
        return syntax_error(message, self.position(index))

    def skip(self) -> None:
        """Skips to the next character that is no space."""
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def sees(self, text: str) -> bool:
        """Whether a text comes next."""
        self.skip()
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        """Takes a text if it comes next; returns whether it did."""
        if not self.sees(text):
            return False
        self.at += len(text)
        return True

    def expect(self, text: str, why: str = "") -> None:
        """Takes a text, which must come next."""
        if not self.take(text):
            hint = self._no_arrow() if text == "<->" else ""
            raise self.fail(f"expected `{text}`{why}{hint}")

    def _no_arrow(self) -> str:
        """The probable error if `<->` is missing."""
        self.skip()
        before, remaining = self.text[: self.at].rstrip(), self.text[self.at :]
        arrow = _ARROW.match(remaining)
        if arrow or before.endswith(":"):
            wrong = arrow[0] if arrow else ":"
            return f": write it in place of `{wrong}`; a rule serves both directions"
        if remaining.startswith("["):
            return "; put a name with brackets in quotes"
        if remaining.startswith(("(", "?")):
            return f"; {_NO_PATTERN}"
        if remaining.startswith("<"):
            return "; write a capture in braces, such as {l}"
        if remaining:
            return "; write axes in brackets, as in `name [i o]`, and a name with spaces in quotes"
        if " = " in before:
            return "; `=` joins several names of one array on the same side"
        if before.endswith((".rules", ".txt")):
            return "; Rules.load(file) reads a file of rules"
        return ": a rule is `stored name <-> name to load as`"

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Takes a match of a pattern, if it comes next."""
        self.skip()
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def word(self, *words: str) -> str | None:
        """One of some words, if it comes next and is not a name in front of an arrow."""
        self.skip()
        match = _WORD.match(self.text, self.at)
        if match is None or match[0] not in words:
            return None
        self.at = match.end()
        return match[0]

    def identifier(self, what: str) -> str:
        """Takes a word, which must come next."""
        name = self.match(IDENTIFIER)
        if name is None:
            raise self.fail(f"expected {what}")
        return name

    def end(self) -> None:
        """Checks that nothing follows."""
        self.skip()
        remaining = self.text[self.at :]
        if not remaining:
            return
        hint = ""
        if remaining.startswith("<->"):
            hint = "; a rule has one `<->`: a line before this one may lack its second side"
        elif "<->" in remaining:
            hint = "; write each rule on a line of its own"
        elif remaining.startswith(("//", "--", "%")):
            hint = "; a comment begins with `#`"
        raise self.fail(f"this is not expected here{hint}")
