"""Lines of a rule file: without comments, and each whole, however many lines it is written in."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from unickpt.rules.ast import Position


@dataclass(frozen=True)
class LogicalLine:
    """A logical line: the physical lines that it was put together from."""

    text: str
    starts: tuple[tuple[int, int, int, str], ...]  # offset, line number, indentation, its text

    def position(self, file: str, at: int) -> Position:
        offset, number, cut, text = next(s for s in reversed(self.starts) if s[0] <= at)
        return Position(file, number, at - offset + cut + 1, text)


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
