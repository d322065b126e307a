"""Weights of programs: TorchScript (`torch.jit.save`) and `torch.export.save` (`.pt2`).

Sources: torch/csrc/jit/serialization/python_print.cpp and torch/export/pt2_archive/_package.py. The
code in a program is text: it says which of a module's tensors are parameters and buffers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import msgspec

from unickpt.backends._files.elements import Unreadable
from unickpt.backends._files.headers import sizes
from unickpt.backends._files.pickles import PickledObject
from unickpt.backends._files.torch_files import TorchFilesReader
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends._files.zip_files import STORED, ZipFile
from unickpt.errors import CheckpointCorrupt
from unickpt.extend import (
    ArrayTable,
    FileRange,
    Files,
    RangeReader,
    Reader,
    TensorSource,
    dtype_from_name,
    name_component,
    quoted,
)

_MOST_CODE = 64 << 20  # bytes of a file of code, or of a table of weights
# Names of modules together: each can be in several others.
_LEAST_LETTERS, _LETTERS = 100_000, 64
_CODE = r"^class {}\(Module\):\n((?:  __(?:parameters|buffers)__ = \[.*\]\n)*)"
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')
# Of torch before 2.8, of 2.8, and the table of weights of later versions.
_PICKLED = re.compile(r"serialized_state_dict\.pt|(?:[^/]+/)?data/weights/([^/]+)\.pt")
_TABLE = re.compile(r"((?:[^/]+/)?data/weights/)([^/]+)_weights_config\.json")
_EXPORTED = re.compile(r"serialized_exported_program\.json|(?:[^/]+/)?archive_format")
_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32",
    8: "float64", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16",
    29: "float8_e4m3fn", 30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip


# --- TorchScript ----------------------------------------------------------------------------------


def scripted(files: Files, file: TorchFile, archive: ZipFile, top: str) -> Reader:
    """A reader of the parameters and buffers of a module that torch.jit.save wrote.

    Arguments:
        files: of the checkpoint.
        file: the program.
        archive: the zip file that it is.
        top: the folder of the program in it.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: a module has a state of its own, or the weights have no names.
    """
    declared, state = cache(partial(_declared, archive, top)), dict[str, Tensor]()
    pending = [("", file.value)] if isinstance(file.value, PickledObject) else []
    left = _LEAST_LETTERS + _LETTERS * file.pickle_size
    while pending:
        prefix, module = pending.pop()
        lines = declared(module.name)
        if lines is None:
            continue
        # Before torch 1.8, all tensors that are no parameters were buffers.
        names = set(_NAME.findall(lines if "__buffers__" in lines else ""))
        if not isinstance(module.state, dict):
            raise files.unsupported(
                f"{file.name}: the module {quoted(prefix[:-1])} of the class {quoted(module.name)} "
                "keeps its state in a way of its own, as quantized modules do; load it with torch, "
                "and save its state_dict()"
            )
        for key, value in module.state.items():
            left -= len(prefix) + 1
            if left < 0:
                raise file.damaged("its modules contain each other too often")
            if isinstance(value, Tensor) and (key in names or "__buffers__" not in lines):
                state[f"{prefix}{key}"] = value
            elif isinstance(value, PickledObject):
                pending.append((f"{prefix}{key}.", value))
    if not state:
        raise files.unsupported(
            f"{file.name} is a program of torch.jit without parameters and buffers; if it was "
            "frozen (torch.jit.freeze), its weights have no names: save the module before that"
        )
    reader = TorchFilesReader(files, state, dict.fromkeys(map(id, state.values()), file))
    reader.format = "torchscript"
    return reader


def _declared(archive: ZipFile, top: str, class_name: str) -> str | None:
    """The lines of code that declare the parameters and buffers of a class; None if it is no
    module."""
    package, _, name = class_name.rpartition(".")
    if package.partition(".")[0] != "__torch__":
        return None
    path = f"{top}code/{package.replace('.', '/')}.py"
    member = archive.members.get(path)
    if member is None or member.size > _MOST_CODE:
        raise archive.damaged(f"the code {path} of a module is missing or too long")
    code = archive.first(member, member.size).decode(errors="replace")
    match = re.search(_CODE.format(re.escape(name)), code, re.M)
    return match and match[1]


# --- torch.export ---------------------------------------------------------------------------------


class _TensorMeta(msgspec.Struct):
    """Extents, strides and an offset, each as `{"as_int": 3}`."""

    dtype: int
    sizes: list[dict[str, Any]]
    strides: list[dict[str, Any]]
    storage_offset: dict[str, Any]


class _Weight(msgspec.Struct):
    path_name: str
    tensor_meta: _TensorMeta
    use_pickle: bool = False


class _Weights(msgspec.Struct):
    config: dict[str, _Weight]


def exported(archive: ZipFile) -> Reader | None:
    """A reader of the parameters and persistent buffers of programs that torch.export.save wrote;
    None if a zip file is none.

    Raises:
        CheckpointCorrupt: it is damaged.
    """
    files, name = archive.files, archive.name
    if not any(map(_EXPORTED.fullmatch, archive.members)):
        return None
    tables = [match for match in map(_TABLE.fullmatch, archive.members) if match]
    if tables:
        return ExportedReader(archive, [(match[0], match[1], match[2]) for match in tables])
    pickled = {
        match[1] or "": match[0] for match in map(_PICKLED.fullmatch, archive.members) if match
    }
    opened = {}
    for model, path in pickled.items():
        member = archive.members[path]
        if member.method != STORED:
            raise files.unsupported(f"{name}: {path} is compressed; unpack it, and give its path")
        node = model if len(pickled) > 1 else ""
        opened[node] = TorchFile(files, name, archive.offset(member), member.size)
    if not opened:
        raise files.unsupported(f"{name} is a program of torch.export without weights")
    return TorchFilesReader.of_files(files, opened, "torch-export")


class ExportedReader(RangeReader):
    """The weights of programs that torch 2.9 and later exported.

    Arguments:
        archive: the zip file.
        tables: of each program the table of its weights, their folder, and its name.
    """

    format = "torch-export"

    def __init__(self, archive: ZipFile, tables: Sequence[tuple[str, str, str]]) -> None:
        self._archive = archive
        table, first = ArrayTable(), dict[Hashable, str]()
        for path, folder, model in tables:
            prefix = f"{name_component(model)}/" if len(tables) > 1 else ""
            for name, weight in self._config(path).items():
                array = prefix + name_component(name)
                try:
                    source = self._source(f"{folder}{weight.path_name}", weight, array)
                except CheckpointCorrupt as error:
                    raise archive.files.damaged(f"array {array!r}: {error}") from error
                first_name = first.setdefault(source, array)
                if first_name == array:
                    table.add(array, source)
                else:
                    table.aliases[array] = first_name
        super().__init__(archive.files, table.index(), table.boxes)

    def _config(self, path: str) -> Mapping[str, _Weight]:
        member = self._archive.members[path]
        if member.size > _MOST_CODE:
            raise self._archive.damaged(f"{path} has {member.size} bytes, too many")
        try:
            return msgspec.json.decode(
                self._archive.first(member, member.size), type=_Weights
            ).config
        except (ValueError, RecursionError) as error:
            raise self._archive.damaged(f"{path} is damaged: {error}") from error

    def _source(self, path: str, weight: _Weight, array: str) -> TensorSource:
        archive, meta, member = self._archive, weight.tensor_meta, self._archive.members.get(path)
        dtype = _DTYPES.get(meta.dtype)
        try:
            shape, strides, [first] = (
                sizes([size.get("as_int") for size in list_of])
                for list_of in (meta.sizes, meta.strides, [meta.storage_offset])
            )
        except ValueError as error:
            raise archive.damaged(f"its table of weights is damaged: {error}") from error
        if weight.use_pickle or dtype is None:
            kind = "of a class of its own" if weight.use_pickle else f"of the type {meta.dtype}"
            reason = f"{archive.files.location}: array {array!r} is a tensor {kind}"
            way_out = "load it with torch.export.load, and save its state_dict"
            return TensorSource("uint8", shape, Unreadable(f"{reason}; {way_out}"))
        if member is None or member.method != STORED or len(shape) != len(strides):
            raise archive.damaged(f"{path} is missing, compressed or malformed")
        last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if 0 not in shape and (last + 1) * dtype_from_name(dtype).itemsize > member.size:
            raise archive.damaged(f"it reaches beyond {path}")
        begin = archive.offset(member)
        archive.summed(member, begin)
        return TensorSource(dtype, shape, FileRange(archive.name, begin), first, strides)
