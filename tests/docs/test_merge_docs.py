"""The table of docs/merge.md has every method."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from support import TESTS

import unickpt

PAGE = (Path(TESTS).parent / "docs" / "merge.md").read_text()


def test_the_table_has_every_method_with_its_parameters() -> None:
    for kind in (*unickpt.merge_methods.METHODS, unickpt.merge_methods.Search):
        assert f"{kind.__name__}(" in PAGE
        for name in (field.name for field in dataclasses.fields(kind)):
            assert re.search(rf"{kind.__name__}\([^)]*\b{name}\b", PAGE), (kind, name)
