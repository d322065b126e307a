"""Writes DeepSpeed's universal checkpoints; its engines resume from them with `load_universal`.

Sources: deepspeed/checkpoint/{ds_to_universal,universal_checkpoint}.py, runtime/base_optimizer.py,
runtime/zero/stage_1_and_2.py, stage3.py and runtime/engine.py, `_load_checkpoint` (0.19.8).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from unickpt.backends._files import torch_layout
from unickpt.backends._files.flat_names import cannot_hold
from unickpt.backends._files.pickle_writer import PickledCall
from unickpt.backends._files.pickles import Global
from unickpt.backends._files.training_states import KnownTorchFile, Tree, root_of
from unickpt.backends.deepspeed import template as templates
from unickpt.backends.deepspeed.contents import OF_ENGINE
from unickpt.backends.deepspeed.written_arrays import CLIENT, FP32, OPTIMIZER, STEP, UniversalArrays
from unickpt.extend import (
    Index,
    Leaf,
    Node,
    OfEachProcess,
    Plan,
    PlannedFile,
    children_by_key,
    leaves_of_tree,
    name_component,
    quoted,
    text_file,
)

_VERSION = "0.19.8"  # whose loaders the files are for; ZeRO 1 and 2 ask for one
# ZeRO 1 and 2 read the first one, ZeRO 3 the second.
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_GROUPS, _SCALER, _CLIP = "param_groups", "loss_scaler", "clip_grad"
_DYNAMIC = "dynamic_loss_scale"
_PARAMS = ("params", "param_names")
_COUNTERS = ("global_steps", "skipped_steps", "dp_world_size", "ds_version")
_SCALER_CLASS = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
_SCALER_FIELDS = (
    "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale",
    "delayed_shift", "cur_hysteresis", "consecutive_hysteresis", "raise_error_at_min_scale",
)  # fmt: skip
_HINT = (
    "arrays of a universal checkpoint are called fp32/<parameter>, exp_avg/<parameter> and so on, "
    "step/<parameter>, and module/<buffer>; give them these names by rules, and drop all others"
)
_UNTRAINED_HINT = (
    "untrained=True (--untrained) also writes arrays that no optimizer trains, for code of yours "
    "to load after load_checkpoint (docs/formats/writing.md)"
)


@dataclass(frozen=True)
class UniversalWriter:
    """A folder from which DeepSpeed resumes with `load_universal`: ZeRO 1, 2 and 3.

    Arguments:
        template: a local folder with a universal checkpoint of the same model, as `ds_to_universal`
            makes them: the model files, the optimizer's settings and the sharing of parameters
            among Megatron's tensor-parallel ranks are copied from it. None to make them.
        untrained: whether to write buffers and frozen parameters, which DeepSpeed does not load
            from such a folder.
    """

    template: str | os.PathLike[str] | None = None
    untrained: bool = False
    suffixes: ClassVar[Sequence[str]] = ()
    per_process: ClassVar[bool] = True
    _elements: Mapping[str, Any] = field(default_factory=dict)

    def needed(self, index: Index) -> Collection[str]:
        """The steps, which determine the counters of the engine."""
        if self.template is not None:
            return ()
        steps = set(UniversalArrays.of(index).steps.values())
        return {index.aliases.get(n, n) for n in steps if n in index.entries}

    def with_elements(self, elements: Mapping[str, Any]) -> UniversalWriter:
        return replace(self, _elements=elements)

    def left_out(self, index: Index) -> Collection[str]:
        """Leaves that follow from others, and the engine's own values of the optimizer."""
        if self.template is not None:
            return ()
        of_optimizer = {n for n in index.names if n.partition("/")[0] == OPTIMIZER}
        settings = {
            leaf.name for node in _settings(index).values() for leaf in leaves_of_tree(node)
        }
        fixed = {n for n in ("mp_world_size",) if index.values.get(n, 1) != 1}
        return (of_optimizer - settings) | fixed | UniversalArrays.of(index).implied

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        if self.template is not None:
            return templates.plan(index, self.template)
        return _Folder(index, self._elements, self.untrained).plan()


def _settings(index: Index) -> dict[str, Tree]:
    """The values of an optimizer that an engine restores: the loss scale only if it changes, as the
    scale of another precision would be wrong."""
    values = children_by_key(root_of(index).get(OPTIMIZER, Leaf("", None)))
    keys: tuple[str, ...] = (_GROUPS, _CLIP)
    if index.values.get(f"{OPTIMIZER}/{_DYNAMIC}") is True:
        keys = (*keys, _SCALER, _DYNAMIC)
    chosen = {key: values[key] for key in keys if key in values}
    if _GROUPS in chosen:
        chosen[_GROUPS] = _without_params(chosen[_GROUPS])
    if _SCALER in chosen:
        scaler = children_by_key(chosen[_SCALER])
        fields = {key: x for key, x in scaler.items() if key in _SCALER_FIELDS}
        chosen[_SCALER] = _with(chosen[_SCALER], fields)
    return chosen


def _without_params(node: Tree) -> Tree:
    """Groups of an optimizer without their parameters, which are an engine's own."""
    if isinstance(node, Node) and node.kind in ("list", "tuple"):
        return replace(node, children=tuple(map(_without_params, node.children)))
    return _with(node, {key: x for key, x in children_by_key(node).items() if key not in _PARAMS})


def _with(node: Tree, children: Mapping[Any, Tree]) -> Tree:
    """A container with other children; a leaf unchanged."""
    if isinstance(node, Leaf):
        return node
    return replace(node, keys=tuple(children), children=tuple(children.values()))


class _File(KnownTorchFile):
    """A file with leaves of the checkpoint; remembers which."""

    def __init__(self, index: Index, used: set[str]) -> None:
        super().__init__()
        self._index, self._used = index, used

    def leaf(self, name: str) -> Any:
        self._used.add(name)
        if name in self._index.values:
            return self._index.values[name]
        return self.stored(self._index.entry(name))

    def object_of(self, node: Tree) -> Any:
        return torch_layout.object_of(node, self.leaf)


class _Folder:
    """The files of one checkpoint.

    Arguments:
        index: of the checkpoint.
        elements: of the steps.
        untrained: see `UniversalWriter`.
    """

    def __init__(self, index: Index, elements: Mapping[str, Any], untrained: bool) -> None:
        self._index, self._arrays = index, UniversalArrays.of(index)
        self._elements, self._untrained = elements, untrained
        self._root, self._settings = root_of(index), _settings(index)
        self._used: set[str] = set()
        self._made: dict[str, Any] = {}
        self._problems: list[str] = []

    def plan(self) -> Plan:
        """Plans the files.

        Raises:
            UnsupportedLeaf: DeepSpeed could not resume from them as they would be; says why.
        """
        self._check_untrained()
        if self._arrays.problems:
            self._refuse(self._arrays.problems)
        counters = self._counters()
        optimizer, model = self._optimizer_state(), list(self._model_states(counters))
        if self._problems:
            self._refuse(self._problems)
        tag = f"global_step{counters['global_steps']}_universal"
        files = [*self._parameters(), *model, optimizer]
        files = [replace(file, name=f"{tag}/{file.name}") for file in files]
        files.append(text_file("latest_universal", tag, last=True))
        arrays = {name: name for name in self._index.entries if name in self._used}
        values = {name: name for name in self._index.values if name in self._used}
        for name, leaf in self._arrays.untrained.items():
            shown = f"module/{name_component(name)}"
            (values if leaf in values else arrays)[leaf] = shown
        values.pop(CLIENT, None)  # of one process
        return Plan(tuple(files), arrays, values, others=True, made=self._made)

    def _refuse(self, problems: Sequence[str]) -> None:
        hint = _HINT
        if self._arrays.untrained and not self._untrained:
            hint += f". {_UNTRAINED_HINT}"
        raise cannot_hold("universal", [f"  {problem}" for problem in problems], hint)

    def _check_untrained(self) -> None:
        if not self._untrained:
            why = (
                "which no optimizer trains: DeepSpeed does not load it from a universal checkpoint"
            )
            self._problems += [f"{quoted(leaf)}, {why}" for leaf in self._arrays.untrained.values()]

    # --- parameters -----------------------------------------------------------------------------

    def _parameters(self) -> Iterator[PlannedFile]:
        for name, slots in self._arrays.trained.items():
            for slot, leaf in slots.items():
                file = _File(self._index, self._used)
                yield file.planned(f"zero/{name}/{slot}.pt", {"param": file.leaf(leaf)})
            if name in self._arrays.steps:
                file = _File(self._index, self._used)
                value = file.leaf(self._arrays.steps[name])
                yield file.planned(f"zero/{name}/{STEP}.pt", value)

    def _step(self) -> tuple[Any, bool] | None:
        """The step of all parameters, and whether it is a tensor; None if they differ."""
        values, aliases = self._index.values, self._index.aliases
        steps = {
            (values[leaf], False)
            if leaf in values
            else (self._elements[aliases.get(leaf, leaf)].item(), True)
            for leaf in self._arrays.steps.values()
        }
        return steps.pop() if len(steps) == 1 else None

    def _counters(self) -> dict[str, Any]:
        """The counters of the engine; without any, an engine that has skipped no step."""
        values = self._index.values
        counters = {name: values[name] for name in _COUNTERS if name in values}
        step = self._step()
        if "global_steps" not in counters and step is None:
            self._refuse(
                ["global_steps is missing, and does not follow from the steps of the "
                 "parameters, which differ or are missing"]
            )  # fmt: skip
        made = {"skipped_steps": 0, "dp_world_size": 1, "ds_version": _VERSION}
        if step is not None:
            made["global_steps"] = int(step[0])
        made = {name: value for name, value in made.items() if name not in counters}
        made["mp_world_size"] = 1  # as many as there are model files
        self._made |= made
        return {**counters, **made}

    # --- the optimizer --------------------------------------------------------------------------

    def _optimizer_state(self) -> PlannedFile:
        """The settings that ZeRO 1 and 2 read at the top, and ZeRO 3 below
        `optimizer_state_dict`."""
        file = _File(self._index, self._used)
        settings = {key: file.object_of(node) for key, node in self._settings.items()}
        groups = settings.pop(_GROUPS, [])
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            self._problems.append(f"{OPTIMIZER}/{_GROUPS}, which is no list of dicts")
            groups = []
        # ZeRO 1 and 2 load only as many groups as there are here, and say nothing.
        state = {_GROUPS: [*groups, *[{}] * len(self._arrays.trained)], **settings}
        state["ds_version"] = self._index.values.get("ds_version", _VERSION)
        if _SCALER in state:
            state[_SCALER] = self._scaler(state[_SCALER])
        step = self._step()
        if step is not None:
            number = file.tensor(np.float32(step[0])) if step[1] else step[0]
            state["optimizer_state_dict"] = {
                "state": {0: {STEP: number}},
                _GROUPS: [_common(groups)],  # all groups take its settings
            }
        return file.planned("zero/optimizer_state.pt", state)

    def _scaler(self, fields: Any) -> Any:
        """The object that has the scale of losses, which an engine takes instead of its own."""
        values = fields if isinstance(fields, dict) else {}
        missing = [name for name in _SCALER_FIELDS if name not in values]
        if missing:
            self._problems.append(
                f"{OPTIMIZER}/{_SCALER}, which lacks {', '.join(missing)}; drop {OPTIMIZER}/"
                f"{_DYNAMIC}, and engines begin with the scale of their configuration"
            )
        made = PickledCall(Global(_SCALER_CLASS), is_new=True)
        made.state = {name: values.get(name) for name in _SCALER_FIELDS}
        made.state |= {"dynamic": True, "dtype": Global("torch.float16")}
        return made

    # --- the model files ------------------------------------------------------------------------

    def _model_states(self, counters: Mapping[str, Any]) -> Iterator[PlannedFile]:
        file = _File(self._index, self._used)
        entries = self._index.entries
        shapes = {
            name: PickledCall(Global("torch.Size"), (entries[slots[FP32]].shape,))
            for name, slots in self._arrays.trained.items()
        }
        of_engine = {key: file.object_of(self._root[key]) for key in OF_ENGINE if key in self._root}
        module = {n: file.leaf(leaf) for n, leaf in self._arrays.untrained.items()}
        state = {"module": module, "param_shapes": [shapes], **of_engine, **counters}
        client = self._client_state(file)
        for key in client.keys() & {*state, *OF_ENGINE}:
            self._problems.append(f"{CLIENT}/{key}, which DeepSpeed would take for its own")
        for name in _MODEL_FILES:
            yield file.planned(name, state | client)

    def _client_state(self, file: _File) -> dict[Any, Any]:
        """The user's own state: of several processes, that of the first, as DeepSpeed has it."""
        stored = self._index.values.get(CLIENT)
        if isinstance(stored, OfEachProcess):
            self._used.add(CLIENT)
            state = file.plain(stored.values[0])
        else:
            state = file.object_of(self._root[CLIENT]) if CLIENT in self._root else {}
        if isinstance(state, dict):
            return state
        self._problems.append(f"{CLIENT}, which is no dict")
        return {}


def _common(groups: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """The settings in which all groups agree; an engine keeps its own of all others."""
    first = groups[0] if groups else {}
    return {k: v for k, v in first.items() if all(k in g and g[k] == v for g in groups)}
