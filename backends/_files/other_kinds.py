"""Kinds of files that unickpt does not read: their names, how to recognise them, and the way out.

This table is searched after all formats refused a file, or found that it breaks their rules. A
sound file of another kind is thus never called damaged.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from unickpt.backends._files.archives import InArchive, tarred, whole_file
from unickpt.backends._files.file_choice import is_pickle, is_plain_zip, is_tar
from unickpt.backends._files.zip_files import ZipFile
from unickpt.errors import CheckpointCorrupt, UnickptError, UnsupportedFormat
from unickpt.extend import Damaged, Files, quoted, storage_context

_START = 64 << 10  # bytes in which a pickle names the library that wrote it
_MOST_FILES = 200


class Sample:
    """The beginning of a file, and the names of its members if it is an archive.

    Arguments:
        files: of the checkpoint.
        name: of the file.
    """

    def __init__(self, files: Files, name: str) -> None:
        self._files, self.name = files, name
        self.head = files.head(name)

    @cached_property
    def start(self) -> bytes:
        """More than the head of the file."""
        try:
            size = self._files.size(self.name)
            count = _START if size is None else min(size, _START)
            return self._files.read(self.name, 0, count)
        except Damaged:  # it is shorter
            return self.head

    @cached_property
    def zipped(self) -> Sequence[str]:
        """The names of the members of a zip file; empty if it is none, or damaged."""
        if self.head[:4] not in (b"PK\x03\x04", b"PK\x05\x06"):
            return ()
        try:
            return tuple(ZipFile(self._files, self.name).members)
        except (CheckpointCorrupt, Damaged):
            return ()

    @cached_property
    def tarred(self) -> Collection[str]:
        """The names of the members of a tar file; empty if it is none, damaged, or has many."""
        if not is_tar(self.head):
            return ()
        try:
            return tarred(whole_file(self._files, self.name), ValueError) or ()
        except (ValueError, Damaged):
            return ()

    def has_member(self, pattern: str) -> bool:
        """Whether a member of the archive has a name that a regular expression matches."""
        return any(re.fullmatch(pattern, name, re.S) for name in (*self.zipped, *self.tarred))


class OtherKind(NamedTuple):
    """A kind of files that unickpt does not read.

    Arguments:
        name: of this kind.
        way_out: the advice for the user.
        matches: whether a file is of this kind.
    """

    name: str
    way_out: str
    matches: Callable[[Sample], bool]


def _begins(*magic: bytes) -> Callable[[Sample], bool]:
    return lambda sample: sample.head.startswith(magic)


def _begins_like(pattern: bytes) -> Callable[[Sample], bool]:
    matcher = re.compile(pattern, re.S | re.I)
    return lambda sample: matcher.match(sample.head) is not None


def _has(*patterns: str) -> Callable[[Sample], bool]:
    """Whether an archive has a member for each pattern."""
    return lambda sample: all(map(sample.has_member, patterns))


def _named(pattern: str) -> Callable[[Sample], bool]:
    matcher = re.compile(pattern, re.S)
    return lambda sample: matcher.fullmatch(sample.name.rpartition("/")[2]) is not None


def _protobuf_text(head: bytes) -> bytes | None:
    """The second field of a message whose first one is a small number, as ONNX and CoreML begin;
    None if it begins otherwise."""
    is_version = len(head) > 4 and head[0] == 0x08 and 0 < head[1] < 0x40
    if not is_version or head[2] != 0x12:
        return None
    length_bytes = 1 + next((n for n, byte in enumerate(head[3:6]) if byte < 0x80), 0)
    return head[3 + length_bytes :]


def _is_coreml(sample: Sample) -> bool:
    text = _protobuf_text(sample.head)
    return sample.name.endswith(".mlmodel") or (text is not None and text[:1] == b"\x0a")


_JSON = "JSON, such as a configuration"
_JSON_BEGINS = re.compile(rb'(\xef\xbb\xbf)?\s*(\{\s*["}]|\[\s*[\[{"\]0-9-])')
_UNPACK = "unpack it, and give the path of the checkpoint in it"
TENSORFLOW = (
    "load it there, and save its variables with numpy.savez, or a Keras model with "
    "model.save_weights('x.weights.h5')"
)
"""The way out for a checkpoint of TensorFlow."""


def _load_with(library: str) -> str:
    return f"load it with {library}, and save its arrays with unickpt.save or numpy.savez"


def _converted(way_out: str) -> str:
    return f"it is converted for inference: take the weights of the model {way_out}"


_NUMPY = _load_with("that library")
_TENSORFLOW_FILES = r"saved_model\.pb(txt)?|.*\.data-\d{5}-of-\d{5}|(.*ckpt.*|variables)\.index"


def _table(*rows: tuple[str, str, Callable[[Sample], bool]]) -> Sequence[OtherKind]:
    return tuple(map(OtherKind._make, rows))


DOWNLOADS = _table(
    ("a pointer of Git LFS, not the file itself",
     "run `git lfs pull` in the repository, or download the file again",
     _begins(b"version https://git-lfs.github.com/")),
    ("a page of HTML, such as a login or an error page",
     "download the file again, with the right address and access token",
     _begins_like(rb"(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)?<(!doctype html|html|head)\b")),
    ("an XML document, such as an error of a storage service",
     "download the file again, with the right address and credentials",
     _begins_like(rb"(\xef\xbb\xbf)?\s*<\?xml\b|\s*<Error>")),
    ("compressed with gzip", "decompress it with `gunzip`", _begins(b"\x1f\x8b")),
    ("compressed with xz", "decompress it with `unxz`", _begins(b"\xfd7zXZ\0")),
    ("compressed with bzip2", "decompress it with `bunzip2`", _begins_like(rb"BZh[1-9]1AY")),
    ("compressed with Zstandard", "decompress it with `unzstd`", _begins(b"\x28\xb5\x2f\xfd")),
    ("compressed with LZ4, as joblib can do",
     "decompress it with `unlz4`, or load it with joblib.load and save its arrays",
     _begins(b"\x04\x22\x4d\x18")),
    ("an archive of 7-Zip or RAR", _UNPACK, _begins(b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07")),
)  # fmt: skip
"""Files that a download can leave in place of any file."""
KINDS = (*DOWNLOADS, *_table(
    ("a file of zeros", "a download or copy did not finish: repeat it",
     lambda sample: len(sample.head) > 8 and not any(sample.start)),
    # --- zip and tar files ---
    ("a zip file of skops", _load_with("skops.io.load"), _has(r"schema\.json")),
    ("a tar file, as torch wrote them before 0.2", "load it with torch, and save it again",
     _has(r"pickle", r"tensors|storages")),
    ("a tar file without a checkpoint that unickpt knows",
     "unpack it with `tar xf`, and give the path of the checkpoint in it",
     lambda sample: is_tar(sample.head)),
    # --- arrays and objects of Python ---
    ("a file of joblib", _load_with("joblib.load if you trust it"),
     lambda sample: is_pickle(sample.head) and b"joblib.numpy_pickle" in sample.start),
    ("a file of joblib, compressed with zlib", _load_with("joblib.load if you trust it"),
     lambda sample: sample.head[:2] in (b"x\x01", b"x^", b"x\x9c", b"x\xda")),
    ("a model of spaCy or Thinc",
     "load it with spacy.load or Model.from_disk, and save the arrays of its parameters with "
     "unickpt.save or numpy.savez",
     _begins_like(rb"\x84\xa5nodes[\x90-\x9f\xdc\xdd]")),
    ("msgpack with arrays of msgpack_numpy, as srsly writes them", _NUMPY,
     lambda sample: b"\xc4\x02nd" in sample.start and b"\xc4\x04type" in sample.start),
    # --- formats of other systems ---
    ("of a checkpoint or a saved model of TensorFlow", TENSORFLOW, _named(_TENSORFLOW_FILES)),
    ("the list of checkpoints that TensorFlow keeps in a folder",
     "load one of them in TensorFlow, and save its variables with numpy.savez",
     _begins(b"model_checkpoint_path:")),
    ("a model of TensorFlow Lite (TFLite)",
     _converted("from which it was made, or read its tensors with tf.lite.Interpreter"),
     lambda sample: sample.head[4:8] == b"TFL3"),
    ("a model of CoreML",
     _converted("from which it was made, or read it with coremltools.models.MLModel"), _is_coreml),
    ("an engine of TensorRT",
     "it runs on one kind of GPU only: take the weights of the model from which it was built",
     lambda sample: sample.head[:4] in (b"ftrt", b"ptrt")
     or sample.name.endswith((".engine", ".plan", ".trt"))),
    ("a model of fastText",
     "load it with fasttext.load_model, and save get_input_matrix() and get_output_matrix() "
     "with numpy.savez",
     _begins(struct.pack("<i", 793712314))),
    ("an old file of ggml, before GGUF",
     "convert it into GGUF with the scripts of llama.cpp or whisper.cpp, or take the weights of "
     "the model from which it was made",
     _begins(b"lmgg", b"fmgg", b"tjgg", b"algg")),
    ("a model of XGBoost, in JSON or UBJSON",
     "it has trees rather than arrays: load it with xgboost.Booster",
     lambda sample: re.match(rb"\s*\{.{0,200}learner|binf|bs64", sample.head, re.S) is not None),
    ("a model of LightGBM or CatBoost",
     "it has trees rather than arrays: load it with that library",
     _begins(b"tree\nversion=", b"CBM1")),
    ("arrays of MXNet", f"{_NUMPY}, such as mxnet.nd.load", _begins(b"\x12\x01\0\0\0\0\0\0")),
    ("a model of Caffe", _NUMPY, _named(r".*\.caffemodel")),
    ("a file of MATLAB", "load it with scipy.io.loadmat, and save its arrays with numpy.savez",
     _begins(b"MATLAB 5.0 MAT-file")),
    ("a table of Parquet or Arrow", "it has rows rather than arrays: load it with pyarrow",
     _begins(b"PAR1", b"ARROW1")),
    # --- other kinds ---
    (_JSON, "give the path of the file of weights next to it, or of their folder",
     lambda sample: _JSON_BEGINS.match(sample.head) is not None
     and not sample.name.endswith(".eqx")  # a line of it comes first there
     and b"\n\x93NUMPY" not in sample.head),
    ("a zip file without a checkpoint that unickpt knows", _UNPACK,
     lambda sample: bool(sample.zipped) and is_plain_zip(sample.zipped)),
))  # fmt: skip
"""In the order in which a file is compared with them."""

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|keras|gguf|npz|msgpack)", re.S)
# Files that identify a folder that no format recognised.
_TELLING = re.compile(
    _TENSORFLOW_FILES + r"|.*\.(tflite|mlmodel|engine|nemo|mar|skops|joblib)", re.S
)


def _refusal_of(files: Files, name: str, kinds: Sequence[OtherKind]) -> UnsupportedFormat | None:
    """The error for a file of a kind that unickpt does not read; None if it is none of them.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        kinds: that it may have.

    Raises:
        Failed: the storage failed.
    """
    try:
        sample = Sample(files, name)
        kind = next((kind for kind in kinds if kind.matches(sample)), None)
    except Damaged:
        return None
    if kind is None:
        return None
    file = str(files.location) if files.single == name else f"{files.location}: {quoted(name)}"
    way_out = kind.way_out
    if way_out == _UNPACK and sample.zipped:
        weights = [m for m in sample.zipped if _WEIGHTS.fullmatch(m)] or sample.zipped
        way_out += f": it has {', '.join(map(quoted, weights[:3]))}"
    return UnsupportedFormat(f"{file} is {kind.name}; {way_out}")


def _asked_files(
    files: Files, error: UnickptError | None
) -> Iterator[tuple[str, Sequence[OtherKind]]]:
    """The files of a folder that may be of another kind, and the kinds that each may have.

    Arguments:
        files: of the folder.
        error: of the format that took them for its own: only files count that it names; None if
            no format recognised the folder.
    """
    names = sorted({*files.heads, *files.here}) if error is not None else files.here
    for name in names[:_MOST_FILES]:
        is_weights = _WEIGHTS.fullmatch(name) is not None
        if error is not None:
            if name in str(error):
                yield name, KINDS if is_weights else DOWNLOADS
        elif _TELLING.fullmatch(name):
            yield name, KINDS
        elif is_weights:
            yield name, DOWNLOADS


def _refusal_of_prefix(files: Files) -> UnsupportedFormat | None:
    """The error for the prefix of a checkpoint of TensorFlow."""
    location = files.location
    path = location.path.rstrip("/") + ".index"
    if location.is_local:
        exists = os.path.isfile(path)
    else:
        folder, name = location.parent, path.rpartition("/")[2]
        exists = folder is not None and folder.has_file(name, storage_context())
    if not exists:
        return None
    return UnsupportedFormat(
        f"{location} is the prefix of a checkpoint of TensorFlow (its .index is next to it); "
        f"{TENSORFLOW}"
    )


def refusal(
    files: Files, error: CheckpointCorrupt | UnsupportedFormat | None
) -> UnsupportedFormat | None:
    """The error for files that no format reads, if they are of a kind of this table.

    Arguments:
        files: of the checkpoint.
        error: of the format that took them for its own; None if none did.

    Raises:
        Failed: the storage failed.
    """
    if error is not None and isinstance(error.__cause__, ImportError | InArchive):
        return None  # the format knows the file, names its library or its content
    if files.single is not None:
        return _refusal_of(files, files.single, KINDS)
    if error is None and not files.here:
        return _refusal_of_prefix(files)
    for name, kinds in _asked_files(files, error):
        unsupported = _refusal_of(files, name, kinds)
        if unsupported is not None:
            return unsupported if error is not None or not files.databases else None
    return None
