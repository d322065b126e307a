"""Live weights: bytes of versions, the flip's pause, and how long publishing blocks a loop.

    .venv/bin/python benchmarks/weights.py --mib 1024 --versions 8
    .venv/bin/python benchmarks/weights.py --mib 8 --chunk-kib 1024 --versions 1000 --keep 1000

A bfloat16 state of which a share of the elements changes at random in each version, by its last
bit. A follower in the same process goes to each version, and its arrays are compared. All
versions are kept, or the newest `--keep`. Prints, in relation to the bytes of the state: `stored`,
new bytes of a version; `read`, bytes that the follower read of a version; `opens`, the
largest sum of bytes that a version needs. `pause` is the time of the flip per GiB of weights,
`scatter` that of NumPy for the same elements of a copy, array by array, and `stage` that of reading
and verifying before the flip. `blocked` is the time of `publish`: of torch tensors that an
optimizer owns (`staging="lazy"`), and of JAX arrays, which are kept by reference.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

import unickpt
from unickpt import SaveOptions
from unickpt.plugins.weights import Follower, Publisher

ROW = 1024
SWAPS: dict[str | None, Any] = {None: False, "True": True, "pages": "pages"}


def weights(nbytes: int) -> dict[str, Any]:
    """A state in tensors of at most 64 MiB."""
    rng = np.random.default_rng(0)
    left, state = nbytes // 2 // ROW, dict[str, Any]()
    while left:
        rows = min(left, 32 * 1024)
        values = rng.standard_normal((rows, ROW), np.float32).astype(ml_dtypes.bfloat16)
        state[f"layers.{len(state)}.weight"] = values
        left -= rows
    return state


def change(state: dict[str, Any], share: float, rng: np.random.Generator) -> None:
    for array in state.values():
        words = array.view(np.uint16).reshape(-1)
        words[rng.integers(0, words.size, int(words.size * share))] ^= 1


def as_torch(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors that share the memory."""
    return {
        name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        for name, array in state.items()
    }


def scatter(copy: dict[str, Any], state: dict[str, Any]) -> float:
    """Makes a copy of the state before the state; seconds of writing the elements that differ."""
    lists = []
    for name, array in state.items():
        old, new = copy[name].view(np.uint16).reshape(-1), array.view(np.uint16).reshape(-1)
        positions = np.flatnonzero(old != new)
        lists.append((old, positions, new[positions]))
    began = time.perf_counter()
    for old, positions, values in lists:
        old[positions] = values
    return time.perf_counter() - began


def folder_bytes(root: Path, version: int) -> int:
    """The bytes of all files of a version."""
    files = (root / f"step_{version}").rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def follow(arguments: argparse.Namespace) -> dict[str, float]:
    state, rng = weights(arguments.mib << 20), np.random.default_rng(1)
    nbytes = sum(array.nbytes for array in state.values())
    live = {name: torch.zeros_like(tensor) for name, tensor in as_torch(state).items()}
    copy = {name: array.copy() for name, array in state.items()}
    root = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="weights-"))
    chunk = {} if arguments.chunk_kib is None else {"chunk_bytes": arguments.chunk_kib << 10}
    options = SaveOptions(fsync=False, kept_cost=arguments.kept_cost, **chunk)
    rows: list[dict[str, float]] = []
    keep_last = None if arguments.keep >= arguments.versions else arguments.keep
    with (
        Publisher(root, keep_last=keep_last, options=options) as publisher,
        Follower(root, live, swap=SWAPS[arguments.swap]) as follower,
    ):
        for version in range(arguments.versions):
            report = publisher.publish(version, state).result()
            assert follower.update()
            update = follower.last_update
            assert update is not None
            rows.append(
                {
                    "stored": report.written_bytes / nbytes,
                    "read": update.read_bytes / nbytes,
                    "opens": folder_bytes(root, version) / nbytes,
                    "pause": update.pause_s / nbytes * 2**30,
                    "scatter": scatter(copy, state) / nbytes * 2**30,
                    "stage": update.stage_s / nbytes * 2**30,
                    "staged": update.staged_bytes / nbytes,
                }
            )
            for name, tensor in live.items():
                assert tensor.view(torch.int16).numpy().tobytes() == state[name].tobytes()
            change(state, arguments.share, rng)
        assert follower.check().ok
    shutil.rmtree(root)
    later = rows[1:]
    patched = [row for row in later if row["stored"] < 0.5]
    return {
        "stored, mean with full versions": statistics.mean(row["stored"] for row in rows),
        "stored, mean of patched versions": statistics.mean(row["stored"] for row in patched),
        "full versions": len(rows) - len(patched),
        "read, median": statistics.median(row["read"] for row in later),
        "read, mean without the first": statistics.mean(row["read"] for row in later),
        "read, mean of patched versions": statistics.mean(row["read"] for row in patched),
        "opens, most": max(row["opens"] for row in rows),
        "pause ms per GiB, median": 1e3 * statistics.median(row["pause"] for row in patched),
        "scatter ms per GiB, median": 1e3 * statistics.median(row["scatter"] for row in patched),
        "pause ms per GiB, most": 1e3 * max(row["pause"] for row in patched),
        "stage s per GiB, median": statistics.median(row["stage"] for row in patched),
        "staged, median": statistics.median(row["staged"] for row in patched),
    }


def blocked(arguments: argparse.Namespace) -> dict[str, float]:
    """The time of `publish` in a loop that waits for each version; the median."""
    import jax

    state = weights(arguments.mib << 20)
    parameters = [torch.nn.Parameter(tensor) for tensor in as_torch(state).values()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    trees = {
        "torch": (dict(zip(state, parameters, strict=True)), {"optimizers": [optimizer]}, "lazy"),
        "jax": ({name: jax.numpy.array(array) for name, array in state.items()}, {}, "auto"),
    }
    times = dict[str, float]()
    for name, (tree, more, staging) in trees.items():
        root = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="weights-"))
        options = SaveOptions(fsync=False, staging=staging)  # type: ignore[arg-type]
        seconds = []
        with Publisher(root, keep_last=2, options=options, **more) as publisher:
            for version in range(5):
                began = time.perf_counter()
                pending = publisher.publish(version, tree)
                seconds.append(time.perf_counter() - began)
                pending.result()
        shutil.rmtree(root)
        times[f"blocked ms, {name}"] = 1e3 * statistics.median(seconds[1:])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--keep", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--kept-cost", type=float, default=0.03)
    parser.add_argument("--chunk-kib", type=int)
    parser.add_argument("--swap", choices=["True", "pages"], help="Follower(swap=)")
    parser.add_argument("--no-blocked", action="store_true")
    parser.add_argument("--folder", help="on the disk to measure")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = follow(arguments)
    if not arguments.no_blocked:
        results |= blocked(arguments)
    print(f"unickpt {unickpt.__version__}, {arguments.mib} MiB, {arguments.versions} versions")
    for name, value in results.items():
        print(f"{name:<36}{value:10.4g}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
