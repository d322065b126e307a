"""Publisher: the training job's side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from unickpt import Checkpointer, Retention, Rules, SaveOptions, UnickptError
from unickpt.extend import PathLike, StepFolder, resolve_path
from unickpt.plugins.weights.leases import Leases
from unickpt.types import PendingSave

RULES_METADATA = "weights.rules"
"""The key of the metadata under which a version has the rules for its followers."""
# With scattered changes, this makes full versions rare enough (benchmarks/weights.py).
_KEPT_COST = 0.03


class Publisher:
    """Publishes versions of a model's weights from a training job, for any `Follower`.

    A version is a step of a run: `step_<version>` below `root`. `unickpt.load`, `unickpt ls` and
    all other tools read it. Each process writes its shards in the background, as patches against
    the version before where that is less. A version exists only once all processes have written
    their part. In a job of several processes, all create a Publisher and call its methods.

    Arguments:
        root: a local path or a URL (file, memory, s3, gs).
        rules: from the trainer's names and layouts to the engine's, as text without functions;
            stored with each version, for followers without rules of their own.
        keep_last: keep this many of the newest versions, and those that a follower reads; all by
            default.
        optimizers: torch optimizers; only their `step` changes what they own, so that publishing
            with `SaveOptions(staging="lazy")` copies nothing before that.
        options: for all versions; `reuse` is always "patch".

    Raises:
        ValueError: the arguments are invalid, or the rules call functions.

    Example:
        >>> import numpy as np
        >>> from unickpt.plugins.weights import Follower, Publisher
        >>> live = {"w": np.zeros(3)}
        >>> with Publisher("memory://docs/live") as publisher, Follower(
        ...     "memory://docs/live", live
        ... ) as follower:
        ...     _ = publisher.publish(0, {"w": np.ones(3)}).result()
        ...     follower.update(), follower.version, live["w"]
        (True, 0, array([1., 1., 1.]))
    """

    def __init__(
        self,
        root: PathLike,
        rules: Rules | None = None,
        *,
        keep_last: int | None = None,
        optimizers: Sequence[Any] = (),
        options: SaveOptions | None = None,
    ) -> None:
        self._steps = StepFolder(root)
        self._metadata = {} if rules is None else {RULES_METADATA: _rules_text(rules)}
        retention = None
        if keep_last is not None:
            leases = Leases(resolve_path(root))
            retention = Retention(keep_last=keep_last, keep_among=leases.leased_among)
        self._run = Checkpointer(
            root,
            keep=retention,
            reuse="patch",
            optimizers=optimizers,
            options=replace(options or SaveOptions(kept_cost=_KEPT_COST), reuse="patch"),
        )
        self._last: int | None = None
        self._pending: PendingSave | None = None

    def publish(
        self, version: int, state: Any, *, metadata: Mapping[str, Any] | None = None
    ) -> PendingSave:
        """Publishes a version in the background.

        Arguments:
            version: a whole number above those of all earlier versions.
            state: a tree of arrays, as for `unickpt.save`, or a torch module.
            metadata: as for `unickpt.save`.

        Returns:
            The pending save: `result()` waits until the version exists, and raises the error if it
            never will.

        Raises:
            ValueError: the version is not above the last one.
            SaveConflict: another job publishes here; raised by `result()`.
            UnickptError: as `Checkpointer.save`.
        """
        version = _number(version)
        last = self._newest(version)
        if last is not None and version <= last:
            raise ValueError(
                f"version {version} of {self._steps.location} is not above the last one, {last}; "
                "a version never changes. Publish a higher number"
            )
        pending = self._run.save(
            version, plain_state(state), metadata={**(metadata or {}), **self._metadata}
        )
        self._last, self._pending = version, pending
        return pending

    def versions(self) -> list[int]:
        """The versions that exist, ascending.

        Raises:
            StorageError: the storage failed.
        """
        return self._run.steps()

    def wait(self) -> None:
        """Waits until all versions exist, and old ones are removed.

        Raises:
            UnickptError: an error in the background that was not raised yet.
        """
        self._run.wait()

    def close(self) -> None:
        """Waits as `wait`; lets another publisher continue.

        Raises:
            UnickptError: as `wait`.
        """
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._run.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"Publisher({str(self._steps.location)!r}, last version {self._last})"

    def _newest(self, version: int) -> int | None:
        """The last version, published or on its way; not one that failed."""
        is_over = self._pending is None or self._pending.done()
        if self._last is None or (version <= self._last and is_over):
            self._last = max(self._run.steps(), default=None)
        return self._last


def plain_state(state: Any) -> Any:
    """The tensors of a torch module by the names of its `state_dict`; any other tree unchanged."""
    is_module = callable(getattr(state, "named_parameters", None))
    return dict(state.state_dict(keep_vars=True)) if is_module else state


def _number(version: Any) -> int:
    if isinstance(version, bool) or not hasattr(type(version), "__index__"):
        raise ValueError(f"version {version!r} must be a whole number from 0")
    return int(version)


def _rules_text(rules: Rules) -> str:
    text = str(rules)
    try:
        is_whole = _meaning(Rules.parse(text)) == _meaning(rules) and not rules.functions
    except UnickptError:
        is_whole = False
    if not is_whole:
        raise ValueError(
            "these rules call functions, or have sizes or slots that their text lacks, so that "
            "they cannot be stored with a version; give them to each Follower instead"
        )
    return text


def _meaning(rules: Rules) -> Any:
    """The rules without the way in which they are written."""
    return [replace(rule, text="") for rule in rules.rules], rules.shared, rules.conventions
