"""Name patterns with captures: match whole names, and build names from captures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from unickpt.errors import RuleSyntaxError
from unickpt.rules.ast import (
    Enumeration,
    Linear,
    Name,
    NameCapture,
    SourcePosition,
    Text,
    item_text,
    syntax_error,
)

Components = tuple[str, ...]
_SEPARATORS = "/."
_NUMBER = "(0|[1-9][0-9]{0,17})"
_DIGITS, _COMPONENT = re.compile(_NUMBER), re.compile("[^/.]+")


@dataclass(frozen=True)
class Match:
    """The matches of the captures of a name.

    Arguments:
        texts: the components that each text capture took.
        numbers: the number that each linear capture of the pattern reads, in order.
        chosen: the index of each enumeration's axis.
    """

    texts: tuple[tuple[str, Components], ...]
    numbers: tuple[int, ...]
    chosen: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Pattern:
    """A name whose captures are divided into texts, and numbers that are axes."""

    name: Name

    @property
    def axes(self) -> frozenset[str]:
        """The axes whose indices are in the name."""
        names: set[str] = set()
        for item in self.name.items:
            if isinstance(item, Linear):
                names.update(axis for axis, _ in item.terms)
            elif isinstance(item, Enumeration):
                names.add(item.axis)
        return frozenset(names)

    @property
    def texts(self) -> frozenset[str]:
        """The keys of its text captures."""
        return frozenset(item.key for item in self.name.items if isinstance(item, Text))

    @property
    def linears(self) -> list[Linear]:
        return [item for item in self.name.items if isinstance(item, Linear)]

    @property
    def choices(self) -> list[Enumeration]:
        return [item for item in self.name.items if isinstance(item, Enumeration)]

    @cached_property
    def prefix(self) -> str:
        """The common prefix of all its names."""
        first = self._parts[0][0] if self._parts else ""
        return first if isinstance(first, str) else ""

    @cached_property
    def literal(self) -> bool:
        """Whether it names a single array."""
        return all(isinstance(item, str) for item in self.name.items)

    @cached_property
    def _parts(self) -> list[tuple[str | NameCapture, str]]:
        """The pieces with their separators: those of `Text` may be left out with it."""
        items = list(self.name.items)
        parts: list[tuple[str | NameCapture, str]] = []
        for index, item in enumerate(items):
            if not isinstance(item, Text) or not item.path:
                parts.append((item, ""))
                continue
            after = items[index + 1] if index + 1 < len(items) else ""
            before = parts[-1][0] if parts else ""
            if isinstance(after, str) and after[:1] and after[0] in _SEPARATORS:
                parts.append((item, ">" + after[0]))
                items[index + 1] = after[1:]
            elif isinstance(before, str) and before[-1:] and before[-1] in _SEPARATORS:
                parts[-1] = (before[:-1], "")
                parts.append((item, "<" + before[-1]))
            else:
                parts.append((item, ""))
        return parts

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        text = ""
        for item, separator in self._parts:
            match item:
                case str():
                    text += re.escape(item)
                case Linear():
                    text += _NUMBER
                case Enumeration(_, options, _):
                    text += "(" + "|".join(map(re.escape, options)) + ")"
                case Text(_, False, options):
                    text += f"({'|'.join(map(re.escape, options))})" if options else "([^/.]+)"
                case _:
                    component = "[^/.]+" if separator[1:] == "." else "[^/]+"
                    path = f"({component}(?:{re.escape(separator[1:] or '/')}{component})*)"
                    if separator:
                        edge = re.escape(separator[1:])
                        path = f"(?:{path}{edge})?" if separator[0] == ">" else f"(?:{edge}{path})?"
                    text += path
        return re.compile(text)

    @cached_property
    def _may_hesitate(self) -> bool:
        """Whether the regular expression could try so many ways that `_divided` is faster."""
        items, ambiguous = (*self.name.items, ""), 0
        for item, after in itertools.pairwise(items):
            begins = after[:1] if isinstance(after, str) else "0"
            match item:
                case str():
                    continue
                case Linear():
                    ambiguous += begins.isdigit()
                case Text(_, False, ()):
                    ambiguous += begins not in ("", *_SEPARATORS)
                case Enumeration() | Text(_, False, _):
                    ordered = sorted(item.options)
                    ambiguous += any(b.startswith(a) for a, b in itertools.pairwise(ordered))
        return ambiguous > 1

    def _divided(self, name: str) -> list[str | None] | None:
        """The text of each capture, as by the regular expression, but tries each place once."""
        parts, failed = self._parts, set[tuple[int, int]]()
        starts, tried = [0], [_ends(*parts[0], name, 0)]
        while tried:
            end = next(tried[-1], None)
            if end is None:
                failed.add((len(tried) - 1, starts.pop()))
                tried.pop()
            elif len(tried) == len(parts):
                if end == len(name):
                    return _taken(parts, name, [*starts, end])
            elif (len(tried), end) not in failed:
                starts.append(end)
                tried.append(_ends(*parts[len(tried)], name, end))
        return None

    def check(self) -> None:
        """Refuses patterns that could take one name in two ways.

        Raises:
            RuleSyntaxError: two captures in one component, two with `...`, or one key twice.
        """
        self._check_keys()
        path: Text | None = None
        in_component: Text | None = None
        items = ("", *self.name.items, "")
        for before, item, after in zip(items, items[1:], items[2:], strict=False):
            if isinstance(item, Text) and item.path:
                self._check_whole(item, before, after)
            if isinstance(item, str) and any(s in item for s in _SEPARATORS):
                in_component = None
            elif isinstance(item, Text):
                if path and item.path:
                    raise self._two_paths(path, item)
                if in_component:
                    raise self._one_component(in_component, item)
                in_component, path = item, item if item.path else path

    def _check_keys(self) -> None:
        keys = [i.key for i in self.name.items if isinstance(i, Text) and i.path] + sorted(
            axis for i in self.name.items if isinstance(i, Linear) for axis, _ in i.terms
        )
        for key in keys:
            if keys.count(key) > 1:
                raise syntax_error(f"capture {key!r} occurs twice in one name", self.name.position)

    def _two_paths(self, first: Text, second: Text) -> RuleSyntaxError:
        line = self._rewritten(second, item_text(Text(second.key)))
        return syntax_error(
            f"{item_text(first)} and {item_text(second)} both match any number of components, so "
            "a name could be matched in several ways. If the second is always one "
            f"component, write\n    {line}",
            self._position_of(second),
        )

    def _one_component(self, first: Text, second: Text) -> RuleSyntaxError:
        options = second.options or ("one", "two")
        line = self._rewritten(second, item_text(Enumeration("", options)))
        where = "" if second.options else f"\nwhere {second.key} is `one` or `two`"
        return syntax_error(
            f"{item_text(first)} and {item_text(second)} are in one component, without `/` or "
            "`.` between them, so a name could be matched in several ways. List what one of "
            f"them matches, as in\n    {line}{where}",
            self._position_of(second),
        )

    def _rewritten(self, capture: Text, text: str) -> str:
        """The line with another text for a capture, wherever it occurs."""
        dots = r"\.\.\." if capture.path else ""
        written = rf"\{{\s*{capture.key}\s*{dots}(?:=[^}}]*)?\}}"
        return re.sub(written, lambda _: text, self.name.position.text).strip()

    def _position_of(self, capture: NameCapture) -> SourcePosition:
        """The position of a capture; if that is not certain, the position of the whole name."""
        position = self.name.position
        before = self.name.items[: self.name.items.index(capture)]
        quote = position.text.startswith('"', position.column - 1)
        column = position.column + quote + len("".join(map(item_text, before)))
        certain = position.text.startswith("{", column - 1)
        return replace(position, column=column) if certain else position

    def _check_whole(self, item: Text, before: str | NameCapture, after: str | NameCapture) -> None:
        for neighbour, end in ((before, -1), (after, 0)):
            if not isinstance(neighbour, str) or neighbour[end:][:1] not in ("", *_SEPARATORS):
                raise syntax_error(
                    f"{{{item.key}...}} matches whole components, so `/` or `.` must be around it; "
                    f"for a part of the next one, write {{{item.key}...}}/{{n}}",
                    self.name.position,
                )

    def match(self, name: str) -> Match | None:
        """The captures of a whole name; None if it does not match."""
        if self._may_hesitate:
            all_taken = self._divided(name)
        else:
            match = self._regex.fullmatch(name)
            all_taken = None if match is None else list(match.groups())
        if all_taken is None:
            return None
        texts: list[tuple[str, Components]] = []
        numbers: list[int] = []
        chosen: list[tuple[str, int]] = []
        groups = iter(all_taken)
        for item, separator in self._parts:
            if isinstance(item, str):
                continue
            text = next(groups)
            if text is None:
                assert isinstance(item, Text), "nothing else may be left out"
                texts.append((item.key, ()))
                continue
            match item:
                case Linear():
                    numbers.append(int(text))
                case Enumeration(axis, options, _):
                    chosen.append((axis, options.index(text)))
                case Text(key, False):
                    texts.append((key, (text,)))
                case Text(key):
                    texts.append((key, tuple(text.split(separator[1:] or "/"))))
        keyed = dict(texts)
        if any(keyed[key] != text for key, text in texts):
            return None  # `{l}` twice must be the same both times
        return Match(tuple(sorted(keyed.items())), tuple(numbers), tuple(chosen))

    def format(self, texts: Mapping[str, Components], indices: Mapping[str, int]) -> str:
        """The name for given captures."""
        out = ""
        for item, separator in self._parts:
            match item:
                case str():
                    out += item
                case Linear(terms, constant):
                    out += str(sum(indices[axis] * factor for axis, factor in terms) + constant)
                case Enumeration(axis, options, _):
                    out += options[indices[axis]]
                case Text(key, False):
                    out += texts[key][0]
                case Text(key):
                    path = (separator[1:] or "/").join(texts[key])
                    if path and separator:
                        path = path + separator[1:] if separator[0] == ">" else separator[1:] + path
                    out += path
        return out


def _ends(part: str | NameCapture, separator: str, name: str, start: int) -> Iterator[int]:
    """The possible ends of a pattern's piece that begins at a place of a name; likeliest first."""
    match part:
        case str():
            options: tuple[str, ...] = (part,)
        case Enumeration() | Text():
            options = part.options
        case Linear():
            options = ()
    if options:
        yield from (start + len(text) for text in options if name.startswith(text, start))
    elif isinstance(part, Text) and part.path:
        edge = separator[1:]
        after, begin = separator[:1] == ">", start + (separator[:1] == "<")
        if begin == start or name.startswith(edge, start):
            component = "[^/.]+" if edge == "." else "[^/]+"
            run = re.compile(f"{component}(?:{re.escape(edge or '/')}{component})*").match(
                name, begin
            )
            for end in range(run.end() if run else begin, begin, -1):
                if name[end - 1] != (edge or "/") and (not after or name.startswith(edge, end)):
                    yield end + after
        if separator:
            yield start
    else:
        run = (_COMPONENT if isinstance(part, Text) else _DIGITS).match(name, start)
        yield from range(run.end() if run else start, start, -1)


def _taken(
    parts: list[tuple[str | NameCapture, str]], name: str, ends: list[int]
) -> list[str | None]:
    """The text of each capture, without its separator; None for a path that is left out."""
    captures: list[str | None] = []
    for (part, separator), start, end in zip(parts, ends, ends[1:], strict=False):
        if not isinstance(part, str):
            text = name[start + (separator[:1] == "<") : end - (separator[:1] == ">")]
            captures.append(text if start < end else None)
    return captures


def solve_linear(linear: Linear, number: int, sizes: Mapping[str, int]) -> dict[str, int] | None:
    """The indices of axes that give a number; None if none in their ranges do.

    Arguments:
        linear: the sum of multiples of axes.
        number: the expected sum.
        sizes: extents of axes; those not given are bounded by the next larger multiple alone.

    Example:
        >>> solve_linear(Linear((("b", 6), ("j", 1))), 13, {"j": 6})
        {'b': 2, 'j': 1}
        >>> solve_linear(Linear((("j", -1),), 3), 1, {})
        {'j': 2}
    """
    remainder = number - linear.constant
    indices: dict[str, int] = {}
    for axis, factor in sorted(linear.terms, key=lambda term: -term[1]):
        index, remainder = divmod(remainder, factor)
        if index < 0 or index >= sizes.get(axis, index + 1):
            return None
        indices[axis] = index
    return indices if remainder == 0 else None


def is_ambiguous(linear: Linear, sizes: Mapping[str, int]) -> bool:
    """Whether two different sets of indices give the same number."""
    reach = 0
    for axis, factor in sorted(linear.terms, key=lambda term: term[1]):
        if abs(factor) <= reach:
            return True
        reach += abs(factor) * (sizes.get(axis, 1) - 1)
    return False
