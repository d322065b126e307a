"""A tiny readable format, to prove the seam: a folder of .npy files with a JSON of their shapes."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout
from unickpt.errors import CheckpointCorrupt
from unickpt.format.chunk_grid import free_chunk
from unickpt.format.files import Files
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader_protocol import Reader, Request
from unickpt.format.writer_protocol import Data, Plan, PlannedFile, text_file
from unickpt.storage.locations import Location
from unickpt.trees import tree_json

_CHUNK_BYTES = 1 << 10


def write(path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
    path.mkdir(parents=True)
    for number, array in enumerate(arrays.values()):
        np.save(path / f"{number}.npy", array)
    shapes = {name: [list(array.shape), str(array.dtype)] for name, array in arrays.items()}
    (path / "shapes.json").write_text(json.dumps({"arrays": shapes, "values": dict(values)}))


class NpyReader(Reader):
    """Reads ranges of the files through memory maps."""

    format, version = "npy folder", ""

    def __init__(self, location: Location, folder: Path) -> None:
        self.location, self._folder = location, folder
        found = json.loads((folder / "shapes.json").read_text())
        self._files = {name: folder / f"{n}.npy" for n, name in enumerate(found["arrays"])}
        node = tree_json.from_names([*found["arrays"], *found["values"]])
        entries = {name: _entry(name, *facts) for name, facts in found["arrays"].items()}
        self.index = Index(tree_json.to_json(node), entries, values=found["values"])

    def read(self, requests: Sequence[Request]) -> Sequence[int]:
        for entry, part, number, out, _, _ in requests:
            box: Box = part.chunk_box(number)
            try:
                stored = np.load(self._files[entry.name], mmap_mode="r")
                out[...] = stored[box.slices]
            except (OSError, ValueError) as error:
                raise CheckpointCorrupt(
                    f"{self.location}: array {entry.name!r}: {error}"
                ) from error
        return ()


def _entry(name: str, shape: list[int], dtype: str) -> ArrayEntry:
    extents = tuple(shape)
    chunk = free_chunk(extents, np.dtype(dtype).itemsize, _CHUNK_BYTES)
    return ArrayEntry(name, extents, dtype, chunk, Layout.replicated(len(extents), 1))


class NpyWriter:
    """Writes a folder; its JSON comes last, and makes it a checkpoint."""

    suffixes: ClassVar[Sequence[str]] = ()

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        files = []
        for number, (name, entry) in enumerate(index.arrays.items()):
            head = io.BytesIO()
            facts = {"descr": entry.dtype, "fortran_order": False, "shape": entry.shape}
            facts["descr"] = np.lib.format.dtype_to_descr(np.dtype(entry.dtype))
            np.lib.format.write_array_header_1_0(head, facts)
            begin = head.tell()
            data = (Data(begin, name, Box.whole(entry.shape)),) if entry.nbytes else ()
            texts = {0: head.getvalue()}
            files.append(PlannedFile(f"{number}.npy", begin + entry.nbytes, texts, data))
        shapes = {n: [list(e.shape), e.dtype] for n, e in index.arrays.items()}
        told = json.dumps({"arrays": shapes, "values": dict(index.values)})
        files.append(text_file("shapes.json", told, last=True))
        return Plan(tuple(files), {n: n for n in index.names if n not in index.values},
                    {n: n for n in index.values})  # fmt: skip


class NpyFolder:
    """The format."""

    HINTS = ("known",)

    def open(self, files: Files, hints: Mapping[str, Any]) -> NpyReader | None:
        folder = Path(str(files.location))
        return NpyReader(files.location, folder) if "shapes.json" in files.here else None
