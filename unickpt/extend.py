"""For formats and storages of others: how they are registered, and the protocols they fulfil.

    from unickpt import extend

    extend.register_format(MyFormat())  # `unickpt.open` and `load` ask it before those built in
    extend.register_writer("mine", MyWriter)  # `unickpt.convert(..., to="mine")`
    extend.register_scheme(extend.Scheme("minio", spec))  # paths such as minio://bucket/run

A format's `open` returns a `Reader`, which needs a location, an index and `read(requests)`; for
arrays that lie in files, `RangeReader` has all that. `unickpt.testing.ReaderSuite` has the tests
that every format passes. docs/formats/own.md is an example.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _CHECKING
from typing import Any as _Any

from unickpt.arrays.dtypes import Array, DType
from unickpt.arrays.dtypes import from_name as dtype_from_name
from unickpt.arrays.dtypes import name_of as dtype_name
from unickpt.arrays.names import matches as name_matches
from unickpt.features import RunFeature, SaveFeature
from unickpt.foreign.elements import FileRange
from unickpt.foreign.file_ranges import ArrayTable, RangeReader, TensorSource
from unickpt.foreign.files import Files
from unickpt.foreign.registry import Format
from unickpt.foreign.registry import register as register_format
from unickpt.foreign.registry import unregister as unregister_format
from unickpt.foreign.writers import register as register_writer
from unickpt.foreign.writers import unregister as unregister_writer
from unickpt.format.chunk_grid import Part
from unickpt.format.codecs import Codec, Extra, NotDecodable, StoredChunk
from unickpt.format.codecs import register as register_codec
from unickpt.format.codecs import unregister as unregister_codec
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader import Reader, Request
from unickpt.format.writer import Data, Plan, PlannedFile, Writer
from unickpt.quoting import quoted
from unickpt.storage.locations import Location
from unickpt.storage.schemes import Scheme
from unickpt.storage.schemes import register as register_scheme

if _CHECKING:
    from unickpt.runs.retention import Retention

__all__ = [
    "Array",
    "ArrayEntry",
    "ArrayTable",
    "Codec",
    "DType",
    "Data",
    "Extra",
    "FileRange",
    "Files",
    "Format",
    "Index",
    "Location",
    "NotDecodable",
    "Part",
    "Plan",
    "PlannedFile",
    "RangeReader",
    "Reader",
    "Request",
    "Retention",
    "RunFeature",
    "SaveFeature",
    "Scheme",
    "StoredChunk",
    "TensorSource",
    "Writer",
    "dtype_from_name",
    "dtype_name",
    "name_matches",
    "quoted",
    "register_codec",
    "register_format",
    "register_scheme",
    "register_writer",
    "unregister_codec",
    "unregister_format",
    "unregister_writer",
]

# Imported when they are first used. What `import unickpt` needs anyway is imported above.
_LATER = {"Retention": "runs.retention"}


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_importlib.import_module(f"unickpt.{_LATER[name]}"), name)
    globals()[name] = found
    return found
