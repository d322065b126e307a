"""A DeepSpeed engine that saves into unickpt and loads from it: ZeRO 0, 1, 2 and 3, with tensor and
pipeline parallelism, onto any stage and any number of ranks.

    engine, *_ = deepspeed.initialize(...)
    use_unickpt(engine)            # the one line
    engine.save_checkpoint("run")  # in the background; nothing is gathered
    engine.load_checkpoint("run")  # also DeepSpeed's own checkpoints

docs/integrations/deepspeed.md lists the differences.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

import unickpt
from unickpt import Checkpoint, LoadOptions, PerProcess, Rules, SaveOptions
from unickpt.errors import LoadMismatch
from unickpt.extend import (
    Hints,
    SaveCallbacks,
    SaveQueue,
    SaveRequest,
    job_group,
    loaded_together,
    reading_checkpoint,
)
from unickpt.integrations.deepspeed import values
from unickpt.integrations.deepspeed.held import EngineParts
from unickpt.integrations.deepspeed.latest import LATEST, LatestFile, latest
from unickpt.integrations.deepspeed.loading import EngineLoad, Wanted
from unickpt.integrations.deepspeed.placing import Placing, RankGrid
from unickpt.integrations.deepspeed.state import EngineArrays
from unickpt.integrations.destination import Destination
from unickpt.integrations.packing import packed, unpacked
from unickpt.types import PendingSave, PerProcessValues

__all__ = ["EngineCheckpoints", "use_unickpt"]

_log = logging.getLogger("unickpt")
_INFO = "universal_checkpoint_info"
_EXCLUDED = "exclude_frozen_parameters"
_CRC = (1 << 32) - 1
_OURS = "_unickpt_checkpoints"  # in an engine


def use_unickpt(
    engine: Any,
    *,
    options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
    rules: Rules | None = None,
    hints: Hints | None = None,
    background: bool = True,
) -> EngineCheckpoints:
    """Replaces `engine.save_checkpoint` and `engine.load_checkpoint` with unickpt's.

    All ranks call this, after `deepspeed.initialize`.

    Arguments:
        engine: a `DeepSpeedEngine`, also of a pipeline.
        options: see `unickpt.SaveOptions`; with `staging="lazy"` a save copies nothing before it
            returns, and the next step of the optimizer waits for the copies.
        load_options: see `unickpt.LoadOptions`.
        rules: derive the names `fp32/<p>`, `exp_avg/<p>`, ... from those of another trainer's
            checkpoints, such as `Rules.preset("deepspeed").inverse`; `load_checkpoint` uses them
            for checkpoints that have none of these names.
        hints: how tensor-parallel ranks share parameters, if neither the module nor
            `client_state` has a `universal_checkpoint_info`; docs/formats/deepspeed.md lists them.
        background: whether `save_checkpoint` returns while the checkpoint is written.

    Returns:
        The object that saves and loads now; its `wait` waits for saves in the background.

    Raises:
        UnsupportedLeaf: the engine holds its state in a way that is not supported; names it.

    Example:
        >>> use_unickpt(engine)  # doctest: +SKIP
        >>> engine.save_checkpoint("run")  # doctest: +SKIP
        True
    """
    checkpoints = EngineCheckpoints(
        engine,
        options=options,
        load_options=load_options,
        rules=rules,
        hints=hints,
        background=background,
    )
    engine.save_checkpoint = checkpoints.save_checkpoint
    engine.load_checkpoint = checkpoints.load_checkpoint
    vars(engine)[_OURS] = checkpoints
    return checkpoints


def checkpoints_of(engine: Any) -> EngineCheckpoints:
    """The result of `use_unickpt` for an engine. Without such a call, returns the same kind of
    object and leaves the engine's own functions unchanged. For trainers, which make their
    engine."""
    checkpoints: EngineCheckpoints | None = vars(engine).get(_OURS)
    if checkpoints is None:
        checkpoints = vars(engine)[_OURS] = EngineCheckpoints(engine)
    return checkpoints


class EngineCheckpoints:
    """Saves and loads the checkpoints of an engine, without changing it. The arguments are those of
    `use_unickpt`."""

    def __init__(
        self,
        engine: Any,
        *,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        rules: Rules | None = None,
        hints: Hints | None = None,
        background: bool = True,
    ) -> None:
        self.engine, self._rules, self._hints = engine, rules, dict(hints or {})
        self._options, self._load_options = SaveOptions.or_default(options), load_options
        self._background = background
        self._queue = SaveQueue()
        self._placing: Placing | None = None
        for optimizer in EngineParts.from_engine(engine).optimizers():
            # Before anything changes: the optimizer changes the masters, then come the weights.
            optimizer.register_step_pre_hook(lambda *_: self._queue.fence())

    # --- saving ----------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As `DeepSpeedEngine.save_checkpoint`: one checkpoint, `save_dir/tag`, which replaces an
        existing one when it is committed; then `save_dir/latest` names it.

        All ranks call this.

        Arguments:
            save_dir: a local path or a URL (file, s3, gs).
            tag: the same on all ranks; by default `global_step<n>`.
            client_state: state of the caller: containers, plain values, tensors. Each rank gets its
                own back.
            save_latest: whether to write `save_dir/latest`.
            exclude_frozen_parameters: leave out parameters that are not trained.

        Returns:
            True.

        Raises:
            ValueError: `save_dir` is empty, or the ranks' tags differ.
            UnsupportedLeaf: something cannot be stored; nothing was written.
            UnickptError: as `unickpt.save_async`; also the error of an earlier save.
        """
        self.start(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return True

    def start(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> PendingSave:
        """As `save_checkpoint`; returns the save, to wait for."""
        if not save_dir:
            raise ValueError(f"save_dir must be a path or a URL, not {save_dir!r}")
        tag = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        self._check_tag(tag)
        destination = Destination.at_path(_joined(save_dir, tag), _theirs)
        tree, owners = dict[str, Any](), set[Hashable]()
        file = LatestFile(save_dir, tag)

        def describe() -> None:  # an error in here reaches the other ranks
            state = self.tree(client_state, exclude_frozen_parameters=exclude_frozen_parameters)
            tree.update(state)
            owners.update(EngineParts.from_engine(self.engine).owners())

        def committed() -> None:
            destination.committed()
            if save_latest and dist.get_rank() == 0:
                file.write()

        callbacks = SaveCallbacks(begin=describe, committed=committed)
        if save_latest:
            callbacks = replace(callbacks, prepare=file.prepare, check=file.announce)

        request = SaveRequest(
            *(destination.location, tree, self._options),
            overwrite=True,
            metadata=lambda: self.metadata(exclude_frozen_parameters),
            owners=owners,
            callbacks=callbacks,
            waits=not self._background,
        )
        pending = self._queue.save(request)
        if not self._background:
            pending.result()
        return pending

    def tree(
        self,
        client_state: Mapping[str, Any] | None = None,
        *,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """This rank's state, as a tree for `unickpt.save`.

        Arguments: as for `save_checkpoint`.

        Raises:
            UnsupportedLeaf: something cannot be stored; names it.
        """
        info = (client_state or {}).get(_INFO)
        arrays = self._arrays(info if isinstance(info, Mapping) else {})
        leaves: dict[str, Any] = {**arrays.saved(with_frozen=not exclude_frozen_parameters)}
        if dist.get_rank() == 0:
            leaves |= values.saved(self.engine)
        state = packed(dict(client_state or {}), "client_state")
        return {**leaves, values.CLIENT: PerProcess(state)}

    def wait(self) -> None:
        """Waits until all saves are committed, or have failed.

        Raises:
            UnickptError: one failed, and its error was not raised before.
        """
        self._queue.wait()
        self._queue.errors.raise_unless_refused()

    def metadata(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The metadata of a checkpoint with `tree`."""
        import deepspeed

        stage = EngineParts.from_engine(self.engine).stage
        about = {"version": deepspeed.__version__, "stage": stage}
        return {"deepspeed": {**about, _EXCLUDED: exclude_frozen_parameters}}

    def _check_tag(self, tag: str) -> None:
        """Checks that all ranks save under the same name."""
        group = job_group(timeout_s=self._options.timeout_s)
        checksum = zlib.crc32(tag.encode())
        most, least = group.agree(checksum), _CRC - group.agree(_CRC - checksum)
        if most != least:
            raise ValueError(
                f"rank {dist.get_rank()} saves with the tag {tag!r}, and another rank with another "
                "one: pass the same tag on all ranks. Nothing was written"
            )

    def _arrays(self, info: Mapping[str, Any]) -> EngineArrays:
        parts = EngineParts.from_engine(self.engine)
        if self._placing is None or (info and info != self._placing.info):
            placing_info = getattr(self.engine.module, _INFO, None) or info
            self._placing = Placing(RankGrid.from_engine(self.engine), placing_info, self._hints)
        return EngineArrays(parts, self._placing)

    # --- loading ---------------------------------------------------------------------------------

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As `DeepSpeedEngine.load_checkpoint`: of any stage of ZeRO, from any number of ranks.

        All ranks call this. Checkpoints of unickpt and those of DeepSpeed, universal ones too, are
        loaded in place; with `rules`, those of other trainers.

        Arguments:
            load_dir: a local path or a URL.
            tag: the checkpoint below it; by default the one that `load_dir/latest` names.
            load_module_strict: False: weights that are not stored stay unchanged.
            load_optimizer_states: False: only the weights, in full precision.
            load_lr_scheduler_states: whether to load the learning rate's schedule.
            load_module_only: only the weights; nothing else of the engine changes.
            custom_load_fn: None.

        Returns:
            The path that was loaded and the caller's state; a pair of None if nothing names a
            checkpoint.

        Raises:
            ValueError: `custom_load_fn` is given.
            CheckpointNotFound: there is no such checkpoint.
            LoadMismatch: it is of something else; lists all differences. Nothing was changed.
            ProcessFailed: another rank could not load.
            UnickptError: as `unickpt.load`.
        """
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn is not supported: pass rules to use_unickpt instead")
        self._queue.wait()  # the checkpoint may be a save in flight
        if tag is None:
            tag = latest(load_dir, bool(self.engine.load_universal_checkpoint()))
            if tag is None:
                _log.warning(
                    "%s has no file %r: nothing is loaded. Pass tag=, if there is a checkpoint",
                    *(load_dir, LATEST),
                )
                return None, None
        path = _joined(load_dir, str(tag))
        request = Wanted(
            load_module_strict,
            load_optimizer_states and not load_module_only,
            load_lr_scheduler_states and not load_module_only,
            not load_module_only,
        )
        return path, self.load(path, request)

    def load(self, path: str, wanted: Wanted, opened: Checkpoint | None = None) -> dict[str, Any]:
        """Loads the checkpoint at a path, and returns the caller's state; see `load_checkpoint`.

        Arguments:
            path: of the checkpoint.
            wanted: the parts to load.
            opened: the checkpoint, if the caller has opened it to read more of it.
        """
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "checkpoint_event_prologue"):
            optimizer.checkpoint_event_prologue()

        def read(stored: Checkpoint) -> tuple[EngineLoad, dict[str, Any]]:
            rules = self._rules if _is_of_others(stored) else None
            if rules is None and _is_of_others(stored):
                raise LoadMismatch(
                    f"{path}: it has none of the names module/<p> and fp32/<p>: another trainer "
                    "saved it. Say which of its arrays are which parameters: "
                    'use_unickpt(engine, rules=...), such as Rules.preset("deepspeed").inverse'
                )
            info = stored.metadata.get(_INFO)
            arrays = self._arrays(info if isinstance(info, Mapping) else {})
            engine_load = EngineLoad(arrays, stored, wanted, rules, self._load_options)
            return engine_load, engine_load.run()

        with loaded_together(job_group(), path):
            if opened is None and self._hints:
                opened = unickpt.open(path, hints=self._hints)
            done, plain = read(opened) if opened is not None else reading_checkpoint(path, read)
        if done.derived:
            done.arrays.parts.round()
        if wanted.values:
            values.restore(
                self.engine, plain, optimizer=wanted.optimizer, scheduler=wanted.scheduler
            )
        if hasattr(optimizer, "checkpoint_event_epilogue"):
            optimizer.checkpoint_event_epilogue()
        return _client_state(plain, path)


def _is_of_others(stored: Checkpoint) -> bool:
    return not any(name.startswith(("module/", "fp32/")) for name in stored.index.entries)


def _client_state(plain: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The caller's own state of this rank, with the values that DeepSpeed adds."""
    state = plain.get(values.CLIENT)
    if isinstance(state, PerProcessValues):
        every, rank = state.values, dist.get_rank()
        same_ranks = len(every) == dist.get_world_size()
        if not same_ranks and not state.all_equal:
            _log.warning(
                "%s: the client_state differs between the %d ranks that saved it, and there are "
                "%d now: all get rank 0's client_state", *(path, len(every), dist.get_world_size()),
            )  # fmt: skip
            rank = 0
        state = unpacked(every[rank % len(every)], f"{path}: client_state")
    versions = {name: plain[name] for name in ("ds_config", "ds_version") if name in plain}
    return {**(state if isinstance(state, dict) else {}), **versions}


def _joined(folder: str, name: str) -> str:
    return f"{str(folder).rstrip('/')}/{name}"


def _theirs(names: Sequence[str]) -> Sequence[str]:
    """The files of a folder that form a checkpoint of DeepSpeed's own."""
    return [n for n in names if n.endswith(("_optim_states.pt", "model_states.pt"))]
