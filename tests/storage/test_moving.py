"""A checkpoint can be moved, copied, replaced, and read by TensorStore alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from support.saving import numbers, save_in_job, sound

import unickpt
from unickpt import SaveOptions
from unickpt.errors import CheckpointReplaced


def test_a_checkpoint_can_be_moved_and_copied(tmp_path: Path) -> None:
    old = tmp_path / "old"
    save_in_job(old, 2, lambda index: numbers(1))
    save_in_job(old, 2, lambda index: numbers(2), overwrite=True)
    copied = tmp_path / "elsewhere" / "copy"
    shutil.copytree(old, copied)
    moved = tmp_path / "moved"
    old.rename(moved)
    assert sound(copied, 2)
    assert sound(moved, 2)
    save_in_job(moved, 2, lambda index: numbers(3), overwrite=True)
    assert sound(moved, 3)
    assert sound(copied, 2)


def test_a_reader_keeps_what_it_opened_or_says_that_it_is_gone(tmp_path: Path) -> None:
    unickpt.save(tmp_path, numbers(1))
    opened = unickpt.open(tmp_path)
    unickpt.save(tmp_path, numbers(2), overwrite=True)
    with pytest.raises(CheckpointReplaced, match="another save replaced this checkpoint"):
        opened["large"][...]
    assert opened.values["seed"] == 1
    assert sound(tmp_path, 2)


def test_tensorstore_alone_reads_every_array(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tree = {
        "plain": rng.standard_normal((30, 40)),
        "nested": {"a b": {"100%|?#": np.arange(7)}},
        "half": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
        "bits": np.array([1, -2, 7], ml_dtypes.int4),
        "flag": np.array([True, False]),
        "complex": np.array([1 + 2j]),
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 4)),
    }
    for compression in (None, "zstd", "gzip", "blosc"):
        path = tmp_path / str(compression)
        unickpt.save(path, tree, options=SaveOptions(compression=compression, chunk_bytes=2000))
        moved = path.rename(tmp_path / f"moved {compression}")
        stored = unickpt.open(moved)
        for name in stored:
            found = ts.open(stored[name].url).result()
            assert found.read().result().tobytes() == stored[name][...].tobytes(), name
