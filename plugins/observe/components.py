"""Components: arrays of both sides that share elements, and the rule for them.

Arrays whose names differ only in numbers are taken together: the numbers are coordinates as well.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.extend import Array
from unickpt.plugins.observe.element_codes import Traced
from unickpt.plugins.observe.fitting import ArrayGroup, Draft, Fit, Pieced, Term
from unickpt.plugins.observe.regular_blocks import Block, Irregular, blocks_of, combined

_SOURCE_BITS = 40  # of an index; an example has fewer elements
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]*)(?![0-9])")


@dataclass(frozen=True)
class Input:
    """An input of a converter: its name, shape and the name of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def drafts(
    inputs: Sequence[Input],
    outputs: Sequence[Traced],
    together: Callable[[str], str] | None = None,
) -> Iterator[Draft | ComponentMisfit]:
    """The rules for all outputs that are made from inputs, in the order of the inputs.

    Arguments:
        inputs: all inputs.
        outputs: those that are made from inputs.
        together: the common part of names of outputs that shall be in one rule, if axes allow it,
            also if they share no input.
    """
    for lefts, rights in _components(len(inputs), outputs, together):
        try:
            yield from list(_draft(inputs, lefts, [outputs[number] for number in rights]))
            continue
        except Irregular as error:
            why = str(error)
        if together is None:
            names = [inputs[number].name for number in lefts]
            alone = [number for number in rights if _has_copies(outputs[number])] or rights
            yield ComponentMisfit(names, [outputs[number].name for number in alone], why)
            # The inputs of an array with copies may be in others unchanged.
            yield from drafts(inputs, [outputs[number] for number in rights if number not in alone])
        else:
            yield from drafts(inputs, [outputs[number] for number in rights])


@dataclass(frozen=True)
class ComponentMisfit:
    """Arrays for which no rule was found: the names of both sides, and why."""

    left: Sequence[str]
    right: Sequence[str]
    why: str


def _components(
    count: int, outputs: Sequence[Traced], together: Callable[[str], str] | None
) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and outputs that share elements, or belong together by their names."""
    parent = list(range(count + len(outputs)))

    def find(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    first: dict[str, int] = {}
    for number, output in enumerate(outputs):
        for source in output.sources:
            parent[find(count + number)] = find(source)
        if together is not None:
            other = first.setdefault(together(output.name), count + number)
            parent[find(count + number)] = find(other)
    components: dict[int, tuple[list[int], list[int]]] = {}
    for node in range(count):
        components.setdefault(find(node), ([], []))[0].append(node)
    for number in range(len(outputs)):
        root = find(count + number)
        if root in components:
            components[root][1].append(number)
    yield from (pair for pair in components.values() if pair[1])


def _draft(
    every: Sequence[Input], lefts: Sequence[int], outputs: Sequence[Traced]
) -> Iterator[Draft]:
    inputs = [(number, every[number]) for number in lefts]
    if len(inputs) == len(outputs) == 1 and _is_whole(inputs[0][1], outputs[0]):
        yield _whole(inputs[0][1], outputs[0])
        return
    left = _grouped([(number, source.name, source.shape) for number, source in inputs])
    right = [
        group
        for together in _copies(outputs)
        for group in _grouped(
            [(number, outputs[number].name, outputs[number].shape) for number in together]
        )
    ]
    if any(map(_has_copies, outputs)):
        raise Irregular("an element is copied to several places of one array")
    pieces = list(_pieces(left, right, outputs))
    try:
        yield from list(Fit(left, right, pieces).drafts())
    except Irregular:
        fewer = list(_repeated(pieces))
        if len(fewer) == len(pieces):
            raise
        yield from Fit(left, right, fewer).drafts()


def _is_whole(source: Input, output: Traced) -> bool:
    return (
        source.shape == output.shape
        and bool((output.scale == 1).all() and (output.offset == 0).all())
        and np.array_equal(output.index, np.arange(output.index.size))
    )


def _whole(source: Input, output: Traced) -> Draft:
    return Draft(
        [Term((source.name,), [], frozenset({0}), frozenset({source.name}))],
        [[Term((output.name,), [], frozenset({0}), frozenset({output.name}))]],
        is_whole=True,
        shape=source.shape,
    )


def _has_copies(output: Traced) -> bool:
    """Whether an element of an input is more than once in an output."""
    is_element = output.source >= 0
    index = output.index[is_element].astype(np.int64)
    places = output.source[is_element].astype(np.int64) * (int(index.max(initial=0)) + 1) + index
    return len(np.unique(places)) < places.size


def _copies(outputs: Sequence[Traced]) -> list[list[int]]:
    """Outputs in groups: the first ones of those with the same elements, the second ones, ..."""
    seen: dict[bytes, int] = {}
    groups: list[list[int]] = []
    for number, output in enumerate(outputs):
        key = hashlib.sha256(np.sort((output.source << _SOURCE_BITS) + output.index).data).digest()
        count = seen[key] = seen.get(key, -1) + 1
        if count == len(groups):
            groups.append([])
        groups[count].append(number)
    return groups


def _grouped(arrays: Sequence[tuple[int, str, tuple[int, ...]]]) -> list[ArrayGroup]:
    """Arrays of equal shape whose names differ only in numbers, together."""
    by_text: dict[tuple[tuple[str, ...], tuple[int, ...]], list[tuple[int, list[str]]]] = {}
    for number, name, shape in arrays:
        pieces = _NUMBER.split(name)
        by_text.setdefault((tuple(pieces[::2]), shape), []).append((number, pieces))
    groups = []
    for (_, shape), members in by_text.items():
        varying = {
            place
            for place in range(1, len(members[0][1]), 2)
            if len({pieces[place] for _, pieces in members}) > 1
        }
        texts: list[str | None] = [""]
        for place, text in enumerate(members[0][1]):
            if place in varying:
                texts += [None, ""]
            else:
                texts[-1] = f"{texts[-1]}{text}"
        numbers = {
            number: tuple(int(pieces[place]) for place in sorted(varying))
            for number, pieces in members
        }
        names = ["".join(pieces) for _, pieces in members]
        groups.append(ArrayGroup(tuple(texts), numbers, shape, names))
    return groups


def _pieces(
    left: Sequence[ArrayGroup], right: Sequence[ArrayGroup], outputs: Sequence[Traced]
) -> Iterator[Pieced]:
    """The blocks that each two groups share."""
    of_left = {member: number for number, group in enumerate(left) for member in group.members}
    for number, group in enumerate(right):
        rows = _rows(group, outputs, of_left, left)
        if any(count > 8 for count in Counter(source for source, *_ in rows).values()):
            raise Irregular("its elements are scaled by many numbers")
        for (source, scale, offset), together in rows.items():
            width = left[source].width
            order = np.lexsort(together[:, :width].T[::-1]) if width else slice(None)
            for block in blocks_of(together[order], width):
                yield Pieced(source, number, block, scale, offset)


def _repeated(pieces: Sequence[Pieced]) -> Iterator[Pieced]:
    """Blocks, where those that repeat on both sides are merged into one."""
    by_key: dict[tuple[int, int, float, float], list[Block]] = {}
    for piece in pieces:
        key = piece.left, piece.right, piece.scale, piece.offset
        by_key.setdefault(key, []).append(piece.block)
    for (left, right, scale, offset), blocks in by_key.items():
        for block in combined(blocks):
            yield Pieced(left, right, block, scale, offset)


def _rows(
    group: ArrayGroup,
    outputs: Sequence[Traced],
    of_left: Mapping[int, int],
    left: Sequence[ArrayGroup],
) -> dict[tuple[int, float, float], Array]:
    """The coordinates of the elements of a group on both sides, by where they come from."""
    rows: dict[tuple[int, float, float], list[Array]] = {}
    for member in group.members:
        output = outputs[member]
        scales, offsets = _rounded(output.scale), _rounded(output.offset)
        for source in output.sources:
            mine, origin = output.source == source, of_left[source]
            pairs = np.stack([scales[mine], offsets[mine]], 1)
            for scale, offset in np.unique(pairs, axis=0).tolist():
                positions = np.flatnonzero(mine & (scales == scale) & (offsets == offset))
                columns = [
                    *left[origin].coordinates(source, output.index[positions]),
                    *group.coordinates(member, positions),
                ]
                rows.setdefault((origin, scale, offset), []).append(
                    np.stack(columns, 1) if columns else np.zeros((len(positions), 0), np.int64)
                )
    return {key: np.concatenate(chunks) for key, chunks in rows.items()}


def _rounded(values: Array) -> Array:
    """Scales that differ only by rounding, as one: their median, or the whole number close by."""
    if not values.size:
        return values
    distinct = np.unique(values)
    with np.errstate(all="ignore"):
        is_next = np.diff(distinct) > 2e-5 * np.maximum(np.abs(distinct[1:]), 1e-30)
    cluster = np.concatenate([[0], np.cumsum(is_next)])[np.searchsorted(distinct, values)]
    out = np.empty_like(values)
    for number in range(int(cluster.max()) + 1):
        mine = cluster == number
        middle = float(np.median(values[mine]))
        near = round(middle)
        out[mine] = near if abs(middle - near) < 1e-4 else middle
    return out
