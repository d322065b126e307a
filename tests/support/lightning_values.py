"""Values as they are in checkpoints of Lightning, and how they are compared."""

from __future__ import annotations

import argparse
import datetime
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import torch

Point = namedtuple("Point", "x y")
VALUES = {
    "state_dict": OrderedDict(
        w=torch.arange(6.0).reshape(2, 3), b=torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)
    ),
    "callbacks": {"A{'monitor': 'x/y'}": {"dirpath": Path("/a/b"), "best": {"/a": torch.ones(())}}},
    "hyper_parameters": {
        "sizes": {3, 1},
        "frozen": frozenset({"a"}),
        "queue": deque([1, torch.ones(2)], maxlen=4),
        "milestones": Counter({5: 2}),
        "by_pair": {(1, "a"): [Path("c")], None: 2, 1.5: True},
        "counts": defaultdict(int, x=3),
        "namespace": argparse.Namespace(lr=0.1, root=Path("d")),
        "when": datetime.datetime(2026, 11, 22, 1, 2, 3, 4),
        "interval": datetime.timedelta(1, 2, 3),
        "complex": 1 - 2j,
        "point": Point(1, (2.5, None)),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "size": torch.Size([2, 3]),
        "array": np.arange(3, dtype=np.int16),
        "scalar": np.float32(0.1),
        "number": 1 << 70,
        "nothing": [],
        "raw": b"\0\xff",
    },
    "epoch": 3,
}


def assert_same(found: Any, wanted: Any, at: str = "") -> None:
    assert type(found).__name__ == type(wanted).__name__, at
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype, at
        assert found.reshape(-1).view(torch.uint8).equal(wanted.reshape(-1).view(torch.uint8)), at
    elif isinstance(wanted, np.ndarray | np.generic):
        assert (found.dtype, found.tobytes()) == (wanted.dtype, wanted.tobytes()), at
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), at
        for key in wanted:
            assert_same(found[key], wanted[key], f"{at}/{key}")
        assert getattr(found, "default_factory", 0) == getattr(wanted, "default_factory", 0)
    elif isinstance(wanted, list | tuple | deque):
        assert len(found) == len(wanted), at
        assert getattr(found, "maxlen", None) == getattr(wanted, "maxlen", None), at
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            assert_same(*pair, f"{at}/{number}")
    else:
        assert found == wanted, at
