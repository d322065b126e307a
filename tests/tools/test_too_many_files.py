"""A process that may open no more files takes no sound checkpoint for a damaged one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import unickpt
from unickpt import SaveOptions

CHILD = """
import os, resource, shutil, sys
import unickpt

path, work = sys.argv[1:]
# Modules are imported, threads started, and files opened that stay open.
unickpt.load(path)
unickpt.verify(path)
if os.path.exists(path + "/manifest.ocdbt"):
    unickpt.copy(path, work + "/first")
else:
    unickpt.convert(path, work + "/first")
outcomes = set()

def attempt(what, free):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, hard))
    try:
        found = what()
        outcomes.add("fine" if getattr(found, "ok", True) else f"DAMAGED {found.damage[0]}")
    except unickpt.StorageError as error:
        outcomes.add("refused" if "oo many open files" in str(error) else f"OTHER {error}")
    except Exception as error:
        outcomes.add(f"{type(error).__name__} {error}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

for free in (-1, 0, 1, 2, 3, 4, 6, 8, 40):
    attempt(lambda: unickpt.verify(path), free)
    attempt(lambda: unickpt.load(path), free)
    if os.path.exists(path + "/manifest.ocdbt"):
        attempt(lambda: unickpt.copy(path, work + f"/copy{free}"), free)
    else:
        attempt(lambda: unickpt.convert(path, work + f"/copy{free}"), free)
print(sorted(outcomes))
"""


@pytest.mark.parametrize("kind", ["unickpt", "zstd", "npz", "safetensors", "torch"])
def test_it_is_told_and_is_no_damage(kind: str, tmp_path: Path) -> None:
    tree = {f"w{i}": np.full((128, 1024), i, np.float32) for i in range(6)}
    path = tmp_path / "c"
    if kind == "npz":
        path = tmp_path / "c.npz"
        np.savez_compressed(path, **tree)
    elif kind in ("safetensors", "torch"):
        unickpt.save(tmp_path / "own", tree)
        unickpt.convert(tmp_path / "own", path, to=kind)
    else:
        compression = None if kind == "unickpt" else "zstd"
        options = SaveOptions(chunk_bytes=1 << 17, compression=compression)
        unickpt.save(path, tree, options=options)
    run = [sys.executable, "-W", "ignore", "-c", CHILD, str(path), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['fine', 'refused']", done.stdout + done.stderr


def test_a_file_in_the_place_of_a_folder_is_damage(tmp_path: Path) -> None:
    """Whose files are missing: no reason to try again."""
    unickpt.save(tmp_path / "c", {"w": np.zeros(30_000)})
    (folder,) = tmp_path.glob("c/processes/*/00000/d")
    folder.rename(tmp_path / "d")
    folder.write_bytes(b"")
    report = unickpt.verify(tmp_path / "c")
    assert [damage.array for damage in report.damage] == ["w"]
    with pytest.raises(unickpt.CheckpointCorrupt, match="no file"):
        unickpt.load(tmp_path / "c")
