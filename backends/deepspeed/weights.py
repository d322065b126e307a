"""The weights as the model had them: of model files, of a pipeline's layers, of experts.

Sources: deepspeed/runtime/engine.py, runtime/pipe/module.py, moe/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.backends._files.elements import JoinedElements
from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends.deepspeed import partitions
from unickpt.backends.deepspeed.folder import DeepSpeedFolder
from unickpt.backends.deepspeed.sources import Shapes
from unickpt.backends.deepspeed.states import ModelFileState, StateFile, flattened, read_all
from unickpt.extend import TensorSource, quoted

_LAYER_NAME = re.compile(r"(\d{1,9})\..+")
_TIED = "tied_modules."


@dataclass(frozen=True)
class ModuleWeights:
    """The model-parallel ranks' parts of the module's state.

    Arguments:
        held: by rank, its parts by name.
        trained: names whose weights are cast from those in float32, with their dtypes; at stage 3.
        aliases: names of the same arrays as others.
        values: plain values by name, and the file that has them.
    """

    held: Sequence[Mapping[str, TensorSource]]
    trained: Mapping[str, str]
    aliases: Mapping[str, str]
    values: Mapping[str, tuple[Any, StateFile]]


def of_models(
    folder: DeepSpeedFolder, models: Sequence[Sequence[ModelFileState]], degree: int
) -> ModuleWeights:
    """The weights in all files.

    Arguments:
        folder: the checkpoint.
        models: by model-parallel rank, by data-parallel rank; one each below stage 3.
        degree: of tensor parallelism.

    Raises:
        CheckpointCorrupt: a file is missing, or contradicts others.
    """
    if folder.stage3:
        return _of_stage3(models)
    parts_by_rank: list[dict[str, TensorSource]] = []
    values: dict[str, tuple[Any, StateFile]] = {}
    shapes = {n: s for (model,) in models for n, s in model.all_shapes.items()}
    aliases = _ties([model for (model,) in models], shapes)
    for (model,) in models:
        sources = dict(model.sources)
        for name, value in (model.module or {}).items():
            if not isinstance(value, Tensor):
                values.setdefault(name, (value, model.file))
            elif 0 in value.shape:
                sources[name] = TensorSource(value.dtype, value.shape, JoinedElements(()))
        parts_by_rank.append(
            {name: source for name, source in sources.items() if name not in aliases}
        )
    _add_experts(folder, parts_by_rank)
    if folder.layers:
        _add_layers(folder, [model.all_shapes for (model,) in models], parts_by_rank, degree)
    return ModuleWeights(parts_by_rank, {}, aliases, values)


def _ties(models: Sequence[ModelFileState], shapes: Mapping[str, Any]) -> dict[str, str]:
    """Names of one tensor: the others of the one that is trained, or comes first."""
    by_model = [_tied(model, shapes) for model in models]
    first = by_model[0] if by_model else {}  # a universal one may have no model file
    aliases = {k: v for k, v in first.items() if all(tied.get(k) == v for tied in by_model)}
    present = {name for model in models for name in model.module or ()}
    shared = {alias: target for model in models for alias, target in model.shared.items()}
    return aliases | {
        alias: target for alias, target in shared.items() if alias in present and target in present
    }


def _tied(model: ModelFileState, shapes: Mapping[str, Any]) -> dict[str, str]:
    names: dict[str, list[str]] = {}
    for name in model.sources:
        names.setdefault((model.module or {})[name].identity, []).append(name)
    aliases = dict[str, str]()
    for same in names.values():
        main = next((name for name in same if name in shapes), same[0])
        aliases |= {name: main for name in same if name != main}
    return aliases


def _of_stage3(models: Sequence[Sequence[ModelFileState]]) -> ModuleWeights:
    parts_by_rank, trained = [], dict[str, str]()
    aliases, values = dict[str, str](), dict[str, tuple[Any, StateFile]]()
    for of_rank in models:
        model = of_rank[0]
        frozen, shapes = partitions.frozen(of_rank), model.all_shapes
        sources: dict[str, TensorSource] = {}
        for name, value in (model.module or {}).items():
            if name in shapes and isinstance(value, Tensor):
                trained[name] = value.dtype
            elif name in frozen:
                sources[name] = frozen[name]
            elif name in model.shared:
                aliases[name] = model.shared[name]
            elif not isinstance(value, Tensor):
                values.setdefault(name, (value, model.file))
            elif name in model.sources:
                sources[name] = model.sources[name]
            elif name in model.buffers:
                sources[name] = TensorSource(value.dtype, value.shape, JoinedElements(()))
            else:
                raise model.file.damaged(
                    f"array 'module/{name}' is empty there, and is in no param_shapes; are all "
                    "files of one save?"
                )
        parts_by_rank.append(sources)
    return ModuleWeights(parts_by_rank, trained, aliases, values)


# --- experts, layers of a pipeline --------------------------------------------------------------


def _module_of(file: StateFile) -> dict[str, TensorSource]:
    return file.sources(flattened(file, file.value))


def _add_experts(folder: DeepSpeedFolder, parts_by_rank: Sequence[dict[str, TensorSource]]) -> None:
    """Adds the experts, each of which has a file for each model-parallel rank."""
    names = list(folder.experts.values())
    read = read_all(folder.files, names, _module_of)
    for (_, _, rank), name, sources in zip(folder.experts, names, read, strict=True):
        if rank >= len(parts_by_rank):
            raise folder.files.damaged(f"{name} is of a rank that has no other file")
        parts_by_rank[rank].update(sources)


def _add_layers(
    folder: DeepSpeedFolder,
    shapes: Sequence[Shapes],
    parts_by_rank: Sequence[dict[str, TensorSource]],
    degree: int,
) -> None:
    """Adds the layers of a pipeline, whose files have names without the number of the layer.

    Arguments:
        folder: the checkpoint.
        shapes: by model-parallel rank, of the parameters.
        parts_by_rank: by model-parallel rank, the parts to add to.
        degree: of tensor parallelism.

    Raises:
        CheckpointCorrupt: a file is missing.
    """
    names = [name for by_rank in folder.layers.values() for name in by_rank]
    contents = read_all(folder.files, names, _module_of)
    by_layer = {
        layer: contents[number * degree : (number + 1) * degree]
        for number, layer in enumerate(folder.layers)
    }
    stage_of = {name: r // degree for r in reversed(range(len(shapes))) for name in shapes[r]}
    _check_layers(folder, stage_of, by_layer)
    tied = _tied_names(folder, by_layer, stage_of, shapes)
    for layer, by_rank in by_layer.items():
        for rank, sources in enumerate(by_rank):
            for key, source in sources.items():
                name = tied.get(f"{layer}.{key}", f"{layer}.{key}")
                parts_by_rank[stage_of.get(name, 0) * degree + rank][name] = source


def _check_layers(
    folder: DeepSpeedFolder,
    names: Mapping[str, int],
    by_layer: Mapping[int, Sequence[Mapping[str, TensorSource]]],
) -> None:
    for name in names:
        match = _LAYER_NAME.fullmatch(name)
        if match is None:
            continue
        layer, key = int(match[1]), name[len(match[1]) + 1 :]
        if layer not in by_layer:
            raise folder.files.incomplete(
                f"array 'module/{name}': the file of layer {layer}, "
                f"layer_{layer:02d}-model_states.pt or its parts, is missing"
            )
        if key not in by_layer[layer][0]:
            raise folder.files.damaged(
                f"{folder.layers[layer][0]} has no {quoted(key)}, which array 'module/{name}' "
                "needs; are all files of one save?"
            )


def _tied_names(
    folder: DeepSpeedFolder,
    by_layer: Mapping[int, Sequence[Mapping[str, TensorSource]]],
    names: Mapping[str, int],
    shapes: Sequence[Shapes],
) -> dict[str, str]:
    """The names of parameters of tied layers, `tied_modules.<key>.<name>`, as far as they are
    certain.

    No file records the key: it is certain if exactly one tied parameter has the name and the shape,
    and only one such layer's file could be meant.

    Raises:
        CheckpointCorrupt: no layer has one of them.
    """
    tied: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in names:
        if name.startswith(_TIED) and name.count(".") >= 2:
            shape = next(s[name] for s in shapes if name in s)
            tied.setdefault((name.split(".", 2)[2], shape), []).append(name)
    tied_names: dict[str, str] = {}
    for (key, shape), meant in tied.items():
        layers = [
            f"{layer}.{key}"
            for layer, by_rank in by_layer.items()
            if f"{layer}.{key}" not in names
            and key in by_rank[0]
            and by_rank[0][key].shape == shape
        ]
        if len(layers) < len(meant):
            raise folder.files.incomplete(
                f"array 'module/{meant[-1]}' of shape {list(shape)}: the file of its layer is "
                "missing"
            )
        if len(layers) == len(meant) == 1:
            tied_names[layers[0]] = meant[0]
    return tied_names
