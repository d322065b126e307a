"""Checks the arguments of a Checkpointer: policies, roles, optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Literal, TypedDict

from unickpt import doors
from unickpt.frameworks.adapter_protocol import Fence
from unickpt.frameworks.leaves import adapters
from unickpt.loading.loader import LoadArguments
from unickpt.options import SaveOptions, joined
from unickpt.runs.current_steps import Steps
from unickpt.runs.retention import Retention
from unickpt.runs.roles import Roles
from unickpt.runs.save_triggers import SaveEvery
from unickpt.runs.step_folder import StepFolder
from unickpt.runs.tier_copies import Copying, Tier
from unickpt.storage import paths


class PolicyFields(TypedDict, total=False):
    """The keywords of a Checkpointer in place of a policy: `keep_every=100` is short for
    `keep=Retention(keep_every=100)`. The policies describe them."""

    keep_every: int | None
    keep_best: int | None
    metric: str | None
    best: Literal["min", "max"]
    keep_among: Callable[[Sequence[int]], Collection[int]] | None
    save_every_s: float | None
    preemption: bool
    partial: Mapping[str, int | tuple[int | str, int]] | None
    choose: Callable[..., Sequence[int]] | Literal["most_lost"] | None
    plt_budget: float | None
    upload_every: int
    upload_bytes_per_s: float | None
    replicas: int
    unit: str | Callable[[], str] | None


class StepArguments(LoadArguments, total=False):
    """The keywords of `Checkpointer.load`, besides `return_report`."""

    step: int | None
    fallback: bool


_WHEN = {"save_every_s": "seconds", "preemption": "preemption"}


def take_policies(arguments: dict[str, Any]) -> tuple[Retention, SaveEvery]:
    """The policies among the arguments of a Checkpointer, but that of `take_write_policy`.

    Raises:
        ValueError: they are not valid, or are given twice.
        TypeError: there are other arguments.
    """
    policies = take_retention(arguments), _take_save_every(arguments)
    for name in arguments:
        raise TypeError(f"Checkpointer() got an unexpected keyword argument {name!r}")
    return policies


def take_retention(arguments: dict[str, Any]) -> Retention:
    """The retention: `keep`, `keep_last` and the like, removed from a Checkpointer's arguments.

    Raises:
        ValueError: it is not valid, or is given twice.
    """
    keep = arguments.pop("keep", None)
    names = [field.name for field in fields(Retention) if field.name != "keep"]
    values = {name: arguments.pop(name, None) for name in names}
    rules = {name: value for name, value in values.items() if value is not None}
    return joined(keep if isinstance(keep, Retention) else Retention(keep=keep), rules)


def _take_save_every(arguments: dict[str, Any]) -> SaveEvery:
    when = arguments.pop("save_every", None)
    triggers = {_WHEN[name]: arguments.pop(name) for name in _WHEN if name in arguments}
    return joined(when if isinstance(when, SaveEvery) else SaveEvery(when), triggers)


def take_tier(
    root: StepFolder,
    local: paths.PathLike | None,
    node_local: paths.PathLike | None,
    arguments: dict[str, Any],
    options: SaveOptions,
) -> Tier | None:
    """The tier in front of the root, if any; its keywords are removed from the arguments.

    Raises:
        ValueError: there would be two; or an argument is invalid, or does not fit it.
        PluginError: a tier needs a plug-in that cannot be imported.
    """
    tier: Tier | None = None
    if local is not None:
        if node_local is not None:
            raise ValueError("give local or node_local, not both")
        tier = Tier(StepFolder(local), Copying)
    elif node_local is not None:
        tier = doors.need("tiers", "nodes")(root, node_local, arguments, options)
    arguments.pop("reuse", None)
    return tier


def roles_of(
    root: StepFolder, roles: Sequence[paths.PathLike], refused: Mapping[str, object]
) -> Roles | None:
    """The folders of the roles of a job; None if there are none.

    Arguments:
        root: the folder of this role.
        roles: the folders of all.
        refused: arguments that roles cannot have, by name.

    Raises:
        ValueError: one of these is given; or `root` is not among the folders.
        StorageError: a storage failed.
    """
    if isinstance(roles, str | os.PathLike):
        raise ValueError(f"roles={str(roles)!r} must be a list of the folders of all roles")
    folders = [StepFolder(path) for path in roles]
    if not folders:
        return None
    other_folders = {str(f.location): f for f in folders if f.location.spec != root.location.spec}
    if len(other_folders) == len(folders):
        raise ValueError(
            f"roles={list(map(str, roles))} must have the folders of all roles, also this one's: "
            f"{root.location}"
        )
    for name, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} cannot be combined with roles=, which would decide differently "
                f"in each role; {_INSTEAD[name]}"
            )
    return Roles(root, list(other_folders.values()))


_BY_HAND = "decide on all ranks of the job together, and then call save in each role"
_INSTEAD = {
    "after": "call drop_later_steps in each role",
    "local": "save to the root",
    "node_local": "save to the root",
    "save_every_s": _BY_HAND,
    "preemption": _BY_HAND,
    "when_busy": _BY_HAND,
}


def run_text(steps: Steps, closed: bool) -> str:
    """The repr of a Checkpointer; on local disks with its first and last steps."""
    parts = [repr(str(steps.root.location))]
    if steps.local is not None:
        parts.append(f"local={str(steps.local.location)!r}")
    if not any(folder.location.is_remote for folder in steps.all):  # never waits for a network
        with suppress(Exception):
            numbers = sorted({step for folder in steps.all for step in steps.seen(folder)})
            shown = numbers if len(numbers) < 8 else [numbers[0], "...", *numbers[-4:]]
            parts.append(f"steps=[{', '.join(map(str, shown))}]")
    return f"Checkpointer({', '.join(parts)}{', closed' if closed else ''})"


def fences_of(optimizers: Sequence[Any], wait: Callable[[], None]) -> list[Fence]:
    """The fences of optimizers.

    Arguments:
        optimizers: as given.
        wait: called by their next step, to wait.

    Raises:
        ValueError: they are not a list of optimizers.
    """
    among, fences = adapters(), []
    if not isinstance(optimizers, Iterable):
        raise ValueError(
            f"optimizers is of type {type(optimizers).__name__}; pass a list, even for a single "
            "optimizer"
        )
    for optimizer in optimizers:
        fence = next((f for f in (a.fence(optimizer, wait) for a in among) if f), None)
        if fence is None:
            raise ValueError(
                f"optimizers: {type(optimizer).__name__} is not a torch.optim.Optimizer; omit it "
                "in JAX, whose arrays never change"
            )
        fences.append(fence)
    return fences
