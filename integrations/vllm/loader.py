"""The load format: a model's own `load_weights`, fed from any checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import unickpt
from unickpt import Checkpoint, Rules
from unickpt.errors import LoadMismatch
from unickpt.extend import convertible, first_few
from unickpt.integrations.vllm import NAME
from unickpt.integrations.vllm.recorder import LoadRecorder, WeightCopy, fragments_of

copies_of_model: WeakKeyDictionary[Any, LoadRecorder] = WeakKeyDictionary()
"""What was copied into the parameters of each model that follows versions."""


class UnickptModelLoader(BaseModelLoader):
    """Loads any checkpoint that unickpt reads into a model of vLLM; writes nothing.

    The model's own `load_weights` decides which part of which array goes where. Each rank reads
    only the parts that it keeps, all at once, compared with their digests.

    `model_loader_extra_config` may have `path`, the checkpoint, by default the model; `rules`, from
    stored names to those of Hugging Face: a preset's name, a file, or text; `under`, the part of
    the checkpoint, as for `unickpt.load`; and `hints`, as for `unickpt.open`.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        settings = dict(load_config.model_loader_extra_config or {})
        self._path = settings.pop("path", None)
        self._rules = rules_named(settings.pop("rules", None))
        self._under, self._hints = settings.pop("under", ""), settings.pop("hints", None)
        self._is_followed = self._keeps_layout = False
        if settings:
            raise ValueError(
                f"model_loader_extra_config has {', '.join(sorted(settings))}; the load format "
                f"{NAME!r} takes path, rules, under and hints"
            )

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
            LoadMismatch: the checkpoint lacks a parameter.
            UnickptError: as `unickpt.load`.
        """
        if self._keeps_layout:
            for module in model.modules():
                module._cpu_skip_gemm_dispatch = True
        path = self._path or model_config.model_weights or model_config.model
        checkpoint = unickpt.open(path, hints=self._hints)
        if self._under:
            checkpoint = checkpoint.under(self._under)
        source = _Source(checkpoint, self._rules)
        recorder = LoadRecorder(source.fill, source.read)
        tensors = [
            (name, recorder.source(name, array.shape, array.dtype))
            for name, array in source.arrays.items()
        ]
        with recorder:
            loaded = model.load_weights(iter(tensors))
            recorder.flush()
        parameters = {name for name, _ in model.named_parameters()}
        if loaded is not None and model_config.quantization is None and parameters - loaded:
            missing = first_few(sorted(parameters - loaded))
            raise LoadMismatch(
                f"{checkpoint.url} fills no {missing} of {type(model).__name__}; its arrays must "
                "have Hugging Face's names, maybe through `rules`"
            )
        if self._is_followed:
            copies_of_model[model] = recorder


class _Source:
    """A checkpoint through rules.

    Arguments:
        checkpoint: the checkpoint.
        rules: to the names that `load_weights` gets.
    """

    def __init__(self, checkpoint: Checkpoint, rules: Rules | None) -> None:
        self._checkpoint, self._rules = checkpoint, rules
        entries = convertible(checkpoint.reader, rules, None).index.entries
        self.arrays = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            for name, entry in entries.items()
            if "/" not in name
        }
        """All arrays, without data."""

    def fill(self, copies: Sequence[WeightCopy]) -> None:
        """Reads what is copied."""
        for tree in fragments_of(copies):
            self._load(tree)

    def read(self, name: str) -> torch.Tensor:
        """Reads an array whole."""
        whole = torch.empty_like(self.arrays[name], device="cpu")
        self._load({name: whole})
        return whole

    def _load(self, tree: Mapping[str, Any]) -> None:
        """Fills a part of the arrays; rules see that all are wanted."""
        like = {**self.arrays, **tree}
        only = None if self.arrays.keys() == tree.keys() else list(tree)
        unickpt.load(
            self._checkpoint, like, rules=self._rules, only=only, unexpected="skip", cast=True
        )


def rules_named(rules: str | None) -> Rules | None:
    """Rules from settings: the name of a preset, a file, or text."""
    if rules is None:
        return None
    if rules in Rules.presets():
        return Rules.preset(rules)
    return Rules.load(rules) if os.path.isfile(rules) else Rules.parse(rules)
