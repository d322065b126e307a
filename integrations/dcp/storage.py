"""Storage for torch.distributed.checkpoint: its planners plan, unickpt writes and reads.

torch gathers the plans of all ranks, as usual; unickpt writes the data and commits.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import unickpt
from unickpt import Checkpoint, LoadOptions, ProcessGroup, SaveOptions
from unickpt.errors import CheckpointReplaced, InvalidPath, LoadMismatch, UnsupportedLeaf
from unickpt.extend import (
    REPLACED_METADATA,
    Box,
    Key,
    Leaf,
    Node,
    PathLike,
    Plain,
    SavedOnly,
    absolute_path,
    new_session,
    put_nested,
    read_into,
    rebuild_tree,
    resolve_path,
    structure_of,
)
from unickpt.integrations.destination import TORCH_METADATA, Destination, torch_files
from unickpt.types import LocalFragments

Keys = tuple[Key, ...]
ValuesByName = Mapping[str, Plain]


class _AtPath:
    """The common base of the storage classes."""

    path: str | None

    @property
    def checkpoint_id(self) -> PathLike:
        """The path.

        Raises:
            ValueError: there is none yet.
        """
        if self.path is None:
            raise ValueError("checkpoint_id= is missing: give it a path")
        return self.path

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.path = absolute_path(checkpoint_id, or_file=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        try:
            resolve_path(checkpoint_id, or_file=True)
        except InvalidPath:
            return False
        return True


class StorageWriter(_AtPath, storage.StorageWriter):
    """Writes a plan of torch's planner as a checkpoint of unickpt.

    Tensors are stored under their paths in the state dict if the planner records these, as torch's
    `DefaultSavePlanner` does, else under their `fqn`; all other objects as the planner's bytes. The
    checkpoint appears at the end of `write_data`, atomically.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs).
        options: see `unickpt.SaveOptions`; `group` is decided by torch.
        overwrite: whether to replace a checkpoint at `path`.

    Example:
        >>> import warnings, torch.distributed.checkpoint as dcp, unickpt
        >>> writer = StorageWriter("memory://dcp/writer")
        >>> with warnings.catch_warnings(action="ignore"):  # that there are no other ranks
        ...     _ = dcp.save({"w": torch.ones(2)}, storage_writer=writer)
        >>> unickpt.load("memory://dcp/writer")
        {'w': array([1., 1.], dtype=float32)}
    """

    def __init__(
        self,
        path: PathLike | None = None,
        *,
        options: SaveOptions | None = None,
        overwrite: bool = True,
    ) -> None:
        self.path, self.overwrite = None, overwrite
        super().reset(path)
        self.options = SaveOptions.or_default(options)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise ValueError(
                "use_collectives=False is not supported with a StorageWriter: the ranks would "
                "not know of each other. unickpt.integrations.dcp.save uses none"
            )
        _ = self.checkpoint_id  # there is one

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
        """Gives each rank its number and the name of this save."""
        if not all(plan.usable for plan in plans):
            raise ValueError(_CACHED)
        session, count = new_session(), len(plans)
        return [replace(p, storage_data=_Rank(i, count, session)) for i, p in enumerate(plans)]

    def write_data(
        self, plan: planning.SavePlan, planner: planning.SavePlanner
    ) -> Future[list[WriteResult]]:
        rank = plan.storage_data
        if not isinstance(rank, _Rank):
            raise ValueError("the plan is not the one that prepare_global_plan made")
        group = ProcessGroup(rank.index, rank.count, rank.session)
        state = PlannedState(plan, planner)
        target = destination(self.checkpoint_id, overwrite=self.overwrite)
        options, metadata = replace(self.options, group=group), replaced_metadata(target)
        target.save(state, overwrite=self.overwrite, metadata=metadata, options=options)
        return _done(state.results())

    def finish(self, metadata: torch_metadata.Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: the checkpoint was committed when the last rank had written."""

    def storage_meta(self) -> torch_metadata.StorageMeta | None:
        return torch_metadata.StorageMeta(checkpoint_id=str(self.checkpoint_id))


_CACHED = (
    "DefaultSavePlanner(enable_plan_caching=True) is not supported with a StorageWriter: a plan of "
    "an earlier save does not say which save this is"
)


@dataclass(frozen=True)
class _Rank:
    """The data that `prepare_global_plan` gives a rank, in `SavePlan.storage_data`."""

    index: int
    count: int
    session: str


class TorchSaved:
    """A planner's bytes of an object; in the stored tree a wrapper, `BYTES`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def state_dict(self) -> bytes:
        return self._data

    def load_state_dict(self, state: bytes) -> None:
        self._data = state


BYTES = TorchSaved.__name__


class PlannedState(SavedOnly):
    """The content of a plan, as a tree; made within the save, so that it fails on all ranks if the
    planner fails on one."""

    def __init__(self, plan: planning.SavePlan, planner: planning.SavePlanner) -> None:
        self._plan, self._planner = plan, planner
        self._sizes: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        if getattr(self._planner, "_enable_plan_caching", False):
            raise ValueError(_CACHED)
        boxes: dict[str, list[tuple[planning.WriteItem, Any]]] = {}
        for item in self._plan.items:
            data = self._planner.resolve_data(item)
            boxes.setdefault(item.index.fqn, []).append((item, data))
            self._sizes.append(_nbytes(data))
        keys_by_name = (
            self._plan.planner_data if isinstance(self._plan.planner_data, Mapping) else {}
        )
        root: dict[Any, Any] = {}
        for name, parts in boxes.items():
            if not put_nested(root, keys_by_name.get(name, (name,)), _leaf(name, parts)):
                raise UnsupportedLeaf(f"{name!r} has the same place in the state as another value")
        return root

    def results(self) -> list[WriteResult]:
        pairs = zip(self._plan.items, self._sizes, strict=True)
        return [WriteResult(item.index, size, None) for item, size in pairs]


def _leaf(name: str, parts: list[tuple[planning.WriteItem, Any]]) -> Any:
    (first, data), *_ = parts
    if first.tensor_data is None:
        return TorchSaved(data.getvalue() if isinstance(data, io.BytesIO) else bytes(data))
    fragments = []
    for item, tensor in parts:
        if item.tensor_data is None:
            raise UnsupportedLeaf(f"{name!r} is a tensor and bytes in one plan")
        chunk = item.tensor_data.chunk
        fragments.append((_box(chunk.offsets, chunk.sizes), tensor.detach()))
    return LocalFragments(tuple(first.tensor_data.size), fragments)


def _nbytes(data: torch.Tensor | io.BytesIO) -> int:
    return data.nbytes if isinstance(data, torch.Tensor) else data.getbuffer().nbytes


class StorageReader(_AtPath, storage.StorageReader):
    """Serves torch's planner from any checkpoint that `unickpt.open` can open.

    Every chunk is read once per rank, and checked. The planner gets plain values as `torch.save`
    writes them, and bytes that a `StorageWriter` stored unchanged. The planner unpickles them: read
    only checkpoints that you trust.

    Arguments:
        path: a path or URL.
        options: see `unickpt.LoadOptions`; each rank reads alone.
    """

    def __init__(self, path: PathLike | None = None, *, options: LoadOptions | None = None) -> None:
        self.path = None
        super().reset(path)
        self.options = LoadOptions.or_default(options)
        self._opened: _Opened | None = None

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        super().reset(checkpoint_id)
        self._opened = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> torch_metadata.Metadata:
        """The stored tensors, each as one chunk: the reader finds the real ones."""
        opened = self._open()
        index = opened.stored.index
        facts: dict[str, Any] = {}
        for name, node in opened.items.items():
            if not isinstance(node, Leaf) or node.name in index.values:
                facts[name] = torch_metadata.BytesStorageMetadata()
                continue
            entry = index.entries.get(node.name)
            dtype = getattr(torch, entry.dtype, None) if entry is not None else None
            if entry is None or dtype is None:
                continue  # a value for each process, or a dtype that torch lacks
            size = torch.Size(entry.shape)
            chunk = torch_metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            properties = torch_metadata.TensorProperties(dtype=dtype)
            facts[name] = torch_metadata.TensorStorageMetadata(properties, size, [chunk])
        return torch_metadata.Metadata(facts, planner_data=opened.keys)

    def set_up_storage_reader(
        self, metadata: torch_metadata.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._open()

    def prepare_local_plan(self, plan: planning.LoadPlan) -> planning.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[planning.LoadPlan]) -> list[planning.LoadPlan]:
        return plans

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        opened = self._open()
        stored, tensors = opened.stored, {}
        by_array: dict[str, dict[str, Any]] = {}
        for number, item in enumerate(plan.items):
            node = opened.items[item.storage_index.fqn]
            if item.type is planning.LoadItemType.BYTE_IO:
                planner.load_bytes(item, _bytes(node, stored.index.values))
                continue
            assert isinstance(node, Leaf)
            entry, tensor = stored.index.entry(node.name), planner.resolve_tensor(item)
            box = _box(item.storage_offsets, item.lengths)
            target = LocalFragments(entry.shape, [(box, tensor.detach())]).target()
            tensors[str(number)] = item, tensor
            by_array.setdefault(entry.name, {})[str(number)] = target
        try:
            read_into(stored, by_array, self.options)
        except CheckpointReplaced as error:
            raise CheckpointReplaced(f"{error}; it was planned for the one before") from error
        for item, tensor in tensors.values():
            planner.commit_tensor(item, tensor)
        return _done(None)

    def _open(self) -> _Opened:
        """The checkpoint, as it was at the first request."""
        if self._opened is None:
            self._opened = _Opened.open(self.checkpoint_id)
        return self._opened


@dataclass(frozen=True)
class _Opened:
    """A checkpoint as torch's planners see it.

    Arguments:
        stored: the checkpoint.
        items: by their names there: paths, joined by dots.
        keys: those that lead to each in the tree.
    """

    stored: Checkpoint
    items: Mapping[str, Node | Leaf]
    keys: Mapping[str, Keys]

    @classmethod
    def open(cls, path: PathLike) -> _Opened:
        """Opens a checkpoint.

        Raises:
            LoadMismatch: two of its items have the same name.
            UnickptError: as `unickpt.open`.
        """
        stored = unickpt.open(path)
        nodes: dict[str, Node | Leaf] = {}
        keys_of: dict[str, Keys] = {}
        for keys, node in items(structure_of(stored), stored.index.values):
            name = ".".join(map(str, keys))
            if name in nodes:
                raise LoadMismatch(
                    f"{stored.url}: {keys_of[name]} and {keys} are both {name!r} to "
                    "torch.distributed.checkpoint; load it with unickpt.load"
                )
            nodes[name], keys_of[name] = node, keys
        return cls(stored, nodes, keys_of)


def _bytes(node: Node | Leaf, values: ValuesByName) -> io.BytesIO:
    """The form of a value that a planner takes."""
    value = value_of(node, values)
    if isinstance(node, Node) and node.type_name == BYTES:
        return io.BytesIO(value)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _box(offsets: torch.Size, sizes: torch.Size) -> Box:
    return Box(tuple(offsets), tuple(o + n for o, n in zip(offsets, sizes, strict=True)))


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


# --- state dicts as torch sees them: which values of a tree are one item -------------------------


def items(
    node: Node | Leaf, values: ValuesByName, above: Keys = ()
) -> Iterator[tuple[Keys, Node | Leaf]]:
    """The items of a stored tree, with the keys that lead to each.

    As in DCP, dicts are always taken apart, lists only if arrays or dicts are in them, and tuples
    only if they cannot be values.

    Arguments:
        node: the structure.
        values: the plain values, by name.
        above: the keys that lead to `node`.
    """
    whole = isinstance(node, Leaf) or node.type_name == BYTES
    if whole or (_is_sequence(node) and is_value(node, values)):
        yield above, node
        return
    assert isinstance(node, Node)
    for key, child in zip(node.keys, node.children, strict=True):
        yield from items(child, values, above if node.kind == "wrapper" else (*above, key))


def is_value(node: Node | Leaf, values: ValuesByName) -> bool:
    """Whether a part of a tree consists of values and sequences alone."""
    if isinstance(node, Leaf):
        return node.name in values
    groups = node.kind == "wrapper" or _is_sequence(node)
    return groups and all(is_value(child, values) for child in node.children)


def value_of(node: Node | Leaf, values: ValuesByName) -> Any:
    """The value that such a part holds."""
    return rebuild_tree(node, values.__getitem__)


def portable(state: Any) -> Any:
    """A state dict to save; the content of an `io.BytesIO` is bytes."""
    if type(state) in (dict, OrderedDict):
        return type(state)((key, portable(value)) for key, value in state.items())
    if type(state) is list:
        return [portable(value) for value in state]
    return state.getvalue() if isinstance(state, io.BytesIO) else state


def with_stored_lists(state: Any, node: Node | Leaf | None, values: ValuesByName) -> Any:
    """A state dict to load into: lists of values have the stored length, and an `io.BytesIO` is
    bytes.

    To DCP such a list is one item, which a load replaces as a whole.

    Arguments:
        state: a state dict, or a part of it.
        node: the same part of the stored tree, if it is there.
        values: the stored plain values, by name.

    Raises:
        LoadMismatch: a requested object is stored as pickled bytes.
    """
    while isinstance(node, Node) and node.kind == "wrapper":
        (child,) = node.children
        if node.type_name == BYTES and isinstance(child, Leaf):
            raise LoadMismatch(
                f"{child.name!r} was stored by a StorageWriter, as bytes that only torch's planner "
                "unpickles: load it with torch.distributed.checkpoint.load and "
                "unickpt.integrations.dcp.StorageReader(path)"
            )
        node = child
    if isinstance(state, io.BytesIO):
        return b""
    if node is not None and _is_sequence(node) and is_value(node, values) and _is_whole(state):
        return value_of(node, values)
    below = zip(node.keys, node.children, strict=True) if isinstance(node, Node) else ()
    children = {str(key): child for key, child in below}
    if type(state) in (dict, OrderedDict):
        adopted = (with_stored_lists(v, children.get(str(k)), values) for k, v in state.items())
        return type(state)(zip(state, adopted, strict=True))
    if type(state) is list:
        numbered = enumerate(state)
        return [with_stored_lists(v, children.get(str(n)), values) for n, v in numbered]
    return state


def filled(state: Any, new_state: Any) -> Any:
    """Puts loaded values into the caller's dicts and lists: DCP changes these in place."""
    if state is new_state:
        return state
    if isinstance(state, dict) and isinstance(new_state, dict):
        # Other keys are stored, but were not requested.
        for key in filter(state.__contains__, new_state):
            state[key] = filled(state[key], new_state[key])
        return state
    if isinstance(state, list) and isinstance(new_state, list):
        if len(state) == len(new_state):
            new_state = [filled(*pair) for pair in zip(state, new_state, strict=True)]
        state[:] = new_state
        return state
    return io.BytesIO(new_state) if isinstance(state, io.BytesIO) else new_state


def _is_sequence(node: Node | Leaf) -> bool:
    return isinstance(node, Node) and node.kind in ("list", "tuple", "namedtuple")


def _is_whole(value: Any) -> bool:
    """Whether DCP would replace this as a whole."""
    if isinstance(value, list | tuple):
        return all(map(_is_whole, value))
    return not isinstance(value, Mapping | torch.Tensor)


# --- where a save goes: it may replace a checkpoint of torch's in a local folder ------------------


def destination(path: PathLike, *, overwrite: bool) -> Destination:
    """The destination at a path. Raises InvalidPath, StorageError."""
    return Destination.at_path(path, torch_files if overwrite else lambda names: ())


def replaced_metadata(target: Destination) -> dict[str, Any]:
    """The record of torch's checkpoint that this one replaces. Its files are removed after the
    commit: a job that is killed in between leaves both, and readers know which one counts."""
    if TORCH_METADATA not in target.theirs:
        return {}
    content = Path(os.path.join(str(target.location), TORCH_METADATA)).read_bytes()
    return {REPLACED_METADATA: {TORCH_METADATA: xxhash.xxh3_64_hexdigest(content)}}
