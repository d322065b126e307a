"""The loader: a model's own `load_weights`, fed from any checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from sglang.srt.model_loader.loader import DefaultModelLoader

from unickpt.integrations.serving.loading import CheckpointLoader
from unickpt.integrations.sglang import NAME


class SGLangLoader(DefaultModelLoader):
    """Loads any checkpoint that unickpt reads into a model of SGLang; writes nothing.

    The model's own `load_weights` decides which part of which array goes where. Each rank reads
    only the parts that it keeps, all at once, compared with their digests.

    `model_loader_extra_config["unickpt"]` has the settings of `CheckpointLoader`; the checkpoint is
    by default the model.
    """

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config)
        settings = extra.pop(NAME)
        super().__init__(dataclasses.replace(load_config, model_loader_extra_config=extra))
        self._checkpoint = CheckpointLoader(settings, f"model_loader_extra_config[{NAME!r}]")
        self._model_config: Any = None

    def download_model(self, model_config: Any) -> None:
        """Does nothing: arrays are read where they are."""

    def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[Any]:
        self._model_config = model_config
        return iter(())

    # Of SGLang's class it is a static method, which its `load_model` calls on the loader.
    def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: Any) -> None:
        """Fills the parameters of a model.

        Raises:
            LoadMismatch: the checkpoint lacks a parameter, or a part of one; not checked with
                quantization.
            UnickptError: as `unickpt.load`.
        """
        config = self._model_config
        self._checkpoint.load(
            model,
            config.model_path,
            must_fill=config.quantization is None,
            load_weights=lambda tensors: self.load_weights_only(model, tensors, target_device),
        )
        self.postprocess_weights(model, target_device)
