"""The diagrams are what docs/draw_diagrams.py draws now, and the folder is that of a real save."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from support import TESTS
from support.saving import in_job

import unickpt
from unickpt import ProcessGroup, SaveOptions
from unickpt.commit.root import Root
from unickpt.types import Box, LocalFragments, SaveReport

sys.path.insert(0, str(Path(TESTS).parent / "docs"))

from draw_diagrams import (  # of docs
    CHECKPOINT,
    COMMIT,
    PASSING,
    PICTURES,
    PLOTS,
    STAYS,
    Picture,
    Rect,
    Style,
)

DOCS = Path(TESTS).parent / "docs"
MOST_BYTES = 60 << 10
PAGES = {"overview": "README.md", "save_and_load": "architecture.md"}


@pytest.mark.parametrize("name", PICTURES)
def test_a_committed_diagram_is_what_the_script_draws(name: str) -> None:
    drawn = PICTURES[name]()
    assert (PLOTS / f"{name}.svg").read_text() == drawn, "run: python docs/draw_diagrams.py"
    assert len(drawn.encode()) < MOST_BYTES
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_shows_each_diagram_and_says_what_it_shows(name: str) -> None:
    page = (DOCS / PAGES.get(name, "format.md")).read_text()
    (alt,) = re.findall(rf"^!\[([^\]]*)\]\(plots/{name}\.svg\)$", page, re.M)
    assert len(alt.split()) > 15


def test_a_text_that_leaves_its_box_is_an_error() -> None:
    picture = Picture(200, 100, "a test")
    with pytest.raises(ValueError, match="leaves its box"):
        picture.box(Rect(20, 20, 40, 20), STAYS, ["a long text"])
    with pytest.raises(ValueError, match="leaves its box"):
        picture.text(150, 50, "beyond the card")


def test_a_text_on_another_text_is_an_error() -> None:
    picture = Picture(200, 100, "a test")
    picture.text(20, 50, "first")
    with pytest.raises(ValueError, match="'second' touches 'first'"):
        picture.text(30, 54, "second")


# --- the folder of a checkpoint -------------------------------------------------------------------


def test_the_page_of_the_format_has_every_name_in_the_folder() -> None:
    page = (DOCS / "format.md").read_text()
    paths = re.findall(r"`([^`\n]+)`", page)

    def is_named(name: str) -> bool:
        if name == "earlier attempts":  # the only one in words
            return name in page
        expression = rf"(?:.*/)?{re.escape(name.rstrip('/'))}(?:/.*)?"
        return any(re.fullmatch(expression, path) for path in paths)

    names = [name for entry in CHECKPOINT for name in entry.names]
    assert len(names) > 20
    assert [name for name in names if not is_named(name)] == []


def patterns() -> dict[str, Style]:
    """A regular expression for the files of each entry without others below it, and its style."""
    folders: list[str] = []
    drawn = {}
    for entry, following in zip(CHECKPOINT, [*CHECKPOINT[1:], CHECKPOINT[-1]], strict=True):
        del folders[entry.depth :]
        if following.depth > entry.depth:
            folders.append(entry.names[0])
            continue
        for name in entry.names:
            path = re.escape("".join([*folders, name])) + (".+" if name.endswith("/") else "")
            for placeholder, expression in PLACEHOLDERS.items():
                path = path.replace(placeholder, expression)
            drawn[path] = entry.style
    return drawn


PLACEHOLDERS = {"<p>": r"\d{5,}", "<n>": r"\d+", "<attempt>": "[^/]+", "<name>": "[0-9a-f]{32}"}


def entries_of(files: set[str]) -> dict[str, Style]:
    """The entries of the diagram that have these files, with their styles."""
    drawn, matches = patterns(), {}
    for file in sorted(files):
        (pattern,) = [pattern for pattern in drawn if re.fullmatch(pattern, file)]
        matches[pattern] = drawn[pattern]
    return matches


def test_the_folder_has_what_two_processes_write_and_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> set[str]:
        paths = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {str(path.relative_to(tmp_path)) for path in paths}

    written: set[str] = set()
    real = Root.replace

    def replace(root: Root, *arguments: Any) -> bool:
        written.update(files())
        return real(root, *arguments)

    monkeypatch.setattr(Root, "replace", replace)

    def save(group: ProcessGroup) -> SaveReport:
        box = Box((4096 * group.index,), (4096 * (group.index + 1),))
        tree = {"w": LocalFragments((8192,), [(box, np.ones(4096))])}
        options = SaveOptions(group=group, fsync=False)
        return unickpt.save(tmp_path / "step_100", tree, options=options)

    reports = in_job(2, save)
    assert [type(report) for report in reports] == [SaveReport] * 2, reports
    before, after = entries_of(written), entries_of(files())
    assert [pattern for pattern, style in before.items() if style is PASSING] != []
    lasting = {pattern: style for pattern, style in patterns().items() if style in (STAYS, COMMIT)}
    assert after == lasting
