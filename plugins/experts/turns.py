"""In which order the experts of each layer take turns, so that each save is spread over processes.

As in MoC-System (Cai et al., arXiv 2408.04307), a save's experts are interleaved over the layers
and the processes of expert parallelism. All processes find the same, without communication: from
the step before, which says who wrote what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from unickpt.extend import ArrayEntry, ArrayUnits, Reader, UnitSteps, numbered_parts
from unickpt.plugins.experts.keys import ExpertKeys

Writers = Mapping[str, Mapping[int, Mapping[int, int]]]
"""By key and expert, how many bytes of it each process has written, or taken from a step before."""


def writers(reader: Reader, arrays: Mapping[str, ArrayUnits]) -> Writers:
    """Who wrote which experts of a checkpoint.

    Arguments:
        reader: of the checkpoint.
        arrays: those with experts.

    Raises:
        CheckpointCorrupt, StorageError: it cannot be read.
    """
    found: dict[str, dict[int, dict[int, int]]] = {}
    for name, held in arrays.items():
        entry = reader.index.arrays[name]
        table = reader.digests_of(name)
        assert table is not None, "a checkpoint of our own format has digests"
        rows = table["process"]
        of_key = found.setdefault(held.key, {})
        for number, processes in _by_expert(entry, held, rows):
            # All chunks count as equally large: nothing depends on a few bytes.
            each = entry.nbytes // max(1, len(held.numbers) * len(processes))
            into = of_key.setdefault(number, {})
            for process, count in zip(*np.unique(processes, return_counts=True), strict=True):
                into[int(process)] = into.get(int(process), 0) + each * int(count)
    return found


def _by_expert(
    entry: ArrayEntry, held: ArrayUnits, rows: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """The experts of an array, with what `rows` says of their chunks."""
    if held.axis is None:
        yield held.numbers.start, rows
        return
    experts = np.zeros(len(rows), np.int64)
    for first, part in numbered_parts(entry):
        along = np.arange(part.grid[held.axis]) * part.chunk[held.axis] + part.box.start[held.axis]
        shape = [-1 if d == held.axis else 1 for d in range(len(part.grid))]
        experts[first : first + part.count] = np.broadcast_to(
            along.reshape(shape), part.grid
        ).reshape(-1)
    for number in held.numbers:
        yield number, rows[experts == number]


def orders(steps: UnitSteps, keys: ExpertKeys, by: Writers) -> dict[str, tuple[int, ...]]:
    """For each key, its experts in the order in which they take their turns, the first one first.

    In it the processes alternate, so that those of one save are of as many of them as possible. And
    of the layers with the same processes, each begins where the save of the layer before ends. So a
    save has as many experts of each process as of any other, or one more, if all processes have
    equally many experts.

    Arguments:
        steps: the keys, and their experts.
        keys: say how many each save writes.
        by: who wrote them; of those that are not named, nothing is known.

    Example:
        >>> keys = ExpertKeys({"layers/{l}/experts/{x}/*": 1})
        >>> two = {"layers/0/experts/{x}/*", "layers/1/experts/{x}/*"}
        >>> by = {key: {0: {0: 9}, 1: {0: 9}, 2: {1: 9}, 3: {1: 9}} for key in two}
        >>> orders({key: dict.fromkeys(range(4), 7) for key in two}, keys, by)
        {'layers/0/experts/{x}/*': (0, 2, 1, 3), 'layers/1/experts/{x}/*': (2, 1, 3, 0)}
    """
    alike: dict[tuple[str, frozenset[int]], list[tuple[int, str, int, tuple[int, ...]]]] = {}
    for text, of in steps.items():
        known = keys.key_of(text)
        if known is None:
            continue
        key, layer = known
        writer = {number: _main(by.get(text, {}).get(number, {})) for number in of}
        order = _alternating(sorted(of), writer)
        group = key.text, frozenset(writer.values())
        alike.setdefault(group, []).append((layer, text, key.k, order))
    found = {}
    for layers in alike.values():
        for number, (_, text, k, order) in enumerate(sorted(layers)):
            first = number * k % max(1, len(order))
            found[text] = order[first:] + order[:first]
    return dict(sorted(found.items()))


def _main(written: Mapping[int, int]) -> int:
    """The process that wrote most of an expert, the first of several; -1 if none is known."""
    return max(written, key=lambda process: (written[process], -process), default=-1)


def _alternating(experts: Sequence[int], writer: Mapping[int, int]) -> tuple[int, ...]:
    """Experts in an order in which their processes alternate."""
    own: dict[int, list[int]] = {}
    for number in experts:
        own.setdefault(writer[number], []).append(number)
    place = {
        number: ((at + 0.5) / len(numbers), process)
        for process, numbers in own.items()
        for at, number in enumerate(numbers)
    }
    return tuple(sorted(experts, key=place.__getitem__))
