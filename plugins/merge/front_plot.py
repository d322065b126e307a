"""The scores of trials on two tasks, as a drawing; those on the Pareto front are joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from unickpt.extend import shortened

_WIDTH, _HEIGHT, _MARGIN = 420, 280, 44
_MOST = 2000
"""Points; of more the first."""


def svg(
    axes: Sequence[str], points: Sequence[Sequence[float]], front: Sequence[int], chosen: int
) -> str:
    """A drawing, readable on light and on dark pages.

    Arguments:
        axes: the names of the two tasks.
        points: the scores of each trial; those that are not finite are left out.
        front: the numbers of the trials on the front.
        chosen: the number of the one to mark.

    Example:
        >>> svg(["math", "code"], [[0.5, 0.2], [0.1, 0.9]], [0, 1], 1).count("<circle")
        2
    """
    finite = {n: p for n, p in enumerate(points[:_MOST]) if all(map(math.isfinite, p))}
    if not finite:
        return ""
    places = [_Scale([p[axis] for p in finite.values()]) for axis in (0, 1)]

    def position(number: int) -> tuple[float, float]:
        x, y = (places[axis](finite[number][axis]) for axis in (0, 1))
        wide, high = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
        return _MARGIN + x * wide, _HEIGHT - _MARGIN - y * high

    on_front = sorted((n for n in front if n in finite), key=lambda n: finite[n][0])
    line = " ".join("{:.1f},{:.1f}".format(*position(n)) for n in on_front)
    dots = "".join(_dot(*position(n), n in set(on_front), n == chosen) for n in finite)
    low, high = _MARGIN - 8, _HEIGHT - _MARGIN + 8
    names = [escape(shortened(name, 40)) for name in axes]
    limits = [f"{f(p[axis] for p in finite.values()):.4g}" for axis in (0, 1) for f in (min, max)]
    text = 'font-size="11" fill="currentColor"'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">'
        f"<title>{names[0]} and {names[1]} of each trial</title>"
        f'<path d="M{low},{low}V{high}H{_WIDTH - low}" fill="none" stroke="currentColor" '
        'opacity=".4"/>'
        f'<polyline points="{line}" fill="none" stroke="#2a7ae2" opacity=".6"/>{dots}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle" {text}>{names[0]}</text>'
        f'<text transform="translate(12 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle" {text}>'
        f"{names[1]}</text>"
        f'<text x="{_MARGIN}" y="{high + 14}" {text}>{limits[0]}</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{high + 14}" text-anchor="end" {text}>{limits[1]}</text>'
        f'<text x="{low - 4}" y="{_HEIGHT - _MARGIN}" text-anchor="end" {text}>{limits[2]}</text>'
        f'<text x="{low - 4}" y="{_MARGIN + 4}" text-anchor="end" {text}>{limits[3]}</text>'
        "</svg>"
    )


class _Scale:
    """Maps a range of values onto 0 to 1; onto the middle if there is only one."""

    def __init__(self, values: Sequence[float]) -> None:
        self._low = min(values)
        self._range = max(values) - self._low

    def __call__(self, value: float) -> float:
        return (value - self._low) / self._range if self._range else 0.5


def _dot(x: float, y: float, on_front: bool, is_chosen: bool) -> str:
    color, size = ("#2a7ae2", 4) if on_front else ("currentColor", 2.5)
    ring = ' stroke="#d33" stroke-width="2"' if is_chosen else ""
    strong = 1 if on_front else 0.45
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{color}" opacity="{strong}"{ring}/>'
