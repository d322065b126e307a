"""Blocks: sets of elements whose places on both sides are linear in the digits of one number.

`[h d e]` and `[e (h d)]` have one block, with the digits `h`, `d`, `e`; `[(q + k) e]` has two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unickpt.extend import Array

_MOST_BLOCKS = 64
_MOST_CUTS = 64


class Irregular(ValueError):
    """Why elements are not where rules can say."""


@dataclass(frozen=True)
class Block:
    """Elements in the order of the left side.

    Arguments:
        first: the coordinates of the first one.
        digits: of the number of an element, outermost first: radix, and step of each coordinate.
    """

    first: tuple[int, ...]
    digits: tuple[tuple[int, tuple[int, ...]], ...]


def blocks_of(rows: Array, left: int) -> list[Block]:
    """As few blocks as are found.

    Arguments:
        rows: for each element its coordinates, those of the left side first; in order of these.
        left: how many of the coordinates are those of the left side.

    Raises:
        Irregular: they are too many, so this is no order that axes give.
    """
    blocks: list[Block] = []
    open_rows = [rows]
    while open_rows:
        part = open_rows.pop()
        if len(blocks) >= _MOST_BLOCKS:
            raise Irregular("its elements are in an order that no axes give")
        block = _nested(part)
        if block is not None:
            blocks.append(block)
            continue
        begin, end = _parted(part, left)
        open_rows += [end, begin]
    return blocks


def combined(blocks: list[Block]) -> list[Block]:
    """Blocks, where those that repeat at regular distances on both sides are merged into one.

    Heads that each have a query, a key and a value begin as one block for each head and kind. They
    become one for each kind, if the other side has them so.
    """
    current = list(blocks)
    while True:
        alike: dict[object, list[Block]] = {}
        for block in current:
            alike.setdefault(block.digits, []).append(block)
        joined = [block for members in alike.values() for block in _repeated(members)]
        if len(joined) == len(current):
            return current
        current = joined


def _repeated(blocks: list[Block]) -> list[Block]:
    """Equal blocks as one with a further digit, or as one for each of the first digits."""
    ordered = sorted(blocks, key=lambda block: block.first)
    digit = _digit(np.asarray([block.first for block in ordered], np.int64))
    if digit is None:
        return ordered
    return [Block(block.first, (digit, *block.digits)) for block in ordered[:: digit[0]]]


def _nested(rows: Array) -> Block | None:
    """The elements as one block, if they are one."""
    first = tuple(map(int, rows[0]))
    digits: list[tuple[int, tuple[int, ...]]] = []
    while len(rows) > 1:
        digit = _digit(rows)
        if digit is None:
            return None
        digits.append(digit)
        rows = rows[:: digit[0]]
    return Block(first, tuple(reversed(digits)))


def _digit(rows: Array) -> tuple[int, tuple[int, ...]] | None:
    """The innermost digit of rows, radix and step; None if there is none."""
    steps = np.diff(rows, axis=0)
    if not len(steps):
        return None
    breaks = np.flatnonzero((steps != steps[0]).any(axis=1))
    radix = len(rows) if not len(breaks) else int(breaks[0]) + 1
    within = np.ones(len(steps), bool)  # runs of as many rows as the radix is
    within[radix - 1 :: radix] = False
    if len(rows) % radix or (steps[within] != steps[0]).any():
        return None
    return radix, tuple(map(int, steps[0]))


def _parted(rows: Array, left: int) -> tuple[Array, Array]:
    """The elements in two parts, cut along one coordinate; the first part is a block."""
    for coordinate in range(left):
        for cut in _cuts(rows, coordinate):
            is_before = rows[:, coordinate] < cut
            before = rows[is_before]
            if _nested(before) is not None:
                return before, rows[~is_before]
    raise Irregular("its elements are in an order that no axes give")


def _cuts(rows: Array, coordinate: int) -> list[int]:
    """Where another block may begin along a coordinate, the largest first."""
    values, counts = np.unique(rows[:, coordinate], return_counts=True)
    if len(values) < 2:
        return []
    order = np.argsort(rows[:, coordinate], kind="stable")
    runs = np.split(rows[order], np.cumsum(counts)[:-1])
    cuts, before = [], None
    for value, run, next_run in zip(values[1:], runs, runs[1:], strict=False):
        step = None if run.shape != next_run.shape else next_run - run
        if step is None or (step != step[0]).any():
            cuts.append(int(value))
            before = None
            continue
        if before is not None and (step[0] != before).any():
            cuts.append(int(value))
        before = step[0] if before is None or (step[0] == before).all() else None
    return cuts[:_MOST_CUTS][::-1]
