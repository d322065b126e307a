"""Whether the files of a checkpoint belong together, and how many ranks wrote it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from unickpt.backends.deepspeed.folder import DeepSpeedFolder
from unickpt.backends.deepspeed.sources import SlotValue
from unickpt.backends.deepspeed.states import (
    ModelFileState,
    OptimizerState,
    StateFile,
    same_everywhere,
)
from unickpt.extend import TensorSource, dtype_from_name

_SAME = ("ds_version", "global_steps", "global_samples", "dp_world_size", "mp_world_size")

Models = Sequence[Sequence[ModelFileState]]
"""By model-parallel rank, by data-parallel rank."""
Optimizers = Sequence[Sequence[OptimizerState]]


def check(folder: DeepSpeedFolder, models: Models, optimizers: Optimizers) -> None:
    """Checks that no file is missing, and that all are of one save.

    Raises:
        CheckpointCorrupt: they are not.
        Failed: the storage failed.
    """
    _check_experts(folder, models)
    all_models = list(itertools.chain(*models))
    for key in _SAME:
        same_everywhere([(m.file, m.file.state.get(key)) for m in all_models], f"{key!r}")
    same_everywhere([(m.file, m.degrees) for m in all_models], "the number of parallel ranks")
    for of_rank in models:
        same_everywhere([(m.file, m.shapes) for m in of_rank], "what its param_shapes say")
    if not folder.universal and (optimizers or any(m.shapes for m in all_models)):
        _check_optimizers(folder, models, optimizers)


def _check_experts(folder: DeepSpeedFolder, models: Models) -> None:
    """Checks that the file of each expert is there, if the model file records their number."""
    for rank, (model, *_) in enumerate(models):
        num_experts = model.file.state.get("num_experts")
        counts = num_experts if folder.experts and isinstance(num_experts, list) else ()
        for layer, count in enumerate(counts):
            for expert in range(count if type(count) is int else 0):
                if (layer, expert, rank) not in folder.experts:
                    raise folder.files.incomplete(
                        f"the file of expert {expert} of layer {layer}, "
                        f"layer_{layer}_expert_{expert}_mp_rank_{rank:02d}_model_states.pt, is "
                        f"missing, of {count}"
                    )


def _check_optimizers(folder: DeepSpeedFolder, models: Models, optimizers: Optimizers) -> None:
    if not optimizers:
        raise folder.files.incomplete(
            "the optimizer files of ZeRO, *zero_pp_rank_*_optim_states.pt, are missing"
        )
    if len(optimizers) != len(models):
        raise folder.files.incomplete(
            f"there are model files of {len(models)} model-parallel ranks, and optimizer files of "
            f"{len(optimizers)}"
        )
    count, model = len(optimizers[0]), models[0][0]
    world_size = model.file.state.get("dp_world_size")
    if folder.stage3 and len(models[0]) != count:
        raise folder.files.incomplete(
            f"there are model files of {len(models[0])} data-parallel ranks, and optimizer files "
            f"of {count}"
        )
    if type(world_size) is int and world_size != count:
        raise folder.files.incomplete(
            f"{model.file.name} is of a run with {world_size} data-parallel ranks, and there are "
            f"optimizer files of {count}"
        )
    files = list(itertools.chain(*optimizers))
    version = model.file.state.get("ds_version")
    same_everywhere([(o.file, o.version) for o in files], "the version of DeepSpeed", version)
    # The only number in these files that differs between two saves.
    check_steps(folder, [(o.file, o.groups[0].scalars.get("step")) for o in files if o.groups])


def _number(folder: DeepSpeedFolder, value: SlotValue) -> float:
    if not isinstance(value, TensorSource):
        return value
    out = np.empty(1, dtype_from_name(value.dtype))
    value.elements.read(folder.files, value.first, out)
    return float(out[0])


def check_steps(
    folder: DeepSpeedFolder, steps: Iterable[tuple[StateFile, SlotValue | None]]
) -> None:
    """Checks that optimizers in several files made the same steps.

    Arguments:
        folder: the checkpoint.
        steps: how often that of each file stepped; None if it does not count its steps.

    Raises:
        CheckpointCorrupt: they did not.
        Failed: the storage failed.
    """
    counted = [(file, _number(folder, step)) for file, step in steps if step is not None]
    same_everywhere(counted, "the step of the optimizer")


def tensor_parallelism(folder: DeepSpeedFolder, models: Models) -> int:
    """The degree of tensor parallelism.

    Raises:
        CheckpointCorrupt: the files are of another number of ranks.
    """
    count = max(1, len(models))
    in_layers = max((len(names) for names in folder.layers.values()), default=0)
    degrees = next((model.degrees for model in itertools.chain(*models) if model.degrees), None)
    stages, degree = degrees or (max(1, count // (in_layers or count)), in_layers or count)
    if stages * degree != count or in_layers not in (0, degree):
        layers = f", {in_layers} for each layer" if in_layers else ""
        raise folder.files.incomplete(
            f"{stages} stages of a pipeline x {degree} tensor-parallel ranks wrote it, and there "
            f"are model files of {count} ranks{layers}"
        )
    return degree
