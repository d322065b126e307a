"""The map, docs/architecture.md: names everything that exists, and nothing else."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
from support import TESTS

ROOT = Path(TESTS).parent
MAP = (ROOT / "docs" / "architecture.md").read_text()
MOST_MODULES = 16

# A section for each wing: its folder as the title, its modules as the first words of the bullets.
SECTIONS = dict(re.findall(r"^### `([a-z0-9/]+)/`\n(.*?)(?=^##)", MAP, re.MULTILINE | re.DOTALL))
WINGS = sorted(
    str(Path(folder).relative_to(ROOT))
    for top in ("unickpt", "adapters", "backends")
    for folder, _, files in os.walk(ROOT / top)  # which follows no links
    if any(file.endswith(".py") for file in files)
)


def modules_of(wing: str) -> set[str]:
    """The modules of a wing, without an `__init__` that holds nothing but its docstring."""
    found = {path.stem for path in (ROOT / wing).glob("*.py")}
    nothing = (ROOT / wing / "__init__.py").read_text().count("\n") == 1
    return found - {"__init__"} if nothing else found


def named_in(section: str) -> set[str]:
    """The modules that the bullets of a section name: `` - `a`, `b`: what. `c`: what. ``"""
    bullets = re.findall(r"^- (.*?)(?=^[-#\n]|\Z)", section, re.MULTILINE | re.DOTALL)
    lists = r"(?:^|\. )((?:`\w+`(?:, )?)+)(?=:|\.?$)"
    found = [names for bullet in bullets for names in re.findall(lists, bullet.strip())]
    return {name for names in found for name in re.findall(r"`(\w+)`", names)}


def test_every_wing_has_a_section_and_every_section_a_wing() -> None:
    assert sorted(SECTIONS) == WINGS


@pytest.mark.parametrize("wing", WINGS)
def test_a_section_names_the_modules_of_its_wing(wing: str) -> None:
    assert sorted(named_in(SECTIONS[wing])) == sorted(modules_of(wing))


def test_every_file_and_folder_that_the_map_names_exists() -> None:
    paths = set(re.findall(r"`([a-z][\w./]*/[\w./]*)`", MAP))
    assert len(paths) > 60, "the map names its modules by their paths"
    missing = [
        path
        for path in sorted(paths)
        if not ((ROOT / path).exists() or (ROOT / "unickpt" / path).exists())
        and not path.startswith(IN_A_CHECKPOINT)
    ]
    assert missing == []


def test_every_function_on_the_way_of_a_save_and_of_a_load_exists() -> None:
    calls = re.findall(r"^([a-z_]+/[a-z_]+\.py) +([\w.]+)$", MAP, re.MULTILINE)
    assert len(calls) > 50
    assert [call for call in calls if call[1] not in functions_of(call[0])] == []


def functions_of(file: str) -> set[str]:
    """The functions of a module, and the methods of its classes."""
    path = ROOT / file if (ROOT / file).exists() else ROOT / "unickpt" / file
    body = ast.parse(path.read_text()).body
    found = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for kind in (node for node in body if isinstance(node, ast.ClassDef)):
        methods = (node for node in kind.body if isinstance(node, ast.FunctionDef))
        found |= {f"{kind.name}.{method.name}" for method in methods}
    return found


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/reliability.md"])
def test_every_file_of_ours_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    tops = "adapters|backends|benchmarks|docs|examples|tests|unickpt"
    paths = re.findall(rf"(?<![\w/.])(?:{tops})/[\w/]+\.(?:py|md|json)\b", text)
    assert [path for path in sorted(set(paths)) if not (ROOT / path).exists()] == []


IN_A_CHECKPOINT = ("processes/", "records/", "notes/", "layers/")


@pytest.mark.parametrize("wing", WINGS)
def test_no_folder_has_more_modules_than_one_can_overlook(wing: str) -> None:
    assert len(modules_of(wing)) <= MOST_MODULES


def test_the_picture_has_every_wing_in_the_order_that_is_checked() -> None:
    layers = re.search(
        r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert layers is not None
    rows = [row[:30] for row in MAP.split("```")[1].splitlines()]  # what they are for stands beside

    def row_of(wing: str) -> int:
        (found,) = [n for n, row in enumerate(rows) if re.search(rf"\b{wing}\b", row)]
        return found

    checked = [re.findall(r"\w+", layer) for layer in re.findall(r'^  "(.*)",$', layers[1], re.M)]
    drawn = [row_of(wing) for layer in checked for wing in layer]
    assert len(drawn) > 15
    assert drawn == sorted(drawn)


def test_a_commit_runs_what_make_lint_runs() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    made = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    hooks = re.findall(r"^ +entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    assert hooks == made
