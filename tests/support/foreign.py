"""Checkpoints that other systems wrote, with what they hold: `tests/fixtures/foreign/<case>/`."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from support import TESTS
from unickpt.format import reader_registry
from unickpt.format.files import Files
from unickpt.storage.paths import resolve

FOLDER = Path(TESTS) / "fixtures" / "foreign"


def folder(case: str) -> Path:
    return FOLDER / case / "ckpt"


def unpacked(case: str, into: Path) -> Path:
    """The folder of a case that is packed."""
    with tarfile.open(FOLDER / case / "ckpt.tar.xz") as packed:
        packed.extractall(into, filter="data")
    return into / "ckpt"


def copied(case: str, to: str) -> None:
    """Copies a case's file of the name of `to`, or, if it has none, its folder."""
    source = folder(case) / Path(to).name
    Path(to).parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copy(source, to)
    else:
        shutil.copytree(folder(case), to)


def opened(path: Path | str, format: Any) -> unickpt.Checkpoint | None:
    """What a format makes of a folder."""
    reader = format.open(Files(resolve(path)), {})
    return None if reader is None else unickpt.Checkpoint(reader)


def expected(case: str) -> Any:
    return json.loads((FOLDER / case / "expected.json").read_text())


def differences(case: str, found: unickpt.Checkpoint) -> list[str]:
    """The arrays that are not, bit for bit, what the writing library says; and missing ones."""
    return differing(expected(case)["arrays"], found)


def differing(
    told: Mapping[str, Any], found: unickpt.Checkpoint, but: tuple[str, ...] = ()
) -> list[str]:
    """As `differences`.

    Arguments:
        told: dtype, shape and digest of each array, by our name of it.
        found: what we read.
        but: ends of names that need not be told.
    """
    bad = []
    for name, facts in told.items():
        array = np.asarray(found[name][...]) if name in found else np.empty(0)
        sha256 = digest(array)
        if (array.dtype.name, list(array.shape), sha256) != (
            facts["dtype"],
            facts["shape"],
            facts["sha256"],
        ):
            bad.append(name)
    return bad + [n for n in found.index.entries if n not in told and not (but and n.endswith(but))]


@contextmanager
def registered(format: Any) -> Iterator[None]:
    """While a format is known."""
    reader_registry.register(format)
    try:
        yield
    finally:
        reader_registry.unregister(format)


def count_reads(patch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The file and the bytes of every read from now on."""
    reads: list[tuple[str, int]] = []
    read_into = Files.read_into

    def counted(self: Files, file: str, offset: int, out: memoryview) -> None:
        reads.append((file, len(out)))
        read_into(self, file, offset, out)

    patch.setattr(Files, "read_into", counted)
    return reads


def digest(array: Any) -> str:
    """Of the bytes of an array, as in `expected.json`."""
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def damage_chunk_of_dcp(path: Path, name: str) -> None:
    """Clears the end of the only chunk of a tensor, by DCP's own name of it."""
    from unickpt.backends.dcp import reader as dcp  # which the core alone has not

    metadata = dcp.read_metadata(Files(resolve(path)))
    assert metadata is not None
    (chunk,) = metadata.tensors[name].chunks
    data = bytearray((path / chunk.blob.file).read_bytes())
    end = chunk.blob.offset + chunk.blob.length
    data[end - 22 : end] = bytes(22)
    (path / chunk.blob.file).write_bytes(data)
