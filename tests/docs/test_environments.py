"""tests/environments.toml: what it names exists, and what skips in .venv runs in one of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import environments
import pytest
from environments import Environment
from support import TESTS

ROOT = Path(TESTS).parent
ALL = environments.environments()


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("environment", ALL.values(), ids=lambda each: each.name)
def test_what_an_environment_names_exists(environment: Environment) -> None:
    assert environment.install
    assert bool(environment.tests) != environment.fast
    for pattern in environment.tests:
        name, _, test = pattern.partition("::")
        assert (ROOT / name).is_file(), pattern
        function = test.partition("[")[0]
        known = {each.name for each in functions(ast.parse((ROOT / name).read_text()))}
        assert "*" in function or not function or function in known, pattern


@pytest.mark.parametrize("environment", ALL.values(), ids=lambda each: each.name)
def test_files_of_an_environment_have_unique_names(environment: Environment) -> None:
    """Else pytest takes none of them, without packages."""
    names = [Path(file).name for file in environment.files]
    assert len(names) == len(set(names))


def test_a_pattern_stands_for_its_test_and_its_parameters() -> None:
    chosen = Environment("x", (), ("tests/a.py::test_b", "tests/c.py", "tests/d.py::*[s3]"))
    assert chosen.files == ("tests/a.py", "tests/c.py", "tests/d.py")
    for test in ("a.py::test_b", "a.py::test_b[1-2]", "c.py::Test::test_x", "d.py::test_e[s3]"):
        assert chosen.selects(f"tests/{test}"), test
    for test in ("a.py::test_bc", "a.py::test_a", "d.py::test_e[abfs]", "c.pyx::test_x"):
        assert not chosen.selects(f"tests/{test}"), test


def needs(file: Path) -> Iterator[tuple[str, str]]:
    """The modules without which a file's tests skip, each with the function that asks for it."""
    tree = ast.parse(file.read_text())
    holder = {id(node): each.name for each in functions(tree) for node in ast.walk(each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("importorskip", "find_spec"):
                yield str(node.args[0].value), holder.get(id(node), "")


def is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


@pytest.mark.integration  # of what .venv has
def test_what_skips_here_runs_in_an_environment() -> None:
    """Tests that never run are no tests."""
    nowhere = []
    patterns = [pattern for each in ALL.values() for pattern in each.tests]
    for file in sorted(Path(TESTS).rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        for module, function in needs(file):
            if is_here(module):
                continue
            whole = name in patterns
            one = any(re.match(rf"{re.escape(f'{name}::{function}')}\b", p) for p in patterns)
            fixture = not function.startswith("test_") and any(p.startswith(name) for p in patterns)
            if not (whole or (function and one) or (function and fixture)):
                nowhere.append(f"{name}::{function} needs {module}")
    assert nowhere == [], "add them to tests/environments.toml"


def test_the_oldest_versions_are_those_of_pyproject() -> None:
    found = environments.oldest_requirements()
    assert {"numpy==1.26", "jax==0.6", "torch==2.6"} <= {*found}
    assert {each.partition("==")[0] for each in found}.isdisjoint({"pytest", "mypy", "matplotlib"})


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(environments.CannotSetUp, match=r"needs Python 3\.77.*pyenv install 3\.77"):
        environments.find_python("3.77")


SKIPPING = """
import pytest
def test_a(): pass
def test_b(): pytest.skip("without a server")
@pytest.mark.xfail
def test_c(): raise AssertionError
"""


@pytest.mark.integration
def test_a_skip_fails_in_the_environment_that_is_for_the_test(tmp_path: Path) -> None:
    """With the hooks of conftest.py, of which a copy is told of an environment of this test."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "support").symlink_to(Path(TESTS) / "support")
    for name in ("conftest.py", "durations.py", "environments.py"):
        (tests / name).write_text((Path(TESTS) / name).read_text())
    (tests / "environments.toml").write_text(
        '[one]\ninstall = ["x"]\ntests = ["tests/test_x.py", "tests/test_y.py::test_a"]\n'
    )
    (tests / "test_x.py").write_text(SKIPPING)
    (tests / "test_y.py").write_text(SKIPPING)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())

    def pytest_with(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
        done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
        return done.stdout + done.stderr

    inside = pytest_with("--environment", "one")
    assert "2 passed, 2 deselected, 1 xfailed" in inside.replace("1 failed, ", "")
    assert "1 failed" in inside
    assert "skipped in the environment that is for it: Skipped: without a server" in inside
    assert "1 skipped, 1 deselected, 1 xfailed" in pytest_with("-m", "not environment")
    (tests / "test_x.py").write_text("import pytest\npytest.importorskip('nothing_of_the_kind')\n")
    assert "skipped in the environment that is for it" in pytest_with("--environment", "one")
