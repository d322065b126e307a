"""Functions in Python for what the notation cannot express; they declare their input region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array


def _same_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    return shapes[0]


@dataclass(frozen=True)
class Function:
    """A function of arrays that a rule names: `a [v e] <-> b [v e] via name`.

    Without `region`, it works element by element: axes are moved as the rule says, and the function
    gets the result. With it, the function gets parts of the stored arrays as they are stored,
    and the axes of the rule only say what shapes there are.

    Arguments:
        apply: makes a box of the array: called with the box and with NumPy arrays, one for each
            array on the other side; returns an array of the box's shape.
        region: which box of each input a box of the array needs: called with the box and the
            shapes of all inputs.
        shape: with `region`, the array's shape, called with those of the inputs. Without it, the
            first one's.
        inverse: the function of the other direction; None where there is none.

    Example:
        >>> double = Function(lambda box, x: x * 2)
        >>> halve = Function(lambda box, x: x / 2, inverse=double)
    """

    apply: Callable[..., Array]
    region: Callable[..., Sequence[Box]] | None = None
    shape: Callable[..., tuple[int, ...]] = _same_shape
    inverse: Function | None = None
