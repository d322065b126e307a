"""ZeRO's partitions: which parts of the ranks' flat tensors make up a parameter.

Sources: deepspeed/checkpoint/ds_to_universal.py and utils/zero_to_fp32.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from unickpt.backends._files.elements import ElementRun
from unickpt.backends.deepspeed.sources import EvenParts, Parameter, Shapes, joined
from unickpt.backends.deepspeed.states import (
    ModelFileState,
    OptimizerState,
    ParameterGroup,
    same_everywhere,
)
from unickpt.extend import TensorSource, quoted

EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d{1,9})(\..*)")
"""The name of a parameter of an expert: the parts before and after the expert's number."""


def parameters(
    model: ModelFileState, optimizers: Sequence[OptimizerState], data_before_experts: bool
) -> dict[str, Parameter]:
    """The parameters that one model-parallel rank trains.

    Arguments:
        model: its model file; at stage 3 that of data-parallel rank 0.
        optimizers: its optimizer files, by data-parallel rank.
        data_before_experts: whether neighbouring ranks hold the same experts.

    Raises:
        CheckpointCorrupt: the files contradict each other.
        UnsupportedFormat: the ranks share the parameters in a way that is not read.
    """
    first = optimizers[0]
    same_everywhere([(o.file, o.stage) for o in optimizers], "the stage of ZeRO")
    same_everywhere(
        [(o.file, [group.partitions for group in o.groups]) for o in optimizers], "partition_count"
    )
    if len(model.shapes) != len(first.groups):
        raise first.file.damaged(
            f"it has {len(first.groups)} groups of parameters, and {model.file.name} has "
            f"{len(model.shapes)}; are all files of one save?"
        )
    result: dict[str, Parameter] = {}
    for number, shapes in enumerate(model.shapes):
        groups = [o.groups[number] for o in optimizers]
        if first.stage == 3:
            made = _evenly(model, optimizers, number, shapes)
        else:
            made = _by_fragments(model, optimizers, groups, shapes, data_before_experts)
        for name, parameter in made.items():
            if name in result:
                raise model.file.damaged(f"{quoted(name)} is in two groups of param_shapes")
            result[name] = parameter
    return result


# --- stage 3 ------------------------------------------------------------------------------------


def _evenly(
    model: ModelFileState, optimizers: Sequence[OptimizerState], number: int, shapes: Shapes
) -> dict[str, Parameter]:
    """The parameters of a sub-group; each rank holds the same number of elements."""
    ranks = len(optimizers)
    groups = [o.groups[number] for o in optimizers]
    if groups[0].partitions != ranks:
        raise model.file.files.unsupported(
            f"{optimizers[0].file.name} says that {groups[0].partitions} ranks share the "
            f"parameters, but there are files of {ranks}: a rank's files are missing, or a subset "
            "of the ranks holds everything (MiCS), which unickpt does not read"
        )
    parts = {name: -(-math.prod(shape) // ranks) for name, shape in shapes.items()}
    expected = sum(parts.values())
    for optimizer, group in zip(optimizers, groups, strict=True):
        for slot, flat in group.slots.items():
            if flat.count != expected:
                name = next(iter(shapes), "")
                raise optimizer.file.damaged(
                    f"array '{slot}/{name}': sub-group {number} has {flat.count} elements of "
                    f"{slot}, and the shapes in {model.file.name} need {expected}; are all files "
                    "of one save?"
                )
    slots = _common_slots(optimizers, groups)
    flats = {slot: [group.slots[slot] for group in groups] for slot in slots}
    result, offset = {}, 0
    for name, shape in shapes.items():
        sources = {slot: _even(flats[slot], shape, offset, parts[name]) for slot in slots}
        result[name] = Parameter(shape, sources, groups[0].scalars)
        offset += parts[name]
    return result


def _even(
    flats: Sequence[TensorSource], shape: Sequence[int], offset: int, part: int
) -> TensorSource:
    return joined(flats[0].dtype, shape, EvenParts(flats, offset, part, math.prod(shape)))


def frozen(models: Sequence[ModelFileState]) -> dict[str, TensorSource]:
    """Untrained parameters at stage 3; each rank holds the same number of elements.

    Arguments:
        models: the model files of one model-parallel rank, by data-parallel rank.
    """
    sources = {}
    for name, shape in models[0].frozen_shapes.items():
        count = math.prod(shape)
        part = -(-count // len(models))
        for rank, model in enumerate(models):
            flat = model.frozen.get(name)
            needed = max(0, min(part, count - rank * part))
            if flat is None or flat.count < needed:
                raise model.file.damaged(
                    f"array 'module/{name}': it has {flat.count if flat else 'none'} of the "
                    f"{needed} elements that rank {rank} of {len(models)} should have"
                )
        sources[name] = _even([model.frozen[name] for model in models], shape, 0, part)
    return sources


# --- stages 1 and 2 -----------------------------------------------------------------------------


def _by_fragments(
    model: ModelFileState,
    optimizers: Sequence[OptimizerState],
    groups: Sequence[ParameterGroup],
    shapes: Shapes,
    data_before_experts: bool,
) -> dict[str, Parameter]:
    """The parameters of a group, whose fragments follow each other from rank to rank."""
    for optimizer, group in zip(optimizers, groups, strict=True):
        strange = [name for name in group.fragments if name not in shapes]
        if strange:
            raise optimizer.file.damaged(
                f"it has {quoted(strange[0])}, which is not in param_shapes of {model.file.name}; "
                "are all files of one save?"
            )
    result = {}
    numbers = local_experts(shapes)
    for ranks, experts in _members(model, len(groups), groups[0].partitions, data_before_experts):
        states, held = [optimizers[r] for r in ranks], [groups[r] for r in ranks]
        slots, first = _common_slots(states, held), held[0]
        by_name = _fragments_by_name(held)
        for name, shape in shapes.items():
            full = name if experts is None else _global(model, name, (len(ranks), experts), numbers)
            fragments = by_name.get(name, [])
            count = sum(n for *_, n in fragments)
            if count != math.prod(shape):
                raise model.file.files.damaged(
                    f"array 'fp32/{full}' of shape {list(shape)}: "
                    f"{_names(states)} hold {count} of its {math.prod(shape)} "
                    "elements; are all files of one save, and is none missing?"
                )
            sources = {slot: _of_runs(first, slot, shape, fragments) for slot in slots}
            result[full] = Parameter(shape, sources, first.scalars)
    return result


_Held = list[tuple[ParameterGroup, int, int]]


def _fragments_by_name(groups: Iterable[ParameterGroup]) -> dict[str, _Held]:
    """By parameter, the group of each rank that holds a fragment, where it begins, and its size."""
    fragments: dict[str, _Held] = {}
    for group in groups:
        for name, (start, count) in group.fragments.items():
            if count:
                fragments.setdefault(name, []).append((group, start, count))
    return fragments


def _of_runs(
    group: ParameterGroup, slot: str, shape: Sequence[int], fragments: _Held
) -> TensorSource:
    parts = [(g.slots[slot], start, n) for g, start, n in fragments]
    runs = [ElementRun(flat.elements, flat.first + start, n) for flat, start, n in parts]
    return joined(group.slots[slot].dtype, shape, runs)


def _common_slots(
    optimizers: Sequence[OptimizerState], groups: Sequence[ParameterGroup]
) -> list[str]:
    """The slots that all ranks have, with the same dtypes."""
    dtypes = [{slot: flat.dtype for slot, flat in group.slots.items()} for group in groups]
    files = [optimizer.file for optimizer in optimizers]
    same_everywhere(zip(files, dtypes, strict=True), "the optimizer's state of a parameter")
    return list(groups[0].slots)


def _names(optimizers: Sequence[OptimizerState]) -> str:
    names = [o.file.name for o in optimizers]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _members(
    model: ModelFileState, ranks: int, partitions: int, data_before_experts: bool
) -> list[tuple[Sequence[int], int | None]]:
    """The sets of ranks that share a group: all, and None; or those with the same experts, and
    which expert-parallel rank they are."""
    if partitions == ranks:
        return [(range(ranks), None)]
    if partitions > ranks or ranks % partitions:
        raise model.file.files.incomplete(
            f"the optimizer files say that {partitions} ranks share a group of parameters, and "
            f"there are files of {ranks}"
        )
    degree = ranks // partitions
    expert_by_rank = [r // partitions if data_before_experts else r % degree for r in range(ranks)]
    return [([r for r in range(ranks) if expert_by_rank[r] == e], e) for e in range(degree)]


def local_experts(names: Iterable[str]) -> dict[str, int]:
    """By layer, how many experts there are among some names."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        match = EXPERT.fullmatch(name)
        if match:
            numbers.setdefault(match[1], set()).add(int(match[2]))
    return {layer: len(experts) for layer, experts in numbers.items()}


def _global(
    model: ModelFileState, name: str, members: tuple[int, int], numbers: Mapping[str, int]
) -> str:
    """The name of an expert's parameter with the number of the expert among all ranks'.

    Arguments:
        model: that has it.
        name: as the rank has it.
        members: how many ranks share it, and which expert-parallel rank they are.
        numbers: by layer, how many experts a rank has.
    """
    match = EXPERT.fullmatch(name)
    if match is None or int(match[2]) >= numbers[match[1]]:
        raise model.file.unsupported(
            f"{members[0]} ranks share {quoted(name)} like a parameter of an expert, but its name "
            "is not an expert's (deepspeed_experts.<number>)"
        )
    return f"{match[1]}{members[1] * numbers[match[1]] + int(match[2])}{match[3]}"
