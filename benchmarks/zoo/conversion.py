"""A conversion of somebody else's code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Conversion:
    """A conversion to observe.

    Arguments:
        name: family/model/direction, such as `transformers-flax/bert/to-torch`.
        function: the converter: takes a tree of arrays, returns another.
        example: of its argument; shapes that differ from each other and are greater than 1 tell
            the most.
        inverse: the source's own function for the other direction, if it has one.
    """

    name: str
    function: Callable[[Any], Any]
    example: Any
    inverse: Callable[[Any], Any] | None = None
