"""The map, docs/architecture.md: names everything that exists, and nothing else."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support import TESTS

ROOT = Path(TESTS).parent
MAP = (ROOT / "docs" / "architecture.md").read_text()
MOST_LINES_OF_A_FUNCTION = 58
MOST_METHODS_OF_A_CLASS = 20
WINGS = sorted(
    str(Path(folder).relative_to(ROOT))
    for top in ("unickpt", "adapters", "backends", "integrations", "plugins")
    for folder, _, files in os.walk(ROOT / top)  # which follows no links
    if any(file.endswith(".py") for file in files)
)
FILES = [path for wing in WINGS for path in sorted((ROOT / wing).glob("*.py"))]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_the_list_of_modules_says_what_each_is_for() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "list_modules.py"], capture_output=True, check=True
    ).stdout.decode()
    listed = re.findall(r"^- `(\w+)`: (.+)$", made, re.MULTILINE)
    assert len(listed) == len([path for path in FILES if path.stem != "__init__"])
    assert sorted(re.findall(r"^## (.*)$", made, re.MULTILINE)) == WINGS


def test_every_file_and_folder_that_the_map_names_exists() -> None:
    paths = set(re.findall(r"`([a-z][\w./]*/[\w./]*)`", MAP))
    assert len(paths) > 50, "the map names its modules by their paths"
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
    body = parsed(path).body
    found = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for kind in (node for node in body if isinstance(node, ast.ClassDef)):
        methods = (node for node in kind.body if isinstance(node, ast.FunctionDef))
        found |= {f"{kind.name}.{method.name}" for method in methods}
    return found


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/reliability.md"])
def test_every_file_of_ours_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    tops = "adapters|backends|benchmarks|docs|examples|integrations|plugins|tests|unickpt"
    paths = re.findall(rf"(?<![\w/.])(?:{tops})/[\w/]+\.(?:py|md|json)\b", text)
    folders = ROOT, (ROOT / page).parent  # a link to another page is relative
    assert [path for path in set(paths) if not any((at / path).exists() for at in folders)] == []


IN_A_CHECKPOINT = ("processes/", "records/", "notes/", "layers/")


def test_no_function_is_longer_than_58_lines() -> None:
    """Of a function its body counts: the arguments of a command and a docstring can be a page."""
    long = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{name}: {node.name}")
    assert long == []


def test_no_class_of_the_core_has_more_than_20_methods() -> None:
    """Each name counts once, of a property, too, and of overloads. State that some of them share,
    and what none of them needs, is a class, or are functions, of their own."""
    core = [path for path in FILES if path.relative_to(ROOT).parts[0] == "unickpt"]
    larger = {}
    for path in core:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                names = {n.name for n in node.body if isinstance(n, FUNCTIONS)}
                if len(names) > MOST_METHODS_OF_A_CLASS:
                    larger[node.name] = len(names)
    assert larger == {}


FEATURE_WORDS = {
    *("expert", "experts", "quantize", "quantized", "patch", "patches", "spill"),
    *("orbax", "deepspeed"),
}
CORE_OF_SAVES = {"saving", "commit", "references", "runs"}


def test_saves_and_runs_know_no_feature_by_name() -> None:
    """But for `Checkpointer(experts=)`, which users type."""
    named = set()
    for path in FILES:
        if path.relative_to(ROOT).parts[:2] not in {("unickpt", room) for room in CORE_OF_SAVES}:
            continue
        for name in identifiers(parsed(path)):
            parts = re.split(r"_|\.|(?<=[a-z])(?=[A-Z])", name)
            if FEATURE_WORDS & {part.lower() for part in parts}:
                named.add((path.name, name))
    assert named == {("checkpointer.py", "experts")}


def identifiers(tree: ast.AST) -> set[str]:
    """All names in a module, but for what is in texts."""
    found = set[str]()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.add(value)
    return found


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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
