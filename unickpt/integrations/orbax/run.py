"""The steps of a run as Orbax's managers show them, over `unickpt.Checkpointer`.

Both managers, of version 0 and 1, are made of it. Steps that Orbax itself wrote into the same
folder are listed and loaded as well, and never changed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any
from weakref import WeakSet

from unickpt.errors import CheckpointCorrupt, CheckpointExists, CheckpointNotFound, LaterStepsExist
from unickpt.foreign.files import Files
from unickpt.format.index import RESERVED
from unickpt.frameworks.leaves import adapters
from unickpt.frameworks.process_group import Group, current_group, within
from unickpt.integrations.orbax.options import reading_arguments
from unickpt.integrations.orbax.policies import (
    DecisionContext,
    PreservationContext,
    PreservationPolicy,
    SaveDecisionPolicy,
)
from unickpt.integrations.orbax.steps import ORBAX as ORBAX
from unickpt.integrations.orbax.steps import orbax_steps
from unickpt.loading.loader import load
from unickpt.quoting import quoted
from unickpt.reading.checkpoint import Checkpoint, open
from unickpt.runs.arguments import step_number
from unickpt.runs.checkpointer import Checkpointer
from unickpt.runs.retention import Retention
from unickpt.saving.background import PendingSave
from unickpt.saving.options import SaveOptions
from unickpt.storage import paths

_ROOT, _MOST_ROOT = "_ROOT_METADATA", 8 << 20
_NEVER = "0001-01-02T00:00:00+00:00"  # before all others, in any time zone


_saving = threading.Lock()
_open: WeakSet[Run] = WeakSet()
"""The runs of this process."""


class StepAlreadyExistsError(CheckpointExists, ValueError):
    """The step to save exists."""


class StepNotFoundError(CheckpointNotFound):
    """The step does not exist."""


@dataclass(frozen=True)
class Info:
    """A step, as policies see it; reads what it was not told.

    Arguments:
        step: its number.
        path: where it is.
        foreign: whether Orbax wrote it.
        told: its time and metrics, if this process saved it.
        opening: arguments of `unickpt.open`.
    """

    step: int
    path: str
    foreign: bool = False
    told: tuple[datetime, Any] | None = None
    opening: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> Checkpoint:
        return open(self.path, **self.opening)

    @cached_property
    def _read(self) -> tuple[datetime, Any]:
        found = self.open()
        created = found.index.created
        try:
            when = datetime.fromisoformat(created or _NEVER).astimezone(UTC)
        except (ValueError, OverflowError) as error:
            raise CheckpointCorrupt(f"{self.path}: the time of its save: {error}") from None
        return when, _metrics(self, found.metadata.get("metrics"))

    @property
    def time(self) -> datetime:
        return (self.told or self._read)[0]

    @property
    def metrics(self) -> Any:
        return (self.told or self._read)[1]


@dataclass(frozen=True)
class SavePolicies:
    """How a run saves and keeps.

    Arguments:
        save, keep: the policies.
        read_only: save and delete nothing.
        create: whether the folder may be created.
        asynchronous: whether saves run in the background.
        store_metrics: whether metrics are stored.
        metadata: of the run, stored with each step; None for none.
        considers_pending: whether policies are told that a save is in progress.
        named: which of Orbax's folders count, by their names and numbers.
    """

    save: SaveDecisionPolicy
    keep: PreservationPolicy
    read_only: bool = False
    create: bool = True
    asynchronous: bool = True
    store_metrics: bool = True
    metadata: Mapping[str, Any] | None = None
    considers_pending: bool = True
    named: Callable[[str, int], bool] = lambda name, step: True


class Run:
    """The steps below a folder.

    Arguments:
        directory: a local path or a URL (file, memory, s3, gs).
        rules: how to save and keep.
        arguments: further ones of `unickpt.Checkpointer`.
        timeout_s: how long processes wait for each other; None for unickpt's default.
        is_other: whether it is another run, of which steps are only restored: rules are for all of
            its steps, not only for those that Orbax wrote.

    Raises:
        CheckpointExists: a step is there twice, saved by Orbax and by unickpt.
    """

    def __init__(
        self,
        directory: paths.PathLike,
        rules: SavePolicies,
        arguments: Mapping[str, Any],
        timeout_s: float | None = None,
        *,
        is_other: bool = False,
    ) -> None:
        self.rules, self._reads_all = rules, is_other
        self.directory = paths.resolve(directory)
        if rules.create and not rules.read_only:
            self.directory.make()
        given = dict(arguments)
        self._reading = reading_arguments(given)
        self._options = SaveOptions.or_default(given.get("options"))
        if timeout_s is not None:
            self._options = replace(self._options, timeout_s=float(timeout_s))
        given = {**given, "options": self._options, "keep": Retention(keep_among=self._kept)}
        self.checkpointer = Checkpointer(directory, **given)
        self._infos: dict[int, Info] = {}
        self._pending: PendingSave | None = None
        self._saving: int | None = None
        self._root: Mapping[str, Any] | None = None
        self.reload()
        _open.add(self)

    # --- which steps there are -------------------------------------------------------------------

    def reload(self) -> None:
        """Lists the steps anew; a save in progress counts."""
        steps = self.checkpointer.steps()
        ours = {step: Info(step, self.checkpointer.path(step)) for step in steps}
        if self._saving is not None:
            ours[self._saving] = self._infos[self._saving]
        foreign = {info.step: info for info in self._foreign()}
        for step in sorted(ours.keys() & foreign.keys()):
            raise CheckpointExists(
                f"step {step} is there twice, saved by Orbax at {foreign[step].path} and by "
                f"unickpt at {ours[step].path}; remove one of them"
            )
        self._infos = {**foreign, **ours}

    def _foreign(self) -> list[Info]:
        """The committed steps that Orbax wrote."""
        found = orbax_steps(str(self.directory), self._reading.open, self.rules.named)
        return [
            Info(step, path, foreign=True, opening=self._reading.open)
            for step, path in found.items()
        ]

    @property
    def infos(self) -> list[Info]:
        """The steps, ascending, as of the last save or `reload`; one in progress counts."""
        return [self._infos[step] for step in sorted(self._infos)]

    @property
    def latest(self) -> Info | None:
        return self.infos[-1] if self._infos else None

    def info(self, step: int | None) -> Info:
        """A step, or the newest.

        Raises:
            StepNotFoundError: it does not exist, or none does.
        """
        if step is None:
            if self.latest is None:
                raise StepNotFoundError(f"no steps in {self.directory}")
            return self.latest
        found = self._infos.get(step_number(step))
        if found is None:
            there = ", ".join(map(str, sorted(self._infos))) or "none"
            raise StepNotFoundError(f"no step {step} in {self.directory}; there are {there}")
        return found

    def opened(self, step: int | None) -> tuple[Info, Checkpoint]:
        """A step, committed; waits if it is being saved."""
        info = self.info(step)
        if info.step == self._saving:
            self.wait()
        return info, info.open()

    def load(self, info: Info, like: Any, *, as_stored: bool, **arguments: Any) -> Any:
        """Loads from a step, with the arguments of `unickpt.load`.

        Arguments:
            as_stored: not by rules.
        """
        if info.foreign or self._reads_all:
            more = self._reading.arguments(as_stored, arguments.get("under", ""))
            return load(info.open(), like, **arguments, **more)
        return self.checkpointer.load(like, step=info.step, **arguments)

    # --- saving ----------------------------------------------------------------------------------

    def should_save(self, step: int, replace: bool = False) -> bool:
        """Whether the policy wants to save now; all processes call this.

        Arguments:
            replace: as if this step did not exist yet.
        """
        step = step_number(step)
        before = [info for info in self.infos if not (replace and info.step == step)]
        if self.rules.read_only or (before and before[-1].step >= step):
            return False
        context = DecisionContext(
            is_saving_in_progress=self.rules.considers_pending and self.is_saving,
            reached_preemption=reached_preemption(step),
            agree=self._agree,
        )
        now = Info(step, "", told=(datetime.now(UTC), None))
        return bool(self.rules.save.should_save(now, before, context=context))

    def _agree(self, value: bool) -> bool:
        group = self._group()
        if group.count == 1:
            return value
        return group.agree(int(value and group.index == 0)) > 0

    def _group(self) -> Group:
        return within(self._options.group or current_group(adapters()), self._options.timeout_s)

    def save(
        self,
        step: int,
        tree: Any,
        how: Mapping[str, Any],
        *,
        metrics: Any = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> PendingSave:
        """Saves a step, after the one before is committed.

        Arguments:
            tree: what to save.
            how: stored, for `restore`.
            metrics, metadata: JSON.

        Raises:
            StepAlreadyExistsError: the step exists, and `overwrite` is False; or Orbax saved it.
            UnickptError: as `Checkpointer.save`, also of the save before.
        """
        step = step_number(step)
        self.wait_saved()
        self._check_new(step, overwrite)
        stored: dict[str, Any] = {"custom_metadata": dict(metadata or {}), ORBAX: dict(how)}
        if metrics is not None and self.rules.store_metrics:
            stored["metrics"] = _as_metadata(metrics)
        if self.rules.metadata is not None:
            stored[ORBAX]["root"] = dict(self.root_metadata)
        info = Info(step, self.checkpointer.path(step), told=(datetime.now(UTC), metrics))
        after = {**self._infos, step: info}
        kept = self._preserved([after[s] for s in sorted(after)])  # may raise, so before the save
        with _saving:
            self._ask_others_to_release()
            self._pending = self.checkpointer.save(
                step, tree, metadata=stored, overwrite=overwrite, wait=not self.rules.asynchronous
            )
        self._saving = step
        self._infos = {s: i for s, i in after.items() if i.foreign or s in kept or s == step}
        return self._pending

    def _ask_others_to_release(self) -> None:
        """Lets other managers of this process that are not closed, as in notebooks, give the folder
        back when they are idle; they may save again, when this one is."""
        others = [run for run in list(_open) if run.directory.spec == self.directory.spec]
        for other in others:
            if other is not self:
                other.checkpointer.release()

    def _check_new(self, step: int, overwrite: bool) -> None:
        if not (self.rules.create or self.directory.exists()):
            raise CheckpointNotFound(
                f"options: create=False, and there is no folder {self.directory}"
            )
        there = self._infos.get(step)
        if there is not None and (there.foreign or not overwrite):
            by = "Orbax" if there.foreign else "unickpt"
            raise StepAlreadyExistsError(f"step {step} exists at {there.path}, saved by {by}")
        later = [s for s, info in self._infos.items() if info.foreign and s > step]
        if later:
            raise LaterStepsExist(
                f"step {step} is before steps {min(later)} to {max(later)} in {self.directory}, "
                "which Orbax saved; to go back, remove their folders first"
            )

    def _preserved(self, infos: Sequence[Info]) -> set[int]:
        """Those of our steps that the policy keeps."""
        ours = [info for info in infos if not info.foreign]
        flags = self.rules.keep.should_preserve(ours, context=PreservationContext())
        return {info.step for info, flag in zip(ours, flags, strict=True) if flag}

    def _kept(self, steps: Sequence[int]) -> Collection[int]:
        """The committed steps to keep; called in the background."""
        known = self._infos
        return self._preserved(
            [known.get(step) or Info(step, self.checkpointer.path(step)) for step in steps]
        )

    @property
    def is_saving(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def wait_saved(self) -> None:
        """Waits for the save in progress.

        Raises:
            UnickptError: it failed; the step does not count.
        """
        pending, step = self._pending, self._saving
        if pending is None or step is None:
            return
        self._pending = self._saving = None
        try:
            pending.result()
        except Exception:
            self.reload()  # what it would have removed is still there
            raise

    def wait(self) -> None:
        """Waits for the save in progress, and until old steps are removed.

        Raises:
            UnickptError: it failed; the step does not count.
        """
        self.wait_saved()
        self.checkpointer.wait()

    def settle(self, pending: PendingSave) -> None:
        """Notices that a save has ended, if it has, and is the newest."""
        if pending is self._pending and pending.done():
            self.wait_saved()

    def check_for_errors(self) -> None:
        """Raises the error of a save that has failed by now."""
        if self._pending is not None:
            self.settle(self._pending)

    # --- the rest --------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Removes a step; all processes call this.

        Raises:
            StepNotFoundError: it does not exist.
            CheckpointExists: Orbax wrote it.
        """
        info = self.info(step)
        if info.foreign:
            raise CheckpointExists(f"{info.path} was written by Orbax; remove the folder yourself")
        self.wait()
        self.checkpointer.delete(info.step)
        self._infos.pop(info.step, None)

    @property
    def root_metadata(self) -> Mapping[str, Any]:
        """What is stored of the run, else what was given."""
        if self._root is None:
            saved = (info for info in reversed(self.infos) if not info.foreign)
            newest = next((info for info in saved if info.step != self._saving), None)
            stored = None if newest is None else how_saved(open(newest.path)).get("root")
            if stored is None:
                stored = self._root_of_orbax()
            self._root = dict(stored if isinstance(stored, Mapping) else self.rules.metadata or {})
        return self._root

    def _root_of_orbax(self) -> Any:
        """What Orbax stored of the run; None if it stored nothing."""
        files = Files(self.directory.child("metadata"))
        if not self.directory.exists() or _ROOT not in files.here:
            return None
        try:
            return json.loads(files.tail(_ROOT, _MOST_ROOT))["custom_metadata"]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise CheckpointCorrupt(f"{files.location}: {_ROOT} is damaged: {error}") from error

    def close(self) -> None:
        """Waits for everything, then releases the folder."""
        try:
            self.wait_saved()
        finally:
            _open.discard(self)
            self.checkpointer.close()


def _as_metadata(metrics: Any) -> Any:
    """Metrics as metadata of a checkpoint, which are JSON without NaN and infinities: if they have
    such, or are a text, the text of their JSON as Python writes it."""
    try:
        json.dumps(metrics, allow_nan=False)
    except ValueError:
        return json.dumps(metrics)
    return json.dumps(metrics) if isinstance(metrics, str) else metrics


def _metrics(info: Info, stored: Any) -> Any:
    """The metrics that were stored of a step."""
    if info.foreign or not isinstance(stored, str):
        return stored
    try:
        return json.loads(stored)
    except (ValueError, RecursionError):
        raise CheckpointCorrupt(f"{info.path}: its metrics are no JSON: {quoted(stored)}") from None


def reached_preemption(step: int) -> bool:
    """Whether the job is about to be stopped, as all processes of JAX agree at this step."""
    from jax.experimental import multihost_utils  # here, because it takes a while

    try:
        reached: bool = multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # there is no service that watches for it
        return False
    return reached


def how_saved(found: Checkpoint) -> Mapping[str, Any]:
    """What `Run.save` was told of a step; empty if somebody else saved it."""
    how = found.metadata.get(ORBAX)
    if isinstance(how, Mapping) and isinstance(how.get("items"), Mapping):
        return how
    return {}


def custom_metadata(info: Info, found: Checkpoint) -> dict[str, Any]:
    """What the user gave with a step."""
    if not info.foreign:
        given = found.metadata.get("custom_metadata")
        return dict(given) if isinstance(given, Mapping) else {}
    return {k: v for k, v in found.metadata.items() if k not in ("metrics", RESERVED)}
