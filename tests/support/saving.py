"""Jobs whose processes are threads: unickpt knows processes by their group alone."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unickpt
from unickpt import ProcessGroup, SaveOptions


def session() -> str:
    return secrets.token_hex(8)


def in_job(count: int, work: Callable[[ProcessGroup], Any], name: str | None = None) -> list[Any]:
    """Runs `work` in all processes of a job at once; what it returns or raises, by process."""
    name = name or session()
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = work(ProcessGroup(index, count, name))
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a process hangs"
    return results


def save_in_job(
    path: Path | str,
    count: int,
    tree: Callable[[int], Any],
    *,
    timeout_s: float = 20,
    **arguments: Any,
) -> list[Any]:
    """All processes of a job save `tree(index)`."""
    return in_job(
        count,
        lambda group: unickpt.save(
            path,
            tree(group.index),
            options=SaveOptions(group=group, timeout_s=timeout_s, fsync=False),
            **arguments,
        ),
    )


def numbers(seed: int) -> dict[str, Any]:
    """A tree that differs everywhere from that of every other seed."""
    rng = np.random.default_rng(seed)
    return {
        "large": rng.standard_normal((300, 200)).astype(np.float32),
        "small": rng.integers(0, 1 << 30, 5),
        "scalar": np.float64(seed + 0.5),
        "empty": np.zeros((0, 3), np.int8),
        "seed": seed,
        "text": f"seed {seed}",
    }


def same(tree: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two trees of `numbers` are equal bit for bit."""
    return tree.keys() == other.keys() and all(
        np.asarray(tree[k]).dtype == np.asarray(other[k]).dtype
        and np.asarray(tree[k]).tobytes() == np.asarray(other[k]).tobytes()
        for k in tree
    )


def files(folder: Path) -> list[str]:
    """Relative paths of all files below a folder."""
    return sorted(
        os.path.relpath(os.path.join(at, name), folder)
        for at, _, names in os.walk(folder)
        for name in names
    )


def damage(step: Path | str) -> None:
    """Flips a byte of the largest file of a step, which holds chunks."""
    largest = max((Path(step) / name for name in files(Path(step))), key=os.path.getsize)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))


def agreeing(count: int) -> Callable[[int], int]:
    """What takes the largest of the values that all threads of a job give."""
    barrier, values = threading.Barrier(count), list[int]()

    def agree(value: int) -> int:
        values.append(value)
        barrier.wait(30)
        largest = max(values)
        if barrier.wait(30) == 0:
            values.clear()
        barrier.wait(30)
        return largest

    return agree


def in_agreeing_job(count: int, work: Callable[[ProcessGroup], Any]) -> list[Any]:
    agree = agreeing(count)

    def run(group: ProcessGroup) -> Any:
        return work(ProcessGroup(group.index, group.count, group._session.name, agree))

    return in_job(count, run)


def sound(path: Path | str, seed: int) -> bool:
    """Whether a checkpoint holds the `numbers` of a seed, undamaged."""
    return same(unickpt.load(path), numbers(seed)) and unickpt.verify(path).ok
