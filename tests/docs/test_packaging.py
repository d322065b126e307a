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
    dist = tmp_path / "dist"
    build = [sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, cwd=tmp_path)
    assert len(list(dist.glob("*.tar.gz"))) == 1
    (wheel,) = dist.glob("*.whl")  # built from the sdist
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    for folder, package in [("unickpt", ""), ("backends", "backends"), ("adapters", "adapters")]:
        sources = {p.name for p in (ROOT / folder).glob("*.py")}
        assert sources == {p.name for p in (target / "unickpt" / package).glob("*.py")}
    assert (target / "unickpt" / "py.typed").exists()
    page = {p.name for p in (ROOT / "unickpt" / "reporting" / "page").iterdir()}
    assert page == {p.name for p in (target / "unickpt" / "reporting" / "page").iterdir()}
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
    later = ("display", "reporting", "integrations", "cli", "backends", "adapters")
    assert [m for m in modules if m.startswith(tuple(f"unickpt.{part}" for part in later))] == []
    others = {"jax", "torch", "rich", "typer", "tqdm", "scipy", "h5py", "zstandard", "fsspec"}
    assert others.isdisjoint(modules)
