"""How much saves with partial experts write, with links and by borrowing (docs/experts.md).

python benchmarks/partial_borrowed.py
"""

from __future__ import annotations

import secrets
import tempfile

import numpy as np

from unickpt import Checkpointer, Experts, SaveOptions

_ELEMENTS, _STEPS = 4096, 24
_CASES = [(8, 1, 4096), (8, 2, 4096), (16, 2, 4096), (64, 8, 32768)]


def fraction(root: str, experts: int, k: int, dense: int) -> float:
    """The mean part of the state that a save after the first one writes."""
    written = []
    options = SaveOptions(chunk_bytes=1 << 14, fsync=False)
    with Checkpointer(
        root, experts=Experts({"experts/{x}/**": k}), options=options, keep_last=1
    ) as run:
        for step in range(_STEPS):
            state = {
                "dense": np.full(dense, float(step)),
                "experts": {
                    str(x): {"up": np.full(_ELEMENTS, step * 100.0 + x)} for x in range(experts)
                },
            }
            report = run.save(step, state).result()
            written.append(report.written_bytes / report.bytes)
    return float(np.mean(written[1:]))


def main() -> None:
    print("experts  k  dense  links  borrowed")
    for experts, k, dense in _CASES:
        with tempfile.TemporaryDirectory() as folder:
            linked = fraction(f"{folder}/run", experts, k, dense)
        borrowed = fraction(f"memory://{secrets.token_hex(6)}", experts, k, dense)
        part = dense / (dense + experts * _ELEMENTS)
        print(f"{experts:7} {k:2} {part:6.0%} {linked:6.0%} {borrowed:9.0%}")


if __name__ == "__main__":
    main()
