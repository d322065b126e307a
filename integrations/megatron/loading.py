"""The load strategy: fills the state that `dist_checkpointing.load` requests, from our checkpoints,
and from Megatron's own with Megatron's strategy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch

import unickpt
from unickpt import Checkpoint, LoadOptions
from unickpt.errors import LoadMismatch, UnsupportedFormat
from unickpt.extend import (
    MANIFEST,
    Box,
    Leaf,
    Node,
    job_group,
    loaded_together,
    reading_checkpoint,
    rebuild_tree,
)
from unickpt.integrations.megatron import common, objects
from unickpt.integrations.megatron.optimizers import Buckets, is_bucket, is_geometry
from unickpt.integrations.megatron.pieces import TensorPiece, pieces_of
from unickpt.integrations.megatron.saving import BACKEND, VERSION, fragments, place
from unickpt.integrations.megatron.stored import StoredItems

_OWN = {"format": "unickpt"}  # also where files of Megatron's lie next to it
_LACKING = (
    "{} lacks sharded objects that the state dict requests. Objects, such as the states of random "
    "generators, keep the parallel sizes with which they were saved: leave them out of the state "
    "dict with other sizes (Megatron-LM does that), or load with strict='log_unexpected'"
)


class LoadStrategy(megatron_torch.TorchDistLoadShardedStrategy):
    """Loads a checkpoint of unickpt, onto any parallel sizes; and one of Megatron's own, as
    Megatron does: `dist_checkpointing.load(state, folder, LoadStrategy())`.

    Every rank fills its own tensors in place. If one fails, all do.

    Arguments:
        optimizer: Megatron's, or None; see `SaveStrategy`.
        options: see `unickpt.LoadOptions`.
        cast: whether floats may be cast to the dtypes of the tensors.
        unpickle: whether sharded objects of classes that unickpt does not know, which are stored as
            pickles, are unpickled. That runs code that the checkpoint names.
        metadata: see `SaveStrategy`.
    """

    def __init__(
        self,
        optimizer: Any = None,
        *,
        options: LoadOptions | None = None,
        cast: bool = False,
        unpickle: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.options = LoadOptions.or_default(options)
        self._cast, self._unpickle = cast, unpickle
        self._buckets = Buckets(optimizer, metadata, type(self).__name__)

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path, *megatrons: Any
    ) -> Any:
        """Loads; called by `dist_checkpointing.load` on all ranks.

        Raises:
            UnsupportedFormat: it was saved by a later unickpt.
            LoadMismatch: the requested state is not stored, or not in this form; or `common.pt` is
                of another save.
            ProcessFailed: another rank could not load.
            UnickptError: as `unickpt.load`.
        """
        folder = os.fspath(checkpoint_dir)
        if not is_ours(folder):
            return super().load(sharded_state_dict, checkpoint_dir, *megatrons)
        results: list[Any] = []

        def read(stored: Checkpoint) -> None:
            _check_version(folder)
            if dist.get_rank() == 0:
                common.check(folder, stored)
            items = StoredItems(stored, folder)
            request = _ShardRequest(sharded_state_dict, items, self._buckets)
            results[:] = [request.filled(self._cast, self._unpickle, self.options)]

        # No rank continues while another fails: it would wait for it elsewhere.
        group = job_group(self.options.group, self.options.timeout_s)
        with loaded_together(group, folder):
            try:
                reading_checkpoint(folder, read)
            except Exception as error:
                error.add_note(f"unickpt: on rank {dist.get_rank()} of {dist.get_world_size()}")
                raise
        return results[0]

    def load_tensors_metadata(self, checkpoint_dir: str | Path, *megatrons: Any) -> dict[str, Any]:
        """The stored tensors, without data, by key."""
        folder = os.fspath(checkpoint_dir)
        if not is_ours(folder):
            metadata: dict[str, Any] = super().load_tensors_metadata(checkpoint_dir, *megatrons)
            return metadata
        return StoredItems(unickpt.open(folder, hints=_OWN), folder).tensors()

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """The stored tensors and objects, without data, by key."""
        folder = os.fspath(checkpoint_dir)
        if not is_ours(folder):
            metadata: dict[str, Any] = super().load_sharded_metadata(checkpoint_dir)
            return metadata
        stored = StoredItems(unickpt.open(folder, hints=_OWN), folder)
        # State that Megatron's optimizer requests by the keys of its buckets is stored under other
        # keys.
        return {**stored.objects(), **stored.tensors(), **self._buckets.metadata()}

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        if is_ours(checkpoint_dir):
            raise NotImplementedError(
                f"{checkpoint_dir}: a committed checkpoint is not changed; leave tensors out by "
                "unickpt.convert with rules"
            )
        super().remove_sharded_tensors(checkpoint_dir, key_prefix)


def is_ours(folder: str) -> bool:
    """Whether it is our checkpoint that is to be loaded from a folder, and not one of Megatron's.

    If both are there, after a job went back to a step with the other's strategy, the one that
    `common.pt` belongs to counts. (`metadata.json` of some versions of Megatron, 0.19 for one, does
    not distinguish them if the strategy was within `FullyParallelSaveStrategyWrapper`.)
    """
    if not os.path.exists(os.path.join(folder, MANIFEST)):
        config = maybe_load_config(folder)
        return config is not None and config.sharded_backend == BACKEND  # the error says the rest
    if not os.path.exists(os.path.join(folder, ".metadata")):
        return True
    return common.belongs(folder, unickpt.open(folder, hints=_OWN))


def _check_version(folder: str) -> None:
    config = maybe_load_config(folder)
    version = VERSION if config is None else config.sharded_backend_version
    if version != VERSION:
        raise UnsupportedFormat(
            f"{folder}: metadata.json says version {version} of the sharded_backend, and this "
            f"unickpt knows version {VERSION}; load it with that which saved it, or a later one"
        )


class _ShardRequest:
    """The state that a sharded state dict requests.

    Arguments:
        sharded_state_dict: of this rank.
        items: the stored ones.
        buckets: of the optimizer.
    """

    def __init__(
        self, sharded_state_dict: dict[str, Any], items: StoredItems, buckets: Buckets
    ) -> None:
        self._sharded_state_dict, self._items, self._buckets = sharded_state_dict, items, buckets
        self._index = items.stored.index
        self._objects: dict[str, Node | Leaf] = {}
        self._memory: dict[str, Any] = {}
        self._beyond: list[tuple[torch.Tensor, tuple[int, ...]]] = []

    def filled(self, cast: bool, unpickle: bool, options: LoadOptions) -> Any:
        """The state dict, with the loaded values."""
        like: dict[str, Any] = {}
        copies: list[tuple[TensorPiece, TensorPiece]] = []
        for key, pieces in self._pieces().items():
            first = {piece.box: piece for piece in reversed(pieces)}
            copies += [(p, first[p.box]) for p in pieces if p is not first[p.box]]
            place(like, key, fragments(key, list(first.values())))
        sharded_objects = [x for x in self._values(ShardedObject) if not is_geometry(x.key)]
        errors = [text for value in sharded_objects if (text := self._add_object(like, value))]
        if errors:
            raise LoadMismatch("\n".join([_LACKING.format(self._items.stored.url), *errors]))
        unickpt.load(self._items.stored, like, unexpected="skip", cast=cast, options=options)
        with torch.no_grad():
            for piece, same in copies:
                piece.data.copy_(same.data)
            for data, stop in self._beyond:
                for dim, end in enumerate(stop):
                    data.narrow(dim, end, data.shape[dim] - end).zero_()

        def result(value: Any) -> Any:
            # The sizes of buckets are those of this job, not of the saving one.
            if isinstance(value, ShardedTensor) or is_geometry(value.key):
                return value.data
            node = self._objects[value.unique_key]
            return objects.restored(node, self._index.values, self._memory, unpickle)

        return dict_list_map_outplace(result, self._sharded_state_dict)

    def _values(self, kind: type) -> Iterator[Any]:
        return (x for x in nested_values(self._sharded_state_dict) if isinstance(x, kind))

    def _pieces(self) -> dict[str, list[TensorPiece]]:
        """The boxes of this rank, by key."""
        pieces_by_key: dict[str, list[TensorPiece]] = {}
        for value in self._values(ShardedTensor):
            if value.data is None:
                value.init_data("cpu")
            if is_bucket(value.key):
                pieces = [piece for piece, _ in self._buckets.pieces(value)]
            else:
                pieces = pieces_of(value)
            if value.allow_shape_mismatch:
                pieces = [part for piece in pieces for part in self._within_stored(piece)]
            for piece in pieces:
                pieces_by_key.setdefault(piece.key, []).append(piece)
        return pieces_by_key

    def _within_stored(self, piece: TensorPiece) -> list[TensorPiece]:
        """The stored part of a piece of an array of another size; its other elements become 0."""
        node = self._items.find(piece.key)
        entry = self._index.arrays.get(node.name) if isinstance(node, Leaf) else None
        if entry is None or len(entry.shape) != len(piece.shape):
            return [piece]  # that is reported with all other differences
        start, shape = piece.box.start, tuple(entry.shape)
        ends = zip(start, piece.box.stop, shape, strict=True)
        sizes = tuple(max(0, min(stop, extent) - begin) for begin, stop, extent in ends)
        self._beyond.append((piece.data, sizes))
        if 0 in sizes:
            return []
        box = Box(start, tuple(begin + n for begin, n in zip(start, sizes, strict=True)))
        part = piece.data[tuple(slice(0, n) for n in sizes)]
        return [replace(piece, shape=shape, box=box, data=part)]

    def _add_object(self, like: dict[str, Any], value: ShardedObject) -> str:
        """Requests an object; returns why that is impossible."""
        match = self._items.object(value)
        if match is None:
            shards = self._items.shards(value.key)
            return f"  {value.unique_key}: " + (f"stored as {shards}" if shards else "not stored")
        key, node = match
        self._objects[value.unique_key] = node
        stored, values = self._items.stored, self._index.values
        memory = objects.empty(node, stored.get)
        self._memory |= memory
        place(like, key, rebuild_tree(node, lambda n: memory[n] if n in memory else values[n]))
        return ""
