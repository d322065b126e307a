"""What `compression="auto"` saves, and what it costs (docs/compression.md).

    python benchmarks/trained.py state.npz                       # once; trains for two minutes
    python benchmarks/compress.py arrays --trained state.npz
    python benchmarks/compress.py saves --mib 1024 --rounds 7

`arrays`: for arrays as they are in checkpoints, how many times smaller each way to compress makes
them, and gigabytes (of plain bytes) a second of one core: time of the processor, least of several
rounds, so that a busy machine matters little. Chunks of 8 MiB, as in a save; `zstd 3 of all` is
zstd over a whole file, as of a safetensors file that is compressed afterwards.

`saves`: whole saves and loads of bfloat16 weights and float32 moments, with compression and
without, beside torch.save and safetensors, in turns; medians of wall time, with fsync.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts
import zstandard
from peers import fresh_directory, keep_memory, machine_facts, print_facts
from rich.console import Console

import unickpt
from unickpt import SaveOptions
from unickpt.format import chunk_encoding
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.plugins.compress.auto import chosen_encoding, pays, shorter

CHUNK = 8 << 20
Array = np.ndarray[Any, Any]
Made = tuple[int, float, float]
"""Bytes, seconds to write, seconds to read."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("arrays", "saves"))
    parser.add_argument("--trained", type=Path, help="of benchmarks/trained.py")
    parser.add_argument("--mib", type=int, default=1024, help="of the state of `saves`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=".", help="a fresh directory is made in here, and removed")
    arguments = parser.parse_args()
    keep_memory()
    console = Console(width=200)
    with fresh_directory(arguments.dir) as directory:
        facts = {"unickpt": unickpt.__version__, "zstandard": zstandard.__version__}
        print_facts(console, {**machine_facts(directory), **facts})
        if arguments.what == "arrays":
            arrays(arguments.trained, arguments.rounds)
        else:
            saves(directory, arguments.mib, arguments.rounds)


# --- arrays ---------------------------------------------------------------------------------------


def weights(rows: int, columns: int, dtype: Any, seed: int = 0) -> Array:
    """Normal numbers with a scale for each row, as trained weights have."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((rows, columns), np.float32)
    found *= np.exp(rng.normal(-4, 0.5, (rows, 1))).astype(np.float32)
    return found.astype(dtype)


def examples(trained: Path | None) -> dict[str, Array]:
    """Arrays by what they are, each of 8 MiB."""
    rng = np.random.default_rng(1)
    found = {
        "weights, bfloat16": weights(2048, 2048, ml_dtypes.bfloat16),
        "weights, float16": weights(2048, 2048, np.float16),
        "weights, float32": weights(1024, 2048, np.float32),
        "bfloat16 in float32": weights(1024, 2048, ml_dtypes.bfloat16).astype(np.float32),
        "weights, float8_e4m3fn": (weights(4096, 2048, np.float32) * 64).astype(
            ml_dtypes.float8_e4m3fn
        ),
        "second moments, float32": weights(1024, 2048, np.float32) ** 2,
        "tokens, int64": (rng.zipf(1.2, 1 << 20) % 50_257).astype(np.int64),
        "mask, bool": rng.random(CHUNK) < 0.1,
        "random bytes": rng.integers(0, 256, CHUNK, np.uint8),
    }
    found = {name: array.reshape(-1) for name, array in found.items()}
    if trained is not None:
        stored = np.load(trained)
        for kind, name in (
            ("weights", "weights"),
            ("exp_avg", "first moments"),
            ("exp_avg_sq", "second moments"),
        ):
            one = np.concatenate(
                [stored[n].reshape(-1) for n in stored.files if n.split("/")[0] == kind]
            )
            if kind == "weights":
                found["trained weights, bfloat16"] = one.astype(ml_dtypes.bfloat16)
            found[f"trained {name}, float32"] = one
    return found


def arrays(trained: Path | None, rounds: int) -> None:
    """Print a table of ratios and speeds."""
    ways: Mapping[str, Callable[[Array], Made]] = {
        "auto": lambda array: auto(array, rounds),
        "auto without zstandard": lambda array: stored(array, rounds, entry_of(array)),
        "zstd": lambda array: stored(
            array, rounds, entry_of(array, chunk_encoding.encoding_for("zstd"))
        ),
        "blosc": lambda array: stored(
            array, rounds, entry_of(array, chunk_encoding.encoding_for("blosc"))
        ),
        "zstd 3 of all": lambda array: whole(array, rounds),
    }
    print("| array | " + " | ".join(f"{way}: times smaller, write, read" for way in ways) + " |")
    print("|---" * (len(ways) + 1) + "|")
    for name, array in examples(trained).items():
        cells = []
        for way in ways.values():
            size, write, read = way(array)
            speeds = f"{array.nbytes / write / 1e9:.2f}, {array.nbytes / read / 1e9:.2f}"
            cells.append(f"{array.nbytes / size:.3f}, {speeds}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def entry_of(array: Array, encoding: Any = ...) -> ArrayEntry:
    """An array, with the codec of `compression="auto"` if no other is said."""
    if encoding is ...:
        encoding = chosen_encoding(ts.dtype(array.dtype).name)
    dtype = ts.dtype(array.dtype).name
    return ArrayEntry("w", array.shape, dtype, array.shape, encoding=encoding)


def least(work: Callable[[], Any], rounds: int) -> tuple[Any, float]:
    """What some work gives, and its least time of the processor."""
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        found = work()
        best = min(best, time.process_time() - started)
    return found, max(best, 1e-9)


def auto(array: Array, rounds: int) -> Made:
    """As a save does it: a sample, then a frame or the bytes as they are, and the digest."""
    entry, part = entry_of(array), Part.whole("w", array.shape, array.shape)

    def write() -> Any:
        chunk_encoding.digest(array)
        raw = chunk_encoding.bytes_of(array).data
        if not pays(entry, array):
            return raw
        return shorter(entry, part, array, (raw,)) or raw

    found, seconds = least(write, rounds)
    if len(found) == array.nbytes:
        return len(found), seconds, least(lambda: bytes(found), rounds)[1]
    return len(found), seconds, reading(array, entry, bytes(found), rounds)


def stored(array: Array, rounds: int, entry: ArrayEntry) -> Made:
    """By TensorStore, with the codec of the array."""
    part = Part.whole("w", array.shape, array.shape)
    found, seconds = least(lambda: chunk_encoding.compressed(entry, part, array), rounds)
    return len(found), seconds, reading(array, entry, bytes(found), rounds)


def reading(array: Array, entry: ArrayEntry, data: bytes, rounds: int) -> float:
    """Seconds for TensorStore to read a chunk from memory; anew each round, as it may keep it."""
    memory, best = {"driver": "memory", "path": "w/"}, float("inf")
    metadata = chunk_encoding.zarr_metadata(entry, Part.whole("w", array.shape, array.shape))
    spec = {"driver": "zarr3", "kvstore": memory, "metadata": metadata}
    for _ in range(rounds):
        context = ts.Context({"memory_key_value_store": {}})
        ts.KvStore.open(memory, context=context).result().write("c/0", data).result()
        opened = ts.open(spec, context=context, open=True, assume_metadata=True).result()
        out = np.zeros_like(array)
        target = ts.array(out, context=context)
        started = time.process_time()
        target.write(opened).result()
        best = min(best, time.process_time() - started)
        assert out.tobytes() == array.tobytes()
    return max(best, 1e-9)


def whole(array: Array, rounds: int) -> Made:
    """zstd over the bytes as they are in a file."""
    data = array.tobytes()
    found, write = least(lambda: zstandard.ZstdCompressor(level=3).compress(data), rounds)
    back, read = least(lambda: zstandard.ZstdDecompressor().decompress(found), rounds)
    assert back == data
    return len(found), write, read


# --- saves ----------------------------------------------------------------------------------------


def state(mib: int) -> dict[str, Array]:
    """Weights in bfloat16, and two moments of each in float32."""
    found: dict[str, Array] = {}
    for number in range(max(1, mib // 40)):
        w = weights(2048, 2048, np.float32, number)
        found[f"w/{number}"] = w.astype(ml_dtypes.bfloat16)
        found[f"m/{number}"], found[f"v/{number}"] = w * np.float32(1e-3), w * w
    return found


def saves(directory: Path, mib: int, rounds: int) -> None:
    """Print the medians of whole saves and loads."""
    import torch
    from safetensors.numpy import load_file, save_file

    tree = state(mib)
    tensors = {
        name: torch.from_numpy(a.view(np.int16) if a.itemsize == 2 else a)
        for name, a in tree.items()
    }
    like = {n: a.view(np.int16) if a.itemsize == 2 else a for n, a in tree.items()}

    def ours(compression: str | None, kind: str) -> tuple[Any, Any]:
        options = SaveOptions(compression=compression)
        chosen = {n: a for n, a in tree.items() if kind == "all" or n[0] == kind}
        return (
            lambda path: unickpt.save(path, chosen, options=options),
            lambda path: unickpt.load(path),
        )

    ways = {
        "unickpt": ours(None, "all"),
        'unickpt, "auto"': ours("auto", "all"),
        'unickpt, "zstd"': ours("zstd", "all"),
        "torch.save, fsync": (lambda p: synced(p, torch.save, tensors), torch.load),
        "safetensors, fsync": (
            lambda p: synced(p, lambda values, path: save_file(values, path), like),
            load_file,
        ),
        "unickpt, bfloat16 only": ours(None, "w"),
        'unickpt, "auto", bfloat16 only': ours("auto", "w"),
    }
    taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, (write, read) in ways.items():
            path = directory / f"{number} {name.replace('/', ' ')}"
            started = time.perf_counter()
            write(path)
            written = time.perf_counter()
            read(path)
            ended = time.perf_counter()
            taken[name].append((written - started, ended - written, size_of(path)))
            remove(path)
    nbytes = sum(array.nbytes for array in tree.values())
    print(f"{nbytes / 1e9:.2f} GB, of which bfloat16 are a fifth; {rounds} rounds")
    print("| | save, s | load, s | on disk, GB |")
    print("|---|---|---|---|")
    for name, found in taken.items():
        columns = [sorted(each[at] for each in found) for at in range(2)]
        times = [f"{statistics.median(c):.2f} ({c[0]:.2f} to {c[-1]:.2f})" for c in columns]
        print(f"| {name} | {times[0]} | {times[1]} | {found[0][2] / 1e9:.3f} |")


def synced(path: Path, write: Callable[[Any, Any], None], values: Any) -> None:
    """Writes a file, and flushes it, as the others do."""
    write(values, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files of a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def remove(path: Path) -> None:
    """Removes a file or a folder."""
    import shutil

    path.unlink() if path.is_file() else shutil.rmtree(path)


if __name__ == "__main__":
    main()
