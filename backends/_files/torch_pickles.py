"""Objects that torch.save wrote, as facts: tensors as ranges of a file, everything else as data.

Sources: torch/serialization.py, torch/_utils.py and torch/storage.py. Nothing of torch is imported,
and nothing that a pickle names is called.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any

from unickpt.backends._files import pickle_writer, pickles
from unickpt.backends._files.elements import InMemoryElements
from unickpt.backends._files.file_choice import is_legacy, is_pickle
from unickpt.backends._files.headers import Cursor
from unickpt.backends._files.pickles import (
    BadPickle,
    Constructors,
    FileBytes,
    Global,
    NotSupported,
    PersistentId,
    PickledObject,
    unread,
)
from unickpt.backends._files.torch_tensors import CONSTRUCTORS, Tensor, TorchStorage, storage
from unickpt.backends._files.zip_files import STORED, ZipFile
from unickpt.errors import CheckpointCorrupt
from unickpt.extend import Box, Elements, FileBox, FileRange, Files, Opaque, quoted

_MOST_PICKLE = 1 << 30
"""Bytes of a pickle in memory."""
_LARGE = 16 << 10  # bytes that stay in the file
# Opcodes that are followed by a length, of so many bytes, and by bytes; texts of Python 2 as well.
_BYTES = {pickle.BINBYTES: 4, pickle.BINBYTES8: 8, pickle.BYTEARRAY8: 8, pickle.BINSTRING: 4}
_OUTSIDE = (pickle.PERSID, pickle.BINPERSID)
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_ARGUMENTS = {
    op.code.encode("latin-1"): op.arg.n if op.arg else 0 for op in pickletools.opcodes
}  # fmt: skip
_TWO_LINES = (pickle.GLOBAL, pickle.INST)
_SCRIPT = "constants.pkl"
_PROTOCOL = 1001  # of files before torch 1.6


class TorchFile:
    """A file that torch.save wrote, or the part of a file that holds one; or one of pickle alone.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        begin, length: the part of the file; by default all of it.
        constructors: of further classes; see `pickles.read`.
        archive: the zip file that it is, if it is known already.

    Raises:
        CheckpointCorrupt: it is damaged, or was not written by torch.save.
        UnsupportedFormat: torch before 0.2 wrote it.
        Failed: the storage failed.
    """

    def __init__(
        self,
        files: Files,
        name: str,
        begin: int = 0,
        length: int | None = None,
        constructors: Mapping[str, Callable[..., Any]] | None = None,
        archive: ZipFile | None = None,
    ) -> None:
        self._known = {**CONSTRUCTORS, **(constructors or {})}
        self._source: _Zip | LegacyFile | BarePickle
        self.members: tuple[str, ...] = ()
        self.program: tuple[ZipFile, str] | None = None
        """The zip file, and the folder in it, if it is a program of torch.jit."""
        if archive is None and length is None and is_legacy(files.head(name)):
            self._source = LegacyFile(files, name, self._known)
        elif archive is None and length is None and is_pickle(files.head(name)):
            self._source = BarePickle(files, name, self._known)
        else:
            archive = archive or ZipFile(files, name, begin, length)
            self._source = _Zip(archive, self._known)
            self.members = tuple(archive.members)
            if self._source.top + _SCRIPT in archive.members:
                self.program = archive, self._source.top
        self.damaged = self._source.damaged
        """The error for a damaged file."""
        self.value = self._source.value
        """The saved value: containers, plain values, `Tensor`s and `PickledObject`s."""
        self.pickle_size = self._source.pickle_size
        """Bytes of the pickle, to bound work that depends on it."""
        self.name = name
        self._described: dict[int, PickledObject] | None = None

    def opaque(self, obj: PickledObject | Global, most: int) -> Opaque:
        """An object of `value` that only its class can read, as it was saved.

        Arguments:
            obj: it, without tensors.
            most: how many bytes it may have.

        Raises:
            CheckpointCorrupt: it is too large, or has a name that no class has.
        """
        facts: Any = obj
        try:
            if isinstance(obj, PickledObject):
                if self._described is None:
                    source = self._source
                    outside = source.persistent if isinstance(source, BarePickle) else _as_stored
                    self._described = pickles.described(source.pickle(), outside)
                facts = self._described[obj.at]
            return Opaque(obj.name, pickle_writer.dumps(facts, most))
        except (ValueError, TypeError, KeyError) as error:
            raise self.damaged(f"{obj!r} is malformed: {error}") from error

    def box(self, tensor: Tensor) -> FileBox:
        """Where a tensor is in the file.

        Arguments:
            tensor: one of `value`.

        Raises:
            CheckpointCorrupt: its storage is missing, or too small.
        """
        torch_storage = tensor.storage
        if isinstance(torch_storage.data, FileBytes):
            begin, big_endian = torch_storage.data.offset, torch_storage.big_endian
            elements: Elements = FileRange(self.name, begin, big_endian)
        elif torch_storage.data is not None:
            elements = InMemoryElements(torch_storage.data, torch_storage.big_endian)
        else:
            begin = self._source.offset(torch_storage)
            if tensor.reach > tensor.nbytes:
                raise self.damaged(f"a tensor reaches beyond the storage {torch_storage.key!r}")
            elements = tensor.meant(FileRange(self.name, begin, self._source.big_endian))
        return FileBox(Box.whole(tensor.shape), elements, tensor.offset, tensor.strides)


class _Zip:
    """A file that torch.save wrote since torch 1.6.

    Arguments:
        archive: the zip file.
        constructors: see `pickles.read`.
    """

    def __init__(self, archive: ZipFile, constructors: Constructors) -> None:
        self._zip, self.damaged = archive, archive.damaged
        member = next((m for m in archive.members if m.endswith("/data.pkl")), None)
        if member is None:
            raise self.damaged("torch.save did not write it: it has no data.pkl")
        self.top = member.removesuffix("data.pkl")
        self._pickle = archive.members[member]
        self.pickle_size = self._pickle.size
        if self.pickle_size > _MOST_PICKLE:
            raise self.damaged(f"its data.pkl has {self.pickle_size} bytes, too many")
        self.big_endian = self._order() == b"big"
        self._offsets: dict[str, int] = {}
        try:
            self.value = pickles.read(archive.read(self._pickle), constructors, storage)
        except BadPickle as error:
            raise unread(
                error, f"{archive.files.location}: {archive.name}", "its data.pkl"
            ) from error

    def pickle(self) -> bytes:
        """The pickle of the value."""
        return self._zip.read(self._pickle)

    def _order(self) -> bytes:
        member = self._zip.members.get(self.top + "byteorder")
        return b"little" if member is None or member.size > 10 else self._zip.read(member)

    def offset(self, torch_storage: TorchStorage) -> int:
        """Where a storage begins in the file."""
        if torch_storage.key not in self._offsets:
            member = self._zip.members.get(f"{self.top}data/{torch_storage.key}")
            if member is None or member.method != STORED:
                raise self.damaged(f"the storage {torch_storage.key!r} is missing or compressed")
            if member.size < torch_storage.nbytes:
                raise self.damaged(
                    f"the storage {torch_storage.key!r} has {member.size} bytes, "
                    f"{torch_storage.nbytes} expected"
                )
            self._offsets[torch_storage.key] = self._zip.offset(member)
            self._zip.summed(member, self._offsets[torch_storage.key])
        return self._offsets[torch_storage.key]


def _is_module(persistent_id: Any) -> bool:
    """Whether a persistent id of an old file is a class of a module, with its source code."""
    is_pair = isinstance(persistent_id, tuple) and len(persistent_id) > 1
    return is_pair and persistent_id[0] == "module"


def _as_stored(persistent_id: Any) -> Any:
    return persistent_id[1] if _is_module(persistent_id) else PersistentId(persistent_id)


class LegacyFile:
    """A file that torch.save wrote before torch 1.6: pickles one after the other, then the
    storages.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        constructors: see `pickles.read`.

    Raises:
        CheckpointCorrupt: it is damaged.
        Failed: the storage failed.
    """

    def __init__(self, files: Files, name: str, constructors: Constructors) -> None:
        self._files, self._name = files, name
        self._storages: dict[str, TorchStorage] = {}
        cursor = Cursor(files, name)
        _, protocol, system = (self._read(cursor, constructors) for _ in range(3))
        if protocol != _PROTOCOL or not isinstance(system, dict):
            raise self.damaged(f"its protocol is {quoted(protocol)}, {_PROTOCOL} expected")
        self.big_endian = system.get("little_endian") is False
        self._begin = cursor.at
        self.value = self._read(cursor, constructors)
        self.pickle_size = cursor.at - self._begin
        keys = self._read(cursor, constructors)
        self._offsets = self._places(keys, cursor.at)

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for a damaged file."""
        return self._files.damaged(f"{self._name}: {reason}")

    def pickle(self) -> bytes:
        """The pickle of the value."""
        return self._files.read(self._name, self._begin, self.pickle_size)

    def _read(self, cursor: Cursor, constructors: Constructors) -> Any:
        """Reads the next pickle."""
        try:
            data = _next_pickle(cursor)
            return pickles.read(data, constructors, self._storage)
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt(f"{error}, within a pickle") from error
        except BadPickle as error:
            raise unread(error, f"{self._files.location}: {self._name}", "a pickle") from error

    def _storage(self, persistent_id: Any) -> Any:
        if _is_module(persistent_id):
            return persistent_id[1]
        made = storage(persistent_id)
        if self._storages.setdefault(made.key, made).nbytes != made.nbytes:
            raise BadPickle(f"the storage {quoted(made.key)} has two sizes")
        return made

    def _places(self, keys: Any, offset: int) -> dict[str, int]:
        """Where the storages begin, after the number of their elements."""
        places = dict[str, int]()
        for key in keys if isinstance(keys, list) else [None]:
            if not isinstance(key, str) or key not in self._storages or key in places:
                raise self.damaged(f"{quoted(key)} is not one of its storages")
            places[key] = offset + 8
            offset += 8 + self._storages[key].nbytes
        return places

    def offset(self, torch_storage: TorchStorage) -> int:
        """Where a storage begins in the file; costs one small read."""
        begin = self._offsets.get(torch_storage.key)
        if begin is None:
            raise self.damaged(f"the storage {quoted(torch_storage.key)} is missing")
        order = ">q" if self.big_endian else "<q"
        (count,) = struct.unpack(order, self._files.read(self._name, begin - 8, 8))
        if count != torch_storage.count:
            raise self.damaged(
                f"the storage {quoted(torch_storage.key)} has {count} elements, "
                f"{torch_storage.count} expected"
            )
        return begin


class BarePickle:
    """A file that is one pickle: large bytes, as of arrays, stay where they are in the file.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        constructors: see `pickles.read`.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it has content that unickpt does not read.
        Failed: the storage failed.
    """

    big_endian = False

    def __init__(self, files: Files, name: str, constructors: Constructors) -> None:
        self._files, self._name = files, name
        cursor = Cursor(files, name)
        try:
            self._data = _next_pickle(cursor, compacted=True)
            self.value = pickles.read(self._data, constructors, self.persistent)
        except BadPickle as error:
            raise unread(error, f"{files.location}: {name}", "its pickle") from error
        if not cursor.at_end():
            raise files.unsupported(
                f"{name} has more behind its pickle, such as another: load it with pickle if you "
                "trust it, and save its arrays"
            )
        self.pickle_size = cursor.at

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for a damaged file."""
        return self._files.damaged(f"{self._name}: {reason}")

    def pickle(self) -> bytes:
        """The pickle, with persistent ids in the place of large bytes."""
        return self._data

    def offset(self, torch_storage: Any) -> int:
        """Where a storage begins; a bare pickle has none."""
        raise self.damaged("it refers to external data")

    def persistent(self, persistent_id: Any) -> FileBytes:
        """The bytes for which `_compacted` has put a persistent id."""
        offset, size, is_text = persistent_id

        def read() -> bytes | str:
            data = self._files.read(self._name, offset, size)
            return data.decode("latin-1") if is_text else data

        return FileBytes(offset, size, read)


def _next_pickle(cursor: Cursor, compacted: bool = False) -> bytes:
    """The next pickle of a file.

    Arguments:
        cursor: at its beginning.
        compacted: whether persistent ids are put in the place of large bytes: where these are.

    Raises:
        BadPickle: it is malformed, or has persistent ids of its own and is to be compacted.
        CheckpointCorrupt: the file ends before, or the pickle is too large.
        Failed: the storage failed.
    """
    out = bytearray()
    code = b""
    while code != pickle.STOP:
        if len(out) > _MOST_PICKLE:
            raise cursor.damaged(f"has a pickle of more than {_MOST_PICKLE} bytes besides arrays")
        code = cursor.take(1)
        if compacted and code in _OUTSIDE:
            raise NotSupported("it refers to external data")
        is_large = compacted and code in _BYTES
        out += _bytes(cursor, code) if is_large else _other(cursor, code)
    return bytes(out)


def _bytes(cursor: Cursor, code: bytes) -> bytes:
    head = cursor.take(_BYTES[code])
    size = int.from_bytes(head, "little")
    if size < _LARGE:
        return code + head + cursor.take(size)
    place = b"".join(
        pickle.LONG1 + b"\x0a" + number.to_bytes(10, "little")
        for number in (cursor.skip(size), size, code == pickle.BINSTRING)
    )
    return place + pickle.TUPLE3 + pickle.BINPERSID


def _other(cursor: Cursor, code: bytes) -> bytes:
    size = _ARGUMENTS.get(code)
    if size is None:
        raise BadPickle(f"unknown opcode {code!r} at byte {cursor.at - 1}")
    if size == pickletools.UP_TO_NEWLINE:
        lines = (cursor.line(_MOST_PICKLE) for _ in range(2 if code in _TWO_LINES else 1))
        return code + b"".join(lines)
    if size >= 0:
        return code + cursor.take(size)
    head = cursor.take(_LENGTHS[size])
    count = int.from_bytes(head, "little")
    if count > _MOST_PICKLE:
        raise BadPickle(
            f"at byte {cursor.at} begins a value of {count} bytes, within a pickle that may have "
            f"{_MOST_PICKLE}"
        )
    return code + head + cursor.take(count)
