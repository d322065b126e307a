"""Trees, and steps of Orbax's managers: a folder for their only item, and the files of a step.

Sources: orbax/checkpoint/checkpoint_manager.py, _src/handlers, _src/metadata/checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from unickpt.backends.orbax.tree_writer import tree_files
from unickpt.errors import UnsupportedLeaf
from unickpt.extend import (
    Index,
    Leaf,
    Plan,
    PlannedFile,
    SavedArrays,
    finite_or_text,
    step_metrics,
    text_file,
    tree_from_json,
    unwrapped,
)

ORBAX = "orbax"
"""The key of a checkpoint's metadata under which `unickpt.integrations.orbax` stores its own."""
_DEFAULT = "default"  # the item of a step that is saved without names of items
_COMMITTED = "commit_success.txt"
_HANDLERS = "orbax.checkpoint._src.handlers"
_TREE = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
_JSON = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"


def about(index: Index, handlers: Any) -> Iterator[PlannedFile]:
    """The files that mark a folder as a committed checkpoint.

    Arguments:
        handlers: of its items, or of itself.
    """
    metadata: dict[str, Any] = {"item_handlers": handlers, "metrics": {}, "performance_metrics": {}}
    try:
        created = int(datetime.fromisoformat(index.created).timestamp()) * 10**9
    except ValueError:  # it is not recorded
        created = 0
    if created > 0:
        metadata |= {"init_timestamp_nsecs": created, "commit_timestamp_nsecs": created}
    metadata["custom_metadata"] = {}
    yield text_file("_CHECKPOINT_METADATA", json.dumps(metadata), last=True)
    yield text_file(_COMMITTED, "written by unickpt", last=True)


def _committed(folder: str) -> PlannedFile:
    return text_file(f"{folder}/{_COMMITTED}", "written by unickpt")


# --- writer ---------------------------------------------------------------------------------------


CHUNK_BYTES = 64 << 20
_LAYOUTS = ("", "tree", "step")


@dataclass(frozen=True)
class OrbaxWriter:
    """A folder that `StandardCheckpointer` restores, or a step of a `CheckpointManager`.

    Arguments:
        layout: "tree", the default, for the folder of a tree; "step" for that of a step, which has
            the tree as its item `default`.

    Raises:
        ValueError: the layout is none of these.
    """

    layout: str = ""
    suffixes: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        if self.layout not in _LAYOUTS:
            raise ValueError(f"layout={self.layout!r} must be 'tree' or 'step'")

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        node = unwrapped(tree_from_json(index.tree))
        if isinstance(node, Leaf):
            raise UnsupportedLeaf(
                "Orbax stores trees, and this checkpoint is a single leaf; put it below a name by "
                "a rule"
            )
        stored = index.metadata.get(ORBAX)
        metadata: Mapping[str, Any] = stored if isinstance(stored, Mapping) else {}
        custom, arrays = metadata.get("custom_metadata"), SavedArrays.of_json(metadata)
        made = tree_files(index, node, min(CHUNK_BYTES, most_bytes), custom, arrays)
        if self.layout != "step":  # on object storage, the file that marks a tree comes last
            files = [*about(index, _TREE), *made.files]
            return Plan(tuple(files), made.arrays, made.values, others=made.others)
        made = made.within(_DEFAULT, "")
        files, handlers = [_committed(_DEFAULT), *made.files], {_DEFAULT: _TREE}
        if metrics := step_metrics(index.metadata):
            text = json.dumps({name: finite_or_text(value) for name, value in metrics.items()})
            files += [text_file("metrics/metrics", text), _committed("metrics")]
            handlers["metrics"] = _JSON
        files += about(index, handlers)
        return Plan(tuple(files), made.arrays, made.values, others=made.others)
