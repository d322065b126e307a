"""DeepSpeed's pickled states as facts: which tensors, fragments and numbers a file holds.

Sources: deepspeed/runtime/engine.py, zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from unickpt.backends._files.headers import is_size, naming
from unickpt.backends._files.pickles import Constructors, PickledObject, kind_of
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends.deepspeed.patterns import steps_of
from unickpt.backends.deepspeed.sources import Shapes, SlotValue, is_number
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.extend import Files, Pool, TensorSource, quoted, reading

T = TypeVar("T")
_CONSTRUCTORS: Constructors = {"deepspeed.runtime.zero.config.ZeroStageEnum": lambda stage: stage}
_FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
_SCALERS = "deepspeed.runtime.fp16.loss_scaler."
_AUTOEP = ("ds_autoep_layers", "autoep_layers")
_OF_PARAMETERS = {
    "fp32_flat_groups", "single_partition_of_fp32_groups", "optimizer_state_dict",
    "base_optimizer_state", "param_slice_mappings", "group_paddings", "param_alignment_paddings",
    "partition_count", "ds_version", "universal_checkpoint_info",
}  # fmt: skip
_THREADS_LOCAL, _THREADS_REMOTE, _MOST_DEPTH = 4, 32, 50
_CONVERT = "convert it with DeepSpeed's ds_to_universal, and read the universal checkpoint"

FlatFragments = Mapping[str, tuple[int, int]]
"""By parameter, where it begins in the flat tensor of a rank, and how many elements are there."""


class StateFile:
    """A file of torch.save that holds a dict.

    Arguments:
        files: of the checkpoint.
        name: of the file.

    Raises:
        CheckpointCorrupt: it is damaged, or holds something else.
        StorageError: the storage failed.
    """

    def __init__(self, files: Files, name: str) -> None:
        self.files, self.name = files, name
        with reading(files.location):
            self.torch = TorchFile(files, name, constructors=_CONSTRUCTORS)
        self.value = self.torch.value

    @property
    def state(self) -> dict[Any, Any]:
        """The dict."""
        return self.a_dict(self.value, "the file")

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for damaged content."""
        return self.files.damaged(f"{self.name}: {reason}")

    def unsupported(self, reason: str) -> UnsupportedFormat:
        """The error for unsupported features."""
        return self.files.unsupported(f"{self.name}: {reason}")

    def a_dict(self, value: Any, what: str) -> dict[Any, Any]:
        """A value that must be a dict."""
        if not isinstance(value, dict):
            raise self.damaged(f"{what} contains {kind_of(value)}, not a dict")
        return value

    def a_list(self, value: Any, what: str) -> Sequence[Any]:
        """A value that must be a list or a tuple."""
        if not isinstance(value, list | tuple):
            raise self.damaged(f"{what} is {kind_of(value)}, not a list")
        return value

    def source(self, value: Any, what: str) -> TensorSource:
        """A value that must be a tensor."""
        if not isinstance(value, Tensor):
            raise self.damaged(f"{what} is {kind_of(value)}, not a tensor")
        with naming(self.files.location, what):
            where = self.torch.box(value)
        return TensorSource(value.dtype, value.shape, where.elements, where.first, where.strides)

    def sources(
        self, module: Mapping[str, Any], predicate: Callable[[Tensor], bool] = lambda tensor: True
    ) -> dict[str, TensorSource]:
        """The tensors of a module's state, or some of them."""
        return {
            name: self.source(value, f"array 'module/{name}'")
            for name, value in module.items()
            if isinstance(value, Tensor) and predicate(value)
        }

    def flat(self, value: Any, what: str, rank: int | None = 1) -> TensorSource:
        """A value that must be a tensor without gaps, by default one-dimensional."""
        source = self.source(value, what)
        if rank not in (None, len(source.shape)) or not source.is_row_major:
            raise self.damaged(f"{what} is not flat, but of shape {list(source.shape)}")
        return source

    def shapes(self, value: Any, what: str) -> dict[str, tuple[int, ...]]:
        """A value that must be the shapes of parameters, by name."""
        shapes = self.a_dict(value, what)
        for name, shape in shapes.items():
            self.a_name(name)
            if not isinstance(shape, tuple) or not all(map(is_size, shape)):
                raise self.damaged(f"{what} has no shape for {quoted(name)}")
        return shapes

    def a_name(self, value: Any) -> str:
        """A value that must be the name of a parameter."""
        if isinstance(value, str) and value and value.encode(errors="ignore").decode() == value:
            return value
        raise self.damaged(f"{quoted(value)} is not the name of a parameter")


def read_all(files: Files, names: Sequence[str], decode: Callable[[StateFile], T]) -> list[T]:
    """The content of files, in order; on several threads, as most of the time is waiting.

    Arguments:
        files: of the checkpoint.
        names: of the files.
        decode: makes facts of one.
    """
    most = _THREADS_REMOTE if files.location.is_remote else _THREADS_LOCAL
    with Pool(max(1, min(most, len(names)))) as threads:
        return list(threads.map(lambda name: decode(StateFile(files, name)), names))


# --- model files --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFileState:
    """The content of a model file.

    Arguments:
        file: which.
        module: the state of the module by its names; empty placeholders at stage 3.
        sources: where those are that have elements.
        shapes: of the trained parameters, by group of the optimizer, or by sub-group at stage 3.
        frozen_shapes, frozen: of frozen parameters, at stage 3, and this rank's parts of them.
        shared: names that are another parameter's.
        buffers: the names of buffers.
        info: how tensor-parallel ranks share parameters, if stored.
        degrees: of pipeline and of tensor parallelism, if stored.
    """

    file: StateFile
    module: Mapping[str, Any] | None
    sources: Mapping[str, TensorSource]
    shapes: Sequence[Shapes]
    frozen_shapes: Shapes
    frozen: Mapping[str, TensorSource]
    shared: Mapping[str, str]
    buffers: frozenset[str]
    info: Mapping[str, Any]
    degrees: tuple[int, int] | None

    @property
    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all groups."""
        return {name: shape for group in self.shapes for name, shape in group.items()}


def model_state(file: StateFile) -> ModelFileState:
    """The content of a model file.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it uses features that are not supported.
    """
    state = file.state
    if "module" not in state:
        raise file.damaged("it has no 'module'; DeepSpeed did not write it")
    if any(state.get(key) is not None for key in _AUTOEP):
        raise file.unsupported(f"its experts were split by AutoEP; {_CONVERT}")
    _refuse_swapped(file, state.get("ds_config"))
    module = None if state["module"] is None else flattened(file, state["module"])

    def read_dict(key: str) -> dict[Any, Any]:
        return file.a_dict(state.get(key) or {}, key)

    groups = file.a_list(state.get("param_shapes") or (), "param_shapes")
    frozen, shared = read_dict("frozen_param_fragments"), read_dict("shared_params")
    return ModelFileState(
        file,
        module,
        file.sources(module or {}, lambda tensor: 0 not in tensor.shape),
        [file.shapes(shapes, "param_shapes") for shapes in groups],
        file.shapes(read_dict("frozen_param_shapes"), "frozen_param_shapes"),
        {
            file.a_name(n): file.flat(part, f"array 'module/{n}'", None)
            for n, part in frozen.items()
        },
        {file.a_name(alias): file.a_name(target) for alias, target in shared.items()},
        frozenset(n for n in state.get("buffer_names") or () if isinstance(n, str)),
        read_dict("universal_checkpoint_info"),
        _degrees(file, state.get("checkpoint_parallel_dimensions")),
    )


def flattened(file: StateFile, module: Any) -> dict[str, Any]:
    """The state of a module by its names; those of nested dicts, as Megatron has, are joined."""
    entries: dict[str, Any] = {}
    left: list[tuple[str, Any]] = [("", module)]
    for _ in range(_MOST_DEPTH):
        below = list[tuple[str, Any]]()
        for prefix, state in left:
            for key, value in file.a_dict(state, "'module'").items():
                name = prefix + file.a_name(key)
                if isinstance(value, dict):
                    below.append((f"{name}.", value))
                elif name in entries:
                    raise file.damaged(f"'module' has two values called {quoted(name)}")
                else:
                    entries[name] = value
        if not below:
            return entries
        left = below
    raise file.unsupported(f"'module' is nested deeper than {_MOST_DEPTH} levels")


def _refuse_swapped(file: StateFile, config: Any) -> None:
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    for part in ("offload_optimizer", "offload_param"):
        where = zero.get(part) if isinstance(zero, dict) else None
        if isinstance(where, dict) and where.get("device") == "nvme":
            raise file.unsupported(
                f"{part} was on NVMe, and such states are not in these files; save it from a run "
                "with the device 'cpu' or 'none'"
            )


def _degrees(file: StateFile, degrees: Any) -> tuple[int, int] | None:
    if degrees is None:
        return None
    pp, tp = (file.a_dict(degrees, "degrees").get(f"{kind}_degree") for kind in ("pp", "tp"))
    if type(pp) is not int or type(tp) is not int or pp < 1 or tp < 1:
        raise file.damaged("its checkpoint_parallel_dimensions are no numbers")
    return pp, tp


# --- optimizer files ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterGroup:
    """One rank's part of a group of parameters, or of a sub-group at stage 3.

    Arguments:
        slots: flat tensors by slot; `fp32` has the weights.
        scalars: other slots.
        partitions: how many ranks share the group.
        fragments: which parameters are where in the flat tensors; below stage 3.
    """

    slots: Mapping[str, TensorSource]
    scalars: Mapping[str, SlotValue]
    partitions: int
    fragments: FlatFragments


@dataclass(frozen=True)
class OptimizerState:
    """The content of an optimizer file.

    Arguments:
        file: its name.
        stage: of ZeRO.
        groups: in order.
        plain: everything else, for people.
        version: of DeepSpeed; None if it is not stored.
    """

    file: StateFile
    stage: int
    groups: Sequence[ParameterGroup]
    plain: Mapping[Any, Any]
    version: Any


def optimizer_state(file: StateFile) -> OptimizerState:
    """The content of an optimizer file.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it uses features that are not supported.
    """
    state = file.a_dict(file.state.get("optimizer_state_dict"), "optimizer_state_dict")
    stage = state.get("zero_stage", 1)  # BF16_Optimizer does not say it
    if type(stage) is not int or not 0 <= stage <= 3:
        raise file.damaged(f"its ZeRO stage is {quoted(stage)}")
    if state.get("ds_zero_partition_groups"):
        raise file.unsupported(f"its sub-groups have partitions of their own (AutoEP); {_CONVERT}")
    _refuse_swapped(file, file.state.get("ds_config"))
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    inner = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    flats = file.a_list(state.get(key), key)
    slots, param_groups = _slots(file, inner, len(flats))
    partitions = _partition_counts(file, state.get("partition_count"), len(flats))
    fragments: Sequence[FlatFragments] = [{}] * len(flats)
    if stage < 3:
        fragments = _fragments(file, state.get("param_slice_mappings"), len(flats))
    groups = [
        _group(file, number, flat, slots[number], partitions[number], fragments[number])
        for number, flat in enumerate(flats)
    ]
    plain = common_values(state) | {"param_groups": param_groups}
    return OptimizerState(file, stage, groups, plain, file.state.get("ds_version"))


def common_values(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The values of an optimizer's state besides the states of parameters."""
    plain = {key: value for key, value in state.items() if key not in _OF_PARAMETERS}
    if "loss_scaler" in plain:
        plain["loss_scaler"] = _loss_scaler(plain["loss_scaler"])
    return plain


def _loss_scaler(scaler: Any) -> Any:
    """The fields of a loss scaler; anything else unchanged."""
    is_scaler = isinstance(scaler, PickledObject) and scaler.name.startswith(_SCALERS)
    return scaler.state if is_scaler and isinstance(scaler.state, dict) else scaler


def _slots(file: StateFile, inner: Any, count: int) -> tuple[list[dict[Any, Any]], Any]:
    """The slots of each group, and the optimizer's groups."""
    if isinstance(inner, list | tuple):  # elastic_checkpoint
        if len(inner) != count:
            raise file.damaged(f"it has states of {len(inner)} groups, and weights of {count}")
        return [file.a_dict(fields, "base_optimizer_state") for fields in inner], []
    fields = file.a_dict(inner, "the optimizer's state")
    states = file.a_dict(fields.get("state") or {}, "the optimizer's 'state'")
    groups = file.a_list(fields.get("param_groups") or (), "the optimizer's 'param_groups'")
    strange = [key for key in states if key not in range(count)]
    if strange:
        raise file.damaged(f"it has the state {quoted(strange[0])}, and weights of {count} groups")
    slots = [dict(file.a_dict(states.get(n) or {}, "a state")) for n in range(count)]
    for group in groups:
        file.a_dict(group, "a group of the optimizer")
    for number, step in steps_of(groups):
        if number in range(count) and slots[number]:
            slots[number].setdefault("step", step)
    return slots, groups


def _partition_counts(file: StateFile, value: Any, count: int) -> Sequence[int]:
    counts = [value] * count if type(value) is int else file.a_list(value, "partition_count")
    if len(counts) != count or not all(type(n) is int and n > 0 for n in counts):
        raise file.damaged(f"its partition_count, {quoted(value)}, does not fit {count} groups")
    return counts


def _fragments(file: StateFile, value: Any, count: int) -> Sequence[FlatFragments]:
    if value is None:
        raise file.unsupported(
            "it does not say where parameters are (param_slice_mappings); load and save it with "
            "DeepSpeed 0.8 or later"
        )
    mappings = file.a_list(value, "param_slice_mappings")
    if len(mappings) != count:
        raise file.damaged(f"it has param_slice_mappings of {len(mappings)} groups, of {count}")
    places = [file.a_dict(mapping, "param_slice_mappings") for mapping in mappings]
    return [{file.a_name(n): _fragment(file, n, x) for n, x in group.items()} for group in places]


def _fragment(file: StateFile, name: str, fragment: Any) -> tuple[int, int]:
    is_fragment = isinstance(fragment, PickledObject) and fragment.name == _FRAGMENT
    fields = fragment.state if is_fragment and isinstance(fragment.state, dict) else {}
    start, count = fields.get("start"), fields.get("numel")
    if not is_size(start) or not is_size(count):
        raise file.damaged(f"param_slice_mappings does not say where {quoted(name)} is")
    return start, count


def _group(
    file: StateFile,
    number: int,
    weights: Any,
    slots: Mapping[Any, Any],
    partitions: int,
    fragments: FlatFragments,
) -> ParameterGroup:
    of_group = f"group {number}"
    tensors, scalars = slots_of(file, slots, of_group, ("fp32", "module"))
    flats = {"fp32": file.flat(weights, f"the weights of {of_group}")}
    for slot, value in tensors.items():
        what, count = f"the slot {quoted(slot)} of {of_group}", math.prod(value.shape)
        if count < flats["fp32"].count:
            raise file.unsupported(
                f"{what} has {count} elements, and the weights {flats['fp32'].count}"
            )
        flats[slot] = file.flat(value, what)
    _check_fragments(file, number, flats, fragments)
    return ParameterGroup(flats, scalars, partitions, fragments)


def slots_of(
    file: StateFile, state: Mapping[Any, Any], owner: str, reserved: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, SlotValue]]:
    """The slots of an optimizer's state: tensors with dimensions, and numbers.

    Arguments:
        file: that has it.
        state: by slot.
        owner: whose state it is, for errors.
        reserved: names that no slot may have.

    Raises:
        UnsupportedFormat: it has something else.
    """
    tensors, scalars = dict[str, Tensor](), dict[str, SlotValue]()
    for slot, value in state.items():
        what = f"the slot {quoted(slot)} of {owner}"
        if not isinstance(slot, str) or slot in reserved:
            raise file.unsupported(f"{what} has the name of something else")
        if isinstance(value, Tensor) and value.shape:
            tensors[slot] = value
        elif isinstance(value, Tensor):
            scalars[slot] = file.source(value, what)
        elif is_number(value):
            scalars[slot] = value
        elif value is not None:
            raise file.unsupported(f"{what} is neither a tensor nor a number")
    return tensors, scalars


def _check_fragments(
    file: StateFile, number: int, flats: Mapping[str, TensorSource], fragments: FlatFragments
) -> None:
    """Checks that fragments lie in the flat tensors, and do not overlap."""
    end, before = 0, ""
    for name, (start, count) in sorted(fragments.items(), key=lambda item: (item[1], item[0])):
        if start < end and count:
            raise file.damaged(f"{quoted(before)} and {quoted(name)} overlap in group {number}")
        end, before = max(end, start + count), name
    for slot, flat in flats.items():
        if end > flat.count:
            raise file.damaged(
                f"array '{slot}/{before}' ends at element {end} of group {number}, which has "
                f"{flat.count}"
            )


def same_everywhere(
    files: Iterable[tuple[StateFile, Any]], what: str, expected: Any = None
) -> None:
    """Checks that files agree about something.

    Arguments:
        files: each with its value.
        what: names the value, for the error.
        expected: the value that they must have; None for that of the first one.
    """
    first: StateFile | None = None
    for file, value in files:
        if expected is None:
            first, expected = file, value
        elif value != expected:
            other = f"{quoted(expected)} by {first.name}" if first else quoted(expected)
            raise file.damaged(
                f"{what} is {quoted(value)}, but {other}; are all files of one save?"
            )
