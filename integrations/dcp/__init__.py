"""The functions of torch.distributed.checkpoint, over unickpt: change one import.

    import unickpt.integrations.dcp as dcp  # instead of torch.distributed.checkpoint

No plans are gathered: the processes talk only through the storage, and the checkpoint is an
ordinary one of unickpt. `StorageWriter` and `StorageReader`, also as `FileSystemWriter` and
`FileSystemReader`, are for code that is bound to torch's own functions and planners. Other names of
torch's module, such as planners and metadata, are torch's own here. docs/integrations/dcp.md lists
the differences.
"""

from __future__ import annotations

import copy
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import stateful
from torch.distributed.checkpoint import storage as torch_storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

import unickpt
from unickpt import Checkpoint, LoadOptions, SaveOptions
from unickpt.extend import (
    PathLike,
    SavedOnly,
    group_of_one,
    job_group,
    loaded_together,
    reading_checkpoint,
    settle_future,
    structure_of,
)
from unickpt.integrations.dcp.file_system import FileSystemReader, FileSystemWriter
from unickpt.integrations.dcp.storage import (
    StorageReader,
    StorageWriter,
    destination,
    filled,
    portable,
    replaced_metadata,
    with_stored_lists,
)
from unickpt.types import PendingSave, SaveReport

try:
    from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager
    from torch.distributed.checkpoint.state_dict_saver import (
        AsyncCheckpointerType,
        AsyncSaveResponse,
    )
except ImportError as missing:
    raise ImportError(
        f"unickpt.integrations.dcp replaces functions of torch 2.9 or later; this is torch "
        f"{torch.__version__}. unickpt.save and unickpt.load take the same state dicts"
    ) from missing

__all__ = [
    "FileSystemReader",
    "FileSystemWriter",
    "StorageReader",
    "StorageWriter",
    "async_save",
    "load",
    "save",
]

T = TypeVar("T", StorageReader, StorageWriter)
Options = TypeVar("Options", SaveOptions, LoadOptions)
_TO_SAVE, _TO_LOAD = ("storage_writer", "where to save"), ("storage_reader", "what to load")


# They save and load by themselves.
_INSTEAD = {
    "save_state_dict": "save",
    "load_state_dict": "load",
    "load_sharded_optimizer_state_dict": "load, with the optimizer in the state dict",
    "HuggingFaceStorageWriter": "unickpt.convert(..., to='hf')",
    "HuggingFaceStorageReader": "load, which opens such folders",
    "QuantizedHuggingFaceStorageReader": "load, which opens such folders",
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise AttributeError(
            f"unickpt.integrations.dcp has no {name}; use {_INSTEAD[name]}, or "
            f"torch.distributed.checkpoint.{name}"
        )
    if not name.startswith("_") and hasattr(torch_dcp, name):
        return getattr(torch_dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_writer: torch_storage.StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> SaveReport:
    """Saves a state dict, as `torch.distributed.checkpoint.save`; a checkpoint at the path, also
    one of torch in a local folder, is replaced, atomically.

    Arguments:
        state_dict: tensors, DTensors, plain values and `Stateful` objects, in dicts and lists.
            Ranks may hold different keys.
        checkpoint_id: a local path or a URL (file, memory, s3, gs).
        storage_writer: a `StorageWriter` of this module, for its path and options.
        planner: None, or torch's `DefaultSavePlanner`; nothing is planned together.
        process_group: the ranks that save, all of which must call this; None for all.
        no_dist: whether this process saves alone.
        use_collectives: of no effect: no collectives are used. All ranks must call this.

    Returns:
        The save's report. `StorageReader(path).read_metadata()` gives torch's `Metadata`.

    Raises:
        ValueError, TypeError: an argument cannot be honoured; names it.
        UnickptError: as `unickpt.save`.

    Example:
        >>> import torch
        >>> import unickpt.integrations.dcp as dcp
        >>> _ = dcp.save({"w": torch.ones(2), "step": 3}, checkpoint_id="memory://dcp/save")
        >>> state = {"w": torch.zeros(2), "step": 0}
        >>> dcp.load(state, checkpoint_id="memory://dcp/save")
        >>> state
        {'w': tensor([1., 1.]), 'step': 3}
    """
    writer = _storage(StorageWriter, checkpoint_id, storage_writer, *_TO_SAVE)
    _check_save(planner)
    options = _together(writer.options, process_group, no_dist)
    state, overwrite = to_save(state_dict), writer.overwrite
    target = destination(writer.checkpoint_id, overwrite=overwrite)
    metadata = replaced_metadata(target)
    return target.save(state, overwrite=overwrite, metadata=metadata, options=options)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_writer: torch_storage.StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Any] | AsyncSaveResponse:
    """Saves a state dict in the background, as `torch.distributed.checkpoint.async_save`.

    Arguments:
        state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist,
            use_collectives: as for `save`.
        async_checkpointer_type: THREAD.
        async_stager: None, or a `DefaultStager`. With its `use_async_staging` the state must not
            change before `staging_completion`; else it may change when this returns. On an
            accelerator it is cloned there and copied in the background
            (`SaveOptions(staging="lazy")`); on the host it is copied before this returns. The
            stager itself copies nothing.

    Returns:
        A future of the save's report; an `AsyncSaveResponse` if the state is copied in the
        background. The next call raises an error that the future did not raise, or the program
        exits with status 1.

    Raises:
        ValueError, TypeError: an argument cannot be honoured; names it.
        UnickptError: as `unickpt.save_async`.
    """
    writer = _storage(StorageWriter, checkpoint_id, storage_writer, *_TO_SAVE)
    _check_save(planner)
    if async_checkpointer_type is not AsyncCheckpointerType.THREAD:
        raise ValueError(
            f"async_checkpointer_type={async_checkpointer_type} is not supported: unickpt writes "
            "on threads of this process, which step back behind the training; leave it out"
        )
    later = _stages_later(async_stager)
    options = _together(writer.options, process_group, no_dist)
    if later:
        options = replace(options, staging="lazy")
    state, overwrite = to_save(state_dict), writer.overwrite
    target = destination(writer.checkpoint_id, overwrite=overwrite)
    metadata = replaced_metadata(target)
    pending = target.save_async(state, overwrite=overwrite, metadata=metadata, options=options)
    upload = SaveFuture(pending)
    if not later:
        return upload
    staged: Future[None] = Future()
    threading.Thread(target=settle_future, args=(staged, pending.wait_staged), daemon=True).start()
    return AsyncSaveResponse(staged, upload)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_reader: torch_storage.StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Loads into a state dict in place, as `torch.distributed.checkpoint.load`; also torch's own
    checkpoints.

    Arguments:
        state_dict: to load into: all its keys must be stored, in the same shapes; floats are cast
            to its dtypes. Other stored values are skipped.
        checkpoint_id: a path or URL of a checkpoint that `unickpt.open` can open.
        storage_reader: a `StorageReader` of this module, for its path and options.
        planner: None, or torch's `DefaultLoadPlanner`; with its `allow_partial_load`, keys that are
            not stored keep their values.
        process_group: the ranks that load, all of which must call this; None for all.
        no_dist: whether this process loads alone.

    Raises:
        ValueError, TypeError: an argument cannot be honoured; names it.
        UnickptError: as `unickpt.load`; on all ranks, if one fails.
    """
    reader = _storage(StorageReader, checkpoint_id, storage_reader, *_TO_LOAD)
    partial = _allows_partial(planner)
    options = _together(reader.options, process_group, no_dist)

    request = RequestedState(state_dict)

    def read(stored: Checkpoint) -> None:
        request.stored = stored
        unickpt.load(
            stored,
            request,
            missing="keep" if partial else "error",
            unexpected="skip",
            cast=True,
            options=options,
        )

    # As after torch's load, which ends with a collective, no rank continues, and may remove the
    # folder, while another still reads.
    group = job_group(options.group, options.timeout_s)
    with loaded_together(group, str(reader.checkpoint_id)):
        reading_checkpoint(reader.checkpoint_id, read)
    request.give_back()


class RequestedState:
    """The requested state; made within the load, so that it fails on all ranks if an object fails
    on one.

    Each object's `state_dict` is called once, in the order of keys: objects may use collectives,
    and ranks may have them in different orders.
    """

    stored: Checkpoint
    """The checkpoint; set before the load."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self._state_dict = state_dict
        self.resolved: dict[str, Any] = {}
        """The state dict, with the states of its objects; changed in place by the load."""

    def state_dict(self) -> Any:
        if not self.resolved:
            items = sorted(self._state_dict.items(), key=lambda item: str(item[0]))
            self.resolved = {k: v.state_dict() if _is_stateful(v) else v for k, v in items}
        return with_stored_lists(self.resolved, structure_of(self.stored), self.stored.index.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        filled(self.resolved, state)

    def give_back(self) -> None:
        """Passes the loaded state to the objects; called after the load."""
        for key, state in self.resolved.items():
            if _is_stateful(self._state_dict[key]):
                self._state_dict[key].load_state_dict(state)
            else:
                self._state_dict[key] = state


class ObjectState(SavedOnly):
    """An object's state to save; made within the save, for the same reason."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> Any:
        return portable(self._value.state_dict())


def to_save(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The tree to save of a state dict."""
    return {k: ObjectState(v) if _is_stateful(v) else portable(v) for k, v in state_dict.items()}


class SaveFuture(Future[Any]):
    """The future of a pending save. An error counts as reported once the future returns it."""

    def __init__(self, pending: PendingSave) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # it cannot be cancelled
        self._pending = pending
        # Only marks the end; `pending` has the outcome.
        pending.add_done_callback(lambda: self.set_result(None))

    def result(self, timeout: float | None = None) -> SaveReport:
        return self._pending.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        super().result(timeout)
        try:
            self._pending.result()
        except BaseException as error:
            return error
        return None


# --- arguments: unsupported ones are refused by name ----------------------------------------------


def _storage(kind: type[T], path: PathLike | None, storage: Any, argument: str, do: str) -> T:
    """A storage object with the given path, and the options of a given one.

    Arguments:
        kind: `StorageWriter` or `StorageReader`.
        path: None for that of the given one.
        storage: the argument, if any.
        argument, do: for messages: its name, and the action at the path.
    """
    if storage is not None and not isinstance(storage, kind):
        raise TypeError(
            f"{argument}= is a {type(storage).__name__}, which has files of its own; pass "
            f"checkpoint_id=, or unickpt.integrations.dcp.{kind.__name__}(path)"
        )
    made = kind() if storage is None else copy.copy(storage)
    made.reset(path)
    if made.path is None:
        raise ValueError(f"checkpoint_id= is missing: say {do}")
    return made


def _check_save(planner: SavePlanner | None) -> None:
    if planner is None:
        return
    _check_planner(planner, DefaultSavePlanner, "StorageWriter")
    if getattr(planner, "dedup_save_to_lowest_rank", False):
        raise ValueError(
            "planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True) is not supported: all "
            "ranks that hold a replica share the writing"
        )


def _allows_partial(planner: LoadPlanner | None) -> bool:
    if planner is None:
        return False
    _check_planner(planner, DefaultLoadPlanner, "StorageReader")
    return bool(getattr(planner, "allow_partial_load", False))


def _check_planner(planner: object, supported: type, storage: str) -> None:
    if type(planner) is not supported:
        raise TypeError(
            f"planner= is a {type(planner).__name__}, and nothing is planned here; call "
            f"torch.distributed.checkpoint with unickpt.integrations.dcp.{storage}(path), which "
            "uses it"
        )
    for setting in ("flatten_state_dict", "flatten_sharded_tensors"):
        if not getattr(planner, setting, True):
            raise ValueError(
                f"planner={supported.__name__}({setting}=False) is not supported: names are paths "
                "in the state dict"
            )


def _together(options: Options, process_group: dist.ProcessGroup | None, no_dist: bool) -> Options:
    """The options of a save or a load by some ranks."""
    if no_dist:
        return replace(options, group=group_of_one())
    return options if process_group is None else replace(options, group=process_group)


def _stages_later(stager: AsyncStager | None) -> bool:
    if stager is None:
        return False
    if type(stager) is not DefaultStager:
        raise TypeError(
            f"async_stager= is a {type(stager).__name__}; unickpt copies the state itself: leave "
            "it out, or pass a DefaultStager"
        )
    return bool(stager._config.use_async_staging)


def _is_stateful(value: object) -> bool:
    """Whether an object's own functions save and load it; unickpt handles modules and optimizers
    itself, unless their functions were replaced."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return "state_dict" in vars(value)
    return isinstance(value, stateful.Stateful)
