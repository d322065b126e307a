"""Checkpoints of jobs with thousands of processes, of which one process writes index and timing: what
`unickpt report` and `inspect` read, without the data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from support.forging import array, forge_index, index_of

from unickpt import Layout, Mesh
from unickpt.format import timing
from unickpt.format.index import RESERVED
from unickpt.format.timing import TIMING_KEY, Timing

LAYOUTS = {
    "attention/q": (4096, 4096),
    "attention/k": (4096, 1024),
    "attention/v": (4096, 1024),
    "attention/o": (4096, 4096),
    "mlp/up": (4096, 14336),
    "mlp/gate": (4096, 14336),
    "mlp/down": (14336, 4096),
    "norm": (4096,),
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
    written = rng.integers(int(1.7e9), int(2.1e9), processes)
    written[: processes // 16] = int(2.6e9)
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
        "reused": np.where(rng.random(processes) < 0.5, int(4e8), 0),
        "staged": written,
        "chunks": written >> 23,
    }
    return timing.from_columns(done + 0.4, done + 1.6, columns, processes)


def forge_step(
    path: Path, found: Timing, arrays: int, mesh: Mesh, *, step: int = 0, reused: int = 0
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
    metadata = {RESERVED: {"step": step, "metrics": {"loss": 4 / (1 + step)}}}
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
    return {
        "dict": [[key, _tree(of) if isinstance(of, dict) else "*"] for key, of in node.items()]
    }
