"""Like `Accelerator.save_state` and `load_state`, as one checkpoint, on any number of processes.

    from unickpt.integrations.accelerate import load_state, save_state, save_state_async

    save_state(accelerator, "runs/latest")  # instead of accelerator.save_state("runs/latest")
    load_state(accelerator, "runs/latest")

docs/integrations/accelerate.md lists the differences.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler

import unickpt
from unickpt import Checkpoint, PerProcess, SaveOptions
from unickpt.errors import LoadMismatch
from unickpt.extend import NamedOptimizer, PathLike, reading_checkpoint
from unickpt.integrations import rng
from unickpt.integrations.accelerate.naming import (
    Excess,
    broadcast,
    find_checkpoint,
    is_theirs,
    next_path,
    theirs_of,
)
from unickpt.integrations.destination import Destination
from unickpt.integrations.engines import EngineTree, check_same_kind, load_into, metadata_of
from unickpt.integrations.packing import packed, unpacked
from unickpt.types import PendingSave, PerProcessValues, SaveReport

__all__ = ["load_state", "save_state", "save_state_async"]

_log = logging.getLogger("unickpt")
_COUNTS = "accelerate"
_LISTS = ("models", "optimizers", "schedulers", "custom_objects", "dataloaders")


def save_state(
    accelerator: Accelerator,
    output_dir: PathLike | None = None,
    safe_serialization: bool = True,
    *,
    options: SaveOptions | None = None,
    **save_model_func_kwargs: Any,
) -> SaveReport:
    """Saves the same as `Accelerator.save_state`: models, optimizers, schedulers, data loaders, the
    generators of each process, the gradient scaler, registered objects and the step.

    All processes call this.

    Arguments:
        accelerator: has prepared them.
        output_dir: a local path or a URL; a checkpoint there is replaced, atomically. None with
            `ProjectConfiguration(automatic_checkpoint_naming=True)`: the next name below
            `project_dir/checkpoints`; when it is committed, the oldest beyond `total_limit` are
            removed.
        safe_serialization: True; nothing is pickled.
        options: see `unickpt.SaveOptions`.
        save_model_func_kwargs: none; with DeepSpeed `exclude_frozen_parameters`.

    Returns:
        The save's report.

    Raises:
        ValueError, TypeError: an argument or a setting cannot be honoured; names it.
        CheckpointExists: the next automatic name is in use.
        UnickptError: as `unickpt.save`.

    Example:
        >>> import torch, accelerate
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 3))
        >>> report = save_state(accelerator, "memory://accelerate/docs")
        >>> load_state(accelerator, "memory://accelerate/docs")
    """
    _check_save(accelerator, safe_serialization, save_model_func_kwargs)
    path = next_path(accelerator, output_dir)
    destination, overwrite = Destination.at_path(path, theirs_of), output_dir is not None
    tree, metadata = _saved(accelerator, save_model_func_kwargs)
    report = destination.save(tree, overwrite=overwrite, metadata=metadata, options=options)
    accelerator.project_configuration.iteration += 1
    Excess(accelerator, path)()
    return report


def save_state_async(
    accelerator: Accelerator,
    output_dir: PathLike | None = None,
    safe_serialization: bool = True,
    *,
    options: SaveOptions | None = None,
    **save_model_func_kwargs: Any,
) -> PendingSave:
    """As `save_state`, but writes in the background: training continues when this returns.

    Arguments:
        accelerator, output_dir, safe_serialization, options, save_model_func_kwargs: as there.

    Returns:
        The pending save. The next call raises an error that its `result` did not raise, else the
        program exits with status 1.

    Raises:
        ValueError, TypeError, CheckpointExists: as `save_state`.
        UnickptError: as `unickpt.save_async`.
    """
    _check_save(accelerator, safe_serialization, save_model_func_kwargs)
    path = next_path(accelerator, output_dir)
    destination = Destination.at_path(path, theirs_of)
    tree, metadata = _saved(accelerator, save_model_func_kwargs)
    overwrite = output_dir is not None
    pending = destination.save_async(tree, overwrite=overwrite, metadata=metadata, options=options)
    accelerator.project_configuration.iteration += 1
    pending.add_done_callback(Excess(accelerator, path))
    return pending


def load_state(
    accelerator: Accelerator,
    input_dir: PathLike | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> None:
    """Loads a checkpoint of `save_state` into the objects of an accelerator, on any number of
    processes; and one of `Accelerator.save_state` itself, as `Accelerator.load_state` does.

    All processes call this. The generators of a process without a counterpart stay unchanged.

    Arguments:
        accelerator: has prepared as many models, optimizers, ..., in the same order.
        input_dir: a path or URL; None with automatic naming: the newest, and the next save gets the
            name after it.
        load_kwargs, load_model_func_kwargs: none, with DeepSpeed `load_module_strict`; nothing is
            unpickled. For a folder that accelerate itself saved, as there.

    Raises:
        ValueError, TypeError: an argument or a setting cannot be honoured; names it.
        CheckpointNotFound: there is none.
        LoadMismatch: it is of other models, optimizers, ..., or a stateful data loader's position
            is requested on another number of processes; nothing was changed.
        UnickptError: as `unickpt.load`.
    """
    _check_kind(accelerator)
    path, iteration = find_checkpoint(accelerator, input_dir)
    theirs = broadcast(is_theirs(path) if accelerator.is_main_process else None)
    if theirs is None:
        arguments = {**(load_kwargs or {}), **load_model_func_kwargs}
        _check_arguments(accelerator, arguments, _STRICT)
        if accelerator._load_model_state_pre_hook:
            raise ValueError(_HOOKS.format("register_load_state_pre_hook"))
        _load(accelerator, path, arguments.get(_STRICT, True))
    else:
        accelerator.load_state(theirs, load_kwargs, **load_model_func_kwargs)
    if iteration is not None:
        accelerator.project_configuration.iteration = iteration + 1


def _load(accelerator: Accelerator, path: PathLike, strict: bool) -> None:
    """Loads a checkpoint of `save_state`."""
    engine = _engine_of(accelerator)

    def read(stored: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
        check_same_kind(path, stored.metadata, engine is not None)
        _check_counts(path, stored.metadata.get(_COUNTS), _metadata(accelerator)[_COUNTS])
        values = unickpt.load(stored, only="values/**")["values"]
        mine = _of_this(accelerator, path, values["process"])
        if engine is None:
            with _without_later_states(accelerator, stored):
                unickpt.load(stored, _state(accelerator), unexpected="skip")
        return values, mine

    # Opened once: the checkpoint may be replaced meanwhile.
    if engine is None:
        values, mine = reading_checkpoint(path, read)
    else:  # whose ranks load together, so none of them may start again by itself
        stored = unickpt.open(path)
        values, mine = read(stored)
        load_into(engine, stored, strict=strict)
        unickpt.load(stored, _state(accelerator), unexpected="skip")
    for number, registered in enumerate(accelerator._custom_objects):
        if not _is_own_kind(registered):
            what = f"{path}: registered object {number}"
            registered.load_state_dict(unpacked(values["registered"][str(number)], what))
    positions = zip(accelerator._dataloaders, mine["dataloaders"], strict=True)
    for number, (dataloader, state) in enumerate(positions):
        _set_position(dataloader, unpacked(state, f"{path}: data loader {number}"), number)
    accelerator.step = mine["step"]
    rng.restore(mine["rng"])


# --- the stored tree ------------------------------------------------------------------------------


def _state(accelerator: Accelerator) -> dict[str, Any]:
    """The objects that are loaded in place."""
    objects = enumerate(accelerator._custom_objects)
    registered = {str(number): obj for number, obj in objects if _is_own_kind(obj)}
    scaler = accelerator.scaler
    state: dict[str, Any] = {"registered": registered} if registered else {}
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        return state | {"schedulers": _own_schedulers(accelerator)}
    return {
        "models": list(accelerator._models),
        "optimizers": [_named(accelerator, optimizer) for optimizer in accelerator._optimizers],
        "schedulers": list(accelerator._schedulers),
        **({} if scaler is None else {"scaler": scaler}),
        **state,
    }


def _saved(accelerator: Accelerator, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The tree to save, and its metadata."""
    excludes = bool(arguments.get(_EXCLUDES))
    tree, metadata = _tree(accelerator), _metadata(accelerator)
    engine = _engine_of(accelerator)
    if engine is None:
        return tree, metadata
    metadata |= metadata_of(engine, excludes)
    return EngineTree(engine, lambda: tree, exclude_frozen_parameters=excludes), metadata


def _tree(accelerator: Accelerator) -> dict[str, Any]:
    """The tree to save, without the state of an engine."""
    registered = {
        str(number): packed(obj.state_dict(), f"registered object {number}")
        for number, obj in enumerate(accelerator._custom_objects)
        if not _is_own_kind(obj)
    }
    loaders = [
        packed(_position(loader), f"data loader {number}")
        for number, loader in enumerate(accelerator._dataloaders)
    ]
    process = {"step": accelerator.step, "dataloaders": loaders, "rng": rng.states().value}
    # Loaded as they were saved, whatever the objects have now.
    values = {"process": PerProcess(process), "registered": registered}
    return {**_state(accelerator), "values": values}


def _metadata(accelerator: Accelerator) -> dict[str, Any]:
    """The number of objects of each kind, so that a load notices missing ones."""
    counts = {name: len(getattr(accelerator, f"_{name}")) for name in _LISTS}
    return {_COUNTS: {**counts, "scaler": int(accelerator.scaler is not None)}}


def _named(accelerator: Accelerator, optimizer: Any) -> Any:
    """An optimizer by the names of its model's parameters, if one model has them all."""
    for model in accelerator._models:
        try:
            return NamedOptimizer(optimizer, model)
        except ValueError:
            continue
    return optimizer


@contextmanager
def _without_later_states(accelerator: Accelerator, stored: Checkpoint) -> Iterator[None]:
    """Takes the states of optimizers that were saved before their first step; back after an error.

    So does accelerate: a load of such a checkpoint starts them from the beginning.
    """
    removed_states: list[tuple[Any, dict[Any, Any]]] = []
    for number, wrapped in enumerate(accelerator._optimizers):
        state, prefix = wrapped.optimizer.state, f"optimizers/{number}/state/"
        if state and not any(name.startswith(prefix) for name in stored):
            removed_states.append((state, dict(state)))
            state.clear()
    try:
        yield
    except BaseException:
        for state, before in removed_states:
            state.update(before)
        raise


def _is_own_kind(registered: object) -> bool:
    """Whether unickpt stores an object itself, not through its `state_dict`."""
    return isinstance(registered, torch.nn.Module | torch.optim.Optimizer)


def _position(dataloader: Any) -> dict[str, Any]:
    """The position of a data loader."""
    sampler = dataloader.get_sampler() if hasattr(dataloader, "get_sampler") else None
    seeded: Any = sampler if isinstance(sampler, SeedableRandomSampler) else None
    stateful = getattr(dataloader, "use_stateful_dataloader", False)
    return {
        "iteration": getattr(dataloader, "iteration", None),
        "sampler": (
            {"epoch": seeded.epoch, "initial_seed": seeded.initial_seed}
            if seeded is not None
            else None
        ),
        "state": dataloader.state_dict() if stateful else None,
    }


def _set_position(dataloader: Any, position: Mapping[str, Any], number: int) -> None:
    if position["iteration"] is not None:
        dataloader.iteration = position["iteration"]
    sampler = dataloader.get_sampler() if hasattr(dataloader, "get_sampler") else None
    if position["sampler"] is not None and isinstance(sampler, SeedableRandomSampler):
        sampler.epoch = position["sampler"]["epoch"]
        sampler.initial_seed = position["sampler"]["initial_seed"]
    elif position["state"] is None and isinstance(sampler, RandomSampler):
        _log.warning(
            "data loader %d shuffles with torch's generator: in the middle of an epoch it "
            "continues in another order; use DataLoaderConfiguration(use_seedable_sampler=True)",
            number,
        )
    if position["state"] is not None:
        dataloader.load_state_dict(position["state"])


def _of_this(accelerator: Accelerator, path: PathLike, stored: PerProcessValues) -> dict[str, Any]:
    """The state that this process resumes with, from the states of all processes."""
    values, index = stored.values, accelerator.process_index
    if len(values) == accelerator.num_processes:
        return dict(values[index])
    for number, position in enumerate(values[0]["dataloaders"]):
        if position["state"] is not None:
            raise LoadMismatch(
                f"{path}: data loader {number} is stateful, and the positions of {len(values)} "
                f"processes cannot be shared out to {accelerator.num_processes}: prepare one "
                "without use_stateful_dataloader, and use accelerator.skip_first_batches"
            )
    generators = values[index]["rng"] if index < len(values) else None
    return {**values[0], "rng": generators}


# --- arguments: unsupported ones are refused by name ----------------------------------------------

_HOOKS = "{} hooks exist: they are for files, and are not called; save or load their state yourself"


def _check_save(accelerator: Accelerator, safe: bool, arguments: Mapping[str, Any]) -> None:
    _check_kind(accelerator)
    _check_arguments(accelerator, arguments, _EXCLUDES)
    if not safe:
        raise ValueError("safe_serialization=False is not supported: nothing is pickled")
    if accelerator.project_configuration.save_on_each_node:
        raise ValueError("save_on_each_node=True is not supported: all save into one storage")
    if accelerator._save_model_state_pre_hook:
        raise ValueError(_HOOKS.format("register_save_state_pre_hook"))


def _check_arguments(
    accelerator: Accelerator, arguments: Mapping[str, Any], of_engine: str
) -> None:
    has_engine = accelerator.distributed_type is DistributedType.DEEPSPEED
    wrong = [name for name in arguments if not (has_engine and name == of_engine)]
    if wrong:
        raise TypeError(
            f"{', '.join(wrong)}: not supported; no function of a model or of torch is called. "
            "unickpt.load has missing=, unexpected= and cast="
        )


def _check_kind(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ValueError(f"distributed_type={kind.value} is not supported: it saves itself")
    if kind is DistributedType.DEEPSPEED and len(accelerator._models) != 1:
        raise ValueError(
            f"{len(accelerator._models)} models are prepared with DeepSpeed, and a checkpoint has "
            "the state of one engine: prepare one first; of several, save each by itself, with "
            "unickpt.integrations.deepspeed.use_unickpt"
        )
    if kind is DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "fsdp_version=1 is not supported: use fsdp_version=2, whose parameters are DTensors"
        )


def _check_counts(path: PathLike, stored: Any, counts: dict[str, int]) -> None:
    if not isinstance(stored, dict):
        raise LoadMismatch(f"{path} was not saved by unickpt.integrations.accelerate")
    wrong = [f"{stored.get(k)} {k}, not {n}" for k, n in counts.items() if stored.get(k) != n]
    if wrong:
        raise LoadMismatch(f"{path} has {'; '.join(wrong)}: prepare the same objects first")


# --- DeepSpeed ------------------------------------------------------------------------------------


_EXCLUDES, _STRICT = "exclude_frozen_parameters", "load_module_strict"
"""Arguments of `DeepSpeedEngine.save_checkpoint` and `load_checkpoint`, which `save_state` and
`load_state` take, too."""


def _engine_of(accelerator: Accelerator) -> Any:
    """The engine that an Accelerator has prepared; None without DeepSpeed."""
    if accelerator.distributed_type is not DistributedType.DEEPSPEED:
        return None
    return accelerator._models[0]


def _own_schedulers(accelerator: Accelerator) -> list[Any]:
    """The schedulers that the engine does not have itself."""
    from accelerate.utils import DeepSpeedSchedulerWrapper

    schedulers = accelerator._schedulers
    return [x for x in schedulers if not isinstance(x, DeepSpeedSchedulerWrapper)]
