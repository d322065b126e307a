"""The wheel: complete, typed, and working outside the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support import TESTS

pytestmark = pytest.mark.integration

ROOT = Path(TESTS).parent


def test_sdist_and_wheel_hold_all_and_work_elsewhere(tmp_path: Path) -> None:
    """`make dist` also installs the wheel, with its requirements, which takes minutes."""
    dist = tmp_path / "dist"
    build = [sys.executable, str(ROOT / "tests" / "dist.py"), str(dist), "--quick"]
    done = subprocess.run(build, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = dist.glob("*.whl")
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import numpy as np, unickpt\n"
        "assert unickpt.__file__.startswith(sys.argv[1]), unickpt.__file__\n"
        "unickpt.save('c', {'x': np.arange(3)})\n"
        "assert unickpt.load('c')['x'].tolist() == [0, 1, 2]\n"
    )
    subprocess.run([sys.executable, "-c", program, str(target)], check=True, cwd=tmp_path)


def test_importing_unickpt_imports_little() -> None:
    """Training jobs start often; what shows, exports or belongs to others is imported when used."""
    program = "import sys, unickpt; print(*sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    modules = found.stdout.split()
    assert "unickpt.saving.saver" in modules, found.stderr
    later = ("display", "integrations", "cli", "backends", "adapters", "plugins")
    later += ("runs", "tools", "rules.parser", "rules.rule", "rules.planner")
    assert [m for m in modules if m.startswith(tuple(f"unickpt.{part}" for part in later))] == []
    others = {"jax", "torch", "rich", "typer", "tqdm", "scipy", "h5py", "zstandard", "fsspec"}
    slow = {"importlib.metadata", "email", "numpy.ma", "difflib", "multiprocessing", "secrets"}
    assert (others | slow).isdisjoint(modules)


def test_the_first_save_and_load_import_little(tmp_path: Path) -> None:
    """They take as long as the tenth: what they need is there, but for the storage and frameworks
    of this program."""
    program = (
        "import sys, numpy, unickpt\n"
        "before = {*sys.modules}\n"
        "state = {'w': numpy.ones(3), 'n': numpy.float32(1)}\n"
        "unickpt.save('memory://first', state)\n"
        "unickpt.save_async('memory://second', state).result()\n"
        "unickpt.load('memory://first', state)\n"
        "unickpt.load('memory://second')\n"
        "state = {str(n): numpy.ones((n, 40, 50)) for n in range(100)}\n"
        "unickpt.save('disk', state)\n"
        "unickpt.load('disk', state)\n"
        "print(*sorted({*sys.modules} - before))\n"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    modules = found.stdout.split()
    assert "unickpt.adapters.numpy" in modules, found.stderr
    late = ("unickpt.adapters", "unickpt.backends", "unickpt.plugins")
    late += ("unickpt.arrays.memory_region",)  # of adapters
    assert [name for name in modules if not name.startswith(late)] == []
