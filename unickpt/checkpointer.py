"""The Checkpointer: the steps of a training run, saved, kept, cleaned up and resumed from."""

from __future__ import annotations

import logging
import math
import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from unickpt import backends
from unickpt.adapt import Fence, adapters, current_group
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidPath,
    ProcessFailed,
    UnsupportedLeaf,
)
from unickpt.group import Group, within
from unickpt.index import RESERVED
from unickpt.load import load
from unickpt.options import LoadOptions, SaveOptions
from unickpt.pending import Hooks, PendingSave, SaveQueue
from unickpt.policy import Policy, SigtermHandler
from unickpt.retention import Retention
from unickpt.rules import Rules
from unickpt.tiers import Tier
from unickpt.upkeep import Upkeep

_log = logging.getLogger("unickpt")
_FINE, _DAMAGED, _FAILED = 0, 1, 2


class Checkpointer:
    """The checkpoints of a training run, as `step_<n>` below one folder.

    Saves go on in the background, one after another. What goes wrong there is raised by
    `PendingSave.result`, else by the next `save`, `wait` or `close`, else the program exits with
    status 1. In a job of several processes, all of them make a Checkpointer with the same arguments
    and call `save`, `load` and `should_save` together; process 0 alone deletes and copies.

    One job at a time may save into `root`. On object storage, where a crash leaves no trace, a job
    waits for 40 s before its first save, to see whether another one that was there still lives.

    Arguments:
        root: a local path or a URL (file, memory, s3, gs).
        keep_last: keep the newest so many steps.
        keep_every: keep steps that are multiples of it.
        keep_best: keep the best so many steps by `metric`.
        metric: the name of one of the `metrics` given to `save`.
        best: whether the least ("min") or the largest ("max") value is the best.
        keep: called with a step; whether to keep it. A step is kept if any rule keeps it; without
            rules, all are. The newest is never removed.
        save_every: `should_save` says yes at steps that are multiples of it.
        save_every_s: and when so many seconds have passed since the last save.
        preemption: handle SIGTERM: `should_save` says yes once more, on all processes, and
            `preempted` becomes true, so that the loop can end. Call it at every step then.
        local: a path on fast storage that all processes of the job see, such as
            "/dev/shm/<run>". Checkpoints are committed there first, and copied to `root` in the
            background; the newest stays there.
        optimizers: torch optimizers; with `SaveOptions(staging="auto")` or "lazy", what they own
            is copied while forward and backward go on, and their next `step` waits for that. Until
            then nothing else may change it. Such a change is an error (`StateChanged`); it is found
            by torch's version counters and, on the host, by a sample of the data. On an accelerator
            changes of DTensors, or through `.data`, would leave no trace.
        options: of all saves, see `SaveOptions`.

    Raises:
        ValueError: arguments make no sense.
        InvalidPath: a path names no storage.

    Example:
        >>> import numpy as np, unickpt
        >>> state = {"w": np.zeros(3), "step": 0}
        >>> with unickpt.Checkpointer("memory://run/docs", keep_last=2, save_every=10) as ckpt:
        ...     if ckpt.latest() is not None:
        ...         state = ckpt.load(state)
        ...     for step in range(state["step"], 41):
        ...         state["w"] += 1
        ...         if ckpt.should_save(step):
        ...             _ = ckpt.save(step, state | {"step": step})
        ...     ckpt.wait()
        ...     ckpt.steps()
        [30, 40]
    """

    def __init__(
        self,
        root: backends.Path,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str | None = None,
        best: Literal["min", "max"] = "min",
        keep: Callable[[int], bool] | None = None,
        save_every: int | None = None,
        save_every_s: float | None = None,
        preemption: bool = False,
        local: backends.Path | None = None,
        optimizers: Sequence[Any] = (),
        options: SaveOptions | None = None,
    ) -> None:
        retention = Retention(keep_last, keep_every, keep_best, metric, best, keep)
        self._policy = Policy(save_every, save_every_s, preemption)
        self._options = options or SaveOptions()
        self._root = Tier(root)
        self._local = None if local is None else Tier(local)
        self._tiers = [tier for tier in (self._local, self._root) if tier is not None]
        if self._local is not None and self._local.location.spec == self._root.location.spec:
            raise ValueError(f"local and root are the same place: {self._root.location}")
        self._queue = SaveQueue()
        self._fences = _fences(optimizers, self._queue.fence)
        self._sigterm = SigtermHandler(self._policy.tell) if preemption else None
        self._upkeep = Upkeep(self._root, self._local, retention, self._options, self._queue.fail)
        self._closed = self._shared = False
        self.loaded_step: int | None = None
        """The step that `load` gave."""

    # --- saving --------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether it is time to save, by `save_every`, `save_every_s`, or because the job was told
        to stop. All processes get the same answer; with `save_every_s` or `preemption` they agree
        on it, so that all must ask at the same steps.

        Raises:
            ValueError: they have no way to agree (see `ProcessGroup`).
        """
        return self._policy.is_due(step, self._group())

    def preempt(self) -> None:
        """Says that the job is about to be stopped, as SIGTERM does with `preemption=True`."""
        self._policy.tell()

    @property
    def preempted(self) -> bool:
        """Whether the job was told to stop, as agreed by all processes in `should_save`."""
        return self._policy.preempted

    def save(
        self,
        step: int,
        tree: Any,
        *,
        wait: bool = False,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> PendingSave:
        """Saves a step in the background.

        Arguments:
            step: its number, not negative.
            tree: as for `unickpt.save`.
            wait: return only when it is committed.
            metrics: numbers to choose the best steps by, which are stored in the metadata. Those
                of process 0 count.
            metadata: as for `unickpt.save`.
            overwrite: replace the step if it exists.

        Returns:
            The save, to wait for. With `local`, it ends with the commit there; `Checkpointer.wait`
            waits for the copy too.

        Raises:
            UnsupportedLeaf: something cannot be stored; nothing was begun.
            CheckpointExists: the step exists. On remote storage found in the background.
            SaveConflict: another job saves into this folder; found in the background.
            UnickptError: what went wrong in the background before, if nobody has asked for that
                yet; this save was not begun.
        """
        self._check_open()
        step = _number(step)
        group = self._group()
        self._check_shared(group)
        owners = None
        if self._fences:
            owners = {owner for fence in self._fences for owner in fence.owners()}
        hooks = Hooks()
        if group.index == 0:
            hooks = self._upkeep.hooks(step, metrics or {}, overwrite)
        pending = self._queue.save(
            self._tiers[0].path(step),
            tree,
            overwrite=overwrite,
            metadata=partial(_metadata, step, metrics if group.index == 0 else None, metadata),
            options=self._options,
            owners=owners,
            hooks=hooks,
        )
        self._policy.saved()
        if wait:
            pending.result()
        return pending

    def wait(self) -> None:
        """Waits until all that was saved is committed, copied to `root`, and cleaned up behind.

        Raises:
            UnickptError: what went wrong in the background, if nobody has asked for that yet.
        """
        self._drain()
        self._queue.raise_failed()

    def close(self) -> None:
        """Waits as `wait`, then gives up the folder, the handler and the hooks.

        Raises:
            UnickptError: as `wait`.
        """
        if self._closed:
            return
        self._drain()
        self._closed = True
        for fence in self._fences:
            fence.remove()
        if self._sigterm is not None:
            self._sigterm.remove()
        self._upkeep.close()
        self._queue.raise_failed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"unickpt: {type(failed).__name__} in the background: {failed}")

    # --- finding and loading -------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that are committed, in either tier, ascending.

        Raises:
            StorageError: the storage failed.
        """
        return sorted({step for tier in self._tiers for step in tier.committed()})

    def latest(self) -> int | None:
        """The newest committed step; None where there is none."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> str:
        """Where a step is, or will be; the local tier only where `root` does not have it."""
        if self._local is None or step in self._root.committed():
            return self._root.path(step)
        return (self._local if step in self._local.committed() else self._root).path(step)

    def load(
        self,
        like: Any = None,
        *,
        step: int | None = None,
        fallback: bool = False,
        rules: Rules | None = None,
        strict: bool = True,
        cast: bool = False,
        options: LoadOptions | None = None,
    ) -> Any:
        """Loads a step, the newest where none is given; `loaded_step` then tells which.

        Arguments:
            like, rules, strict, cast, options: as for `unickpt.load`.
            step: its number.
            fallback: where a step is damaged, take the next older one, on all processes alike.

        Returns:
            The tree, as `unickpt.load`.

        Raises:
            CheckpointNotFound: there is no such step, or none at all.
            CheckpointCorrupt: it is damaged; the message names the next older one.
        """
        group = self._group(options)
        options = replace(options or LoadOptions(), group=group)
        arguments = {"rules": rules, "strict": strict, "cast": cast, "options": options}
        wanted = self._newest(group) if step is None else step
        while True:
            tree, error = self._try(wanted, like, arguments)
            outcome = _FINE if error is None else _FAILED
            if isinstance(error, CheckpointCorrupt):
                outcome = _DAMAGED
            if fallback and group.count > 1:
                outcome = group.agree(outcome)
            if outcome == _FINE:
                self.loaded_step = wanted
                return tree
            if outcome == _FAILED or not fallback:
                raise error or ProcessFailed(f"{self.path(wanted)}: another process cannot load it")
            older = self._newest(group, below=wanted)
            _log.warning("step %d is damaged, falling back to step %d: %s", wanted, older, error)
            wanted = older

    def _newest(self, group: Group, below: int | None = None) -> int:
        """The newest step, or the newest below one, as the coordinator sees it."""
        steps = [step for step in self.steps() if below is None or step < below]
        found = max(steps, default=-1)
        if group.count > 1:
            found = group.agree(found + 1 if group.index == 0 else 0) - 1
        if found < 0:
            raise CheckpointNotFound(
                f"no step is committed in {self._root.location}"
                if below is None
                else f"{self.path(below)} is damaged, and there is no older step to fall back to"
            )
        return found

    def _try(
        self, step: int, like: Any, arguments: Mapping[str, Any]
    ) -> tuple[Any, Exception | None]:
        """Loads a step from the fastest tier that has it whole; or says why that fails."""
        damage: list[str] = []
        for tier in self._tiers:
            try:
                return load(tier.path(step), like, **arguments), None
            except CheckpointNotFound:
                continue
            except CheckpointCorrupt as error:
                _log.warning("%s is damaged: %s", tier.path(step), error)
                damage.append(str(error))
            except Exception as error:
                return None, error
        steps = self.steps()
        if not damage:
            have = ", ".join(map(str, steps[-10:])) or "none"
            return None, CheckpointNotFound(
                f"step {step} is not in {self._root.location}; committed are: {have}"
            )
        older = max((s for s in steps if s < step), default=None)
        hint = "there is no older step"
        if older is not None:
            hint = f"the next older step is {older}: load(step={older}), or load(fallback=True)"
        return None, CheckpointCorrupt(f"{'; '.join(damage)}; {hint}")

    # --- helpers -------------------------------------------------------------------------------

    def _group(self, options: LoadOptions | None = None) -> Group:
        given = options.group if options is not None and options.group else self._options.group
        return within(given or current_group(adapters()), self._options.timeout_s)

    def _drain(self) -> None:
        self._queue.wait()
        self._upkeep.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the Checkpointer of {self._root.location} is closed")

    def _check_shared(self, group: Group) -> None:
        """Makes sure, once, that all processes see the same local tier."""
        if self._shared or self._local is None or group.count == 1:
            return
        place = self._local.location.store(backends.context(fsync=False))
        token = group.agree(secrets.randbits(60) + 1 if group.index == 0 else 0)
        name = f".unickpt-{token:x}"
        if group.index == 0:
            place.write(name, b"").result()
        group.agree(0)
        seen = place.read(name).result().state == "value"
        alone = group.agree(int(not seen))
        if group.index == 0:
            place.write(name, None).result()
        if alone:
            raise InvalidPath(
                f"local={str(self._local.location)!r} is not the same storage on all processes; "
                "give one that they share, or leave it out"
            )
        self._shared = True


def _number(step: object) -> int:
    """A step given as any kind of integer, NumPy's too."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step {step!r} must be an integer, at least 0")
    return number


def _fences(optimizers: Sequence[Any], wait: Callable[[], None]) -> list[Fence]:
    among, found = adapters(), []
    if not isinstance(optimizers, Iterable):
        raise ValueError(f"optimizers=[{type(optimizers).__name__}]: pass a list, even of one")
    for optimizer in optimizers:
        fence = next((f for f in (a.fence(optimizer, wait) for a in among) if f), None)
        if fence is None:
            raise ValueError(
                f"optimizers: {type(optimizer).__name__} is no torch.optim.Optimizer; JAX needs "
                "none, because its arrays never change"
            )
        found.append(fence)
    return found


def _metadata(
    step: int, metrics: Mapping[str, float] | None, metadata: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What is stored beside a step.

    Raises:
        UnsupportedLeaf: it cannot be.
    """
    if RESERVED in (metadata or {}):
        raise UnsupportedLeaf(f"metadata: the key {RESERVED!r} is the Checkpointer's own")
    try:
        numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError) as error:
        raise UnsupportedLeaf(f"metrics must be numbers: {error}") from error
    shown = {n: v if math.isfinite(v) else str(v) for n, v in numbers.items()}  # JSON lacks nan
    return {**(metadata or {}), RESERVED: {"step": step, "metrics": shown}}
