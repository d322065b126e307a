"""seal(): writes digests beside the files of somebody's folder; check_seal() compares all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unickpt import CheckpointCorrupt, CheckpointExists, CheckpointNotFound
from unickpt.errors import UnsupportedFormat
from unickpt.extend import (
    MANIFEST,
    Files,
    PathLike,
    Progress,
    format_named,
    reading,
    reporting,
    resolve_path,
    storage_context,
)
from unickpt.plugins.seal.seal_file import BLOCK_BYTES, FORMATS, NAME, Seal, digest_of, sealable
from unickpt.plugins.seal.sealed_format import open_sealed


@dataclass(frozen=True)
class SealReport:
    """The result of `seal` and `check_seal`.

    Arguments:
        url: the folder.
        format: of it.
        files, nbytes: how many files the seal covers, and their bytes.
        digest: of the seal. `open(path, hints={"sealed": digest})` requires this one.
        problems: how the folder differs from its seal; empty if it does not.
    """

    url: str
    format: str
    files: int
    nbytes: int
    digest: str
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def seal(path: PathLike, *, overwrite: bool = False, progress: Progress = None) -> SealReport:
    """Writes digests of all files of a safetensors or GGUF folder into a file beside them.

    From then on, `unickpt.load` and `open` compare what they read of the folder with the digests,
    and refuse it if a file is missing or was added. The files stay as they are, so all other
    programs read them as before. Hidden files are not covered. The digests reveal accidents; they
    do not protect against an adversary, who can replace the seal.

    Arguments:
        path: the folder: a local path or a URL.
        overwrite: replace an existing seal, for a folder that was changed on purpose.
        progress: True for a bar, or a function of the bytes read so far and in total.

    Raises:
        CheckpointExists: the folder is sealed, and `overwrite` is False.
        UnsupportedFormat: it is of another format; unickpt's own has digests already.
        UnickptError: as `unickpt.open`.

    Example:
        >>> import os, tempfile, numpy as np, unickpt
        >>> from unickpt.plugins.seal import check_seal, seal
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = unickpt.save(f"{folder}/ours", {"w": np.zeros(3)})
        ...     _ = unickpt.convert(f"{folder}/ours", f"{folder}/st", to="safetensors")
        ...     seal(f"{folder}/st").ok, check_seal(f"{folder}/st").ok
        (True, True)
    """
    location = resolve_path(path)
    files = Files(location)
    with reading(location):
        if NAME in files.here and not overwrite:
            raise CheckpointExists(
                f"{location} is sealed: check it with `unickpt seal --check`. If it was "
                "changed on purpose, seal it again with --overwrite"
            )
        if not files.names:
            raise CheckpointNotFound(f"there are no files in {location}")
        readers = {name: format_named(name).open(files, {}) for name in FORMATS}
        format = next((name for name, reader in readers.items() if reader is not None), None)
        if format is None or MANIFEST in files.here:
            raise UnsupportedFormat(
                f"{location} is no folder of {' or '.join(FORMATS)}; only those can be sealed. "
                "unickpt's own checkpoints have digests already"
            )
        names = sealable(files.names)
        known_sizes = {name: files.size(name) for name in names}
        sizes = {n: len(files.whole(n)) if s is None else s for n, s in known_sizes.items()}
        digests, done, total = dict[str, tuple[str, ...]](), 0, sum(sizes.values())
        with reporting(progress, "sealing") as notify:
            for name, size in sizes.items():
                blocks = list[str]()
                for number in range(math.ceil(size / BLOCK_BYTES)):
                    begin = number * BLOCK_BYTES
                    data = files.read(name, begin, min(BLOCK_BYTES, size - begin))
                    blocks.append(digest_of(data))
                    done += len(data)
                    notify(done, total)
                digests[name] = tuple(blocks)
        sealed = Seal(format, sizes, digests, BLOCK_BYTES)
        if {
            name: Files(location).size(name) for name in sealable(Files(location).names)
        } != known_sizes:
            raise CheckpointCorrupt(f"{location} was changed while it was sealed; seal it again")
        location.store(storage_context()).write(NAME, sealed.encode()).result()
    return SealReport(location.url, format, len(sizes), total, sealed.digest)


def check_seal(path: PathLike) -> SealReport:
    """Compares all files of a sealed folder with its seal, also those that no load reads.

    Raises:
        CheckpointNotFound: the folder has no seal.
        CheckpointCorrupt: the seal is damaged.
        StorageError: the storage failed.
    """
    location = resolve_path(path)
    with reading(location):
        sealed_files = open_sealed(Files(location))
        if sealed_files is None:
            raise CheckpointNotFound(f"{location} has no seal; make one with `unickpt seal`")
        problems = tuple(sealed_files.problems(is_full=True))
    checked, sizes = sealed_files.seal, sealed_files.seal.sizes.values()
    return SealReport(
        location.url, checked.format, len(sizes), sum(sizes), checked.digest, problems
    )
