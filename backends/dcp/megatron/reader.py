"""Megatron-Core's distributed checkpoints: DCP with `metadata.json` and `common.pt`.

Source: megatron/core/dist_checkpointing/ (serialization.py, strategies/torch.py). Arrays have
Megatron's keys as names; a `/` in a key, as that of a sharded object, is a level of the tree. The
content of `common.pt` (from Megatron 0.17 on in a sharded object) lies next to them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from unickpt.backends._files.elements import ElementRun, JoinedElements
from unickpt.backends._files.pickles import BadPickle
from unickpt.backends.dcp import reader as dcp
from unickpt.backends.dcp.metadata import Metadata, extents
from unickpt.backends.dcp.objects import read_file
from unickpt.errors import UnsupportedFormat
from unickpt.extend import Box, FileBox, Files, Reader, quoted, reading

_SHAPE = "nd_reformulated_orig_global_shape"
_MARKER, _COMMON = "metadata.json", "common.pt"
_COMMON_OBJECT = "common_state/shard_0_1"
"""The sharded object that has it instead, from Megatron 0.17 on."""
_MOST_MARKER = 1 << 20
_DAMAGED = object()
_LATEST = "latest_checkpointed_iteration.txt"
_PER_RANK = re.compile(r"mp_rank_\d+(_\d+)*/model_optim_rng\.pt")
_EXTRA = re.compile(r"(.*\.)?_extra_state(/.*)?")
_OBJECT = re.compile(r"shard_[\d.]+_[\d.]+")
_BUCKET = re.compile(r".*\.gbuf_idx_\d+\..*\.bucket_idx_\d+\.\w+")
_NO_NAMES = (
    "the optimizer's state is in flat buckets (dp_reshardable: arrays named "
    "...gbuf_idx_N...bucket_idx_N...), and no file says which parameter lies where in them. To get "
    "it by parameter, let a job of Megatron with the same parallel sizes load this checkpoint and "
    "save it with --dist-ckpt-optim-fully-reshardable (fully_reshardable); the model's parameters "
    "need nothing of that"
)

HINTS: Collection[str] = ("extra_state",)
"""`extra_state=True` shows the objects called `_extra_state`: one for each layer's module, most of
them empty."""


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a folder with Megatron's `metadata.json`, or one whose latest iteration has it.

    Raises:
        CheckpointCorrupt: see `backends.dcp.reader.open`; or `metadata.json` or `common.pt` is
            missing or damaged.
        UnsupportedFormat: another format of Megatron, or features that DCP's reader does not
            support.
        StorageError: the storage failed.
    """
    with reading(files.location):
        folder = files if _is_ours(files) else _latest(files)
        return None if folder is None else _open(folder, bool(hints.get("extra_state", False)))


def _open(files: Files, extra_state: bool) -> Reader:
    if dcp.METADATA not in files.here:
        raise files.damaged(
            f"{_MARKER} says that it is a torch_dist checkpoint, but there is no {dcp.METADATA}; "
            "was it saved completely, and copied as a whole?"
        )
    metadata = dcp.read_metadata(files)
    if metadata is None:
        raise files.damaged(f"{dcp.METADATA} was not written by torch")
    if not extra_state:
        metadata = _without_extra_state(metadata)
    state = dcp.state_of(files, metadata)
    try:
        for name, shape in shapes_of(metadata.added.get("mcore_data")).items():
            stored = state.get(name)
            if isinstance(stored, dcp.ChunkedArray):
                state[name] = unflattened(name, stored, shape)
    except BadPickle as error:
        raise files.damaged(f"{dcp.METADATA}: {error}") from error
    return MegatronReader(files, _with_common(files, state), metadata.version)


class MegatronReader(dcp.DcpReader):
    """Reads arrays under Megatron's keys; see `DcpReader`."""

    format = "megatron"

    def __init__(self, files: Files, state: Any, version: str) -> None:
        super().__init__(files, state, version)
        if any(map(_BUCKET.fullmatch, self.index.arrays)):
            self.lacks = _NO_NAMES


# --- which folder -------------------------------------------------------------------------------


def _is_ours(files: Files) -> bool:
    """Whether a folder holds a checkpoint of Megatron.

    Raises:
        CheckpointCorrupt: one whose marker is damaged or missing.
        UnsupportedFormat: in a format that is not read.
    """
    marker = _marker(files)
    backend = marker.get("sharded_backend") if isinstance(marker, dict) else None
    if backend is None:
        # Both would be read incompletely: a state without the content of `common.pt`.
        if dcp.METADATA in files.here and (marker is _DAMAGED or _COMMON in files.here):
            state = "is missing" if _MARKER not in files.here else "is damaged"
            raise files.damaged(
                f"{_MARKER}, which says how Megatron saved this, {state}, and {dcp.METADATA} "
                "alone does not describe all files here. Copy the checkpoint again, with its "
                f"{_MARKER}; "
                f"or take {_MARKER} and {_COMMON} away if torch alone wrote this folder (DCP)"
            )
        return False
    kinds: list[tuple[Any, Any]] = [
        (backend, "torch_dist"),
        (marker.get("common_backend", "torch"), "torch"),
    ]
    kinds += [(marker.get(f"{kind}_backend_version", 1), 1) for kind in ("sharded", "common")]
    for kind, supported in kinds:
        if kind != supported:
            raise files.unsupported(
                f"{_MARKER} says that this is a checkpoint of Megatron of the kind "
                f"{quoted(backend)}: {quoted(kind)} is not read, only {quoted(supported)} is; load "
                "it with Megatron, and save it with --ckpt-format torch_dist"
            )
    return True


def _marker(files: Files) -> Any:
    """The content of the marker; None without one, `_DAMAGED` if it is not JSON."""
    if _MARKER not in files.here:
        return None
    size = files.size(_MARKER)
    if size is not None and size > _MOST_MARKER:
        return _DAMAGED
    try:
        return json.loads(files.whole(_MARKER))
    except (ValueError, RecursionError):
        return _DAMAGED


def _latest(files: Files) -> Files | None:
    """The folder of the latest iteration; None if it is not of this format.

    Raises:
        UnsupportedFormat: it is a checkpoint of Megatron in another format.
    """
    if _LATEST not in files.here:
        return None
    text = files.text(_LATEST)
    if text != "release" and not (text.isdecimal() and text.isascii() and len(text) < 20):
        return None
    name = text if text == "release" else f"iter_{int(text):07}"
    inner = Files(files.location.child(name))
    if _is_ours(inner):
        return inner
    if any(map(_PER_RANK.fullmatch, inner.names)):
        raise UnsupportedFormat(
            f"{inner.location} is a checkpoint of Megatron with a file for each rank "
            "(--ckpt-format torch), which do not say how their tensors belong together; load it "
            "with Megatron, and save it with --ckpt-format torch_dist. One file of them can be "
            "opened if it is alone in a folder"
        )
    return None


# --- the tree -----------------------------------------------------------------------------------


def _without_extra_state(metadata: Metadata) -> Metadata:
    return replace(
        metadata,
        tensors={n: facts for n, facts in metadata.tensors.items() if not _EXTRA.fullmatch(n)},
        objects={n: blob for n, blob in metadata.objects.items() if not _EXTRA.fullmatch(n)},
        names=tuple(n for n in metadata.names if not _EXTRA.fullmatch(n)),
    )


def _with_common(files: Files, state: Mapping[str, Any]) -> Any:
    """The whole tree: Megatron's keys, and next to them the state that all ranks share."""
    paths = {name: tuple(name.split("/")) for name in state if all(name.split("/"))}
    # Each sharded object is a list of one.
    values = {
        name: value[0]
        if isinstance(value, list) and len(value) == 1 and _OBJECT.fullmatch(paths[name][-1])
        else value
        for name, value in state.items()
    }
    place = _COMMON_OBJECT if _COMMON_OBJECT in values else _COMMON
    common = values.pop(_COMMON_OBJECT) if place == _COMMON_OBJECT else read_file(files, _COMMON)
    if not isinstance(common, dict):
        raise files.damaged(f"{place} holds no dict")
    tree = dcp.nested(files, values, paths)
    twice = [key for key in common if key in tree]
    if twice:
        raise files.unsupported(
            f"{quoted(twice[0])} is both in {place} and among the sharded values"
        )
    return {**tree, **common}


# --- flattened arrays -----------------------------------------------------------------------------
#
# Megatron-Core until 0.13 wrote arrays flattened: boxes, each a flat range in pieces. An array
# [X, Y] in boxes [x, y] is stored as an array [X / x, Y / y, x * y]; the elements of a box are in
# row-major order, in one or several pieces. Source: strategies/torch.py of 0.13,
# `sharded_tensor_to_torch_sharded_tensor`.


def shapes_of(mcore_data: Any) -> Mapping[str, tuple[int, ...]]:
    """The shapes of the arrays that are stored flattened, by name.

    Arguments:
        mcore_data: the field `mcore_data` of the metadata; None if it has none.

    Raises:
        BadPickle: it is malformed.
    """
    if mcore_data is None:
        return {}
    if not isinstance(mcore_data, dict):
        raise BadPickle("its mcore_data is no dict")
    return {
        name: extents(facts[_SHAPE], f"the shape of {quoted(name)} in mcore_data")
        for name, facts in mcore_data.items()
        if isinstance(facts, dict) and _SHAPE in facts
    }


def unflattened(name: str, stored: dcp.ChunkedArray, shape: tuple[int, ...]) -> dcp.ChunkedArray:
    """A flattened array as it was before.

    Arguments:
        name: of the array, for messages.
        stored: as the metadata describes it.
        shape: as it was.

    Raises:
        BadPickle: the shapes contradict each other, or elements are missing.
    """
    if len(stored.shape) != len(shape) + 1:
        raise _contradicts(name, stored, shape)
    *counts, size = stored.shape
    if any(n and extent % n for n, extent in zip(counts, shape, strict=True)):
        raise _contradicts(name, stored, shape)
    inner = tuple(extent // n if n else 0 for n, extent in zip(counts, shape, strict=True))
    if math.prod(inner) != size:
        raise _contradicts(name, stored, shape)
    pieces = dict[tuple[int, ...], list[tuple[int, ElementRun]]]()
    for file_box in stored.boxes:
        *block_index, first = file_box.box.start
        if any(n != 1 for n in file_box.box.shape[:-1]):
            raise BadPickle(
                f"a piece of {quoted(name)} at {list(block_index)} belongs to several boxes"
            )
        run = ElementRun(file_box.elements, 0, file_box.box.size)
        pieces.setdefault(tuple(block_index), []).append((first, run))
    boxes = []
    for index, runs in pieces.items():
        start = tuple(i * n for i, n in zip(index, inner, strict=True))
        box = Box(start, tuple(a + n for a, n in zip(start, inner, strict=True)))
        boxes.append(FileBox(box, _joined(name, box, runs)))
    return replace(stored, shape=shape, boxes=boxes)


def _joined(name: str, box: Box, pieces: list[tuple[int, ElementRun]]) -> JoinedElements:
    """The elements of a box: all its pieces in order."""
    end = 0
    for first, run in sorted(pieces, key=lambda piece: piece[0]):
        if first != end:
            what = "missing" if first > end else "stored twice"
            raise BadPickle(
                f"{quoted(name)}: elements {min(first, end)} to {max(first, end)} of {box} are "
                f"{what}"
            )
        end += run.count
    if end != box.size:
        raise BadPickle(f"{quoted(name)}: elements {end} to {box.size} of {box} are missing")
    return JoinedElements([run for _, run in sorted(pieces, key=lambda piece: piece[0])])


def _contradicts(name: str, stored: dcp.ChunkedArray, shape: tuple[int, ...]) -> BadPickle:
    return BadPickle(
        f"{quoted(name)} of shape {list(shape)} is stored flattened as {list(stored.shape)}, which "
        "does not divide it"
    )
