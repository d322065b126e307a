"""What is given to a Checkpointer, checked: policies, steps, optimizers, metrics, metadata."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, Literal, TypedDict

from unickpt.errors import UnsupportedLeaf
from unickpt.features import SaveFeature
from unickpt.format.index import RESERVED
from unickpt.frameworks.leaves import adapters
from unickpt.frameworks.protocol import Fence
from unickpt.loading.loader import LoadArguments
from unickpt.options import SaveOptions, joined, take_write_policy
from unickpt.quoting import quoted, some
from unickpt.runs.retention import Retention
from unickpt.runs.roles import Roles
from unickpt.runs.save_triggers import SaveEvery
from unickpt.runs.step_folder import StepFolder
from unickpt.runs.tiers import Tier
from unickpt.saving.describe import check_mapping
from unickpt.storage import paths
from unickpt.trees.tree import plain_key


class PolicyFields(TypedDict, total=False):
    """What a Checkpointer takes in place of a policy: `keep_every=100` is short for
    `keep=Retention(keep_every=100)`; see the policies for what each says."""

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


class StepArguments(LoadArguments, total=False):
    """What `Checkpointer.load` takes by keyword, beside `return_report`."""

    step: int | None
    fallback: bool


_WHEN = {"save_every_s": "seconds", "preemption": "preemption"}


def take_policies(arguments: dict[str, Any]) -> tuple[Retention, SaveEvery, SaveFeature | None]:
    """The policies among the arguments of a Checkpointer.

    Raises:
        ValueError: they are not valid, or are given twice.
        TypeError: there are other arguments.
    """
    found = take_retention(arguments), _take_save_every(arguments), take_write_policy(arguments)
    for name in arguments:
        raise TypeError(f"Checkpointer() got an unexpected keyword argument {name!r}")
    return found


def take_retention(arguments: dict[str, Any]) -> Retention:
    """What to keep: `keep`, `keep_last` and the like, taken out of the arguments of a Checkpointer.

    Raises:
        ValueError: it is not valid, or is given twice.
    """
    keep = arguments.pop("keep", None)
    names = [field.name for field in fields(Retention) if field.name != "keep"]
    values = {name: arguments.pop(name, None) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return joined(keep if isinstance(keep, Retention) else Retention(keep=keep), given)


def _take_save_every(arguments: dict[str, Any]) -> SaveEvery:
    when = arguments.pop("save_every", None)
    given = {_WHEN[name]: arguments.pop(name) for name in _WHEN if name in arguments}
    return joined(when if isinstance(when, SaveEvery) else SaveEvery(when), given)


_STEPS_END = 10**18  # the folders of later steps are not recognised


def step_number(step: object, what: str = "step ") -> int:
    """A step as an int, from any integer type, including NumPy's.

    Raises:
        ValueError: it is not one that a Checkpointer would find again.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{what}{quoted(step)} must be an integer, at least 0")
    if number >= _STEPS_END:
        raise ValueError(f"{what}{step!r} must be less than 10**18")
    return number


def roles_of(
    root: Tier, given: Sequence[paths.PathLike], refused: Mapping[str, object]
) -> Roles | None:
    """The folders of the roles of a job; None if there are none.

    Arguments:
        root: the folder of this role.
        given: the folders of all.
        refused: arguments that roles cannot have, by name.

    Raises:
        ValueError: one of these is given; or `root` is not among the folders.
        StorageError: a storage failed.
    """
    if isinstance(given, str | os.PathLike):
        raise ValueError(f"roles={str(given)!r} must be a list of the folders of all roles")
    folders = [StepFolder(path) for path in given]
    if not folders:
        return None
    others = {str(f.location): f for f in folders if f.location.spec != root.location.spec}
    if len(others) == len(folders):
        raise ValueError(
            f"roles={list(map(str, given))} must have the folders of all roles, also this one's: "
            f"{root.location}"
        )
    for name, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} cannot be combined with roles=, which would decide differently "
                f"in each role; {_INSTEAD[name]}"
            )
    return Roles(root, list(others.values()))


_BY_HAND = "decide on all ranks of the job together, and then call save in each role"
_INSTEAD = {
    "after": "call drop_later_steps in each role",
    "local": "save to the root",
    "save_every_s": _BY_HAND,
    "preemption": _BY_HAND,
}


def run_text(tiers: Any, steps_in: Callable[[Any], Iterable[int]], closed: bool) -> str:
    """A Checkpointer for people; on local disks with its steps: the first, and the last ones."""
    where = [repr(str(tier.location)) for tier in (tiers.root, tiers.local) if tier]
    parts = [where[0], *(f"local={path}" for path in where[1:])]
    if not any(tier.location.is_remote for tier in tiers.all):  # nor waits for a network
        with suppress(Exception):
            steps = sorted({step for tier in tiers.all for step in steps_in(tier)})
            found = [str(step) for step in steps]
            shown = found if len(found) < 8 else [found[0], "...", *found[-4:]]
            parts.append(f"steps=[{', '.join(shown)}]")
    return f"Checkpointer({', '.join(parts)}{', closed' if closed else ''})"


def fences_of(optimizers: Sequence[Any], wait: Callable[[], None]) -> list[Fence]:
    """The fences of optimizers.

    Arguments:
        optimizers: as given.
        wait: what their next step waits for.

    Raises:
        ValueError: they are not a list of optimizers.
    """
    among, found = adapters(), []
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
        found.append(fence)
    return found


def step_metadata(
    step: int,
    metrics: Mapping[str, float] | None,
    metadata: Mapping[str, Any] | None,
    after: int | None,
    features: Mapping[str, Any],
) -> dict[str, Any]:
    """The metadata of a step, of which `features` is what features say.

    Raises:
        UnsupportedLeaf: it cannot be stored.
    """
    check_mapping("metadata", metadata)
    check_mapping("metrics", metrics)
    if RESERVED in (metadata or {}):
        raise UnsupportedLeaf(
            f"metadata: the key {RESERVED!r} is reserved for the Checkpointer; rename yours"
        )
    numbers = _numbers(metrics or {})
    shown = {n: v if math.isfinite(v) else str(v) for n, v in numbers.items()}  # JSON lacks nan
    own = {**features, "step": step, "metrics": shown}
    return {**(metadata or {}), RESERVED: own if after is None else {**own, "after": after}}


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of metrics whose names are exactly str; empty if they are no dict, which
    `step_metadata` refuses."""
    items = metrics.items() if isinstance(metrics, Mapping) else ()
    return {str(plain_key(name)): value for name, value in items}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: _metric(name, value) for name, value in plain_metrics(metrics).items()}
    if len(numbers) == len(metrics):
        return numbers
    names = [(str(plain_key(name)), name) for name in metrics]
    same = [name for text, name in names if [t for t, _ in names].count(text) > 1]
    raise UnsupportedLeaf(f"metrics: two names are stored as one: {some(list(map(repr, same)))}")


def _metric(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedLeaf(f"metrics must be numbers: {name!r}: {error}") from error


def check_changed(changed: object, reuses: bool) -> None:
    """Checks `SaveOptions.changed`, or the argument of a save.

    Raises:
        ValueError: it is given to a Checkpointer without `reuse`.
    """
    if changed is not None and not reuses:
        raise ValueError(
            "changed= says what changed since the step before, of which the other chunks are "
            "taken; create the Checkpointer with reuse=True"
        )


def knowing(
    options: SaveOptions, changed: Mapping[str, Any] | Literal["tracked"] | None, reuses: bool
) -> SaveOptions:
    """The options of a save of which it is known what changed, before what they say of all saves.

    Raises:
        TypeError, ValueError: see `SaveOptions.changed` and `check_changed`.
    """
    if changed is None:
        return options
    check_changed(changed, reuses)
    replace(options, changed=changed)  # checks it
    said, of_all = (
        {"**": each} if isinstance(each, str) else dict(each or {})
        for each in (changed, options.changed)
    )
    if isinstance(changed, str):  # of what they say nothing else of
        return replace(options, changed={**of_all, **said})
    of_all = {pattern: what for pattern, what in of_all.items() if pattern not in said}
    return replace(options, changed={**said, **of_all})
