"""The core alone: a copy without plug-ins, trainers and formats of others is installed and tested.

python tests/core.py              # what `make core` runs: seconds to build, minutes of tests
python tests/core.py tests/trees  # some of the tests

The copy is installed, not editable, into an environment in which the original is not. There the
doors must lead nowhere, a save and a load must make the same calls as in the whole tree, and the
tests of the core must pass.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEMES = ("__init__.py", "file.py", "gs.py", "memory.py", "s3.py")
"""What stays of `backends/`."""
GONE = (
    *("codecs", "commands", "encodings", "features", "formats", "names", "references", "refusals"),
    *("reads", "restorers", "tiers", "values", "writers"),
)
"""The groups of entry points that lose all of theirs."""
TESTS = (
    "arrays",
    "trees",
    "frameworks",
    "storage",
    "format",
    "commit",
    "saving",
    "reading",
    "loading",
    "runs",
    "display",
)

CALLS = """
import collections, json, sys, threading
import numpy as np, unickpt

state, calls = {"w": np.ones((64, 64)), "b": np.ones(3), "step": 1}, collections.Counter()
options = unickpt.SaveOptions(fsync=False)


def count(frame, event, argument):
    module = frame.f_globals.get("__name__", "")
    if event == "call" and module.startswith("unickpt"):
        calls[f"{module}.{frame.f_code.co_qualname}"] += 1


def both(path):
    unickpt.save(path, state, options=options)
    unickpt.load(path, state)


both("memory://calls/warm")
threading.setprofile(count)
sys.setprofile(count)
both("memory://calls/counted")
sys.setprofile(None)
print(json.dumps(calls))
"""

NOTHING_LEFT = f"""
import importlib, importlib.metadata, importlib.util, pkgutil
import unickpt
from unickpt import doors

assert "{ROOT}" not in unickpt.__file__, unickpt.__file__
for package in ("plugins", "integrations"):
    found = importlib.util.find_spec(f"unickpt.{{package}}")
    assert found is None, found
import unickpt.backends
left = sorted(each.name for each in pkgutil.iter_modules(unickpt.backends.__path__))
assert left == ["file", "gs", "memory", "s3"], left
points = importlib.metadata.distribution("unickpt").entry_points
for group in {GONE!r}:
    assert not points.select(group=f"unickpt.{{group}}"), group
    assert not doors.ours(group), group
"""


def call(*command: object, cwd: Path, **settings: str) -> str:
    """Runs a program that must succeed; what it printed."""
    keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**keep, **settings}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))} ended with {done.returncode}")
    return done.stdout


def copy_core(folder: Path) -> None:
    """Copies what git knows, without plug-ins, trainers and formats of others."""
    names = call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, names.split("\0")):
        gone = name.startswith(("plugins/", "integrations/"))
        top, _, rest = name.partition("/")
        if gone or (top == "backends" and rest not in SCHEMES) or not os.path.lexists(ROOT / name):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    for link in ("plugins", "integrations"):
        (folder / "unickpt" / link).unlink()
    project = (folder / "pyproject.toml").read_text()
    for group in GONE:
        section = rf'\[project\.entry-points\."unickpt\.{group}"\]\n(?:.+\n)+'
        project, count = re.subn(section, "", project)
        assert count == 1, group
    (folder / "pyproject.toml").write_text(project)
    call(sys.executable, "tests/list_doors.py", cwd=folder)


def environment(folder: Path, tree: Path) -> Path:
    """The Python of a new environment that has the copy, and all other packages of this one."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(call(python, "-c", where, cwd=folder).strip())
    # A path in a .pth file is searched, but .pth files there are not: so not the editable original.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    call(sys.executable, "-m", "pip", *install, tree, cwd=folder)
    return python


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        tree, tests = folder / "tree", folder / "tests_alone"
        copy_core(tree)
        python = environment(folder / "environment", tree)
        tests.mkdir()
        for kept in ("tests", "pyproject.toml"):  # the package is what is installed
            shutil.move(tree / kept, tests / kept)
        call(python, "-c", NOTHING_LEFT, cwd=tests)
        whole = call(sys.executable, "-c", CALLS, cwd=tests, PYTHONPATH=str(ROOT))
        alone = call(python, "-c", CALLS, cwd=tests)
        counts = json.loads(whole), json.loads(alone)
        if counts[0] != counts[1]:
            differ = {k for k in {*counts[0], *counts[1]} if counts[0].get(k) != counts[1].get(k)}
            sys.exit(f"a save and a load make other calls than in the whole tree: {sorted(differ)}")
        print(f"{sum(counts[0].values())} calls of a save and a load, as in the whole tree")
        chosen = sys.argv[1:] or [f"tests/{name}" for name in TESTS]
        marks = "not slow and not trainers and not environment and not plugins"
        done = subprocess.run(
            [
                python,
                "-P",
                "-m",
                "pytest",
                "-n",
                os.environ.get("WORKERS", "6"),  # many tests wait
                "--dist",
                "worksteal",
                "-m",
                marks,
                *chosen,
            ],
            cwd=tests,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},  # nor the original
            check=False,
        )
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
