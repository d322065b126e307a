"""Batches of bytes out of Python's standard library: a step always gets the same ones."""

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np

CONTEXT, BATCH, VOCABULARY = 64, 8, 256


@cache
def corpus() -> np.ndarray:
    """The sources in the standard library's top folder, one after the other, as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return np.frombuffer(b"".join(f.read_bytes() for f in sorted(root.glob("*.py"))), np.uint8)


def batch(step: int) -> np.ndarray:
    """The tokens of a step, int32[BATCH, CONTEXT + 1]."""
    starts = np.random.default_rng(step).integers(len(corpus()) - CONTEXT, size=BATCH)
    return corpus()[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
