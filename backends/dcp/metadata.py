"""The `.metadata` of torch's distributed checkpoints: which chunk of which tensor is where.

Source: torch/distributed/checkpoint/metadata.py. Nothing of torch is imported: the classes in the
pickle are known by their names only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import add, le
from typing import Any

from unickpt.backends._files import pickles, torch_tensors
from unickpt.backends._files.pickles import BadPickle, Global, PickledObject
from unickpt.errors import UnsupportedFormat
from unickpt.extend import MAX_DEPTH, Box, quoted

ROOTS = (
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed._shard.checkpoint.metadata.Metadata",  # until torch 1.13
)
"""The classes of torch's own metadata; other systems derive theirs from it."""
_ZSTD = ["stream.zstd/1"]
_TORCH = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
_MOST_EXTENT = 1 << 62
_MOST_DIMENSIONS = 32
_LEAST_CHUNK = 16  # bytes that a chunk takes in the pickle
KeyPath = tuple[str | int, ...]
"""The keys of nested containers."""


@dataclass(frozen=True)
class Blob:
    """Where something is stored.

    Arguments:
        file: below the checkpoint's location.
        offset, length: its bytes in the file; for safetensors the length is the tensor's alone.
        compressed: whether the bytes are one zstd stream.
    """

    file: str
    offset: int
    length: int
    compressed: bool = False


@dataclass(frozen=True)
class DcpChunk:
    """A box of a tensor, and where it is."""

    box: Box
    blob: Blob


@dataclass(frozen=True)
class TensorFacts:
    """A tensor.

    Arguments:
        dtype: the checkpoint's name of its dtype.
        shape: global.
        chunks: those that are not empty, in the order of the metadata.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True)
class Metadata:
    """The content of a `.metadata`.

    Arguments:
        tensors: by name.
        objects: where all other values are, by name.
        names: of both, in the order of the metadata.
        paths: of the names in the state that was saved, as far as recorded.
        version: of the metadata; empty if it has none.
        added: fields that other systems add to torch's metadata, as pickled: by the name of the
            field.
    """

    tensors: Mapping[str, TensorFacts]
    objects: Mapping[str, Blob]
    names: tuple[str, ...]
    paths: Mapping[str, KeyPath]
    version: str
    added: Mapping[str, Any]

    @cached_property
    def compressed(self) -> Mapping[str, str]:
        """The files with compressed data, and a name of something in each."""
        blobs = [(name, c.blob) for name, facts in self.tensors.items() for c in facts.chunks]
        return {b.file: name for name, b in [*blobs, *self.objects.items()] if b.compressed}


def read(data: bytes, where: str, roots: Collection[str] = ROOTS) -> Metadata | None:
    """Reads a `.metadata`.

    Arguments:
        data: its bytes; untrusted.
        where: its description, for messages.
        roots: the classes of the metadata of the format.

    Returns:
        None if it belongs to another format, such as ByteCheckpoint.

    Raises:
        BadPickle: it is damaged.
        UnsupportedFormat: it uses features that unickpt does not read.
    """
    root = pickles.read(data, torch_tensors.CONSTRUCTORS)
    if not isinstance(root, PickledObject):
        raise BadPickle("it holds no metadata")
    if root.name not in roots:
        return None
    return _Decoder(root, len(data) // _LEAST_CHUNK, where).metadata()


class _Decoder:
    """Takes the pickled objects apart.

    Arguments:
        root: the metadata.
        most: of chunks; shared objects of a pickle could stand for any number of them.
        where: for messages.
    """

    def __init__(self, root: PickledObject, most: int, where: str) -> None:
        self._root, self._most, self._where = fields(root, "Metadata"), most, where
        self._stored: dict[tuple[str, tuple[int, ...] | None], Blob] = {}

    def metadata(self) -> Metadata:
        for key, value in _items(self._root.get("storage_data"), "storage_data"):
            self._add_stored(key, value)
        tensors, objects = dict[str, TensorFacts](), dict[str, Blob]()
        described = _items(self._root.get("state_dict_metadata"), "state_dict_metadata")
        for name, facts in described:
            if not isinstance(name, str):
                raise BadPickle(f"the name {quoted(name)} is no text")
            kind = facts.name.rpartition(".")[2] if isinstance(facts, PickledObject) else ""
            if kind == "BytesStorageMetadata":
                objects[name] = self._blob(name, None)
            else:
                tensors[name] = self._tensor(name, fields(facts, "TensorStorageMetadata"))
        version = self._root.get("version")
        version = version if isinstance(version, str) and len(version) < 20 else ""
        added = {field: value for field, value in self._root.items() if field not in _TORCH}
        names = tuple(name for name, _ in described)
        return Metadata(tensors, objects, names, self._paths(), version, added)

    def _add_stored(self, key: Any, value: Any) -> None:
        index, facts = fields(key, "MetadataIndex"), fields(value, "_StorageInfo")
        name, offset = index.get("fqn"), index.get("offset")
        if not isinstance(name, str):
            raise BadPickle("the storage of something without a name")
        transforms = facts.get("transform_descriptors")
        if transforms and transforms != _ZSTD:
            if not isinstance(transforms, list) or not all(type(x) is str for x in transforms):
                raise BadPickle(f"the transforms of {quoted(name)} are no list of texts")
            raise UnsupportedFormat(
                f"{self._where}: {quoted(name)} was stored through {quoted(transforms)}; unickpt "
                "only knows stream.zstd/1. Load it with torch, and save it without extensions"
            )
        begin, length = extents(
            (facts.get("offset"), facts.get("length")), "the place of a storage"
        )
        start = None if offset is None else extents(offset, "an offset")
        # Replicas may be listed again; torch takes the last one, too.
        self._stored[name, start] = Blob(
            _file(facts.get("relative_path")), begin, length, bool(transforms)
        )

    def _blob(self, name: str, offset: tuple[int, ...] | None) -> Blob:
        blob = self._stored.get((name, offset))
        if blob is None:
            what = quoted(name) if offset is None else f"{quoted(name)} at {list(offset)}"
            raise BadPickle(f"it does not say where {what} is stored")
        return blob

    def _tensor(self, name: str, facts: Mapping[str, Any]) -> TensorFacts:
        shape = extents(facts.get("size"), f"the shape of {quoted(name)}")
        chunks = facts.get("chunks")
        if not isinstance(chunks, list):
            raise BadPickle(f"{quoted(name)} has no list of chunks")
        self._most -= len(chunks)
        if self._most < 0:
            raise BadPickle("it lists more chunks than its size allows")
        # A replica that is listed again is the same: there is one place for each offset.
        what = f"a chunk of {quoted(name)}"
        boxes = dict.fromkeys(
            _box(what, shape, fields(chunk, "ChunkStorageMetadata")) for chunk in chunks
        )
        dcp_chunks = tuple(
            DcpChunk(box, self._blob(name, box.start)) for box in boxes if not box.empty
        )
        return TensorFacts(self._dtype(name, facts.get("properties")), shape, dcp_chunks)

    def _dtype(self, name: str, properties: Any) -> str:
        state = properties.state if isinstance(properties, PickledObject) else None
        # TensorProperties are pickled as a tuple; the dtype is the first.
        dtype = state[0] if isinstance(state, tuple) and state else None
        dtype = state.get("dtype") if isinstance(state, dict) else dtype
        if not isinstance(dtype, Global):
            raise BadPickle(f"{quoted(name)} has no dtype")
        try:
            return torch_tensors.dtype_of(dtype)
        except BadPickle as error:
            raise UnsupportedFormat(f"{self._where}: {quoted(name)}: {error}") from None

    def _paths(self) -> dict[str, KeyPath]:
        """The paths; other planners than torch's own may store anything in their place."""
        planner_data = self._root.get("planner_data")
        return {
            name: path
            for name, path in (planner_data.items() if isinstance(planner_data, dict) else ())
            if isinstance(name, str)
            and isinstance(path, tuple)
            and len(path) <= MAX_DEPTH
            and all(type(key) in (str, int) for key in path)
        }


def _box(what: str, shape: tuple[int, ...], facts: Mapping[str, Any]) -> Box:
    start = extents(facts.get("offsets"), what)
    sizes = extents(facts.get("sizes"), what)
    if len(start) == len(sizes) == len(shape):
        stop = tuple(map(add, start, sizes))
        if 0 in sizes or all(map(le, stop, shape)):
            return Box(start, stop)
    raise BadPickle(
        f"{what} at {list(start)} of {list(sizes)} lies outside of its shape {list(shape)}"
    )


def fields(obj: Any, kind: str) -> Mapping[str, Any]:
    """The fields of an object of a class, whose name has no module.

    Raises:
        BadPickle: it is something else.
    """
    if not isinstance(obj, PickledObject) or not obj.function.name.endswith(f".{kind}"):
        what = obj.name if isinstance(obj, PickledObject) else type(obj).__name__
        raise BadPickle(f"a {kind} is expected, {quoted(what)} found")
    if not isinstance(obj.state, dict):
        raise BadPickle(f"a {kind} has no fields")
    return obj.state


def _items(value: Any, what: str) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise BadPickle(f"its {what} is no dict")
    return list(value.items())


def extents(value: Any, what: str) -> tuple[int, ...]:
    """A shape, or a position.

    Raises:
        BadPickle: it is something else.
    """
    if not isinstance(value, tuple) or len(value) > _MOST_DIMENSIONS:
        raise BadPickle(f"{what} is no tuple of sizes")
    for n in value:
        if type(n) is not int or not 0 <= n < _MOST_EXTENT:
            raise BadPickle(f"{what} is no tuple of sizes")
    return value


def _file(path: Any) -> str:
    """A path below the checkpoint; nothing else on the machine is opened."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise BadPickle("a storage has no file")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise BadPickle(f"it names the file {quoted(path)}")
    return path
