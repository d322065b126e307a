"""The front of the project: the README's figures and pictures, and what GitHub runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import TESTS

ROOT = Path(TESTS).parent
README = (ROOT / "README.md").read_text()
BENCHMARKS = "".join(
    (ROOT / name).read_text() for name in ("docs/benchmarks.md", "benchmarks/RESULTS.md")
)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# Who may change something, or sign for the project, and to do what.
MAY = {"docs.yml": {"pages", "id-token"}, "publish.yml": {"id-token"}, "tests.yml": set()}


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    (section,) = re.findall(r"^## What it beats.*?(?=^## )", README, re.M | re.S)
    figures = re.findall(r"\d+\.\d+", section)
    assert len(figures) > 10
    assert [each for each in figures if not re.search(rf"\b{re.escape(each)}\b", BENCHMARKS)] == []
    commands = re.findall(r"`(python benchmarks/[^`]+)`", section)
    assert len(commands) > 1
    for command in commands:
        script, _, options = command.partition(".py")
        assert f"{script}.py" in BENCHMARKS, command
        assert options.strip() in BENCHMARKS, command


def test_the_pictures_of_the_readme_exist() -> None:
    found = re.findall(r"<img src=\"([^\"]+)\"", README)
    found += re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert len(found) > 2
    assert [name for name in found if not (ROOT / name).is_file()] == []


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
