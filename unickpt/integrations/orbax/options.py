"""`CheckpointManagerOptions`, Orbax's or ours: what is honoured, and what is refused by its name.

docs/integrations/orbax.md has a row for each option.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from unickpt.integrations.orbax import names, policies
from unickpt.integrations.orbax.policies import (
    MultiprocessingOptions,
    PreservationPolicy,
    SaveDecisionPolicy,
)


@dataclass(frozen=True)
class AsyncOptions:
    """How saves run in the background: processes wait for each other for `timeout_secs`."""

    timeout_secs: int = 1200
    barrier_sync_fn: Any = None
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


@dataclass(frozen=True)
class FileOptions:
    """How files are made: as the system's umask says."""

    path_permission_mode: int | None = None
    skip_sync_file_validations: bool = False


@dataclass(frozen=True)
class CheckpointManagerOptions:
    """When to save and what to keep, with Orbax's names and defaults.

    Arguments:
        save_interval_steps: save at multiples of this, at the first step, and when the job is about
            to be stopped.
        save_on_steps: and at these steps.
        should_save_fn: instead, called with a step and the newest saved one (or None).
        save_decision_policy: instead of all these.
        max_to_keep: keep the newest so many; with `best_fn`, the best.
        keep_period: and multiples of this.
        keep_time_interval: and one for each such interval.
        best_fn: of the metrics of a step, a number; decides `best_step`.
        best_mode: whether the largest ("max") or the smallest ("min") number is the best.
        keep_checkpoints_without_metrics: whether `best_fn` keeps steps without metrics.
        preservation_policy: instead of all that keeps. The newest step is always kept.
        create: whether to create the folder.
        read_only: save and delete nothing.
        enable_async_checkpointing: whether saves run in the background.
        save_root_metadata: whether to store the manager's `metadata`.
        prevent_write_metrics: whether not to store metrics.

    All others are described in docs/integrations/orbax.md: they tune Orbax's own files and waiting,
    or are refused by name unless they have their default.
    """

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Container[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: AsyncOptions | None = None
    multiprocessing_options: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: FileOptions = field(default_factory=FileOptions)
    atomicity_options: Any = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: SaveDecisionPolicy | None = None
    preservation_policy: PreservationPolicy | None = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        check(self)


_REMOVED = "steps are removed, not moved; leave it out"
_ALL = "all processes take part, and process 0 is the coordinator; leave it out"
_ATOMIC = "a step is committed by replacing one file, in any storage; leave it out"
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "todelete_subdir": ((None,), _REMOVED),
    "todelete_full_path": ((None,), _REMOVED),
    "atomicity_options": ((None,), _ATOMIC),
    "temporary_path_class": ((None,), _ATOMIC),
    "enable_per_process_directory_creation": ((False,), _ALL),
    "multiprocessing_options.primary_host": ((0,), _ALL),
    "multiprocessing_options.active_processes": ((None,), _ALL),
    "async_options.barrier_sync_fn": ((None,), "there are no barriers; leave it out"),
    "async_options.post_finalization_callback": (
        (None,),
        "pass options=unickpt.SaveOptions(metrics=...) in unickpt=, which is called after a commit",
    ),
    "file_options.path_permission_mode": ((None,), "set the umask of the process instead"),
}
"""What is honoured only with some values, and what to do instead."""


def check(options: Any) -> None:
    """Checks options, ours or Orbax's.

    Raises:
        ValueError: an option cannot be honoured; names it.
    """
    for path, (allowed, advice) in _REFUSED.items():
        value = options
        for name in path.split("."):
            value = getattr(value, name, allowed[0])
        if value not in allowed:
            raise ValueError(f"options: {path}={value!r} is not supported: {advice}")
    if options.step_name_format is not None and not hasattr(options.step_name_format, "build_name"):
        raise TypeError("options: step_name_format= has no build_name(step)")
    known = {each.name for each in dataclasses.fields(CheckpointManagerOptions)}
    for each in dataclasses.fields(options):
        if each.name not in known and getattr(options, each.name) != _default(each):
            raise ValueError(
                f"options: {each.name}={getattr(options, each.name)!r} is not known to this "
                "version of unickpt; leave it out"
            )
    if options.best_mode not in ("min", "max"):
        raise ValueError(f"options: best_mode={options.best_mode!r} must be 'min' or 'max'")
    if options.max_to_keep is not None and options.max_to_keep < 1:
        raise ValueError(
            f"options: max_to_keep={options.max_to_keep!r} must be at least 1: the newest step is "
            "always kept"
        )


def step_names(options: Any) -> Callable[[str, int], bool]:
    """Which of Orbax's own steps count, by their names and numbers; by default all.

    Steps of unickpt are in folders `step_<n>` in any case.
    """
    own = options.step_name_format
    if own is not None:
        return lambda name, step: str(own.build_name(step)) == name
    prefix, length = options.step_prefix, options.step_format_fixed_length
    if prefix is None and length is None:
        return lambda name, step: True
    above = "" if prefix is None else f"{prefix}_"
    return lambda name, step: name == f"{above}{step:0{length or 0}d}"


def _default(each: dataclasses.Field[Any]) -> Any:
    if each.default_factory is not dataclasses.MISSING:
        return each.default_factory()
    return each.default


def save_policy(options: Any) -> SaveDecisionPolicy:
    """When to save, by options of Orbax or ours."""
    if options.save_decision_policy is not None:
        policy: SaveDecisionPolicy = options.save_decision_policy
        return policy
    preemption = policies.PreemptionCheckpointingPolicy()
    if options.should_save_fn is not None:
        function = policies.ShouldSaveFunction(options.should_save_fn)
        return policies.AnySavePolicy([function, preemption])
    return policies.AnySavePolicy(
        [
            # Orbax sets 0 with read_only.
            policies.FixedIntervalPolicy(options.save_interval_steps or 1),
            policies.SpecificStepsPolicy(options.save_on_steps or ()),
            preemption,
            policies.InitialSavePolicy(),
        ]
    )


def preservation_policy(options: Any) -> PreservationPolicy:
    """Which steps to keep, by options of Orbax or ours."""
    if options.preservation_policy is not None:
        given: PreservationPolicy = options.preservation_policy
        return given
    found: list[PreservationPolicy] = []
    if options.keep_period is not None:
        found.append(policies.EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        found.append(policies.EveryNSeconds(int(options.keep_time_interval.total_seconds())))
    if options.best_fn is None:
        found.append(policies.LatestN(options.max_to_keep))
    else:
        found.append(
            policies.BestN(
                get_metric_fn=options.best_fn,
                reverse=options.best_mode == "min",
                n=options.max_to_keep,
                keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
            )
        )
    return policies.AnyPreservationPolicy(found)


@dataclass(frozen=True)
class Reading:
    """How what others saved is opened and loaded.

    Arguments:
        open: arguments of `unickpt.open`.
        rules: for trees that are loaded into others; or for each item by its name.
        options: of loads.
    """

    open: Mapping[str, Any] = field(default_factory=dict)
    rules: Any = None
    options: Any = None

    def arguments(self, as_stored: bool, under: str) -> dict[str, Any]:
        """Arguments of `unickpt.load`.

        Arguments:
            as_stored: not by rules.
            under: the name of the item with a slash; empty, if it is all of the checkpoint.
        """
        found = {} if self.options is None else {"options": self.options}
        rules = self.rules
        if isinstance(rules, Mapping):
            rules = rules.get(under.rstrip("/")) if under else next(iter(rules.values()), None)
        return found if as_stored or rules is None else {**found, "rules": rules}


def reading_arguments(given: dict[str, Any]) -> Reading:
    """Takes `rules`, `hints` and `load_options` out of what was given as `unickpt=`."""
    hints = given.pop("hints", None)
    rules, options = given.pop("rules", None), given.pop("load_options", None)
    return Reading({"hints": hints} if hints else {}, rules, options)


def __getattr__(name: str) -> Any:
    return names.of_orbax("options", name)
