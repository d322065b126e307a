"""ByteCheckpoint's folders: DCP's metadata for each of model and optimizer, chunks as raw bytes.

Source: bytecheckpoint/checkpointer/meta_type.py, engine/store_engine.py and
utilities/serialization.py of 0.0.2. Names are `model/<parameter>` and
`optimizer/state/<parameter>/<slot>`; values that each process stored for itself are
`extra_state/<rank>`.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unickpt.backends._files import pickles, torch_tensors
from unickpt.backends._files.elements import ElementRun, JoinedElements
from unickpt.backends._files.pickles import BadPickle, unread
from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends.dcp import reader as dcp
from unickpt.backends.dcp.chunks import LocatedElements
from unickpt.backends.dcp.metadata import (
    Blob,
    DcpChunk,
    KeyPath,
    Metadata,
    TensorFacts,
    extents,
    fields,
)
from unickpt.backends.dcp.objects import read_file, read_objects
from unickpt.backends.dcp.reader import ChunkedArray
from unickpt.errors import CheckpointCorrupt
from unickpt.extend import (
    Box,
    FileBox,
    FileRange,
    Files,
    Pool,
    Reader,
    dtype_and_shape,
    quoted,
    reading,
)

FLAT = "_flat_param"
"""How the names of flat parameters end."""
_NAMES, _SHAPES = "fsdp_flat_param_to_fqns", "fsdp_shapes"
_COUNTS, _PADDING = "fsdp_numels_with_padding", "fsdp_is_padding_mask"
_MOST_PARTS = 1_000_000
_ROOT = "bytecheckpoint.checkpointer.meta_type.Metadata"
_MODEL, _OPTIMIZER, _EXTRA = "model", "optimizer", "extra_state"
_HEAD, _MODULE = 200, b"bytecheckpoint"
_LATEST = "latest_checkpointed_iteration.txt"
_EXTRA_FILE = re.compile(rf"{_EXTRA}/{_EXTRA}_rank_(\d{{1,9}})\.pt")
_STATE, _SEVERAL = "state", "model_dict_keys"
_THREADS = 16

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens the folder of a step, or of a run, whose latest step it opens then.

    Raises:
        CheckpointCorrupt: something is damaged or missing.
        UnsupportedFormat: a dtype is not known.
        StorageError: the storage failed.
    """
    with reading(files.location):
        folder = files if _parts_in(files) else _latest(files)
        return None if folder is None else _RankFolder(folder).reader()


def _parts_in(files: Files) -> list[str]:
    """The parts of a checkpoint that are in a folder: model, optimizer; none if not one of them is
    ByteCheckpoint's."""
    parts = (_MODEL, _OPTIMIZER)
    metadata = [file for part in parts if _has(files, file := f"{part}/{dcp.METADATA}")]
    if not any(_MODULE in files.head(file)[:_HEAD] for file in metadata):
        return []
    # One whose metadata is damaged or missing must not be left out.
    return [part for part in parts if Files(files.location.child(part)).here]


def _has(files: Files, file: str) -> bool:
    """Whether there is a file; remote ones are listed already."""
    return files.exists(file) if files.location.is_local else file in files.names


def _latest(files: Files) -> Files | None:
    """The folder of the latest step of a run."""
    if _LATEST not in files.here:
        return None
    text = files.text(_LATEST)
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        return None
    inner = Files(files.location.child(f"global_step_{int(text)}"))
    return inner if _parts_in(inner) else None


class ByteCheckpointReader(dcp.DcpReader):
    """Reads arrays as `DcpReader`."""

    format = "bytecheckpoint"


# --- content of a folder ------------------------------------------------------------------------


class _RankFolder:
    """The folder of a step.

    Arguments:
        files: of the folder.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._metadata = {part: self._read(part) for part in _parts_in(files)}

    def reader(self) -> Reader:
        state = {part: self._state(part) for part in self._metadata}
        versions = [
            metadata.added.get("bytecheckpoint_version") for metadata in self._metadata.values()
        ]
        version = versions[0] if isinstance(versions[0], str) and len(versions[0]) < 20 else ""
        extra = self._extra_files()
        if extra:
            with Pool(min(_THREADS, len(extra))) as threads:
                state[_EXTRA] = dict(enumerate(threads.map(partial(read_file, self._files), extra)))
        return ByteCheckpointReader(self._files, state, version)

    def _read(self, part: str) -> Metadata:
        """The metadata of a part; its files are those of the folder then."""
        metadata = dcp.read_metadata(self._files, f"{part}/{dcp.METADATA}", (_ROOT,))
        if metadata is None:
            raise self._files.damaged(f"{part}/{dcp.METADATA} was not written by ByteCheckpoint")

        def moved(blob: Blob) -> Blob:
            return replace(blob, file=f"{part}/{blob.file}")

        tensors = {
            name: replace(facts, chunks=tuple(replace(c, blob=moved(c.blob)) for c in facts.chunks))
            for name, facts in metadata.tensors.items()
        }
        objects = {name: moved(blob) for name, blob in metadata.objects.items()}
        return replace(metadata, tensors=tensors, objects=objects)

    def _state(self, part: str) -> Any:
        metadata = self._metadata[part]
        dcp.check_files(self._files, metadata)
        where = f"{self._files.location}: {part}/{dcp.METADATA}"
        try:
            state: dict[str, Any] = _arrays(metadata)
            paths = dict(metadata.paths)
            self._split(part, state, paths)
        except BadPickle as error:
            raise CheckpointCorrupt(f"{where}: {error}") from error
        state.update(read_objects(self._files, metadata.objects))
        order = {name: position for position, name in enumerate(metadata.names)}
        state = dict(sorted(state.items(), key=lambda item: order.get(item[0], len(order))))
        return dcp.nested(self._files, state, paths)

    def _split(self, part: str, state: dict[str, Any], paths: dict[str, KeyPath]) -> None:
        """Replaces flat parameters by their content, and finds the paths of all slots."""
        flats = self._flat_params()
        prefix = f"{_STATE}." if part == _OPTIMIZER else ""
        # A slot that is a single number belongs to the flat parameter itself.
        flat_ones = [n for n, x in state.items() if isinstance(x, ChunkedArray) and x.shape]
        for name in flat_ones:
            flat, slot = _flat_and_slot(name.removeprefix(prefix), flats, bool(prefix))
            if flat is not None and name.startswith(prefix):
                for whole, array in split(name, state.pop(name), flats[flat]).items():
                    full_name = prefix + whole + slot
                    if full_name in state:
                        raise BadPickle(f"{quoted(full_name)} is stored twice")
                    state[full_name] = array
                    paths[full_name] = (_STATE, whole, slot[1:]) if prefix else (whole,)
        if prefix and flats:  # here the paths have the slots' names in the parameters'
            parameter_names = {whole.name for parts in flats.values() for whole in parts}
            parameter_names |= set(flats)
            for name in state:
                whole, _, slot = name.removeprefix(prefix).rpartition(".")
                if name.startswith(prefix) and whole in parameter_names:
                    paths[name] = (_STATE, whole, slot)

    def _flat_params(self) -> Mapping[str, Sequence[FlatPart]]:
        """The flat parameters; the model's metadata describes those of the optimizer, too."""
        optimizer = self._metadata.get(_OPTIMIZER)
        names = optimizer.names if optimizer is not None else ()
        if _MODEL not in self._metadata:
            flat = next((name for name in names if FLAT in name), None)
            if flat is None:
                return {}
            raise self._files.unsupported(
                f"which parameters are in {quoted(flat)}, says only {_MODEL}/{dcp.METADATA}, which "
                f"is missing; put the folder {_MODEL} next to this one"
            )
        parameter_names = {name.removeprefix(f"{_STATE}.").rpartition(".")[0] for name in names}
        defined = self._metadata[_MODEL].added.get("user_defined_dict")
        if isinstance(defined, dict) and _SEVERAL in defined:
            raise self._files.unsupported(
                f"{_MODEL}/{dcp.METADATA} describes several models with flat parameters; unickpt "
                "reads one"
            )
        return parts_of(defined, parameter_names)

    def _extra_files(self) -> list[str]:
        """The files of the processes, in their order."""
        below = Files(self._files.location.child(_EXTRA)).here
        files_by_rank = {
            int(match[1]): match[0]
            for match in (_EXTRA_FILE.fullmatch(f"{_EXTRA}/{name}") for name in below)
            if match
        }
        missing = next(
            (rank for rank in range(len(files_by_rank)) if rank not in files_by_rank), None
        )
        if missing is not None:
            raise self._files.incomplete(
                f"{_EXTRA}/{_EXTRA}_rank_{missing}.pt is missing, but the file of process "
                f"{max(files_by_rank)} exists"
            )
        return [files_by_rank[rank] for rank in range(len(files_by_rank))]


def _flat_and_slot(name: str, flats: Collection[str], has_slot: bool) -> tuple[str | None, str]:
    """The flat parameter whose array has a name, and its slot with a dot before."""
    flat, dot, slot = name.rpartition(".") if has_slot else (name, "", "")
    return (flat, dot + slot) if flat in flats else (None, "")


# --- chunks -------------------------------------------------------------------------------------


def _arrays(metadata: Metadata) -> dict[str, Any]:
    """The arrays that a metadata describes.

    Raises:
        BadPickle: a chunk has no description.
    """
    described = metadata.added.get("all_tensor_metadata")
    if not isinstance(described, dict):
        raise BadPickle("its all_tensor_metadata is no dict")
    forms = {}
    for key, form in described.items():
        index = fields(key, "MetadataIndex")
        forms[index.get("fqn"), index.get("offset")] = form
    arrays = {}
    for name, facts in metadata.tensors.items():
        boxes = []
        for chunk in facts.chunks:
            form = forms.get((name, chunk.box.start))
            if not isinstance(form, bytes):
                raise BadPickle(f"it does not describe {quoted(name)} at {list(chunk.box.start)}")
            boxes.append(
                FileBox(chunk.box, LocatedElements(chunk.blob, partial(_raw, form, facts, chunk)))
            )
        arrays[name] = ChunkedArray(facts.dtype, facts.shape, boxes)
    return arrays


def _raw(form: bytes, facts: TensorFacts, chunk: DcpChunk, files: Files) -> FileBox:
    """Where the elements of a chunk are: its bytes are those of the storage of a tensor.

    Arguments:
        form: the pickle of the tensor, without data.
        facts, chunk: from the metadata.
        files: of the folder.
    """
    blob = chunk.blob
    try:
        tensor = pickles.read(form, torch_tensors.CONSTRUCTORS, torch_tensors.storage)
    except BadPickle as error:
        raise unread(error, f"the description of {chunk.box}") from error
    expected = dtype_and_shape(facts.dtype, chunk.box.shape)
    if not isinstance(tensor, Tensor):
        raise CheckpointCorrupt(f"{blob.file} contains no tensor where {expected} is expected")
    if (tensor.dtype, tensor.shape) != (facts.dtype, chunk.box.shape):
        raise CheckpointCorrupt(
            f"{blob.file} contains {dtype_and_shape(tensor.dtype, tensor.shape)} at byte "
            f"{blob.offset}, where {expected} is expected for {chunk.box}"
        )
    if tensor.reach > blob.length:
        raise CheckpointCorrupt(
            f"{blob.file} has {blob.length} bytes from byte {blob.offset} on for {chunk.box}, too "
            f"few for {expected}"
        )
    elements = tensor.meant(FileRange(blob.file, blob.offset))
    return FileBox(chunk.box, elements, tensor.offset, tensor.strides)


# --- flat parameters ------------------------------------------------------------------------------
#
# FSDP1's flat parameters: one array of all parameters of a module. The metadata of the model says
# which parameter is where; the flat arrays of the optimizer lie alike. Source:
# bytecheckpoint/planner/fsdp/fsdp_hack.py and utilities/ckpt_format/fsdp_ckpt_utils.py.


@dataclass(frozen=True)
class FlatPart:
    """A parameter within a flat one.

    Arguments:
        name: of the parameter, in the whole model.
        shape: of the parameter.
        first: the number of its first element in the flat one.
    """

    name: str
    shape: tuple[int, ...]
    first: int


def parts_of(
    user_defined: Any, parameter_names: Collection[str]
) -> Mapping[str, Sequence[FlatPart]]:
    """The parameters in each flat one, by its name.

    Arguments:
        user_defined: the `user_defined_dict` of the model's metadata.
        parameter_names: names of parameters that the optimizer has.

    Raises:
        BadPickle: it is malformed.
    """
    if not isinstance(user_defined, dict) or _NAMES not in user_defined:
        return {}
    tables = [user_defined.get(key) for key in (_NAMES, _SHAPES, _COUNTS, _PADDING)]
    dicts = [table for table in tables if isinstance(table, dict)]
    if len(dicts) != len(tables):
        raise BadPickle("its facts of flat parameters are no dicts")
    # Lists can be shared, and stand for any number of parts then.
    if sum(len(x) for x in dicts[2].values() if isinstance(x, (list, tuple))) > _MOST_PARTS:
        raise BadPickle(f"it has more than {_MOST_PARTS} parts of flat parameters")
    return {
        flat: _parts(flat, [table.get(flat) for table in dicts], parameter_names)
        for flat in dicts[0]
    }


def _parts(flat: Any, lists: Sequence[Any], parameter_names: Collection[str]) -> Sequence[FlatPart]:
    if not isinstance(flat, str) or not all(isinstance(x, (list, tuple)) for x in lists):
        raise BadPickle(f"the facts of the flat parameter {quoted(flat)} are no lists")
    names, shapes, counts, padding = lists
    if len(counts) != len(padding) or len(names) != len(shapes):
        raise BadPickle(f"the facts of the flat parameter {quoted(flat)} contradict each other")
    if not all(isinstance(name, str) for name in names):
        raise BadPickle(f"the names in the flat parameter {quoted(flat)} are no texts")
    parts, first = list[FlatPart](), 0
    remaining = zip(_whole_names(flat, names, parameter_names), shapes, strict=True)
    for (count,), pads in zip(map(_one, counts), padding, strict=True):
        name, shape = (None, ()) if pads else next(remaining, (None, ()))
        if not pads:
            sizes = extents(shape, f"a shape in the flat parameter {quoted(flat)}")
            if name is None or math.prod(sizes) != count:
                raise BadPickle(
                    f"the flat parameter {quoted(flat)} has {count} elements of {quoted(name)}, "
                    f"whose shape is {list(sizes)}"
                )
            parts.append(FlatPart(name, sizes, first))
        first += count
    if next(remaining, None) is not None:
        raise BadPickle(f"the flat parameter {quoted(flat)} lacks elements of its last parameters")
    return parts


def _one(count: Any) -> tuple[int, ...]:
    return extents((count,), "the size of a part of a flat parameter")


def _whole_names(flat: str, names: Sequence[str], parameter_names: Collection[str]) -> list[str]:
    """The names of parameters in the whole model.

    They are stored relative to the module that is flattened, by old versions as a whole: if all
    of them begin as their module, and the optimizer knows them so.
    """
    above = flat.removesuffix(FLAT)
    relative = [above + name.removeprefix(".") for name in names]
    old = (
        all(name.startswith(above) for name in names)
        and any(name in parameter_names for name in names)
        and not any(name in parameter_names for name in relative)
    )
    return list(names) if old else relative


def split(name: str, flat: ChunkedArray, parts: Sequence[FlatPart]) -> Mapping[str, ChunkedArray]:
    """The parameters that are stored in a flat array, by name.

    Arguments:
        name: of the flat array, for messages.
        flat: one-dimensional; padding may be missing, and whole parameters that are not trained.
        parts: the parameters.

    Raises:
        BadPickle: elements are missing.
    """
    if len(flat.shape) != 1:
        raise BadPickle(f"the flat parameter {quoted(name)} has the shape {list(flat.shape)}")
    boxes = sorted(flat.boxes, key=lambda file_box: file_box.box.start)
    ends = [file_box.box.stop[0] for file_box in boxes]
    if any(end > after.box.start[0] for end, after in zip(ends, boxes[1:], strict=False)):
        raise BadPickle(f"chunks of the flat parameter {quoted(name)} overlap")
    arrays = {}
    for part in parts:
        runs = _runs(boxes, ends, part.first, part.first + math.prod(part.shape))
        count = sum(run.count for run in runs)
        if count not in (0, math.prod(part.shape)):
            raise BadPickle(
                f"the flat parameter {quoted(name)} holds {count} elements of {quoted(part.name)}, "
                f"whose shape is {list(part.shape)}"
            )
        if count or 0 in part.shape:
            box = FileBox(Box.whole(part.shape), JoinedElements(runs))
            arrays[part.name] = replace(flat, shape=part.shape, boxes=[box])
    return arrays


def _runs(boxes: Sequence[FileBox], ends: Sequence[int], first: int, stop: int) -> list[ElementRun]:
    """The stored parts of the elements from `first` to `stop`, in order."""
    runs = []
    for index in range(bisect.bisect_right(ends, first), len(boxes)):
        begin = boxes[index].box.start[0]
        low, high = max(begin, first), min(ends[index], stop)
        if low >= high:
            break
        runs.append(ElementRun(boxes[index].elements, low - begin, high - low))
    return runs
