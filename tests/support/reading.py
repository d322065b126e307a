"""Reads untrusted checkpoints in all ways, within a bound on memory."""

from __future__ import annotations

from pathlib import Path

from support.forks import Forks
from support.nodes import manifest

# Reads a checkpoint in all ways; prints how much more memory that took at its peak than before.
READER = """
import json, resource
import numpy as np
import unickpt
from unickpt import LoadOptions
from unickpt.types import Box

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

def unverified(stored):
    return [a.read(Box.whole(a.shape), verify=False) for a in map(stored.get, stored)]

def tensorstore(stored):
    return [a.tensorstore().read().result() for a in map(stored.get, stored)]

path, first, said = ARGS[0], peak(), []
for act in (
    lambda: unickpt.load(path),
    lambda: unickpt.load(path, options=LoadOptions(verify=False)),
    lambda: unverified(unickpt.open(path)),
    lambda: tensorstore(unickpt.open(path)),
    lambda: [str(d.reason) for d in unickpt.verify(path).damage],
):
    try:
        said.append(str(act())[:2000])
    except unickpt.UnickptError as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps([said, peak() - first]))
"""


def read_all(forks: Forks, path: Path, most_mb: int = 180) -> list[str]:
    """What each way of reading says; fails where one takes more memory than that, or hangs."""
    ended = forks.wait(forks.start(READER, str(path)))
    assert ended.code == 0, ended.out[-3000:]
    said, grown = ended.last
    assert grown < most_mb, f"{grown} MB"
    found: list[str] = said
    return found


def written(path: Path, root: bytes, height: int = 0, **more: bytes) -> Path:
    """A database whose root node is given; further files by name."""
    path.mkdir()
    (path / "root").write_bytes(root)
    (path / "manifest.ocdbt").write_bytes(manifest("root", 0, len(root), height))
    for name, data in more.items():
        (path / name).write_bytes(data)
    return path
