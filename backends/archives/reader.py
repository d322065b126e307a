"""Checkpoints in zip and tar files and in files of gzip, read in place: `.nemo`, `.mar` and others.

The content of an archive is read as a folder, by the format that recognises it. Zip files of
Stable-Baselines3 (stable_baselines3/common/save_util.py) hold several files of torch.save, and are
one checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from itertools import groupby
from typing import Any, cast

from unickpt.backends._files import archives, file_choice
from unickpt.backends._files.archives import ArchivePart, InArchive, Inflated, MemberFiles
from unickpt.backends._files.file_choice import FoundFiles, open_kind
from unickpt.backends._files.torch_files import TorchFilesReader
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.zip_files import ZipFile
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.extend import (
    Damaged,
    Files,
    Format,
    Reader,
    SeveralCheckpoints,
    first_few,
    format_named,
    quoted,
    reading,
)

_HEAD = 512
# The formats that an archive can contain, in the order in which they are tried.
_FORMATS = (
    "bytecheckpoint", "megatron", "dcp", "deepspeed", "safetensors", "torch", "flax-msgpack",
    "hdf5", "gguf", "npz", "equinox", "npy", "pickle", "onnx",
)  # fmt: skip
_MOST_FOLDERS = 1000
_MOST_DATA = 64 << 20  # bytes of the attributes of an algorithm
_STABLE_BASELINES = ("_stable_baselines3_version", "policy.pth")

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens the checkpoint in an archive; None if there is no archive, or nothing known in it.

    Raises:
        CheckpointCorrupt: the archive is damaged, or the checkpoint in it.
        UnsupportedFormat: there are several checkpoints in it.
        StorageError: the storage failed.
    """

    def make(selection: FoundFiles) -> Reader | None:
        try:
            return _open(files, selection.names[0])
        except (CheckpointCorrupt, UnsupportedFormat) as error:
            raise type(error)(str(error)) from InArchive(str(error))
        except Damaged as error:
            reason = f"{selection.names[0]}: {error.reason}"
            raise files.damaged(reason) from InArchive(reason)

    if files.single is not None and _is_other_zip(files.head(files.single)):
        with reading(files.location):
            return make(FoundFiles((files.single,)))
    return open_kind(files, file_choice.ARCHIVE, make)


def _is_other_zip(head: bytes) -> bool:
    """Whether a file is a zip file, and not at once seen to be one of torch, NumPy or Keras."""
    first = file_choice.first_member(head).decode(errors="replace")
    return bool(first) and file_choice.is_plain_zip([first])


def _open(files: Files, name: str) -> Reader | None:
    members = _members(files, name)
    if members is None:
        return None
    inner = MemberFiles(files, members)
    if "data" in members and any(marker in members for marker in _STABLE_BASELINES):
        return _stable_baselines(inner)
    return _inside(inner, name)


def _members(files: Files, name: str) -> Mapping[str, ArchivePart] | None:
    """The files in an archive; None if it is of another kind."""
    head = files.head(name)
    if head[:2] == b"PK":
        archive = ZipFile(files, name)
        return archives.zipped(archive) if file_choice.is_plain_zip(archive.members) else None

    def damaged(reason: str) -> Exception:
        return files.damaged(f"{name}: {reason}")

    whole = archives.whole_file(files, name)
    if head[:2] == archives.GZIP:
        unzipped = Inflated(whole, archives.WITH_HEADER, name)
        head = unzipped.head(_HEAD)
        kind = next((kind for kind in file_choice.KINDS if kind.begins(head)), None)
        if kind is None:
            return None
        whole = unzipped.all()
        if not file_choice.is_tar(head):
            inner = name.removesuffix(".gz")
            return {inner if inner.endswith(kind.suffixes) else inner + kind.suffixes[0]: whole}
    return archives.tarred(whole, damaged) if file_choice.is_tar(head) else None


def _inside(files: MemberFiles, name: str) -> Reader | None:
    """The reader of an archive's content: of the highest folder with a checkpoint."""
    folders = {"", *(f"{path.rpartition('/')[0]}/" for path in files.names if "/" in path)}
    in_order = sorted(folders, key=lambda folder: (folder.count("/"), folder))[:_MOST_FOLDERS]
    for _, level in groupby(in_order, key=lambda folder: folder.count("/")):
        readers = {folder: _first(files.below(folder)) for folder in level}
        checkpoints = {folder: reader for folder, reader in readers.items() if reader is not None}
        if len(checkpoints) > 1:
            raise files.unsupported(
                f"{name} contains several checkpoints, in {first_few(list(checkpoints))}; unpack "
                "it, and give the path of one"
            )
        if checkpoints:
            return checkpoints.popitem()[1]
    return None


def _first(files: MemberFiles) -> Reader | None:
    """The reader of the first format that recognises a folder."""
    for name in _FORMATS:
        try:
            reader = cast(Format, format_named(name)).open(files, {})
        except SeveralCheckpoints as error:
            inside = first_few(list(map(quoted, error.paths)))
            raise UnsupportedFormat(
                f"{files.location} contains several checkpoints, {inside}; unpack it, and give the "
                "path of one"
            ) from error
        if reader is not None:
            return reader
    return None


def _stable_baselines(files: MemberFiles) -> Reader:
    """The files of torch.save of an algorithm of Stable-Baselines3, and its attributes."""
    opened = {
        name.removesuffix(".pth"): TorchFile(files, name)
        for name in files.here
        if name.endswith(".pth")
    }
    size = files.size("data")
    try:
        if size > _MOST_DATA:
            raise ValueError(f"it has {size} bytes, too many")
        data = json.loads(files.read("data", 0, size))
    except (ValueError, RecursionError) as error:
        raise files.damaged(f"its member data is damaged: {error}") from error
    return TorchFilesReader.of_files(files, opened, "stable-baselines3", {"data": data})
