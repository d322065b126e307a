"""The JSON of an index, and its validation: an index from a storage is untrusted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import UNSET, Meta, UnsetType

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box, fill_exactly, overlap
from unickpt.arrays.layout import Layout, Mesh
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.format import codec_json
from unickpt.format.growth import Growth
from unickpt.format.index import (
    CHOSEN_FORMAT,
    CHOSEN_PATCHED_FORMAT,
    FORMAT,
    GROWN_FORMAT,
    MAX_EXTENT,
    MAX_RANK,
    NEWEST_FORMAT,
    PATCHED_FORMAT,
    ArrayEntry,
    BaseEntry,
    DigestBlocks,
    Encoding,
    Index,
    PerProcessEntry,
    shape_problem,
)
from unickpt.quantized import codes
from unickpt.quoting import quoted
from unickpt.trees import tree_json
from unickpt.trees.tree_json import BadJSON

T = TypeVar("T")
_FOLDER = re.compile(r"[^/\\\0]+")
_SEAL = re.compile(rb',"xxh3":"([0-9a-f]{16})"}\Z')
_DIGEST = re.compile(r"[0-9a-f]{16}")
_Extent = Annotated[int, Meta(ge=0, lt=MAX_EXTENT)]
_Positive = Annotated[int, Meta(ge=1, lt=MAX_EXTENT)]
_Error = Annotated[float, Meta(ge=0)]
_Extents = tuple[_Extent, ...]
_Growth = tuple[_Extent, _Extent, _Extent, _Extent, _Extent]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$", max_length=16)]
_Blobs = list[list[Any]]
_Blob = tuple[_Extent, _Digest, Annotated[int, Meta(ge=1)] | None]


class _MeshBody(msgspec.Struct):
    axes: tuple[str, ...]
    shape: tuple[_Positive, ...]
    processes: _Extents


class _LayoutBody(msgspec.Struct):
    mesh: _Extent
    dims: tuple[tuple[str, ...], ...]


class _BaseBody(msgspec.Struct):
    name: str
    manifest: str


class _ArrayBody(msgspec.Struct):
    """An array as stored, its members in the order in which `encode` writes them."""

    shape: _Extents
    dtype: str
    chunk: tuple[_Positive, ...]
    errors: tuple[_Error, _Error] | UnsetType = UNSET
    layout: int | UnsetType = UNSET
    cut: _Extents | UnsetType = UNSET
    boxes: list[tuple[_Extents, _Extents, _Extents]] | UnsetType = UNSET
    prng: str | UnsetType = UNSET
    patched: _Positive | UnsetType = UNSET
    patches: _Positive | UnsetType = UNSET
    encoding: int | UnsetType = UNSET


_ARRAY = msgspec.json.Decoder(_ArrayBody)


class _IndexBody(msgspec.Struct):
    """The members of an index beside its arrays."""

    library: str
    created: str
    attempt: str
    processes: int
    metadata: dict[str, Any]
    meshes: list[_MeshBody]
    layouts: list[_LayoutBody]
    aliases: dict[str, Any]
    values: dict[str, Any]
    per_process: dict[str, Any]
    codecs: list[Any]
    chunks: int
    digests: str
    tree: Any = None
    digest_blocks: list[Any] = []
    reused: _Extent = 0
    bases: list[_BaseBody] = []
    borrowed: list[Any] = []
    growth: _Growth | None = None
    encodings: list[list[Any]] = []


class _Shared(NamedTuple):
    """What arrays refer to by number."""

    layouts: list[Layout]
    encodings: list[Encoding]


def encode(index: Index) -> bytes:
    """The index as JSON, sealed by the xxh3-64 of all bytes before the seal."""
    meshes: dict[Mesh, int] = {}
    layouts: dict[Layout, int] = {}
    found = dict.fromkeys(entry.encoding for entry in index.arrays.values())
    encodings = [encoding for encoding in found if encoding is not None]
    numbers = {encoding: number for number, encoding in enumerate(encodings)}
    arrays = _arrays_to_json(index.arrays.values(), meshes, layouts, numbers)
    version = _version(index, encodings)
    head = {
        "format": f"{version[0]}.{version[1]}",
        "library": index.library,
        "created": index.created,
        "attempt": index.attempt,
        "processes": index.processes,
        "metadata": index.metadata,
        "tree": index.tree,
        "meshes": [{"axes": m.axes, "shape": m.shape, "processes": m.processes} for m in meshes],
        "layouts": [{"mesh": meshes[x.mesh], "dims": x.dims} for x in layouts],
    }
    body = {
        "aliases": dict(index.aliases),
        "values": {name: tree_json.value_to_json(v) for name, v in index.values.items()},
        "per_process": {
            name: [_blob_to_json(*entry.of(p)) for p in range(len(entry.blobs))]
            for name, entry in index.per_process.items()
        },
        "codecs": list(index.codecs),
        "chunks": index.chunks,
        "digests": index.digests_xxh3,
    }
    if index.digest_blocks is not None:
        digests = "".join(f"{digest:016x}" for digest in index.digest_blocks.digests)
        body["digest_blocks"] = [index.digest_blocks.rows, digests]
    if index.reused:
        body["reused"] = index.reused
    if index.bases:
        body["bases"] = [{"name": base.name, "manifest": base.manifest} for base in index.bases]
        body["borrowed"] = [index.borrowed, index.borrowed_xxh3]
    if index.growth is not None:
        body["growth"] = astuple(index.growth)
    if encodings:
        body["encodings"] = [codec_json.as_codecs(encoding) for encoding in encodings]
    before, after = _text(head)[:-1].encode(), _text(body)[1:-1].encode()
    unsealed = b'%b,"arrays":%b,%b' % (before, arrays, after)
    return unsealed + b',"xxh3":"%016x"}' % xxhash.xxh3_64_intdigest(unsealed)


def _version(index: Index, encodings: Sequence[Encoding]) -> tuple[int, int]:
    """The lowest version that has all that an index says."""
    if any(encodings):
        return NEWEST_FORMAT
    if any(entry.patched for entry in index.arrays.values()) or any(
        entry.is_binary for entry in index.per_process.values()
    ):
        return CHOSEN_PATCHED_FORMAT if encodings else PATCHED_FORMAT
    return CHOSEN_FORMAT if encodings else GROWN_FORMAT if index.growth else FORMAT


_TEXT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)
_text = _TEXT.encode


def _arrays_to_json(
    entries: Iterable[ArrayEntry],
    meshes: dict[Mesh, int],
    layouts: dict[Layout, int],
    encodings: Mapping[Encoding, int],
) -> bytes:
    """The JSON of all arrays. Numbers the meshes and layouts; encodings have numbers."""
    known: dict[int, int] = {}  # by identity: comparing layouts takes longer
    bodies = {}
    for entry in entries:
        layout, at = entry.layout, None
        if layout is not None:
            at = known.get(id(layout))
            if at is None:
                meshes.setdefault(layout.mesh, len(meshes))
                at = known[id(layout)] = layouts.setdefault(layout, len(layouts))
        bodies[entry.name] = _array_body(entry, at)
        if entry.encoding is not None:
            bodies[entry.name].encoding = encodings[entry.encoding]
    return tree_json.ENCODER.encode(bodies)


def _array_body(entry: ArrayEntry, layout: int | None) -> _ArrayBody:
    boxes: Any = UNSET
    if entry.boxes is not None:
        boxes = [(box.start, box.stop, holders) for box, holders in entry.boxes]
    return _ArrayBody(
        entry.shape,
        entry.dtype if entry.quantized is None else codes.joined(entry.dtype, entry.quantized),
        entry.chunk,
        UNSET if entry.quantized is None else entry.errors,
        UNSET if layout is None else layout,
        entry.cut or UNSET,
        boxes,
        UNSET if entry.prng is None else entry.prng,
        entry.patched or UNSET,
        entry.patches or UNSET,
    )


def decode(data: bytes, where: str, *, partial: bool = False) -> Index:
    """Reads and checks an index.

    Arguments:
        data: the bytes of `unickpt.json`; untrusted.
        where: the checkpoint's path, for messages.
        partial: whether it is one process's description, whose boxes need not cover the arrays.

    Raises:
        UnsupportedFormat: written in a newer major version.
        CheckpointCorrupt: anything else is wrong; says what.
    """
    try:
        seal = _SEAL.search(data)
        stored = tree_json.members(data, "index")
        body = {key: tree_json.parsed(raw) for key, raw in stored.items() if key != "arrays"}
        _check_version(body.get("format"), where)
        if seal is None or int(seal[1], 16) != xxhash.xxh3_64_intdigest(data[: seal.start()]):
            raise BadJSON("its seal does not match its bytes")
        index = _decode(body, stored.get("arrays", msgspec.Raw(b"null")), partial)
        if tree_json.has_opaque(data):
            index = replace(index, values=tree_json.with_opaque(index.tree, index.values))
        return index
    except tree_json.BadTree as error:
        raise CheckpointCorrupt(f"{where}: the index is damaged: {error}") from None
    except (BadJSON, tree_json.BadValue) as error:
        raise CheckpointCorrupt(f"{where}: the index is damaged: {error}") from None


@dataclass(frozen=True)
class IndexParts:
    """The members of an index that saves of one tree have in common, and the others.

    Arguments:
        tree: the tree, and the names of values and of values per process.
        arrays: the arrays, and what these refer to.
        others: all other members, parsed.
    """

    tree: bytes
    arrays: bytes
    others: Mapping[str, Any]

    @classmethod
    def of(cls, data: bytes) -> IndexParts:
        """The parts of an index, which are not checked.

        Raises:
            BadJSON: it is no JSON.
        """
        stored = tree_json.members(data, "index")
        tree = bytes(stored.pop("tree"))
        processes = bytes(stored["processes"])
        arrays = [bytes(stored.pop(key, b"")) for key in _OF_ARRAYS]
        others = {key: tree_json.parsed(raw) for key, raw in stored.items()}
        names = _text([list(others["values"]), list(others["per_process"])]).encode()
        return cls(b"%b\0%b" % (tree, names), b"\0".join([processes, *arrays]), others)

    def check_others(self) -> None:
        """Checks the other members as `decode` does.

        Raises:
            BadJSON, BadValue: says what is wrong.
        """
        empty: dict[str, Any] = {"meshes": [], "layouts": [], "aliases": {}}
        _decode({**self.others, **empty}, msgspec.Raw(b"{}"), partial=False)


_OF_ARRAYS = ("meshes", "layouts", "arrays", "aliases", "encodings")


def _made(kind: Callable[..., T], *fields: Any) -> T:
    """An object built from stored fields; BadJSON if its class refuses them."""
    try:
        return kind(*fields)
    except ValueError as error:
        raise BadJSON(str(error)) from None


def _check_version(version: Any, where: str) -> None:
    match = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", version) if isinstance(version, str) else None
    if match is None:
        raise BadJSON(f"its format version is {quoted(version)}")
    if int(match[1]) < 1:
        raise BadJSON(f"its format version is {version}, but the lowest version is 1.0")
    if int(match[1]) > NEWEST_FORMAT[0]:
        raise UnsupportedFormat(
            f"{where}: written in format {version}; this unickpt reads up to major version "
            f"{NEWEST_FORMAT[0]}. Install a newer unickpt."
        )


def _decode(body: dict[str, Any], stored: msgspec.Raw, partial: bool) -> Index:
    members: _IndexBody = tree_json.typed(body, _IndexBody, "index")
    processes = members.processes
    if not 0 < processes < 1 << 31:
        raise BadJSON(f"it names {processes} processes")
    meshes = [_mesh(mesh) for mesh in members.meshes]
    layouts = [_layout(layout, meshes) for layout in members.layouts]
    shared = _Shared(
        layouts, [codec_json.encoding_of(codec_json.checked(each)) for each in members.encodings]
    )
    arrays = _arrays(tree_json.members(stored, "index: 'arrays'"), shared, partial)
    for alias, target in members.aliases.items():
        if not isinstance(target, str) or target not in arrays:
            raise BadJSON(f"alias {quoted(alias)} names {quoted(target)}, which is not an array")
    per_process = {
        name: _per_process(blobs, f"per-process leaf {quoted(name)}")
        for name, blobs in members.per_process.items()
    }
    _check_names([*arrays, *members.aliases, *members.values, *per_process])
    _check_processes(processes, meshes, arrays, per_process, partial)
    return Index(
        tree=members.tree,
        arrays=arrays,
        aliases=members.aliases,
        values={name: _value(name, stored) for name, stored in members.values.items()},
        per_process=per_process,
        metadata=members.metadata,
        codecs=codec_json.checked(members.codecs) if members.codecs else (),
        processes=processes,
        attempt=members.attempt,
        created=members.created,
        library=members.library,
        chunks=members.chunks,
        digests_xxh3=members.digests,
        digest_blocks=_digest_blocks(members),
        reused=members.reused,
        growth=None if members.growth is None else Growth(*members.growth),
        **_borrowed(members),
    )


def _value(name: str, stored: Any) -> tree_json.Plain:
    try:
        return tree_json.value_from_json(stored)
    except tree_json.BadValue as error:
        raise tree_json.BadValue(f"leaf {quoted(name)}: {error}") from None


def _digest_blocks(members: _IndexBody) -> DigestBlocks | None:
    match members.digest_blocks:
        case []:
            return None
        case [int(rows), str(text)] if rows is not True and 0 < rows < MAX_EXTENT:
            digests = _DIGEST.findall(text)
            if len(text) == 16 * len(digests) and len(digests) == -(-members.chunks // rows):
                return DigestBlocks(rows, tuple(int(digest, 16) for digest in digests))
    raise BadJSON("'digest_blocks' does not fit the number of chunks")


def _borrowed(members: _IndexBody) -> dict[str, Any]:
    """What is borrowed, and from which checkpoints beside this one."""
    bases = tuple(BaseEntry(base.name, base.manifest) for base in members.bases)
    if not bases:
        return {}
    for base in bases:
        # One folder beside this one: it must lead nowhere else.
        if base.name in ("", ".", "..") or not _FOLDER.fullmatch(base.name):
            raise BadJSON(f"a base is {quoted(base.name)}, which is no name of a folder")
    if len({base.name for base in bases}) != len(bases):
        raise BadJSON("it names a base twice")
    match members.borrowed:
        case [int(count), str(digest)] if count is not True and 0 < count < MAX_EXTENT:
            return {"bases": bases, "borrowed": count, "borrowed_xxh3": digest}
    raise BadJSON(f"'borrowed' is {quoted(members.borrowed)}")


def _check_names(names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise BadJSON("two leaves have the same name")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise BadJSON(f"the name {quoted(name)} is not valid Unicode") from None


def _check_processes(
    processes: int,
    meshes: Sequence[Mesh],
    arrays: Mapping[str, ArrayEntry],
    per_process: Mapping[str, PerProcessEntry],
    partial: bool,
) -> None:
    """Checks that only processes that took part are named, and that each has its own values."""
    for mesh in meshes:
        if max(mesh.processes, default=0) >= processes:
            raise BadJSON(f"a mesh names process {max(mesh.processes)} of {processes}")
    for name, entry in arrays.items():
        for box, holders in entry.boxes or ():
            if max(holders) >= processes:
                raise BadJSON(
                    f"array {quoted(name)}: process {max(holders)} of {processes} holds {box}"
                )
    for name, own in per_process.items():
        if not partial and len(own.blobs) != processes:
            raise BadJSON(
                f"per-process leaf {quoted(name)} has {len(own.blobs)} values of {processes}"
            )


def _mesh(body: _MeshBody) -> Mesh:
    if len(body.axes) > MAX_RANK:
        raise BadJSON(f"a mesh has {len(body.axes)} axes, more than {MAX_RANK}")
    return _made(Mesh, body.axes, body.shape, body.processes)


def _layout(body: _LayoutBody, meshes: list[Mesh]) -> Layout:
    if body.mesh >= len(meshes):
        raise BadJSON(f"a layout names mesh {body.mesh} of {len(meshes)}")
    return _made(Layout, meshes[body.mesh], body.dims)


def _arrays(
    stored: Mapping[str, msgspec.Raw], shared: _Shared, partial: bool
) -> dict[str, ArrayEntry]:
    """The entries of all arrays; what is stored alike for many, as for layers of a model, is
    checked once."""
    known: dict[bytes, ArrayEntry] = {}
    arrays = {}
    for name, raw in stored.items():
        data = bytes(raw)
        same = known.get(data)
        if same is None:
            body = tree_json.decoded(_ARRAY, data, "array", name)
            known[data] = arrays[name] = _array(name, body, shared, partial)
            continue
        arrays[name] = ArrayEntry(
            name, same.shape, same.dtype, same.chunk, same.layout, same.cut, same.boxes,
            same.prng, same.quantized, same.errors, same.patched,
            same.patches, same.encoding,
        )  # fmt: skip
    return arrays


def _array(name: str, body: _ArrayBody, shared: _Shared, partial: bool) -> ArrayEntry:
    shape, chunk = body.shape, body.chunk
    try:
        dtype, quantized, itemsize = _dtype(body.dtype)
    except TypeError as error:
        raise BadJSON(f"array {quoted(name)}: {error}") from None
    if problem := shape_problem(shape, itemsize):
        raise BadJSON(f"array {quoted(name)}: {problem}")
    if len(chunk) != len(shape) or math.prod(chunk) * itemsize >= MAX_EXTENT:
        raise BadJSON(
            f"array {quoted(name)}: shape {quoted(shape)} and chunk {quoted(chunk)} do not fit"
        )
    layouts, layout, boxes = shared.layouts, None, None
    cut: tuple[int, ...] = ()
    if body.layout is not UNSET:
        at = body.layout
        if not 0 <= at < len(layouts) or len(layouts[at].dims) != len(shape):
            raise BadJSON(f"array {quoted(name)}: layout {at} does not fit shape {quoted(shape)}")
        layout = layouts[at]
    if body.cut is not UNSET:
        cut = body.cut
        if layout is None or list(cut) != sorted(set(cut)) or cut[-1:] >= (len(shape),):
            raise BadJSON(f"array {quoted(name)}: is cut along dimensions {quoted(cut)}")
    if body.boxes is not UNSET:
        boxes = _boxes(name, body.boxes, shape, partial)
    if (layout is None) == (boxes is None):
        raise BadJSON(f"array {quoted(name)}: needs either a layout or boxes")
    errors = (0.0, 0.0)
    if quantized is not None:
        if body.errors is UNSET or not all(map(math.isfinite, body.errors)):
            raise BadJSON(f"array {quoted(name)}: its errors are {quoted(body.errors)}")
        errors = body.errors
    prng = None if body.prng is UNSET else body.prng
    patched = 0 if body.patched is UNSET else body.patched
    patches = 0 if body.patches is UNSET else body.patches
    if (patches and patches < patched) or (patches and not patched):
        raise BadJSON(f"array {quoted(name)}: has {patched} patched chunks, and {patches} patches")
    if quantized is not None and patched and not patches:
        raise BadJSON(f"array {quoted(name)}: is quantised and has patches of format 2")
    encoding = None
    if body.encoding is not UNSET:
        if not 0 <= body.encoding < len(shared.encodings) or quantized is not None:
            raise BadJSON(f"array {quoted(name)}: it cannot have encoding {body.encoding}")
        encoding = shared.encodings[body.encoding]
    return ArrayEntry(
        name, shape, dtype, chunk, layout, cut, boxes, prng, quantized, errors, patched, patches,
        encoding,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _dtype(stored: str) -> tuple[str, str | None, int]:
    """The dtype of an array's elements, how they are quantised, and the bytes of one.

    Raises:
        TypeError: there is none of this name.
    """
    dtype, quantized = codes.split(stored)
    return dtype, quantized, dtypes.from_name(dtype).itemsize


def _boxes(
    name: str,
    items: Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    shape: tuple[int, ...],
    partial: bool,
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    boxes = []
    at = f"array {quoted(name)}: boxes"
    for item in items:
        start, stop, holders = item
        if len(start) != len(shape) or not holders:
            raise BadJSON(f"{at}: {quoted(item)} does not fit shape {quoted(shape)}")
        boxes.append((_made(Box, start, stop), holders))
    plain = [box for box, _ in boxes]
    whole = Box.whole(shape)
    size = sum(b.size for b in plain)
    if any(b.empty or not whole.contains(b) for b in plain):
        raise BadJSON(f"{at} are empty or lie outside shape {shape}")
    if not partial and size < whole.size:
        raise BadJSON(f"{at} do not cover shape {shape}")
    # Boxes that cover a shape and have its total size do not overlap.
    if overlap(plain) is not None if partial else not fill_exactly(whole, plain):
        raise BadJSON(f"{at} overlap")
    return tuple(boxes)


def _blob_to_json(size: int, digest: int, head: int) -> list[Any]:
    return [size, f"{digest:016x}", *([head] if head else [])]


def _per_process(blobs: Any, at: str) -> PerProcessEntry:
    found: list[tuple[int, str, int | None]] = [
        tree_json.typed([*blob, *[None] * (len(blob) == 2)], _Blob, at)
        for blob in tree_json.typed(blobs, _Blobs, at)
    ]
    heads = tuple(head or 0 for _, _, head in found)
    for (size, *_), head in zip(found, heads, strict=True):
        if head > size:
            raise BadJSON(f"{at}: its head has {head} bytes, all of it {size}")
    table = tuple((size, int(digest, 16)) for size, digest, _ in found)
    return PerProcessEntry(table, heads if any(heads) else ())
