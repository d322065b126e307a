"""For plug-ins, formats, storages and trainers: what they use of unickpt, and how they register.

    from unickpt import extend

    extend.register_format(MyFormat())  # `unickpt.open` and `load` try it before built-in formats
    extend.register_writer("mine", MyWriter)  # `unickpt.convert(..., to="mine")`
    extend.register_scheme(extend.Scheme("minio", spec))  # paths such as minio://bucket/run

A format's `open` returns a `Reader`, which needs a location, an index and `read(requests)`.
`RangeReader` implements that for arrays in files. `unickpt.testing.ReaderSuite` has the tests that
every format passes. docs/formats/own.md is an example.

A trainer's integration saves objects that are `SavedOnly` with a `SaveRequest`, by
`save_in_background` or its own `SaveQueue`. It inspects a checkpoint with `structure_of` and
`read_into`, on the processes of `job_group`.
"""

import typing as _typing
from typing import TYPE_CHECKING as _CHECKING

from unickpt._version import __version__ as unickpt_version
from unickpt.arrays.box import Box, flat_range_to_boxes
from unickpt.arrays.box import cut as cut_box
from unickpt.arrays.dtypes import Array, DType
from unickpt.arrays.dtypes import from_name as dtype_from_name
from unickpt.arrays.dtypes import kind as dtype_kind
from unickpt.arrays.dtypes import name_of as dtype_name
from unickpt.arrays.dtypes import stored_as as zarr_dtype
from unickpt.arrays.dtypes import with_shape as dtype_and_shape
from unickpt.arrays.layout import Layout, Mesh
from unickpt.arrays.names import matches as name_matches
from unickpt.arrays.names import natural as natural_key
from unickpt.arrays.strided_copy import view as strided_view
from unickpt.commit.version import Version, version_at
from unickpt.doors import Door
from unickpt.doors import every as every_door
from unickpt.doors import find as find_door
from unickpt.doors import late_names as _late_names
from unickpt.features import FileObserver, PhaseObserver, Run, RunFeature, SaveCall, SaveFeature
from unickpt.format.borrowed import LEAST_USED as LEAST_REUSED
from unickpt.format.borrowed import MOST_BASES
from unickpt.format.borrowed import name_of as base_name
from unickpt.format.chunk_encoding import Encoded as EncodedChunk
from unickpt.format.chunk_encoding import bytes_of as bytes_of_chunk
from unickpt.format.chunk_encoding import common_codec
from unickpt.format.chunk_encoding import compressed as compressed_chunk
from unickpt.format.chunk_encoding import digest as chunk_digest
from unickpt.format.chunk_encoding import is_of_fixed_size as has_fixed_size
from unickpt.format.chunk_encoding import nbytes_as_stored as stored_chunk_bytes
from unickpt.format.chunk_encoding import raw as raw_chunk
from unickpt.format.chunk_grid import Part, chunk_count, chunk_keys, numbered_parts
from unickpt.format.chunk_grid import parts as parts_of_array
from unickpt.format.chunk_grid import parts_of as parts_of_boxes
from unickpt.format.chunk_values import Value as ChunkValue
from unickpt.format.chunk_values import read_full as read_full_chunk
from unickpt.format.codec_protocol import Codec, Extra, NotDecodable, StoredChunk, encoding_of
from unickpt.format.codec_protocol import register as register_codec
from unickpt.format.codec_protocol import unregister as unregister_codec
from unickpt.format.coverage import check_boxes
from unickpt.format.crc32 import Range as ChecksummedRange
from unickpt.format.crc32 import combined as combined_crc32
from unickpt.format.encoder_protocol import Column, EncodingPolicy, SaveEncoder, Settled
from unickpt.format.file_ranges import (
    CHUNK_BYTES,
    ArrayTable,
    ByteRange,
    Elements,
    FileBox,
    FileRange,
    RangeReader,
    TensorSource,
    row_major,
)
from unickpt.format.file_ranges import WHOLE as WHOLE_BOXES
from unickpt.format.file_ranges import of_boxes as entry_of_boxes
from unickpt.format.file_ranges import read_box as read_file_box
from unickpt.format.file_ranges import whole as entry_of_box
from unickpt.format.files import CheckedFiles, Files
from unickpt.format.index import CONVERSION as CONVERSION_METADATA
from unickpt.format.index import REPLACED as REPLACED_METADATA
from unickpt.format.index import RESERVED as RESERVED_METADATA
from unickpt.format.index import ArrayEntry, BaseEntry, Encoding, Index
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.ocdbt_reader import open as open_own
from unickpt.format.reader_protocol import BlockType, ParallelMap, Reader, Request
from unickpt.format.reader_registry import Format, SeveralCheckpoints, format_named
from unickpt.format.reader_registry import register as register_format
from unickpt.format.reader_registry import unregister as unregister_format
from unickpt.format.refusals import refuse_unknown
from unickpt.format.timing import PHASES as SAVE_PHASES
from unickpt.format.timing import Timing
from unickpt.format.unit_steps import UnitSteps
from unickpt.format.unit_steps import stored as stored_unit_steps
from unickpt.format.verified_chunks import COMPRESSED_MOST as MOST_COMPRESSED_BYTES
from unickpt.format.verified_chunks import ChunkStore
from unickpt.format.writer_protocol import (
    Data,
    Ending,
    LeavesOut,
    NeedsElements,
    OfEachProcess,
    Plan,
    PlannedFile,
    Writer,
    text_file,
)
from unickpt.frameworks.adapter_protocol import Adapter, ArraySource, Fragment
from unickpt.frameworks.host_memory import HostBuffers, MemoryBudget
from unickpt.frameworks.host_memory import Scratch as ScratchMemory
from unickpt.frameworks.leaves import NOTHING as NOTHING_HERE
from unickpt.frameworks.leaves import (
    SavedOnly,
    Sections,
    adapter_of,
    adapters,
    flatten_state,
    is_array,
    job_group,
)
from unickpt.frameworks.leaves import expand as expand_leaf
from unickpt.frameworks.leaves import is_leaf as is_saved_as_leaf
from unickpt.frameworks.members import named as process_names
from unickpt.frameworks.per_process import blob_key
from unickpt.frameworks.per_process import decode as decode_per_process
from unickpt.frameworks.per_process import encode as encode_per_process
from unickpt.frameworks.process_group import (
    all_gather_bytes,
    current_group,
    loaded_together,
    members_of,
    new_session,
    within,
)
from unickpt.frameworks.process_group import alone as group_of_one
from unickpt.frameworks.sections import EncodedValue
from unickpt.frameworks.sections import Joined as JoinedParts
from unickpt.loading.loader import plan_load
from unickpt.loading.request import LoadRequest
from unickpt.loading.views import StoredView, View, leaf_text, read_into, stored_leaf, structure_of
from unickpt.progress import Progress, reporting
from unickpt.quoting import changed_repr, counted, printable, quoted, shortened, size_text
from unickpt.quoting import first_few as first_few
from unickpt.reading.checkpoint import Hints, Source, open_reader
from unickpt.reading.checkpoint import again as reading_again
from unickpt.reading.checkpoint import opened as opened_checkpoint
from unickpt.reading.checkpoint import reading as reading_checkpoint
from unickpt.reading.checkpoints_below import Listed, checkpoints_below, other_folders
from unickpt.references.policy import (
    Claim,
    DescribedSave,
    ReferencePolicy,
    ReferenceSource,
    Skipped,
    WritingSave,
)
from unickpt.references.unread import UnreadPolicy
from unickpt.references.value_places import Compared, Taken, ValuePlaces, WriteItem
from unickpt.run_event import hears_events, send_event
from unickpt.saving.background import SaveCallbacks, SaveQueue, SaveRequest
from unickpt.saving.saver import begin as save_in_background
from unickpt.saving.task import SaveTask
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.data_files import ADDED_FOLDER, LINKED_FOLDER, FileView
from unickpt.storage.data_files import written_in as written_in_data_file
from unickpt.storage.database import Database as OcdbtDatabase
from unickpt.storage.disk_space import room_text
from unickpt.storage.errors import (
    Damaged,
    Failed,
    reading,
    reading_failed,
    writing,
    writing_failed,
)
from unickpt.storage.local_folders import sync_folder
from unickpt.storage.locations import Location, folders_below, folders_with
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.paths import LocalLocation, PathLike
from unickpt.storage.paths import absolute as absolute_path
from unickpt.storage.paths import context as storage_context
from unickpt.storage.paths import resolve as resolve_path
from unickpt.storage.regular_files import RegularFiles, system_calls
from unickpt.storage.regular_files import closing as closing_file
from unickpt.storage.schemes import Scheme
from unickpt.storage.schemes import register as register_scheme
from unickpt.storage.tensorstore_calls import Future as StorageFuture
from unickpt.storage.tensorstore_calls import KvStore
from unickpt.storage.tensorstore_calls import asking as asking_storage
from unickpt.threads import Pool, SerialExecutor, in_batches
from unickpt.threads import Window as MemoryWindow
from unickpt.threads import settle as settle_future
from unickpt.trees.hints import hint as storing_hint
from unickpt.trees.moments import moments_among
from unickpt.trees.tree import MAX_DEPTH, Expansion, Key, Leaf, Node, Opaque, child_names, unwrapped
from unickpt.trees.tree import by_key as children_by_key
from unickpt.trees.tree import component as name_component
from unickpt.trees.tree import dict_of as dict_node
from unickpt.trees.tree import flatten as flatten_tree
from unickpt.trees.tree import join as join_names
from unickpt.trees.tree import keys_of as keys_of_leaves
from unickpt.trees.tree import leaves as leaves_of_tree
from unickpt.trees.tree import put as put_nested
from unickpt.trees.tree import rebuild as rebuild_tree
from unickpt.trees.tree import with_values as tree_with_values
from unickpt.trees.tree import without as tree_without
from unickpt.trees.tree_json import Plain, is_plain
from unickpt.trees.tree_json import from_json as tree_from_json
from unickpt.trees.tree_json import from_names as tree_from_names
from unickpt.trees.tree_json import is_kind as is_plain_kind
from unickpt.trees.tree_json import length as plain_length
from unickpt.trees.tree_json import to_json as tree_to_json
from unickpt.trees.tree_json import value_to_json as plain_to_json
from unickpt.write_filter import ArrayUnits, Earlier, Selection, Unit, Units, WriteFilter

if _CHECKING:
    from unickpt.adapters.torch_optimizer import NamedOptimizer
    from unickpt.arrays.index_map import Dim, linear_index
    from unickpt.arrays.saved_arrays import MeshFacts, MeshKey, SavedArrays
    from unickpt.commit import progress_reports
    from unickpt.commit.lease import Lease
    from unickpt.commit.lease import Use as LeaseUse
    from unickpt.commit.messages import Notes, replaced_in
    from unickpt.commit.root import refuse_checkpoint
    from unickpt.display.fragment_grid import FragmentGrid, GridBand
    from unickpt.display.fragment_grid import grids as fragment_grids
    from unickpt.display.fragment_grid import head as grid_band_text
    from unickpt.display.html import MOST_FRAGMENTS as MOST_FRAGMENTS_SHOWN
    from unickpt.display.html import page as html_page
    from unickpt.display.html import plain as shown_text
    from unickpt.display.html import shape_text
    from unickpt.display.html import table as html_table
    from unickpt.display.tree_table import fragment_count, layout_text, meshes_of
    from unickpt.format.step_metrics import finite_or_text, step_metrics
    from unickpt.format.writer_registry import OWN as OWN_FORMAT
    from unickpt.format.writer_registry import chosen as chosen_format
    from unickpt.format.writer_registry import make_writer, register_writer, unregister_writer
    from unickpt.frameworks.adapter_protocol import ArrayTarget
    from unickpt.frameworks.members import Members
    from unickpt.frameworks.memory_limits import node_name
    from unickpt.frameworks.process_group import launched_index, launched_together
    from unickpt.reading.array_reader import (
        Filled,
        Job,
        LoadCounts,
        ReadArrays,
        read_arrays,
    )
    from unickpt.reading.array_reader import prepare as prepare_buffers
    from unickpt.reading.array_reader import slots_of as boxes_to_fill
    from unickpt.reading.chunk_reader import ChunkReader, Task
    from unickpt.reading.read_plan import ChunkRead, Consumer
    from unickpt.reading.read_plan import by_chunk as consumers_by_chunk
    from unickpt.reading.recipes import ElementSource, Unchanged
    from unickpt.reading.shared_reads import SharedReads
    from unickpt.rules.in_memory import apply as apply_rules
    from unickpt.rules.in_memory import elements as ruled_elements
    from unickpt.rules.in_memory import facts_of, stored_leaves
    from unickpt.rules.observed import DraftReport, ObservedReport, RulesCheck
    from unickpt.rules.plan import Fact as LeafFact
    from unickpt.rules.plan import LeafKind
    from unickpt.rules.plan import Made as MadeLeaf
    from unickpt.rules.planner import make_plan as plan_rules
    from unickpt.rules.provenance import Provenance
    from unickpt.rules.rule import exprs_of as rule_exprs_of
    from unickpt.rules.view import RuledView
    from unickpt.runs.arguments import fences_of, take_retention
    from unickpt.runs.attempt_folders import FOLDER as ATTEMPTS_FOLDER
    from unickpt.runs.attempt_folders import remove_checkpoint
    from unickpt.runs.requested_removal import barrier, on_process_0
    from unickpt.runs.retention import Retention
    from unickpt.runs.save_leftovers import LOCK as ORPHANS_LOCK
    from unickpt.runs.save_leftovers import Orphan, OrphanSearch
    from unickpt.runs.save_leftovers import find as find_orphans
    from unickpt.runs.step_folder import StepFolder, bytes_on_disk, step_before
    from unickpt.runs.tier_copies import IN_ROOT, Tier
    from unickpt.runs.tier_copies import Copying as TierCopying
    from unickpt.storage import local_folders
    from unickpt.storage.export_leftovers import restore as restore_replaced
    from unickpt.storage.restorers import Restorer
    from unickpt.tools.conversion import budgets as conversion_budgets
    from unickpt.tools.conversion import (
        check_same_source,
        check_written,
        convertible,
        write_streamed,
    )
    from unickpt.tools.conversion import leaves_of as leaves_of_view
    from unickpt.tools.copying import copy_files
    from unickpt.tools.difference import ComparedViews
    from unickpt.tools.partial_copies import PartialCopy, leaving_out, lost_boxes, replace_in_place
    from unickpt.tools.slab_reads import Buffered, check_rest, read_boxes
    from unickpt.tools.slab_reads import Slabs as SlabReads
    from unickpt.tools.terminal import command_options as terminal_options
    from unickpt.tools.terminal import output as terminal_output
    from unickpt.tools.terminal import tables as terminal_tables
    from unickpt.trees.stored_types import (
        PYTHON_TYPES,
        STORED_TYPES,
        StoredType,
        has_known_factory,
        parsed_types,
    )

__all__ = [
    "ADDED_FOLDER", "ATTEMPTS_FOLDER", "Adapter", "Array", "ArrayEntry", "ArraySource",
    "ArrayTable", "ArrayTarget", "ArrayUnits", "BaseEntry", "BlockType", "Box", "Buffered",
    "ByteRange", "CHUNK_BYTES", "CONVERSION_METADATA", "CheckedFiles", "ChecksummedRange",
    "ChunkRead", "ChunkReader", "ChunkStore", "ChunkValue", "Claim", "Codec", "Column", "Compared",
    "ComparedViews", "Consumer", "DType", "Damaged", "Data", "DataReference", "DescribedSave",
    "Dim", "Door", "DraftReport", "Earlier", "ElementSource", "Elements", "EncodedChunk",
    "EncodedValue", "Encoding", "EncodingPolicy", "Ending", "Expansion", "Extra", "Failed",
    "FileBox", "FileObserver", "FileRange", "FileView", "Files", "Filled", "Format", "Fragment",
    "FragmentGrid", "GridBand", "Hints", "HostBuffers", "IN_ROOT", "Index", "Job", "JoinedParts",
    "Key", "KvStore", "LEAST_REUSED", "LINKED_FOLDER", "Layout", "Leaf", "LeafFact", "LeafKind",
    "Lease", "LeaseUse", "LeavesOut", "Listed", "LoadCounts", "LoadRequest", "LocalLocation",
    "Location", "MANIFEST", "MAX_DEPTH", "MOST_BASES", "MOST_COMPRESSED_BYTES",
    "MOST_FRAGMENTS_SHOWN", "MadeLeaf", "Members", "MemoryBudget", "MemoryWindow", "Mesh",
    "MeshFacts", "MeshKey", "NOTHING_HERE", "NamedOptimizer", "NeedsElements", "Node",
    "NotDecodable", "Notes", "ORPHANS_LOCK", "OWN_FORMAT", "ObservedReport", "OcdbtDatabase",
    "OcdbtReader", "OfEachProcess", "Opaque", "Orphan", "OrphanSearch", "PYTHON_TYPES",
    "ParallelMap", "Part", "PartialCopy", "PathLike", "PhaseObserver", "Plain", "Plan",
    "PlannedFile", "Pool", "Progress", "Provenance", "REPLACED_METADATA", "RESERVED_METADATA",
    "RangeReader", "ReadArrays", "Reader", "ReferencePolicy", "ReferenceSource", "RegularFiles",
    "Request", "Restorer", "Retention", "RuledView", "RulesCheck", "Run", "RunFeature",
    "SAVE_PHASES", "STORED_TYPES", "SaveCall", "SaveCallbacks", "SaveEncoder", "SaveFeature",
    "SaveQueue", "SaveRequest", "SaveTask", "SavedArrays", "SavedOnly", "Scheme", "ScratchMemory",
    "Sections", "Selection", "SerialExecutor", "Settled", "SeveralCheckpoints", "SharedReads",
    "Skipped", "SlabReads", "Source", "StepFolder", "StorageFuture", "StoredChunk", "StoredType",
    "StoredView", "Taken", "Task", "TensorSource", "Tier", "TierCopying", "Timing", "Unchanged",
    "Unit", "UnitSteps", "Units", "UnreadPolicy", "ValuePlaces", "Version", "View", "WHOLE_BOXES",
    "WriteFilter", "WriteItem", "Writer", "WritingSave", "absolute_path", "adapter_of", "adapters",
    "all_gather_bytes", "apply_rules", "asking_storage", "barrier", "base_name", "blob_key",
    "boxes_to_fill", "bytes_of_chunk", "bytes_on_disk", "changed_repr", "check_boxes", "check_rest",
    "check_same_source", "check_written", "checkpoints_below", "child_names", "children_by_key",
    "chosen_format",
    "chunk_count", "chunk_digest", "chunk_keys", "closing_file", "combined_crc32",
    "common_codec", "compressed_chunk", "consumers_by_chunk", "conversion_budgets", "convertible",
    "copy_files", "counted", "current_group", "cut_box", "decode_per_process", "dict_node",
    "dtype_and_shape", "dtype_from_name", "dtype_kind", "dtype_name", "encode_per_process",
    "encoding_of", "entry_of_box", "entry_of_boxes", "every_door", "expand_leaf", "facts_of",
    "fences_of", "find_door", "find_orphans", "finite_or_text", "first_few", "flat_range_to_boxes",
    "flatten_state", "flatten_tree", "folders_below", "folders_with", "format_named",
    "fragment_count", "fragment_grids", "grid_band_text", "group_of_one", "has_fixed_size",
    "has_known_factory", "hears_events", "html_page", "html_table", "in_batches", "is_array",
    "is_plain", "is_plain_kind", "is_saved_as_leaf", "job_group", "join_names", "keys_of_leaves",
    "launched_index", "launched_together", "layout_text", "leaf_text", "leaves_of_tree",
    "leaves_of_view", "leaving_out", "linear_index", "loaded_together", "local_folders",
    "lost_boxes", "make_writer", "members_of", "meshes_of", "moments_among", "name_component",
    "name_matches", "natural_key", "new_session", "node_name", "numbered_parts", "on_process_0",
    "open_own", "open_reader", "opened_checkpoint", "other_folders", "parsed_types",
    "parts_of_array", "parts_of_boxes", "plain_length", "plain_to_json", "plan_load", "plan_rules",
    "prepare_buffers", "printable", "process_names", "progress_reports", "put_nested", "quoted",
    "raw_chunk",
    "read_arrays", "read_boxes", "read_file_box", "read_full_chunk", "read_into", "reading",
    "reading_again", "reading_checkpoint", "reading_failed", "rebuild_tree", "refuse_checkpoint",
    "refuse_unknown", "register_codec", "register_format", "register_scheme", "register_writer",
    "remove_checkpoint", "replace_in_place", "replaced_in", "reporting", "resolve_path",
    "restore_replaced", "room_text", "row_major", "rule_exprs_of", "ruled_elements",
    "save_in_background", "send_event", "settle_future", "shape_text", "shortened", "shown_text",
    "size_text", "step_before", "step_metrics", "storage_context", "stored_chunk_bytes",
    "stored_leaf", "stored_leaves", "stored_unit_steps", "storing_hint", "strided_view",
    "structure_of", "sync_folder", "system_calls", "take_retention", "terminal_options",
    "terminal_output", "terminal_tables", "text_file", "tree_from_json", "tree_from_names",
    "tree_to_json", "tree_with_values", "tree_without", "unickpt_version", "unregister_codec",
    "unregister_format", "unregister_writer", "unwrapped", "version_at", "within", "write_streamed",
    "writing", "writing_failed", "written_in_data_file", "zarr_dtype",
]  # fmt: skip

# Imported on first use. What `import unickpt` needs anyway is imported above.
_LATER = {
    "adapters.torch_optimizer": "NamedOptimizer",
    "arrays.saved_arrays": "MeshFacts, MeshKey, SavedArrays",
    "commit": "progress_reports",
    "commit.lease": "Lease, Use as LeaseUse",
    "commit.messages": "Notes, replaced_in",
    "commit.root": "refuse_checkpoint",
    "display.fragment_grid": (
        "FragmentGrid, GridBand, grids as fragment_grids, head as grid_band_text"
    ),
    "display.html": (
        "MOST_FRAGMENTS as MOST_FRAGMENTS_SHOWN, page as html_page, plain as shown_text, "
        "shape_text, table as html_table"
    ),
    "display.tree_table": "fragment_count, layout_text, meshes_of",
    "format.step_metrics": "finite_or_text, step_metrics",
    "format.writer_registry": (
        "OWN as OWN_FORMAT, chosen as chosen_format, make_writer, register_writer, "
        "unregister_writer"
    ),
    "arrays.index_map": "Dim, linear_index",
    "frameworks.members": "Members",
    "frameworks.memory_limits": "node_name",
    "frameworks.process_group": "launched_index, launched_together",
    "frameworks.adapter_protocol": "ArrayTarget",
    "reading.array_reader": (
        "Filled, Job, LoadCounts, ReadArrays, prepare as prepare_buffers, read_arrays, "
        "slots_of as boxes_to_fill"
    ),
    "reading.chunk_reader": "ChunkReader, Task",
    "reading.read_plan": "ChunkRead, Consumer, by_chunk as consumers_by_chunk",
    "reading.recipes": "ElementSource, Unchanged",
    "reading.shared_reads": "SharedReads",
    "rules.in_memory": "apply as apply_rules, elements as ruled_elements, facts_of, stored_leaves",
    "rules.observed": "DraftReport, ObservedReport, RulesCheck",
    "rules.plan": "Fact as LeafFact, LeafKind, Made as MadeLeaf",
    "rules.planner": "make_plan as plan_rules",
    "rules.provenance": "Provenance",
    "rules.rule": "exprs_of as rule_exprs_of",
    "rules.view": "RuledView",
    "runs.arguments": "fences_of, take_retention",
    "runs.attempt_folders": "FOLDER as ATTEMPTS_FOLDER, remove_checkpoint",
    "runs.save_leftovers": "LOCK as ORPHANS_LOCK, Orphan, OrphanSearch, find as find_orphans",
    "runs.requested_removal": "barrier, on_process_0",
    "runs.retention": "Retention",
    "runs.step_folder": "StepFolder, bytes_on_disk, step_before",
    "runs.tier_copies": "IN_ROOT, Copying as TierCopying, Tier",
    "storage": "local_folders",
    "storage.export_leftovers": "restore as restore_replaced",
    "storage.restorers": "Restorer",
    "tools.conversion": (
        "budgets as conversion_budgets, check_same_source, check_written, convertible, "
        "leaves_of as leaves_of_view, write_streamed"
    ),
    "tools.copying": "copy_files",
    "tools.difference": "ComparedViews",
    "tools.partial_copies": "PartialCopy, leaving_out, lost_boxes, replace_in_place",
    "tools.terminal": (
        "command_options as terminal_options, output as terminal_output, tables as terminal_tables"
    ),
    "tools.slab_reads": "Buffered, Slabs as SlabReads, check_rest, read_boxes",
    "trees.stored_types": "PYTHON_TYPES, STORED_TYPES, StoredType, has_known_factory, parsed_types",
}

if not _typing.TYPE_CHECKING:  # by this name mypy knows it; else it would take any name
    __getattr__ = _late_names(__name__, _LATER)
