"""What quantising trained weights and moments costs: bytes, errors, time, and training afterwards.

    python benchmarks/trained.py state.npz       # once
    python benchmarks/quantize.py state.npz [--steps 30]

Prints, for each code, bits per element, the error in relation to the norm of the arrays, with the
range search and without it, GB/s of one thread (time of the processor), and the mean loss of the
steps after a restart from such a checkpoint.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from trained import Training

from unickpt.plugins.quantize import codes as kinds
from unickpt.plugins.quantize import quantized_chunk, range_search

Arrays = dict[str, np.ndarray[Any, Any]]
MOMENTS = ("exp_avg", "exp_avg_sq")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=30, help="after a restart")
    options = parser.parse_args()
    stored = np.load(options.file)
    state: Arrays = {name: stored[name] for name in stored.files}
    print("| arrays | codes | bits | error | without search | write | read |")
    print("|---|---|---|---|---|---|---|")
    for kind in ("weights", *MOMENTS):
        for codes in kinds.NAMES:
            print(row(state, kind, codes), flush=True)
    print("\n| quantised | codes | loss after a restart |\n|---|---|---|")
    print(f"| nothing | | {after(state, options.steps):.4f} |", flush=True)
    for chosen in (("weights",), ("exp_avg",), ("exp_avg_sq",), MOMENTS):
        for codes in kinds.NAMES:
            found = {
                name: through(x, codes)[0] if name.split("/")[0] in chosen else x
                for name, x in state.items()
            }
            loss = after(found, options.steps)
            print(f"| {', '.join(chosen)} | {codes} | {loss:.4f} |", flush=True)


def row(state: Arrays, kind: str, codes: str) -> str:
    arrays = [x for name, x in state.items() if name.split("/")[0] == kind]
    found = [through(x, codes) for x in arrays]
    bits = 8 * sum(each[1] for each in found) / sum(x.size for x in arrays)
    error, plain = norm(arrays, found), ""
    if codes in kinds.BITS and kinds.BITS[codes] in range_search.BINS:
        kept, range_search.BINS = range_search.BINS, {}
        plain = f"{norm(arrays, [through(x, codes) for x in arrays]):.4f}"
        range_search.BINS = kept
    size = sum(x.nbytes for x in arrays) / 1e9
    speeds = [size / sum(each[k] for each in found) for k in (2, 3)]
    cells = kind, codes, f"{bits:.2f}", f"{error:.4f}", plain, *(f"{x:.2f}" for x in speeds)
    return f"| {' | '.join(cells)} |"


def through(x: np.ndarray[Any, Any], codes: str) -> tuple[Any, int, float, float]:
    """What is loaded of an array, its stored bytes, and the seconds of both ways."""
    out = np.empty_like(x)
    started = time.process_time()
    encoded = quantized_chunk.encode(x, codes)
    middle = time.process_time()
    quantized_chunk.decode(encoded.data, out, codes)
    return out, encoded.data.nbytes, middle - started, time.process_time() - middle


def norm(arrays: list[Any], found: list[Any]) -> float:
    """The norm of all errors, in relation to that of the arrays."""
    apart = sum(
        float(((y[0] - x).astype(float) ** 2).sum()) for x, y in zip(arrays, found, strict=True)
    )
    return float(np.sqrt(apart / sum(float((x.astype(float) ** 2).sum()) for x in arrays)))


def after(state: Arrays, steps: int) -> float:
    """The mean loss of some steps that continue from a state."""
    training = Training(state["text"].tobytes())
    training.unpack(state)
    return sum(training.step(10**6 + number) for number in range(steps)) / steps


if __name__ == "__main__":
    main()
