"""The index: a checkpoint's own metadata, as dataclasses; `index_json` reads and writes it.

docs/format.md is the normative text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout
from unickpt.quoting import quoted
from unickpt.trees import tree, tree_json

FORMAT = 1
"""The number of the format."""
REFERENCES, PATCHES, SECTIONS = "references", "patches", "sections"
FEATURES = frozenset((REFERENCES, PATCHES, SECTIONS))
"""The features, besides codecs, that an index may name and a program must know before it reads,
replaces or deletes the checkpoint: values in sibling checkpoints, patched chunks, and values of
processes that are stored in sections."""
INCREMENTAL, COMPRESS, TIMING = "incremental", "compress", "timing"
OWN_ENTRIES = frozenset((INCREMENTAL, COMPRESS, TIMING))
"""The entries of `extra` that unickpt makes; the others are those of features."""
RESERVED = "unickpt"
"""The metadata key under which `Checkpointer` stores `step`, and process 0's `metrics`."""
REPLACED = "unickpt.replaced"
"""The metadata key for the files of another system that a checkpoint replaced: their xxh3 digests,
by name."""
OF_THE_WHOLE = ("orbax",)
"""Keys of metadata that describe the tree as a whole, and mean nothing for a part."""
CONVERSION = "conversion"
"""The metadata key for the record of what rules did to the numbers; see `rules.provenance`."""
INDEX_KEY = "unickpt.json"
DIGESTS_KEY = "unickpt.digests"
BORROWED_KEY = "unickpt.borrowed"


def extra_key(feature: str) -> str:
    """The key of a value that a feature in `Index.extra` may have in the database."""
    return f"unickpt.{feature}"


MAX_RANK = 32
"""Dimensions of an array."""
MAX_EXTENT = 1 << 62
"""A limit above each extent, and above the bytes of an array with extents of 0 counted as 1."""


def shape_problem(shape: Sequence[int], itemsize: int) -> str | None:
    """Why the format has no array of a shape; None if it has.

    Example:
        >>> shape_problem((1,) * 33, 4)
        'it has 33 dimensions, and the format stores at most 32'
    """
    if len(shape) > MAX_RANK:
        return f"it has {len(shape)} dimensions, and the format stores at most {MAX_RANK}"
    if math.prod(filter(None, shape)) * itemsize >= MAX_EXTENT:
        return (
            f"its shape {quoted(tuple(shape))} has 2^62 bytes or more, where extents of 0 are "
            "counted as 1, and the format stores less"
        )
    return None


Encoding = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
"""At most one codec; names and values of its settings are pairs, ascending."""
CODEC_PREFIX = "unickpt."
"""The prefix for the name of a codec that Zarr does not have, in the index and in `zarr.json`."""
_NO_EXTRA: Mapping[str, Any] = {}


@dataclass(slots=True, unsafe_hash=True)  # not frozen: see `adapter_protocol`
class ArrayEntry:
    """The index's entry of one array; never modified.

    Arguments:
        name: the array's name.
        shape: global shape.
        dtype: a name of `unickpt.arrays.dtypes`.
        chunk: largest extent of a chunk in each dimension.
        layout: how the writer's mesh split it; None if no layout describes the fragments.
        cut: dimensions along whose layout intervals the array is cut into parts.
        boxes: without a layout, each fragment with the processes that held it; one part each.
        prng: for typed JAX PRNG keys, the name of their implementation.
        composed: how many of its chunks are stored as several values (docs/format.md, patches).
        additions: how many values are added to all these.
        encoding: its codec; None if it has none, and `()` if compressing it was tried and did not
            save space. During a save with `compression="auto"`, the codec to use if that makes it
            smaller (`encoder_protocol`).
        extra: the codecs' notes about it, by codec.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    layout: Layout | None = None
    cut: tuple[int, ...] = ()
    boxes: tuple[tuple[Box, tuple[int, ...]], ...] | None = None
    prng: str | None = None
    composed: int = 0
    additions: int = 0
    encoding: Encoding | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: _NO_EXTRA, hash=False)

    @property
    def dtype_and_shape(self) -> str:
        """As text; see `dtypes.with_shape`."""
        return dtypes.with_shape(self.dtype, self.shape)

    @property
    def codec(self) -> str | None:
        """The name of its codec, if that is none of Zarr's (`codec_protocol`)."""
        if not self.encoding:
            return None
        name = self.encoding[0][0]
        return name.removeprefix(CODEC_PREFIX) if name.startswith(CODEC_PREFIX) else None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its codec."""
        return dict(self.encoding[0][1]) if self.encoding else {}

    @property
    def stored_dtype(self) -> str:
        """Its dtype as tables show it: with the settings of a codec that is none of Zarr's."""
        name = self.codec
        if name is None:
            return self.dtype
        return "+".join([self.dtype, *map(str, self.settings.values())])

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtypes.from_name(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Logical bytes of the array."""
        return nbytes_of(self.shape, self.dtype)


@lru_cache(maxsize=4096)
def nbytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an array; cached, because a model has few shapes and many arrays."""
    return math.prod(shape) * dtypes.from_name(dtype).itemsize


@dataclass(frozen=True)
class PerProcessEntry:
    """One leaf that differs by process.

    Arguments:
        blobs: size in bytes and digest of each process's value.
        heads: the bytes of each value's head, if some have one (`frameworks.sections`).
    """

    blobs: tuple[tuple[int, int], ...]
    heads: tuple[int, ...] = ()

    @property
    def is_binary(self) -> bool:
        """Whether a value is stored in sections (`frameworks.sections`)."""
        return any(self.heads)

    def value_facts(self, process: int) -> tuple[int, int, int]:
        """Size, digest and head of a process's value."""
        size, digest = self.blobs[process]
        return size, digest, self.heads[process] if self.heads else 0


@dataclass(frozen=True)
class BaseEntry:
    """A sibling checkpoint that has some of the chunks.

    Arguments:
        name: of its folder.
        manifest: the digest of its manifest.
    """

    name: str
    manifest: str


@dataclass(frozen=True)
class DigestBlocks:
    """Digests of the blocks of a digest table, so that a part of it can be read and checked alone.

    Arguments:
        rows: of a block; the last one may have fewer.
        digests: of each block, xxh3-64.
    """

    rows: int
    digests: tuple[int, ...]


@dataclass(frozen=True)
class Index:
    """The whole content of `unickpt.json`. `tree` is the JSON of `unickpt.trees.tree`.

    `reused`, `compression` and `extra` are not needed to read it: `compression` is the option with
    which it was saved, and `extra` has the notes of other features, by their names. A feature in
    `extra` may have a separate value in the database (`extra_key`). `features` are those of
    `FEATURES` that the stored index names.
    """

    tree: Any
    arrays: Mapping[str, ArrayEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, tree_json.Plain] = field(default_factory=dict)
    per_process: Mapping[str, PerProcessEntry] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    attempt: str = ""
    created: str = ""
    library: str = ""
    chunks: int = 0
    digests_xxh3: str = ""
    digest_blocks: DigestBlocks | None = None
    reused: int = 0
    bases: tuple[BaseEntry, ...] = ()
    borrowed: int = 0
    borrowed_xxh3: str = ""
    compression: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    features: Sequence[str] = field(default=(), compare=False, repr=False)

    @property
    def codecs(self) -> list[str]:
        """The names of the codecs of Zarr that arrays have."""
        zarr = [x.encoding for x in self.arrays.values() if x.encoding and x.codec is None]
        return list(dict.fromkeys(name for encoding in dict.fromkeys(zarr) for name, _ in encoding))

    @cached_property
    def names(self) -> Mapping[str, None]:
        """The names of all leaves, in order."""
        return dict.fromkeys([*self.arrays, *self.aliases, *self.values, *self.per_process])

    @cached_property
    def entries(self) -> Mapping[str, ArrayEntry]:
        """The arrays under each of their names."""
        return {
            **self.arrays,
            **{name: self.arrays[target] for name, target in self.aliases.items()},
        }

    def entry(self, name: str) -> ArrayEntry:
        """An array under any of its names."""
        return self.arrays[self.aliases.get(name, name)]


def tree_of(index: Index) -> tree.Node | tree.Leaf:
    """The structure of a checkpoint.

    Raises:
        BadTree: it is invalid, or its leaves are not those that the index lists.
    """
    root = tree_json.from_json(index.tree)
    differ = {leaf.name for leaf in tree.leaves(root)} ^ set(index.names)
    if differ:
        raise tree_json.BadTree(
            f"leaf {quoted(min(differ))} is in the tree of the index or in its lists, but not in "
            "both"
        )
    return root
