"""Any checkpoint, any framework, any mesh: sharded arrays in one format, bit for bit.

    save, save_async      a tree of arrays and values into one checkpoint, from all processes
    load, open            all of it, or a part, onto any mesh; lazily
    Checkpointer          the steps of a run: when to save, what to keep (Retention, SaveEvery)
    Rules                 names and axes of two sides, in both directions
    convert, copy, merge  whole checkpoints, also for other systems
    verify, diff, report  check, compare, see; find_nonfinite: NaN and infinity
    repair                damaged files, from parity
    PerProcess, ProcessGroup, SaveOptions, LoadOptions, Experts, Restores, Function, Opaque

Errors are in `unickpt.errors`, results and layouts in `unickpt.types`, trainers in
`unickpt.integrations`, data loaders in `unickpt.data`, and the interfaces for other formats and
storages in `unickpt.extend`.
`unickpt --help` lists the commands; docs/README.md is the start of the documentation.
"""

import logging as _logging
from typing import TYPE_CHECKING as _CHECKING

from unickpt._version import __version__
from unickpt.doors import late_names as _late_names
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    LoadMismatch,
    MissingPackage,
    SaveConflict,
    StorageError,
    UnickptError,
    UnsupportedLeaf,
)
from unickpt.frameworks.leaves import PerProcess
from unickpt.frameworks.process_group import ProcessGroup
from unickpt.loading.loader import load
from unickpt.options import SaveOptions
from unickpt.reading.checkpoint import Checkpoint, open
from unickpt.reading.load_options import LoadOptions
from unickpt.saving.saver import save, save_async
from unickpt.trees.tree import Opaque

if _CHECKING:
    from unickpt.plugins.experts import Experts
    from unickpt.plugins.merge import merge
    from unickpt.plugins.merge import method_parameters as merge_methods
    from unickpt.plugins.nonfinite import find_nonfinite
    from unickpt.plugins.parity.repairing import repair
    from unickpt.plugins.quantize import Restores
    from unickpt.plugins.report.html_report import report
    from unickpt.reading.verification import verify
    from unickpt.rules.functions import Function
    from unickpt.rules.rule_set import Rules
    from unickpt.runs.checkpointer import Checkpointer
    from unickpt.runs.retention import Retention
    from unickpt.runs.save_triggers import SaveEvery
    from unickpt.tools.conversion import convert
    from unickpt.tools.copying import copy
    from unickpt.tools.difference import diff

__all__ = [
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointExists",
    "CheckpointNotFound",
    "Checkpointer",
    "Experts",
    "Function",
    "LoadMismatch",
    "LoadOptions",
    "MissingPackage",
    "Opaque",
    "PerProcess",
    "ProcessGroup",
    "Restores",
    "Retention",
    "Rules",
    "SaveConflict",
    "SaveEvery",
    "SaveOptions",
    "StorageError",
    "UnickptError",
    "UnsupportedLeaf",
    "__version__",
    "convert",
    "copy",
    "diff",
    "find_nonfinite",
    "load",
    "merge",
    "merge_methods",
    "open",
    "repair",
    "report",
    "save",
    "save_async",
    "verify",
]

# Imported on first use: many programs do not need them. What `save`, `save_async` and `load` need
# is imported above, so that their first call is as fast as the next.
_LATER = {
    "": "errors, extend, integrations, types",
    "reading.verification": "verify",
    "rules.functions": "Function",
    "rules.rule_set": "Rules",
    "runs.checkpointer": "Checkpointer",
    "runs.retention": "Retention",
    "runs.save_triggers": "SaveEvery",
    "tools.conversion": "convert",
    "tools.copying": "copy",
    "tools.difference": "diff",
}

# Names of plug-ins, whose doors are in the group `names`.
_OF_PLUGINS = (
    "Experts",
    "Restores",
    "find_nonfinite",
    "merge",
    "merge_methods",
    "repair",
    "report",
)


__getattr__ = _late_names(__name__, _LATER, _OF_PLUGINS)


def __dir__() -> list[str]:
    """The public names, without the wings that `docs/architecture.md` describes."""
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *__all__, *_LATER[""].split(", ")})


_logging.getLogger("unickpt").addHandler(_logging.NullHandler())  # silent by default
