"""A lack of memory is an error that says what asked for how much, and never damage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import unickpt

MIB = 1 << 20
PROGRAM = """
import resource, sys
import numpy as np
import unickpt

path, copy = sys.argv[1:]
uses = {
    "load": lambda: unickpt.load(path),
    "read": lambda: unickpt.open(path)["w"][...],
    "verify": lambda: unickpt.verify(path),
    "convert": lambda: unickpt.convert(path, copy),
}
uses["verify"]()  # starts threads, imports
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (170 << 20),) * 2)
for name, use in uses.items():
    try:
        use()
    except unickpt.UnickptError as error:
        print(name, type(error).__name__, isinstance(error, MemoryError), error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
def test_arrays_for_which_there_is_no_memory_are_named(tmp_path: Path) -> None:
    state = {"w": np.zeros(200 * MIB, np.uint8), "n": np.ones(3)}
    options = unickpt.SaveOptions(fsync=False, chunk_shape=(200 * MIB,))
    unickpt.save(tmp_path / "c", state, options=options)
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), str(tmp_path / "copy")]
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # threads take addresses, too
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=env)
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [
        [use, "OutOfMemory", "True"] for use in ("load", "read", "verify", "convert")
    ], (done.stdout, done.stderr)
    for line in lines[:3]:
        assert f"{tmp_path / 'c'}: array 'w'" in line
        assert "out of memory: Unable to allocate 200. MiB" in line
    assert f"saving to {tmp_path / 'copy'}: out of memory: Unable to allocate" in lines[3]
