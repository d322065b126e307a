"""Any checkpoint, any framework, any mesh: sharded arrays in one format, bit for bit."""

import logging as _logging

from unickpt._version import __version__
from unickpt.asynchronous import save_async
from unickpt.box import Box
from unickpt.checkpoint import Checkpoint, StoredArray, open
from unickpt.checkpointer import Checkpointer
from unickpt.convert import convert
from unickpt.diff import ArrayDifference, DiffReport, diff
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointReplaced,
    CoverageError,
    ForkedProcess,
    InvalidPath,
    LaterStepsExist,
    LoadMismatch,
    ProcessFailed,
    ReplicasDiffer,
    RuleError,
    RuleSyntaxError,
    RuleWarning,
    SaveConflict,
    SaveTimeout,
    StateChanged,
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
from unickpt.pending import PendingSave
from unickpt.report import LoadReport
from unickpt.rules import Function, Rules
from unickpt.save import save
from unickpt.verify import verify

__all__ = [
    "ArrayDifference",
    "Box",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointExists",
    "CheckpointNotFound",
    "CheckpointReplaced",
    "Checkpointer",
    "CoverageError",
    "Damage",
    "DiffReport",
    "ForkedProcess",
    "Function",
    "Group",
    "InvalidPath",
    "LaterStepsExist",
    "Layout",
    "LoadMismatch",
    "LoadOptions",
    "LoadReport",
    "LocalFragments",
    "Mesh",
    "PendingSave",
    "PerProcess",
    "PerProcessValues",
    "ProcessFailed",
    "ProcessGroup",
    "ReplicasDiffer",
    "RuleError",
    "RuleSyntaxError",
    "RuleWarning",
    "Rules",
    "SaveConflict",
    "SaveOptions",
    "SaveReport",
    "SaveTimeout",
    "StateChanged",
    "StorageError",
    "StoredArray",
    "UnickptError",
    "UnsupportedFormat",
    "UnsupportedLeaf",
    "VerifyReport",
    "__version__",
    "convert",
    "diff",
    "load",
    "open",
    "save",
    "save_async",
    "verify",
]

_logging.getLogger("unickpt").addHandler(_logging.NullHandler())  # silent by default
