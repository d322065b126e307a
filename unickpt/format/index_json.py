"""The JSON of an index, and its validation: an index from a storage is untrusted."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import xxhash

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box, fill_exactly, overlap
from unickpt.arrays.layout import Layout, Mesh
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.format.index import (
    PATCHED_FORMAT,
    ArrayEntry,
    BaseEntry,
    DigestBlocks,
    Index,
    PerProcessEntry,
)
from unickpt.quantized import codes
from unickpt.quoting import quoted
from unickpt.trees import tree_json

T = TypeVar("T")
# The codecs that may follow `bytes`, with their settings. Others are refused: some zarr codecs
# refer to further storage, or unpack into any amount of memory.
CODECS: Mapping[str, Mapping[str, type]] = {
    "zstd": {"level": int},
    "gzip": {"level": int},
    "blosc": {"cname": str, "clevel": int, "shuffle": str, "typesize": int, "blocksize": int},
}
_MAX_EXTENT = 1 << 62
_MAX_RANK = 32
_FOLDER = re.compile(r"[^/\\\0]+")
_SEAL = re.compile(rb',"xxh3":"([0-9a-f]{16})"}\Z')
_CODEC_FIELDS = ("name", "configuration")
_DIGEST = re.compile(r"[0-9a-f]{16}")


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
        body = _parsed(data)
        if isinstance(body, dict):
            _check_version(body.get("format"), where)
        if seal is None or int(seal[1], 16) != xxhash.xxh3_64_intdigest(data[: seal.start()]):
            raise _Bad("its seal does not match its bytes")
        index = _decode(_IndexReader(body, "index"), partial)
        if tree_json.has_opaque(data):
            index = replace(index, values=tree_json.with_opaque(index.tree, index.values))
        return index
    except tree_json.BadTree as error:
        raise CheckpointCorrupt(f"{where}: the index is damaged: {error}") from None
    except (_Bad, tree_json.BadValue) as error:
        raise CheckpointCorrupt(f"{where}: the index is damaged: {error}") from None


class _Bad(ValueError):
    """A reason why the index is invalid."""


def _parsed(data: bytes) -> Any:
    """The JSON of an index. Of its arrays, of which a model may have 100,000, that of each kind is
    parsed once, if they are written as `encode` writes them; equal ones are the same object."""
    begin = data.find(_ARRAYS)
    end = data.find(_AFTER_ARRAYS, begin)
    if begin < 0 or end < 0:
        return _json(data)
    place = os.urandom(8).hex()  # which no index contains
    try:
        body = _json(b'%b"arrays":"%b"%b' % (data[:begin], place.encode(), data[end + 2 :]))
        if not isinstance(body, dict) or body.get("arrays") != place:
            return _json(data)  # this is not what the index itself has there
        body["arrays"] = _array_bodies(data[begin + len(_ARRAYS) : end].decode())
    except ValueError:
        return _json(data)  # or this says what is wrong
    return body


# Between them are the arrays' names and objects, but for the quotation mark before the first name
# and the brace after the last object.
_ARRAYS, _AFTER_ARRAYS = b'"arrays":{"', b'}},"aliases":{'


def _array_bodies(text: str) -> dict[str, Any]:
    """The objects of arrays by name.

    Arguments:
        text: `name":{...},"name":{...`, untrusted. All of it is parsed in pieces, of which each is
            a string and an object, so that the whole can mean nothing else.

    Raises:
        ValueError: it is not written as `encode` writes it.
    """
    known: dict[str, Any] = {}
    names, bodies = [], []
    for piece in text.split('},"'):
        name, _, inner = piece.partition('":{')
        body = known.get(inner)
        if body is None:
            body = known[inner] = _json(f"{{{inner}}}")
        names.append(name)
        bodies.append(body)
    joined = "".join(names)
    if '"' in joined or "\\" in joined or not joined.isprintable():
        names = [json.loads(f'"{name}"') for name in names]
    return _object(list(zip(names, bodies, strict=True)))


def _json(data: bytes | str) -> Any:
    try:
        return _DECODER.decode(data if isinstance(data, str) else data.decode())
    except (RecursionError, ValueError) as error:
        raise _Bad(str(error)) from None


def _made(kind: Callable[..., T], *fields: Any) -> T:
    """An object built from stored fields; _Bad if its class refuses them."""
    try:
        return kind(*fields)
    except ValueError as error:
        raise _Bad(str(error)) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Bad("a key occurs twice in an object")
    return found


def _constant(name: str) -> Any:
    raise _Bad(f"it contains {name}, which is not valid JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _check_version(version: Any, where: str) -> None:
    match = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", version) if isinstance(version, str) else None
    if match is None:
        raise _Bad(f"its format version is {quoted(version)}")
    if int(match[1]) < 1:
        raise _Bad(f"its format version is {version}, but the lowest version is 1.0")
    if int(match[1]) > PATCHED_FORMAT[0]:
        raise UnsupportedFormat(
            f"{where}: written in format {version}; this unickpt reads up to major version "
            f"{PATCHED_FORMAT[0]}. Install a newer unickpt."
        )


class _IndexReader:
    """A JSON object; reading a field checks its type.

    Arguments:
        body: the object.
        kind: what it is, for messages.
        name: its name, if it has one.
    """

    __slots__ = ("_kind", "_name", "body")

    def __init__(self, body: Any, kind: str, name: str | None = None) -> None:
        self.body, self._kind, self._name = body, kind, name
        if not isinstance(body, dict):
            raise _Bad(f"{self._at} is not an object")

    @property
    def _at(self) -> str:
        return self._kind if self._name is None else f"{self._kind} {quoted(self._name)}"

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.body.get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _Bad(f"{self._at}: {key!r} is {quoted(value)}, not {kind.__name__}")
        return value

    def ints(self, key: str, low: int) -> tuple[int, ...]:
        items = self.get(key, list)
        if not _are_ints(items, low):
            raise _Bad(f"{self._at}: {key!r} contains {quoted(_first_bad(items, low))}")
        return tuple(items)


def _ints(items: Any, low: int, at: str) -> tuple[int, ...]:
    if not isinstance(items, list):
        raise _Bad(f"{at} is {quoted(items)}, not a list")
    if not _are_ints(items, low):
        raise _Bad(f"{at} contains {quoted(_first_bad(items, low))}")
    return tuple(items)


def _are_ints(items: list[Any], low: int) -> bool:
    """Whether all items are integers, from `low` on and below the largest extent."""
    if not items:
        return True
    return {*map(type, items)} == {int} and low <= min(items) and max(items) < _MAX_EXTENT


def _first_bad(items: list[Any], low: int) -> str:
    bad = (x for x in items if type(x) is not int or not low <= x < _MAX_EXTENT)
    return str(next(bad))


def _decode(r: _IndexReader, partial: bool) -> Index:
    processes = r.get("processes", int)
    if not 0 < processes < 1 << 31:
        raise _Bad(f"it names {processes} processes")
    meshes = [_mesh(_IndexReader(m, "mesh")) for m in r.get("meshes", list)]
    layouts = [_layout(_IndexReader(x, "layout"), meshes) for x in r.get("layouts", list)]
    arrays = _arrays(r.get("arrays", dict), layouts, partial)
    aliases = r.get("aliases", dict)
    for alias, target in aliases.items():
        if not isinstance(target, str) or target not in arrays:
            raise _Bad(f"alias {quoted(alias)} names {quoted(target)}, which is not an array")
    plain = r.get("values", dict)
    per_process = {
        name: _per_process(blobs, f"per-process leaf {quoted(name)}")
        for name, blobs in r.get("per_process", dict).items()
    }
    _check_names([*arrays, *aliases, *plain, *per_process])
    _check_processes(processes, meshes, arrays, per_process, partial)
    return Index(
        tree=r.body.get("tree"),
        arrays=arrays,
        aliases=aliases,
        values={k: tree_json.value_from_json(v) for k, v in plain.items()},
        per_process=per_process,
        metadata=r.get("metadata", dict),
        codecs=_codecs(r.get("codecs", list)),
        processes=processes,
        attempt=r.get("attempt", str),
        created=r.get("created", str),
        library=r.get("library", str),
        chunks=r.get("chunks", int),
        digests_xxh3=r.get("digests", str),
        digest_blocks=_digest_blocks(r),
        reused=_ints([r.get("reused", int, 0)], 0, "reused")[0],
        **_borrowed(r),
    )


def _digest_blocks(r: _IndexReader) -> DigestBlocks | None:
    chunks, found = r.get("chunks", int), r.get("digest_blocks", list, [])
    match found:
        case []:
            return None
        case [int(rows), str(text)] if rows is not True and 0 < rows < _MAX_EXTENT:
            digests = _DIGEST.findall(text)
            if len(text) == 16 * len(digests) and len(digests) == -(-chunks // rows):
                return DigestBlocks(rows, tuple(int(digest, 16) for digest in digests))
    raise _Bad("'digest_blocks' does not fit the number of chunks")


def _borrowed(r: _IndexReader) -> dict[str, Any]:
    """What is borrowed, and from which checkpoints beside this one."""
    bases = tuple(
        BaseEntry(base.get("name", str), base.get("manifest", str))
        for base in (_IndexReader(b, "base") for b in r.get("bases", list, []))
    )
    if not bases:
        return {}
    for base in bases:
        # One folder beside this one: it must lead nowhere else.
        if base.name in ("", ".", "..") or not _FOLDER.fullmatch(base.name):
            raise _Bad(f"a base is {quoted(base.name)}, which is no name of a folder")
    if len({base.name for base in bases}) != len(bases):
        raise _Bad("it names a base twice")
    match r.get("borrowed", list):
        case [int(count), str(digest)] if count is not True and 0 < count < _MAX_EXTENT:
            return {"bases": bases, "borrowed": count, "borrowed_xxh3": digest}
    raise _Bad(f"'borrowed' is {quoted(r.body['borrowed'])}")


def _check_names(names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise _Bad("two leaves have the same name")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise _Bad(f"the name {quoted(name)} is not valid Unicode") from None


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
            raise _Bad(f"a mesh names process {max(mesh.processes)} of {processes}")
    for name, entry in arrays.items():
        for box, holders in entry.boxes or ():
            if max(holders) >= processes:
                raise _Bad(
                    f"array {quoted(name)}: process {max(holders)} of {processes} holds {box}"
                )
    for name, own in per_process.items():
        if not partial and len(own.blobs) != processes:
            raise _Bad(
                f"per-process leaf {quoted(name)} has {len(own.blobs)} values of {processes}"
            )


def _codecs(items: list[Any]) -> tuple[Mapping[str, Any], ...]:
    for item in items:
        known = CODECS.get(str(item.get("name"))) if isinstance(item, dict) else None
        settings = item.get("configuration") if isinstance(item, dict) else None
        if known is None or not isinstance(settings, dict) or item.keys() - {*_CODEC_FIELDS}:
            raise _Bad(f"its codecs hold {quoted(item)}")
        for key, value in settings.items():
            if type(value) is not known.get(key):
                raise _Bad(f"its codecs hold {quoted(item)}")
    if len(items) > 1:
        raise _Bad("it names more than one codec")
    return tuple(items)


def _mesh(r: _IndexReader) -> Mesh:
    axes = r.get("axes", list)
    if not all(isinstance(a, str) for a in axes):
        raise _Bad(f"mesh axes are {quoted(axes)}")
    if len(axes) > _MAX_RANK:
        raise _Bad(f"a mesh has {len(axes)} axes, more than {_MAX_RANK}")
    return _made(Mesh, tuple(axes), r.ints("shape", 1), r.ints("processes", 0))


def _layout(r: _IndexReader, meshes: list[Mesh]) -> Layout:
    mesh = r.get("mesh", int)
    dims = r.get("dims", list)
    if not 0 <= mesh < len(meshes):
        raise _Bad(f"a layout names mesh {mesh} of {len(meshes)}")
    if not all(isinstance(d, list) and all(isinstance(a, str) for a in d) for d in dims):
        raise _Bad(f"layout dimensions are {quoted(dims)}")
    return _made(Layout, meshes[mesh], tuple(tuple(d) for d in dims))


def _arrays(
    bodies: Mapping[str, Any], layouts: list[Layout], partial: bool
) -> dict[str, ArrayEntry]:
    """The entries of all arrays; what many say, as layers of a model do, is checked once: it is
    one object (`_parsed`)."""
    known: dict[int, ArrayEntry] = {}
    arrays = {}
    for name, body in bodies.items():
        same = known.get(id(body))
        if same is None:
            same = _array(name, _IndexReader(body, "array", name), layouts, partial)
            known[id(body)] = arrays[name] = same
            continue
        arrays[name] = ArrayEntry(
            name, same.shape, same.dtype, same.chunk, same.layout, same.cut, same.boxes,
            same.prng, same.quantized, same.errors, same.patched,
        )  # fmt: skip
    return arrays


def _array(name: str, r: _IndexReader, layouts: list[Layout], partial: bool) -> ArrayEntry:
    shape, chunk = r.ints("shape", 0), r.ints("chunk", 1)
    try:
        dtype, quantized, itemsize = _dtype(r.get("dtype", str))
    except TypeError as error:
        raise _Bad(f"array {quoted(name)}: {error}") from None
    size = max(math.prod(shape) or math.prod(n or 1 for n in shape), math.prod(chunk))
    if len(chunk) != len(shape) or size * itemsize >= _MAX_EXTENT or len(shape) > _MAX_RANK:
        raise _Bad(
            f"array {quoted(name)}: shape {quoted(shape)} and chunk {quoted(chunk)} do not fit"
        )
    layout, boxes = None, None
    cut: tuple[int, ...] = ()
    if "layout" in r.body:
        at = r.get("layout", int)
        if not 0 <= at < len(layouts) or len(layouts[at].dims) != len(shape):
            raise _Bad(f"array {quoted(name)}: layout {at} does not fit shape {quoted(shape)}")
        layout = layouts[at]
    if "cut" in r.body:
        cut = r.ints("cut", 0)
        if layout is None or list(cut) != sorted(set(cut)) or cut[-1:] >= (len(shape),):
            raise _Bad(f"array {quoted(name)}: is cut along dimensions {quoted(cut)}")
    if "boxes" in r.body:
        boxes = _boxes(name, r.get("boxes", list), shape, partial)
    if (layout is None) == (boxes is None):
        raise _Bad(f"array {quoted(name)}: needs either a layout or boxes")
    prng = r.get("prng", str) if "prng" in r.body else None
    errors = _errors(r.get("errors", list), name) if quantized is not None else (0.0, 0.0)
    patched = r.get("patched", int, 0)
    if not 0 <= patched < _MAX_EXTENT:
        raise _Bad(f"array {quoted(name)}: patched contains {patched}")
    if patched and quantized is not None:
        raise _Bad(f"array {quoted(name)}: is quantised and has patches")
    return ArrayEntry(
        name, shape, dtype, chunk, layout, cut, boxes, prng, quantized, errors, patched
    )


@lru_cache(maxsize=256)
def _dtype(stored: str) -> tuple[str, str | None, int]:
    """The dtype of an array's elements, how they are quantised, and the bytes of one.

    Raises:
        TypeError: there is none of this name.
    """
    dtype, quantized = codes.split(stored)
    return dtype, quantized, dtypes.from_name(dtype).itemsize


def _errors(items: list[Any], name: str) -> tuple[float, float]:
    if len(items) != 2 or not all(type(x) in (int, float) and 0 <= x < math.inf for x in items):
        raise _Bad(f"array {quoted(name)}: its errors are {quoted(items)}")
    return float(items[0]), float(items[1])


def _boxes(
    name: str, items: list[Any], shape: tuple[int, ...], partial: bool
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    boxes = []
    at = f"array {quoted(name)}: boxes"
    for item in items:
        if not isinstance(item, list) or len(item) != 3:
            raise _Bad(f"{at} contain {quoted(item)}")
        start, stop, holders = _ints(item[0], 0, at), _ints(item[1], 0, at), _ints(item[2], 0, at)
        if len(start) != len(shape) or not holders:
            raise _Bad(f"{at}: {quoted(item)} does not fit shape {quoted(shape)}")
        boxes.append((_made(Box, start, stop), holders))
    plain = [box for box, _ in boxes]
    whole = Box.whole(shape)
    size = sum(b.size for b in plain)
    if any(b.empty or not whole.contains(b) for b in plain):
        raise _Bad(f"{at} are empty or lie outside shape {shape}")
    if not partial and size < whole.size:
        raise _Bad(f"{at} do not cover shape {shape}")
    # Boxes that cover a shape and have its total size do not overlap.
    if overlap(plain) is not None if partial else not fill_exactly(whole, plain):
        raise _Bad(f"{at} overlap")
    return tuple(boxes)


def _per_process(blobs: Any, at: str) -> PerProcessEntry:
    if not isinstance(blobs, list):
        raise _Bad(f"{at} is not a list")
    out = []
    for blob in blobs:
        if not (isinstance(blob, list) and len(blob) == 2 and _is_digest(blob[1])):
            raise _Bad(f"{at} contains {quoted(blob)}")
        (size,) = _ints(blob[:1], 0, at)
        out.append((size, int(blob[1], 16)))
    return PerProcessEntry(tuple(out))


def _is_digest(text: Any) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None
