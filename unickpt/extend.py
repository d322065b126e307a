"""For plug-ins, formats and storages: what they need of unickpt, and how they are registered.

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

from unickpt.arrays.box import Box
from unickpt.arrays.box import cut as cut_box
from unickpt.arrays.dtypes import Array, DType
from unickpt.arrays.dtypes import from_name as dtype_from_name
from unickpt.arrays.dtypes import kind as dtype_kind
from unickpt.arrays.dtypes import name_of as dtype_name
from unickpt.arrays.dtypes import stored_as as zarr_dtype
from unickpt.arrays.dtypes import with_shape as dtype_and_shape
from unickpt.arrays.layout import Layout, Mesh
from unickpt.arrays.names import matches as name_matches
from unickpt.features import RunFeature, SaveFeature
from unickpt.format.chunk_grid import Part
from unickpt.format.codecs import Codec, Extra, NotDecodable, StoredChunk
from unickpt.format.codecs import register as register_codec
from unickpt.format.codecs import unregister as unregister_codec
from unickpt.format.coverage import check_boxes
from unickpt.format.crc32 import Range as ChecksummedRange
from unickpt.format.crc32 import combined as combined_crc32
from unickpt.format.elements import (
    ByteRange,
    ConvertedElements,
    ElementRun,
    Elements,
    FileRange,
    InMemoryElements,
    MeanElements,
    Nibbles,
    Unreadable,
)
from unickpt.format.elements import Joined as JoinedElements
from unickpt.format.elements import Lazy as LazyElements
from unickpt.format.file_ranges import (
    CHUNK_BYTES,
    ArrayTable,
    FileBox,
    RangeReader,
    TensorSource,
    read_flat,
    row_major,
)
from unickpt.format.file_ranges import WHOLE as WHOLE_BOXES
from unickpt.format.file_ranges import of_boxes as entry_of_boxes
from unickpt.format.file_ranges import read_box as read_file_box
from unickpt.format.file_ranges import table_of as table_of_tree
from unickpt.format.file_ranges import whole as entry_of_box
from unickpt.format.files import CheckedFiles, Files
from unickpt.format.formats import Format, SeveralCheckpoints
from unickpt.format.formats import register as register_format
from unickpt.format.formats import unregister as unregister_format
from unickpt.format.index import RESERVED as RESERVED_METADATA
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.ocdbt_reader import open as open_own
from unickpt.format.reader import BlockType, ParallelMap, Reader, Request
from unickpt.format.writer import Data, Ending, OfEachProcess, Plan, PlannedFile, Writer, text_file
from unickpt.quoting import printable, quoted, shortened
from unickpt.storage.database import Database as OcdbtDatabase
from unickpt.storage.errors import Damaged, Failed, reading, reading_failed
from unickpt.storage.kvstore import Future as StorageFuture
from unickpt.storage.kvstore import asking as asking_storage
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.paths import context as storage_context
from unickpt.storage.paths import resolve as resolve_path
from unickpt.storage.schemes import Scheme
from unickpt.storage.schemes import register as register_scheme
from unickpt.threads import Pool, in_batches
from unickpt.trees.moments import moments_among
from unickpt.trees.tree import MAX_DEPTH, Expansion, Leaf, Node, Opaque, child_names, unwrapped
from unickpt.trees.tree import by_key as children_by_key
from unickpt.trees.tree import component as name_component
from unickpt.trees.tree import dict_of as dict_node
from unickpt.trees.tree import flatten as flatten_tree
from unickpt.trees.tree import join as join_names
from unickpt.trees.tree import keys_of as keys_of_leaves
from unickpt.trees.tree import leaves as leaves_of_tree
from unickpt.trees.tree import put as put_nested
from unickpt.trees.tree import without as tree_without
from unickpt.trees.tree_json import Plain, is_plain
from unickpt.trees.tree_json import from_json as tree_from_json
from unickpt.trees.tree_json import from_names as tree_from_names
from unickpt.trees.tree_json import length as plain_length
from unickpt.trees.tree_json import to_json as tree_to_json

if _CHECKING:
    from unickpt.format.step_metrics import finite_or_text, step_metrics
    from unickpt.format.writers import make_writer, register_writer, unregister_writer
    from unickpt.runs.retention import Retention
    from unickpt.trees.stored_types import PYTHON_TYPES, STORED_TYPES, StoredType, parsed_types

__all__ = [
    "Array",
    "ArrayEntry",
    "ArrayTable",
    "BlockType",
    "Box",
    "ByteRange",
    "CHUNK_BYTES",
    "CheckedFiles",
    "ChecksummedRange",
    "Codec",
    "ConvertedElements",
    "DType",
    "Damaged",
    "Data",
    "ElementRun",
    "Elements",
    "Ending",
    "Expansion",
    "Extra",
    "Failed",
    "FileBox",
    "FileRange",
    "Files",
    "Format",
    "InMemoryElements",
    "Index",
    "JoinedElements",
    "Layout",
    "LazyElements",
    "Leaf",
    "Location",
    "MANIFEST",
    "MAX_DEPTH",
    "MeanElements",
    "Mesh",
    "Nibbles",
    "Node",
    "NotDecodable",
    "OcdbtDatabase",
    "OfEachProcess",
    "Opaque",
    "PYTHON_TYPES",
    "ParallelMap",
    "Part",
    "Plain",
    "Plan",
    "PlannedFile",
    "Pool",
    "RESERVED_METADATA",
    "RangeReader",
    "Reader",
    "Request",
    "Retention",
    "RunFeature",
    "STORED_TYPES",
    "SaveFeature",
    "Scheme",
    "SeveralCheckpoints",
    "StorageFuture",
    "StoredChunk",
    "StoredType",
    "TensorSource",
    "Unreadable",
    "WHOLE_BOXES",
    "Writer",
    "asking_storage",
    "check_boxes",
    "child_names",
    "children_by_key",
    "combined_crc32",
    "cut_box",
    "dict_node",
    "dtype_and_shape",
    "dtype_from_name",
    "dtype_kind",
    "dtype_name",
    "entry_of_box",
    "entry_of_boxes",
    "finite_or_text",
    "flatten_tree",
    "in_batches",
    "is_plain",
    "join_names",
    "keys_of_leaves",
    "leaves_of_tree",
    "make_writer",
    "moments_among",
    "name_component",
    "name_matches",
    "open_own",
    "parsed_types",
    "plain_length",
    "printable",
    "put_nested",
    "quoted",
    "read_file_box",
    "read_flat",
    "reading",
    "reading_failed",
    "register_codec",
    "register_format",
    "register_scheme",
    "register_writer",
    "resolve_path",
    "row_major",
    "shortened",
    "step_metrics",
    "storage_context",
    "table_of_tree",
    "text_file",
    "tree_from_json",
    "tree_from_names",
    "tree_to_json",
    "tree_without",
    "unregister_codec",
    "unregister_format",
    "unregister_writer",
    "unwrapped",
    "zarr_dtype",
]

# Imported when they are first used. What `import unickpt` needs anyway is imported above.
_LATER = {
    "PYTHON_TYPES": "trees.stored_types",
    "Retention": "runs.retention",
    "STORED_TYPES": "trees.stored_types",
    "StoredType": "trees.stored_types",
    "finite_or_text": "format.step_metrics",
    "make_writer": "format.writers",
    "parsed_types": "trees.stored_types",
    "register_writer": "format.writers",
    "step_metrics": "format.step_metrics",
    "unregister_writer": "format.writers",
}


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_importlib.import_module(f"unickpt.{_LATER[name]}"), name)
    globals()[name] = found
    return found
