"""For formats and storages of others: how they are registered, and the protocols they fulfil.

    from unickpt import extend

    extend.register_format(MyFormat())  # `unickpt.open` and `load` ask it before those built in
    extend.register_writer("mine", MyWriter)  # `unickpt.convert(..., to="mine")`
    extend.register_scheme(extend.Scheme("minio", spec))  # paths such as minio://bucket/run

A format's `open` returns a `Reader`, which needs a location, an index and `read(requests)`; for
arrays that lie in files, `RangeReader` has all that. `unickpt.testing.ReaderSuite` has the tests
that every format passes. docs/formats/own.md is an example.
"""

from unickpt.foreign.elements import FileRange
from unickpt.foreign.file_ranges import ArrayTable, RangeReader, TensorSource
from unickpt.foreign.files import Files
from unickpt.foreign.registry import Format
from unickpt.foreign.registry import register as register_format
from unickpt.foreign.registry import unregister as unregister_format
from unickpt.foreign.writers import register as register_writer
from unickpt.foreign.writers import unregister as unregister_writer
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader import Reader, Request
from unickpt.format.writer import Data, Plan, PlannedFile, Writer
from unickpt.storage.locations import Location
from unickpt.storage.schemes import Scheme
from unickpt.storage.schemes import register as register_scheme

__all__ = [
    "ArrayEntry",
    "ArrayTable",
    "Data",
    "FileRange",
    "Files",
    "Format",
    "Index",
    "Location",
    "Part",
    "Plan",
    "PlannedFile",
    "RangeReader",
    "Reader",
    "Request",
    "Scheme",
    "TensorSource",
    "Writer",
    "register_format",
    "register_scheme",
    "register_writer",
    "unregister_format",
    "unregister_writer",
]
