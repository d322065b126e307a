"""Headers of safetensors files.

Source: the format's README (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from unickpt.backends._files.elements import Nibbles, Unreadable
from unickpt.backends._files.headers import sizes
from unickpt.errors import CheckpointCorrupt
from unickpt.extend import FileRange, Files, TensorSource, quoted

_MOST_HEADER = 100_000_000  # as upstream
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_FOUR_BITS = {"F4": "float4_e2m1fn"}
SHARDING = "DCP_SHARDING_INFO"
"""The key of the metadata with which torch's distributed checkpoints say where pieces belong."""


@dataclass(frozen=True)
class SafetensorsHeader:
    """The header of a file: its tensors by name, its metadata, and the file for messages."""

    tensors: Mapping[str, TensorSource]
    metadata: Mapping[str, str]
    where: str

    @cached_property
    def offsets(self) -> Mapping[str, tuple[int, ...]]:
        """Where pieces begin in their tensors, if torch recorded it.

        Raises:
            CheckpointCorrupt: the record is damaged.
        """
        try:
            sharding = json.loads(self.metadata.get(SHARDING, "{}"))
            return {name: sizes(facts["saved_offsets"]) for name, facts in sharding.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            message = f"{self.where}: {SHARDING} in its header is damaged"
            raise CheckpointCorrupt(message) from error


def read_header(files: Files, file: str, begin: int = 0) -> SafetensorsHeader:
    """Reads and checks the header of a file.

    Arguments:
        files: of the checkpoint.
        file: its name.
        begin: how many bytes of others the file has before those of safetensors.

    Raises:
        CheckpointCorrupt: it is damaged, or the file is shorter than it says.
        Failed: the storage failed.
    """
    where = f"{files.location}: {file}"
    length = int.from_bytes(files.read(file, begin, 8), "little")
    total = files.size(file)
    size = None if total is None else total - begin
    if length > _MOST_HEADER or (size is not None and 8 + length > size):
        raise CheckpointCorrupt(f"{where} is no safetensors file: its header has {length} bytes")
    try:
        entries = json.loads(files.read(file, begin + 8, length), object_pairs_hook=_once)
        metadata = entries.pop("__metadata__", {})
        if not all(isinstance(x, str) for pair in metadata.items() for x in pair):
            raise ValueError("its metadata are not texts")
        tensors, end = {}, 0
        for name, facts in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            tensors[name], end = _tensor(name, facts, end, where, file, begin + 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where}: its header is damaged: {error}") from error
    if size is not None and size != 8 + length + end:
        raise CheckpointCorrupt(
            f"{where} has {size} bytes, but {8 + length + end} according to its header"
        )
    return SafetensorsHeader(tensors, metadata, where)


def _tensor(
    name: str, facts: Mapping[str, Any], end: int, where: str, file: str, data: int
) -> tuple[TensorSource, int]:
    """A tensor of a header, and the end of its bytes, which begin where those before it end."""
    shape, (begin, stop) = sizes(facts["shape"]), sizes(facts["data_offsets"])
    kind, offset = facts["dtype"], data + begin
    if kind in DTYPES:
        source = TensorSource(DTYPES[kind], shape, FileRange(file, offset))
        nbytes = source.nbytes
    elif kind in _FOUR_BITS:
        source = TensorSource(_FOUR_BITS[kind], shape, Nibbles(file, offset))
        nbytes = -(-source.count // 2)
    else:
        reason = (
            f"{where}: {quoted(name)} has the dtype {quoted(kind)}, which is not read; read the "
            "other tensors by their names (only=), or drop it by a rule"
        )
        source, nbytes = (TensorSource("uint8", shape, Unreadable(reason)), max(0, stop - begin))
    if begin != end or stop - begin != nbytes:
        raise ValueError(
            f"{quoted(name)} of {nbytes} bytes lies at {begin} to {stop}, after byte {end}"
        )
    return source, stop


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    for name in entries:
        name.encode()  # JSON can hold half a character, which is no text
    return entries
