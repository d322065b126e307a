"""Text for people: untrusted names, shortened; sizes with units; numbers of things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any


def first_few(items: Sequence[object], most: int = 8) -> str:
    """A few numbers, or equally short items, for a message."""
    return ", ".join(map(str, items[:most])) + (", ..." if len(items) > most else "")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines with aligned columns.

    Example:
        >>> aligned([("name", "size"), ("w", "3 GB")])
        ['  name  size', '  w     3 GB']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([c.ljust(n) for c, n in zip(row, widths, strict=True)] for row in rows)
    return [f"  {'  '.join(row)}".rstrip() for row in cells]


_MOST = 120


def quoted(value: object, most: int = _MOST) -> str:
    """The repr of a value; the middle of a long one is omitted.

    Example:
        >>> quoted("abc"), quoted("x" * 100, 20)
        ("'abc'", "'xxxxxxxxx...xxxxxx'")
    """
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or a user's object
        text = f"<{type(value).__name__}>"
    return shortened(text, most)


def changed_repr(obj: Any) -> str:
    """The repr of a dataclass, with only the fields that differ from defaults; never fails."""
    shown = []
    for field in fields(obj):
        value = getattr(obj, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        try:
            if value is not default and value != default:
                shown.append(f"{field.name}={quoted(value)}")
        except Exception:  # from a user's object
            shown.append(f"{field.name}=<{type(value).__name__}>")
    return f"{type(obj).__name__}({', '.join(shown)})"


def printable(text: str, most: int = 400, keep: str = "") -> str:
    """A text, such as a name, for display without quotes: nothing in it ends the line or changes
    the terminal, and the middle of a long one is omitted.

    Arguments:
        text: untrusted.
        most: characters.
        keep: other characters that stay as they are.

    Example:
        >>> printable("a\\nb")
        'a\\\\nb'
    """
    text = shortened(text, most)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def error_text(error: BaseException) -> str:
    """As "StorageError: no space"; never fails.

    Example:
        >>> error_text(ValueError("negative")), error_text(KeyboardInterrupt())
        ('ValueError: negative', 'KeyboardInterrupt')
    """
    message, name = error_message(error), type(error).__name__
    return message if message == name else f"{name}: {message}"


def error_message(error: BaseException) -> str:
    """The text of an error, as far as it can be encoded, or the name of its class; never fails."""
    try:
        text = str(error)
    except Exception:  # of a user's class
        text = ""
    return text.encode(errors="backslashreplace").decode() or type(error).__name__


def shortened(text: str, most: int) -> str:
    """A text of at most `most` characters; the middle of a longer one is omitted."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}...{text[len(text) - most + half + 3 :]}"


def size_text(nbytes: int) -> str:
    """Bytes with a unit.

    Example:
        >>> size_text(12), size_text(2_500_000), size_text(10**30)
        ('12 B', '2.5 MB', '1,000,000,000,000.0 EB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    number = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB", "EB"):
        number /= 1000
        if number < 999.95 or unit == "EB":
            break
    return f"{number:,.1f} {unit}"


def counted(n: int, noun: str, plural: str = "") -> str:
    """A number of things.

    Example:
        >>> counted(1, "array"), counted(2000, "array")
        ('1 array', '2,000 arrays')
    """
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"
