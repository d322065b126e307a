"""Text that others wrote, in messages: never more of it than a person reads."""

from __future__ import annotations

_MOST = 120


def quoted(value: object, most: int = _MOST) -> str:
    """How Python writes a value, with its middle left out where that is long.

    Example:
        >>> quoted("abc"), quoted("x" * 100, 20)
        ("'abc'", "'xxxxxxxxx...xxxxxx'")
    """
    return shortened(repr(value), most)


def shortened(text: str, most: int) -> str:
    """A text with its middle left out where it has more than so many characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}...{text[len(text) - most + half + 3 :]}"
