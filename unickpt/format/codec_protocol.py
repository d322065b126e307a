"""The interface for codecs, which encode the chunks of an array.

Zarr's own codecs (`ZARR_CODECS`) are read and written by TensorStore. All others have a name,
by which an entry point (`unickpt.codecs`) or `register` finds them; the index names them among its
features, so that a program that lacks one refuses the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from unickpt import doors
from unickpt.arrays.dtypes import Array
from unickpt.errors import PluginError, UnickptError, UnsupportedFormat, UnsupportedLeaf
from unickpt.format.index import CODEC_PREFIX, FEATURES, ArrayEntry, Encoding
from unickpt.quoting import quoted
from unickpt.trees.tree_json import BadJSON

# The codecs that may follow `bytes`, with their settings. Others are refused: some zarr codecs
# refer to further storage, or unpack into any amount of memory.
ZARR_CODECS: Mapping[str, Mapping[str, type]] = {
    "zstd": {"level": int},
    "gzip": {"level": int},
    "blosc": {"cname": str, "clevel": int, "shuffle": str, "typesize": int, "blocksize": int},
}
# Of codecs that Zarr does not have; `Extra.validate` checks which.
_PLAIN = (bool, int, float, str)
_FIELDS = ("name", "configuration")


class NotDecodable(ValueError):
    """Why stored bytes cannot be decoded."""


class StoredChunk(NamedTuple):
    """A chunk as a codec stores it.

    Arguments:
        data: its bytes.
        note: this chunk's part of the index's note about the array (`Extra`); None for none, and
            ignored if the codec is Zarr's.
    """

    data: Array
    note: Any = None


class Codec(Protocol):
    """Stores chunks of arrays; as an item of `SaveOptions.features` it also chooses the arrays.

    Several threads call it at once. A codec that is not Zarr's fulfils `Extra`, too. For such a
    codec, all methods but `configure` are called on the target of its entry point, so the settings
    must hold all that they need.
    """

    name: str
    """The name of its entry point, also in the index and in messages."""

    def configure(self, entry: ArrayEntry) -> Mapping[str, Any] | None:
        """The settings with which a save stores an array; None to leave the array to other codecs.

        Arguments:
            entry: name, shape, dtype and chunks of the array.

        Raises:
            ValueError: it cannot be stored as requested; says why and what to do.
        """

    def encode(self, entry: ArrayEntry, chunk: Array) -> StoredChunk:
        """The stored bytes of a chunk.

        Arguments:
            entry: the array; its settings are `entry.settings`.
            chunk: its elements, in the array's dtype; if `zarr_codec` gives one, padded to the
                array's chunk shape, as Zarr requires.

        Raises:
            UnsupportedLeaf: these elements cannot be stored so; names the array.
        """

    def decode(self, entry: ArrayEntry, data: Array, out: Array) -> None:
        """The inverse of `encode`; not called if `zarr_codec` gives one, which TensorStore decodes.

        Arguments:
            entry: the array.
            data: the stored bytes, as uint8; of the length by `stored_bytes`, else untrusted.
            out: contiguous memory of the chunk's shape, in the array's dtype.

        Raises:
            NotDecodable: the bytes are no output of `encode`.
        """

    def stored_bytes(self, entry: ArrayEntry, shape: Sequence[int]) -> int | None:
        """The number of stored bytes of a chunk; None if that depends on its elements."""

    def zarr_codec(self, settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The codec of Zarr, as `zarr.json` has it, that stores the same bytes; None if there is
        none: then programs without this codec cannot read the array."""


class Extra(Protocol):
    """A feature's note about an array in the index."""

    def merge(self, notes: Sequence[Any]) -> Any:
        """The note about all chunks, from any processes' notes about some of them; without notes,
        that of an array without elements. Pure."""

    def validate(self, entry: ArrayEntry, note: Any) -> None:
        """Checks the settings and the note of an array that is being read; both are untrusted.

        Raises:
            ValueError: this feature cannot have written them.
        """

    def facts(self, entry: ArrayEntry) -> Mapping[str, Any]:
        """The settings and the note of an array as reports show them, by name."""


class CodecWithExtra(Codec, Extra, Protocol):
    """The target of an entry point of the group `unickpt.codecs`."""


_registered: dict[str, CodecWithExtra] = {}
_imported: dict[str, CodecWithExtra] = {}  # codecs are looked up for each chunk


def register(codec: CodecWithExtra) -> None:
    """Adds a codec for this process. A package adds one for all programs by an entry point in the
    group `unickpt.codecs`.

    Raises:
        ValueError: another codec has the name.
    """
    if codec.name in _registered or codec.name in doors.ours("codecs"):
        raise ValueError(f"a codec is called {quoted(codec.name)} already")
    _registered[codec.name] = codec


def unregister(name: str) -> None:
    """Removes a codec that was registered."""
    del _registered[name]


def find(name: str) -> CodecWithExtra | None:
    """The codec of a name; None if there is none.

    Raises:
        PluginError: it is another package's, and cannot be imported, or has another name.
    """
    codec = _registered.get(name) or _imported.get(name)
    if codec is None and (door := doors.find("codecs", name)) is not None:
        codec = cast(CodecWithExtra, door.open())
        if codec.name != name:  # the index and its entries would have different names
            raise PluginError(f"{door} calls itself {quoted(codec.name)}. Mend the package")
        _imported[name] = codec
    return codec


def configure(entry: ArrayEntry, features: Iterable[object]) -> Codec | None:
    """Gives an array of a save the codec that the first of some features chooses, if any does.

    Returns:
        The encoder of its chunks, if they are stored in a codec of Zarr's, whose name the index
        has.

    Raises:
        ValueError: the array cannot be stored as requested, or nothing could read it.
    """
    for feature in features:
        if not hasattr(feature, "configure"):
            continue
        codec = cast(Codec, feature)
        settings = codec.configure(entry)
        if settings is None:
            continue
        if (zarr := codec.zarr_codec(settings)) is not None:
            entry.encoding = from_json(dict(zarr))
            return codec
        if codec.name in FEATURES:
            raise ValueError(f"no codec can be called {quoted(codec.name)}: rename it")
        if find(codec.name) is None:
            raise ValueError(
                f"the codec {quoted(codec.name)} is not registered, so nothing could read the "
                "array: give its package an entry point in the group unickpt.codecs, or call "
                "unickpt.extend.register_codec"
            )
        entry.encoding = ((CODEC_PREFIX + codec.name, tuple(sorted(settings.items()))),)
        entry.extra = {codec.name: merge(codec.name, [])}
        return None
    return None


def encode(codec: Codec, entry: ArrayEntry, chunk: Array) -> StoredChunk:
    """The chunk as a codec stores it.

    Raises:
        UnsupportedLeaf: the codec failed, or could not decode its own output; names the array.
    """
    where = f"array {entry.name!r} ({entry.dtype_and_shape}): the codec {quoted(codec.name)}"
    try:
        stored = codec.encode(entry, chunk)
        nbytes = codec.stored_bytes(entry, chunk.shape)
    except (UnickptError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedLeaf(
            f"{where} failed: {type(error).__name__}: {error}. Leave the array to another codec, "
            "or mend this one"
        ) from error
    data = stored.data
    if data.dtype != np.uint8 or data.ndim != 1 or nbytes not in (None, data.nbytes):
        expected = "bytes" if nbytes is None else f"{nbytes} bytes"
        raise UnsupportedLeaf(
            f"{where} returned {data.dtype}{list(data.shape)} for a chunk of {list(chunk.shape)}, "
            f"not {expected}. Leave the array to another codec, or mend this one"
        )
    return stored


def decode(entry: ArrayEntry, data: Array, out: Array) -> None:
    """Decodes a chunk of an array whose codec is none of Zarr's; arguments as for `Codec.decode`.

    Raises:
        NotDecodable: the codec refused the bytes, or failed.
    """
    codec = codec_of(entry)
    assert codec is not None, "TensorStore decodes the others"
    try:
        codec.decode(entry, data, out)
    except (NotDecodable, UnickptError, MemoryError):
        raise
    except Exception as error:
        what = f"the codec {quoted(codec.name)} failed: {type(error).__name__}: {error}"
        raise NotDecodable(what) from error


def merge(name: str, notes: Sequence[Any]) -> Any:
    """The note of a codec about an array, from notes about parts of it."""
    codec = find(name)
    assert codec is not None, "it made the notes"
    return codec.merge(notes)


def codec_of(entry: ArrayEntry) -> CodecWithExtra | None:
    """The codec of an array; None if it is stored as it is, or by one of Zarr's codecs.

    Raises:
        UnsupportedFormat: there is none of the name in the index.
    """
    name = entry.codec
    if name is None:
        return None
    codec = find(name)
    if codec is None:
        raise UnsupportedFormat(
            f"array {entry.name!r} is stored by the codec {quoted(name)}, which no installed "
            "package has (entry points unickpt.codecs); install the one that does"
        )
    return codec


def from_json(item: Any) -> Encoding:
    """A stored codec.

    Raises:
        BadJSON: it is not allowed.
    """
    name, settings = map(item.get, _FIELDS) if isinstance(item, dict) else (None, None)
    if isinstance(name, str) and isinstance(settings, dict) and not item.keys() - {*_FIELDS}:
        types = ZARR_CODECS.get(name)
        if types is not None:
            is_allowed = all(type(value) is types.get(key) for key, value in settings.items())
        else:
            is_plain = all(type(value) in _PLAIN for value in settings.values())
            is_allowed = is_plain and name.startswith(CODEC_PREFIX)
        if is_allowed:
            return encoding_of(item)
    raise BadJSON(f"its codecs hold {quoted(item)}")


def as_codecs(encoding: Encoding) -> tuple[dict[str, Any], ...]:
    """An encoding as Zarr and the index store it."""
    return tuple({"name": name, "configuration": dict(settings)} for name, settings in encoding)


def encoding_of(codec: Mapping[str, Any]) -> Encoding:
    """The encoding of a codec of Zarr."""
    return ((codec["name"], tuple(sorted(codec["configuration"].items()))),)
