"""The options of a save, each a keyword.

A keyword of a plug-in becomes an item of `all_features`, and of plug-ins the core knows only those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

from unickpt import doors
from unickpt.frameworks.host_memory import CommonOptions, MemoryBudget, check_number
from unickpt.frameworks.process_group import Group
from unickpt.quoting import changed_repr, quoted
from unickpt.save_report import SaveReport
from unickpt.storage import paths

if TYPE_CHECKING:
    from unickpt.features import SaveFeature
    from unickpt.format.encoders import EncodingPolicy
    from unickpt.progress import Progress
    from unickpt.references.policy import ReferencePolicy

Compression = Literal["auto", "zstd", "gzip", "blosc"]
COMPRESSORS = get_args(Compression)
Reuse = Literal["digest", "compare", "patch"]
REUSES = get_args(Reuse)
Staging = Literal["auto", "copy", "reference", "lazy", "device"]
STAGINGS = get_args(Staging)


# Each is of a plug-in, with an entry point of this name in the group `unickpt.features`, which is
# called with its value.
_PLUG_INS = ("quantize",)


def take_write_policy(arguments: dict[str, Any]) -> SaveFeature | None:
    """The policy for experts, taken out of the arguments of a Checkpointer.

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
    """A policy with the fields that were given beside it.

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
        staging: how `save_async` keeps the state as it is at the call; `save` ignores it.
            "auto": the loop may change anything after the call returns. On the host, JAX arrays are
            kept by reference, and all others are copied before the call returns; with
            `Checkpointer(optimizers=...)`, those that the optimizers own are copied in the
            background if they do not fit into `budget_bytes`. (A JAX array made
            from NumPy or torch memory by `device_put` or dlpack may share it. It is copied if that
            memory is also in the tree; otherwise do not write to that memory before
            `PendingSave.result`.) On an accelerator, JAX arrays are transferred to page-locked
            host memory behind the work that is queued there, and may be donated at once: the call
            does not wait, as far as `budget_bytes` and a quarter of the page-locked memory that XLA
            has (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB) hold them. So are CUDA tensors, as far as
            `budget_bytes` holds them; the caller's current stream waits for it, so that what is
            queued there later may change them. All else is copied before the call returns;
            with `Checkpointer(optimizers=...)`, arrays that the optimizers own are copied in the
            background (see there), and all others are cloned on the device if it has room.
            "copy": everything is copied to host memory before the call returns.
            "reference": immutable arrays (JAX's) are kept by reference. Those on an accelerator
            are read in the background, and must not be donated before
            `PendingSave.wait_staged`. All others are copied before the call returns, as by "auto".
            "lazy": what the optimizers of `Checkpointer(optimizers=...)` own is copied in the
            background, on the host, too; their next step waits for it. Immutable arrays are as with
            "reference". All others are cloned on the accelerator, or copied before the call
            returns: many changes leave no trace (fused optimizers, batch norm, `.data`). Nothing
            but its optimizer may change what is copied in the background before
            `PendingSave.wait_staged`. An earlier change raises `StateChanged` if torch's version
            counter or, on the host, one of about 64 sampled elements of each array shows it.
            "device": arrays on an accelerator are cloned there if it has room, and copied to the
            host in the background.
        fsync: whether to flush files and directories to disk before the save returns.
        budget_bytes: bytes of host memory that the saves of all processes of a node may use,
            together, beyond the state itself; each process gets an equal share. A node is what
            shares memory: a machine, or a container with a limit of its own. How many processes
            it has is known from torchrun, or from the key-value store of `torch.distributed` or
            `jax.distributed` after the first save; before that, and with `ProcessGroup` without
            `local_count`, all processes of the job count. `save` uses the share for chunks that
            are being written; `save_async` uses a quarter of it for these, at most 1 GiB, and the
            rest for staged copies of all saves in flight. By default the node has a quarter of its
            memory (what control groups allow counts), but not more than half of what is available
            at the first save; without staging, 1 GiB for each process suffices. What of a state
            does not fit is copied later, behind the steps of `Checkpointer(optimizers=...)`, where
            that is safe (see `staging`); for the rest the call waits, for the save before it and
            for the storage. `SaveReport` says how long. The memory of the copies of small arrays,
            at most a sixteenth of the share, is kept for the next save of the same tree.
        chunk_bytes: target size of a chunk, the unit of writing, reading and checking. Where an
            array is cut, its chunks may have half of that, but at least 4 MiB, to end where the
            shards of 2, 4 or 8 processes would.
        chunk_shape: chunk shape for all arrays with this number of dimensions, reduced where a
            chunk would cross a fragment's boundary; other arrays use `chunk_bytes`.
        compression: None; "auto": arrays of at least 64 KiB that a sample predicts to become
            smaller by 5 % and more are stored as byte planes, each compressed by zstd, which
            TensorStore and zarr-python read; all others as they are (docs/compression.md). With
            `unickpt[zstd]`, writing is more than twice as fast. Arrays that `base` has keep what it
            chose. Or for all arrays alike "zstd", "gzip" or "blosc". Digests do not depend on it.
        base: an earlier checkpoint. A chunk that is equal to the same chunk of the base is not
            written. On a local file system with hard links, the base's files are linked into the
            new checkpoint, which stays whole if the base is removed or moved. Elsewhere, as in
            object storage, the new checkpoint borrows the chunks from the base if that is in the
            same folder, and cannot be read without it: `SaveReport.bases` names what must stay as
            it is where it is; `unickpt copy` makes a whole one. Chunks are the same if the array
            has the same name, shape and dtype and is cut into the same chunks; all others are
            written. Everything is if the base can be neither linked nor borrowed from. What a
            damaged base lacks is written, with a warning in the log; if there is none, the save
            fails.
        reuse: how chunks of `base` are recognised. "digest": by the 64 bits of their xxh3 digests
            (docs/reuse.md says what risk that is). "compare": then their bytes are compared, too,
            which reads them from the base. "patch": by their digests; and of a chunk of which
            elements changed, these are written, as a patch of an earlier state of the chunk, which
            reads that, if it takes at most half as much as the chunk. Where the base can only be
            borrowed from, the new checkpoint may need several checkpoints beside it. TensorStore
            alone cannot read patched arrays.
        kept_cost: with `reuse="patch"`: what it costs to keep a byte on the storage until the next
            save, if it costs 1 to write it. A save writes everything again where further
            patches are predicted to cost more, from how they grew: the sooner, the higher this is.
        changed: what changed since `base`, or since the step before of a `Checkpointer(reuse=...)`:
            what did not is neither staged nor read nor hashed. A dict of patterns of names (as of
            `quantize`; the first that matches counts), with False for arrays that did not change,
            True for those to hash, an array of bools with one for each row (along the first axis)
            that says which changed, or "tracked". "tracked", also in place of the dict for all
            arrays: tensors and JAX arrays on an accelerator are skipped if a digest of their
            content, which the accelerator computes in the call, is that of the save before; all
            others are hashed. Of what False and rows skip, each save compares a sample of each
            array and hashes a part, in turns; if something did change, the save fails with
            `StateChanged`. Nothing is skipped unless the save before in this process had `changed`,
            too, and did not fail, nor in the first save after a load (docs/reuse.md).
        quantize: which arrays are stored with fewer bits, and so not exactly (docs/quantize.md):
            patterns of their names, in which `*` is any text within a component and `**` any
            number of components, with "uint8", "int4", "int3" or "int2" (codes of 8, 4, 3 or 2
            bits), "bfloat16", or None to store an array as it is. The first pattern that matches
            counts. Only arrays of floats of at least 16 bits, and no counts of steps. They are
            loaded in their own dtype. `compression` does not apply to them. `Restores(expected)`
            instead of codes chooses the bits by how often a run will go on from a checkpoint.
        timeout_s: seconds to wait for the other processes: to start the save, and again to finish
            their part after this process has written its own.
        check_replicas: whether to compare every byte of plain tensors and arrays, which are assumed
            to be equal on all processes, and to refuse the save if they differ. By default only a
            sample of each is compared; if it differs, one process's data is stored whole, with a
            warning (`ReplicasDiffer`).
        group: the processes that save together; detected automatically under `torch.distributed`
            and `jax.distributed`, where by default all do. For some of them, such as the role of an
            actor beside that of a critic: their process group of torch (`dist.new_group(ranks)`),
            or, in JAX, their devices (a `jax.sharding.Mesh`, or a list of `jax.Device`, the same on
            all of their processes). They save by themselves, at the same time as others, and count
            themselves from 0 in the order of the group, so that what they store does not depend on
            where in the job they are. Elsewhere a `ProcessGroup`.
        metrics: called with the report of each successful save, on every process, on the saving
            thread, for one save at a time. `PendingSave.result` and the program's exit wait for it;
            later saves do not. It may save, load and wait for saves; its own wait for a save ends
            at the commit. In a job of several processes, calls that all processes must make in the
            same order belong on one thread. An error that it raises is logged, and does not affect
            the save.
        progress: True for a progress bar on process 0, in a notebook or on a terminal (needs
            `unickpt[progress]`); or a function that is called with this process's bytes saved so
            far and in total, on the saving thread. An error that it raises is logged, and does not
            affect the save.
        features: further plug-ins (`unickpt.extend.SaveFeature`), such as a codec.
        timing: whether the checkpoint says how long each process took for what
            (`unickpt.open(path).timing`); by default, if there are several.

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
    timeout_s: float = 600.0
    check_replicas: bool = False
    group: Group | Any | None = None
    metrics: Callable[[SaveReport], None] | None = None
    progress: Progress = None
    features: Sequence[SaveFeature] = ()
    timing: bool | None = None

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        if self.staging not in STAGINGS:
            raise ValueError(f"staging {self.staging!r} is not one of {', '.join(STAGINGS)}")
        self.check_common()
        check_number("chunk_bytes", self.chunk_bytes)
        if self.chunk_shape is not None and not _is_shape(self.chunk_shape):
            raise ValueError(
                f"chunk_shape={self.chunk_shape!r} must be a tuple of positive integers"
            )
        if self.reuse not in REUSES:
            raise ValueError(f"reuse {self.reuse!r} is not one of {', '.join(REUSES)}")
        if not 0 <= self.kept_cost < math.inf:
            raise ValueError(f"kept_cost={self.kept_cost!r} must be a number of at least 0")
        if self.base is not None:
            object.__setattr__(self, "base", paths.absolute(self.base))
        if self.metrics is not None and not callable(self.metrics):
            raise TypeError(
                f"metrics is of type {type(self.metrics).__name__}, but is called with each "
                "SaveReport; pass the metrics of a step to Checkpointer.save"
            )
        if self.compression is not None and self.compression not in COMPRESSORS:
            raise ValueError(
                f"compression {self.compression!r} is not one of None, {', '.join(COMPRESSORS)}"
            )
        if self.base is not None or self.changed is not None:
            _ = self.references  # a missing plug-in is told here, not hours later by a save
        _ = self.encoding
        if self.features:
            from unickpt.features import SaveFeature

            if not all(isinstance(feature, SaveFeature) for feature in self.features):
                raise TypeError(
                    f"features={quoted(self.features)} must be a list of objects whose classes "
                    "derive from unickpt.extend.SaveFeature"
                )
        names = [feature.name for feature in self.all_features]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"SaveOptions has the feature {name!r} twice; give it once")

    @property
    def all_features(self) -> tuple[SaveFeature, ...]:
        """`features`, and those that keywords stand for."""
        features = list(self.features)
        for name in _PLUG_INS:
            value = getattr(self, name)
            if value or not isinstance(value, Mapping):
                features.append(doors.need("features", name)(value))
        return tuple(features)

    @property
    def encoding(self) -> EncodingPolicy | None:
        """What chooses by what is saved how arrays are stored, if `compression` asks for that.

        Raises:
            PluginError: there is none.
        """
        if self.compression != "auto":
            return None
        policy: EncodingPolicy = doors.need("encodings", self.compression)()
        return policy

    @property
    def skips(self) -> bool:
        """Whether the program says what did not change."""
        return self.changed is not None

    @property
    def references(self) -> ReferencePolicy:
        """What decides what a save refers to instead of writing it.

        Raises:
            PluginError: there is none.
            TypeError, ValueError: `changed` is wrong.
        """
        door = doors.need("references", "incremental")
        policy: ReferencePolicy = door(self.reuse, self.changed, self.kept_cost)
        return policy

    def with_feature(self, feature: SaveFeature) -> SaveOptions:
        """The same options with one more feature."""
        return replace(self, features=(*self.features, feature))

    def with_features(self, features: Sequence[SaveFeature]) -> SaveOptions:
        """The same options with other features, also in place of keywords."""
        return replace(self, features=tuple(features), quantize={})
