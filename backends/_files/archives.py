"""Files in archives, as files of a folder: members of zip and tar files, and gzip files.

Uncompressed members are read as ranges of the archive. Compressed members are decompressed piece by
piece from the nearest saved state of the decompressor, so memory is bounded. Source: Python's
tarfile, which reads the headers.
"""

from __future__ import annotations

import errno
import io
import tarfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from threading import Lock
from typing import Any

from unickpt.backends._files.headers import size_of
from unickpt.backends._files.zip_files import DEFLATED, STORED, Member, ZipFile
from unickpt.extend import Damaged, Files

GZIP = b"\x1f\x8b"
_STEP = 1 << 20  # bytes at a time
_SPACING, _MOST_STATES = 4 << 20, 1000  # of about 45 KB each
_MOST_MEMBERS = 10_000
_MOST_HEADER = 1 << 20  # bytes of a header of a tar file, which may contain a long name
RAW, WITH_HEADER = -15, 31
"""Formats of zlib."""
_State = tuple[int, int, Any]


class InArchive(Exception):
    """The cause of an error about an archive's content: the archive itself is of a known kind."""


@dataclass(frozen=True)
class ArchivePart:
    """The bytes of a file in an archive.

    Arguments:
        size: how many.
        read_into: reads from an offset into memory.
    """

    size: int
    read_into: Callable[[int, memoryview], None]

    def range(self, begin: int, size: int) -> ArchivePart:
        """Some of the bytes, which follow each other."""
        return ArchivePart(size, lambda offset, out: self.read_into(begin + offset, out))


def whole_file(files: Files, name: str) -> ArchivePart:
    """All bytes of a file of a checkpoint."""
    return ArchivePart(size_of(files, name), lambda offset, out: files.read_into(name, offset, out))


class Inflated:
    """The decompressed bytes of a part of an archive; for several threads.

    Arguments:
        source: the compressed bytes.
        format: of zlib: raw, or with the header of gzip.
        where: for errors.
    """

    def __init__(self, source: ArchivePart, format: int, where: str) -> None:
        self._source, self._format, self._where = source, format, where
        self._lock, self._spacing = Lock(), _SPACING
        # Decompressors, after how many bytes each has made, and how many it has read.
        self._states: list[_State] = [(0, 0, zlib.decompressobj(format))]
        self._last = self._states[0]  # where the last reader stopped: others resume from there

    def all(self) -> ArchivePart:
        """All bytes, which are counted."""
        state = self._nearest(1 << 62)
        made = [made for (made, *_), _ in self._run(state, 1 << 62)]
        return ArchivePart(max(made, default=state[0]), self.read_into)

    def head(self, most: int) -> bytes:
        """The first bytes."""
        return b"".join(data for _, data in self._run(self._nearest(0), most))

    def read_into(self, offset: int, out: memoryview) -> None:
        """Reads bytes from an offset into memory."""
        done = 0
        for (made, *_), data in self._run(self._nearest(offset), offset + len(out)):
            piece = data[max(0, offset + done - (made - len(data))) :]
            out[done : done + len(piece)] = piece
            done += len(piece)
        if done < len(out):
            raise Damaged(f"{self._where} ends after {offset + done} bytes")

    def _nearest(self, offset: int) -> _State:
        with self._lock:
            index = bisect_right(self._states, offset, key=lambda state: state[0])
            nearest_state = self._states[index - 1]
            if nearest_state[0] < self._last[0] <= offset:
                nearest_state = self._last
            return *nearest_state[:2], nearest_state[2].copy()

    def _run(self, state: _State, end: int) -> Iterator[tuple[_State, bytes]]:
        """Decompresses from a state up to a place, or to the end of all."""
        made, offset, stream = state
        while made < end:
            compressed = bytearray(min(_STEP, self._source.size - offset))
            self._source.read_into(offset, memoryview(compressed))
            if stream.eof:  # another one can follow, as of parallel compressors
                if self._format == RAW or compressed[:2] != GZIP:
                    break
                stream = zlib.decompressobj(self._format)
            try:
                data = stream.decompress(compressed, min(_STEP, end - made))
            except zlib.error as error:
                raise Damaged(f"{self._where} cannot be decompressed: {error}") from error
            if not data and not compressed and not stream.eof:
                raise Damaged(f"{self._where} ends within compressed data")
            leftover = stream.unused_data if stream.eof else stream.unconsumed_tail
            offset, made = offset + len(compressed) - len(leftover), made + len(data)
            self._keep((made, offset, stream))
            yield (made, offset, stream), data

    def _keep(self, state: _State) -> None:
        with self._lock:
            self._last = *state[:2], state[2].copy()
            if state[0] < self._states[-1][0] + self._spacing:
                return
            self._states.append(self._last)
            if len(self._states) > _MOST_STATES:
                self._spacing, self._states = 2 * self._spacing, self._states[::2]


class MemberFiles(Files):
    """The files in an archive, or in a folder of one.

    Arguments:
        archive: the checkpoint that the archive is, or contains.
        members: by their paths.
    """

    _folder = ""  # all sizes are known, as in a local one

    def __init__(self, archive: Files, members: Mapping[str, ArchivePart]) -> None:
        super().__init__(archive.location)
        self._archive, self._members = archive, members

    @cached_property
    def names(self) -> list[str]:
        return sorted(self._members)

    @cached_property
    def here(self) -> list[str]:
        return [name for name in self.names if "/" not in name]

    @cached_property
    def databases(self) -> list[str]:
        return []

    def below(self, folder: str) -> MemberFiles:
        """The files in a folder, which ends with a slash; in all if it is empty."""
        inner = {
            name.removeprefix(folder): part
            for name, part in self._members.items()
            if name.startswith(folder)
        }
        return MemberFiles(self._archive, inner)

    def exists(self, file: str) -> bool:
        return file in self._members

    def size(self, file: str) -> int:
        return self._part(file).size

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        if offset + len(out) > self.size(file):
            raise Damaged(f"{file} ends at byte {self.size(file)}")
        self._part(file).read_into(offset, out)

    def _part(self, file: str) -> ArchivePart:
        if file not in self._members:
            raise Damaged(f"no file {file} in the archive", errno.ENOENT)
        return self._members[file]


def zipped(archive: ZipFile) -> dict[str, ArchivePart]:
    """The files of a zip file; without those that are compressed by another method than deflate.

    The header of each is checked when it is read.
    """
    whole = whole_file(archive.files, archive.name)

    def part(member: Member) -> ArchivePart:
        @cache
        def stored() -> ArchivePart | Inflated:
            compressed = whole.range(archive.offset(member), member.compressed)
            where = f"{archive.name}: {member.name}"
            return compressed if member.method == STORED else Inflated(compressed, RAW, where)

        return ArchivePart(member.size, lambda offset, out: stored().read_into(offset, out))

    return {
        name: part(member)
        for name, member in archive.members.items()
        if not name.endswith("/") and member.method in (STORED, DEFLATED)
    }


def tarred(whole: ArchivePart, damaged: Any) -> dict[str, ArchivePart] | None:
    """The regular files of a tar file; None if they are too many for a checkpoint.

    Arguments:
        whole: the tar file.
        damaged: makes the error of a reason.

    Raises:
        CheckpointCorrupt: it is damaged.
    """
    parts, last, stream = dict[str, ArchivePart](), -1, _Stream(whole)
    try:
        with tarfile.TarFile(fileobj=stream, mode="r") as archive:
            for count, member in enumerate(iter(archive.next, None)):
                if count > _MOST_MEMBERS:
                    return None
                name, begin = member.name.removeprefix("./"), member.offset_data
                if not last < member.offset <= begin <= begin + member.size <= whole.size:
                    raise ValueError(f"its member {name!r} lies beyond the end, or in another")
                last = member.offset
                if member.isreg() and not member.issparse():
                    parts[name] = whole.range(begin, member.size)
            stream.seek(archive.offset)  # Python takes a damaged header for the end
            if any(stream.read(tarfile.BLOCKSIZE)):
                raise ValueError(f"no member at byte {archive.offset}")
    except (tarfile.TarError, ValueError, OverflowError, MemoryError, EOFError) as error:
        raise damaged(f"its headers are damaged: {error}") from error
    return parts


class _Stream(io.RawIOBase):
    """A part of an archive as Python's tarfile reads it, which takes short reads for its end."""

    def __init__(self, part: ArchivePart) -> None:
        self._part, self._at = part, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        count = min(size, self._part.size - self._at)
        if not 0 <= count <= _MOST_HEADER or self._at < 0:
            raise ValueError(f"a header of {size} bytes at byte {self._at}")
        out = bytearray(count)
        self._part.read_into(self._at, memoryview(out))
        self._at += count
        return bytes(out)
