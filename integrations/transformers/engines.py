"""A Trainer with DeepSpeed: its engine saves and loads as with `use_unickpt`; the Trainer's own
state is in the same checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers.trainer import _is_peft_model

import unickpt
from unickpt.integrations.engines import EngineTree, load_into, metadata_of


def without_engine(trainer: Any) -> dict[str, Any]:
    """The state of a Trainer that its engine does not have: a schedule that DeepSpeed does not
    know, because the Trainer steps it."""
    if trainer.deepspeed is None or trainer.deepspeed.lr_scheduler is not None:
        return {}
    return {"scheduler": trainer.lr_scheduler}


def with_engine(
    trainer: Any, other_state: Mapping[str, Any], metadata: Mapping[str, Any]
) -> tuple[EngineTree, dict[str, Any]]:
    """The tree to save, with the engine's state, and its metadata."""
    engine = trainer.deepspeed
    # As the Trainer itself: the parameters that adapters do not train are those of the base model.
    excludes = bool(_is_peft_model(trainer.model))
    tree = EngineTree(engine, lambda: other_state, exclude_frozen_parameters=excludes)
    return tree, {**metadata, **metadata_of(engine, excludes)}


def imitate(folder: str, step: int) -> None:
    """Makes a folder look like one that the Trainer makes its engine load."""
    os.mkdir(os.path.join(folder, f"global_step{step}"))


def load_instead(engine: Any, folder: str, path: str) -> None:
    """Makes an engine load our checkpoint when the Trainer makes it load a folder.

    Arguments:
        engine: of the Trainer.
        folder: of `imitate`.
        path: of the checkpoint.
    """
    theirs = engine.load_checkpoint

    def load_checkpoint(load_dir: str, *args: Any, **kwargs: Any) -> Any:
        if load_dir != folder:
            return theirs(load_dir, *args, **kwargs)
        engine.load_checkpoint = theirs
        strict = kwargs.get("load_module_strict", True)
        return path, load_into(engine, unickpt.open(path), strict=strict)

    engine.load_checkpoint = load_checkpoint


def load_weights(trainer: Any, path: str) -> None:
    """Loads the weights, and the masters, which are the same in full precision."""
    strict = not _is_peft_model(trainer.model)
    weights: dict[str, bool] = {"optimizer": False, "scheduler": False, "values": False}
    load_into(trainer.deepspeed, unickpt.open(path), strict=strict, **weights)


def keeps_weights(trainer: Any) -> bool:
    """Whether the ranks keep their parts of the weights when the Trainer writes the model: ZeRO 3
    without the setting for it."""
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    gathers = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    return bool(config.is_zero3() and not config.get_value(gathers))
