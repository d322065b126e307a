"""Names in the code say what they name; docstrings name the parameters that there are."""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("unickpt", "adapters", "backends", "integrations", "plugins")
SAY_NOTHING = {
    "found", "of", "at", "known", "asked", "there", "each", "one", "own", "others", "rest", "held",
    "kept", "taken", "told", "wanted", "given", "to", "here", "by", "some",
}  # fmt: skip
MOST_BINDINGS = 58
"""Of such names; lower it when there are fewer."""
MOST_CLASSES = 3
"""Names of classes that several modules define; lower it when there are fewer."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def modules() -> dict[str, list[ast.AST]]:
    """The nodes of each module, by its path."""
    return {
        str(path.relative_to(ROOT)): [*ast.walk(ast.parse(path.read_text()))]
        for top in TOPS
        for folder, _, files in os.walk(ROOT / top)  # which follows no links
        for path in sorted(Path(folder) / file for file in files)
        if path.suffix == ".py"
    }


def bindings(nodes: list[ast.AST]) -> Iterator[str]:
    """The names of arguments, variables and functions."""
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, FUNCTIONS):
            yield node.name


@pytest.mark.integration  # parses all files
def test_ever_fewer_names_say_nothing() -> None:
    counts = {
        path: sum(name in SAY_NOTHING for name in bindings(n)) for path, n in modules().items()
    }
    most = sorted(counts.items(), key=lambda item: -item[1])[:10]
    assert sum(counts.values()) <= MOST_BINDINGS, f"name what they hold; most are in {most}"


def test_ever_fewer_classes_share_a_name() -> None:
    homes = defaultdict(set)
    for path, nodes in modules().items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].add(path)
    shared = {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1}
    assert len(shared) <= MOST_CLASSES, shared


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args
    starred = [arg for arg in (arguments.vararg, arguments.kwarg) if arg is not None]
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred)
    return {argument.arg for argument in every}


def parameters_of_class(kind: ast.ClassDef) -> set[str] | None:
    """The parameters of a class; None if a base class has them."""
    fields = {
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return fields | parameters(node)
    return None if kind.bases else fields


def documented(docstring: str) -> Iterator[str]:
    """The names of the entries below "Arguments:"."""
    section = docstring.partition("Arguments:\n")[2].partition("\n\n")[0]
    for entry in re.finditer(r"^    ((?:\*{0,2}\w+, )*\*{0,2}\w+):", section, re.MULTILINE):
        yield from (name.lstrip("*") for name in entry[1].split(", "))


@pytest.mark.integration  # parses all files
def test_docstrings_describe_parameters_that_there_are() -> None:
    wrong = []
    for path, nodes in modules().items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                names = parameters_of_class(node)
            elif isinstance(node, FUNCTIONS):
                names = parameters(node)
            else:
                continue
            if names is None:
                continue
            entries = documented(ast.get_docstring(node) or "")
            wrong += [f"{path}: {node.name}: {name}" for name in entries if name not in names]
    assert wrong == []
