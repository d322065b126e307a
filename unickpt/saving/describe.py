"""The first step of a save: describes every leaf, and checks the request."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import xxhash

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.errors import UnsupportedLeaf
from unickpt.format import chunk_encoding, chunk_grid, codec_protocol, index_json, verified_chunks
from unickpt.format.index import ArrayEntry, Index, PerProcessEntry, nbytes_of, shape_problem
from unickpt.frameworks.adapter_protocol import Adapter, ArraySource
from unickpt.frameworks.leaves import Described, PerProcess, adapter_of, expand, leaf_test
from unickpt.frameworks.process_group import Group
from unickpt.options import SaveOptions
from unickpt.quoting import quoted
from unickpt.saving.save_features import SaveFeatures
from unickpt.trees import tree, tree_json

if TYPE_CHECKING:
    from unickpt.format.encoder_protocol import EncodingPolicy
    from unickpt.frameworks.sections import EncodedValue
    from unickpt.references.policy import Skipped
    from unickpt.write_filter import ArrayUnits, Selection, Unit, WriteFilter


@dataclass(frozen=True)
class Description:
    """The description of the arrays and values that one process has to save.

    Arguments:
        index: should be equal on all processes; arrays of `LocalFragments` have no boxes yet.
        sources: the arrays of this process by name.
        blobs: its per-process values by name, encoded.
        units: the arrays with units that may be left out of a save (`write_filter`).
        selection: which units are written, if some may be left out.
        skipped: the parts that are neither staged nor read, because the base has them.
        encoders: the encoders of arrays' chunks, in place of a codec of Zarr's.
    """

    index: Index
    sources: Mapping[str, ArraySource]
    blobs: Mapping[str, EncodedValue]
    units: Mapping[str, ArrayUnits] = field(default_factory=dict)
    selection: Selection | None = None
    skipped: Skipped | None = None
    encoders: Mapping[str, codec_protocol.Codec] = field(default_factory=dict)

    @cached_property
    def encoded(self) -> bytes:
        """The index as this process writes it, until the commit."""
        return index_json.encode(self.index)

    @cached_property
    def digest(self) -> int:
        """xxh3-64 of `encoded`: equal where processes describe the same; 0 for a single process."""
        if self.index.processes == 1:
            return 0
        return xxhash.xxh3_64_intdigest(self.encoded)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is taken from the base."""
        return self.selection is None and self.skipped is None

    def borrows(self, name: str, box: Box) -> bool:
        """Whether a box of an array is not saved, but taken from the previous step."""
        if self.skipped is not None and self.skipped.skips(name, box):
            return True
        return self.leaves_out(name, box)

    def leaves_out(self, name: str, box: Box) -> bool:
        """Whether this save leaves out a box of an array by its choice of units; unlike `borrows`,
        regardless of what this process knows to be unchanged."""
        return self.selection is not None and self.selection.borrows(name, box)

    def has(self, name: str, source: ArraySource) -> bool:
        """Whether the choice of units leaves in any part of an array that this process holds."""
        if self.selection is None or name not in self.units:
            return True
        return not all(self.selection.borrows(name, f.box) for f in source.fragments)

    def writes(self, unit: Unit | None) -> bool:
        """Whether the choice of units includes a unit; True for arrays without units."""
        selection = self.selection
        return unit is None or selection is None or selection.writes(unit)

    def selected(self, write_filter: WriteFilter) -> Description:
        """The same, of a save that writes only some units.

        Raises:
            UnsupportedLeaf: they cannot be chosen.
        """
        try:
            selection = write_filter.select(self.index, self.units)
        except ValueError as error:
            raise UnsupportedLeaf(str(error)) from None
        return self.with_selection(selection)

    def with_selection(self, selection: Selection) -> Description:
        """The same, of a save that writes some units, with what it records of them."""
        index = replace(self.index, metadata=selection.metadata)
        return replace(self, index=index, selection=selection)


class _Leaves:
    """Collects the facts about the leaves of a tree; arguments as for `describe`."""

    def __init__(
        self,
        group: Group,
        options: SaveOptions,
        among: Sequence[Adapter],
        features: SaveFeatures,
    ) -> None:
        self._group, self._options, self._among = group, options, among
        self._features, self._units = features, features.units
        self._first: dict[Any, str] = {}
        self.entries: dict[str, ArrayEntry] = {}
        self.sources: dict[str, ArraySource] = {}
        self.aliases: dict[str, str] = {}
        self.plain: dict[str, tree_json.Plain] = {}
        self.blobs: dict[str, EncodedValue] = {}
        self.units: dict[str, ArrayUnits] = {}
        self.encoders: dict[str, codec_protocol.Codec] = {}
        self.bad: list[str] = []
        """Why some leaves cannot be stored."""

    def add(self, name: str, value: Any) -> None:
        """Describes a leaf."""
        try:
            if isinstance(value, PerProcess):
                from unickpt.frameworks import per_process

                self.blobs[name] = per_process.encode(value.value, self._among)
            elif tree_json.is_plain(value):
                self.plain[name] = tree_json.plain(value)
            else:
                self._add_array(name, _source(value, self._group, self._among))
        except (TypeError, ValueError) as error:
            self.bad.append(f"{name!r}: {error}")

    def _add_array(self, name: str, source: ArraySource) -> None:
        if source.identity is not None and source.identity in self._first:
            self.aliases[name] = self._first[source.identity]
            return
        self._first[source.identity] = name
        units = None if self._units is None else self._units.find(name, source.shape, source.layout)
        if units is not None:
            self.units[name] = units
        axis = None if units is None else units.axis
        entry = _entry(name, source, self._options, axis, self._features.encoding)
        if self._features.all:
            encoder = codec_protocol.configure(entry, self._features.all)
            if encoder is not None:
                self.encoders[name] = encoder
        _check_chunk(entry)
        self.entries[name], self.sources[name] = entry, source


def describe(
    root: Any,
    metadata: Mapping[str, Any] | None,
    group: Group,
    options: SaveOptions,
    among: Sequence[Adapter],
    features: SaveFeatures,
) -> Description:
    """Describes every leaf of a tree, which may be flattened already, without side effects.

    Arguments:
        root: the tree.
        metadata: of the checkpoint.
        group: the processes.
        options: of the save.
        among: the adapters.
        features: of the save.

    Raises:
        UnsupportedLeaf: names every leaf that cannot be stored, and why.
    """
    node = root
    if not isinstance(root, tree.Node | tree.Leaf):
        node = tree.flatten(
            root,
            leaf_test(among),
            lambda obj, name: expand(obj, name, among),
            problem_of=problem_finder(group, options, among, features),
        )
    leaves = _Leaves(group, options, among, features)
    for leaf in tree.leaves(node):
        leaves.add(leaf.name, leaf.value)
    if leaves.bad:
        raise unstorable(leaves.bad)
    entries = leaves.entries
    if group.count == 1:
        features.check(entries)
    if features.units is not None:
        try:
            features.units.check(leaves.units)
        except ValueError as error:
            raise UnsupportedLeaf(str(error)) from None
    index = Index(
        tree=tree_json.to_json(node),
        arrays=entries,
        aliases=leaves.aliases,
        values=leaves.plain,
        per_process={name: PerProcessEntry(()) for name in leaves.blobs},
        metadata=checked_metadata(metadata),
        processes=group.count,
        compression=options.compression,
    )
    return Description(index, leaves.sources, leaves.blobs, leaves.units, encoders=leaves.encoders)


def problem_finder(
    group: Group, options: SaveOptions, among: Sequence[Adapter], features: SaveFeatures
) -> Callable[[str, Any], str | None]:
    """A function that says why a leaf, with its name, cannot be stored."""

    def problem_of(name: str, value: Any) -> str | None:
        described = _Leaves(group, options, among, features)
        described.add(name, value)
        return next(iter(described.bad), None)

    return problem_of


def unstorable(bad: list[str]) -> UnsupportedLeaf:
    """The error that lists leaves, each with the reason."""
    return UnsupportedLeaf("these leaves cannot be stored:\n" + _indent(bad))


def _source(value: Any, group: Group, among: Sequence[Adapter]) -> ArraySource:
    if isinstance(value, Described):
        return value.source(group)
    adapter = adapter_of(value, among)
    assert adapter is not None, "a leaf is a mark, a plain value or an array"
    return adapter.source(value, group)


def _check_chunk(entry: ArrayEntry) -> None:
    """Checks that readers accept a chunk whose size only the index states."""
    nbytes, most = math.prod(entry.chunk) * entry.itemsize, verified_chunks.COMPRESSED_MOST
    if not entry.encoding or nbytes <= most:
        return
    if entry.codec is None or not chunk_encoding.is_of_fixed_size(entry):
        raise ValueError(
            f"its chunks would have {nbytes} bytes, but compressed ones hold at most {most}; lower "
            "SaveOptions.chunk_bytes, or do not compress"
        )


def _entry(
    name: str,
    source: ArraySource,
    options: SaveOptions,
    single: int | None,
    policy: EncodingPolicy | None,
) -> ArrayEntry:
    """The entry of an array; along the dimension `single`, each chunk has one element."""
    dtype = dtypes.name_of(source.dtype)
    if problem := shape_problem(source.shape, source.dtype.itemsize):
        raise ValueError(f"{problem}; reshape it, or leave it out")
    rank = len(source.shape)
    shape = options.chunk_shape if len(options.chunk_shape or ()) == rank else None
    cut: tuple[int, ...] = ()
    if source.layout is not None:
        chunk, cut = chunk_grid.chunk_grid(
            source.shape, source.dtype.itemsize, source.layout, options.chunk_bytes, shape, single
        )
    else:
        whole = tuple(1 if d == single else n for d, n in enumerate(source.shape))
        free = chunk_grid.free_chunk(whole, source.dtype.itemsize, options.chunk_bytes)
        chunk = tuple(map(min, shape, map(max, whole, free))) if shape else free
    nbytes = math.prod(chunk) * source.dtype.itemsize
    encoding = None
    if policy is not None:
        encoding = policy.encoding(dtype, nbytes_of(source.shape, dtype), nbytes)
    elif options.compression is not None:
        encoding = chunk_encoding.encoding_for(options.compression)
    boxes = source.boxes if source.boxes is not None else () if source.layout is None else None
    return ArrayEntry(
        name, source.shape, dtype, chunk, source.layout, cut, boxes, source.prng, encoding=encoding
    )


def check_mapping(what: str, mapping: object) -> None:
    """Checks that metadata or metrics are a dict.

    Raises:
        UnsupportedLeaf: they are not.
    """
    if mapping is not None and not isinstance(mapping, Mapping):
        raise UnsupportedLeaf(f"{what} must be a dict, not of type {type(mapping).__name__}")


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    check_mapping("metadata", metadata)
    if not metadata:
        return {}
    checked = dict(metadata)
    if not _is_json(checked):
        raise UnsupportedLeaf(_json_fault(checked, "metadata", ()))
    # A copy: the program may change the original while the save is in the background.
    copied: dict[str, Any] = json.loads(json.dumps(checked))
    return copied


def _is_json(value: Any) -> bool:
    """Whether JSON can hold a value unchanged."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()  # surrogates are not Unicode text
        return bool(json.loads(text) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _json_fault(value: Any, where: str, within: tuple[object, ...]) -> str:
    """The place of the first fault in a value that JSON cannot hold, and what to store instead.

    Arguments:
        value: anything that is not JSON.
        where: its place, as Python code.
        within: the enclosing containers.
    """
    if any(outer is value for outer in within) or len(within) > tree.MAX_DEPTH:
        return f"{where} cannot be stored in JSON: it contains itself, or is nested too deeply"
    within = (*within, value)
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                return f"{where} has the key {quoted(key)}, but keys in JSON are str; use str(key)"
            if not _is_json(key):
                return f"{where} has the key {quoted(key)}, which is not valid Unicode text"
            if not _is_json(child):
                return _json_fault(child, f"{where}[{quoted(key)}]", within)
    if isinstance(value, list):
        for index, child in enumerate(value):
            if not _is_json(child):
                return _json_fault(child, f"{where}[{index}]", within)
    kind = type(value).__name__
    return f"{where} cannot be stored in JSON: it is {quoted(value)} of type {kind}{_advice(value)}"


def _advice(value: Any) -> str:
    """What to store instead of a value that JSON cannot hold and that is no list or dict."""
    if isinstance(value, str):
        return ", which is not valid Unicode text"
    if isinstance(value, tuple):
        return "; store list(x)"
    if isinstance(value, float):
        return "; store str(x)"
    if hasattr(value, "tolist"):
        return "; store x.tolist()"
    from unickpt.trees import hints

    return f"; {hints.hint(value, 'convert it, or leave it out')}"


def _indent(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
