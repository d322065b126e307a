"""Chains of patches: the earlier state of a chunk that the next patch refers to.

The patches of a chunk form a *chain*: each refers to the state that the one before it produces, the
first to the full chunk. Saves are counted since one wrote everything; the number of the save that
made a patch is its *generation*. A save refers to the state after the save whose number is its own
with the lowest bit that is set cleared. So a chain has at most as many patches as the number has
bits set: of `n` states, each opens with at most log2(n) patches. A save refers to the state of the
save before it, or to one that the chain of that save passes through; and it needs the values of
earlier saves whole.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from unickpt.extend import (
    Array,
    Damaged,
    Failed,
    NotDecodable,
    OcdbtReader,
    chunk_digest,
    read_full_chunk,
)
from unickpt.plugins.incremental import patches
from unickpt.plugins.incremental.candidates import Candidate
from unickpt.plugins.incremental.patches import PatchedState


def parent_generation(generation: int) -> int:
    """The generation of the state that the patches of a generation refer to."""
    return generation & (generation - 1)


def is_on_the_way(generation: int, target: int) -> bool:
    """Whether a generation is one of those that lead to another, or that one itself."""
    return target & -(generation & -generation) == generation


@dataclass(frozen=True)
class Parent:
    """The state that the next patch of a chunk refers to.

    Arguments:
        state: facts about it.
        values: how many values of the chunk it consists of.
        is_read: whether its elements were read.
    """

    state: PatchedState
    values: int
    is_read: bool


@dataclass(frozen=True)
class KnownChunk:
    """A chunk for which a patch may be written.

    Arguments:
        before: the digest that it had when it was saved last.
        now: the digest that it has.
        generation: of the patch.
    """

    before: int
    now: int
    generation: int


def read_parent(reader: OcdbtReader, candidate: Candidate, chunk: KnownChunk, out: Array) -> Parent:
    """Reads the state of a chunk that its next patch refers to.

    Arguments:
        reader: of the base.
        candidate: which chunk.
        chunk: the writer's facts about it.
        out: contiguous memory for its elements, or for its codec's stored form.

    Raises:
        CheckpointCorrupt: that state does not match its digest, or cannot be read.
        StorageError: the storage failed.
    """
    entry, part, number = candidate.entry, candidate.part, candidate.number
    values, target = reader.chunk_values, parent_generation(chunk.generation)
    chain = values.values(entry, part, number)
    try:
        stored_patches = values.additions(entry, part, number, chain)
        states = list(map(patches.state_of, stored_patches))  # each: of the state before it
        on_the_way = (is_on_the_way(state.generation, target) for state in states)
        used = sum(1 for _ in itertools.takewhile(bool, on_the_way))
        # A patch records the state that it refers to.
        expected = states[used].digest if used < len(states) else chunk.before
        if expected == chunk.now:
            return Parent(PatchedState(expected), 1 + used, False)
        read_full_chunk(entry, number, chain, out)
        for patch in stored_patches[:used]:
            patches.apply(patch, out)
    except (Failed, NotDecodable) as error:
        raise reader.chunks.naming(error, entry, part, number) from error
    if chunk_digest(out) != expected:
        damage = Damaged("an earlier state does not match its digest")
        raise reader.chunks.naming(damage, entry, part, number)
    return Parent(PatchedState(expected), 1 + used, True)
