"""Chains of patches: the states of a chunk that the next patches refer to.

The patches of a chunk form a *chain*: each refers to the state that the one before it produces, the
first to the full chunk. Saves are counted since one wrote everything; the number of the save whose
state a patch produces is its *generation*. The patch of a save refers to the state of the save
before it, so that a reader that has this state needs no other.

So that chains stay short, a save whose number is divisible by 4 also merges patches: those after
the state whose number is its own with the lowest bit that is set cleared become one. Large patches,
of more than 1/32 of the chunk on average, are not merged, as writing them again costs too much. All
patches of a chain take at most half of the chunk: if the next one is expected to exceed that, all
become one, of at most a quarter. So of `n` states, each opens with at most 2 log2(n) patches, or 16
more where they are large. A save needs values of earlier saves whole.
"""

from __future__ import annotations

from collections.abc import Sequence
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

_MOST_OF_CHUNK = 1 / 2
"""The share of a chunk that all patches of a chain may take."""
_LARGE = 1 / 32
"""Patches that take more of a chunk on average are not merged: writing them again costs much."""
_LEAST_MERGED = 4
"""Saves whose number is not divisible by this merge nothing: one patch more costs less."""


def merge_generation(generation: int) -> int:
    """The generation of the state after which a save of a generation merges patches."""
    lowest_bit = generation & -generation
    return generation - (lowest_bit if lowest_bit >= _LEAST_MERGED else 1)


def count_unmerged(chain: Sequence[tuple[int, int]], generation: int, whole: int) -> int:
    """How many patches of a chain a save leaves as they are; it merges the others into one.

    Arguments:
        chain: generation and bytes of each patch.
        generation: of the save.
        whole: bytes of the chunk if it is stored whole.
    """
    if len(chain) < 2:
        return len(chain)
    sizes = [size for _, size in chain]
    if sum(sizes) + sizes[-1] > _MOST_OF_CHUNK * whole:
        return 0
    target = merge_generation(generation)
    unmerged = sum(number <= target for number, _ in chain)
    are_large = sum(sizes[unmerged:]) > _LARGE * whole * (len(chain) - unmerged)
    return len(chain) if are_large else unmerged


def most_of_patch(whole: int, earlier: int) -> int:
    """How many bytes a patch may have.

    Arguments:
        whole: bytes of the chunk if it is stored whole.
        earlier: bytes of the patches before it.
    """
    return int(_MOST_OF_CHUNK * whole) - earlier


@dataclass(frozen=True)
class Parent:
    """The state that the next patch of a chunk refers to.

    Arguments:
        state: facts about it.
        values: how many stored values of the chunk are used for it.
        merged: the patch that follows these, in place of the other stored ones.
    """

    state: PatchedState
    values: int
    merged: bytes | None


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


def read_parent(
    reader: OcdbtReader, candidate: Candidate, chunk: KnownChunk, out: Array, whole: int
) -> Parent | None:
    """Reads the state of a chunk that its next patch refers to.

    Arguments:
        reader: of the base.
        candidate: which chunk.
        chunk: the writer's facts about it.
        out: contiguous memory for its elements, or for its codec's stored form.
        whole: bytes of the chunk if it is stored whole.

    Returns:
        The state; None if the merged patch would be too large.

    Raises:
        CheckpointCorrupt: that state does not match its digest, or cannot be read.
        StorageError: the storage failed.
    """
    entry, part, number = candidate.entry, candidate.part, candidate.number
    values = reader.chunk_values
    chain = values.values(entry, part, number)
    before = PatchedState(chunk.before)
    try:
        stored_patches = values.additions(entry, part, number, chain)
        states = list(map(patches.state_of, stored_patches))  # each: of the state before it
        generations = [state.generation for state in states]
        sizes = map(len, stored_patches)
        used = count_unmerged([*zip(generations, sizes, strict=True)], chunk.generation, whole)
        # A patch records the state that it refers to.
        digests = [*(state.digest for state in states), chunk.before]
        if chunk.now in digests[: used + 1]:
            return Parent(PatchedState(chunk.now), 1 + digests.index(chunk.now), None)
        earlier = PatchedState(digests[used])
        read_full_chunk(entry, number, chain, out)
        for patch in stored_patches[:used]:
            patches.apply(patch, out)
        earlier_elements = out.copy() if used < len(states) else out
        for patch in stored_patches[used:]:
            patches.apply(patch, out)
    except (Failed, NotDecodable) as error:
        raise reader.chunks.naming(error, entry, part, number) from error
    is_whole = chunk_digest(out) == chunk.before
    if is_whole and used == len(states):
        return Parent(before, 1 + used, None)
    if not is_whole or chunk_digest(earlier_elements) != earlier.digest:
        damage = Damaged("an earlier state does not match its digest")
        raise reader.chunks.naming(damage, entry, part, number)
    # Else the next patches would soon have to be merged again.
    most = most_of_patch(whole, 0) // 2
    merged = patches.encode(earlier_elements, out, earlier, chunk.generation - 1, most)
    return None if merged is None else Parent(before, 1 + used, merged)
