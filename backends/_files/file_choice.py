"""Which files at a location are the checkpoint, of the formats whose checkpoints are single files.

The content of a file decides its format. In a folder the names decide, as for transformers: weights
in safetensors come before torch's, and an index says which files belong together. Other files of a
trainer next to the weights are not part of them. If several candidates are left, none is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from unickpt.extend import Files, Reader, SeveralCheckpoints, quoted, reading, shortened

R = TypeVar("R", bound=Reader)
T = TypeVar("T")

_INDEX = ".index.json"
_SHOWN = 8  # names in a message
_MOST_HEADER = _MOST_INDEX = 100_000_000  # of safetensors, as upstream
# A pickle of protocol 2 to 5 that begins with the magic number 0x1950a86a20f9469cfc6c.
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# transformers' Trainer, accelerate, and torch's own examples.
_BESIDE_WEIGHTS = re.compile(
    r"training_args\.bin|(optimizer|scheduler)(_\d+)?\.(pt|bin)|scaler\.pt|rng_state(_\d+)?\.pth"
)


_OF_FILES = re.compile(
    r"(.*/)?(data\.pkl|version|byteorder|data/[0-9]+|archive_format|schema\.json)|.*\.npy"
    r"|model\.weights\.h5|metadata\.json", re.S,
)  # fmt: skip


@dataclass(frozen=True)
class FileKind:
    """A format whose checkpoints are single files.

    Arguments:
        name: shown to users.
        suffixes: of its files.
        begins: whether the first bytes of a file are those of such a file.
        weights: the names of its files in folders of Hugging Face.
        shared: the suffixes that other kinds of files use too, so that the content decides.
        is_named: whether a file has a name of this kind, without a suffix; its content decides.
        together: names of files that are one checkpoint, if the groups in them are the same.
        indexes: endings of the names of index files, which say which file has which array; by
            default, as in folders of Hugging Face.
        is_lesser: whether its files count in a folder only where there is nothing else: such files
            lie next to checkpoints of all kinds.
    """

    name: str
    suffixes: tuple[str, ...]
    begins: Callable[[bytes], bool]
    weights: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    is_named: Callable[[str], bool] = lambda name: False
    together: re.Pattern[str] | None = None
    indexes: tuple[str, ...] = ()
    is_lesser: bool = False

    def is_index(self, name: str) -> bool:
        """Whether a file is an index: says which of several files has which array."""
        return name.endswith(self.indexes or tuple(suffix + _INDEX for suffix in self.suffixes))


def _is_safetensors(head: bytes) -> bool:
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MOST_HEADER


def first_member(head: bytes) -> bytes:
    """The name of the first file in a zip file; empty if it is none."""
    is_zip = head[:4] == b"PK\x03\x04"
    return head[30 : 30 + int.from_bytes(head[26:28], "little")] if is_zip else b""


def _is_npz(head: bytes) -> bool:
    return head[:4] == b"PK\x05\x06" or first_member(head).endswith(b".npy")


def _is_keras(head: bytes) -> bool:
    """Whether a file is one of Keras's `model.save`, a zip file, by its first bytes."""
    return first_member(head) in (b"metadata.json", b"config.json", b"model.weights.h5")


def _is_hdf5(head: bytes) -> bool:
    return head[:8] == b"\x89HDF\r\n\x1a\n" or _is_keras(head)


def is_plain_zip(members: Iterable[str]) -> bool:
    """Whether a zip file has nothing of a file of torch, NumPy, Keras or skops."""
    return not any(map(_OF_FILES.fullmatch, members))


def is_tar(head: bytes) -> bool:
    """Whether a file is a tar file, by its first bytes."""
    return head[257:262] == b"ustar"


def is_legacy(head: bytes) -> bool:
    """Whether a file is one of torch.save without a zip file, by its first bytes."""
    return head[:1] == b"\x80" and head[2:15] == _LEGACY


def _is_torch(head: bytes) -> bool:
    is_zip = head[:4] == b"PK\x03\x04" and not _is_npz(head)
    return (is_zip and not _is_keras(head)) or is_legacy(head)


def is_pickle(head: bytes) -> bool:
    """Whether a file is a pickle, but not of `torch.save`. Pickles of protocols 0 and 1 are
    recognised by the beginnings of dicts, lists and objects."""
    if is_legacy(head):
        return False  # it claims to be one of torch's, and may be damaged
    binary = head[:1] == b"\x80" and 2 <= head[1] <= 5 if len(head) > 1 else False
    text = re.match(rb"\(?[dl]p[0-9]+\r?\n|[\]}]q|c[A-Za-z_][\w.]*\r?\n[A-Za-z_]\w*\r?\n", head)
    return binary or text is not None


def _is_onnx(head: bytes) -> bool:
    """Whether a file begins with a version and another field of a model of ONNX; others do too."""
    is_version = len(head) > 3 and head[0] == 0x08 and 0 < head[1] < 0x40
    return is_version and head[2] in b"\x12\x1a\x22\x28\x32\x3a\x42\x72"


def is_flax(head: bytes) -> bool:
    """A map of msgpack whose first key is a text. (An empty map looks like the start of a
    pickle.)"""
    if head[:7] == b"\x84\xa5nodes" and head[7:8] >= b"\x90":  # a list: a model of Thinc
        return False
    begin = rb"([\x81-\x8f]|\xde..|\xdf....)[\xa0-\xbf\xd9-\xdb]"
    return re.match(begin, head, re.S) is not None


_WEIGHTS = ("model", "adapter_model", "diffusion_pytorch_model")
SAFETENSORS = FileKind(
    "safetensors", (".safetensors",), _is_safetensors,
    tuple(f"{w}.safetensors" for w in _WEIGHTS), together=re.compile(r".*", re.DOTALL),
)  # fmt: skip
TORCH = FileKind(
    "torch", (".pt", ".pth", ".pt2", ".bin", ".ckpt", ".pth.tar"), _is_torch,
    ("pytorch_model.bin", "model_weights.ckpt", *(f"{w}.bin" for w in _WEIGHTS[1:])),
    shared=(".bin", ".ckpt", ".pth.tar"),
)  # fmt: skip
FLAX = FileKind(
    "flax", (".msgpack",), is_flax, ("flax_model.msgpack",),
    is_named=lambda name: re.fullmatch(r"[\w-]*[0-9](\.[0-9]+)?", name) is not None,
)  # fmt: skip
HDF5 = FileKind("hdf5", (".h5", ".hdf5", ".keras"), _is_hdf5, indexes=(".weights.json",))
GGUF_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf", re.DOTALL)
"""The name of one of several files of a model: the model's, and how many there are."""
GGUF = FileKind(
    "gguf", (".gguf",), lambda head: head[:4] == b"GGUF",
    together=GGUF_PART,
)  # fmt: skip
NPZ = FileKind("npz", (".npz",), _is_npz)
NPY = FileKind("npy", (".npy",), lambda head: head[:6] == b"\x93NUMPY", is_lesser=True)
PICKLE = FileKind("pickle", (".pkl", ".pickle"), is_pickle, is_lesser=True)
EQUINOX = FileKind("equinox", (".eqx",), lambda head: False, is_lesser=True)
ONNX = FileKind("onnx", (".onnx",), _is_onnx, is_lesser=True)
ARCHIVE = FileKind(
    "archive", (".nemo", ".mar"),
    lambda head: is_tar(head) or head[:2] == b"\x1f\x8b", is_lesser=True,
)  # fmt: skip
KINDS = (SAFETENSORS, TORCH, FLAX, HDF5, GGUF, NPZ, NPY, PICKLE, EQUINOX, ONNX, ARCHIVE)
"""In the order in which Hugging Face's libraries prefer them."""
_SUFFIXES = tuple(suffix for kind in KINDS for suffix in kind.suffixes)


@dataclass(frozen=True)
class FoundFiles:
    """The files of a checkpoint.

    Arguments:
        names: the files; several make it up together. Empty if an index names them.
        index: the file that says which file has which array; None if there is none.
        beside: files with names of such formats that are not part of it.
    """

    names: tuple[str, ...]
    index: str | None = None
    beside: tuple[str, ...] = ()


def open_kind(files: Files, kind: FileKind, make: Callable[[FoundFiles], R | None]) -> R | None:
    """Opens the checkpoint at a location; None if it is none of this kind.

    Arguments:
        files: at the location.
        kind: of its files.
        make: reads their content.

    Raises:
        UnsupportedFormat: there are several checkpoints, and none comes first.
        StorageError: the storage failed.
        All that `make` raises.
    """
    with reading(files.location):
        selection = of_kind(files, kind)
        if selection is None:
            return None
        reader = make(selection)
    if reader is None:
        return None
    reader.beside = (*selection.beside, *reader.beside)
    return reader


def of_kind(files: Files, kind: FileKind) -> FoundFiles | None:
    """The files at a location that are its checkpoint; None if it is none of this kind.

    Raises:
        UnsupportedFormat: there are several checkpoints, and none comes first.
        Damaged, Failed: the storage failed.
    """
    kind_and_files = find(files)
    if kind_and_files is None or kind_and_files[0] != kind:
        return None
    selection = kind_and_files[1]
    below = files.databases
    if below and kind.is_lesser:
        return None
    if below:
        raise _ambiguous(files, [*(selection.names or (selection.index or "",)), *below])
    return selection


def find(files: Files) -> tuple[FileKind, FoundFiles] | None:
    """The kind and the files of the checkpoint at a location. Raises as `of_kind`."""
    if files.single is not None:
        return _single(files, files.single)
    names = files.here
    every = [name for name in names if name.endswith(_SUFFIXES)]
    for kind in KINDS:
        indexes = [name for name in names if kind.is_index(name)]
        weights = [n for n in names if n in kind.weights]
        if len(indexes) + len(weights) > 1:
            raise _ambiguous(files, [*indexes, *weights])
        if indexes:
            other_files = tuple(name for name in every if not name.endswith(kind.suffixes))
            return kind, FoundFiles((), indexes[0], other_files)
        if weights:
            return kind, FoundFiles((weights[0],), None, tuple(n for n in every if n != weights[0]))
    return _only(files, names, every)


def _only(
    files: Files, names: Sequence[str], every: Sequence[str]
) -> tuple[FileKind, FoundFiles] | None:
    """The checkpoint in a folder without names that Hugging Face gives.

    Arguments:
        files: the folder.
        names: of its files.
        every: those with a suffix of a kind.
    """
    ours = [(kind, name) for kind in KINDS for name in names if _belongs(files, kind, name)]
    ours = [pair for pair in ours if not _BESIDE_WEIGHTS.fullmatch(pair[1])] or ours
    ours = [pair for pair in ours if not pair[0].is_lesser] or ours
    if not ours:
        return None
    chosen: dict[FileKind, list[str]] = {}
    for kind, name in ours:
        chosen.setdefault(kind, []).append(name)
    [[kind, kind_names], *other_kinds] = chosen.items()
    if other_kinds or (len(kind_names) > 1 and not _are_together(kind, kind_names)):
        if kind.is_lesser and files.databases:
            return None
        raise _ambiguous(files, [name for kind_names in chosen.values() for name in kind_names])
    return kind, FoundFiles(tuple(kind_names), None, tuple(n for n in every if n not in kind_names))


def _are_together(kind: FileKind, names: Sequence[str]) -> bool:
    if kind.together is None:
        return False
    matches = [kind.together.fullmatch(name) for name in names]
    return len({match.groups() if match else None for match in matches}) == 1 and all(matches)


def _single(files: Files, name: str) -> tuple[FileKind, FoundFiles] | None:
    for kind in KINDS:
        if kind.is_index(name):
            return kind, FoundFiles((), name)
    head = files.head(name)
    return next(((kind, FoundFiles((name,))) for kind in KINDS if kind.begins(head)), None)


def _belongs(files: Files, kind: FileKind, name: str) -> bool:
    """Whether a file of a folder is of a kind."""
    if name.endswith(kind.shared) or kind.is_named(name):
        return kind.begins(files.head(name))
    return name.endswith(kind.suffixes)


def _ambiguous(files: Files, names: Sequence[str]) -> SeveralCheckpoints:
    paths = {name: files.location.name_for_users(name) for name in names}
    more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
    error = SeveralCheckpoints(
        f"{files.location} contains several checkpoints, "
        f"{shortened(', '.join(names[:_SHOWN]) + more, 400)}; give the path of one, such as "
        f"{quoted(paths[names[0]])}"
    )
    error.paths = paths
    return error


# --- indexes --------------------------------------------------------------------------------------


class _WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


def decoded(files: Files, file: str, kind: type[T], most: int) -> T:
    """The content of a JSON file of at most so many bytes.

    Raises:
        CheckpointCorrupt: it is damaged, too large, or not of the kind.
        Failed: the storage failed.
    """
    data = files.tail(file, most + 1)
    if len(data) > most:
        raise files.damaged(f"{file} has more than {most} bytes, too many")
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise files.damaged(f"{file} is damaged: {error}") from error


def weight_map(files: Files, index: str, suffixes: tuple[str, ...]) -> dict[str, str]:
    """The file of each tensor, by its name.

    Arguments:
        files: the folder.
        index: the file that says it.
        suffixes: of the files that it may name, which are in the same folder.

    Raises:
        CheckpointCorrupt: it is damaged.
        Failed: the storage failed.
    """
    names = decoded(files, index, _WeightIndex, _MOST_INDEX).weight_map
    for file in names.values():
        if "/" in file or not file.endswith(suffixes):
            raise files.damaged(f"{index} names the file {quoted(file)}")
    return names
