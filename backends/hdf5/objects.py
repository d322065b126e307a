"""The groups, datasets and attributes of an HDF5 file, as pyfive parses them.

pyfive parses headers, B-trees and heaps; here their contents are checked. It reads the chunks of
files of HDF5's versions up to 1.8, which h5py writes without `libver="latest"`.
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from unickpt.backends.hdf5.bounded_file import BoundedFile
from unickpt.errors import UnsupportedFormat

UNDEFINED = (1 << 64) - 1
"""As an address: nothing is stored."""
_SPACE, _LINKS, _TYPE, _OLD_FILL, _FILL, _LINK, _EXTERNAL, _LAYOUT = 1, 2, 3, 4, 5, 6, 7, 8
_GROUP, _ATTRIBUTE, _TABLE, _ATTRIBUTES = 0xA, 0xC, 0x11, 0x15
_SHARED = 2  # a flag of messages: it lies in another object
_MOST_TEXT = 64 << 10
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# The bytes of an object's header. pyfive copies all before a block to append the block.
_MOST_HEADER, _MOST_COPIED = 4 << 20, 1 << 30
_MOST_STEPS = 1 << 26  # pyfive looks for each record in the list of a heap's blocks
# The exponent's place and bits, the mantissa's bits, the bias: by the bytes of a float.
_FLOATS = {2: (10, 5, 10, 15), 4: (23, 8, 23, 127), 8: (52, 11, 52, 1023)}


def import_pyfive(where: str) -> Any:
    """The classes of pyfive that parse structures.

    Raises:
        UnsupportedFormat: it is not installed.
    """
    try:
        names = ("dataobjects", "btree", "datatype_msg", "misc_low_level")
        modules = [importlib.import_module(f"pyfive.{name}") for name in names]
    except ImportError as error:
        raise UnsupportedFormat(
            f"{where}: HDF5 files are read by the package pyfive, which cannot be imported "
            f"({error}): pip install 'unickpt[h5]'"
        ) from error
    return SimpleNamespace(**{name: value for m in modules for name, value in vars(m).items()})


@dataclass(frozen=True)
class Datatype:
    """A datatype.

    Arguments:
        description: for messages.
        size: of an element, in bytes.
        dtype: NumPy's, if it has the same.
        opaque: whether the bytes have no meaning.
    """

    description: str
    size: int
    dtype: np.dtype | None = None
    opaque: bool = False


@dataclass(frozen=True)
class Link:
    """An entry of a group: the address of an object, or None if it leads to a name."""

    name: str
    address: int | None


class HDF5File:
    """The content of an HDF5 file, for one thread at a time.

    Arguments:
        where: the file, for messages.
        size: its bytes.
        fetch: reads bytes, by offset and count.

    Raises:
        CheckpointCorrupt: the head is damaged, or the file too short.
        UnsupportedFormat: it is of another version, or pyfive is not installed.
    """

    def __init__(self, where: str, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self.where, self.source = where, BoundedFile(where, size, fetch)
        if self.source.read(min(size, len(_SIGNATURE))) != _SIGNATURE:
            raise self.damaged("it has no valid head")
        self.pyfive = import_pyfive(where)
        self._objects: dict[int, HDF5Object] = {}
        self._heaps: dict[int, Any] = {}
        head = self.pyfive.SuperBlock(self.source, 0)
        facts = head._contents
        if facts["base_address"]:
            raise UnsupportedFormat(f"{where}: it begins with a block of users")
        if facts["end_of_file_address"] > size:
            raise self.damaged(f"it has {size} bytes of {facts['end_of_file_address']}")
        self.root = self.object(head.offset_to_dataobjects)

    def damaged(self, reason: str) -> Exception:
        """The error for a damaged file."""
        return self.source.damaged(reason)

    def object(self, address: int) -> HDF5Object:
        """The group or dataset whose header begins at an address."""
        if address not in self._objects:
            with self.source.at_most(_MOST_HEADER, _MOST_COPIED):
                header = self.pyfive.DataObjects(self.source, address)
            self._objects[address] = HDF5Object(self, address, header)
        return self._objects[address]

    def symbols(self, tree: int, heap: int) -> Iterator[Link]:
        """The links of a group in the old form."""
        names = self.pyfive.Heap(self.source, heap).data
        for address in self.pyfive.BTreeV1Groups(self.source, tree).symbol_table_addresses():
            for entry in self.pyfive.SymbolTable(self.source, address).entries:
                begin = entry["link_name_offset"]
                name = names[begin : names.index(0, begin)]
                self.source.charge(len(name))
                is_name = entry["cache_type"] == 2
                yield Link(name.decode(), None if is_name else entry["object_header_address"])

    def dense(self, message: bytes, of_links: bool) -> Iterator[bytes]:
        """The messages of links, or of attributes, that lie in a heap."""
        offset = 2 + (message[1] & 1) * (8 if of_links else 2)
        heap_address, tree_address = struct.unpack_from("<QQ", message, offset)
        if heap_address == UNDEFINED:
            return
        heap = self.pyfive.FractalHeap(self.source, heap_address)
        tree = self.pyfive.BTreeV2GroupNames if of_links else self.pyfive.BTreeV2AttrNames
        records = list(tree(self.source, tree_address).iter_records())
        if len(records) * len(heap.blocks) > _MOST_STEPS:
            raise self.damaged(f"the heap at byte {heap_address} has {len(heap.blocks)} blocks")
        for record in records:
            data = heap.get_data(record["heapid"])
            self.source.charge(len(data))
            yield data

    def heap_object(self, address: int, number: int) -> bytes:
        """An object of a heap of the whole file."""
        if address not in self._heaps:
            self._heaps[address] = self.pyfive.GlobalHeap(self.source, address)
        data: bytes = self._heaps[address].objects[number]
        return data


class HDF5Object:
    """A group, a dataset, or a datatype with a name.

    Arguments:
        file: that it is in.
        address: of its header.
        header: parsed by pyfive.
    """

    def __init__(self, file: HDF5File, address: int, header: Any) -> None:
        self.file, self.address, self.header = file, address, header

    def messages(self, kind: int, depth: int = 0) -> Iterator[bytes]:
        """The messages of a kind."""
        for message in self.header.find_msg_type(kind):
            begin, size = message["offset_to_message"], message["size"]
            data = self.header.msg_data[begin : begin + size]
            if len(data) < size:
                raise self.file.damaged(f"the object at byte {self.address} has half a message")
            if not message["flags"] & _SHARED:
                yield data
            elif depth == 0 and (data[0] < 3 or data[1] == 2):
                (address,) = struct.unpack_from("<Q", data, 8 if data[0] == 1 else 2)
                yield from self.file.object(address).messages(kind, 1)

    def message(self, kind: int) -> bytes:
        """The message of a kind; empty without one."""
        return next(self.messages(kind), b"")

    def _needed(self, kind: int) -> bytes:
        data = self.message(kind)
        if not data:
            raise self.file.damaged(f"the object at byte {self.address} lacks the message {kind}")
        return data

    def _has(self, *kinds: int) -> bool:
        return any(self.header.find_msg_type(kind) for kind in kinds)

    @property
    def is_group(self) -> bool:
        """Whether it has links."""
        return self._has(_TABLE, _LINKS, _GROUP)

    @property
    def is_dataset(self) -> bool:
        """Whether it has elements."""
        return self._has(_LAYOUT)

    @property
    def is_external(self) -> bool:
        """Whether the elements lie in other files."""
        return self._has(_EXTERNAL)

    @cached_property
    def links(self) -> list[Link]:
        """The entries of a group, by name."""
        links = [_link(data) for data in self.messages(_LINK)]
        for data in self.messages(_TABLE):
            links += self.file.symbols(*struct.unpack_from("<QQ", data))
        for data in self.messages(_LINKS):
            links += map(_link, self.file.dense(data, True))
        if len({link.name for link in links}) != len(links):
            raise self.file.damaged(f"the group at byte {self.address} has a name twice")
        return sorted(links, key=lambda link: link.name)

    def text(self, name: str, most: int = _MOST_TEXT) -> str | None:
        """The attribute of a name, if it is one text of at most so many bytes."""
        for data in self._attributes():
            begin, name_size = 8 + (data[0] == 3), int.from_bytes(data[2:4], "little")
            if data[begin : begin + name_size].rstrip(b"\0") == name.encode():
                text = self._text(data, begin + _padded(name_size, data[0]), most)
                if text is None or len(text) > most:
                    return None
                return text.rstrip(b"\0 ").decode(errors="replace")
        return None

    def _attributes(self) -> Iterator[bytes]:
        yield from self.messages(_ATTRIBUTE)
        for data in self.messages(_ATTRIBUTES):
            yield from self.file.dense(data, False)

    def _text(self, data: bytes, begin: int, most: int) -> bytes | None:
        """The bytes of an attribute whose datatype begins there; None if it is no text."""
        type_size, space_size = struct.unpack_from("<HH", data, 4)
        space = begin + _padded(type_size, data[0])
        value = data[space + _padded(space_size, data[0]) :]
        if (data[0] > 1 and data[1] & 1) or data[space + 1]:  # shared, or an array
            return None
        if data[begin] & 15 == 3:
            return value[: int.from_bytes(data[begin + 4 : begin + 8], "little")]
        if data[begin] & 15 == 9 and data[begin + 1] & 15 == 1:
            length, heap, number = struct.unpack_from("<IQI", value)
            return self.file.heap_object(heap, number)[:length] if length <= most else None
        return None

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of a dataset; None if it has no elements."""
        shape, _ = self.file.pyfive.determine_data_shape(self._needed(_SPACE), 0)
        if shape is None:
            return None
        if any(n >= 1 << 62 for n in shape) or math.prod(n or 1 for n in shape) >= 1 << 62:
            raise self.file.damaged(f"the object at byte {self.address} has the shape {shape}")
        return tuple(shape)

    @cached_property
    def type(self) -> Datatype:
        """The datatype of a dataset."""
        return _datatype(self.file.pyfive, self._needed(_TYPE))

    @property
    def layout(self) -> bytes:
        """How a dataset is stored, as its message says."""
        return self._needed(_LAYOUT)

    @property
    def fill(self) -> bytes:
        """The bytes of an element that is not stored; empty for zeros."""
        data = self.message(_FILL)
        if not data:
            old = self.message(_OLD_FILL) or bytes(4)
            return old[4 : 4 + int.from_bytes(old[:4], "little")]
        if data[0] < 3:
            size = int.from_bytes(data[4:8], "little") if data[0] == 1 or data[3] else 0
            return data[8 : 8 + size]
        return data[6 : 6 + int.from_bytes(data[2:6], "little")] if data[1] & 0x20 else b""


def _padded(size: int, version: int) -> int:
    """The bytes that a part of an attribute takes."""
    return -(-size // 8) * 8 if version == 1 else size


def _link(data: bytes) -> Link:
    """A link from its message. pyfive refuses a whole group for a link to another file."""
    flags, offset = data[1], 2
    kind = data[offset] if flags & 8 else 0
    offset += (flags >> 3 & 1) + 8 * (flags >> 2 & 1) + (flags >> 4 & 1)
    width = 1 << (flags & 3)
    length = int.from_bytes(data[offset : offset + width], "little")
    end = offset + width + length
    name = data[offset + width : end].decode()
    return Link(name, struct.unpack_from("<Q", data, end)[0] if kind == 0 else None)


# --- datatypes ------------------------------------------------------------------------------------


def _datatype(pyfive: Any, data: bytes) -> Datatype:
    """A datatype from its message. A type that pyfive takes for an IEEE float is compared with
    it."""
    kind, size = data[0] & 15, int.from_bytes(data[4:8], "little")
    if kind == 5:
        return Datatype(f"the dtype V{size}", size, opaque=True)
    other_kinds = {2: "time", 3: "text", 4: "bits", 6: "structures", 7: "references",
                   8: "enumerations", 9: "texts or lists"}  # fmt: skip
    other = Datatype(f"the dtype {other_kinds.get(kind, kind)}", size)
    if kind not in (0, 1, 6, 8):
        return other
    try:
        parsed = pyfive.DatatypeMessage(data, 0).ptype
    except (NotImplementedError, TypeError):
        return other
    if kind < 2:
        same = data[1:].startswith(_encodings(parsed.dtype))
        odd = Datatype(f"a dtype like {parsed.dtype}, which NumPy lacks", size)
        return Datatype(str(parsed.dtype), size, parsed.dtype) if same else odd
    if kind == 8:
        base = np.dtype(parsed.base_dtype)
        if not data[9:].startswith(_encodings(base)):
            return other
        is_bool = size == 1 and parsed.mapping == {"FALSE": 0, "TRUE": 1}
        return Datatype("enumerations", size, np.dtype(bool) if is_bool else base)
    if not parsed.is_complex or len({field.ptype.dtype for field in parsed.fields}) != 1:
        return other
    part = parsed.fields[0].ptype.dtype
    is_complex = data.count(_encodings(part)[0]) == 2 and 2 * part.itemsize == size
    return Datatype("complex", size, parsed.dtype) if is_complex else other


def _encodings(dtype: np.dtype) -> tuple[bytes, ...]:
    """How HDF5 describes an integer or float of NumPy, after the byte of the version."""
    size, order = dtype.itemsize, int(dtype.str[0] == ">")
    if dtype.kind in "iu":
        orders = (0, 1) if size == 1 else (order,)
        signed = 8 * (dtype.kind == "i")
        return tuple(struct.pack("<HBIHH", o | signed, 0, size, 0, 8 * size) for o in orders)
    exponent, width, mantissa, bias = _FLOATS.get(size, (0, 0, 0, 0))
    facts = (0, 8 * size, exponent, width, 0, mantissa, bias)
    return (struct.pack("<BBBIHHBBBBI", order | 0x20, 8 * size - 1, 0, size, *facts),)
