"""Any checkpoint, any framework, any mesh: sharded arrays in one format, bit for bit."""

from unickpt._version import __version__
from unickpt.box import Box
from unickpt.checkpoint import Checkpoint, StoredArray, open
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    CoverageError,
    InvalidPath,
    LoadMismatch,
    ProcessFailed,
    SaveConflict,
    SaveTimeout,
    StorageError,
    UnickptError,
    UnsupportedFormat,
    UnsupportedLeaf,
)
from unickpt.group import Group, ProcessGroup
from unickpt.layout import Layout, Mesh
from unickpt.load import load
from unickpt.marks import LocalFragments, PerProcess, PerProcessValues
from unickpt.options import Damage, LoadOptions, SaveOptions, SaveReport, VerifyReport
from unickpt.save import save
from unickpt.verify import verify

__all__ = [
    "Box",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointExists",
    "CheckpointNotFound",
    "CoverageError",
    "Damage",
    "Group",
    "InvalidPath",
    "Layout",
    "LoadMismatch",
    "LoadOptions",
    "LocalFragments",
    "Mesh",
    "PerProcess",
    "PerProcessValues",
    "ProcessFailed",
    "ProcessGroup",
    "SaveConflict",
    "SaveOptions",
    "SaveReport",
    "SaveTimeout",
    "StorageError",
    "StoredArray",
    "UnickptError",
    "UnsupportedFormat",
    "UnsupportedLeaf",
    "VerifyReport",
    "__version__",
    "load",
    "open",
    "save",
    "verify",
]
