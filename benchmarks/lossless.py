"""How much compression saves of trained weights and moments, and at which speed.

    python benchmarks/trained.py state.npz       # once
    python benchmarks/lossless.py state.npz

Writes the arrays of a small trained model through TensorStore's Zarr driver into memory, with each
codec that the format allows, and prints the stored bytes in parts of the plain ones, and GB/s of
one thread (time of the processor, of plain bytes).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

CODECS: dict[str, Any] = {
    "none": [],
    "gzip 5": [{"name": "gzip", "configuration": {"level": 5}}],
    "zstd 1": [{"name": "zstd", "configuration": {"level": 1}}],
    'zstd 3 (compression="zstd")': [{"name": "zstd", "configuration": {"level": 3}}],
}
for _cname, _level in (("lz4", 5), ("zstd", 1), ("zstd", 5)):
    for _shuffle in ("noshuffle", "shuffle", "bitshuffle"):
        _set = {"cname": _cname, "clevel": _level, "shuffle": _shuffle, "blocksize": 0}
        _name = f"blosc {_cname} {_level}, {_shuffle}"
        if (_cname, _level, _shuffle) == ("zstd", 5, "shuffle"):
            _name += ' (compression="blosc")'
        CODECS[_name] = [{"name": "blosc", "configuration": _set}]
ROUNDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    stored = np.load(parser.parse_args().file)
    given = {kind: joined(stored, kind) for kind in ("weights", "exp_avg", "exp_avg_sq")}
    arrays = {
        "weights, bfloat16": given["weights"].astype(ml_dtypes.bfloat16),
        "weights, float32": given["weights"],
        "first moment, float32": given["exp_avg"],
        "second moment, float32": given["exp_avg_sq"],
    }
    print("| codec | " + " | ".join(arrays) + " | write | read |")
    print("|---" * (len(arrays) + 3) + "|")
    for name, codecs in CODECS.items():
        found = [measure(array, codecs) for array in arrays.values()]
        plain = sum(array.nbytes for array in arrays.values()) / 1e9
        sizes = " | ".join(f"{size:.3f}" for size, *_ in found)
        speeds = [plain / sum(each[k] for each in found) for k in (1, 2)]
        print(f"| {name} | {sizes} | {speeds[0]:.2f} | {speeds[1]:.2f} |", flush=True)


def joined(stored: Any, kind: str) -> np.ndarray[Any, Any]:
    """All arrays of a kind, one after the other, as a save has them in chunks."""
    arrays = [stored[name].reshape(-1) for name in stored.files if name.split("/")[0] == kind]
    return np.concatenate(arrays)


def measure(array: np.ndarray[Any, Any], codecs: Any) -> tuple[float, float, float]:
    """Stored bytes in parts of the plain ones, and seconds of a write and of a read."""
    limited = {"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": 1}}
    context = ts.Context(limited)
    chunk = min(array.size, (8 << 20) // array.itemsize)
    completed = [
        {**c, "configuration": {**c["configuration"], "typesize": array.itemsize}}
        if c["name"] == "blosc"
        else c
        for c in codecs
    ]
    spec = {
        "driver": "zarr3",
        "kvstore": "memory://",
        "metadata": {
            "shape": list(array.shape),
            "data_type": ts.dtype(array.dtype).name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, *completed],
        },
    }
    store = ts.open(spec, context=context, create=True, delete_existing=True).result()
    seconds = [float("inf")] * 2
    for _ in range(ROUNDS):
        started = time.process_time()
        store.write(array).result()
        written = time.process_time()
        back = store.read().result()
        seconds = [
            min(seconds[0], written - started),
            min(seconds[1], time.process_time() - written),
        ]
        assert back.tobytes() == array.tobytes()
    kvstore = store.kvstore
    keys = [key for key in kvstore.list().result() if not key.endswith(b"zarr.json")]
    size = sum(len(kvstore.read(key).result().value) for key in keys)
    return size / array.nbytes, seconds[0], seconds[1]


if __name__ == "__main__":
    main()
