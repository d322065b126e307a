"""The options of a save, each a keyword.

A plug-in's keyword becomes an item of `all_features`; the core knows plug-ins only by these items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

from unickpt import doors
from unickpt.frameworks.host_memory import (
    CommonOptions,
    MemoryBudget,
    check_flags,
    check_number,
)
from unickpt.frameworks.process_group import Group
from unickpt.quoting import changed_repr, quoted
from unickpt.save_report import SaveReport
from unickpt.storage import paths
from unickpt.threads import is_synchronous

if TYPE_CHECKING:
    from unickpt.features import SaveFeature
    from unickpt.format.encoder_protocol import EncodingPolicy
    from unickpt.progress import Progress
    from unickpt.references.policy import ReferencePolicy

Compression = Literal["auto", "zstd", "gzip", "blosc"]
COMPRESSORS = get_args(Compression)
Reuse = Literal["digest", "compare", "patch"]
REUSES = get_args(Reuse)
Staging = Literal["auto", "copy", "reference", "lazy", "device"]
STAGINGS = get_args(Staging)


# Each belongs to a plug-in: an entry point of this name in the group `unickpt.features` is called
# with the keyword's value, unless it is this one.
_PLUG_INS: Mapping[str, Any] = {"quantize": {}, "parity": None}


def take_write_policy(arguments: dict[str, Any]) -> SaveFeature | None:
    """The policy for experts, removed from the arguments of a Checkpointer.

    Raises:
        ValueError: it is not valid, or is given twice.
    """
    experts, partial = arguments.pop("experts", None), arguments.pop("partial", None)
    names = ("choose", "plt_budget")
    more: dict[str, Any] = {name: arguments.pop(name) for name in names if name in arguments}
    if partial is not None and experts is not None:
        raise ValueError("give experts, or partial, which is short for it; not both")
    if partial is None and experts is None:
        if more.get("choose") is not None:
            raise ValueError("choose is for experts; give partial, too")
        return None
    policy: Any = doors.need("features", "experts")
    if partial is not None:
        experts = policy(partial)
    if not isinstance(experts, policy):
        raise ValueError(
            f"experts={experts!r} must be Experts, such as Experts({{'**/experts/{{x}}/w': 4}})"
        )
    joined_policy: SaveFeature = joined(experts, more)
    return joined_policy


P = TypeVar("P")


def joined(policy: P, arguments: Mapping[str, Any]) -> P:
    """A policy with the fields that were given next to it.

    Raises:
        ValueError: one is given twice.
    """
    for option in fields(policy):  # type: ignore[arg-type]
        if option.name in arguments and getattr(policy, option.name) != option.default:
            raise ValueError(
                f"give {option.name} to the Checkpointer or to its {type(policy).__name__}, "
                "not to both"
            )
    return replace(policy, **arguments)  # type: ignore[type-var]


class ChoosesCodes(Protocol):
    """Chooses codes by the number of restores that happened, as `Restores` does."""

    def codes(self, happened: int = 0) -> str: ...


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(n, Integral) and int(n) > 0 for n in value
    )


@dataclass(frozen=True)
class SaveOptions(CommonOptions):
    """How to save.

    Arguments:
        staging: how a state is kept until it is written: one of `STAGINGS` (docs/howto/save.md).
        fsync: whether to flush files and folders to disk before the save returns.
        budget_bytes: bytes of host memory for all saves of a node together, beyond the state.
        chunk_bytes: target size in bytes of a chunk, the unit of writing, reading and checking.
        chunk_shape: chunk shape of arrays with this number of dimensions; fragments limit it.
        compression: None, "auto", "zstd", "gzip" or "blosc" (docs/compression.md).
        base: an earlier checkpoint; chunks that equal its chunks are not written (docs/reuse.md).
        reuse: how equal chunks are recognised: "digest", "compare" or "patch" (docs/reuse.md).
        changed: what changed since `base`, by patterns of names, or "tracked" (docs/reuse.md).
        kept_cost: with `reuse="patch"`, the cost of a byte kept, relative to that of writing one.
        quantize: codes with fewer bits, by patterns of names: not exact (docs/quantize.md).
        parity: data files and parity files of a group, such as (8, 1) (docs/parity.md).
        timeout_s: seconds to wait for the other processes: to start the save, and to finish it.
        check_replicas: compare every byte of plain arrays across processes; else a sample, to warn.
        group: the processes that save together; by default all of the job (howto/processes.md).
        metrics: called with the report of each save on the saving thread; what it raises is logged.
        progress: True for a bar on process 0, or a function of the bytes saved and in total.
        features: further plug-ins (`unickpt.extend.SaveFeature`), such as a codec.
        timing: whether to store the seconds of each process; None: if there are several.
        writers: how many of the processes with the same data write it, spread evenly over them and
            so over the nodes: fewer files. What only one holds, it always writes. None: all.

    Raises:
        MissingPackage: `progress=True` without tqdm.
        PluginError: an option needs a plug-in that cannot be imported.
        ValueError, TypeError: an option is out of range, or of a wrong type; or this process is not
            in `group`.

    Example:
        >>> import numpy as np, unickpt
        >>> options = unickpt.SaveOptions(compression="zstd", chunk_bytes=1 << 20)
        >>> unickpt.save("memory://options/save", {"w": np.zeros(10**6)}, options=options).chunks
        8
    """

    staging: Staging = "auto"
    fsync: bool = True
    budget_bytes: int | MemoryBudget | None = None
    chunk_bytes: int = 8 << 20
    chunk_shape: tuple[int, ...] | None = None
    compression: Compression | None = None
    base: paths.PathLike | None = None
    reuse: Reuse = "digest"
    changed: Literal["tracked"] | Mapping[str, Any] | None = None
    kept_cost: float = 0.1
    quantize: Mapping[str, str | ChoosesCodes | None] = field(default_factory=dict)
    parity: tuple[int, int] | None = None
    timeout_s: float = 600.0
    check_replicas: bool = False
    group: Group | Any | None = None
    metrics: Callable[[SaveReport], None] | None = None
    progress: Progress = None
    features: Sequence[SaveFeature] = ()
    timing: bool | None = None
    writers: int | None = None

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        if self.staging not in STAGINGS:
            raise ValueError(f"staging {self.staging!r} is not one of {', '.join(STAGINGS)}")
        self.check_common()
        check_flags(fsync=self.fsync, check_replicas=self.check_replicas)
        check_number("chunk_bytes", self.chunk_bytes)
        if self.chunk_shape is not None and not _is_shape(self.chunk_shape):
            raise ValueError(
                f"chunk_shape={self.chunk_shape!r} must be a tuple of positive integers"
            )
        if self.writers is not None and not _is_shape((self.writers,)):
            raise ValueError(f"writers={self.writers!r} must be a positive integer, or None")
        if self.reuse not in REUSES:
            raise ValueError(f"reuse {self.reuse!r} is not one of {', '.join(REUSES)}")
        if not 0 <= self.kept_cost < math.inf:
            raise ValueError(f"kept_cost={self.kept_cost!r} must be a number of at least 0")
        if self.base is not None:
            object.__setattr__(self, "base", paths.absolute(self.base))
        if self.metrics is not None and not is_synchronous(self.metrics):
            raise TypeError(
                f"metrics is of type {type(self.metrics).__name__}, but is called with each "
                "SaveReport, and not awaited; pass the metrics of a step to Checkpointer.save"
            )
        hears = getattr(self.metrics, "run_event", None)
        if callable(hears) and not is_synchronous(hears):
            raise TypeError(
                f"run_event of metrics={quoted(self.metrics)} is async, but is not awaited; make "
                "it a plain function"
            )
        if self.compression is not None and self.compression not in COMPRESSORS:
            raise ValueError(
                f"compression {self.compression!r} is not one of None, {', '.join(COMPRESSORS)}"
            )
        if self.base is not None or self.changed is not None:
            _ = self.references  # a missing plug-in is reported here, not hours later by a save
        _ = self.encoding
        self._check_features()

    def _check_features(self) -> None:
        if self.features:
            from unickpt.features import SaveFeature
            from unickpt.format.index import OWN_ENTRIES

            if not all(isinstance(feature, SaveFeature) for feature in self.features):
                raise TypeError(
                    f"features={quoted(self.features)} must be a list of objects whose classes "
                    "derive from unickpt.extend.SaveFeature"
                )
            for feature in self.features:
                if feature.name in OWN_ENTRIES:
                    raise ValueError(
                        f"the feature {feature.name!r} has the name of an entry that unickpt makes "
                        "in the index; give it another name"
                    )
        names = [feature.name for feature in self.all_features]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"SaveOptions has the feature {name!r} twice; give it once")

    @cached_property
    def all_features(self) -> tuple[SaveFeature, ...]:
        """`features`, and the features that keywords stand for."""
        features = list(self.features)
        for name, without in _PLUG_INS.items():
            value = getattr(self, name)
            if value != without:
                features.append(doors.need("features", name)(value))
        return tuple(features)

    @cached_property
    def encoding(self) -> EncodingPolicy | None:
        """Chooses how arrays are stored from what is saved, if `compression` requests that.

        Raises:
            PluginError: there is none.
        """
        if self.compression != "auto":
            return None
        policy: EncodingPolicy = doors.need("encodings", self.compression)()
        return policy

    @property
    def references(self) -> ReferencePolicy:
        """Decides which chunks a save references instead of writing them.

        Raises:
            PluginError: there is none.
            TypeError, ValueError: `changed` is invalid.
        """
        from unickpt.format.index import INCREMENTAL

        door = doors.need("references", INCREMENTAL)
        policy: ReferencePolicy = door(self.reuse, self.changed, self.kept_cost)
        return policy

    def with_feature(self, feature: SaveFeature) -> SaveOptions:
        """The same options with one more feature."""
        return replace(self, features=(*self.features, feature))

    def with_features(self, features: Sequence[SaveFeature]) -> SaveOptions:
        """The same options with other features, also in place of keywords."""
        return replace(self, features=tuple(features), **_PLUG_INS)
