"""The checkpoint manager that torchtitan builds from its config."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import base
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.observability import structured_logger as trace
from torchtitan.tools import filesystem

import unickpt
from unickpt import Checkpoint, Checkpointer, SaveOptions
from unickpt.errors import CheckpointNotFound, LoadMismatch
from unickpt.extend import (
    MANIFEST,
    folders_with,
    job_group,
    on_process_0,
    resolve_path,
    storage_context,
    structure_of,
)
from unickpt.integrations import dcp
from unickpt.types import Group, PendingSave

_log = logging.getLogger("unickpt")
_ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")
_THEIR_STEP = re.compile(r"step-(\d+)")
_THEIR_METADATA = ".metadata"


class TorchtitanCheckpointManager(base.BaseCheckpointManager):
    """Saves and resumes torchtitan's trainer; the steps are those of a `unickpt.Checkpointer`.

    Arguments:
        config: see `Config`.
        dataloader, model_parts, optimizers, lr_schedulers, states, sd_adapter, base_folder: as the
            trainer gives them to each of its checkpoint managers.

    Raises:
        ValueError: a setting cannot be honoured; names it.

    Example, in a function of a config registry:
        checkpoint=CheckpointManager.Config(enable=True, folder="s3://bucket/run", interval=500)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(base.BaseCheckpointManager.Config):
        """torchtitan's settings; those that differ are explained here."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """"async": the loop waits while the state is copied. "async_with_pinned_mem":
        parameters and optimizer state are copied during the next forward and backward."""

        local: str | None = None
        """A path on fast storage that all processes share, where steps are committed first; see
        `unickpt.Checkpointer`."""

        reuse: bool = False
        """Whether chunks that are equal in the step before are not written again."""

        def __post_init__(self) -> None:
            # The checks of torchtitan itself; except that HF files must be local, which ours need
            # not be.
            settings = {
                f.name: getattr(self, f.name) for f in fields(base.BaseCheckpointManager.Config)
            }
            path = settings["initial_load_path"]
            if path is not None:
                object.__setattr__(self, "initial_load_path", path.strip())
            settings["folder"] = _as_if_local(self.folder, "remote")
            settings["initial_load_path"] = _as_if_local(path, "/remote")
            base.BaseCheckpointManager.Config(**settings)
            if self.initial_load_in_hf_quantized:
                raise ValueError(
                    "initial_load_in_hf_quantized=True is not supported: convert the checkpoint "
                    "with rules that undo its quantisation (docs/formats), and load the result"
                )
            self.async_mode = self.async_mode.lower()  # type: ignore[assignment]
            if self.async_mode not in _ASYNC_MODES:
                modes = ", ".join(_ASYNC_MODES)
                raise ValueError(f"Invalid async_mode={self.async_mode!r}: it is none of {modes}")

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Stateful | None,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Stateful,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if sd_adapter is None:
            for name in ("last_save_in_hf", "initial_load_in_hf"):
                if getattr(config, name):
                    raise ValueError(
                        f"checkpoint.{name}=True, but the model has no sd_adapter that knows its "
                        "names in HF files"
                    )
        self.config, self.sd_adapter = config, sd_adapter
        self.folder: str = filesystem.join(base_folder, config.folder)
        self.interval, self.keep_latest_k = config.interval, config.keep_latest_k
        self.states = states
        self.states |= {
            base.MODEL: base.ModelWrapper(model_parts),
            base.OPTIMIZER: optimizers,
            base.DATALOADER: dataloader,
            base.LR_SCHEDULER: lr_schedulers,
        }
        self._has_data = _is_first(getattr(dataloader, "dp_rank", None))
        self._check_excluded(config.exclude_from_loading)
        self.save_future: dcp.SaveFuture | None = None
        self._staging: PendingSave | None = None
        self._options = SaveOptions()
        self._goes_on_after: int | None = None
        """The step that was requested and loaded; the next save removes later steps."""
        in_background = config.async_mode == "async_with_pinned_mem"
        self._checkpointer = Checkpointer(
            self.folder,
            keep_last=config.keep_latest_k or None,
            local=config.local,
            reuse=config.reuse,
            optimizers=list(optimizers) if in_background else (),
            options=self._options,
        )

    # --- saving --------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._is_due(curr_step, last_step):
            return False
        trace.add_step_tag("checkpoint_save")
        with trace.log_trace_span("checkpoint_save"), torch.no_grad():
            self._save_step(curr_step, last_step)
        return True

    def _save_step(self, curr_step: int, last_step: bool) -> None:
        self.maybe_wait_for_saving()
        self._drop_later_steps()
        if last_step and self.config.last_save_model_only:
            self._save_model(curr_step)
            return
        states = {key: state for key, state in self.states.items() if state is not None}
        if not self._has_data:
            states.pop(base.DATALOADER, None)
        waits = last_step or self.config.async_mode == "disabled"
        pending = self._checkpointer.save(curr_step, dcp.to_save(states), wait=waits)
        if not waits:
            self._staging, self.save_future = pending, dcp.SaveFuture(pending)

    def _is_due(self, step: int, last_step: bool) -> bool:
        if self.config.load_only:
            return False
        first = step == 1 and self.config.enable_first_step_checkpoint
        return first or last_step or step % self.interval == 0

    def _save_model(self, step: int) -> None:
        """Saves only the model, in the dtype for export; returns when it is committed."""
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        state = {name: _cast(v, dtype) for name, v in self.states[base.MODEL].state_dict().items()}
        if self.config.last_save_in_hf:
            self._checkpointer.wait()
            self._save_hf(step, self.sd_adapter.to_hf(state))
        else:
            self._checkpointer.save(step, {base.MODEL: state}, wait=True)

    def _save_hf(self, step: int, state: dict[str, Any]) -> None:
        """Writes files as transformers reads them; also into object storage."""
        where = filesystem.join(self.folder, f"step-{step}")
        # First in our format, where any process can write any file.
        temporary = resolve_path(f"{where}.unickpt")
        unickpt.save(str(temporary), state, overwrite=True, options=self._options)
        assets = getattr(self.sd_adapter, "hf_assets_path", None)
        unickpt.convert(
            str(temporary), where, to="hf", overwrite=True, options=self._options, config=assets
        )

        def remove() -> None:
            context = storage_context()
            # First, so that no reader ever takes a part for a whole.
            temporary.remove_file(MANIFEST, context)
            temporary.remove(context)

        on_process_0(
            self._group(),
            temporary,
            "remove the checkpoint from which the HF files were made",
            remove,
        )

    def _drop_later_steps(self) -> None:
        """Removes the steps that a run abandoned with `load_step`; else they would be mixed."""
        step, self._goes_on_after = self._goes_on_after, None
        if step is not None and self._agreed_latest() > step:
            dropped = self._checkpointer.drop_later_steps(step)
            _log.warning("%s: went on from step %d; removed %s", self.folder, step, dropped)

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None
        if future is not None:
            future.result()

    def _maybe_wait_for_staging(self) -> None:
        pending, self._staging = self._staging, None
        if pending is not None:
            pending.wait_staged()

    def _close(self) -> None:
        if hasattr(self, "_checkpointer"):
            self._checkpointer.close()

    # --- loading -------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        with trace.log_trace_span("checkpoint_load"), torch.no_grad():
            if step >= 0:
                self._load_given(step)
                return True
            ours, theirs = self._agreed_latest(), self._agreed(self._their_steps())
            if ours >= 0:
                if theirs > ours:
                    _log.warning("%s: step-%d of torchtitan is not used", self.folder, theirs)
                self._load_step(ours)
            elif theirs >= 0:
                self._load_theirs(theirs)
            else:
                return self._load_initial()
            return True

    def _load_given(self, step: int) -> None:
        """Loads a requested step."""
        ours = self._checkpointer.steps()
        if step in ours:
            self._load_step(step)
            self._goes_on_after = step
        elif not ours and step in self._their_steps():
            self._load_theirs(step)
        else:
            have = ", ".join(map(str, ours[-10:])) or "none"
            raise CheckpointNotFound(
                f"--checkpoint.load_step={step} not found in {self.folder}; the committed steps "
                f"are: {have}"
            )

    def _load_theirs(self, step: int) -> None:
        self._load_from(filesystem.join(self.folder, f"step-{step}"), only_model=step == 0)

    def _load_step(self, step: int) -> None:
        """Loads a step of the Checkpointer, which then resumes from it."""
        path = self._checkpointer.path(step)
        stored = unickpt.open(path)
        states = self._states_to_load(only_model=step == 0)
        if states.keys() - {base.MODEL} and not _keys(stored) - {base.MODEL}:
            older = [s for s in self._checkpointer.steps() if s < step]
            do = "start from scratch"
            if older:
                do = f"resume from an earlier step with load_step={max(older)}"
            raise LoadMismatch(
                f"{path} contains only the model, like the last save of a training run "
                f"(last_save_model_only); {do}, or begin another run with initial_load_path="
            )
        request = dcp.RequestedState(states)
        request.stored = stored
        self._checkpointer.load(request, step=step, unexpected="skip", cast=True)
        request.give_back()

    def _load_initial(self) -> bool:
        """Loads the initial state of a training; false if it starts from scratch."""
        path = (self.config.initial_load_path or "").strip()
        if self.config.initial_load_in_hf:
            path = path or self.sd_adapter.hf_assets_path
            state = self.sd_adapter.to_hf(self.states[base.MODEL].state_dict())
            dcp.load(state, checkpoint_id=path)
            self.states[base.MODEL].load_state_dict(self.sd_adapter.from_hf(state))
            return True
        if not path:
            _log.info("%s has no steps: a new training", self.folder)
            return False
        self._load_from(path, only_model=self.config.initial_load_model_only)
        return True

    def _load_from(self, path: str, only_model: bool) -> None:
        """Loads a checkpoint of another training: this manager's, or one of torchtitan's own."""
        states = self._states_to_load(only_model)
        if base.MODEL in _keys(unickpt.open(path)):
            dcp.load(states, checkpoint_id=path)
            return
        # torchtitan's own has the model's names next to the other keys.
        flat = states | states[base.MODEL].state_dict()
        del flat[base.MODEL]
        dcp.load(flat, checkpoint_id=path)
        states[base.MODEL].load_state_dict(flat)

    def _states_to_load(self, only_model: bool) -> dict[str, Any]:
        if only_model:
            return {base.MODEL: self.states[base.MODEL]}
        left_out = self.config.exclude_from_loading
        return {k: s for k, s in self.states.items() if s is not None and k not in left_out}

    def _check_excluded(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key not in self.states:
                names = ", ".join(self.states)
                raise ValueError(f"exclude_from_loading: {key!r} is not one of {names}")

    def _their_steps(self) -> list[int]:
        """The steps that torchtitan's own manager saved into the folder; they count until this one
        has saved a step there."""
        folder = resolve_path(self.folder)
        names = folders_with(folder, _THEIR_METADATA, storage_context()) if folder.exists() else []
        return [int(m[1]) for m in map(_THEIR_STEP.fullmatch, names) if m]

    def _agreed_latest(self) -> int:
        return self._agreed(self._checkpointer.steps())

    def _agreed(self, steps: Iterable[int]) -> int:
        """The newest of some steps, as the first process sees it; -1 if there is none."""
        group, newest = self._group(), max(steps, default=-1)
        if group.count == 1:
            return newest
        return group.agree(newest + 1 if group.index == 0 else 0) - 1

    def _group(self) -> Group:
        return job_group(timeout_s=self._options.timeout_s)


def _keys(stored: Checkpoint) -> set[Any]:
    """The keys at the top of a checkpoint's tree."""
    node = structure_of(stored)
    return set(getattr(node, "keys", ()))


def _is_first(dp_rank: int | None) -> bool:
    """Whether this is the first of the processes that read the same data.

    The state of their loaders may differ in irrelevant values, such as the seed of workers.
    """
    if dp_rank is None or not dist.is_initialized():
        return True
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dp_rank)
    return ranks.index(dp_rank) == dist.get_rank()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _as_if_local(path: str | None, local: str) -> str | None:
    return local if path and filesystem.is_remote(path) else path
