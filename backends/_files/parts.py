"""Parts of a checkpoint that are written as checkpoints of their own, each in its format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unickpt.extend import (
    ArrayEntry,
    Index,
    Leaf,
    Node,
    Plan,
    PlannedFile,
    Writer,
    leaves_of_tree,
    tree_from_json,
    tree_to_json,
)


@dataclass(frozen=True)
class FilePart:
    """Some leaves of a checkpoint, under names of their own.

    Arguments:
        index: as if they were a checkpoint.
        sources: the names of its leaves in the whole; without those that it does not have.
        stored: the names of its arrays in the whole.
    """

    index: Index
    sources: Mapping[str, str]
    stored: Mapping[str, str]

    @classmethod
    def of(cls, whole: Index, node: Node | Leaf) -> FilePart:
        """The part with a structure.

        Arguments:
            whole: the index of all.
            node: its leaves have their names in the whole; or none, and a plain value.

        Example:
            >>> leaf = Leaf("", 3)
            >>> node = Node("dict", ("step",), (leaf,), tuple)
            >>> FilePart.of(Index(None, {}), node).index.values
            {'step': 3}
        """
        structure = tree_to_json(node)
        entries = whole.entries
        arrays: dict[str, ArrayEntry] = {}
        aliases, sources, stored = dict[str, str](), dict[str, str](), dict[str, str]()
        first: dict[str, str] = {}  # names in the part, by those of their arrays
        values: dict[str, Any] = {}
        new_leaves = leaves_of_tree(tree_from_json(structure))
        for new, old in zip(new_leaves, leaves_of_tree(node), strict=True):
            if not old.name:
                values[new.name] = old.value
                continue
            sources[new.name] = old.name
            if old.name not in entries:
                values[new.name] = whole.values[old.name]
                continue
            entry = entries[old.name]
            if first.setdefault(entry.name, new.name) == new.name:
                arrays[new.name] = replace(entry, name=new.name)
                stored[new.name] = entry.name
            else:
                aliases[new.name] = first[entry.name]
        index = replace(whole, tree=structure, arrays=arrays, aliases=aliases, values=values)
        return cls(replace(index, per_process={}), sources, stored)

    def plan(self, writer: Writer, most_bytes: int, file: str | None = None) -> Plan:
        """The format's plan of the part, for the index of all; a file with a name of its own does
        not make the whole complete. As `Writer.plan`."""
        plan = writer.plan(self.index, most_bytes, file)
        values = {name: shown for name, shown in plan.values.items() if name in self.sources}
        return replace(
            plan,
            files=tuple(self._with_stored(planned, file is None) for planned in plan.files),
            arrays={self.sources[name]: shown for name, shown in plan.arrays.items()},
            values={self.sources[name]: shown for name, shown in values.items()},
            casts={self.stored[name]: dtype for name, dtype in plan.casts.items()},
            made={
                shown: self.index.values[name]
                for name, shown in plan.values.items()
                if name not in self.sources
            },
        )

    def _with_stored(self, file: PlannedFile, is_last: bool) -> PlannedFile:
        data = tuple(replace(piece, array=self.stored[piece.array]) for piece in file.data)
        return replace(file, data=data, last=file.last and is_last)


def together(parts: Mapping[str, Plan], more: Sequence[PlannedFile] = ()) -> Plan:
    """One plan of several checkpoints in a folder.

    Arguments:
        parts: by the names of their files; see `Plan.parts`.
        more: further files. One that is copied gives way to one of the same name.
    """
    files = [*(file for plan in parts.values() for file in plan.files), *more]
    made = {file.name for file in files if file.copied is None}
    files = [file for file in files if file.copied is None or file.name not in made]
    arrays = {name: shown for plan in parts.values() for name, shown in plan.arrays.items()}
    casts = {name: dtype for plan in parts.values() for name, dtype in plan.casts.items()}
    return Plan(tuple(files), arrays, casts=casts, parts=parts)
