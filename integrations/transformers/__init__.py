"""The Trainer of Hugging Face transformers, saving into unickpt.

    class MyTrainer(UnickptMixin, Trainer): ...

saves all that the Trainer saves, at the same steps, as one checkpoint, in the background, and
`trainer.train(resume_from_checkpoint=True)` resumes, on any number of processes. With a
`UnickptCallback` the steps are those of a `Checkpointer`, and any Trainer is used as it is.
docs/integrations/transformers.md lists the differences.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

import unickpt
from unickpt import Checkpointer, PerProcess, Retention
from unickpt.errors import CheckpointExists, CheckpointNotFound, LaterStepsExist, LoadMismatch
from unickpt.extend import NamedOptimizer
from unickpt.integrations import rng
from unickpt.integrations.engines import check_same_kind
from unickpt.integrations.transformers import engines
from unickpt.integrations.transformers.files import agreed, export, foreign, remove_exports, step_of
from unickpt.integrations.transformers.publishing import PublishWeights

__all__ = ["PublishWeights", "UnickptCallback", "UnickptMixin"]

_log = logging.getLogger("unickpt")
_STATE = "trainer_state"
_BATCH = "total_train_batch_size"  # in the metadata


@dataclasses.dataclass(frozen=True)
class _ResumedTraining:
    """The step that a call of `train` resumes from.

    Arguments:
        path: of the checkpoint.
        folder: has the Trainer's own state, as a file; the Trainer passes it around.
        rng: this process's random number generators.
    """

    path: str
    folder: str
    rng: Any


class UnickptMixin:
    """Replaces the saves and loads of a Trainer: `class MyTrainer(UnickptMixin, Trainer)`.

    Model, optimizer, scheduler, gradient scaler, the generators of each process and the Trainer's
    state are one checkpoint, `output_dir/step_<n>`, written in the background.

    Arguments:
        checkpointer: where to save, and what to keep; it is not closed. By default one of
            `output_dir`, which keeps steps as `save_total_limit` says.
        hf_files: also write the model as `save_pretrained` does, to `output_dir/checkpoint-<n>`;
            the training waits for it.
        args, kwargs: the Trainer's.

    Raises:
        ValueError: an argument of the Trainer cannot be honoured; names it.
    """

    args: Any
    state: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    callback_handler: Any
    control: Any
    is_deepspeed_enabled: bool
    _checkpointer: Checkpointer | None = None
    _user_checkpointer: Checkpointer | None = None
    _hf_files = False
    _resumed: _ResumedTraining | None = None
    _engine: Any = None
    _saved: set[int]

    def __init__(
        self,
        *args: Any,
        checkpointer: Checkpointer | None = None,
        hf_files: bool = False,
        **kwargs: Any,
    ) -> None:
        self._user_checkpointer, self._hf_files = checkpointer, hf_files
        super().__init__(*args, **kwargs)
        _check(self, None)

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's engine; None without DeepSpeed, and before the training."""
        return self._engine

    @deepspeed.setter
    def deepspeed(self, engine: Any) -> None:
        # Set by the Trainer as soon as the engine exists, before it makes the engine load.
        self._engine, resumed = engine, self._resumed
        if engine is not None and resumed is not None:
            engines.load_instead(engine, resumed.folder, resumed.path)

    # --- a run ---------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As `Trainer.train`; returns when all steps are committed.

        Arguments:
            resume_from_checkpoint: True: the newest step in the run's folder; a path of a
                checkpoint that such a Trainer saved, also by the name that the Trainer would have
                given it, `checkpoint-<n>`; or one that the Trainer itself saved.
            trial: None.
            args, kwargs: as there.

        Raises:
            ValueError: an argument cannot be honoured, or there is no step; names it.
            CheckpointExists: the folder has steps, and training does not resume from them.
            LaterStepsExist: steps after the one to resume from exist; says how to remove them.
            LoadMismatch: the batches had another size, so that steps have other data.
            UnickptError: a save failed.
        """
        _check(self, trial)
        self._saved = set()  # by this call
        with self._run() as run, self._resume_source(run, resume_from_checkpoint) as folder:
            result = super().train(folder, trial, *args, **kwargs)  # type: ignore[misc]
        remove_exports(self, run)
        return result

    @contextmanager
    def _run(self) -> Iterator[Checkpointer]:
        """The Checkpointer of a call of `train`."""
        if self._user_checkpointer is not None:
            self._checkpointer = self._user_checkpointer
            yield self._user_checkpointer
            self._user_checkpointer.wait()
            return
        limit = self.args.save_total_limit
        keep = _Limit(self) if limit is not None and limit > 0 else None
        with Checkpointer(self.args.output_dir, keep=Retention(keep=keep)) as run:
            self._checkpointer = run
            if keep is not None:
                keep.run = run
            yield run

    @contextmanager
    def _resume_source(
        self, run: Checkpointer, requested: str | bool | None
    ) -> Iterator[str | bool | None]:
        """The folder that the Trainer resumes from: it has the Trainer's state, if the rest is
        ours."""
        step = agreed(run.latest())
        if not requested:
            if step is not None:
                raise CheckpointExists(
                    f"{run.path(step)} exists, and this training would begin at step 0: pass "
                    "resume_from_checkpoint=True to resume, or save somewhere else"
                )
            yield None
            return
        if requested is True and step is None:
            yield foreign(self.args.output_dir)  # of the Trainer itself, which says if none is
            return
        is_newest = requested is True and step is not None
        path = run.path(step) if is_newest else step_of(run, str(requested))
        try:
            opened = unickpt.open(path)
        except (CheckpointNotFound, ValueError) as error:
            if not os.path.isfile(os.path.join(path, TRAINER_STATE_NAME)):
                # Begins as the Trainer's own message.
                message = f"Can't find a valid checkpoint at {path}: {error}"
                raise CheckpointNotFound(message) from error
            yield path  # the Trainer saved it
            return
        if _BATCH not in opened.metadata:
            raise LoadMismatch(
                f"{path} has no state of a Trainer: it was not saved by this integration"
            )
        state = json.loads(_state_text(path))
        check_same_kind(path, opened.metadata, self.is_deepspeed_enabled)
        _check_order(run, step, state["global_step"])
        _check_batches(self, path, opened.metadata.get(_BATCH))
        rng_state = _load(path, {"rng": rng.like()})["rng"].value
        with tempfile.TemporaryDirectory(prefix="unickpt-") as folder:
            # Else the Trainer resumes with the batches of a process then; see _check_batches.
            state["train_batch_size"] = self.args.train_batch_size
            Path(folder, TRAINER_STATE_NAME).write_text(json.dumps(state))
            if self.is_deepspeed_enabled:
                engines.imitate(folder, state["global_step"])
            self._resumed = _ResumedTraining(path, folder, rng_state)
            try:
                yield folder
            finally:
                self._resumed = None

    # --- methods that the Trainer calls --------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = self._checkpointer
        assert run is not None
        self.store_flos()  # type: ignore[attr-defined]
        state, step = self.state, self.state.global_step
        by_metric = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
        best = state.best_global_step
        if best and self.args.save_strategy in by_metric and self._has(run, best, step):
            state.best_model_checkpoint = run.path(best)
        callbacks = [*self.callback_handler.callbacks, self.control]
        exported = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        state.stateful_callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
        # Those of the other processes differ from it in the process number and in times.
        text = json.dumps(dataclasses.asdict(state)) if state.is_world_process_zero else None
        tree: Any = _tree(self) | {_STATE: PerProcess(text), "rng": rng.states()}
        metadata: dict[str, Any] = {_BATCH: _total_batch(self)}
        # The Trainer may ask twice at the end of an epoch; its state is newer then.
        again = step in self._saved
        if self.is_deepspeed_enabled:
            tree, metadata = engines.with_engine(self, tree, metadata)
        run.save(step, tree, metadata=metadata, overwrite=again)
        self._saved.add(step)
        if self._hf_files:
            export(self, run, step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        resumed = self._resumed_from(resume_from_checkpoint)
        if resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:
            _load(resumed.path, {"model": self.model if model is None else model})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        resumed = self._resumed_from(checkpoint)
        if resumed is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        else:
            tree = _tree(self)
            tree.pop("model", None)
            _load(resumed.path, tree)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._resumed_from(checkpoint) is None:  # else loaded with the optimizer
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        resumed = self._resumed_from(checkpoint)
        if resumed is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            rng.restore(resumed.rng)

    def _load_best_model(self) -> None:
        run, best = self._checkpointer, self.state.best_model_checkpoint
        assert run is not None
        run.wait()
        if self.state.best_global_step in run.steps():  # the folder may have been moved
            best = run.path(self.state.best_global_step)
        elif os.path.isfile(os.path.join(best, TRAINER_STATE_NAME)):
            super()._load_best_model()  # type: ignore[misc]
            return
        if self.is_deepspeed_enabled:
            engines.load_weights(self, best)
        else:
            _load(best, {"model": self.model})

    def _has(self, run: Checkpointer, best: int, step: int) -> bool:
        """Whether the best step exists, or is being saved."""
        return best in {step, *self._saved} or best in run.steps()

    def _resumed_from(self, folder: str | None) -> _ResumedTraining | None:
        """The step to resume from, if a folder that the Trainer passes around stands for it."""
        resumed = self._resumed
        return resumed if resumed is not None and folder == resumed.folder else None


class UnickptCallback(TrainerCallback):
    """Saves the steps of a Trainer into a run of its own, with `save_strategy="no"`.

    Call `callback.train(trainer)` instead of `trainer.train()`: it resumes from the newest step, if
    there is one.

    Arguments:
        checkpointer: says where to save, when (`save_every`) and what to keep. It is not closed.
        save_epochs: also save at the ends of epochs that are multiples of this.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> import unickpt
        >>> callback = UnickptCallback(unickpt.Checkpointer("memory://hf/run", save_every=100))
    """

    def __init__(self, checkpointer: Checkpointer, save_epochs: int | None = None) -> None:
        if save_epochs is not None and save_epochs < 1:
            raise ValueError(f"save_epochs={save_epochs!r} must be an integer, at least 1")
        self.checkpointer, self.save_epochs = checkpointer, save_epochs
        self._trainer: Any = None

    def train(self, trainer: Trainer, **kwargs: Any) -> Any:
        """Trains, from the newest step on if there is one.

        Arguments:
            trainer: has this callback, and `save_strategy="no"`.
            kwargs: of `trainer.train`.

        Returns:
            As `trainer.train`.

        Raises:
            ValueError: the trainer lacks the callback, or an argument cannot be honoured.
            UnickptError: as `UnickptMixin.train`.
        """
        if self not in trainer.callback_handler.callbacks:
            raise ValueError("the trainer lacks this callback: Trainer(..., callbacks=[callback])")
        if trainer.args.save_strategy != SaveStrategy.NO:
            raise ValueError(
                f"save_strategy={str(trainer.args.save_strategy.value)!r}: the Checkpointer says "
                "when to save; pass save_strategy='no'"
            )
        if not isinstance(trainer, UnickptMixin):
            # Saves and loads are methods of the Trainer, which already exists.
            kind = type(trainer)
            trainer.__class__ = type(f"Unickpt{kind.__name__}", (UnickptMixin, kind), {})
        trainer._user_checkpointer, self._trainer = self.checkpointer, trainer
        kwargs.setdefault("resume_from_checkpoint", agreed(self.checkpointer.latest()) is not None)
        return trainer.train(**kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            raise ValueError("call callback.train(trainer) instead of trainer.train()")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer saves when this step has been logged and evaluated.
        if self.checkpointer.should_save(state.global_step):
            control.should_save = True
        if self.checkpointer.preempted:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.save_epochs is not None and round(state.epoch) % self.save_epochs == 0:
            control.should_save = True


# --- the stored tree ------------------------------------------------------------------------------


def _tree(trainer: Any) -> dict[str, Any]:
    """The state of a Trainer that is saved, and loaded in place; without that of an engine."""
    if trainer.is_deepspeed_enabled:
        return engines.without_engine(trainer)
    tree = {
        "model": trainer.model,
        "optimizer": NamedOptimizer(trainer.optimizer, trainer.model),
        "scheduler": trainer.lr_scheduler,
    }
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None:
        tree["scaler"] = scaler
    return tree


def _load(path: str, tree: dict[str, Any]) -> Any:
    """Loads a part of a checkpoint."""
    return unickpt.load(path, tree, unexpected="skip")


def _state_text(path: str) -> str:
    """The state of the Trainer in a checkpoint, as its JSON."""
    return str(unickpt.load(path, only=_STATE)[_STATE].values[0])


def _total_batch(trainer: Any) -> int:
    """How many samples an update has."""
    args = trainer.args
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


class _Limit:
    """Keeps steps as `save_total_limit` does: the newest steps and the best one, together so many;
    two if the limit is one and the best is not the newest."""

    run: Checkpointer

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(self, step: int) -> bool:
        limit, steps = self._trainer.args.save_total_limit, self.run.steps()
        if not steps:
            return True
        # The best one according to the newest step: a run that resumes there looks for it.
        state = json.loads(_state_text(self.run.path(steps[-1])))
        best = state["best_global_step"]
        other_steps = [candidate for candidate in steps if candidate != best]
        least = 0 if best == steps[-1] else 1
        count = max(least, limit - (best in steps))
        return step not in other_steps[: max(0, len(other_steps) - count)]


# --- arguments: unsupported ones are refused by name ----------------------------------------------


def _check(trainer: Any, trial: Any) -> None:
    args, has_checkpointer = trainer.args, trainer._user_checkpointer is not None
    accelerator = trainer.accelerator
    refused = {
        "trial: hyperparameter search saves into folders of its own": trial is not None,
        "save_only_model=True: a checkpoint has all state; use hf_files=True": args.save_only_model,
        "save_on_each_node=True: all processes save into one storage": args.save_on_each_node,
        "auto_find_batch_size=True: it starts again in the same folder": args.auto_find_batch_size,
        "enable_jit_checkpoint=True: use a UnickptCallback, and SaveEvery(preemption=True)": (
            getattr(args, "enable_jit_checkpoint", False)
        ),
        "push_to_hub=True with hub_strategy other than 'end': steps are saved in the background": (
            args.push_to_hub and args.hub_strategy != "end"
        ),
        "save_total_limit: the given Checkpointer decides which steps are kept": (
            has_checkpointer and args.save_total_limit is not None
        ),
        "load_best_model_at_end=True with a Checkpointer of your own, which may remove it": (
            has_checkpointer and args.load_best_model_at_end
        ),
        "hf_files=True with ZeRO 3: set stage3_gather_16bit_weights_on_model_save": (
            trainer._hf_files and trainer.is_deepspeed_enabled and engines.keeps_weights(trainer)
        ),
        "fsdp with fsdp_config={'version': 1}: use version 2, whose parameters are DTensors": (
            trainer.is_fsdp_enabled and not accelerator.is_fsdp2
        ),
        "hf_files=True with FSDP's SHARDED_STATE_DICT: use FULL_STATE_DICT": (
            trainer._hf_files
            and trainer.is_fsdp_enabled
            and "FULL_STATE_DICT" not in str(accelerator.state.fsdp_plugin.state_dict_type)
        ),
    }
    wrong = [text for text, is_so in refused.items() if is_so]
    if wrong:
        raise ValueError(f"not supported: {'; '.join(wrong)}")


def _check_order(run: Checkpointer, newest: int | None, step: int) -> None:
    if newest is not None and newest > step:
        raise LaterStepsExist(
            f"{run.path(newest)} is later than step {step}, from which to resume: remove the later "
            f"steps with unickpt.Checkpointer(...).drop_later_steps({step}), or save somewhere else"
        )


def _check_batches(trainer: Any, path: str, saved: object) -> None:
    now = _total_batch(trainer)
    if saved != now and not trainer.args.ignore_data_skip:
        raise LoadMismatch(
            f"{path}: updates had {saved} samples when it was saved, and have {now} now, so that "
            "as many steps skip other data: choose per_device_train_batch_size and "
            "gradient_accumulation_steps so that they are as many on this number of processes, or "
            "pass ignore_data_skip=True"
        )
