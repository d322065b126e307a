"""What the functions of `unickpt` return and take beside options: results, arrays and layouts."""

from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout, Mesh
from unickpt.frameworks.leaves import LocalFragments, PerProcessValues
from unickpt.frameworks.process_group import Group
from unickpt.loading.report import LoadReport
from unickpt.options import SaveReport
from unickpt.reading.stored_array import StoredArray
from unickpt.saving.background import PendingSave
from unickpt.tools.copying import CopyReport
from unickpt.tools.difference import ArrayDifference, DiffReport
from unickpt.tools.merging import MergeReport
from unickpt.tools.verification import Damage, VerifyReport

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
