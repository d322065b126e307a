"""In place of Orbax's emergency and multi-tier managers: the usual one, with a local tier."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

import unickpt.integrations.orbax as version0
from unickpt.integrations.maxtext.names import Names
from unickpt.integrations.orbax import policies

_CREATE = "create_checkpoint_manager"


def install(
    checkpointing: ModuleType, emergency: ModuleType, train_utils: ModuleType, max_utils: ModuleType
) -> None:
    """Replaces what creates these managers; the modules are MaxText's."""
    names: Names = vars(checkpointing)["ocp"]
    grain = getattr(checkpointing, "grain_utility", None)

    def tiered(
        local_checkpoint_dir: str,
        persistent_checkpoint_dir: str,
        global_mesh: Any,
        abstract_state: Any,
        local_save_interval_steps: int,
        persistent_save_interval_steps: int,
        orbax_logger: Any = None,
    ) -> Any:
        due = _saves(local_save_interval_steps, persistent_save_interval_steps)
        keep = policies.EveryNSteps(persistent_save_interval_steps)
        where = local_checkpoint_dir, persistent_checkpoint_dir
        return _manager(names, grain, *where, due, keep, True)

    def without_folder(*_: Any, **__: Any) -> Any:
        raise ValueError(
            "create_orbax_emergency_replicator_checkpoint_manager knows no persistent folder, into "
            "which steps are copied: call maxtext.utils.train_utils.create_checkpoint_manager, "
            "which takes it from the config"
        )

    for module, name, function in (
        (emergency, "create_emergency_checkpoint_manager", tiered),
        (emergency, "create_replicator_checkpoint_manager", without_folder),
        (checkpointing, "create_orbax_emergency_checkpoint_manager", tiered),
        (checkpointing, "create_orbax_emergency_replicator_checkpoint_manager", without_folder),
        (max_utils, "initialize_multi_tier_checkpointing", _initialize),
    ):
        setattr(module, name, function)
    original = getattr(vars(train_utils)[_CREATE], "__wrapped__", vars(train_utils)[_CREATE])
    setattr(train_utils, _CREATE, _by_config(original, names, grain))


def _by_config(original: Callable[..., Any], names: Names, grain: Any) -> Callable[..., Any]:
    """`create_checkpoint_manager` of MaxText, with our managers of two tiers."""

    @functools.wraps(original)
    def create(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.enable_checkpointing and config.colocated_python_checkpointing:
            raise ValueError(
                "colocated_python_checkpointing=True is not supported: arrays of Pathways are "
                "saved by its own servers; leave unickpt.integrations.maxtext out, or set it to "
                "False"
            )
        is_multi_tier = config.enable_multi_tier_checkpointing
        if not (is_multi_tier or config.enable_emergency_checkpoint):
            return original(config, *args, **kwargs)
        due = [config.local_checkpoint_period]
        if not is_multi_tier:
            due.append(config.checkpoint_period)
        save = _saves(*due)
        if config.enable_autocheckpoint:
            save = policies.AnySavePolicy([save, policies.PreemptionCheckpointingPolicy()])
        keep = _backups(config) if is_multi_tier else policies.EveryNSteps(config.checkpoint_period)
        where = config.local_checkpoint_directory, config.checkpoint_dir
        return _manager(names, grain, *where, save, keep, config.async_checkpointing)

    return create


def _saves(*intervals: int) -> Any:
    return policies.AnySavePolicy([policies.FixedIntervalPolicy(each) for each in set(intervals)])


def _backups(config: Any) -> Any:
    """Keeps what a replicator would have put into the persistent folder."""
    steps = getattr(config, "multi_tier_checkpointing_backup_interval_steps", None)
    if steps:
        return policies.EveryNSteps(steps)
    return policies.EveryNSeconds(60 * config.multi_tier_checkpointing_backup_interval_minutes)


def _manager(
    names: Names, grain: Any, local: str, persistent: str, save: Any, keep: Any, asynchronous: bool
) -> Any:
    """A manager with a local tier.

    Arguments:
        names: what stands in place of Orbax's module in MaxText.
        grain: MaxText's module with the handler of iterators.
        local, persistent: the folders.
        save: when to save.
        keep: what to keep, apart from the newest step.
        asynchronous: whether saves run in the background.
    """
    keep = policies.AnyPreservationPolicy([policies.LatestN(1), keep])
    more = {"local": local}
    if "training" in vars(names):
        context = version0.v1.Context()
        context.pytree.loading.partial_load = True
        made = names.training.Checkpointer(
            persistent,
            context=context,
            save_decision_policy=save,
            preservation_policy=keep,
            unickpt=more,
        )
        made.use_async = asynchronous
        return made
    options = version0.CheckpointManagerOptions(
        save_decision_policy=save,
        preservation_policy=keep,
        enable_async_checkpointing=asynchronous,
    )
    handlers = {
        "items": version0.PyTreeCheckpointHandler(),
        "iter": grain.GrainCheckpointHandler(),
    }
    return names.CheckpointManager(
        persistent, item_handlers=handlers, options=options, unickpt=more
    )


def _initialize(*, jax_initialization_timeout_seconds: int = 300, **_: Any) -> None:
    """Starts `jax.distributed`; there is no replicator to start."""
    jax.distributed.initialize(initialization_timeout=jax_initialization_timeout_seconds)
