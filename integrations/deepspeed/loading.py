"""Loads a checkpoint into an engine in place: of any stage of ZeRO, any number of ranks, of
unickpt's or DeepSpeed's own, or, through rules, of another trainer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import unickpt
from unickpt import Checkpoint, LoadOptions, Rules
from unickpt.errors import LoadMismatch
from unickpt.extend import ArrayEntry, first_few
from unickpt.integrations.deepspeed import values
from unickpt.integrations.deepspeed.held import Updated
from unickpt.integrations.deepspeed.state import FP32, MODULE, EngineArrays, Leaves, as_count
from unickpt.integrations.torch_types import dtype_name

_log = logging.getLogger("unickpt")
_STEP = "step"
_WEIGHTS = (f"{MODULE}/", f"{FP32}/")


@dataclass(frozen=True)
class Wanted:
    """The parts of a checkpoint to load.

    Arguments:
        strict: whether every weight of the module must be there.
        optimizer: whether the optimizer's state is loaded, too.
        scheduler: whether the learning rate's schedule is.
        values: whether counters and all else that is no array is.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    values: bool = True


@dataclass
class EngineLoad:
    """One load into an engine.

    Arguments:
        arrays: of the engine.
        stored: the checkpoint.
        wanted: the parts to load.
        rules: derive DeepSpeed's names from the stored ones; or None.
        options: of the load.
    """

    arrays: EngineArrays
    stored: Checkpoint
    wanted: Wanted
    rules: Rules | None
    options: LoadOptions | None
    tree: Leaves = field(default_factory=dict)
    _entries: Mapping[str, ArrayEntry] = field(init=False)
    derived: bool = field(default=False, init=False)
    """Whether the weights must be derived from the masters after `run`, by rounding them."""
    _new: dict[Updated, dict[str, torch.Tensor]] = field(default_factory=dict)
    _counts: dict[Updated, dict[str, dict[str, torch.Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._entries = self.stored.index.entries

    def run(self) -> dict[str, Any]:
        """Fills arrays; nothing else of the engine has changed when this fails.

        Returns:
            The plain values, by name.

        Raises:
            LoadMismatch: the checkpoint is of something else; lists all differences.
        """
        self._request_weights()
        plain: dict[str, Any] = {}
        if self.wanted.values and self.rules is None:
            plain = _plain_values(self.stored)
        if self.wanted.optimizer and self.arrays.parts.base is not None:
            values.check_groups(self.arrays.parts.engine, plain, self.stored.url)
            if not _is_of_no_step(plain) or self._any_slots():
                self._request_slots()
        unickpt.load(
            self.stored, self.tree, rules=self.rules, unexpected="skip", options=self.options
        )
        counts = {updated: self._same(by_slot) for updated, by_slot in self._counts.items()}
        self.arrays.parts.add_slots(self._new)
        for updated, numbers in counts.items():
            _set_counts(self.arrays.parts.base, updated, numbers)
        return plain

    # --- weights ---------------------------------------------------------------------------------

    def _request_weights(self) -> None:
        arrays, module = self.arrays, self.arrays.module
        leaves = [
            (name, arrays.places[name].name, param.dtype, arrays.weights(name))
            for name, param in module.params.items()
        ]
        leaves += [(name, name, buffer.dtype, buffer) for name, buffer in module.buffers.items()]
        missing = [leaf[1] for leaf in leaves if not self._request(*leaf)]
        for alias, name in module.ties.items():
            for slot in (MODULE, FP32):
                if self.rules is None and self._dtype(slot, alias) is not None:
                    array_name = arrays.places[name].name
                    leaf = self.tree.get(slot, {}).get(array_name)
                    if leaf is not None:
                        self._put(slot, alias + array_name.removeprefix(name), leaf)
        if missing and self.wanted.strict:
            raise LoadMismatch(
                f"{self.stored.url}: the module of rank {dist.get_rank()} has weights that are not "
                f"stored: {first_few(missing)}. "
                "Of a checkpoint that was saved with exclude_frozen_parameters=True, or to keep "
                "what they are: load_checkpoint(..., load_module_strict=False)"
            )
        if missing:
            what = "%s: these weights stay as they are: %s"
            _log.warning(what, self.stored.url, first_few(missing))

    def _request(self, name: str, stored: str, dtype: torch.dtype, leaf: Any) -> bool:
        """Requests the weights of a parameter, or a buffer; False if they are not stored."""
        arrays, module_dtype = self.arrays, dtype_name(dtype)
        has_masters = name in arrays.masters
        if self.rules is not None:  # presets have the masters only
            masters = arrays.slot(name, self._masters(name)) if has_masters else leaf
            self._put(FP32, stored, masters)
            self.derived |= has_masters
            return True
        weights_dtype, masters = self._dtype(MODULE, stored), self._dtype(FP32, stored)
        if weights_dtype is None and masters is None:
            return False
        if has_masters and masters is not None:
            self._put(FP32, stored, arrays.slot(name, self._masters(name)))
            # Trained in another precision: round the masters, as DeepSpeed does.
            if weights_dtype != module_dtype:
                self.derived = True
                return True
        elif has_masters:  # of a checkpoint of weights alone; the masters follow from them
            raise LoadMismatch(
                f"{self.stored.url}: {FP32}/{stored} is not stored, which the optimizer's masters "
                "are loaded from; load weights into the module before deepspeed.initialize"
            )
        elif weights_dtype != module_dtype and masters == module_dtype:
            self._put(FP32, stored, leaf)
            return True
        self._put(MODULE, stored, leaf)
        return True

    def _masters(self, name: str) -> torch.Tensor:
        return self.arrays.updated[self.arrays.module.params[name]].masters

    def _dtype(self, slot: str, name: str) -> str | None:
        """The dtype of a stored array; None if there is none."""
        entry = self._entries.get(f"{slot}/{name}")
        return None if entry is None else entry.dtype

    def _put(self, slot: str, name: str, leaf: Any) -> None:
        self.tree.setdefault(slot, {})[name] = leaf

    # --- the optimizer's slots -------------------------------------------------------------------

    def _any_slots(self) -> bool:
        """Whether slots are stored, or the engine has some that would have to be."""
        parts, places = self.arrays.parts, self.arrays.places
        stored = {name.partition("/")[2] for name in self._entries if not name.startswith(_WEIGHTS)}
        return any(updated.state for updated in parts.updated) or any(
            places[name].name in stored for name in self.arrays.module.params
        )

    def _request_slots(self) -> None:
        """Requests the optimizer's slots: those that it has, or, before its first step, would have
        after it."""
        parts = self.arrays.parts
        names = {param: name for name, param in self.arrays.module.params.items()}
        fresh: dict[torch.dtype, dict[str, Any]] = {}
        for updated in parts.updated:
            state: Mapping[str, Any] = updated.state
            if not state:
                dtype = updated.masters.dtype
                state = fresh.setdefault(dtype, _after_a_step(parts.base, dtype))
                self._new[updated] = {
                    slot: torch.zeros_like(updated.masters, dtype=v.dtype, requires_grad=False)
                    for slot, v in state.items()
                    if _is_slot(slot, v)
                }
            slots = updated.slots() if updated.state else self._new[updated]
            for param in updated.ranges:
                stored = self.arrays.places[names[param]].name
                for slot, tensor in slots.items():
                    self._put(slot, stored, self.arrays.slot(names[param], tensor))
            for slot, value in state.items():
                if slot not in slots and value is not None:
                    self._request_count(updated, slot, value, names)

    def _request_count(
        self, updated: Updated, slot: str, value: Any, names: Mapping[Any, str]
    ) -> None:
        """Requests a slot that is one number, under the names of all parameters that it is of."""
        dtype = as_count(slot, value).dtype
        for param in updated.ranges:
            stored = self.arrays.places[names[param]].name
            leaf = torch.empty((), dtype=self._count_dtype(slot, stored, dtype))
            self._put(slot, stored, leaf)
            self._counts.setdefault(updated, {}).setdefault(slot, {})[stored] = leaf

    def _count_dtype(self, slot: str, name: str, default: torch.dtype) -> torch.dtype:
        if self.rules is not None:
            return default
        index = self.stored.index
        if f"{slot}/{name}" in index.values:
            is_float = isinstance(index.values[f"{slot}/{name}"], float)
            return torch.float64 if is_float else torch.int64
        stored = self._dtype(slot, name)
        return getattr(torch, stored or "", default)

    def _same(self, counts: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """The numbers that several parameters have, which DeepSpeed keeps once for all of them.

        Raises:
            LoadMismatch: the parameters have different ones.
        """
        numbers_by_slot = {}
        for slot, by_name in counts.items():
            numbers = {name: leaf.item() for name, leaf in by_name.items()}
            (first, number), *tail = numbers.items()
            other = next((name for name, n in tail if n != number), None)
            if other is not None:
                raise LoadMismatch(
                    f"{self.stored.url}: {slot}/{first} is {number}, and {slot}/{other} is "
                    f"{numbers[other]}, but DeepSpeed's optimizer has one number for both: put "
                    "them into groups of their own, or load without the optimizer's state "
                    "(load_optimizer_states=False)"
                )
            numbers_by_slot[slot] = number
        return numbers_by_slot


def _plain_values(stored: Checkpoint) -> dict[str, Any]:
    """The stored state besides the arrays of parameters, as a tree."""
    leaves = {*stored.index.values, *stored.index.per_process, *stored.index.entries}
    chosen = {name if name in leaves else f"{name}/**" for name in values.NAMES}
    chosen &= {f"{name.partition('/')[0]}/**" if "/" in name else name for name in leaves}
    tree: dict[str, Any] = unickpt.load(stored, only=sorted(chosen)) if chosen else {}
    return tree


def _is_of_no_step(plain: Mapping[str, Any]) -> bool:
    """Whether the run had made no step of the optimizer yet: none, or gradients in float16 were too
    large in all of them."""
    global_steps = plain.get("global_steps")
    return global_steps is not None and global_steps == plain.get("skipped_steps")


def _after_a_step(base: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The state that an optimizer has of a parameter after its first step; found by making one with
    a parameter of its own."""
    parameters = inspect.signature(type(base).__init__).parameters
    settings = {key: value for key, value in base.defaults.items() if key in parameters}
    param = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    param.grad = torch.zeros_like(param)
    with suppress(TypeError, ValueError, RuntimeError):
        other = type(base)([param], **settings)
        other.step()
        return dict(other.state[param])
    raise LoadMismatch(
        f"the state of {type(base).__name__} cannot be created before its first step: let the "
        "engine make one step before loading into it"
    )


def _is_slot(slot: str, value: Any) -> bool:
    return slot != _STEP and isinstance(value, torch.Tensor) and value.ndim > 0


def _set_counts(base: Any, updated: Updated, counts: Mapping[str, float]) -> None:
    """Sets the slots that are one number, as the optimizer keeps them: in tensors, or not."""
    state = base.state[updated.masters]
    like = state
    for slot, number in counts.items():
        if slot not in state:
            like = _after_a_step(base, updated.masters.dtype)
        kind: Any = like[slot]
        if isinstance(kind, torch.Tensor):
            state[slot] = kind.detach().clone().fill_(number)
        else:
            state[slot] = type(kind)(number)
