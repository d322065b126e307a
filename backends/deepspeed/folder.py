"""The files of a DeepSpeed checkpoint: which folder, and which rank wrote which file.

Source: deepspeed/runtime/engine.py, the functions `_get_*_ckpt_name`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.extend import Files, quoted

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
_SCRIPT = "zero_to_fp32.py"  # DeepSpeed puts it next to `latest`; it is never run

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt"
)
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
_STATE = re.compile(r"zero/(.+)/([^/]+)\.pt")
_OF_ALL_STAGES = {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"}
_UNIVERSAL_COMMON = "zero/optimizer_state.pt"


@dataclass(frozen=True)
class DeepSpeedFolder:
    """The files of one checkpoint. Model-parallel rank `pp * tp_degree + tp` is "mp rank".

    Arguments:
        files: of the tag's folder.
        stage3: whether each data-parallel rank wrote a model file.
        models: by mp rank, the model files by data-parallel rank; one each below stage 3.
        optimizers: by mp rank, the optimizer files by data-parallel rank; empty without ZeRO.
        expert_optimizers: of a mixture of experts without ZeRO, by mp rank, the optimizer files by
            expert-parallel rank.
        layers: of a pipeline, by the number of the layer, by tensor-parallel rank.
        experts: the files of the experts, by layer, number and mp rank.
        states: of a universal checkpoint, by parameter, its files by slot.
        common: the file of a universal checkpoint with the settings that its parameters share.
    """

    files: Files
    stage3: bool
    models: Sequence[Sequence[str]]
    optimizers: Sequence[Sequence[str]]
    expert_optimizers: Sequence[Sequence[str]]
    layers: Mapping[int, Sequence[str]]
    experts: Mapping[tuple[int, int, int], str]
    states: Mapping[str, Mapping[str, str]]
    common: str | None

    @property
    def universal(self) -> bool:
        """Whether it is a universal checkpoint."""
        return bool(self.states)


def find(files: Files) -> DeepSpeedFolder | None:
    """The checkpoint at a location, which is the folder of a tag or the one above; None if none is
    there.

    Raises:
        CheckpointCorrupt: a file is missing, or files of several saves are mixed.
        UnsupportedFormat: it has files that are not read.
        Failed: the storage failed.
    """
    names = files.here
    folder = _in_tag(files)
    if folder is not None:
        return folder
    for pointer in (LATEST, LATEST_UNIVERSAL):
        if pointer not in names:
            continue
        name = files.text(pointer)
        is_name = name and "/" not in name and name not in (".", "..") and "\0" not in name
        folder = _in_tag(Files(files.location.child(name))) if is_name else None
        # Another checkpoint than the one that is named would be a wrong one.
        if folder is None and not {_SCRIPT, LATEST_UNIVERSAL}.isdisjoint(names):
            raise files.damaged(
                f"{pointer} names the checkpoint {quoted(name)}, but that is no folder with files "
                "of DeepSpeed; was it copied as a whole? Give the path of the one that you want"
            )
        if folder is not None:
            return folder
    return None


def _in_tag(files: Files) -> DeepSpeedFolder | None:
    names = files.here
    models, optimizers, of_experts, experts = (
        {name: match for name in names if (match := pattern.fullmatch(name))}
        for pattern in (_MODEL, _OPTIMIZER, _EXPERT_OPTIMIZER, _EXPERT)
    )
    common = _UNIVERSAL_COMMON if not optimizers and files.exists(_UNIVERSAL_COMMON) else None
    states = states_in(files) if common else {}
    if states and _OF_ALL_STAGES.issubset(models):  # unickpt's writer makes both, of the same
        models = {name: match for name, match in models.items() if match[1] is None}
    if not (models or optimizers or of_experts or states):
        return None
    _refuse_mixed(files, models, {**optimizers, **of_experts}, bool(states))
    return DeepSpeedFolder(
        files,
        any(match[1] is not None for match in models.values()),
        _grid(files, models),
        _grid(files, optimizers),
        _grid(files, of_experts, "expert-parallel"),
        _layers(files),
        {(int(m[1]), int(m[2]), int(m[3])): name for name, m in experts.items()},
        states,
        common,
    )


def _refuse_mixed(
    files: Files,
    models: Mapping[str, re.Match[str]],
    optimizers: Mapping[str, Any],
    universal: bool,
) -> None:
    """Refuses files of several kinds, or of one that is not read."""
    old_experts = [
        name for name in files.here if name.startswith("expert_") and name.endswith(".pt")
    ]
    if old_experts:
        raise files.unsupported(
            f"{old_experts[0]} is of a kind that unickpt does not read: experts of "
            "DeepSpeed before 0.5"
        )
    if not models and not universal:
        raise files.damaged(
            f"there are optimizer files such as {next(iter(optimizers))}, but no model files "
            "(*_model_states.pt), which have the shapes; was it copied as a whole?"
        )
    of_stage3 = {match[1] is not None for match in models.values()}
    if len(of_stage3) > 1:
        raise files.damaged(
            "model files of ZeRO 3 (zero_pp_rank_*) and of other stages (mp_rank_*) are mixed; are "
            "the files of one save?"
        )


def _grid(
    files: Files, matches: Mapping[str, re.Match[str]], kind: str = "data-parallel"
) -> list[list[str]]:
    """Files by mp rank and by the rank of the other kind, without gaps."""
    by_rank: dict[tuple[int, int], str] = {}
    for name, match in matches.items():
        rank = int(match[2]), int(match[1] or 0)
        if rank in by_rank:
            raise files.damaged(
                f"{by_rank[rank]} and {name} are of the same rank; are the files of one save?"
            )
        by_rank[rank] = name
    if not by_rank:
        return []
    counts = [1 + max(rank[axis] for rank in by_rank) for axis in (0, 1)]
    if len(by_rank) != counts[0] * counts[1]:
        every = itertools.product(*map(range, counts))
        mp, other = next(rank for rank in every if rank not in by_rank)
        raise files.incomplete(
            f"the file of {kind} rank {other} and model-parallel rank {mp} is missing, one of "
            f"{counts[1]} x {counts[0]} files such as {next(iter(matches))}"
        )
    return [[by_rank[mp, other] for other in range(counts[1])] for mp in range(counts[0])]


def _layers(files: Files) -> dict[int, list[str]]:
    layers: dict[int, dict[int, str]] = {}
    for name in files.here:
        match = _LAYER.fullmatch(name)
        if match:
            layers.setdefault(int(match[1]), {})[int(match[2] or 0)] = name
    count = max((1 + max(by_rank) for by_rank in layers.values()), default=0)
    for layer, by_rank in layers.items():
        for rank in range(count):
            if rank not in by_rank:
                raise files.incomplete(
                    f"layer {layer} has {next(iter(by_rank.values()))}, but no file of "
                    f"tensor-parallel rank {rank}, of {count}"
                )
    return {layer: [layers[layer][rank] for rank in range(count)] for layer in sorted(layers)}


def states_in(files: Files) -> dict[str, dict[str, str]]:
    """The files of a universal checkpoint with the states of parameters: by parameter, by slot."""
    states: dict[str, dict[str, str]] = {}
    for name in files.names:
        match = _STATE.fullmatch(name)
        if match:
            states.setdefault(match[1], {})[match[2]] = name
    return states
