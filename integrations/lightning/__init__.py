"""Lightning's checkpoints in unickpt's format: a `CheckpointIO`, and a mixin for strategies.

    trainer = Trainer(plugins=[UnickptCheckpointIO()])

    class Strategy(ShardedCheckpoints, ModelParallelStrategy): ...  # or FSDPStrategy, DeepSpeed's
    trainer = Trainer(strategy=Strategy())

The training waits until the state is copied; the rest is done in the background. Works with
`lightning` and with `pytorch_lightning`. docs/integrations/lightning.md lists the differences.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict as torch_state

import unickpt
from unickpt import Checkpoint, LoadOptions, SaveOptions
from unickpt.errors import CheckpointNotFound, InvalidPath
from unickpt.extend import PathLike, checkpoints_below, group_of_one, reading_checkpoint
from unickpt.integrations.engines import check_same_kind
from unickpt.integrations.lightning import engines, saves
from unickpt.integrations.lightning.values import ToSave, read
from unickpt.types import Group

_SHARDED = ("state_dict", "optimizer_states")
"""The keys that all ranks save and load; all others are as rank 0 has them."""


def _fabric() -> list[str]:
    """The packages, of those that have Lightning's plugins, that the program has imported."""
    both = ("lightning.fabric", "lightning_fabric")
    return [name for name in both if name in sys.modules] or ["lightning.fabric"]


def _of_fabric(name: str) -> list[Any]:
    """A class of Lightning's plugins, as each of these packages has it."""
    modules = (importlib.import_module(f"{package}.plugins.io") for package in _fabric())
    return [getattr(module, name) for module in modules]


if TYPE_CHECKING:
    _CheckpointIO = Any
else:
    _CheckpointIO = type("_CheckpointIO", tuple(_of_fabric("CheckpointIO")), {})


class UnickptCheckpointIO(_CheckpointIO):
    """Saves Lightning's checkpoints in the background, as folders in unickpt's format.

    A save that fails does so in the next `save_checkpoint` or at the end of the training, whichever
    comes first; until then, nothing is removed that it was to replace.

    Arguments:
        options: how to save; see `unickpt.SaveOptions`.
        load_options: how to load; see `unickpt.LoadOptions`.
        background: False waits until each checkpoint is committed, as is always done where
            Lightning would miss it otherwise; see docs/integrations/lightning.md.

    Example:
        >>> from lightning import Trainer
        >>> trainer = Trainer(plugins=[UnickptCheckpointIO()], logger=False)
    """

    def __init__(
        self,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        *,
        background: bool = True,
    ) -> None:
        super().__init__()
        self.options = SaveOptions.or_default(options)
        self.load_options = load_options
        self.background = background

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes that are spawned; saves in flight stay here."""
        make = partial(type(self), background=self.background)
        return make, (self.options, self.load_options)

    @cached_property
    def _saves(self) -> saves.Saves:
        return saves.Saves()

    @cached_property
    def _alone(self) -> Group:
        # The same for all saves, so that cached facts about the state are reused.
        return group_of_one()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None
    ) -> None:
        """Saves the state of one process; returns when it may change.

        Arguments:
            checkpoint: as Lightning's trainer makes it.
            path: a local path or a URL; a checkpoint there is replaced, atomically. At `memory://`,
                which is fsspec's in Lightning, Lightning's own plugin saves it.
            storage_options: None.

        Raises:
            TypeError: `storage_options` are given.
            UnsupportedLeaf: lists the values that cannot be stored without pickle.
            UnickptError: as `unickpt.save_async`; also the error of an earlier save.
        """
        _check_storage_options(storage_options)
        if _is_in_memory(path):
            _torch_io().save_checkpoint(checkpoint, path)
            return
        options = replace(self.options, group=self._alone)
        self._begin(ToSave(checkpoint), self._saves.destination(path), options)

    def _begin(
        self,
        tree: Any,
        destination: saves.SaveDestination,
        options: SaveOptions,
        rank: int = 0,
        ranks: int = 1,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._saves.begin(tree, destination, options, rank, ranks, metadata)
        if not self.background or saves.must_wait(destination.path):
            self._saves.close()

    def load_checkpoint(
        self,
        path: PathLike,
        map_location: Any = None,
        weights_only: bool | None = None,
        *,
        state: None = None,
    ) -> dict[str, Any]:
        """Loads a whole checkpoint; files that Lightning itself saved as Lightning does.

        Arguments:
            path: a local path or a URL.
            map_location: None for host memory, or a device.
            weights_only: of no effect on our checkpoints, from which nothing is ever unpickled.
            state: None.

        Raises:
            TypeError: an argument cannot be honoured; names it.
            CheckpointExists: a `ModelCheckpoint` of this job would save where a file of Lightning's
                own is; names the file to move.
            UnickptError: as `unickpt.load`.
        """
        if state is not None:
            raise TypeError(
                "state= is not supported: the whole checkpoint is returned; for sharded models "
                "use the mixin unickpt.integrations.lightning.ShardedCheckpoints"
            )
        saves.Saves.wait_for_all()
        if _is_file(path) or _is_in_memory(path):
            loaded: dict[str, Any] = _torch_io().load_checkpoint(path, map_location, weights_only)
            saves.check_last_can_be_saved(loaded)
            return loaded
        if not isinstance(map_location, str | torch.device | None):
            raise TypeError(
                f"map_location= is a {type(map_location).__name__}; give a device, or leave it "
                "out: tensors are loaded into host memory, wherever they were"
            )

        def whole(stored: Checkpoint) -> dict[str, Any]:
            check_same_kind(path, stored.metadata, has_engine=False)
            return dict(read(stored, device=map_location, options=self.load_options))

        return reading_checkpoint(path, whole)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Removes a checkpoint, when the saves in flight are committed; it stays if they fail."""
        if _is_in_memory(path):
            _torch_io().remove_checkpoint(path)
        else:
            self._saves.remove(path)

    def teardown(self) -> None:
        """Waits until all is saved.

        Raises:
            UnickptError: the error of a save or removal that was not raised before.
        """
        self._saves.close()


class ShardedCheckpoints:
    """A mixin for `FSDPStrategy`, `ModelParallelStrategy` and `DeepSpeedStrategy`: every rank saves
    and loads its own part of the model and the optimizers, and nothing is gathered.

    Checkpoints are loaded onto any number of ranks. How is an `UnickptCheckpointIO` of
    `Trainer(plugins=...)`.

    Example:
        >>> from lightning.pytorch.strategies import ModelParallelStrategy
        >>> class Strategy(ShardedCheckpoints, ModelParallelStrategy):
        ...     pass
        >>> strategy = Strategy(data_parallel_size=4, tensor_parallel_size=1)
    """

    _checkpoint_io: Any
    model: Any
    optimizers: Any
    lightning_module: Any
    is_global_zero: bool
    global_rank: int
    world_size: int

    @property
    def checkpoint_io(self) -> UnickptCheckpointIO:
        """How to save and load."""
        if self._checkpoint_io is None:
            self._checkpoint_io = UnickptCheckpointIO()
        if not isinstance(self._checkpoint_io, UnickptCheckpointIO):
            raise TypeError(
                f"the plugin {type(self._checkpoint_io).__name__} cannot save with "
                f"{type(self).__name__}: pass an UnickptCheckpointIO, or leave it out"
            )
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def setup_environment(self) -> None:
        if not getattr(self, "_save_distributed_checkpoint", True):
            raise ValueError(
                "save_distributed_checkpoint=False is not supported: every rank saves its part; "
                "`unickpt export` makes one file of a checkpoint"
            )
        super().setup_environment()  # type: ignore[misc]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state; of sharded tensors this rank's part. Empty with DeepSpeed, whose
        engine is saved instead."""
        if engines.engine_of(self) is not None:
            return {}
        return torch_state.get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer by the names of the parameters, likewise."""
        if engines.engine_of(self) is not None:
            return {}
        return self._optimizer_state(getattr(optimizer, "optimizer", optimizer))

    def _optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = torch_state.get_optimizer_state_dict(self.model, optimizer)
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any = None
    ) -> None:
        """Saves the parts of all ranks; returns when they may change.

        Raises:
            TypeError: `storage_options` are given.
            UnickptError: as `unickpt.save_async`; also the error of an earlier save.
        """
        _check_storage_options(storage_options)
        if _is_in_memory(filepath):
            raise InvalidPath(
                f"{filepath}: memory:// belongs to one process, but each rank saves its part; "
                "save to a local folder that all ranks see, or to s3:// or gs://"
            )
        io = self.checkpoint_io
        local_destination = io._saves.destination(filepath) if self.is_global_zero else None
        destination: saves.SaveDestination = self.broadcast(local_destination)  # type: ignore[attr-defined]
        if not self.is_global_zero:
            checkpoint = {key: checkpoint[key] for key in _SHARDED if key in checkpoint}
        tree: Any = ToSave(checkpoint)
        metadata: dict[str, Any] | None = None
        if engines.engine_of(self) is not None:
            tree, metadata = engines.with_engine(self, checkpoint)
        io._begin(tree, destination, io.options, self.global_rank, self.world_size, metadata)

    def load_checkpoint(
        self, checkpoint_path: PathLike, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads into the model and the optimizers; also Lightning's own checkpoints.

        Returns:
            The rest of the checkpoint.

        Raises:
            UnickptError: as `unickpt.load`.
        """
        path = self.broadcast(checkpoint_path)  # type: ignore[attr-defined]
        saves.Saves.wait_for_all()
        engine = engines.engine_of(self)
        theirs = "meta.pt" if engine is None else engines.LATEST
        if _is_file(path) or _is_file(os.path.join(path, theirs)):
            checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)  # type: ignore[misc]
            return checkpoint
        fits = self.lightning_module.trainer.state.fn == "fit"
        if engine is not None:
            return engines.load(self, os.fspath(path), fits, self.checkpoint_io.load_options)
        # First, because it makes the state of new optimizers, by a step.
        states = [self._optimizer_state(x) for x in self.optimizers] if fits else []
        model = self.lightning_module_state_dict()
        state: dict[str, Any] = {"state_dict": model, "optimizer_states": states}
        other_values = reading_checkpoint(path, lambda stored: self._load(stored, state))
        strict = torch_state.StateDictOptions(strict=self.lightning_module.strict_loading)
        torch_state.set_model_state_dict(self.model, state["state_dict"], options=strict)
        for pair in zip(self.optimizers, state["optimizer_states"], strict=False):
            torch_state.set_optimizer_state_dict(self.model, *pair)
        return other_values

    def _load(self, stored: Checkpoint, state: dict[str, Any]) -> dict[str, Any]:
        """Loads into the tensors of a state dict, and returns the stored values that are not in
        it."""
        io = self.checkpoint_io
        check_same_kind(stored.location, stored.metadata, has_engine=False)
        other_values: dict[str, Any] = read(stored, skip={*_SHARDED}, options=io.load_options)
        keys = [key for key in _SHARDED if state[key]]
        tree = unickpt.load(
            stored,
            {key: state[key] for key in keys},
            only=[f"{key}/**" for key in keys],
            strict=self.lightning_module.strict_loading,
            options=io.load_options,
        )
        for key in keys:
            state[key] = _with_values(state[key], tree[key])
        return other_values

    def teardown(self) -> None:
        """Waits until all is saved."""
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()  # type: ignore[misc]


def last_checkpoint(folder: PathLike) -> str | None:
    """The path of the newest complete checkpoint in a folder of a local disk or an object storage.

    Unlike `ckpt_path="last"` it also finds those that are not called so, and those at URLs.

    Arguments:
        folder: as `ModelCheckpoint(dirpath=...)`.

    Returns:
        None if there is none, so that `trainer.fit(model, ckpt_path=last_checkpoint(folder))`
        starts from the beginning.

    Raises:
        UnickptError: one cannot be read.

    Example:
        >>> last_checkpoint("memory://runs/none")
    """
    try:
        listed = [entry for entry in checkpoints_below(folder) if entry.name[0] != "."]
    except CheckpointNotFound:
        return None
    newest = [(*_time_of(unickpt.open(entry.path)), entry.path) for entry in listed]
    return max(newest)[-1] if newest else None


def _time_of(stored: Checkpoint) -> tuple[str, int]:
    """When a checkpoint was saved, to the second, and at which step."""
    step = stored.index.values.get("global_step")
    return stored.index.created, step if type(step) is int else -1


def _check_storage_options(storage_options: object) -> None:
    if storage_options is not None:
        raise TypeError(
            "storage_options= is not supported: pass UnickptCheckpointIO(options="
            "unickpt.SaveOptions(...)) to the Trainer"
        )


def _torch_io() -> Any:
    return _of_fabric("TorchCheckpointIO")[0]()


def _is_in_memory(path: PathLike) -> bool:
    """Whether a path is in fsspec's memory, where Lightning looks for checkpoints. unickpt, whose
    `memory://` is another, does not save there: they stay files of Lightning's."""
    return os.fspath(path).startswith("memory://")


def _is_file(path: PathLike) -> bool:
    return "://" not in os.fspath(path) and os.path.isfile(path)


def _with_values(state: Any, new_state: Any) -> Any:
    """A state dict after a load: its tensors, which are filled, and new values."""
    if isinstance(state, dict):
        return type(state)((key, _with_values(x, new_state[key])) for key, x in state.items())
    if type(state) is list:
        return [_with_values(*pair) for pair in zip(state, new_state, strict=True)]
    return state if isinstance(state, torch.Tensor) else new_state
