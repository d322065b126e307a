"""Writes folders that `Accelerator.load_state` of Hugging Face accelerate resumes from.

Source: accelerate 1.15, checkpointing.py. The checkpoint is one that
`unickpt.integrations.accelerate` has saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from unickpt.backends._files import training_states
from unickpt.backends._files.flat_names import cannot_hold
from unickpt.backends._files.parts import FilePart, together
from unickpt.errors import UnsupportedLeaf
from unickpt.extend import (
    Index,
    Leaf,
    OfEachProcess,
    Plan,
    PlannedFile,
    children_by_key,
    make_writer,
)

_COUNTS = "accelerate"  # in the metadata
_PROCESS, _REGISTERED = "values/process", "custom_checkpoint_{}.pkl"
_KNOWN = {"models", "optimizers", "schedulers", "scaler", "registered", "values"}
_GENERATORS = {"python": "random_state", "numpy": "numpy_random_seed", "torch": "torch_manual_seed"}


@dataclass(frozen=True)
class AccelerateWriter:
    """A folder for `Accelerator.load_state`, on one process or with DistributedDataParallel."""

    suffixes: ClassVar[Sequence[str]] = ()
    per_process: ClassVar[bool] = True

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        root, every = training_states.root_of(index), _processes(index)
        strange = [f"  {name!r}, which save_state does not save" for name in root.keys() - _KNOWN]
        if strange:
            raise cannot_hold("accelerate", sorted(strange), "drop it by a rule")
        parts = {
            name: FilePart.of(index, node).plan(make_writer(format, {}), most_bytes, name)
            for name, format, node in _parts(index, root)
        }
        return together(parts, [*_positions(every), *_random_states(every)])


def _processes(index: Index) -> Sequence[Mapping[str, Any]]:
    """The state that each process has saved."""
    stored = index.values.get(_PROCESS)
    if not isinstance(index.metadata.get(_COUNTS), dict) or not isinstance(stored, OfEachProcess):
        raise UnsupportedLeaf(
            f"there is no {_PROCESS!r} as unickpt.integrations.accelerate saves it: only what its "
            "save_state has saved becomes a folder of Accelerator.save_state; to='safetensors', "
            "under='models/0' writes weights alone"
        )
    return stored.values


def _numbered_name(name: str, number: int) -> str:
    begin, dot, ending = name.rpartition(".")
    return name if number == 0 else f"{begin}_{number}{dot}{ending}"


def _parts(
    index: Index, root: Mapping[Any, training_states.Tree]
) -> Iterator[tuple[str, str, training_states.Tree]]:
    """The parts that become a file each, with their formats."""
    below = {key: children_by_key(root.get(key, Leaf("", None))) for key in _KNOWN}
    for number, node in below["models"].items():
        yield _numbered_name("model.safetensors", number), "safetensors", node
    for number, node in below["optimizers"].items():
        ours = training_states.numbered(index, node, f"optimizers/{number}")
        yield _numbered_name("optimizer.bin", number), "torch", ours
    for number, node in below["schedulers"].items():
        yield _numbered_name("scheduler.bin", number), "torch", node
    if "scaler" in root:
        yield "scaler.pt", "torch", root["scaler"]
    for number, node in below["registered"].items():
        if training_states.is_optimizer(node):
            node = training_states.numbered(index, node, f"registered/{number}")
        yield _REGISTERED.format(number), "torch", node
    for number, node in children_by_key(below["values"].get("registered", Leaf("", None))).items():
        yield _REGISTERED.format(number), "torch", _unpacked(node, f"registered/{number}")


def _unpacked(node: training_states.Tree, what: str) -> training_states.Tree:
    """The state of a registered object, with tensors instead of packed ones."""
    if isinstance(node, Leaf):
        return node
    if node.kind in ("namedtuple", "object"):
        raise UnsupportedLeaf(
            f"the state of {what} has a {node.type_name}, whose class unickpt does not know, and "
            f"files of torch.save name it: drop it by a rule, values/{what} <-> drop"
        )
    fields = children_by_key(node)
    if fields.keys() == {training_states.TENSOR, training_states.DTYPE}:
        return fields[training_states.TENSOR]
    return replace(node, children=tuple(_unpacked(child, what) for child in node.children))


def _positions(every: Sequence[Mapping[str, Any]]) -> Iterator[PlannedFile]:
    """The positions of stateful data loaders; accelerate has nothing of all others."""
    for number, position in enumerate(every[0]["dataloaders"]):
        if position["state"] is None:
            continue
        if len(every) > 1:
            raise UnsupportedLeaf(
                f"data loader {number} is stateful, and accelerate has one file for the positions "
                f"of all {len(every)} processes: save a step without use_stateful_dataloader, and "
                "resume with accelerator.skip_first_batches"
            )
        file = training_states.KnownTorchFile()
        state = file.plain(position["state"])
        yield file.planned(_numbered_name("dl_state_dict.bin", number), state)


def _random_states(every: Sequence[Mapping[str, Any]]) -> Iterator[PlannedFile]:
    """The generators of each process; written last, as they are there."""
    for process, saved in enumerate(every):
        file = training_states.KnownTorchFile()
        made = training_states.generators(file, saved["rng"], _PROCESS)
        names = {kind: _GENERATORS.get(kind, f"torch_{kind}_manual_seed") for kind in made}
        states = {"step": saved["step"], **{names[kind]: made[kind] for kind in made}}
        planned = file.planned(f"random_states_{process}.pkl", states)
        yield replace(planned, last=True)
