"""The front of the project: the README, the figures at a glance, and what GitHub runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import TESTS

ROOT = Path(TESTS).parent
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# Who may change something, or sign for the project, and to do what.
MAY = {"docs.yml": {"pages", "id-token"}, "publish.yml": {"id-token"}, "tests.yml": set()}


def test_the_readme_has_at_most_400_words() -> None:
    assert len(README.split()) <= 400


def test_the_figures_at_a_glance_are_those_of_the_sections_below() -> None:
    (section,) = re.findall(r"^## At a glance.*?(?=^## )", BENCHMARKS, re.M | re.S)
    sections = BENCHMARKS.replace(section, "") + RESULTS
    figures = re.findall(r"\d+\.\d+", section)
    assert len(figures) > 10
    assert [n for n in figures if not re.search(rf"\b{re.escape(n)}\b", sections)] == []
    assert "`python benchmarks/" in sections, "the sections have the commands"


def test_the_pictures_of_the_readme_exist() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert pictures
    assert [name for name in pictures if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_do_little_and_runs_what_it_names(workflow: Path) -> None:
    yaml: Any = pytest.importorskip("yaml")  # which mkdocs needs
    text = workflow.read_text()
    told = yaml.safe_load(text)
    assert told["permissions"] == {}, "what a job may do stands in the job"
    may = {
        what
        for job in told["jobs"].values()
        for what, how in job.get("permissions", {}).items()
        if how == "write"
    }
    assert may == MAY[workflow.name]
    for used in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), used
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    targets = re.findall(r"run: make ([a-z-]+)|target: ([a-z-]+)", text)
    assert targets
    assert {one or other for one, other in targets} <= rules
