"""Saves of a bfloat16 state of which scattered elements change: whole, by digests, as patches.

    .venv/bin/python benchmarks/patches.py --mib 512 --steps 12 --json patches.json

Each step changes a share of the elements at random, each by its last bit; each save refers to the
step before, and the two newest steps are kept. Bytes are those of new files; a save is durable; a
load is verified, of files in the page cache; of both, the best of the steps. `--train` changes the
weights as an RL run does instead: Adam with a small learning rate on float32 weights, of which
bfloat16 copies are saved. `--limits` saves nothing: it computes what is written on average over 400
steps if patches may have other shares of their chunk, with and without a limit for all patches of a
chunk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import unickpt
from unickpt import SaveOptions

HOWS = ("whole", "digest", "patch")


def scattered(nbytes: int, share: float) -> Callable[[], Iterator[np.ndarray[Any, Any]]]:
    """States of which a share of the elements changes at random in each step."""

    def states() -> Iterator[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(0)
        weights = rng.standard_normal(nbytes // 2, np.float32).astype(ml_dtypes.bfloat16)
        bits = weights.reshape(-1, 1024).view(np.uint16)
        while True:
            yield bits.view(ml_dtypes.bfloat16)
            at = rng.integers(0, bits.size, int(bits.size * share))
            bits.reshape(-1)[at] ^= 1

    return states


def trained(nbytes: int, rate: float) -> Callable[[], Iterator[np.ndarray[Any, Any]]]:
    """The bfloat16 copies of float32 weights under Adam, with gradients that are mostly noise."""

    def states() -> Iterator[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(0)
        size = nbytes // 2
        master = rng.standard_normal(size, np.float32) * np.float32(0.02)
        drift = rng.standard_normal(size, np.float32) * np.float32(0.3)
        m, v = np.zeros(size, np.float32), np.zeros(size, np.float32)
        step = 0
        while True:
            yield master.astype(ml_dtypes.bfloat16).reshape(-1, 1024)
            step += 1
            gradient = rng.standard_normal(size, np.float32) + drift
            m += np.float32(0.1) * (gradient - m)
            v += np.float32(0.001) * (gradient * gradient - v)
            fair = np.float32((1 - 0.9**step) / np.sqrt(1 - 0.999**step))
            master -= np.float32(rate) / fair * m / (np.sqrt(v) + np.float32(1e-8))

    return states


def new_bytes(folder: Path) -> int:
    """The bytes of the files that no earlier checkpoint has."""
    return sum(
        found.st_size
        for file in folder.rglob("*")
        if file.is_file() and (found := file.stat()).st_nlink == 1
    )


def measure(states: Iterator[Any], steps: int, how: str, folder: Path) -> dict[str, Any]:
    """Saves the first state, and then one after each step; means, and the best time of each."""
    rows: list[dict[str, float]] = []
    base: Path | None = None
    before: Any = None
    share = 0.0
    for step, state in zip(range(steps + 1), states, strict=False):
        path = folder / f"step_{step}"
        options = SaveOptions() if how == "whole" else SaveOptions(base=base, reuse=how)  # type: ignore[arg-type]
        started = time.perf_counter()
        report = unickpt.save(path, {"w": state}, options=options)
        saved = time.perf_counter() - started
        started = time.perf_counter()
        found = unickpt.load(path)["w"]
        loaded = time.perf_counter() - started
        assert found.tobytes() == state.tobytes(), "what was loaded differs"
        if before is not None:
            share += float((before != state.view(np.uint16)).mean()) / steps
            written, patched = new_bytes(path), report.patched_chunks
            rows.append({"bytes": written, "save_s": saved, "load_s": loaded, "patched": patched})
        before = state.view(np.uint16).copy()
        if (old := folder / f"step_{step - 2}").exists():
            shutil.rmtree(old)
        base = path
    shutil.rmtree(folder)
    return {
        "how": how,
        "changed": share,
        "bytes": statistics.mean(row["bytes"] for row in rows) / state.nbytes,
        "first_bytes": rows[0]["bytes"] / state.nbytes,
        "save_s": min(row["save_s"] for row in rows),
        "load_s": min(row["load_s"] for row in rows),
        "each": rows,
    }


def patch_size(changed: float) -> float:
    """The expected size of a patch in relation to its chunk, if a share of the elements differs."""
    sizes = []
    for width in (1, 2, 4):
        filler = (1 - changed) ** (1 << 8 * width)  # the chance of each further one
        sizes.append(changed / (1 - filler) * (width + 2) / 2)
    return min(sizes)


def written(share: float, most: float, all_most: float, steps: int = 400) -> float:
    """What is written of a chunk on average, if a share of its elements changes in each step.

    Arguments:
        share: of the elements that change.
        most: of the chunk, as which a patch may take; else the chunk is written whole.
        all_most: likewise for all patches since the chunk was written whole.
    """
    total, since, spent = 0.0, 0, 0.0
    for _ in range(steps):
        since += 1
        patch = patch_size(1 - (1 - share) ** since)
        if patch <= most and spent + patch <= all_most:
            spent += patch
            total += patch
        else:
            since, spent, total = 0, 0.0, total + 1
    return total / steps


def print_limits(shares: list[float]) -> None:
    print("changed  " + "".join(f"{f'{most:g} of a chunk':>22}" for most in (0.125, 0.25, 0.5)))
    for share in shares:
        pairs = [[written(share, most, limit) for limit in (1, 1e9)] for most in (0.125, 0.25, 0.5)]
        print(f"{share:7.1%}  " + "".join(f"{f'{a:.1%} or {b:.1%}':>22}" for a, b in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.001, 0.01, 0.05, 0.2])
    parser.add_argument("--train", type=float, nargs="*", default=[], help="learning rates")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limits", action="store_true")
    arguments = parser.parse_args()
    if arguments.limits:
        print_limits(arguments.shares)
        return
    nbytes = arguments.mib << 20
    cases = [(f"{share:.1%} changed", scattered(nbytes, share)) for share in arguments.shares]
    cases += [(f"Adam at {rate:g}", trained(nbytes, rate)) for rate in arguments.train]
    results = []
    print(
        f"{'state':16} {'how':8} {'changed':>8} {'written':>9} {'first':>7} {'save':>8} {'load':>8}"
    )
    for name, states in cases:
        for how in HOWS:
            folder = Path(tempfile.mkdtemp(dir=arguments.folder))
            found = measure(states(), arguments.steps, how, folder)
            results.append({"state": name, **found})
            print(
                f"{name:16} {how:8} {found['changed']:8.2%} {found['bytes']:9.2%} "
                f"{found['first_bytes']:7.2%} {found['save_s']:6.2f} s {found['load_s']:6.2f} s",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
