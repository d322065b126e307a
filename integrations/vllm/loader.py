"""The load format: a model's own `load_weights`, fed from any checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from unickpt.integrations.serving.joint_flip import copies_of_model
from unickpt.integrations.serving.loading import CheckpointLoader
from unickpt.integrations.vllm import NAME


class UnickptModelLoader(BaseModelLoader):
    """Loads any checkpoint that unickpt reads into a model of vLLM; writes nothing.

    The model's own `load_weights` decides which part of which array goes where. Each rank reads
    only the parts that it keeps, all at once, compared with their digests; of compressed chunks,
    such as Orbax's, one rank reads each, and sends the others their parts.

    `model_loader_extra_config` has the settings of `CheckpointLoader`; the checkpoint is by default
    the model.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        settings = load_config.model_loader_extra_config
        self._checkpoint = CheckpointLoader(settings, "model_loader_extra_config")
        self._is_followed = self._keeps_layout = False

    def download_model(self, model_config: Any) -> None:
        """Does nothing: arrays are read where they are."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """As vLLM's; for weight transfer on a CPU, weights stay as they are loaded."""
        transfer = vllm_config.weight_transfer_config
        self._is_followed = transfer is not None and transfer.backend == NAME
        self._keeps_layout = self._is_followed and vllm_config.device_config.device_type == "cpu"
        model: Any = super().load_model(vllm_config, model_config, prefix)
        if self._keeps_layout:
            for module in model.modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = torch.nn.functional.linear
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fills the parameters of a model.

        Raises:
            LoadMismatch: the checkpoint lacks a parameter, or a part of one; not checked with
                quantization.
            UnickptError: as `unickpt.load`.
        """
        if self._keeps_layout:
            for module in model.modules():
                module._cpu_skip_gemm_dispatch = True
        recorder = self._checkpoint.load(
            model,
            model_config.model_weights or model_config.model,
            must_fill=model_config.quantization is None,
            group=get_tp_group().cpu_group,
        )
        if self._is_followed:
            copies_of_model[model] = recorder
