"""An engine's state besides arrays: counters, hyper-parameters, loss scale, schedules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from unickpt.errors import LoadMismatch
from unickpt.extend import quoted

OPTIMIZER, CLIENT = "optimizer", "client_state"
_SCALER = "loss_scaler"
# The values of the loss scaler that change while an engine trains; the rest is configuration.
_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_PLAIN = (bool, int, float)
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
NAMES = (
    *_COUNTERS, "dp_world_size", "mp_world_size", "ds_version", "ds_config", OPTIMIZER,
    "lr_scheduler", "random_ltd", "data_sampler", CLIENT,
)  # fmt: skip
"""The names of all of them."""


def saved(engine: Any) -> dict[str, Any]:
    """The plain values of an engine that one process saves, under the names of DeepSpeed."""
    import deepspeed

    values: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTERS}
    values |= {
        "dp_world_size": engine.seq_dp_world_size,
        "mp_world_size": engine.mp_world_size,
        "ds_version": deepspeed.__version__,
        "ds_config": json.loads(json.dumps(engine.config, default=str)),
        OPTIMIZER: _optimizer(engine.optimizer),
    }
    if engine.lr_scheduler is not None:
        values["lr_scheduler"] = engine.lr_scheduler.state_dict()
    for name, obj in _further(engine).items():
        values[name] = obj.state_dict()
    return values


def _further(engine: Any) -> dict[str, Any]:
    """Further objects with a state, by the names that DeepSpeed gives them."""
    objects = {}
    if engine.random_ltd_enabled():
        objects["random_ltd"] = engine.random_ltd_scheduler
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        objects["data_sampler"] = engine.training_dataloader.data_sampler
    return objects


def _optimizer(optimizer: Any) -> dict[str, Any]:
    if optimizer is None or not hasattr(optimizer, "param_groups"):
        return {}
    state: dict[str, Any] = {
        "param_groups": [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in getattr(optimizer, "optimizer", optimizer).param_groups
        ]
    }
    scaler = _scaler(optimizer)
    if scaler is not None:
        fields = vars(scaler).items()
        state[_SCALER] = {name: value for name, value in fields if type(value) in _PLAIN}
    for name in ("dynamic_loss_scale", "overflow", "clip_grad"):
        value = getattr(optimizer, name, None)
        if type(value) in _PLAIN:
            state[name] = value
    return state


def _scaler(optimizer: Any) -> Any:
    """The object that has an optimizer's loss scale; None if it scales nothing."""
    return getattr(optimizer, _SCALER, None) or getattr(optimizer, "loss_scale_config", None)


def check_groups(engine: Any, stored: Mapping[str, Any], where: str) -> None:
    """Checks that the hyper-parameters of a checkpoint are those of as many groups.

    Raises:
        LoadMismatch: they are not.
    """
    groups, ours = _groups(stored), _base(engine).param_groups
    if groups and len(groups) != len(ours):
        raise LoadMismatch(
            f"{where}: the optimizer had {len(groups)} groups of parameters when it was saved, and "
            f"the engine's has {len(ours)}. Make the groups equal, or load without the optimizer's "
            "state: load_checkpoint(..., load_optimizer_states=False)"
        )


def restore(engine: Any, stored: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> None:
    """Gives an engine the values that `saved` took, or that DeepSpeed wrote.

    Arguments:
        engine: the engine.
        stored: the plain values, by name; missing ones stay unchanged.
        optimizer: whether to restore hyper-parameters and the loss scale.
        scheduler: whether to restore the learning rate's schedule.
    """
    for name in _COUNTERS:
        if name in stored:
            setattr(engine, name, stored[name])
    engine.loaded_checkpoint_dp_world_size = stored.get("dp_world_size")
    engine.loaded_checkpoint_mp_world_size = stored.get("mp_world_size")
    if optimizer and engine.optimizer is not None:
        for ours, theirs in zip(_base(engine).param_groups, _groups(stored), strict=False):
            ours.update({k: v for k, v in theirs.items() if k not in ("params", "param_names")})
        _restore_scale(engine.optimizer, stored.get(OPTIMIZER) or {})
    if scheduler and engine.lr_scheduler is not None and "lr_scheduler" in stored:
        engine.lr_scheduler.load_state_dict(stored["lr_scheduler"])
    for name, obj in _further(engine).items():
        if name in stored:
            obj.load_state_dict(stored[name])


def _restore_scale(optimizer: Any, stored: Mapping[str, Any]) -> None:
    scaler = _scaler(optimizer)
    if scaler is None:
        return
    # FP16_Optimizer has the scale in its own state, and ZeRO in that of an object.
    theirs = {**stored, **(stored.get(_SCALER) or {})}
    for name in _SCALES:
        if name in theirs and hasattr(scaler, name):
            setattr(scaler, name, theirs[name])


def _base(engine: Any) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _groups(stored: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    groups = (stored.get(OPTIMIZER) or {}).get("param_groups") or ()
    if not isinstance(groups, list | tuple) or not all(isinstance(g, dict) for g in groups):
        raise LoadMismatch(f"optimizer/param_groups is no list of dicts: {quoted(groups)}")
    return groups
