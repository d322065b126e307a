"""Shapes of arrays by name: short ways to write those of models."""

from __future__ import annotations

import itertools

Shapes = dict[str, tuple[int, ...]]


def layers(count: int, names: Shapes) -> Shapes:
    """Names with `{n}` for each layer, and their shapes."""
    return {name.format(n=n): names[name] for n, name in itertools.product(range(count), names)}


def both(name: str, rows: int, *columns: int) -> Shapes:
    """The weight and the bias of a linear layer, a convolution or a norm."""
    return {f"{name}.weight": (rows, *columns), f"{name}.bias": (rows,)}


def prefixed(prefix: str, names: Shapes) -> Shapes:
    """The same arrays, within something."""
    return {prefix + name: shape for name, shape in names.items()}


def each(pattern: str, options: str, names: Shapes) -> Shapes:
    """Names after `{x}` for each option, which are separated by spaces."""
    return {pattern.format(x=x) + name: names[name] for x in options.split() for name in names}
