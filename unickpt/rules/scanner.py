"""Scan: the lines of a rule file, each whole, word by word; says what is wrong where it stands."""

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
    """A logical line: the physical lines that it was put together from."""

    text: str
    starts: tuple[tuple[int, int, int, str], ...]  # offset, line number, indentation, its text

    def position(self, file: str, at: int) -> SourcePosition:
        offset, number, cut, text = next(s for s in reversed(self.starts) if s[0] <= at)
        return SourcePosition(file, number, at - offset + cut + 1, text)


def logical_lines(text: str) -> Iterator[LogicalLine]:
    """Lines without comments; one that is not complete takes the next one along."""
    held, starts = "", []
    pending: list[tuple[int, str]] = [
        (number, line)
        for number, line in enumerate(textwrap.dedent(text).splitlines(), 1)
        if _without_comment(line).strip()
    ]
    for at, (number, raw) in enumerate(pending):
        line = _without_comment(raw).rstrip()
        stripped = line.lstrip()
        held += " " if held else ""
        starts.append((len(held), number, len(line) - len(stripped), raw.rstrip()))
        held += stripped
        following = pending[at + 1][1].lstrip() if at + 1 < len(pending) else ""
        if following and (_is_open(held) or following.startswith(("<->", ",", "="))):
            continue
        yield LogicalLine(held, tuple(starts))
        held, starts = "", []


def _without_comment(line: str) -> str:
    return re.sub(r'("(?:[^"\\]|\\.)*")|(?:^|(?<=\s))#.*', lambda found: found[1] or "", line)


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

    def position(self, at: int | None = None) -> SourcePosition:
        """Where the scanner is, or another place of the line."""
        return self._line.position(self._file, self.at if at is None else at)

    def fail(self, message: str, at: int | None = None) -> RuleSyntaxError:
        """The error that shows the place with a caret."""
        return syntax_error(message, self.position(at))

    def skip(self) -> None:
        """Goes to the next character that is no space."""
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

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
        """What probably went wrong where `<->` is missing."""
        self.skip()
        before, rest = self.text[: self.at].rstrip(), self.text[self.at :]
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

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Takes what matches a pattern, if it comes next."""
        self.skip()
        found = pattern.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def word(self, *words: str) -> str | None:
        """One of some words, if it comes next and is not a name in front of an arrow."""
        self.skip()
        found = _WORD.match(self.text, self.at)
        if found is None or found[0] not in words:
            return None
        self.at = found.end()
        return found[0]

    def identifier(self, what: str) -> str:
        """Takes a word, which must come next."""
        found = self.match(IDENTIFIER)
        if found is None:
            raise self.fail(f"expected {what}")
        return found

    def end(self) -> None:
        """Makes sure that nothing comes after this."""
        self.skip()
        rest = self.text[self.at :]
        if not rest:
            return
        hint = ""
        if rest.startswith("<->"):
            hint = "; a rule has one `<->`: a line before this one may lack its second side"
        elif "<->" in rest:
            hint = "; write each rule on a line of its own"
        elif rest.startswith(("//", "--", "%")):
            hint = "; a comment begins with `#`"
        raise self.fail(f"this is not expected here{hint}")
