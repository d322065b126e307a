"""Types that functions of `unickpt` return, or take besides options: results, arrays, layouts."""

import typing as _typing
from typing import TYPE_CHECKING as _CHECKING

from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout, Mesh
from unickpt.doors import late_names as _late_names
from unickpt.frameworks.leaves import LocalFragments, PerProcessValues
from unickpt.frameworks.process_group import Group
from unickpt.loading.report import LoadReport
from unickpt.reading.stored_array import StoredArray
from unickpt.run_event import RunEvent
from unickpt.save_report import SaveReport
from unickpt.saving.background import PendingSave

if _CHECKING:
    from unickpt.loading.load_figures import LoadFigures
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
    "LoadFigures",
    "LoadReport",
    "LocalFragments",
    "MergeReport",
    "Mesh",
    "PendingSave",
    "PerProcessValues",
    "RunEvent",
    "SaveReport",
    "StoredArray",
    "VerifyReport",
]

# Imported on first use, as are the functions that return them.
_LATER = {
    "loading.load_figures": "LoadFigures",
    "reading.verification": "Damage, VerifyReport",
    "tools.copying": "CopyReport",
    "tools.difference": "ArrayDifference, DiffReport",
    "tools.reports": "MergeReport",
}

if not _typing.TYPE_CHECKING:  # by this name mypy knows it; else it would take any name
    __getattr__ = _late_names(__name__, _LATER)
