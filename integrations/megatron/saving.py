"""The save strategy: saves the state from `dist_checkpointing.save` as one atomic checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch

from unickpt import SaveOptions
from unickpt.errors import UnsupportedLeaf
from unickpt.extend import SaveCallbacks, SavedOnly, SaveQueue, SaveRequest, fences_of, put_nested
from unickpt.integrations.destination import Destination, torch_files
from unickpt.integrations.megatron import common, optimizers
from unickpt.integrations.megatron.objects import stored_form
from unickpt.integrations.megatron.pieces import TensorPiece, is_main, pieces_of
from unickpt.integrations.megatron.waiting import Wait
from unickpt.types import LocalFragments, PendingSave, SaveReport

BACKEND, VERSION = "unickpt", 1
"""The content of `metadata.json` in our checkpoints."""
_KEPT = ("metadata.json", common.COMMON, f"{common.COMMON}.partial", "modelopt_state")


class SaveStrategy(megatron_torch.TorchDistSaveShardedStrategy):  # as Megatron from 0.17 on demands
    """Saves into a checkpoint of unickpt: `dist_checkpointing.save(state, folder, SaveStrategy())`.

    Of each replica it is Megatron's main one that is written; within
    `FullyParallelSaveStrategyWrapper`, as usual, data-parallel ranks share the writing.

    Arguments:
        optimizer: Megatron's, or None. With it, the state of a distributed optimizer in flat
            buckets (dp_reshardable) is stored by the parameters' names, in their shapes. Tensors
            that its steps change may be copied in the background, as with
            `unickpt.Checkpointer(optimizers=...)`, because its next step waits for that.
        options: see `unickpt.SaveOptions`. `staging="lazy"` needs `optimizer`.
        metadata: the job's argument of the model's `sharded_state_dict(metadata=...)`, if that
            changes the keys of its parameters. Only for dp_reshardable.

    Raises:
        ValueError: an option cannot be honoured.
    """

    def __init__(
        self,
        optimizer: Any = None,
        *,
        options: SaveOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(BACKEND, VERSION)
        self.options = SaveOptions.or_default(options)
        if self.options.staging in ("lazy", "reference") and optimizer is None:
            raise ValueError(
                f'staging="{self.options.staging}" copies the state in the background: pass '
                "optimizer=, whose next step then waits for that"
            )
        self._optimizer, self._queue = optimizer, SaveQueue()
        self._buckets = optimizers.Buckets(optimizer, metadata, type(self).__name__)
        self.report: SaveReport | None = None
        """Of the last save that has ended."""
        if optimizer is not None:
            for fence in fences_of(optimizers.inner_optimizers(optimizer), self._queue.fence):
                weakref.finalize(self, fence.remove)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> None:
        """Saves; called by `dist_checkpointing.save` on all ranks.

        Raises:
            UnickptError: as `unickpt.save`.
        """
        destination, state = self._prepared(sharded_state_dict, checkpoint_dir)
        self.report = destination.save(state, options=self.options)

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str, async_strategy: str = "mcore"
    ) -> Any:
        """Begins to save, and returns a request for an `AsyncCallsQueue`, ours or Megatron's: the
        save runs already. Its finalisation raises the error of the save.

        Raises:
            UnickptError: as `unickpt.save_async`.
        """
        destination, state = self._prepared(sharded_state_dict, checkpoint_dir)
        request = SaveRequest(
            destination.location,
            state,
            self.options,
            overwrite=True,
            owners=self._owners(sharded_state_dict),
            callbacks=SaveCallbacks(committed=destination.committed),
        )
        pending = self._queue.save(request)
        pending.add_done_callback(partial(_keep, self))
        make = _request_class(async_strategy)
        return make(Wait(pending), (), [partial(self._finish, pending)])

    def _finish(self, pending: PendingSave) -> None:
        self.report = pending.result()

    def _prepared(self, state: dict[str, Any], folder: str) -> tuple[Destination, _ShardedState]:
        """The destination, and the tree to save."""
        sharded_objects = (x for x in nested_values(state) if isinstance(x, ShardedObject))
        common_objects = [x for x in sharded_objects if x.key == common.COMMON_KEY]
        first = dist.get_rank() == 0
        if first and common_objects:
            common.write(folder, common_objects[0].data)
        tree = _ShardedState(state, folder, self._buckets, first)
        return Destination.at_path(folder, torch_files, _KEPT), tree

    def _owners(self, state: dict[str, Any]) -> set[Hashable] | None:
        """The memory that only steps of the optimizer change."""
        if self._optimizer is None:
            return None
        tensors = [x for x in nested_values(state) if isinstance(x, ShardedTensor)]
        slots = [x.data for x in tensors if "optimizer." in x.key]
        tensors_of_steps = [*optimizers.model_parameters(self._optimizer), *slots]
        return {x.untyped_storage()._cdata for x in tensors_of_steps if isinstance(x, torch.Tensor)}


@dataclass(frozen=True, eq=False)
class _ShardedState(SavedOnly):
    """The tree to save; made within the save, so that it fails on all ranks if it fails on one.

    Arguments:
        sharded_state_dict: of this rank.
        folder: where Megatron has put `common.pt`.
        buckets: of the optimizer.
        with_common: whether this rank saves its content.
    """

    sharded_state_dict: dict[str, Any]
    folder: str
    buckets: optimizers.Buckets
    with_common: bool

    def state_dict(self) -> dict[str, Any]:
        try:
            return self._tree()
        except (UnsupportedLeaf, ValueError) as error:
            raise UnsupportedLeaf(f"rank {dist.get_rank()}: {error}") from error

    def _tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        pieces_by_key: dict[str, list[TensorPiece]] = {}
        for value in nested_values(self.sharded_state_dict):
            if not isinstance(value, ShardedObject):
                for piece in self._pieces(value):
                    pieces_by_key.setdefault(piece.key, []).append(piece)
            elif _is_saved(value):
                name = value.unique_key
                place(tree, name, stored_form(value.data, name))
        for key, pieces in pieces_by_key.items():
            place(tree, key, fragments(key, pieces))
        shared = common.tree(self.folder) if self.with_common else {}
        for key, value in shared.items():
            if key in tree:
                raise UnsupportedLeaf(
                    f"{key!r} is both in {common.COMMON} and a key of sharded values; rename one"
                )
            tree[key] = value
        return tree

    def _pieces(self, value: ShardedTensor) -> list[TensorPiece]:
        """The part of a `ShardedTensor` that this rank saves."""
        if optimizers.is_bucket(value.key):
            return [piece for piece, saved in self.buckets.pieces(value) if saved]
        return pieces_of(value) if is_main(value.replica_id) else []


def _is_saved(value: ShardedObject) -> bool:
    is_excluded = value.key == common.COMMON_KEY or optimizers.is_geometry(value.key)
    return is_main(value.replica_id) and not is_excluded


def place(root: dict[str, Any], key: str, value: Any) -> None:
    """Puts a value under a key of Megatron's; each `/` is a level of the tree.

    Raises:
        UnsupportedLeaf: something else is there.
    """
    parts = key.split("/")
    if not put_nested(root, parts if all(parts) else [key], value):
        raise UnsupportedLeaf(f"{key!r} occurs twice, or lies below a value; rename one")


def fragments(key: str, pieces: Sequence[TensorPiece]) -> LocalFragments:
    """This rank's part of an array.

    Raises:
        UnsupportedLeaf: the pieces contradict each other.
    """
    first = pieces[0]
    for piece in pieces:
        facts = piece.shape, piece.data.dtype
        if facts != (first.shape, first.data.dtype):
            raise UnsupportedLeaf(
                f"{key!r}: one ShardedTensor is part of {list(first.shape)} of "
                f"{first.data.dtype}, another of {list(piece.shape)} of {piece.data.dtype}"
            )
    try:
        return LocalFragments(first.shape, [(piece.box, piece.data) for piece in pieces])
    except ValueError as error:
        raise UnsupportedLeaf(f"{key!r}: {error}") from error


def _request_class(async_strategy: str) -> Any:
    """The class of requests that the job's queue takes."""
    find = getattr(megatron_torch, "get_async_strategy", None)  # from 0.17 on
    if find is None:
        return async_utils.AsyncRequest
    return find(async_strategy, "AsyncRequest")[1]


def _keep(strategy: SaveStrategy) -> None:
    """Nothing: a reference to this also keeps the strategy, whose fence must stay until then."""
