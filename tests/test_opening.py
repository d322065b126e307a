"""Reading beside those who overwrite or remove, in forked processes, and after a pickle."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3_server
from conftest import Processes
from forks import Forks

import unickpt
from unickpt import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointReplaced,
    LoadOptions,
    SaveOptions,
    StorageError,
    backends,
    chunks,
    load,
    read,
)
from unickpt.backends import Location, kvstore
from unickpt.checkpoint import Checkpoint
from unickpt.checkpointer import Checkpointer
from unickpt.commit import Attempt

SHAPES = {"small": (3000,), "rows": (16, 4096), "empty": (0, 2)}


def tree(number: int) -> dict[str, Any]:
    """A tree all of whose elements are one number."""
    return {**{k: np.full(s, float(number)) for k, s in SHAPES.items()}, "number": number}


def number_of(found: dict[str, Any]) -> int:
    """The number of a tree; fails where it is not whole, or of more than one version."""
    number = found["number"]
    for name, shape in SHAPES.items():
        assert found[name].shape == shape
        assert (found[name] == number).all(), f"{name} is of another version"
    return int(number)


@pytest.fixture
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    running = Forks(tmp_path_factory.mktemp("output"))
    yield running
    running.close()


# --- overwriting --------------------------------------------------------------------------------

WRITER = """
import os, sys
sys.path.insert(0, ARGS[0])
import unickpt
from test_opening import tree
number = 0
while not os.path.exists(ARGS[3]):
    number += 1
    given = unickpt.SaveOptions(fsync=False, chunk_bytes=64 << 10, compression=ARGS[2])
    unickpt.save(ARGS[1], tree(number), overwrite=True, options=given)
print(number)
"""

READER = """
import collections, json, sys
sys.path.insert(0, ARGS[0])
import numpy as np
import unickpt
from test_opening import number_of, tree
path, rounds, seen = ARGS[1], ARGS[2], collections.Counter()
into = tree(0)
while seen["load"] < rounds:
    seen["load"] += 1
    number_of(unickpt.load(path))
    if seen["load"] % 3 == 0:
        number_of(unickpt.load(path, into))
        report = unickpt.verify(path)
        assert report.ok, report
        seen["verify"] += 1
        stored = unickpt.open(path)
        try:
            assert (stored["rows"][3:9, ::7] == stored.values["number"]).all()
            seen["slices"] += 1
        except unickpt.CheckpointReplaced:
            seen["replaced"] += 1
print(json.dumps(seen))
"""


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_readers_beside_overwrites_see_one_whole_version(
    compression: str | None, forks: Forks, tmp_path: Path
) -> None:
    path, stop, here = str(tmp_path / "c"), tmp_path / "stop", os.path.dirname(__file__)
    unickpt.save(path, tree(0))
    writer = forks.start(WRITER, here, path, compression, str(stop))
    readers = [forks.start(READER, here, path, 60) for _ in range(2)]
    try:
        ended = forks.wait_all(readers)
    finally:
        stop.touch()
    for reader in ended:
        assert reader.code == 0, reader.out
        assert reader.last["load"] == 60
    assert forks.wait(writer).last > 10, "too few overwrites for a race"
