"""Checkpoints of jobs with thousands of processes, with index and timing but without data: what
`unickpt report` and `inspect` read. And one with names that try to become markup."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from support.forging import array, forge_index, index_of
from unickpt.format import timing
from unickpt.format.index import RESERVED
from unickpt.format.timing import TIMING_KEY, Timing
from unickpt.types import Layout, Mesh

EVIL = "</script><img src=x onerror=\"window.pwned='yes'\">\u2028\u202e<!--<script>"

LAYOUTS = {
    "attention/q": (16384, 16384),
    "attention/k": (16384, 1024),
    "attention/v": (16384, 1024),
    "attention/o": (16384, 16384),
    "mlp/up": (16384, 53248),
    "mlp/gate": (16384, 53248),
    "mlp/down": (53248, 16384),
    "norm": (16384,),
}
"""The arrays of a layer."""


def large_timing(
    processes: int, slow: range = range(0), seed: int = 0, *, late: int | None = None
) -> Timing:
    """The timing of a save, in which some processes write slowly, and one began late."""
    rng = np.random.default_rng(seed)
    describe, stage = rng.uniform(0.2, 0.3, processes), rng.gamma(20, 0.05, processes)
    write = rng.gamma(40, 0.25, processes)
    write[slow.start : slow.stop : slow.step] *= 2.6
    began = rng.uniform(0, 0.15, processes)
    began[0] = 0
    if late is not None:
        began[late] = 9
    written = rng.integers(int(5.8e8), int(6.6e8), processes)
    written[: processes // 16] = int(8.2e8)
    done = float((began + describe + stage + 0.2 + write).max())
    columns = {
        "began": began,
        "blocked": describe + stage,
        "describe_s": describe,
        "plan_at": describe,
        "plan_s": np.full(processes, 0.08),
        "stage_at": describe + 0.08,
        "stage_s": stage,
        "queue_at": describe + stage + 0.08,
        "queue_s": np.full(processes, 0.12),
        "write_at": describe + stage + 0.2,
        "write_s": write,
        "written": written,
        "stored": written,
        "reused": np.where(rng.random(processes) < 0.5, int(1e8), 0),
        "staged": written,
        "chunks": written >> 23,
    }
    return timing.from_columns(done + 0.4, done + 1.6, columns, processes)


def forge_step(
    path: Path,
    found: Timing,
    arrays: int,
    mesh: Mesh,
    *,
    step: int = 0,
    reused: int = 0,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Writes a checkpoint of so many arrays that were saved on a mesh with axes `tp` and others."""
    others = tuple(axis for axis in mesh.axes if axis != "tp")
    entries = []
    for number in range(arrays):
        name, shape = list(LAYOUTS.items())[number % len(LAYOUTS)]
        tree = ("params", "mu", "nu")[number // len(LAYOUTS) % 3]
        full = f"{tree}/layers/{number // len(LAYOUTS) // 3}/{name}"
        split = ((others, ("tp",)) if name != "mlp/down" else (("tp",), others))[: len(shape)]
        dtype = "bfloat16" if tree == "params" else "float32"
        entries.append(array(full, shape, dtype=dtype, layout=Layout(mesh, split)))
    metadata = {RESERVED: {"step": step, "metrics": metrics or {"loss": 4 / (1 + step)}}}
    index, table = index_of(*entries, rows=0)
    index = dataclasses.replace(
        index,
        tree=_nested([entry.name for entry in entries]),
        processes=found.processes,
        created=f"2026-11-{1 + step // 1440:02d}T{step // 60 % 24:02d}:{step % 60:02d}:00+00:00",
        metadata=metadata,
        reused=reused,
    )
    forge_index(path, index, table, **{TIMING_KEY: timing.encode(found)})


def _nested(names: list[str]) -> dict[str, object]:
    top: dict[str, object] = {}
    for name in names:
        *folders, leaf = name.split("/")
        at = top
        for folder in folders:
            at = at.setdefault(folder, {})  # type: ignore[assignment]
        at[leaf] = None
    return _tree(top)


def _tree(node: dict[str, object]) -> dict[str, object]:
    return {"dict": [[key, _tree(of) if isinstance(of, dict) else "*"] for key, of in node.items()]}


def forge_evil(path: Path) -> None:
    """A checkpoint with names that try to become markup."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [EVIL, "__proto__", "constructor", "a\x1b[31m", f"{EVIL[::-1]}x"]
    entries = [array(name, (4, 4)) for name in names]
    metadata = {RESERVED: {"step": 1, "metrics": {EVIL: 1.5, "__proto__": 2.0}}}
    index, table = index_of(*entries, metadata=metadata, created="2026-11-22T10:00:00+00:00")
    forge_index(path, index, table)
