"""Any checkpoint, any framework, any mesh: sharded arrays in one format, bit for bit."""

import importlib as _importlib
import logging as _logging
from typing import TYPE_CHECKING as _CHECKING
from typing import Any as _Any

from unickpt._version import __version__
from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout, Mesh
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointReplaced,
    CoverageError,
    ForkedProcess,
    HintError,
    InvalidPath,
    LaterStepsExist,
    LoadMismatch,
    MergeError,
    MissingPackage,
    OutOfMemory,
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
from unickpt.frameworks.leaves import LocalFragments, PerProcess, PerProcessValues
from unickpt.frameworks.process_group import Group, ProcessGroup
from unickpt.loading.loader import load
from unickpt.loading.report import LoadReport
from unickpt.reading.checkpoint import Checkpoint, open
from unickpt.reading.options import LoadOptions
from unickpt.reading.stored_array import StoredArray
from unickpt.saving.background import PendingSave
from unickpt.saving.options import SaveOptions, SaveReport
from unickpt.saving.saver import save, save_async
from unickpt.trees.tree import Opaque

if _CHECKING:
    from unickpt.reporting.html_report import report
    from unickpt.rules.functions import Function
    from unickpt.rules.rule_set import Rules
    from unickpt.runs.checkpointer import Checkpointer
    from unickpt.runs.partial_saves import Experts
    from unickpt.runs.retention import Retention
    from unickpt.runs.save_triggers import SaveEvery
    from unickpt.tools import merge_methods
    from unickpt.tools.conversion import convert
    from unickpt.tools.copying import CopyReport, copy
    from unickpt.tools.difference import ArrayDifference, DiffReport, diff
    from unickpt.tools.merging import MergeReport, merge
    from unickpt.tools.verification import Damage, VerifyReport, verify

__all__ = [
    "ArrayDifference",
    "Box",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointExists",
    "CheckpointNotFound",
    "CheckpointReplaced",
    "Checkpointer",
    "CopyReport",
    "CoverageError",
    "Damage",
    "DiffReport",
    "Experts",
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
    "MergeError",
    "MergeReport",
    "Mesh",
    "MissingPackage",
    "Opaque",
    "OutOfMemory",
    "PendingSave",
    "PerProcess",
    "PerProcessValues",
    "ProcessFailed",
    "ProcessGroup",
    "ReplicasDiffer",
    "Retention",
    "RuleError",
    "RuleSyntaxError",
    "RuleWarning",
    "Rules",
    "SaveConflict",
    "SaveEvery",
    "SaveOptions",
    "SaveReport",
    "SaveTimeout",
    "StateChanged",
    "StorageError",
    "StoredArray",
    "UnickptError",
    "UnsupportedFormat",
    "UnsupportedLeaf",
    "HintError",
    "VerifyReport",
    "__version__",
    "convert",
    "copy",
    "diff",
    "load",
    "merge",
    "merge_methods",
    "open",
    "report",
    "save",
    "save_async",
    "verify",
]

# Imported when they are first used: many programs do without. What `save`, `save_async` and `load`
# need is imported above, so that their first call is as fast as the next.
_LATER = {
    "ArrayDifference": "tools.difference",
    "Checkpointer": "runs.checkpointer",
    "CopyReport": "tools.copying",
    "Damage": "tools.verification",
    "DiffReport": "tools.difference",
    "Experts": "runs.partial_saves",
    "Function": "rules.functions",
    "MergeReport": "tools.merging",
    "Retention": "runs.retention",
    "Rules": "rules.rule_set",
    "SaveEvery": "runs.save_triggers",
    "VerifyReport": "tools.verification",
    "convert": "tools.conversion",
    "copy": "tools.copying",
    "diff": "tools.difference",
    "merge": "tools.merging",
    "merge_methods": "tools.merge_methods",
    "report": "reporting.html_report",
    "verify": "tools.verification",
}


def __getattr__(name: str) -> _Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: _Any = _importlib.import_module(f"unickpt.{module}")
    globals()[name] = found if module.endswith(f".{name}") else getattr(found, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


_logging.getLogger("unickpt").addHandler(_logging.NullHandler())  # silent by default
