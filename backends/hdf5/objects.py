"""What an HDF5 file holds: groups, and datasets with their shapes, dtypes, attributes and layouts.

Source: the HDF5 file format specification, version 3. Everything is read when it is asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unickpt.backends.hdf5.blocks import (
    UNDEFINED,
    FractalHeap,
    HDF5Blocks,
    integer,
    tree_leaves,
    tree_records,
)
from unickpt.errors import UnsupportedFormat

_SPACE, _LINKS, _TYPE, _OLD_FILL, _FILL, _LINK, _EXTERNAL, _LAYOUT = 1, 2, 3, 4, 5, 6, 7, 8
_GROUP, _FILTERS, _ATTRIBUTE, _CONTINUED, _TABLE, _ATTRIBUTES = 0xA, 0xB, 0xC, 0x10, 0x11, 0x15
_SHARED = 2  # a flag of messages: it lies elsewhere
_MOST_TEXT = 64 << 10
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Exponent's place and bits, mantissa's bits, bias: by the bytes of a float.
_FLOATS = {2: (10, 5, 10, 15), 4: (23, 8, 23, 127), 8: (52, 11, 52, 1023)}


@dataclass(frozen=True)
class Datatype:
    """A datatype.

    Arguments:
        told: what it is, for messages.
        size: of an element, in bytes.
        dtype: NumPy's, if it has the same.
        opaque: whether the bytes have no meaning.
        used: bytes of its description.
    """

    told: str
    size: int
    dtype: np.dtype | None = None
    opaque: bool = False
    used: int = 8


def _name_end(data: bytes, at: int, version: int) -> int:
    """Where what follows a name begins."""
    end = data.index(0, at) + 1
    return end if version >= 3 else at + -(-(end - at) // 8) * 8


def datatype(data: bytes, depth: int = 0) -> Datatype:
    """A datatype from its description."""
    version, kind = data[0] >> 4, data[0] & 15
    bits, size = integer(data[1:4]), integer(data[4:8])
    order = ">" if bits & 1 else "<"
    if kind == 0:
        offset, precision = struct.unpack_from("<HH", data, 8)
        if size in (1, 2, 4, 8) and (offset, precision) == (0, 8 * size):
            letter = "i" if bits & 8 else "u"
            return Datatype(letter, size, np.dtype(f"{order}{letter}{size}"), used=12)
        return Datatype(f"integers of {precision} bits, which NumPy lacks", size, used=12)
    if kind == 1:
        at, precision, exponent, wide, low, mantissa, bias = struct.unpack_from("<HHBBBBI", data, 8)
        told = f"float{8 * size}"
        place = (at, precision, low, bits & 0x40, bits >> 4 & 3, bits >> 8 & 0xFF)
        same = place == (0, 8 * size, 0, 0, 2, 8 * size - 1)
        if same and _FLOATS.get(size) == (exponent, wide, mantissa, bias):
            return Datatype(told, size, np.dtype(f"{order}f{size}"), used=20)
        return Datatype(f"a dtype like {told}, which NumPy lacks", size, used=20)
    if kind == 5:
        return Datatype(f"the dtype V{size}", size, opaque=True)
    if kind == 6 and depth == 0:
        return _complex(data, version, size, bits & 0xFFFF)
    if kind == 8 and depth == 0:
        return _enumeration(data, version, size, bits & 0xFFFF)
    names = {2: "time", 3: "text", 4: "bits", 6: "structure", 7: "reference", 9: "text or list"}
    return Datatype(f"the dtype {names.get(kind, kind)}", size)


def _complex(data: bytes, version: int, size: int, count: int) -> Datatype:
    """A structure; h5py keeps complex numbers as one of two floats."""
    other, at, members = Datatype("the dtype of structures", size), 8, []
    if count != 2:
        return other
    for _ in range(count):
        name = data[at : data.index(0, at)]
        at = _name_end(data, at, version)
        wide = 4 if version < 3 else max(1, (size.bit_length() + 7) // 8)
        offset = integer(data[at : at + wide])
        at += wide + (28 if version == 1 else 0)
        member = datatype(data[at:], 1)
        if member.dtype is None or member.dtype.kind != "f":
            return other
        members.append((name, offset, member.dtype))
        at += member.used
    first = members[0][2]
    if members != [(b"r", 0, first), (b"i", size // 2, first)] or first.itemsize * 2 != size:
        return other
    if size < 8:
        return other
    return Datatype("complex", size, np.dtype(f"{first.str[0]}c{size}"), used=at)


def _enumeration(data: bytes, version: int, size: int, count: int) -> Datatype:
    """Integers with names; h5py keeps booleans as them."""
    base = datatype(data[8:], 1)
    at, names = 8 + base.used, []
    if base.dtype is None:
        return Datatype("the dtype of enumerations", size)
    for _ in range(min(count, 3)):
        names.append(data[at : data.index(0, at)])
        at = _name_end(data, at, version)
    if size == 1 and names == [b"FALSE", b"TRUE"] and data[at : at + 2] == b"\0\1":
        return Datatype("bool", 1, np.dtype(bool))
    return Datatype("the dtype of enumerations", size, base.dtype)


@dataclass(frozen=True)
class Link:
    """An entry of a group: the place of an object, or None if it leads to a name."""

    name: str
    at: int | None


def root_of(blocks: HDF5Blocks) -> HDF5Object:
    """The group that contains all of an HDF5 file.

    Raises:
        CheckpointCorrupt: the head is damaged, or the file too short.
        UnsupportedFormat: it is of another version.
    """
    head = blocks.read(0, min(blocks.size, 96))
    if head[:8] != _SIGNATURE or len(head) < 48:
        raise blocks.damaged("it has no valid head")
    version = head[8]
    if version > 3 or (head[9:11] if version > 1 else head[13:15]) != b"\x08\x08":
        raise UnsupportedFormat(
            f"{blocks.where}: its version {version}, or the size of its addresses, is not read"
        )
    at = {0: 24, 1: 28}.get(version, 12)
    base, _, end, root = struct.unpack_from("<QQQQ", head, at)
    if version < 2:
        root = integer(head[at + 40 : at + 48])
    else:
        blocks.checked(0, _SIGNATURE, 44)
    if base:
        raise UnsupportedFormat(f"{blocks.where}: it begins with a block of users")
    if end > blocks.size:
        raise blocks.damaged(f"it has {blocks.size} bytes of {end}")
    return HDF5Object(blocks, root)


@dataclass(frozen=True)
class HDF5Object:
    """A group, a dataset, or a datatype with a name.

    Arguments:
        blocks: of the file.
        at: its header.
    """

    blocks: HDF5Blocks
    at: int

    @cached_property
    def _messages(self) -> list[tuple[int, int, bytes, int]]:
        """The kind, flags, bytes and place of each message."""
        head = self.blocks.read(self.at, min(16, max(0, self.blocks.size - self.at)))
        if head[:4] == b"OHDR":
            flags, begin = head[5], 6 + 16 * (head[5] >> 5 & 1) + 4 * (head[5] >> 4 & 1)
            wide = 1 << (flags & 3)
            size = integer(self.blocks.read(self.at + begin, wide))
            first = begin + wide
            data = self.blocks.checked(self.at, b"OHDR", first + size)[first:]
            return self._continued(data, self.at + first, 6 if flags & 4 else 4, True)
        if head[:2] != b"\1\0":
            raise self.blocks.damaged(f"no object at byte {self.at}")
        size = integer(head[8:12])
        return self._continued(self.blocks.read(self.at + 16, size), self.at + 16, 8, False)

    def _continued(
        self, data: bytes, place: int, head: int, new: bool
    ) -> list[tuple[int, int, bytes, int]]:
        """As `_messages`, from the first block; messages have so many bytes before their data."""
        found, todo, seen = [], [(data, place)], {place}
        while todo:
            data, place = todo.pop()
            at = 0
            while at + head <= len(data):
                if new:
                    kind, size, flags = struct.unpack_from("<BHB", data, at)
                else:
                    kind, size, flags = struct.unpack_from("<HHB", data, at)
                at += head
                body = data[at : at + size]
                if len(body) < size:
                    raise self.blocks.damaged(f"the object at byte {self.at} has half a message")
                found.append((kind, flags, body, place + at))
                at += size
                if kind == _CONTINUED:
                    begin, length = struct.unpack_from("<QQ", body)
                    if begin in seen:
                        raise self.blocks.damaged(f"the object at byte {self.at} is endless")
                    seen.add(begin)
                    if new:
                        more = self.blocks.checked(begin, b"OCHK", length - 4)[4:]
                        todo.append((more, begin + 4))
                    else:
                        todo.append((self.blocks.read(begin, length), begin))
        return found

    def _message(self, kind: int, depth: int = 0) -> tuple[bytes, int] | None:
        """The bytes and the place of a message; None without one."""
        for found, flags, data, place in self._messages:
            if found != kind:
                continue
            if not flags & _SHARED:
                return data, place
            at = integer(data[8:16] if data[0] == 1 else data[2:10])
            if depth or (data[0] == 3 and data[1] != 2):
                break
            return HDF5Object(self.blocks, at)._message(kind, 1)
        return None

    def _has(self, *kinds: int) -> bool:
        return any(kind in kinds for kind, *_ in self._messages)

    @property
    def is_group(self) -> bool:
        return self._has(_TABLE, _LINKS, _GROUP)

    @property
    def is_dataset(self) -> bool:
        return self._has(_LAYOUT)

    @property
    def is_external(self) -> bool:
        """Whether the bytes lie in other files."""
        return self._has(_EXTERNAL)

    # --- groups ---------------------------------------------------------------------------------

    @cached_property
    def links(self) -> list[Link]:
        """The entries of a group, by name."""
        found = [_link(data) for kind, _, data, _ in self._messages if kind == _LINK]
        table, info = self._message(_TABLE), self._message(_LINKS)
        if table is not None:
            found += self._old_links(*struct.unpack_from("<QQ", table[0]))
        if info is not None:
            found += map(_link, self._dense(info[0], 5))
        names = {link.name for link in found}
        if len(names) != len(found):
            raise self.blocks.damaged(f"the group at byte {self.at} has a name twice")
        return sorted(found, key=lambda link: link.name)

    def _old_links(self, tree: int, heap: int) -> Iterator[Link]:
        _, _, size, _, begin = struct.unpack("<4sIQQQ", self.blocks.signed(heap, b"HEAP", 32))
        names = self.blocks.read(begin, size)
        for _, node in tree_leaves(self.blocks, tree, 0, 8):
            count = integer(self.blocks.signed(node, b"SNOD", 8)[6:8])
            data = self.blocks.read(node + 8, 40 * count)
            for at in range(0, len(data), 40):
                name, header, cached = struct.unpack_from("<QQI", data, at)
                text = names[name : names.index(0, name)].decode()
                yield Link(text, None if cached == 2 else header)

    def _dense(self, info: bytes, kind: int) -> Iterator[bytes]:
        """The messages in a heap: links, or attributes; `kind` is of their tree."""
        at = 2 + (info[1] & 1) * (8 if kind == 5 else 2)
        heap_at, tree = struct.unpack_from("<QQ", info, at)
        if heap_at == UNDEFINED:
            return
        heap = FractalHeap(self.blocks, heap_at)
        for record in tree_records(self.blocks, tree, (kind,)):
            key = record[4:] if kind == 5 else record[:8]
            data = heap.object(key)
            if data is not None:
                yield data

    # --- attributes -----------------------------------------------------------------------------

    def text(self, name: str, most: int = _MOST_TEXT) -> str | None:
        """The attribute of a name, if it is a text of at most so many bytes."""
        every = [data for kind, flags, data, _ in self._messages if kind == _ATTRIBUTE]
        for data in every:
            if _attribute_name(data) == name.encode():
                return self._value(data, most)
        info = self._message(_ATTRIBUTES)
        for data in self._dense(info[0], 8) if info is not None else ():
            if _attribute_name(data) == name.encode():
                return self._value(data, most)
        return None

    def _value(self, data: bytes, most: int) -> str | None:
        version = data[0]
        name, kind, space = struct.unpack_from("<HHH", data, 2)
        at, padded = 8 + (version == 3), 8 if version == 1 else 1
        at += -(-name // padded) * padded
        found = data[at : at + kind]
        value = data[at + -(-kind // padded) * padded + -(-space // padded) * padded :]
        if version > 1 and data[1] & 1:
            return None
        if found[0] & 15 == 3:
            text = value[: integer(found[4:8])]
        elif found[0] & 15 == 9 and found[1] & 15 == 1:
            length, heap, number = struct.unpack_from("<IQI", value)
            if length > most:
                return None
            text = self._global(heap, number)[:length]
        else:
            return None
        return text.rstrip(b"\0 ").decode(errors="replace") if len(text) <= most else None

    def _global(self, heap: int, number: int) -> bytes:
        """An object of a heap of the whole file."""
        end = heap + integer(self.blocks.signed(heap, b"GCOL", 16)[8:16])
        at = heap + 16
        while at + 16 <= end:
            found, _, _, size = struct.unpack("<HHIQ", self.blocks.read(at, 16))
            if found == 0:
                break
            if found == number:
                return self.blocks.read(at + 16, size)
            at += 16 + -(-size // 8) * 8
        raise self.blocks.damaged(f"the heap at byte {heap} has no object {number}")

    # --- datasets -------------------------------------------------------------------------------

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """The shape; None if there are no elements."""
        data = self._needed(_SPACE)
        version, rank = data[0], data[1]
        if version not in (1, 2):
            raise UnsupportedFormat(f"{self.blocks.where}: a dataspace of version {version}")
        if version == 2 and data[3] == 2:
            return None
        shape = struct.unpack_from(f"<{rank}Q", data, 8 if version == 1 else 4)
        if any(n >= 1 << 62 for n in shape) or math.prod(n or 1 for n in shape) >= 1 << 62:
            raise self.blocks.damaged(f"the object at byte {self.at} has the shape {shape}")
        return shape

    @cached_property
    def most(self) -> tuple[int, ...]:
        """The shape that it may grow to; `UNDEFINED` for a dimension without an end."""
        data, shape = self._needed(_SPACE), self.shape or ()
        if not data[2] & 1:
            return shape
        at = (8 if data[0] == 1 else 4) + 8 * len(shape)
        return struct.unpack_from(f"<{len(shape)}Q", data, at)

    @cached_property
    def type(self) -> Datatype:
        return datatype(self._needed(_TYPE))

    @cached_property
    def layout(self) -> tuple[bytes, int]:
        """How the bytes are stored, as its message says; and the message's place."""
        return self._needed(_LAYOUT), (self._message(_LAYOUT) or (b"", 0))[1]

    @cached_property
    def filters(self) -> bytes:
        """The message of the filters; empty without."""
        return (self._message(_FILTERS) or (b"", 0))[0]

    @cached_property
    def fill(self) -> bytes:
        """The bytes of an element that is not stored; empty for zeros."""
        data = (self._message(_FILL) or (b"", 0))[0]
        if not data:
            old = (self._message(_OLD_FILL) or (bytes(4), 0))[0]
            return old[4 : 4 + integer(old[:4])]
        if data[0] < 3:
            known = data[0] == 1 or data[3]
            return data[8 : 8 + integer(data[4:8])] if known else b""
        return data[6 : 6 + integer(data[2:6])] if data[1] & 0x20 else b""

    def _needed(self, kind: int) -> bytes:
        found = self._message(kind)
        if found is None:
            raise self.blocks.damaged(f"the object at byte {self.at} lacks the message {kind}")
        return found[0]


def _attribute_name(data: bytes) -> bytes:
    at = 8 + (data[0] == 3)
    return data[at : at + integer(data[2:4])].rstrip(b"\0")


def _link(data: bytes) -> Link:
    flags, at = data[1], 2
    kind = data[at] if flags & 8 else 0
    at += (flags >> 3 & 1) + 8 * (flags >> 2 & 1) + (flags >> 4 & 1)
    wide = 1 << (flags & 3)
    length = integer(data[at : at + wide])
    name = data[at + wide :][:length].decode()
    end = at + wide + length
    return Link(name, integer(data[end : end + 8]) if kind == 0 else None)
