"""Links between pages hold on GitHub as well; those of the site are checked by `make docs`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from support import pages
from support.pages import ROOT

LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")
PAGES = [*pages.pages(), "CONTRIBUTING.md", "CHANGELOG.md"]


@cache
def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_link_names_exists(page: str) -> None:
    for target, anchor in LINK.findall(prose(ROOT / page)):
        file = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert file.is_file(), f"{page}: {target}"
        assert not anchor or anchor in anchors(file), f"{page}: {target}#{anchor}"
