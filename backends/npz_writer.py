"""Writes NumPy's .npz files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.foreign.flat_names import flat_names, nested_name, plain_values, refuse
from unickpt.foreign.zip_layout import Content, ZipLayout
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.writer import Plan, PlannedFile
from unickpt.trees import tree, tree_json


@dataclass(frozen=True)
class NpzWriter:
    """One file; tied arrays are written once for each of their names."""

    suffixes: ClassVar[Sequence[str]] = (".npz",)

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        # NumPy writes dtypes of other packages, and forgets which they were.
        missing = [
            entry
            for entry in index.arrays.values()
            if dtypes.from_name(entry.dtype).type.__module__ != "numpy"
        ]
        refuse("npz", missing, plain_values(index))
        names = flat_names(index)
        contents = [
            Content(
                f"{names[name]}.npy",
                _header(entry),
                entry.name,
                Box.whole(entry.shape),
                entry.nbytes,
            )
            for name, entry in index.entries.items()
        ]
        zipped = ZipLayout(contents)
        planned = PlannedFile(
            file or "arrays.npz", zipped.size, zipped.texts, tuple(zipped.data), zipped.ending,
            last=True,
        )  # fmt: skip
        return Plan((planned,), _shown({name: names[name] for name in index.entries}))


def _header(entry: ArrayEntry) -> bytes:
    head = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtypes.from_name(entry.dtype).newbyteorder("<"))
    facts = {"descr": descr, "fortran_order": False, "shape": entry.shape}
    np.lib.format.write_array_header_1_0(head, facts)
    return head.getvalue()


def _shown(names: dict[str, str]) -> dict[str, str]:
    """The names as unickpt reads them: as containers, unless one is both a leaf and a container."""
    nested = {name: nested_name(text) for name, text in names.items()}
    try:
        tree_json.from_names(nested.values())
    except ValueError:
        return {name: tree.component(text) for name, text in names.items()}
    return nested
