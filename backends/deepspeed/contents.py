"""The content of a DeepSpeed checkpoint, as a tree of arrays and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unickpt.backends._files.torch_trees import PlainTree
from unickpt.backends.deepspeed import consistency, partitions, universal, unsharded, weights
from unickpt.backends.deepspeed.folder import DeepSpeedFolder
from unickpt.backends.deepspeed.ranks import EngineRanks, Named
from unickpt.backends.deepspeed.sources import MergedArray, Parameter, whole, widened
from unickpt.backends.deepspeed.states import (
    StateFile,
    common_values,
    model_state,
    optimizer_state,
    read_all,
)
from unickpt.backends.deepspeed.unsharded import TorchState, torch_state
from unickpt.backends.deepspeed.weights import ModuleWeights
from unickpt.extend import TensorSource, quoted

OF_ENGINE = (
    "global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size",
    "ds_version", "ds_config", "lr_scheduler", "data_sampler", "random_ltd",
    "sparse_tensor_module_names",
)  # fmt: skip
"""Values that DeepSpeed itself puts into a model file and unickpt shows."""
# Values that are only read to find the arrays. All others are the user's, `client_state`.
_STRUCTURE = (
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "checkpoint_parallel_dimensions", "universal_checkpoint_info",
)  # fmt: skip

MODULE, FP32 = "module", "fp32"
_MASTERS = frozenset({"fp32_groups_flat", "fp32_groups"})
_EXPERTS = "deepspeed_experts."


class Contents:
    """The content of a checkpoint.

    Arguments:
        folder: its files.
        hints: of the user.

    Raises:
        CheckpointCorrupt, UnsupportedFormat, HintError: see `reader.open`.
        Failed: the storage failed.
    """

    def __init__(self, folder: DeepSpeedFolder, hints: Mapping[str, Any]) -> None:
        self.folder, where = folder, str(folder.files.location)
        self._models = _by_rank(folder, folder.models, model_state)
        self._optimizers = _by_rank(folder, folder.optimizers, optimizer_state)
        consistency.check(folder, self._models, self._optimizers)
        infos = (model.info for of_rank in self._models for model in of_rank)
        degree = consistency.tensor_parallelism(folder, self._models)
        self._ranks = EngineRanks(where, degree, next(filter(None, infos), {}), hints)
        self.files_of: dict[int, StateFile] = {}
        """The file of each tensor of plain states, by its identity as an object."""
        self.root: dict[str, Any] = {}
        """The tree; its leaves are `MergedArray`, tensors and plain values."""
        module_weights = weights.of_models(folder, self._models, degree)
        self._torch = self._torch_states(module_weights)
        slots, of_weights = self._slots(module_weights)
        module = self._module(module_weights, slots.get(FP32, {}), of_weights)
        for kind, content in {MODULE: module, **slots}.items():
            self._add(kind, content)
        self._add_module_values(module_weights)
        self._ranks.rules.check_hints_used(where)
        self._add_values()
        version = self.root.get("ds_version")
        self.version = version if isinstance(version, str) and len(version) < 40 else ""
        """Of DeepSpeed."""

    def _add(self, key: str, content: Any) -> None:
        if key in self.root:
            raise self.folder.files.unsupported(
                f"a slot of the optimizer is called {quoted(key)}, as something else is"
            )
        if content != {}:
            self.root[key] = content

    # --- arrays ---------------------------------------------------------------------------------

    def _torch_states(self, module_weights: ModuleWeights) -> list[TorchState]:
        """The states of torch's optimizers, without ZeRO: by expert-parallel rank, by
        model-parallel rank."""
        of_models = [torch_state(of_rank[0].file) for of_rank in self._models]
        own_states = [state for state in of_models if state is not None]
        by_rank = _by_rank(self.folder, self.folder.expert_optimizers, torch_state)
        every = [state for group in by_rank for state in group]
        # With ZeRO, older versions write such files without a state.
        states = [] if not any(every) else list(zip(*by_rank, strict=True))
        if states and (None in every or self._optimizers):
            raise self.folder.files.damaged(
                "some optimizer files of experts (expp_rank_*_optim_states.pt) have no state, or "
                "there are also optimizer files of ZeRO; are the files of one save?"
            )
        if own_states and len(own_states) != len(of_models):
            raise self.folder.files.damaged(
                f"{own_states[0].file.name} has the state of an optimizer, and another model "
                "file has none; are the files of one save?"
            )
        if not states and own_states and self.folder.experts:
            raise self.folder.files.incomplete(
                "the optimizer files of the experts, expp_rank_*_mp_rank_*_optim_states.pt, are "
                "missing"
            )
        if not states:
            return own_states
        unsharded.check(
            [group[0] for group in self._models], states, [*map(list, module_weights.held)]
        )
        flat = [state for of_experts in states for state in of_experts]
        firsts = [(s.file, next(iter(s.parameters.values()), None)) for s in [*own_states, *flat]]
        steps = [(file, first.scalars.get("step")) for file, first in firsts if first]
        consistency.check_steps(self.folder, steps)
        return flat

    def _slots(self, of_module: ModuleWeights) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """The weights in float32 and the optimizer's slots; and of the former, the names that
        ranks have for them."""
        arrays: dict[str, dict[str, Any]] = {FP32: {}}
        of_weights = {}
        by_rank, combined = self._parameters(of_module)
        slots = list(dict.fromkeys(s for parts in by_rank for p in parts.values() for s in p.slots))
        for slot in slots:
            parts = [
                {n: p.slots[slot] for n, p in parameters.items() if slot in p.slots}
                for parameters in by_rank
            ]
            for named in combined(slot, parts):
                arrays.setdefault(slot, {})[named.name] = named.array
                if slot == FP32:
                    of_weights[named.name] = named.of
                if slot == slots[0]:
                    for scalar, value in by_rank[named.rank][named.of].scalars.items():
                        array = whole(value) if isinstance(value, TensorSource) else value
                        arrays.setdefault(scalar, {})[named.name] = array
        return arrays, of_weights

    def _parameters(
        self, of_module: ModuleWeights
    ) -> tuple[Sequence[Mapping[str, Parameter]], Any]:
        """By rank, its parts of parameters; and how the ranks' parts are combined."""
        models = [of_rank[0] for of_rank in self._models]
        if self.folder.universal:
            shapes = models[0].shapes if models else ()
            shapes = [*shapes, *(group for model in models[1:] for group in model.shapes)]
            copied = {name for model in models for name in model.module or ()}
            return [universal.parameters(self.folder, shapes, copied)], _of_one_rank
        if not self._optimizers:
            count = len(models)
            states = [
                self._torch[start : start + count] for start in range(0, len(self._torch), count)
            ]
            named = unsharded.by_name(states, [parts.keys() for parts in of_module.held])
            if named is not None:
                return named, self._ranks.combined
            numbered = [{str(n): p for n, p in s.parameters.items()} for s in self._torch]
            return numbered, self._ranks.apart
        config = models[0].file.state.get("ds_config")
        first = isinstance(config, dict) and config.get("use_data_before_expert_parallelism")
        return [
            partitions.parameters(model, optimizers, first is True)
            for model, optimizers in zip(models, self._optimizers, strict=True)
        ], self._ranks.combined

    def _module(
        self, module_weights: ModuleWeights, fp32: dict[str, Any], of_weights: Mapping[str, str]
    ) -> dict[str, Any]:
        """The module's state; adds to the state in float32 the weights that the optimizer does not
        have."""
        module, of_module = dict[str, Any](), dict[str, str]()
        for named in self._ranks.combined(MODULE, module_weights.held):
            module[named.name], of_module[named.name] = named.array, named.of
        for name, rank_name in of_weights.items():
            if rank_name in module_weights.trained:
                dtype = module_weights.trained[rank_name]
                array = fp32[name]
                module[name] = array if array.dtype == dtype else array.converted(dtype)
                of_module[name] = rank_name
        self._check_weights(module_weights, module, of_weights)
        _add_aliases(module, of_module, module_weights.aliases)
        _add_aliases(fp32, of_weights, module_weights.aliases)
        if self._has_unnamed_masters():
            return module
        made: dict[int, MergedArray] = {}
        for name, array in module.items():
            if name not in fp32:
                fp32[name] = made.setdefault(id(array), widened(array))
        return module

    def _has_unnamed_masters(self) -> bool:
        """Whether the weights in float32 are there, but no file maps them to parameters:
        DeepSpeed's optimizer of 16 bits without ZeRO flattens them."""
        states = (
            model.file.state.get("optimizer") for of_rank in self._models for model in of_rank
        )
        return any(isinstance(state, dict) and not _MASTERS.isdisjoint(state) for state in states)

    def _check_weights(
        self,
        module_weights: ModuleWeights,
        module: Mapping[str, Any],
        of_weights: Mapping[str, str],
    ) -> None:
        """Checks that trained parameters have weights; experts have files of their own."""
        missing = sorted(module_weights.trained.keys() - set(of_weights.values()))
        if self.folder.experts:
            missing += [name for name in of_weights if _EXPERTS in name and name not in module]
        if missing:
            raise self.folder.files.incomplete(
                f"array 'module/{missing[0]}': the file with its weights is missing"
            )

    # --- plain values ---------------------------------------------------------------------------

    def _add_module_values(self, module_weights: ModuleWeights) -> None:
        if module_weights.values:
            module = self.root.setdefault(MODULE, {})
            for name, (value, file) in module_weights.values.items():
                module.setdefault(name, self._plain(value, file))

    def _add_values(self) -> None:
        model = self._models[0][0] if self._models else None
        state = model.file.state if model else {}
        for key in OF_ENGINE:
            if model and key in state:
                self._add(key, self._plain(state[key], model.file))
        mine = {k: v for k, v in state.items() if k not in OF_ENGINE and k not in _STRUCTURE}
        if model and mine:
            self._add("client_state", self._plain(mine, model.file))
        optimizer_values = list(self._optimizer_values())
        for number, (values, file) in enumerate(optimizer_values):
            name = "optimizer" if len(optimizer_values) == 1 else f"optimizer@{number}"
            self._add(name, self._plain(values, file))

    def _optimizer_values(self) -> Iterator[tuple[Any, StateFile]]:
        """The optimizer's state besides the slots of parameters; of experts, each rank's."""
        if self._optimizers:
            first = self._optimizers[0][0]
            yield first.plain, first.file
        elif self.folder.common is not None:
            common = StateFile(self.folder.files, self.folder.common)
            yield _without_padding(common_values(common.state)), common
        else:
            every = self._torch if self.folder.expert_optimizers else self._torch[:1]
            for state in every:
                optimizer = state.file.state["optimizer"]
                yield {k: v for k, v in optimizer.items() if k != "state"}, state.file

    def _plain(self, value: Any, file: StateFile) -> Any:
        maker = PlainTree(file.torch, f"{self.folder.files.location}: {file.name}")
        made = maker.tree(value, 1, 0)
        self.files_of.update(dict.fromkeys(maker.tensors, file))
        return made


def _without_padding(values: dict[Any, Any]) -> dict[Any, Any]:
    """An optimizer's values without the empty groups that unickpt's writer adds."""
    groups = values.get("param_groups")
    if isinstance(groups, list):
        count = max((n for n, group in enumerate(groups, 1) if group != {}), default=0)
        values["param_groups"] = groups[:count]
    return values


def _by_rank(
    folder: DeepSpeedFolder, names: Sequence[Sequence[str]], decode: Any
) -> list[list[Any]]:
    """The content of files, by model-parallel rank, by data-parallel rank."""
    contents = iter(read_all(folder.files, [name for group in names for name in group], decode))
    return [[next(contents) for _ in of_rank] for of_rank in names]


def _of_one_rank(kind: str, parts_by_rank: Sequence[Mapping[str, TensorSource]]) -> Iterable[Named]:
    return [Named(name, name, 0, whole(source)) for name, source in parts_by_rank[0].items()]


def _add_aliases(
    arrays: dict[str, Any], names: Mapping[str, str], aliases: Mapping[str, str]
) -> None:
    """Adds further names of arrays.

    Arguments:
        arrays: by their own names.
        names: by these, those that ranks have for them.
        aliases: of the names that ranks have.
    """
    own_names: dict[str, list[str]] = {}
    for name, rank_name in names.items():
        own_names.setdefault(rank_name, []).append(name)
    for alias, rank_name in aliases.items():
        for name in own_names.get(rank_name, ()):
            arrays.setdefault(alias + name.removeprefix(rank_name), arrays[name])
