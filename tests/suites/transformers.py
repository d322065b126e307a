"""The tests of checkpoints of Hugging Face's Trainer, of transformers 4.57.

`transformers.Trainer` is replaced by one with `UnickptMixin`, whose tests are those of
tests/trainer that save, resume, rotate, or load the best model. Where a test goes on from an
earlier step, later ones are dropped first, as `LaterStepsExist` says. The checkout is of the
version that is installed, or of the main branch just before it (7258ea44 for 4.57).
"""

from __future__ import annotations

from typing import Any

_FILE, _CALLBACKS = "tests/trainer/test_trainer.py", "tests/trainer/test_trainer_callback.py"
_TRAINER = (
    "test_save_checkpoints",
    "test_safe_checkpoints",
    "test_save_collator_tokenizer_by_default",
    "test_load_best_model_with_save",
    "test_can_resume_training",
    "test_resume_training_with_randomness",
    "test_auto_batch_size_with_resume_from_checkpoint",
    "test_training_with_resume_from_checkpoint_false",
    "test_resume_training_with_shard_checkpoint",
    "test_resume_training_with_safe_checkpoint",
    "test_resume_training_with_gradient_accumulation",
    "test_resume_training_with_frozen_params",
    "test_load_best_model_at_end",
    "test_load_best_model_from_safetensors",
    "test_checkpoint_rotation",
    "test_compare_trainer_and_checkpoint_args_logging",
    "test_save_best_checkpoint",
    "test_best_model_checkpoint_behavior",
    "test_resume_from_interrupted_training",
)
_STATES = (
    "test_stateful_callbacks",
    "test_stateful_mixed_callbacks",
    "test_stateful_duplicate_callbacks",
    "test_missing_stateful_callback",
    "test_stateful_control",
)

FILES = (
    *(f"{_FILE}::TrainerIntegrationTest::{name}" for name in _TRAINER),
    *(f"{_CALLBACKS}::TrainerCallbackTest::{name}" for name in _STATES),
)
_FILES = "looks for the Trainer's files in checkpoint-<n>"
_ENTRIES = "counts what is in the run's folder, where .unickpt.lock lies as well"
REASONS: dict[str, str] = {
    "*::test_save_checkpoints": _FILES,
    "*::test_safe_checkpoints": _FILES,
    "*::test_load_best_model_with_save": _FILES,
    "*::test_resume_training_with_shard_checkpoint": _FILES,
    "*::test_resume_training_with_safe_checkpoint": _FILES,
    "*::test_load_best_model_at_end": _FILES,
    "*::test_load_best_model_from_safetensors": _FILES,
    "*::test_resume_from_interrupted_training": _FILES,
    "*::test_stateful_control": _FILES,
    "*::test_save_best_checkpoint": _ENTRIES,
    "*::test_best_model_checkpoint_behavior": _ENTRIES,
    "*::test_compare_trainer_and_checkpoint_args_logging": (
        "continues with updates of other sizes, which skip other data: refused"
    ),
    "*::test_auto_batch_size_with_resume_from_checkpoint": "auto_find_batch_size is refused",
}


def redirect() -> None:
    import transformers
    from transformers import trainer

    from unickpt.errors import LaterStepsExist
    from unickpt.integrations.transformers import UnickptMixin
    from unickpt.runs.checkpointer import Checkpointer

    class Trainer(UnickptMixin, trainer.Trainer):  # type: ignore[misc, unused-ignore]
        def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            except LaterStepsExist:  # does what it says: the Trainer overwrites them unasked
                step = int(str(resume_from_checkpoint).rpartition("-")[2])
                with Checkpointer(self.args.output_dir) as run:
                    run.drop_later_steps(step)
                return super().train(resume_from_checkpoint, *args, **kwargs)

    transformers.Trainer = trainer.Trainer = Trainer
