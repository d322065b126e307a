"""Writes folders that the Trainer of Hugging Face transformers resumes from.

Source: transformers 4.57, trainer.py (`_save_checkpoint`, `_load_from_checkpoint` and their
callees). The checkpoint is one that `unickpt.integrations.transformers` has saved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from unickpt.backends._files import training_states
from unickpt.backends._files.flat_names import cannot_hold
from unickpt.backends._files.parts import FilePart, together
from unickpt.errors import UnsupportedLeaf
from unickpt.extend import Index, OfEachProcess, Plan, PlannedFile, Writer, make_writer, text_file

_MODEL, _OPTIMIZER, _STATE, _RNG = "model", "optimizer", "trainer_state", "rng"
_FILES = {"scheduler": "scheduler.pt", "scaler": "scaler.pt"}
_KNOWN = {_MODEL, _OPTIMIZER, _STATE, _RNG, *_FILES}


@dataclass(frozen=True)
class TrainerWriter:
    """A folder `checkpoint-<step>`, for `Trainer.train(resume_from_checkpoint=...)`.

    Arguments:
        max_shard_size: of a file of weights, in bytes; or as a text, such as "5GB".
        config: a folder whose other files (configuration, tokenizer, ...) are copied.
    """

    max_shard_size: int | str = "5GB"
    config: str | os.PathLike[str] | None = None
    suffixes: ClassVar[Sequence[str]] = ()
    per_process: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._weights()

    def _weights(self) -> Writer:
        options = {"max_shard_size": self.max_shard_size, "config": self.config}
        return make_writer("hf", options)

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        root = training_states.root_of(index)
        text = _state_text(index)
        strange = [f"  {name!r}, which a Trainer does not save" for name in root.keys() - _KNOWN]
        if strange:
            raise cannot_hold("trainer", sorted(strange), "drop it by a rule")
        if _MODEL not in root:
            raise UnsupportedLeaf("'model' is missing: the Trainer cannot resume without weights")
        parts = {"": FilePart.of(index, root[_MODEL]).plan(self._weights(), most_bytes)}
        files: dict[str, training_states.Tree] = {
            name: root[key] for key, name in _FILES.items() if key in root
        }
        if _OPTIMIZER in root:
            files["optimizer.pt"] = training_states.numbered(index, root[_OPTIMIZER], _OPTIMIZER)
        for name, node in files.items():
            parts[name] = FilePart.of(index, node).plan(make_writer("torch", {}), most_bytes, name)
        more = [*_generators(index), text_file("trainer_state.json", text, last=True)]
        return together(parts, more)


def _state_text(index: Index) -> str:
    """The state of the Trainer, as it writes it.

    Raises:
        UnsupportedLeaf: there is none.
    """
    stored: Any = index.values.get(_STATE)
    try:
        state = json.loads(stored.values[0])
        state["best_model_checkpoint"] = None  # a step of ours; it looks for its own when it saves
        assert isinstance(state["global_step"], int)
    except (AttributeError, KeyError, TypeError, ValueError, AssertionError) as error:
        raise UnsupportedLeaf(
            "there is no 'trainer_state' as unickpt.integrations.transformers saves it: only a "
            "step of a Trainer with UnickptMixin or UnickptCallback becomes a checkpoint of the "
            "Trainer; to='hf', under='model' writes weights alone"
        ) from error
    return json.dumps(state, indent=2, sort_keys=True) + "\n"


def _generators(index: Index) -> list[PlannedFile]:
    """The files with the generators of each process."""
    stored = index.values.get(_RNG)
    if not isinstance(stored, OfEachProcess):
        return []  # dropped; the Trainer then says that it begins with other numbers
    files, count = [], len(stored.values)
    for process, process_states in enumerate(stored.values):
        file = training_states.KnownTorchFile()
        made: Mapping[str, Any] = training_states.generators(file, process_states, _RNG)
        states = {
            # On one process, the Trainer has the state of one device, not a list.
            kind: state[0] if isinstance(state, list) and count == 1 else state
            for kind, state in made.items()
        }
        states["cpu"] = states.pop("torch")
        name = "rng_state.pth" if count == 1 else f"rng_state_{process}.pth"
        files.append(file.planned(name, states))
    return files
