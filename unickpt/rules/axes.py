"""Axes: the factors of an array's dimensions, their sizes, and the place of an index.

An array's dimensions are products and sums of axes. Once a segment is chosen in each sum, every
dimension is a mixed-radix number with an axis for each digit: a *block* of the array, which is a
box of axes. Rules pair the blocks of both sides by their axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from unickpt.arrays.index_map import Digit, Dim
from unickpt.rules.ast import ELLIPSIS, Axis, AxisGroup, AxisItem, Flip, Pad

PAD = "_"


def axes_of(items: Sequence[AxisItem]) -> Iterator[Axis]:
    """All axes in order, as often as they occur."""
    for item in items:
        match item:
            case Axis():
                yield item
            case Flip(inner):
                yield from axes_of([inner])
            case AxisGroup(segments):
                for segment in segments:
                    yield from axes_of(segment)


def name_pads(items: Sequence[AxisItem], tag: str) -> tuple[AxisItem, ...]:
    """Axes, with each pad as a separate axis.

    Arguments:
        items: of an expression.
        tag: distinguishes their pads from those of other expressions.
    """
    counter = itertools.count()

    def named(item: AxisItem) -> AxisItem:
        match item:
            case Pad(position):
                return Axis(f"{PAD}{tag}{next(counter)}", position)
            case AxisGroup(segments):
                return AxisGroup(tuple(tuple(map(named, segment)) for segment in segments))
        return item

    return tuple(map(named, items))


def expand(items: Sequence[AxisItem], rank: int) -> tuple[AxisItem, ...]:
    """Axes, with `...` expanded to so many axes."""
    out: list[AxisItem] = []
    for item in items:
        match item:
            case Axis(name, position) if name == ELLIPSIS:
                out += [Axis(f"{ELLIPSIS}{i}", position) for i in range(rank)]
            case Flip(Axis(name, position)) if name == ELLIPSIS:
                out += [Flip(Axis(f"{ELLIPSIS}{i}", position)) for i in range(rank)]
            case _:
                out.append(item)
    return tuple(out)


def is_pad(axis: str) -> bool:
    """Whether an axis is a pad."""
    return axis.startswith(PAD)


def has_pad(items: Sequence[AxisItem]) -> bool:
    """Whether there is a pad among the axes."""
    return any(is_pad(axis.name) for axis in axes_of(items))


# --- blocks -----------------------------------------------------------------------------------

SegmentChoice = tuple[int, ...]
"""The chosen segment of each sum that is reached, in the order of the text."""


def choices(items: Sequence[AxisItem]) -> list[SegmentChoice]:
    """All ways to choose a segment in each sum, sums within segments included."""
    return [sum(parts, ()) for parts in itertools.product(*map(_item_choices, items))]


def count_choices(items: Sequence[AxisItem]) -> int:
    """How many `choices` there are."""
    sums = (item.segments for item in items if isinstance(item, AxisGroup))
    return math.prod(sum(map(count_choices, segments)) for segments in sums)


def _item_choices(item: AxisItem) -> list[SegmentChoice]:
    if not isinstance(item, AxisGroup):
        return [()]
    return [(k, *inner) for k, segment in enumerate(item.segments) for inner in choices(segment)]


def block_axes(items: Sequence[AxisItem], choice: SegmentChoice) -> list[Axis]:
    """The axes of a block, as often as they occur in it."""
    picked = iter(choice)
    return [axis for item in items for axis in _chosen_axes(item, picked)]


def _chosen_axes(item: AxisItem, picked: Iterator[int]) -> Iterator[Axis]:
    match item:
        case Axis():
            yield item
        case Flip(inner):
            yield from _chosen_axes(inner, picked)
        case AxisGroup(segments):
            for inner in segments[next(picked)]:
                yield from _chosen_axes(inner, picked)


# --- sizes ------------------------------------------------------------------------------------


class DoesNotFit(ValueError):
    """Why sizes do not fit."""


def _other_size(item: AxisItem | str, extent: int, elsewhere: int) -> str:
    return f"{item} has {extent} elements here, but {elsewhere} elsewhere"


def size_of(item: AxisItem, sizes: Mapping[str, int]) -> int | None:
    """The extent of an item; None if it is not known yet."""
    match item:
        case Axis(name, _):
            return sizes.get(name)
        case Flip(inner):
            return size_of(inner, sizes)
        case AxisGroup(segments):
            total = 0
            for segment in segments:
                extents = [size_of(i, sizes) for i in segment]
                if None in extents:
                    return None
                total += math.prod(e for e in extents if e is not None)
            return total
    return 1


def solve(item: AxisItem, extent: int, sizes: dict[str, int]) -> bool:
    """Finds sizes of axes from the extent of their product or sum.

    Returns:
        Whether anything became known.

    Raises:
        DoesNotFit: no sizes make it fit.
    """
    match item:
        case Axis(name, _):
            size = sizes.get(name)
            if size is None:
                sizes[name] = extent
                return True
            if size != extent:
                if name.startswith(ELLIPSIS):
                    name = f"unnamed dimension {name.removeprefix(ELLIPSIS)}"
                raise DoesNotFit(_other_size(name, extent, size))
            return False
        case Flip(inner):
            return solve(inner, extent, sizes)
        case AxisGroup(segments):
            return _solve_sum(item, segments, extent, sizes)
    if extent != 1:
        raise DoesNotFit(f"there are {extent} elements where the rule says 1")
    return False


def _solve_sum(
    item: AxisItem, segments: Sequence[Sequence[AxisItem]], extent: int, sizes: dict[str, int]
) -> bool:
    remainder, open_segments = extent, []
    for segment in segments:
        size = size_of(AxisGroup((tuple(segment),)), sizes) if len(segments) > 1 else None
        if size is None:
            open_segments.append(segment)
        else:
            remainder -= size
    if remainder < 0 or (not open_segments and remainder):
        raise DoesNotFit(_other_size(item, extent, extent - remainder))
    if len(open_segments) != 1:
        return False
    return _solve_product(item, open_segments[0], remainder, sizes)


def _solve_product(
    whole: AxisItem, items: Sequence[AxisItem], extent: int, sizes: dict[str, int]
) -> bool:
    product = 1
    unknown = []
    for item in items:
        size = size_of(item, sizes)
        if size is None:
            unknown.append(item)
        else:
            product *= size
    if not unknown:
        if product != extent:
            raise DoesNotFit(_other_size(whole, extent, product))
        return False
    if product == 0 or len(unknown) > 1:
        return False
    if extent % product:
        raise DoesNotFit(f"{whole}: {extent} elements are not a multiple of {product}")
    return solve(unknown[0], extent // product, sizes)


def always_followed(axis: str, exprs: Sequence[Sequence[AxisItem]]) -> bool:
    """Whether an axis always comes directly before one other."""
    every = [a.name for items in exprs for a in axes_of(items)]
    pairs = [
        (first.name, second.name)
        for items in exprs
        for product in _products(items)
        for first, second in itertools.pairwise(product)
        if isinstance(first, Axis) and isinstance(second, Axis)
    ]
    followers = {second for first, second in pairs if first == axis}
    return len(followers) == 1 and all(
        every.count(name) == pairs.count((axis, follower))
        for follower in followers
        for name in (axis, follower)
    )


def _products(items: Sequence[AxisItem]) -> Iterator[Sequence[AxisItem]]:
    for item in items:
        if isinstance(item, AxisGroup):
            for segment in item.segments:
                yield segment
                yield from _products(segment)


# --- sized --------------------------------------------------------------------------------------


def dims_of(
    items: Sequence[AxisItem],
    choice: SegmentChoice,
    sizes: Mapping[str, int],
    numbers: Mapping[str, int],
    fixed: Mapping[str, int],
) -> tuple[Dim, ...]:
    """The dimensions of a block.

    Arguments:
        items: of the expression, expanded.
        choice: the segments of the block.
        sizes: of all axes.
        numbers: the axes that are free, with their numbers.
        fixed: the index of each other axis.
    """
    picked = iter(choice)

    def digit(item: AxisItem, reverse: bool = False) -> Digit:
        match item:
            case Axis(name, _) if name in fixed:
                size = sizes[name]
                index = fixed[name]
                return Digit(size, size - 1 - index if reverse else index, 1, None)
            case Axis(name, _):
                return Digit(sizes[name], 0, sizes[name], numbers[name], reverse)
            case Flip(inner):
                return digit(inner, True)
            case AxisGroup(segments):
                chosen = next(picked)
                extents = [size_of(AxisGroup((s,)), sizes) or 0 for s in segments]
                inner_digits = tuple(digit(i) for i in segments[chosen])
                return Digit(sum(extents), sum(extents[:chosen]), extents[chosen], inner_digits)
        return Digit(1, 0, 1, None)

    return tuple((digit(item),) for item in items)
