"""This process's part of a DeepSpeed engine's parameters: weights, masters and optimizer slots.

Nothing is gathered: with ZeRO a process has contiguous ranges of parameters, in the flat tensors
that the base optimizer updates. Only this module knows where DeepSpeed keeps them.

Sources: deepspeed/runtime/zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py,
fp16/fused_optimizer.py, fp16/unfused_optimizer.py (0.19.8).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unickpt.errors import UnsupportedLeaf

_STEP = "step"
Parameter = Any
"""A parameter of torch, with DeepSpeed's attributes."""
PIPE_REPLICATED = "ds_pipe_replicated"
"""An attribute of parameters that an earlier stage of a pipeline has, too."""


@dataclass(frozen=True)
class ElementRange:
    """Elements of a parameter, in row-major order, that a tensor of this process has.

    Arguments:
        start: the index of the first one in the parameter, or in a tensor-parallel rank's part of
            it.
        at: the index of the first one in the tensor.
        count: how many.
    """

    start: int
    at: int
    count: int


@dataclass(frozen=True, eq=False)
class Updated:
    """A tensor that the base optimizer updates, and the parameters in it.

    Arguments:
        masters: the tensor: of whole parameters or parts of them, one-dimensional if of several.
        state: the optimizer's, by slot; empty before the first step. New slots can be added.
        group: the optimizer's group that it belongs to.
        ranges: by parameter; parameters without elements on this process have an empty one.
    """

    masters: torch.Tensor
    state: dict[str, Any]
    group: int
    ranges: Mapping[Parameter, ElementRange]

    def slots(self) -> dict[str, torch.Tensor]:
        """The optimizer's slots that have an element for each of the masters'.

        Raises:
            UnsupportedLeaf: a slot has another size, so that its elements cannot be assigned to
                parameters.
        """
        slots = {}
        for slot, value in self.state.items():
            if slot == _STEP or not isinstance(value, torch.Tensor) or not value.ndim:
                continue
            if value.numel() != self.masters.numel():
                raise UnsupportedLeaf(
                    f"the optimizer's slot {slot!r} has {value.numel()} elements for "
                    f"{self.masters.numel()} of parameters: DeepSpeed shares out only slots with "
                    "an element for each"
                )
            slots[slot] = value
        return slots

    def counts(self) -> dict[str, Any]:
        """The optimizer's slots that are one number for all of them, such as `step`."""
        slots = self.slots()
        return {slot: value for slot, value in self.state.items() if slot not in slots}


@dataclass(frozen=True)
class EngineParts:
    """This process's part of an engine's training state.

    Arguments:
        engine: the engine.
        stage: of ZeRO, in effect: BF16_Optimizer is 1.
        base: the optimizer whose `step` changes the masters; None without one.
        updated: the tensors that it updates.
        whole: whether each of them has whole parameters, equal on all data-parallel ranks.
    """

    engine: Any
    stage: int
    base: Any
    updated: Sequence[Updated]
    whole: bool

    @classmethod
    def from_engine(cls, engine: Any) -> EngineParts:
        """Finds them.

        Raises:
            UnsupportedLeaf: the engine holds its state in a way that is not supported.
        """
        _check(engine)
        stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
        if optimizer is None or not hasattr(optimizer, "param_groups"):
            return cls(engine, stage, None, (), True)
        base = getattr(optimizer, "optimizer", optimizer)
        whole = False
        if stage == 3:
            parts = _stage3(optimizer)
        elif hasattr(optimizer, "single_partition_of_fp32_groups"):
            parts = _linked(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups)
        elif hasattr(optimizer, "fp32_groups_flat_partition"):
            stage, flats = 1, optimizer.fp32_groups_flat_partition
            parts = _linked(flats, optimizer.bf16_groups)
        elif hasattr(optimizer, "fp32_groups_flat"):
            stage, whole = 0, True
            parts = _flat(optimizer.fp32_groups_flat, optimizer.fp16_groups)
        elif hasattr(optimizer, "fp32_groups"):
            stage, whole = 0, True
            parts = _per_parameter(optimizer.fp32_groups, optimizer.fp16_groups)
        elif base is optimizer and isinstance(base, torch.optim.Optimizer):
            stage, whole, params = 0, True, [group["params"] for group in base.param_groups]
            parts = _per_parameter(params, params)
        else:
            raise UnsupportedLeaf(
                f"DeepSpeed's {type(optimizer).__name__} is not known, and so not where it "
                "keeps the state of parameters"
            )
        # Reading `state[masters]` may create an entry.
        updated = [Updated(m, base.state.get(m, {}), group, ranges) for m, group, ranges in parts]
        return cls(engine, stage, base, updated, whole)

    def owners(self) -> set[Hashable]:
        """The tensors that only a step of the optimizer changes: see `unickpt.extend.Fence`."""
        tensors = [updated.masters for updated in self.updated]
        for updated in self.updated:
            tensors += [v for v in updated.state.values() if isinstance(v, torch.Tensor)]
            tensors += [weights_of(p) for p in updated.ranges]
        return {tensor.untyped_storage()._cdata for tensor in tensors}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those whose steps change the engine's state."""
        every = (self.base, getattr(self.engine.optimizer, "backup_optimizer", None))
        return [optimizer for optimizer in every if isinstance(optimizer, torch.optim.Optimizer)]

    @torch.no_grad()
    def round(self) -> None:
        """Makes the weights of the masters, as a step does; all ranks call this."""
        if hasattr(self.engine.optimizer, "update_lp_params"):
            self.engine.optimizer.update_lp_params()
            return
        for updated in self.updated:
            for param, part in updated.ranges.items():
                masters = updated.masters.detach().reshape(-1)[part.at : part.at + part.count]
                if hasattr(param, "ds_tensor"):
                    param.ds_tensor[: part.count].copy_(masters)
                elif updated.masters is not param:
                    param.copy_(masters.view(param.shape))

    def add_slots(self, new: Mapping[Updated, Mapping[str, torch.Tensor]]) -> None:
        """Gives new slots to an optimizer that has not made a step yet."""
        for updated, slots in new.items():
            self.base.state[updated.masters].update(slots)
        if hasattr(self.engine.optimizer, "_hp_optimizer_states_linked"):
            # It links its records of parameters to their slots after the next step.
            self.engine.optimizer._hp_optimizer_states_linked = False


def weights_of(param: Parameter) -> torch.Tensor:
    """The memory with the weights of a parameter that this process has: with ZeRO 3, its part."""
    weights: torch.Tensor = param.ds_tensor if hasattr(param, "ds_tensor") else param
    return weights


def part_of(param: Parameter) -> ElementRange:
    """The elements of a parameter that ZeRO 3 gives this process."""
    size, count = int(param.partition_numel()), int(param.ds_numel)
    start = min(count, dist.get_rank(param.ds_process_group) * size)
    return ElementRange(start, 0, max(0, min(size, count - start)))


def shape_of(param: Parameter) -> tuple[int, ...]:
    """The shape of a parameter, or of a tensor-parallel rank's part of it."""
    return tuple(getattr(param, "ds_shape", param.shape))


# --- where each optimizer of DeepSpeed has them --------------------------------------------------


_Part = tuple[torch.Tensor, int, dict[Parameter, ElementRange]]
"""Masters, the number of their group, and which elements of parameters they are."""


def _stage3(optimizer: Any) -> Iterator[_Part]:
    """ZeRO 3: of each sub-group a rank has a part of every parameter, one after the other."""
    for number, params in enumerate(optimizer.fp16_groups):
        masters, ranges, offset = optimizer.fp32_partitioned_groups_flat[number], {}, 0
        for param in params:
            part = part_of(param)
            ranges[param] = ElementRange(part.start, offset, part.count)
            offset += int(param.partition_numel())
        yield masters, optimizer.sub_group_to_group_id[number], ranges


def _linked(flats: Sequence[Any], groups: Sequence[Any]) -> Iterator[_Part]:
    """ZeRO 1 and 2, BF16_Optimizer: a rank has a range of all parameters of a group."""
    for number, (masters, params) in enumerate(zip(flats, groups, strict=True)):
        ranges = {}
        for param in params:
            link = param._hp_mapping
            if link is None:
                ranges[param] = ElementRange(0, 0, 0)
                continue
            low, high = link.lp_fragment_address, link.hp_fragment_address
            ranges[param] = ElementRange(int(low.start), int(high.start), int(low.numel))
        yield masters, number, ranges


def _flat(flats: Sequence[Any], groups: Sequence[Any]) -> Iterator[_Part]:
    """FP16_Optimizer: all parameters of a group, one after the other."""
    for number, (masters, params) in enumerate(zip(flats, groups, strict=True)):
        ranges, offset = {}, 0
        for param in params:
            ranges[param] = ElementRange(0, offset, param.numel())
            offset += param.numel()
        yield masters, number, ranges


def _per_parameter(masters_of: Sequence[Any], groups: Sequence[Any]) -> Iterator[_Part]:
    """Optimizers that keep a tensor for each parameter."""
    for number, (masters, params) in enumerate(zip(masters_of, groups, strict=True)):
        for master, param in zip(masters, params, strict=True):
            if param.requires_grad:
                yield master, number, {param: ElementRange(0, 0, param.numel())}


def _check(engine: Any) -> None:
    """Refuses unsupported features by name."""
    optimizer = engine.optimizer
    refused = {
        "experts of deepspeed.moe (has_moe_layers)": engine.has_moe_layers,
        "states on NVMe (offload_optimizer or offload_param with device 'nvme')": (
            getattr(optimizer, "swap_optimizer", False)
            or getattr(optimizer, "params_in_nvme_and_cpu", False)
        ),
        "a share of the optimizer's states on the CPU (offload_optimizer with a ratio below 1)": (
            getattr(optimizer, "offload_optimizer", False)
            and any(on != "cpu" for on in getattr(optimizer, "subgroup_to_device", {}).values())
        ),
        "ZenFlow": getattr(optimizer, "zenflow", False),
        # DeepSpeed 0.19.8 has it no more, and refuses the setting.
        "MiCS (mics_shard_size), with which groups of ranks have the same parts": (
            engine.config.get("zero_optimization", {}).get("mics_shard_size", -1) > 0
        ),
        "states that engine.offload_states() took away; call engine.reload_states() first": bool(
            getattr(optimizer, "offloaded_states", None)
        ),
    }
    wrong = [what for what, is_so in refused.items() if is_so]
    if wrong:
        raise UnsupportedLeaf(
            f"this engine cannot be saved into unickpt, nor loaded: {'; '.join(wrong)}. "
            "Its own save_checkpoint can, and unickpt reads what that writes, as far as "
            "docs/formats/deepspeed.md says"
        )
