"""vLLM loads any checkpoint that unickpt reads, and follows the versions of a `Publisher`.

vLLM calls `register` at its start, in every process: it is a plugin of the group
`vllm.general_plugins`. docs/integrations/vllm.md shows the settings.
"""

from __future__ import annotations

import importlib

__all__ = ["NAME", "register"]

NAME = "unickpt"
"""The load format, and the backend of weight transfer."""


def register() -> None:
    """Registers the load format and the backend of weight transfer; again without effect."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    factories = importlib.import_module("vllm.distributed.weight_transfer.factory")
    if NAME not in loaders._LOAD_FORMAT_TO_MODEL_LOADER:
        loader = importlib.import_module("unickpt.integrations.vllm.loader")
        loaders.register_model_loader(NAME)(loader.UnickptModelLoader)
    for factory, engine in (
        (factories.WeightTransferEngineFactory, "UnickptTransferEngine"),
        (factories.WeightTransferTrainerFactory, "UnickptTrainerEngine"),
    ):
        if NAME not in factory._registry:
            factory.register_engine(NAME, "unickpt.integrations.vllm.transfer", engine)
