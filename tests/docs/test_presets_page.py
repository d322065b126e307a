"""docs/presets.md says what the presets do."""

from __future__ import annotations

import re

import pytest
from support import preset_cases
from support.list_presets import list_presets

from unickpt import Rules
from unickpt.rules.rule_files import preset_text

FAMILIES = [name for name in Rules.presets() if name.startswith((*list_presets.GROUPS,))]


def test_the_tables_are_those_of_the_presets() -> None:
    page = list_presets.PAGE.read_text()
    tables = page.partition(list_presets.BEGIN)[2].partition(list_presets.END)[0]
    assert tables == list_presets.tables(), "run python docs/list_presets.py"
    assert all(f"`{name}`" in tables for name in Rules.presets())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_against_what_it_is_checked(name: str) -> None:
    maps, tags = list_presets.comments(name)
    assert maps.endswith("to be included") != ("Checked" in tags)
    assert len([line for line in preset_text(name).splitlines() if line]) <= 40
    source = re.match(
        r"(MaxText |LitGPT |torchtitan |transformers 5)[\d.]+", tags.get("Checked", "")
    )
    checked = {case.source for case in preset_cases.all_cases() if case.preset == name}
    assert checked == ({source[0]} if source else set())
