"""The file of a seal: the size of each file of a folder, and the digests of its blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from unickpt.extend import Damaged, Files

NAME = "unickpt.seal.json"
FORMATS = {"safetensors": ".safetensors", "gguf": ".gguf"}
"""The formats whose folders can be sealed, with the suffix of their files."""
BLOCK_BYTES = 1 << 20
_VERSION = 1
# Larger files that are no weights are compared by `check_seal` only.
_READ_AT_OPEN, _AT_ONCE = 64 << 20, 16 << 20


def digest_of(data: Any) -> str:
    """The digest of a block."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class Seal:
    """A seal.

    Arguments:
        format: of the folder, one of `FORMATS`.
        sizes: of the files in bytes, by name.
        digests: of the blocks of each file.
        block_bytes: of each block but the last of a file.
    """

    format: str
    sizes: Mapping[str, int]
    digests: Mapping[str, tuple[str, ...]]
    block_bytes: int

    def encode(self) -> bytes:
        """As the file has it; its last line is a digest of all others."""
        return self._text + b"\n" + self.digest.encode() + b"\n"

    @property
    def digest(self) -> str:
        """The digest of the seal itself."""
        return digest_of(self._text)

    @property
    def _text(self) -> bytes:
        files = {
            name: {"bytes": size, "xxh3_128": list(self.digests[name])}
            for name, size in sorted(self.sizes.items())
        }
        facts = {"seal": _VERSION, "format": self.format, "block_bytes": self.block_bytes}
        return json.dumps({**facts, "files": files}, indent=0).encode()

    def is_weights(self, name: str) -> bool:
        """Whether a load reads the arrays of a file, and so checks it block by block."""
        return name.endswith(FORMATS[self.format])


def decode(content: bytes, files: Files) -> Seal:
    """The seal in a file.

    Arguments:
        content: of the file; untrusted.
        files: the folder, for errors.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: a later version of unickpt made it.
    """
    text, _, digest = content.rstrip(b"\n").rpartition(b"\n")
    if digest != digest_of(text).encode() or content != text + b"\n" + digest + b"\n":
        raise files.damaged(f"{NAME} is damaged; without it, nothing else here can be checked")
    body = json.loads(text)
    if body["seal"] != _VERSION or body["format"] not in FORMATS:
        raise files.unsupported(f"{NAME} is of a later version: {body['seal']}, {body['format']}")
    sizes = {name: entry["bytes"] for name, entry in body["files"].items()}
    digests = {name: tuple(entry["xxh3_128"]) for name, entry in body["files"].items()}
    sealed = Seal(body["format"], sizes, digests, body["block_bytes"])
    counts = {name: math.ceil(size / sealed.block_bytes) for name, size in sizes.items()}
    if any(len(digests[name]) != counts[name] for name in sizes):
        raise files.damaged(f"{NAME} has too many digests of a file, or too few")
    return sealed


def sealable(names: Iterable[str]) -> list[str]:
    """The files that a seal covers: all but itself, and hidden ones."""
    return [n for n in names if n != NAME and not any(p.startswith(".") for p in n.split("/"))]


class SealedFiles(Files):
    """The files of a sealed folder; each block that is read is compared with its digest.

    Arguments:
        files: of the folder, or one of them.
        sealed: its seal.
    """

    def __init__(self, files: Files, sealed: Seal) -> None:
        self.__dict__.update(files.__dict__)
        self.heads = {}
        self._plain, self.seal = files, sealed

    def size(self, file: str) -> int | None:
        size = self.seal.sizes.get(file)
        return self._plain.size(file) if size is None else size

    def read(self, file: str, offset: int, length: int) -> bytes:
        if file not in self.seal.sizes:
            return self._plain.read(file, offset, length)
        if not 0 <= offset <= offset + length <= self.seal.sizes[file]:
            raise Damaged(f"{file} has no bytes {offset} to {offset + length}")
        out = bytearray(length)
        self.read_into(file, offset, memoryview(out))
        return bytes(out)

    def tail(self, file: str, most: int) -> bytes:
        size = self.seal.sizes.get(file)
        if size is None:
            return self._plain.tail(file, most)
        return self.read(file, max(0, size - most), min(most, size))

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        if file not in self.seal.sizes:
            self._plain.read_into(file, offset, out)
            return
        out, size, block_bytes = out.cast("B"), self.seal.sizes[file], self.seal.block_bytes
        if offset + len(out) > size:
            raise Damaged(f"{file} has {size} bytes, {offset + len(out)} expected")
        end = offset + len(out)
        for number in range(offset // block_bytes, math.ceil(end / block_bytes)):
            begin, stop = number * block_bytes, min(size, (number + 1) * block_bytes)
            first, last = max(begin, offset), min(stop, end)
            is_inside = (first, last) == (begin, stop)
            part = out[first - offset : last - offset]
            block = part if is_inside else memoryview(bytearray(stop - begin))
            self._plain.read_into(file, begin, block)
            self.check_block(file, number, block)
            if not is_inside:
                part[:] = block[first - begin : last - begin]

    def check_block(self, file: str, number: int, block: memoryview) -> None:
        """Compares a block with its digest.

        Raises:
            Damaged: it differs.
        """
        if digest_of(block) != self.seal.digests[file][number]:
            begin = number * self.seal.block_bytes
            raise Damaged(
                f"{file} differs from what was sealed, within bytes {begin} to {begin + len(block)}"
            )

    def problems(self, *, is_full: bool) -> list[str]:
        """How the files differ from those that were sealed.

        Arguments:
            is_full: read all of them; else only small ones that are no weights, whose other blocks
                are compared when they are read.
        """
        sizes = self.seal.sizes
        present = set(sizes) if self.single is not None else set(sealable(self.names))
        texts = [f"{name} is missing" for name in sorted(sizes.keys() - present)]
        texts += [f"{name} was added" for name in sorted(present - sizes.keys())]
        for name in sorted(sizes.keys() & (present if self.single is None else {self.single})):
            is_read = is_full or not (self.seal.is_weights(name) or sizes[name] > _READ_AT_OPEN)
            try:
                size = self._plain.size(name)
                if size not in (None, sizes[name]):
                    texts.append(f"{name} has {size} bytes, and had {sizes[name]}")
                elif is_read:
                    for begin in range(0, sizes[name], _AT_ONCE):
                        self.read(name, begin, min(_AT_ONCE, sizes[name] - begin))
            except Damaged as error:
                texts.append(str(error))
        return texts
