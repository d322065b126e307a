"""In which order the experts of each layer take turns, so that each save is spread over processes.

As in MoC-System (Cai et al., arXiv 2408.04307), a save's experts are interleaved over the layers
and the processes of expert parallelism. All processes find the same, without communication: from
the step before, which records the writers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from unickpt.extend import ArrayEntry, ArrayUnits, Reader, UnitSteps, numbered_parts
from unickpt.plugins.experts.keys import ExpertKeys

Writers = Mapping[str, Mapping[int, Mapping[int, int]]]
"""By key and expert, how many bytes of it each process has written, or taken from a step before."""


def writers(reader: Reader, arrays: Mapping[str, ArrayUnits]) -> Writers:
    """The processes that wrote the experts of a checkpoint.

    Arguments:
        reader: of the checkpoint.
        arrays: those with experts.

    Raises:
        CheckpointCorrupt, StorageError: it cannot be read.
    """
    result: dict[str, dict[int, dict[int, int]]] = {}
    for name, units in arrays.items():
        entry = reader.index.arrays[name]
        table = reader.digests_of(name)
        assert table is not None, "a checkpoint of our own format has digests"
        rows = table["process"]
        of_key = result.setdefault(units.key, {})
        for number, processes in _by_expert(entry, units, rows):
            # All chunks count as equally large: nothing depends on a few bytes.
            chunk_bytes = entry.nbytes // max(1, len(units.numbers) * len(processes))
            into = of_key.setdefault(number, {})
            for process, count in zip(*np.unique(processes, return_counts=True), strict=True):
                into[int(process)] = into.get(int(process), 0) + chunk_bytes * int(count)
    return result


def _by_expert(
    entry: ArrayEntry, units: ArrayUnits, rows: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """The experts of an array, with the facts of `rows` about their chunks."""
    if units.axis is None:
        yield units.numbers.start, rows
        return
    experts = np.zeros(len(rows), np.int64)
    for first, part in numbered_parts(entry):
        axis = units.axis
        along = np.arange(part.grid[axis]) * part.chunk[axis] + part.box.start[axis]
        shape = [-1 if d == axis else 1 for d in range(len(part.grid))]
        of_chunks = np.broadcast_to(along.reshape(shape), part.grid)
        experts[first : first + part.count] = of_chunks.reshape(-1)
    for number in units.numbers:
        yield number, rows[experts == number]


def orders(
    steps: UnitSteps, keys: ExpertKeys, writers_by_key: Writers
) -> dict[str, tuple[int, ...]]:
    """For each key, its experts in the order of their turns.

    The processes alternate in it, so that the experts of one save come from as many processes as
    possible. Of the layers with the same processes, each begins where the save of the layer before
    ends. So a save has as many experts of each process as of any other, or one more, if all
    processes have equally many experts.

    Arguments:
        steps: the keys, and their experts.
        keys: say how many each save writes.
        writers_by_key: who wrote them; of those that are not named, nothing is known.

    Example:
        >>> keys = ExpertKeys({"layers/{l}/experts/{x}/*": 1})
        >>> two = {"layers/0/experts/{x}/*", "layers/1/experts/{x}/*"}
        >>> by = {key: {0: {0: 9}, 1: {0: 9}, 2: {1: 9}, 3: {1: 9}} for key in two}
        >>> orders({key: dict.fromkeys(range(4), 7) for key in two}, keys, by)
        {'layers/0/experts/{x}/*': (0, 2, 1, 3), 'layers/1/experts/{x}/*': (2, 1, 3, 0)}
    """
    alike: dict[tuple[str, frozenset[int]], list[tuple[int, str, int, tuple[int, ...]]]] = {}
    for text, experts in steps.items():
        match = keys.key_of(text)
        if match is None:
            continue
        key, layer = match
        writer = {number: _main(writers_by_key.get(text, {}).get(number, {})) for number in experts}
        order = _alternating(sorted(experts), writer)
        group = key.text, frozenset(writer.values())
        alike.setdefault(group, []).append((layer, text, key.k, order))
    orders_by_key = {}
    for layers in alike.values():
        for number, (_, text, k, order) in enumerate(sorted(layers)):
            first = number * k % max(1, len(order))
            orders_by_key[text] = order[first:] + order[:first]
    return dict(sorted(orders_by_key.items()))


def _main(written: Mapping[int, int]) -> int:
    """The process that wrote most of an expert, the first of several; -1 if none is known."""
    return max(written, key=lambda process: (written[process], -process), default=-1)


def _alternating(experts: Sequence[int], writer: Mapping[int, int]) -> tuple[int, ...]:
    """Experts in an order where their processes alternate."""
    experts_by_process: dict[int, list[int]] = {}
    for number in experts:
        experts_by_process.setdefault(writer[number], []).append(number)
    place = {
        number: ((position + 0.5) / len(numbers), process)
        for process, numbers in experts_by_process.items()
        for position, number in enumerate(numbers)
    }
    return tuple(sorted(experts, key=place.__getitem__))
