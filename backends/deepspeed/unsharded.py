"""The optimizer without ZeRO: torch's own state, in the model file or, with experts, in files of
the expert-parallel ranks.

torch numbers the parameters. It names them only if the optimizer was built from names and
parameters (`Adam(model.named_parameters())`), and then by the rank's names for them.

Source: deepspeed/runtime/engine.py, `_save_moe_checkpoint`; torch/optim/optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unickpt.backends.deepspeed.partitions import EXPERT, local_experts
from unickpt.backends.deepspeed.patterns import items, steps_of
from unickpt.backends.deepspeed.sources import Parameter
from unickpt.backends.deepspeed.states import ModelFileState, StateFile, same_everywhere, slots_of
from unickpt.extend import quoted

_EXPERT_GROUP = re.compile(r"ep_size_(\d{1,6})")
_WRAPPED = "optimizer_state_dict"  # of the optimizers for 16 bits


@dataclass(frozen=True)
class TorchState:
    """The state of torch's optimizer in a file.

    Arguments:
        file: which.
        parameters: its state of each, by its number.
        numbers: of the parameters, in order.
        names: of these, in order; empty if it does not record them.
        expert_ranks: how many expert-parallel ranks there are at least, according to its groups.
    """

    file: StateFile
    parameters: Mapping[int, Parameter]
    numbers: Sequence[int]
    names: Sequence[str]
    expert_ranks: int | None


def torch_state(file: StateFile) -> TorchState | None:
    """The state of torch's optimizer in a file; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it holds neither tensors nor numbers.
    """
    optimizer = file.state.get("optimizer")
    if not isinstance(optimizer, dict):
        return None
    states = optimizer.get("state")
    parameters = {
        number: _parameter(file, number, state)
        for number, state in (states if isinstance(states, dict) else {}).items()
    }
    wrapped = optimizer.get(_WRAPPED)
    groups = (wrapped if isinstance(wrapped, dict) else optimizer).get("param_groups")
    groups = [group for group in groups or () if isinstance(group, dict)]
    for number, step in steps_of(groups):
        if number in parameters:
            scalars = {"step": step, **parameters[number].scalars}
            parameters[number] = replace(parameters[number], scalars=scalars)
    numbers, names = _every(groups, "params", int), _every(groups, "param_names", str)
    named = (str(group.get("name")) for group in groups if group.get("moe") is True)
    degrees = [int(match[1]) for match in map(_EXPERT_GROUP.fullmatch, named) if match]
    complete = len(names) == len(numbers) and parameters.keys() <= {*numbers}
    return TorchState(
        file, parameters, numbers, names if complete else (), max(degrees, default=None)
    )


def _every(groups: Sequence[Mapping[Any, Any]], key: str, kind: type) -> list[Any]:
    """The items of one class in the lists of all groups."""
    return [item for group in groups for item in items(group.get(key)) if type(item) is kind]


def _parameter(file: StateFile, number: Any, state: Any) -> Parameter:
    if type(number) is not int:
        raise file.damaged(f"the optimizer has the state {quoted(number)}, which is no number")
    fields = file.a_dict(state, "a state of the optimizer")
    tensors, scalars = slots_of(file, fields, f"the optimizer's parameter {number}")
    arrays = {slot: file.source(t, f"array '{slot}/{number}'") for slot, t in tensors.items()}
    shape = next((source.shape for source in arrays.values()), ())
    return Parameter(shape, arrays, scalars)


# --- which parameter has which state -------------------------------------------------------------


def by_name(
    states: Sequence[Sequence[TorchState]], weights: Sequence[Collection[str]]
) -> list[dict[str, Parameter]] | None:
    """Each file's state of parameters, by their names; None if the files do not record these, or
    record others than the module has.

    Arguments:
        states: by expert-parallel rank, by model-parallel rank.
        weights: by model-parallel rank, the names of weights.

    Raises:
        CheckpointCorrupt: files are missing, or one of them is damaged.
        UnsupportedFormat: a layer has a degree of expert parallelism of its own.
    """
    result = []
    for number, of_rank in enumerate(states):
        for state, weight_names in zip(of_rank, weights, strict=True):
            if not state.names:
                return None
            totals, local_counts = local_experts(weight_names), local_experts(state.names)
            named: dict[str, Parameter] = {}
            for n, local in zip(state.numbers, state.names, strict=True):
                name = _global(state, local, local_counts, totals, (number, len(states)))
                if name not in weight_names:
                    return None
                if n in state.parameters:
                    if name in named:
                        raise state.file.damaged(f"{quoted(local)} is the name of two parameters")
                    named[name] = state.parameters[n]
            result.append(named)
    return result


def _global(
    state: TorchState,
    name: str,
    local_counts: Mapping[str, int],
    totals: Mapping[str, int],
    rank: tuple[int, int],
) -> str:
    """The name of a parameter with the number of its expert among all ranks'.

    Arguments:
        state: that has it.
        name: as the rank has it.
        local_counts, totals: by layer, how many experts the rank has, and all ranks together.
        rank: the expert-parallel rank, and of how many.
    """
    match = EXPERT.fullmatch(name)
    if match is None or match[1] not in totals:
        return name
    number, ranks = rank
    count, total = local_counts[match[1]], totals[match[1]]
    if count == total:
        return name  # all ranks have all of them
    if count * ranks < total:
        raise state.file.damaged(
            f"it has {count} of {total} experts of {quoted(match[1])}, and there are files of "
            f"{ranks} expert-parallel ranks; was the folder copied as a whole? (Or a part of them "
            "is not trained, which is not read.)"
        )
    if count * ranks != total:
        raise state.file.unsupported(
            f"it has {count} of {total} experts of {quoted(match[1])}, and there are {ranks} "
            "expert-parallel ranks: layers with degrees of their own are not read"
        )
    return f"{match[1]}{number * count + int(match[2])}{match[3]}"


# --- whether all files are there ------------------------------------------------------------------


def check(
    models: Sequence[ModelFileState],
    states: Sequence[Sequence[TorchState]],
    weights: Sequence[Collection[str]],
) -> None:
    """Checks that no expert-parallel rank's file is missing.

    Arguments:
        models: by model-parallel rank.
        states: by expert-parallel rank, by model-parallel rank.
        weights: by model-parallel rank, the names of weights.

    Raises:
        CheckpointCorrupt: one is missing, or they are not of one save.
        UnsupportedFormat: no file records how many there have to be.
    """
    every = [state for of_rank in states for state in of_rank]
    first = every[0].file
    if len(states[0]) != len(models):
        raise first.damaged(
            f"there are such files of {len(states[0])} model-parallel ranks, and model files of "
            f"{len(models)}; was the folder copied as a whole?"
        )
    same_everywhere([(s.file, len(s.numbers)) for s in every], "the number of parameters")
    rank_counts = {state.expert_ranks for state in every if state.expert_ranks is not None}
    if rank_counts and rank_counts != {len(states)}:
        raise first.damaged(
            f"it is of a run with {max(rank_counts)} expert-parallel ranks, and there are files of "
            f"{len(states)}; was the folder copied as a whole?"
        )
    if not rank_counts and not all(state.names for state in every):
        for model, state, names in zip(models, states[0], weights, strict=True):
            _check_count(model, state, names, len(states))


def _check_count(
    model: ModelFileState, state: TorchState, names: Collection[str], ranks: int
) -> None:
    """Checks that a rank trains as many parameters as it has, if there are so many ranks."""
    experts = sum(EXPERT.fullmatch(name) is not None for name in names)
    dense = sum(EXPERT.fullmatch(name) is None and name not in model.buffers for name in names)
    if (len(state.numbers) - dense) * ranks != experts:
        raise state.file.unsupported(
            f"it has the states of {len(state.numbers)} parameters; {dense} weights, and a "
            f"part for each of {ranks} expert-parallel ranks of {experts} of experts, are others. "
            "Either such a file is missing, or some are not trained, which no file says: let the "
            "optimizer have DeepSpeed's groups for experts (ep_size_<n>), or torch's names"
        )
