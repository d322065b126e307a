"""What the functions of `unickpt` return and take beside options: results, arrays and layouts."""

import importlib as _importlib
import typing as _typing
from typing import TYPE_CHECKING as _CHECKING
from typing import Any as _Any

from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout, Mesh
from unickpt.frameworks.leaves import LocalFragments, PerProcessValues
from unickpt.frameworks.process_group import Group
from unickpt.loading.report import LoadReport
from unickpt.reading.stored_array import StoredArray
from unickpt.save_report import SaveReport
from unickpt.saving.background import PendingSave

if _CHECKING:
    from unickpt.reading.verification import Damage, VerifyReport
    from unickpt.tools.copying import CopyReport
    from unickpt.tools.difference import ArrayDifference, DiffReport
    from unickpt.tools.reports import MergeReport

__all__ = [
    "ArrayDifference",
    "Box",
    "CopyReport",
    "Damage",
    "DiffReport",
    "Group",
    "Layout",
    "LoadReport",
    "LocalFragments",
    "MergeReport",
    "Mesh",
    "PendingSave",
    "PerProcessValues",
    "SaveReport",
    "StoredArray",
    "VerifyReport",
]

# Imported when they are first used, as what makes them.
_LATER = {
    "ArrayDifference": "tools.difference",
    "CopyReport": "tools.copying",
    "Damage": "reading.verification",
    "DiffReport": "tools.difference",
    "MergeReport": "tools.reports",
    "VerifyReport": "reading.verification",
}

if not _typing.TYPE_CHECKING:  # by this name mypy knows it; else it would take any name

    def __getattr__(name: str) -> _Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(_importlib.import_module(f"unickpt.{_LATER[name]}"), name)
        globals()[name] = found
        return found
