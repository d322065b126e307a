"""Exports: a checkpoint streams into another format, in boxes that fit the budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import npy_folder
from support.reader_suite import arrays, same

import unickpt
from unickpt import CheckpointCorrupt, LoadOptions, Rules
from unickpt.foreign.files import Files
from unickpt.storage.paths import resolve
from unickpt.tools.exporting import export

BUDGET = LoadOptions(budget_bytes=1000)


def save(path: Path) -> None:
    tree = {name.replace("/", "."): array for name, array in arrays().items() if array.size}
    unickpt.save(path, {**tree, "step": 7}, options=unickpt.SaveOptions(fsync=False))


def test_what_is_exported_is_read_back(tmp_path: Path) -> None:
    save(tmp_path / "c")
    writer = npy_folder.NpyWriter(tmp_path / "npy")
    export(tmp_path / "c", writer, options=BUDGET)
    assert 0 < writer.largest <= 1000, "no box is larger than the budget"
    opened = npy_folder.NpyFolder().open(Files(resolve(tmp_path / "npy")), {})
    assert opened is not None
    found = unickpt.Checkpoint(opened)
    assert dict(found.values) == {"step": 7}
    for name, array in arrays().items():
        if array.size:
            assert same(found[name.replace("/", ".")][...], array)


def test_an_export_through_rules(tmp_path: Path) -> None:
    save(tmp_path / "c")
    dropped = "".join(f"\n{name} <-> drop" for name in ("layers.1.w", "scale", "flags", "step"))
    rules = Rules.parse("layers.0.w [i o] <-> w.0 [o i]" + dropped)
    export(tmp_path / "c", npy_folder.NpyWriter(tmp_path / "npy"), rules=rules, options=BUDGET)
    expected = arrays()["layers/0/w"].T
    assert any(
        array.shape == expected.shape and (array == expected).all()
        for array in map(np.load, (tmp_path / "npy").glob("*.npy"))
    )


def test_nothing_remains_of_a_damaged_source(tmp_path: Path) -> None:
    save(tmp_path / "c")
    largest = max((tmp_path / "c").rglob("d/*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        export(tmp_path / "c", npy_folder.NpyWriter(tmp_path / "npy"))
    assert not (tmp_path / "npy").exists()
