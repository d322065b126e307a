"""Writes safetensors files, and Hugging Face folders of them.

Sources: the format's README (github.com/huggingface/safetensors); transformers' `save_pretrained`
and huggingface_hub's `split_torch_state_dict_into_shards`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from unickpt.backends._files.flat_names import (
    SEPARATOR,
    are_nested,
    flat_names,
    plain_values,
    refuse,
)
from unickpt.backends._files.safetensors_headers import DTYPES
from unickpt.errors import UnsupportedLeaf
from unickpt.extend import (
    RESERVED_METADATA,
    ArrayEntry,
    Box,
    Data,
    Index,
    Plan,
    PlannedFile,
    dtype_from_name,
    dtype_kind,
    moments_among,
    name_component,
    text_file,
)

_NAMES = {name: code for code, name in DTYPES.items()}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip
_MOST_SHARD = 5 * 10**9  # as transformers
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|gguf)(\.index\.json)?")


@dataclass(frozen=True)
class SafetensorsWriter:
    """One file."""

    suffixes: ClassVar[Sequence[str]] = (".safetensors",)

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        names = _names(index, "safetensors")
        entries = {name: index.arrays[name] for name in names}
        metadata = _metadata(index, names)
        planned = _file(file or "model.safetensors", entries, names, metadata, last=True)
        return Plan((planned,), _shown(names))


@dataclass(frozen=True)
class HuggingFaceWriter:
    """A folder as transformers reads it.

    Arguments:
        max_shard_size: of a file, in bytes; or as a text, such as "5GB".
        dtype: floating-point arrays are cast to it, such as "bfloat16"; None keeps each unchanged.
        config: a folder whose other files (configuration, tokenizer, ...) are copied; in
            `config.json`, the dtype is that of the cast.
    """

    max_shard_size: int | str = _MOST_SHARD
    dtype: str | None = None
    config: str | os.PathLike[str] | None = None
    suffixes: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        _size(self.max_shard_size)
        if self.dtype is not None and not _is_float(self.dtype):
            raise ValueError(f"dtype={self.dtype!r} is no floating-point dtype of safetensors")
        if self.config is not None and not os.path.isdir(self.config):
            raise ValueError(f"config={os.fspath(self.config)!r} is not a folder")

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        _check_model(index)
        casts = _casts(index, self.dtype)
        index = replace(
            index,
            arrays={n: replace(e, dtype=casts.get(n, e.dtype)) for n, e in index.arrays.items()},
        )
        names = _names(index, "hf")
        entries = {name: index.arrays[name] for name in names}
        shards = _shards(entries, min(_size(self.max_shard_size), most_bytes))
        metadata, count = _metadata(index, names), len(shards)
        files = _beside(self.config, self.dtype)
        where = dict[str, str]()
        for number, shard in enumerate(shards, 1):
            single = "model.safetensors"
            called = single if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            where |= {names[name]: called for name in shard}
            of_shard = {name: entries[name] for name in shard}
            files.append(_file(called, of_shard, names, metadata, last=count == 1))
        if count > 1:
            total = sum(entry.nbytes for entry in entries.values())
            weight_index = {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(where.items())),
            }
            told_as = json.dumps(weight_index, indent=2, sort_keys=True) + "\n"
            files.append(text_file("model.safetensors.index.json", told_as, last=True))
        return Plan(tuple(files), _shown(names), casts=casts)


def _check_model(index: Index) -> None:
    """Refuses a whole training step: `from_pretrained` looks up the names of the model alone, and
    takes random numbers for weights that it does not find.

    Raises:
        UnsupportedLeaf: there are moments of an optimizer.
    """
    moments = moments_among(index.arrays, {n: e.shape for n, e in index.arrays.items()})
    if moments:
        more = f" and {len(moments) - 1} more" if len(moments) > 1 else ""
        raise UnsupportedLeaf(
            f"array {moments[0]!r}{more} look like moments of an optimizer, and from_pretrained "
            'knows the names of a model alone. Export the model, as under="model" or --under '
            "model; or through rules that make the names of the model's class and drop the rest "
            '(docs/howto/convert.md). to="safetensors" writes one file with any names'
        )


def _is_float(dtype: str) -> bool:
    return dtype in _NAMES and dtype_kind(dtype_from_name(dtype)) == "float"


def _casts(index: Index, dtype: str | None) -> dict[str, str]:
    """The arrays whose dtype changes."""
    if dtype is None:
        return {}
    return {
        name: dtype
        for name, entry in index.arrays.items()
        if entry.dtype != dtype and dtype_kind(dtype_from_name(entry.dtype)) == "float"
    }


def _names(index: Index, format: str) -> dict[str, str]:
    """The name of each array in the files; a file holds tied arrays once, under the first name."""
    missing = [entry for entry in index.arrays.values() if entry.dtype not in _NAMES]
    refuse(format, missing, plain_values(index))
    names = flat_names(index)
    reserved = [name for name in index.arrays if names[name] == "__metadata__"]
    if reserved:
        raise UnsupportedLeaf(
            f"array {reserved[0]!r}: safetensors reserves the name '__metadata__'; rename it by a "
            "rule"
        )
    return {name: names[name] for name in index.arrays}


def _shown(names: Mapping[str, str]) -> dict[str, str]:
    """The names as unickpt reads them."""
    if are_nested(names):
        return {name: name for name in names}
    return {name: name_component(text) for name, text in names.items()}


def _metadata(index: Index, names: Mapping[str, str]) -> dict[str, str]:
    """The checkpoint's metadata that are texts; transformers requires `format`."""
    texts = {
        k: v for k, v in index.metadata.items() if isinstance(v, str) and k != RESERVED_METADATA
    }
    return {"format": "pt", **texts, **({SEPARATOR: "/"} if are_nested(names) else {})}


def _file(
    called: str,
    entries: Mapping[str, ArrayEntry],
    names: Mapping[str, str],
    metadata: Mapping[str, str],
    *,
    last: bool,
) -> PlannedFile:
    # The largest elements come first, as in the library, so that each lies at a multiple of its
    # size.
    ordered = sorted(entries.items(), key=lambda item: (-item[1].itemsize, names[item[0]]))
    header: dict[str, Any] = {"__metadata__": metadata}
    ends = list(accumulate((entry.nbytes for _, entry in ordered), initial=0))
    for (name, entry), offsets in zip(ordered, pairwise(ends), strict=True):
        facts = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape)}
        header[names[name]] = {**facts, "data_offsets": list(offsets)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    begins = zip(ordered, ends, strict=False)
    data = [Data(len(head) + a, n, Box.whole(e.shape)) for (n, e), a in begins if e.nbytes]
    return PlannedFile(called, len(head) + ends[-1], {0: head}, tuple(data), last=last)


def _shards(entries: Mapping[str, ArrayEntry], most: int) -> list[list[str]]:
    """The arrays of each file, in order; an array is never divided."""
    shards: list[list[str]] = []
    shard_bytes = math.inf
    for name, entry in entries.items():
        if shard_bytes + entry.nbytes > most and (not shards or shards[-1]):
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += entry.nbytes
    return shards or [[]]


def _size(size: int | str) -> int:
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match and match[2].upper() in _UNITS:
            size = int(float(match[1]) * _UNITS[match[2].upper()])
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"max_shard_size={size!r}: give bytes, or a text such as '5GB' or '500MiB'"
        )
    return size


def _beside(folder: str | os.PathLike[str] | None, dtype: str | None) -> list[PlannedFile]:
    """Copies of the files of a folder, without weights and subfolders."""
    if folder is None:
        return []
    copies = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.is_file() or entry.name[0] == "." or _WEIGHTS.fullmatch(entry.name):
            continue
        if entry.name == "config.json" and dtype is not None:
            copies.append(text_file(entry.name, _with_dtype(entry.path, dtype)))
        else:
            copies.append(PlannedFile(entry.name, entry.stat().st_size, copied=entry.path))
    return copies


def _with_dtype(path: str, dtype: str) -> str:
    """A configuration with another dtype, which transformers else casts to."""
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        keys = [key for key in ("torch_dtype", "dtype") if key in config]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the configuration of a model: {error}") from error
    return json.dumps({**config, **dict.fromkeys(keys, dtype)}, indent=2) + "\n"
