"""An engine's arrays as a tree, under the names that unickpt gives DeepSpeed's own checkpoints.

module/<p>              weights and buffers, in their own dtype
fp32/<p>                the masters; where they are the weights, another name of the same array
exp_avg/<p>, step/<p>   the optimizer's slots, as it calls them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unickpt.errors import UnsupportedLeaf
from unickpt.extend import Box, first_few
from unickpt.integrations.deepspeed.held import (
    PIPE_REPLICATED,
    ElementRange,
    EngineParts,
    Parameter,
    Updated,
    part_of,
    weights_of,
)
from unickpt.integrations.deepspeed.placing import ParameterPlace, Placing, of_range
from unickpt.integrations.torch_types import dtype_name
from unickpt.types import LocalFragments

MODULE, FP32 = "module", "fp32"
Leaves = dict[str, dict[str, Any]]
"""Arrays by slot, by the name of the parameter."""


@dataclass(frozen=True)
class ModuleState:
    """The tensors of a module.

    Arguments:
        params: by name; of tied ones the first.
        ties: further names of parameters, and the first.
        buffers: by name.
    """

    params: Mapping[str, Parameter]
    ties: Mapping[str, str]
    buffers: Mapping[str, torch.Tensor]

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> ModuleState:
        """Finds them, as `state_dict` names them."""
        params = dict(module.named_parameters())
        names = {id(param): name for name, param in params.items()}
        every = module.named_parameters(remove_duplicate=False)
        ties = {name: names[id(param)] for name, param in every if name not in params}
        persistent = set(_persistent(module))
        buffers = {n: b for n, b in module.named_buffers() if n in persistent}
        return cls(params, ties, buffers)


def _persistent(module: torch.nn.Module) -> Iterable[str]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name in child._buffers:
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name


class EngineArrays:
    """Makes leaves of this process's part of an engine.

    Arguments:
        parts: of this process.
        placing: where they are in arrays.
    """

    def __init__(self, parts: EngineParts, placing: Placing) -> None:
        self.parts, self.placing = parts, placing
        self.module = ModuleState.from_module(parts.engine.module)
        placing.learn(self.module.params)
        self.places = {name: placing.place(name, p) for name, p in self.module.params.items()}
        self._names = {param: name for name, param in self.module.params.items()}
        self.plain = parts.whole and not placing.grid.is_model_parallel
        """Whether all ranks have the masters whole, as torch's own optimizers have."""
        self.updated = {param: updated for updated in parts.updated for param in updated.ranges}
        """By parameter, the tensor that has its masters."""
        param_names = getattr(parts.engine, "param_names", {})
        lost_names = [param_names.get(p, "?") for p in self.updated if p not in self._names]
        if lost_names:
            raise UnsupportedLeaf(
                f"rank {dist.get_rank()}: the optimizer updates parameters that engine.module does "
                f"not have: {first_few(lost_names)}. They were removed from it, or replaced, after "
                "deepspeed.initialize; change the module before, and the same on all ranks"
            )
        apart = {p: updated for p, updated in self.updated.items() if updated.masters is not p}
        self.masters = {self._names[param] for param in apart}
        """Names of parameters whose masters are not the weights themselves."""
        self.copied = {
            self._names[p] for p, x in apart.items() if weights_of(p).dtype == x.masters.dtype
        }
        """Of these, those whose weights are copies of the masters, not rounded: each step, and
        DeepSpeed's own load, copies the masters over them."""

    # --- to save --------------------------------------------------------------------------------

    def saved(self, *, with_frozen: bool) -> Leaves:
        """The tree that this process saves.

        Arguments:
            with_frozen: also parameters that are not trained.
        """
        chosen = {n: p for n, p in self.module.params.items() if with_frozen or p.requires_grad}
        weights = self._weights({n: p for n, p in chosen.items() if n not in self.copied})
        tree: Leaves = {MODULE: {}, FP32: {}}
        for updated in self.parts.updated:
            if updated.masters not in updated.ranges:
                self._add(tree, FP32, updated, updated.masters)
            for slot, tensor in updated.slots().items():
                self._add(tree, slot, updated, tensor)
            for slot, value in updated.counts().items():
                self._add_count(tree, slot, updated, value)
        for array_name in (self.places[name].name for name in chosen):  # in the module's order
            leaves = weights if array_name in weights else tree[FP32]
            tree[MODULE][array_name] = leaves[array_name]
        tree[MODULE].update(self.module.buffers)
        for name, leaf in tree[MODULE].items():
            tree[FP32].setdefault(name, leaf)
        for alias, name in self.module.ties.items():
            array_name = self.places[name].name
            for leaves in (tree[MODULE], tree[FP32]) if array_name in tree[MODULE] else ():
                leaves[alias + array_name.removeprefix(name)] = leaves[array_name]
        return tree

    def _weights(self, params: Mapping[str, Parameter]) -> dict[str, Any]:
        """The weights by the names of arrays."""
        if not self.placing.grid.is_model_parallel:
            return {n: self._part(n, p) if _is_partitioned(p) else p for n, p in params.items()}
        whole_params = {name: p for name, p in params.items() if not _is_partitioned(p)}
        shared, leaves = self.placing.shared(whole_params), dict[str, Any]()
        for name, param in params.items():
            place = self.places[name]
            if _is_partitioned(param):
                leaves[place.name] = self._part(name, param)
                continue
            data = param.detach()
            boxes = [(box, data[box.slices] if box.slices else data) for box in shared[name]]
            leaves[place.name] = _leaf(place, boxes, place.own, data.dtype)
        return leaves

    def _part(self, name: str, param: Parameter, to_load: bool = False) -> LocalFragments:
        """The part of a parameter that ZeRO 3 gives this process."""
        place, data = self.places[name], param.ds_tensor.detach()
        boxes = of_range(place.local, part_of(param), data)
        return _leaf(place, boxes, place.pieces if to_load else place.own, data.dtype)

    def _add(self, tree: Leaves, slot: str, updated: Updated, tensor: torch.Tensor) -> None:
        """The elements of a slot, or the masters, by parameter."""
        leaves = tree.setdefault(slot, {})
        for param, part in updated.ranges.items():
            place = self.places[self._names[param]]
            if self.plain:
                leaves[place.name] = _whole(tensor, part, place.local)
                continue
            boxes = self._local_boxes(tensor, part, place)
            if self.parts.whole:  # all data-parallel ranks have it; one of them saves it
                shared = self.placing.shared(self.module.params)[self._names[param]]
                boxes = [
                    (both, data[both.relative_to(box.start).slices])
                    for box, data in boxes
                    for mine in shared
                    if (both := box.intersect(mine)) is not None and not both.empty
                ]
            leaves[place.name] = _leaf(place, boxes, place.own, tensor.dtype)

    def _local_boxes(
        self, tensor: torch.Tensor, part: ElementRange, place: ParameterPlace
    ) -> list[tuple[Box, Any]]:
        if tensor.shape == place.local:
            return [(Box.whole(place.local), tensor.detach())] if tensor.numel() else []
        return of_range(place.local, part, tensor.detach())

    def _add_count(self, tree: Leaves, slot: str, updated: Updated, value: Any) -> None:
        """A slot that is one number, for each of the parameters that it counts for."""
        if value is None:
            return
        count, grid = as_count(slot, value), self.placing.grid
        leaves = tree.setdefault(slot, {})
        for param in updated.ranges:
            leaf: Any = count
            if grid.is_model_parallel:  # one rank says it; ties would have to agree in all stages
                mine = grid.tp == grid.dp == 0 and not getattr(param, PIPE_REPLICATED, False)
                nothing = LocalFragments((), [], dtype_name(count.dtype))
                leaf = LocalFragments.whole(count) if mine else nothing
            leaves[self.places[self._names[param]].name] = leaf

    # --- to load --------------------------------------------------------------------------------

    def weights(self, name: str) -> Any:
        """Where the weights of a parameter are loaded."""
        param, place = self.module.params[name], self.places[name]
        if _is_partitioned(param):
            return self._part(name, param, to_load=True)
        if not self.placing.grid.is_model_parallel:
            return param
        data = param.detach()
        boxes = [(Box.whole(place.local), data)] if data.numel() else []
        return _leaf(place, boxes, place.pieces, data.dtype)

    def slot(self, name: str, tensor: torch.Tensor) -> Any:
        """Where a slot of a parameter, or its masters, are loaded.

        Arguments:
            name: of the parameter.
            tensor: has the elements of all parameters of the same `Updated`.
        """
        param, place = self.module.params[name], self.places[name]
        part = self.updated[param].ranges[param]
        if self.plain:
            return _whole(tensor, part, place.local)
        return _leaf(place, self._local_boxes(tensor, part, place), place.pieces, tensor.dtype)


def as_count(slot: str, value: Any) -> torch.Tensor:
    """A slot that is one number, as an array.

    Raises:
        UnsupportedLeaf: it is none.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (int, float):
        dtype = torch.int64 if type(value) is int else torch.float64
        return torch.tensor(value, dtype=dtype)
    raise UnsupportedLeaf(
        f"the optimizer's slot {slot!r} is of type {type(value).__name__}, neither a tensor nor a "
        "number"
    )


def _is_partitioned(param: Parameter) -> bool:
    return hasattr(param, "ds_tensor")


def _whole(tensor: torch.Tensor, part: ElementRange, shape: tuple[int, ...]) -> torch.Tensor:
    """A whole parameter's part of a tensor, in its shape."""
    if tensor.shape == shape:
        return tensor.detach()
    return tensor.detach()[part.at : part.at + part.count].view(shape)


def _leaf(
    place: ParameterPlace,
    boxes: Iterable[tuple[Box, torch.Tensor]],
    pieces: Sequence[Any],
    dtype: torch.dtype,
) -> LocalFragments:
    return LocalFragments(place.shape, place.fragments(boxes, pieces), dtype_name(dtype))
