"""The JSON of an index, and its validation: an index from a storage is untrusted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import UNSET, Meta, UnsetType

from unickpt._version import LIBRARY
from unickpt.arrays import dtypes
from unickpt.arrays.box import Box, fill_exactly, overlap
from unickpt.arrays.layout import Layout, Mesh
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.format import codec_protocol
from unickpt.format.index import (
    CODEC_PREFIX,
    COMPRESS,
    FEATURES,
    FORMAT,
    INCREMENTAL,
    MAX_EXTENT,
    MAX_RANK,
    PATCHES,
    REFERENCES,
    SECTIONS,
    ArrayEntry,
    BaseEntry,
    DigestBlocks,
    Encoding,
    Index,
    PerProcessEntry,
    shape_problem,
)
from unickpt.quoting import first_few, quoted
from unickpt.trees import tree_json
from unickpt.trees.tree_json import BadJSON

T = TypeVar("T")
_FOLDER = r"[^/\\\0]+"
_SEAL = re.compile(rb',"xxh3":"([0-9a-f]{16})"}\Z')
_DIGEST = re.compile(r"[0-9a-f]{16}")
_Extent = Annotated[int, Meta(ge=0, lt=MAX_EXTENT)]
_Positive = Annotated[int, Meta(ge=1, lt=MAX_EXTENT)]
_Extents = tuple[_Extent, ...]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$", max_length=16)]
_Blobs = list[list[Any]]
_Blob = tuple[_Extent, _Digest, Annotated[int, Meta(ge=1)] | None]


class _MeshBody(msgspec.Struct, frozen=True):
    axes: tuple[str, ...]
    shape: tuple[_Positive, ...]
    processes: _Extents


class _LayoutBody(msgspec.Struct):
    mesh: _Extent
    dims: tuple[tuple[str, ...], ...]


class _PatchesBody(msgspec.Struct):
    """How many chunks of an array are patched, and how many patches these have."""

    chunks: _Positive
    patches: _Positive


class _TriedBody(msgspec.Struct):
    """The outcome for an array that was compressed only if that makes it smaller."""

    pays: bool


class _ArrayExtra(msgspec.Struct):
    """The known members of `_ArrayBody.extra`; others are notes of codecs, by name."""

    compress: _TriedBody | UnsetType = UNSET
    patches: _PatchesBody | UnsetType = UNSET


class _ArrayBody(msgspec.Struct):
    """An array as stored, its members in the order in which `encode` writes them."""

    shape: _Extents
    dtype: str
    chunk: tuple[_Positive, ...]
    codec: int | UnsetType = UNSET
    layout: int | UnsetType = UNSET
    cut: _Extents | UnsetType = UNSET
    boxes: list[tuple[_Extents, _Extents, _Extents]] | UnsetType = UNSET
    prng: str | UnsetType = UNSET
    extra: dict[str, Any] | UnsetType = UNSET


_ARRAY = msgspec.json.Decoder(_ArrayBody)


class _ReusedBody(msgspec.Struct):
    """How many bytes an earlier checkpoint also has."""

    reused: _Extent = 0


class _CompressBody(msgspec.Struct):
    """The option with which all arrays were saved."""

    option: str


class _IndexBody(msgspec.Struct):
    """The members of an index besides its arrays."""

    features: list[str]
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
    bases: tuple[BaseEntry, ...] = ()
    borrowed: list[Any] = []
    extra: dict[str, Any] = {}


_OF_SAVE = ("library", "created", "attempt", "processes", "metadata", "tree")
"""The members that are the same in an index and its JSON."""


class _SharedParts(NamedTuple):
    """The tables that arrays reference by number."""

    layouts: list[Layout]
    codecs: list[Encoding]


def encode(index: Index) -> bytes:
    """The index as JSON, sealed by the xxh3-64 of all bytes before the seal."""
    meshes: dict[Mesh, int] = {}
    layouts: dict[Layout, int] = {}
    encodings: dict[Encoding, int] = {}
    arrays = _arrays_to_json(index.arrays.values(), meshes, layouts, encodings)
    head = {
        "format": FORMAT,
        "features": _features(index),
        **{name: getattr(index, name) for name in _OF_SAVE},
        "meshes": [{"axes": m.axes, "shape": m.shape, "processes": m.processes} for m in meshes],
        "layouts": [{"mesh": meshes[x.mesh], "dims": x.dims} for x in layouts],
    }
    body = {
        "aliases": dict(index.aliases),
        "values": {name: tree_json.value_to_json(v) for name, v in index.values.items()},
        "per_process": {
            name: [
                [size, f"{digest:016x}", *([head] if head else [])]
                for size, digest, head in map(entry.value_facts, range(len(entry.blobs)))
            ]
            for name, entry in index.per_process.items()
        },
        "codecs": [codec for encoding in encodings for codec in codec_protocol.as_codecs(encoding)],
        "chunks": index.chunks,
        **_digests_to_json(index),
    }
    body |= _references_to_json(index)
    if extra := _extra_to_json(index):
        body["extra"] = extra
    before, after = _text(head)[:-1].encode(), _text(body)[1:-1].encode()
    return _sealed(b'%b,"arrays":%b,%b' % (before, arrays, after))


def _features(index: Index) -> list[str]:
    """The features that a program must know to read or safely delete a checkpoint; ascending."""
    used = {REFERENCES} if index.bases else set[str]()
    for entry in index.arrays.values():
        if entry.composed:
            used.add(PATCHES)
        if entry.encoding and (name := entry.codec) is not None:
            used.add(name)
    for values in index.per_process.values():
        if any(values.heads):
            used.add(SECTIONS)
    return sorted(used)


def _sealed(unsealed: bytes) -> bytes:
    return unsealed + b',"xxh3":"%016x"}' % xxhash.xxh3_64_intdigest(unsealed)


def _digests_to_json(index: Index) -> dict[str, Any]:
    blocks = index.digest_blocks
    if blocks is None:
        return {"digests": index.digests_xxh3}
    digests = "".join(f"{digest:016x}" for digest in blocks.digests)
    return {"digests": index.digests_xxh3, "digest_blocks": [blocks.rows, digests]}


def _references_to_json(index: Index) -> dict[str, Any]:
    if not index.bases:
        return {}
    return {
        "bases": list(map(asdict, index.bases)),
        "borrowed": [index.borrowed, index.borrowed_xxh3],
    }


def _extra_to_json(index: Index) -> dict[str, Any]:
    incremental = dict(index.extra.get(INCREMENTAL, {}))
    if index.reused:
        incremental["reused"] = index.reused
    bodies = {
        INCREMENTAL: incremental,
        COMPRESS: {} if index.compression is None else {"option": index.compression},
    }
    return {**index.extra, **{feature: body for feature, body in bodies.items() if body}}


def with_references(data: bytes, index: Index) -> bytes:
    """A stored index with the references of another one, its number of reused bytes, digests,
    metadata and codecs' notes; all else stays, including members that this program does not know.

    Arguments:
        data: the index as it is stored, which was already read.
        index: has `bases`, `borrowed`, `borrowed_xxh3`, `reused`, `digests_xxh3`, `digest_blocks`
            and `metadata`, and the same arrays, perhaps with other notes of codecs.
    """
    stored = dict(tree_json.members(data, "index"))
    changed_facts = {"metadata": dict(index.metadata), **_digests_to_json(index)}
    replaced_keys = {"bases", "borrowed", "extra", "features", "xxh3", *changed_facts}
    features = set(tree_json.parsed(stored["features"])) - {REFERENCES}
    extra = tree_json.parsed(stored["extra"]) if "extra" in stored else {}
    incremental = extra.pop(INCREMENTAL, {})
    incremental.pop("reused", None)
    incremental |= {"reused": index.reused} if index.reused else {}
    extra |= {INCREMENTAL: incremental} if incremental else {}
    features |= {REFERENCES} if index.bases else set()
    members = {key: raw for key, raw in stored.items() if key not in replaced_keys}
    notes = {name: entry.extra for name, entry in index.arrays.items() if entry.codec is not None}
    arrays = tree_json.parsed(members["arrays"]) if notes else {}
    for name, codec_notes in notes.items():
        arrays[name]["extra"].update(codec_notes)
    changed: dict[str, Any] = {
        "format": members.pop("format"),
        "features": sorted(features),
        **members,
        **changed_facts,
        **({"arrays": arrays} if notes else {}),
        **_references_to_json(index),
        **({"extra": extra} if extra else {}),
    }
    return _sealed(tree_json.ENCODER.encode(changed)[:-1])


_TEXT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)
_text = _TEXT.encode


def _arrays_to_json(
    entries: Iterable[ArrayEntry],
    meshes: dict[Mesh, int],
    layouts: dict[Layout, int],
    encodings: dict[Encoding, int],
) -> bytes:
    """The JSON of all arrays. Numbers the meshes, layouts and encodings."""
    numbers: dict[int, int] = {}  # of layouts, by identity: comparing layouts takes longer
    bodies = {}
    for entry in entries:
        layout, encoding, boxes = entry.layout, entry.encoding, entry.boxes
        if layout is not None and id(layout) not in numbers:
            meshes.setdefault(layout.mesh, len(meshes))
            numbers[id(layout)] = layouts.setdefault(layout, len(layouts))
        bodies[entry.name] = _ArrayBody(
            entry.shape,
            entry.dtype,
            entry.chunk,
            encodings.setdefault(encoding, len(encodings)) if encoding else UNSET,
            UNSET if layout is None else numbers[id(layout)],
            entry.cut or UNSET,
            UNSET if boxes is None else [(box.start, box.stop, pids) for box, pids in boxes],
            UNSET if entry.prng is None else entry.prng,
            _array_extra(entry),
        )
    return tree_json.ENCODER.encode(bodies)


def _array_extra(entry: ArrayEntry) -> dict[str, Any] | UnsetType:
    if not entry.extra and not entry.composed and entry.encoding != ():
        return UNSET  # most of 100,000 arrays
    extra: dict[str, Any] = {}
    if entry.encoding == ():
        extra[COMPRESS] = _TriedBody(False)
    if entry.composed:
        extra[PATCHES] = _PatchesBody(entry.composed, entry.additions)
    return {**extra, **entry.extra}


def decode(data: bytes, where: str, *, partial: bool = False) -> Index:
    """Reads and checks an index.

    Arguments:
        data: the bytes of `unickpt.json`; untrusted.
        where: the checkpoint's path, for messages.
        partial: whether it is one process's description, whose boxes need not cover the arrays.

    Raises:
        UnsupportedFormat: it has a format, or needs a feature, that this unickpt does not know.
        CheckpointCorrupt: anything else is wrong; says what.
    """
    try:
        stored = _known_members(data, where)
        arrays = stored.pop("arrays", msgspec.Raw(b"null"))
        index = _decode(tree_json.parsed(tree_json.ENCODER.encode(stored)), arrays, partial)
        if tree_json.has_opaque(data):
            index = replace(index, values=tree_json.with_opaque(index.tree, index.values))
        return index
    except (BadJSON, UnicodeError, tree_json.BadTree, tree_json.BadValue) as error:
        raise CheckpointCorrupt(f"{where}: the index is damaged: {error}") from None


def check_known(data: bytes, where: str) -> None:
    """Refuses an index that this program must neither read nor remove, nor its siblings; a damaged
    one counts as known.

    Arguments:
        data: the bytes of `unickpt.json`; untrusted.
        where: the checkpoint's path, for messages.

    Raises:
        UnsupportedFormat: names the format, or the features, and says what to do.
    """
    with suppress(BadJSON):
        _known_members(data, where)


def _known_members(data: bytes, where: str) -> dict[str, msgspec.Raw]:
    """The members of an index whose format and features are known.

    Raises:
        UnsupportedFormat: they are not.
        BadJSON: they are malformed.
    """
    stored = tree_json.members(data, "index")
    format = tree_json.parsed(stored.get("format", b"null"))
    if type(format) not in (int, str):
        raise BadJSON(f"its format is {quoted(format)}, which is no number")
    if format != FORMAT:
        limitation = f"this unickpt ({LIBRARY}) knows format {FORMAT} only"
        raise _unknown(stored, where, f"its format is {quoted(format)}, and {limitation}")
    seal = _SEAL.search(data)
    if seal is None or int(seal[1], 16) != xxhash.xxh3_64_intdigest(data[: seal.start()]):
        raise BadJSON("its seal does not match its bytes")
    features = tree_json.parsed(stored.get("features", b"null"))
    names = features if isinstance(features, list) else [None]
    if not all(isinstance(name, str) for name in names) or names != sorted(set(names)):
        raise BadJSON(f"its features are {quoted(features)}")
    if unknown := [n for n in names if n not in FEATURES and codec_protocol.find(n) is None]:
        listed = first_few([quoted(name) for name in unknown])
        kind = "the feature" if len(unknown) == 1 else "the features"
        what = f"it needs {kind} {listed}, which this unickpt ({LIBRARY}) does not know"
        raise _unknown(stored, where, what)
    return stored


def _unknown(stored: Mapping[str, msgspec.Raw], where: str, what: str) -> UnsupportedFormat:
    library = tree_json.parsed(stored.get("library", b"null"))
    author = f" {quoted(library)} wrote it;" if isinstance(library, str) else ""
    return UnsupportedFormat(
        f"{where}: {what}, so it is neither read nor replaced nor removed.{author} use that "
        "version, or a newer one (pip install --upgrade unickpt), or install the plug-in that it "
        "used"
    )


class IndexParts(NamedTuple):
    """The members of an index that saves of one tree have in common, and the others.

    Arguments:
        tree: the tree, and the names of values and of values per process.
        arrays: the arrays, and what these refer to.
        others: all other members, parsed.
    """

    tree: bytes
    arrays: bytes
    members: Mapping[str, Any]

    @classmethod
    def split(cls, data: bytes) -> IndexParts:
        """The parts of an index, which are not checked.

        Raises:
            BadJSON: it is no JSON.
        """
        stored = tree_json.members(data, "index")
        tree = bytes(stored.pop("tree"))
        processes = b"%b\0%b" % (bytes(stored["processes"]), bytes(stored["features"]))
        arrays = [bytes(stored.pop(key, b"")) for key in _OF_ARRAYS]
        other_members = tree_json.parsed(tree_json.ENCODER.encode(stored))
        names = _text([list(other_members["values"]), list(other_members["per_process"])]).encode()
        return cls(b"%b\0%b" % (tree, names), b"\0".join([processes, *arrays]), other_members)

    def check_others(self) -> None:
        """Checks the other members as `decode` does.

        Raises:
            BadJSON, BadValue: says what is wrong.
        """
        empty: dict[str, Any] = {"meshes": [], "layouts": [], "aliases": {}, "codecs": []}
        _decode({**self.members, **empty}, msgspec.Raw(b"{}"), partial=False)


_OF_ARRAYS = ("meshes", "layouts", "arrays", "aliases", "codecs")


def _made(kind: Callable[..., T], *fields: Any) -> T:
    """An object built from stored fields; BadJSON if its class refuses them."""
    try:
        return kind(*fields)
    except ValueError as error:
        raise BadJSON(str(error)) from None


def _decode(body: dict[str, Any], stored: msgspec.Raw, partial: bool) -> Index:
    members: _IndexBody = tree_json.typed(body, _IndexBody, "index")
    processes = members.processes
    if not 0 < processes < 1 << 31:
        raise BadJSON(f"it names {processes} processes")
    meshes = [_mesh(mesh) for mesh in members.meshes]
    layouts = [_layout(layout, members.meshes) for layout in members.layouts]
    shared = _SharedParts(layouts, [codec_protocol.from_json(codec) for codec in members.codecs])
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
    index = Index(
        arrays=arrays,
        values={name: _value(name, stored) for name, stored in members.values.items()},
        per_process=per_process,
        digests_xxh3=members.digests,
        digest_blocks=_digest_blocks(members),
        **{name: getattr(members, name) for name in (*_OF_SAVE, "aliases", "chunks", "features")},
        **_borrowed(members),
        **_extra(members.extra),
    )
    listed = {
        x[0][0].removeprefix(CODEC_PREFIX) for x in shared.codecs
    } - codec_protocol.ZARR_CODECS.keys()
    if unnamed := sorted({*_features(index), *listed} - {*members.features}):
        raise BadJSON(f"it has {quoted(unnamed[0])}, which its features do not name")
    return index


def _extra(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The members that programs ignore if they do not know them."""
    extra = dict(stored)
    arguments: dict[str, Any] = {"extra": extra}
    if INCREMENTAL in extra:
        stored = extra.pop(INCREMENTAL)
        arguments["reused"] = tree_json.typed(stored, _ReusedBody, INCREMENTAL).reused
        if more := {name: value for name, value in stored.items() if name != "reused"}:
            extra[INCREMENTAL] = more
    if COMPRESS in extra:
        arguments["compression"] = tree_json.typed(
            extra.pop(COMPRESS), _CompressBody, COMPRESS
        ).option
    return arguments


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
    """The borrowed chunks, and the sibling checkpoints that have them."""
    bases = members.bases
    if not bases:
        return {}
    for base in bases:
        # A sibling folder: it must lead nowhere else.
        if base.name in ("", ".", "..") or not re.fullmatch(_FOLDER, base.name):
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
    for name, leaf in per_process.items():
        if not partial and len(leaf.blobs) != processes:
            raise BadJSON(
                f"per-process leaf {quoted(name)} has {len(leaf.blobs)} values of {processes}"
            )


@lru_cache(maxsize=256)  # it may have thousands of devices, and all checkpoints of a run have it
def _mesh(body: _MeshBody) -> Mesh:
    if len(body.axes) > MAX_RANK:
        raise BadJSON(f"a mesh has {len(body.axes)} axes, more than {MAX_RANK}")
    return _made(Mesh, body.axes, body.shape, body.processes)


def _layout(body: _LayoutBody, meshes: Sequence[_MeshBody]) -> Layout:
    if body.mesh >= len(meshes):
        raise BadJSON(f"a layout names mesh {body.mesh} of {len(meshes)}")
    return _layout_on(meshes[body.mesh], body.dims)


@lru_cache(maxsize=1024)  # as meshes
def _layout_on(mesh: _MeshBody, dims: tuple[tuple[str, ...], ...]) -> Layout:
    return _made(Layout, _mesh(mesh), dims)


def _arrays(
    stored: Mapping[str, msgspec.Raw], shared: _SharedParts, partial: bool
) -> dict[str, ArrayEntry]:
    """The entries of all arrays; facts that many share, such as layers of a model, are checked
    once."""
    entries: dict[bytes, ArrayEntry] = {}
    arrays = {}
    for name, raw in stored.items():
        data = bytes(raw)
        same = entries.get(data)
        if same is None:
            body = tree_json.decoded(_ARRAY, data, "array", name)
            entries[data] = arrays[name] = _array(name, body, shared, partial)
            continue
        arrays[name] = ArrayEntry(
            name, same.shape, same.dtype, same.chunk, same.layout, same.cut, same.boxes,
            same.prng, same.composed, same.additions, same.encoding, same.extra,
        )  # fmt: skip
    return arrays


def _array(name: str, body: _ArrayBody, shared: _SharedParts, partial: bool) -> ArrayEntry:
    shape, chunk = body.shape, body.chunk
    try:
        itemsize = dtypes.from_name(body.dtype).itemsize
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
        number = body.layout
        if not 0 <= number < len(layouts) or len(layouts[number].dims) != len(shape):
            raise BadJSON(
                f"array {quoted(name)}: layout {number} does not fit shape {quoted(shape)}"
            )
        layout = layouts[number]
    if body.cut is not UNSET:
        cut = body.cut
        if layout is None or list(cut) != sorted(set(cut)) or cut[-1:] >= (len(shape),):
            raise BadJSON(f"array {quoted(name)}: is cut along dimensions {quoted(cut)}")
    if body.boxes is not UNSET:
        boxes = _boxes(name, body.boxes, shape, partial)
    if (layout is None) == (boxes is None):
        raise BadJSON(f"array {quoted(name)}: needs either a layout or boxes")
    prng = None if body.prng is UNSET else body.prng
    entry = ArrayEntry(name, shape, body.dtype, chunk, layout, cut, boxes, prng)
    if body.codec is not UNSET:
        number, count = body.codec, len(shared.codecs)
        if not 0 <= number < count:
            raise BadJSON(f"array {quoted(name)}: there is no codec {number} of {count}")
        entry.encoding = shared.codecs[number]
    if body.extra is not UNSET or entry.codec is not None:
        _add_extra(entry, {} if body.extra is UNSET else body.extra)
    return entry


def _add_extra(entry: ArrayEntry, extra: Mapping[str, Any]) -> None:
    """Adds the features' notes about an array that is being read; ignores unknown ones."""
    where = f"array {quoted(entry.name)}"
    if (codec := codec_protocol.codec_of(entry)) is not None:
        note = extra.get(codec.name)
        try:
            codec.validate(entry, note)
        except ValueError as error:
            raise BadJSON(f"{where}: {error}") from None
        entry.extra = {codec.name: note}
    features: _ArrayExtra = tree_json.typed(extra, _ArrayExtra, where)
    if features.patches is not UNSET:
        entry.composed, entry.additions = features.patches.chunks, features.patches.patches
        if entry.additions < entry.composed:
            raise BadJSON(
                f"{where}: has {entry.composed} patched chunks, and {entry.additions} patches"
            )
    if features.compress is not UNSET and not features.compress.pays and entry.encoding is None:
        entry.encoding = ()


def _boxes(
    name: str,
    items: Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    shape: tuple[int, ...],
    partial: bool,
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    boxes = []
    where = f"array {quoted(name)}: boxes"
    for item in items:
        start, stop, holders = item
        if len(start) != len(shape) or not holders:
            raise BadJSON(f"{where}: {quoted(item)} does not fit shape {quoted(shape)}")
        boxes.append((_made(Box, start, stop), holders))
    plain = [box for box, _ in boxes]
    whole = Box.whole(shape)
    size = sum(b.size for b in plain)
    if any(b.empty or not whole.contains(b) for b in plain):
        raise BadJSON(f"{where} are empty or lie outside shape {shape}")
    if not partial and size < whole.size:
        raise BadJSON(f"{where} do not cover shape {shape}")
    # Boxes that cover a shape and have its total size do not overlap.
    if overlap(plain) is not None if partial else not fill_exactly(whole, plain):
        raise BadJSON(f"{where} overlap")
    return tuple(boxes)


def _per_process(blobs: Any, where: str) -> PerProcessEntry:
    rows: list[tuple[int, str, int | None]] = [
        tree_json.typed([*blob, *[None] * (len(blob) == 2)], _Blob, where)
        for blob in tree_json.typed(blobs, _Blobs, where)
    ]
    heads = tuple(head or 0 for _, _, head in rows)
    for (size, *_), head in zip(rows, heads, strict=True):
        if head > size:
            raise BadJSON(f"{where}: its head has {head} bytes, more than the {size} of the whole")
    table = tuple((size, int(digest, 16)) for size, digest, _ in rows)
    return PerProcessEntry(table, heads if any(heads) else ())
