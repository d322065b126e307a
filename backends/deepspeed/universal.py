"""The parameters of universal checkpoints: a folder with a file for each slot of each.

Sources: deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends.deepspeed.folder import DeepSpeedFolder
from unickpt.backends.deepspeed.sources import Parameter, Shapes, SlotValue, is_number
from unickpt.backends.deepspeed.states import StateFile, read_all
from unickpt.extend import TensorSource

_EXPERTS = "deepspeed_experts."


def parameters(
    folder: DeepSpeedFolder, shapes: Sequence[Shapes], copied: Collection[str]
) -> dict[str, Parameter]:
    """The parameters.

    Arguments:
        folder: the checkpoint.
        shapes: of the model files, by group of parameters.
        copied: the names of the module's state. Tensors that DeepSpeed only copied from it into the
            folder, such as buffers, are left out.

    Raises:
        CheckpointCorrupt: a file is missing, or contradicts others.
        UnsupportedFormat: no file records the shape of a parameter.
    """
    all_shapes = {name: shape for group in shapes for name, shape in group.items()}
    _check_complete(folder, all_shapes)
    trained = {
        name: slots
        for name, slots in folder.states.items()
        if name in all_shapes or name not in copied or len(slots) > 1
    }
    order = [*(n for n in all_shapes if n in trained), *(n for n in trained if n not in all_shapes)]
    files = [(name, slot) for name in order for slot in trained[name]]
    state_files = read_all(
        folder.files, [trained[name][slot] for name, slot in files], lambda file: file
    )
    made: dict[str, dict[str, SlotValue]] = {}
    for (name, slot), file in zip(files, state_files, strict=True):
        made.setdefault(name, {})[slot] = _value(file, name, slot, all_shapes.get(name))
    steps = _steps_of_stage3(folder, shapes)
    return {name: _parameter(folder, name, slots, steps) for name, slots in made.items()}


def _check_complete(folder: DeepSpeedFolder, all_shapes: Mapping[str, Any]) -> None:
    """Checks that no file is missing: all that are trained have the same slots."""
    for name in all_shapes:
        if name not in folder.states and _EXPERTS not in name:
            raise folder.files.incomplete(f"array 'fp32/{name}': there is no folder zero/{name}")
    # Without model files, only those with several files can be distinguished from copies.
    trained = {
        n: set(s)
        for n, s in folder.states.items()
        if n in all_shapes or (not all_shapes and len(s) > 1)
    }
    all_slots = {slot for slots in trained.values() for slot in slots}
    for name, slots in folder.states.items():
        expected = all_slots if name in trained else {"fp32"}
        missing = sorted(expected - set(slots))
        if missing:
            raise folder.files.incomplete(
                f"array '{missing[0]}/{name}': there is no file zero/{name}/{missing[0]}.pt"
            )


def _value(file: StateFile, name: str, slot: str, shape: tuple[int, ...] | None) -> SlotValue:
    what = f"array '{slot}/{name}'"
    value = file.value
    if isinstance(value, dict):
        return file.source(value.get("param"), what)
    if is_number(value):
        number: int | float = value
        return number
    source = file.source(value, what)
    if len(source.shape) != 1 or slot == "step" or source.shape == shape:
        return source
    if shape is None:  # plain ZeRO 3 does not store it
        raise file.files.unsupported(
            f"{what} is stored flat, and no model file (*_model_states.pt) has its shape; copy "
            "the model files of the source next to it"
        )
    if source.count != math.prod(shape) or not source.is_row_major:
        raise file.damaged(
            f"{what} has {source.count} elements, and its shape in the model files is "
            f"{list(shape)}; are all files of one save?"
        )
    return source.reshaped(shape)


def _parameter(
    folder: DeepSpeedFolder, name: str, slots: Mapping[str, SlotValue], steps: Mapping[str, Any]
) -> Parameter:
    weights = slots["fp32"]
    if not isinstance(weights, TensorSource):
        raise folder.files.damaged(f"array 'fp32/{name}' is no tensor")
    arrays, scalars = dict[str, TensorSource](), dict[str, SlotValue]()
    for slot, value in slots.items():
        if isinstance(value, TensorSource) and value.shape == weights.shape and slot != "step":
            arrays[slot] = value
        elif not isinstance(value, TensorSource) or value.shape == ():
            scalars[slot] = value
        else:
            raise folder.files.damaged(
                f"array '{slot}/{name}' has the shape {list(value.shape)}, and 'fp32/{name}' "
                f"{list(weights.shape)}; are all files of one save?"
            )
    if name in steps:
        scalars.setdefault("step", steps[name])
    return Parameter(weights.shape, arrays, scalars)


def _steps_of_stage3(folder: DeepSpeedFolder, shapes: Sequence[Shapes]) -> dict[str, SlotValue]:
    """The steps by parameter, which a converted ZeRO 3 has in the common file, by group."""
    if folder.common is None:
        return {}
    file = StateFile(folder.files, folder.common)
    inner = file.state.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    steps: dict[str, SlotValue] = {}
    for number, group in enumerate(shapes):
        state = states.get(number) if isinstance(states, dict) else None
        step: Any = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, Tensor) and step.shape == ():
            steps.update(dict.fromkeys(group, file.source(step, f"the step of group {number}")))
        elif is_number(step):
            steps.update(dict.fromkeys(group, step))
    return steps
