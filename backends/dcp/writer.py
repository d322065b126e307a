"""Writes torch's distributed checkpoints (DCP), as `FileSystemWriter` writes them.

Sources: torch/distributed/checkpoint/{metadata,filesystem,_traverse}.py. Arrays are cut into chunks
of their own size, so that loading onto any mesh reads little more than it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from unickpt.backends._files import torch_layout
from unickpt.backends._files.flat_names import refuse
from unickpt.backends._files.pickle_writer import PickledCall, dumps
from unickpt.backends._files.pickles import Global
from unickpt.backends._files.zip_layout import ZipLayout
from unickpt.errors import UnsupportedLeaf
from unickpt.extend import (
    Box,
    Data,
    Ending,
    Index,
    Leaf,
    Node,
    Plan,
    PlannedFile,
    child_names,
    cut_box,
    name_component,
    quoted,
    text_file,
    tree_from_json,
    unwrapped,
)

_CHUNK_BYTES = 64 << 20
_FILE_BYTES = 1 << 30
_OVERHEAD = 4096  # of a chunk's zip, at most
_DCP = "torch.distributed.checkpoint"
_KeyPath = tuple[str | int, ...]
_Visited = tuple[_KeyPath, Node | Leaf]
_MAPPINGS = ("dict", "ordereddict", "namedtuple", "object")


@dataclass(frozen=True)
class DcpWriter:
    """A folder that `torch.distributed.checkpoint.load` reads."""

    suffixes: ClassVar[Sequence[str]] = ()

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        refuse("dcp", torch_layout.missing_dtypes(index), {})
        root = unwrapped(tree_from_json(index.tree))
        if isinstance(root, Leaf) or root.kind not in _MAPPINGS:
            raise UnsupportedLeaf(
                "DCP stores dicts, and this checkpoint is a single leaf, a list or a tuple; put it "
                "below a name by a rule"
            )
        return _DcpPlanner(index, most_bytes).plan(root)


class _DcpPlanner:
    """Collects blobs and their metadata.

    Arguments:
        index: of the checkpoint.
        most_bytes: of a file.
    """

    def __init__(self, index: Index, most_bytes: int) -> None:
        self._index = index
        self._files = _Blobs(min(_FILE_BYTES, most_bytes))
        self._chunk_bytes = max(1, min(_CHUNK_BYTES, most_bytes - _OVERHEAD))
        self._described: dict[str, Any] = {}
        self._paths: dict[str, _KeyPath] = {}
        self._stored: dict[Any, Any] = {}
        self._of_array: dict[str, tuple[Any, list[tuple[Box, Any]]]] = {}
        self._arrays: dict[str, str] = {}
        self._values: dict[str, str] = {}

    def plan(self, root: Node) -> Plan:
        for path, node in self._visited(root, ()):
            name = ".".join(map(str, path))
            if name in self._paths:
                raise UnsupportedLeaf(
                    f"{quoted(list(self._paths[name]))} and {quoted(list(path))} would both be "
                    f"called {quoted(name)} in DCP; rename one of them by a rule"
                )
            self._paths[name] = path
            shown = "/".join(map(name_component, path))
            if isinstance(node, Leaf) and node.name in self._index.entries:
                self._add_array(name, node.name, shown)
            else:
                self._add_object(name, node, shown)
        metadata = _object(
            "metadata.Metadata",
            state_dict_metadata=self._described,
            planner_data=self._paths,
            storage_data=self._stored,
            storage_meta=_object("metadata.StorageMeta"),
            version="1.0.0",
        )
        last = text_file(".metadata", dumps(metadata), last=True)
        return Plan((*self._files.planned(), last), self._arrays, self._values)

    def _visited(self, node: Node | Leaf, path: _KeyPath) -> Iterator[_Visited]:
        """The values that DCP stores under names of their own, with their paths.

        That is all in dicts, and in lists that contain tensors or dicts; anything else is one
        value.
        """
        if isinstance(node, Leaf) or self._is_one_value(node):
            yield path, node
        elif node.kind == "wrapper":
            yield from self._visited(node.children[0], path)
        else:
            keys = node.keys if node.kind == "list" else map(str, node.keys)
            for key, child in zip(keys, node.children, strict=True):
                yield from self._visited(child, (*path, key))

    def _is_one_value(self, node: Node) -> bool:
        if node.kind != "list":
            return node.kind == "tuple"
        for child in map(unwrapped, node.children):
            if isinstance(child, Leaf):
                if child.name in self._index.entries:
                    return False
            elif child.kind in _MAPPINGS or not self._is_one_value(child):
                return False
        return True

    def _add_array(self, name: str, leaf: str, shown: str) -> None:
        stored = self._index.aliases.get(leaf, leaf)
        if stored not in self._of_array:  # tied arrays have several names, and one place
            self._of_array[stored] = self._blobs_of(stored)
        described, chunks = self._of_array[stored]
        self._described[name] = described
        for number, (box, place) in enumerate(chunks):
            key = _object("metadata.MetadataIndex", fqn=name, offset=_size(box.start), index=number)
            self._stored[key] = place
        self._arrays[leaf] = shown

    def _blobs_of(self, name: str) -> tuple[Any, list[tuple[Box, Any]]]:
        entry = self._index.arrays[name]
        whole = Box.whole(entry.shape)
        boxes = list(cut_box(whole, max(1, self._chunk_bytes // entry.itemsize))) or [whole]
        chunks = []
        for box in boxes:
            value = torch_layout.tensor(entry, box.shape, "0")
            storages = {"0": (name, box, box.size * entry.itemsize)}
            chunks.append((box, self._files.add(value, storages)))
        layout = PickledCall(Global("torch.serialization._get_layout"), ("torch.strided",))
        contiguous = PickledCall(Global(f"{_DCP}.metadata._MEM_FORMAT_ENCODING"), (0,))
        properties = _object("metadata.TensorProperties")
        properties.state = (Global(f"torch.{entry.dtype}"), layout, False, contiguous, False)
        kind = "metadata.ChunkStorageMetadata"
        places = [_object(kind, offsets=_size(box.start), sizes=_size(box.shape)) for box in boxes]
        facts = {"properties": properties, "size": _size(entry.shape), "chunks": places}
        described = _object("metadata.TensorStorageMetadata", **facts)
        return described, chunks

    def _add_object(self, name: str, node: Node | Leaf, within: str) -> None:
        """A plain value, or a list or tuple that DCP does not look into."""
        leaves: dict[str, Any] = {}
        storages: dict[str, tuple[str, Box, int]] = {}
        for leaf, shown in _below(node, within):
            stored = self._index.aliases.get(leaf, leaf)
            entry = self._index.arrays.get(stored)
            if entry is None:
                leaves[leaf] = self._index.values[leaf]
                self._values[leaf] = shown
                continue
            leaves[leaf] = torch_layout.tensor(entry, entry.shape, str(len(storages)))
            storages[str(len(storages))] = (stored, Box.whole(entry.shape), entry.nbytes)
            self._arrays[leaf] = shown
        value = torch_layout.object_of(node, leaves.__getitem__)
        self._described[name] = _object("metadata.BytesStorageMetadata")
        key = _object("metadata.MetadataIndex", fqn=name)
        self._stored[key] = self._files.add(value, storages)


@dataclass
class _Blobs:
    """Files of torch.save, one after the other in larger files.

    Arguments:
        most_bytes: of such a file.
    """

    most_bytes: int
    _zips: list[list[ZipLayout]] = field(default_factory=list)
    _size: int = 0

    def add(self, value: Any, storages: Mapping[str, tuple[str, Box, int]]) -> Any:
        """Adds one; returns where it is."""
        zipped = torch_layout.saved(value, storages, self._size)
        if not self._zips or self._size + zipped.size > self.most_bytes:
            self._zips.append([])
            self._size = 0
            zipped = torch_layout.saved(value, storages)
        self._zips[-1].append(zipped)
        file, begin = _name(len(self._zips) - 1), self._size
        self._size += zipped.size
        place = {"relative_path": file, "offset": begin, "length": zipped.size}
        return _object("filesystem._StorageInfo", **place)

    def planned(self) -> Iterator[PlannedFile]:
        for number, zips in enumerate(self._zips):
            texts = {offset: text for zipped in zips for offset, text in zipped.texts.items()}
            data: list[Data] = [data for zipped in zips for data in zipped.data]
            size = sum(zipped.size for zipped in zips)
            yield PlannedFile(_name(number), size, texts, tuple(data), _ending(zips))


def _name(number: int) -> str:
    return f"__{number}_0.distcp"


def _ending(zips: Sequence[ZipLayout]) -> Ending:
    def ending(sums: Sequence[int]) -> dict[int, bytes]:
        bytes_by_offset: dict[int, bytes] = {}
        first = 0
        for zipped in zips:
            bytes_by_offset |= zipped.ending(sums[first : first + len(zipped.data)])
            first += len(zipped.data)
        return bytes_by_offset

    return ending


def _below(node: Node | Leaf, name: str) -> Iterator[tuple[str, str]]:
    """The leaves of a value, with their names in it."""
    if isinstance(node, Leaf):
        yield node.name, name
        return
    names = child_names(node.kind, node.keys, name)
    for child, below in zip(node.children, names, strict=True):
        yield from _below(child, below)


def _object(kind: str, **fields: Any) -> PickledCall:
    """An object of one of DCP's classes."""
    return PickledCall(Global(f"{_DCP}.{kind}"), state=fields or None, is_new=True)


def _size(extents: Sequence[int]) -> PickledCall:
    return PickledCall(Global("torch.Size"), (tuple(extents),))
