"""Exports: a checkpoint streams into another format, from any number of processes, at once."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import foreign, npy_folder
from support.reader_suite import arrays, same
from support.saving import files, in_job

import unickpt
from unickpt import (
    CheckpointCorrupt,
    CheckpointExists,
    ProcessFailed,
    Rules,
    SaveOptions,
    UnsupportedLeaf,
)
from unickpt.loading.ruled_view import through
from unickpt.loading.views import StoredView
from unickpt.tools.exporting import export

BUDGET = SaveOptions(budget_bytes=6000, fsync=False)
FAST = SaveOptions(fsync=False)


def save(path: Path, **more: Any) -> None:
    tree = {name.replace("/", "."): array for name, array in arrays().items()}
    unickpt.save(path, {**tree, "step": 7, **more}, options=FAST)


def export_npy(source: Path, to: Path, rules: Rules | None = None, **more: Any) -> None:
    stored = unickpt.open(source).reader
    view = StoredView(stored) if rules is None else through(stored, rules)
    with foreign.registered(npy_folder.NpyFolder()):
        export(view, to, npy_folder.NpyWriter(), more.pop("options", BUDGET), **more)


def test_what_is_exported_is_read_back(tmp_path: Path) -> None:
    save(tmp_path / "c")
    export_npy(tmp_path / "c", tmp_path / "npy")
    found = foreign.opened(tmp_path / "npy", npy_folder.NpyFolder())
    assert found is not None
    assert dict(found.values) == {"step": 7}
    for name, array in arrays().items():
        assert same(found[name.replace("/", ".")][...], array)
    assert sorted(os.listdir(tmp_path)) == ["c", "npy"]


def test_an_export_through_rules(tmp_path: Path) -> None:
    save(tmp_path / "c")
    dropped = "".join(
        f"\n{name} <-> drop" for name in ("layers.1.w", "scale", "flags", "none", "step")
    )
    rules = Rules.parse("layers.0.w [i o] <-> w.0 [o i]" + dropped)
    export_npy(tmp_path / "c", tmp_path / "npy", rules)
    (written,) = map(np.load, (tmp_path / "npy").glob("*.npy"))
    assert same(written, np.ascontiguousarray(arrays()["layers/0/w"].T))


def test_nothing_remains_of_a_damaged_source(tmp_path: Path) -> None:
    save(tmp_path / "c")
    largest = max((tmp_path / "c").rglob("d/*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        export_npy(tmp_path / "c", tmp_path / "above" / "npy")
    assert os.listdir(tmp_path) == ["c"]


def test_memory_is_bounded_by_the_budget(tmp_path: Path) -> None:
    budget, state = 6 << 20, {"w": np.ones((4000, 3000), np.float32)}
    unickpt.save(tmp_path / "c", state, options=SaveOptions(fsync=False, chunk_bytes=1 << 18))
    held: list[int] = []
    tracemalloc.start()
    try:
        export_npy(
            tmp_path / "c",
            tmp_path / "npy",
            options=SaveOptions(budget_bytes=budget, fsync=False),
            progress=lambda done, total: held.append(tracemalloc.get_traced_memory()[1]),
        )
    finally:
        tracemalloc.stop()
    assert len(held) >= 40, "slabs are much smaller than the array"
    assert max(held) < budget


# --- destinations ---------------------------------------------------------------------------------


def test_a_destination_in_use_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    for overwrite in (False, True):
        with pytest.raises(CheckpointExists, match="notes"):
            export_npy(tmp_path / "c", tmp_path / "notes", overwrite=overwrite)
    assert files(tmp_path / "notes") == ["diary.txt"]
    (tmp_path / "empty").mkdir()
    export_npy(tmp_path / "c", tmp_path / "empty")
    with pytest.raises(CheckpointExists, match="overwrite"):
        export_npy(tmp_path / "c", tmp_path / "empty")


def test_overwriting_replaces_the_whole_folder(tmp_path: Path) -> None:
    save(tmp_path / "c")
    unickpt.save(tmp_path / "small", {"x": np.arange(3)}, options=FAST)
    export_npy(tmp_path / "c", tmp_path / "npy")
    export_npy(tmp_path / "small", tmp_path / "npy", overwrite=True)
    assert files(tmp_path / "npy") == ["0.npy", "shapes.json"]
    assert sorted(os.listdir(tmp_path)) == ["c", "npy", "small"]


@pytest.mark.parametrize("url", ["memory://export/damaged", "local"])
def test_what_differs_when_read_back_is_an_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path / "c", {"w": np.arange(50.0), "step": 7, "v": np.ones(3)}, options=FAST)
    target = tmp_path / "st" if url == "local" else url
    from unickpt.tools import export_job

    as_it_is = export_job._bytes_of

    def damaged(array: np.ndarray) -> memoryview:
        data = bytearray(as_it_is(array))
        data[0] ^= len(data) == 400
        return memoryview(data)

    monkeypatch.setattr(export_job, "_bytes_of", damaged)
    rules = Rules.parse("step <-> drop\ndefault {leaf...} <-> {leaf...}")
    with pytest.raises(CheckpointCorrupt, match="'w': 1 elements differ"):
        unickpt.convert(tmp_path / "c", target, to="safetensors", rules=rules, options=FAST)


# --- several processes ----------------------------------------------------------------------------


def big(path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    state = {f"w{n}": rng.random((60 + n, 301), np.float32) for n in range(7)}
    state["large"] = rng.random((1000, 301), np.float32)
    unickpt.save(path, state, options=SaveOptions(fsync=False, chunk_bytes=1 << 14))
    return state


@pytest.mark.parametrize("target", ["local", "memory://export/several"])
@pytest.mark.parametrize("processes", [2, 5])
def test_what_is_written_does_not_depend_on_the_number_of_processes(
    processes: int, target: str, tmp_path: Path
) -> None:
    big(tmp_path / "c")
    options = {"to": "hf", "max_shard_size": 300_000}
    unickpt.convert(tmp_path / "c", tmp_path / "one", options=FAST, **options)
    to = tmp_path / "many" if target == "local" else f"{target}/{processes}"

    def run(group: unickpt.ProcessGroup) -> Any:
        mine = SaveOptions(group=group, timeout_s=20, fsync=False)
        return unickpt.convert(tmp_path / "c", to, options=mine, **options)

    reports = in_job(processes, run)
    total = sum(report.written_bytes for report in reports)
    assert total == reports[0].bytes
    if target == "local":
        assert max(r.written_bytes for r in reports) < 1.5 * total / processes
        names = files(tmp_path / "one")
        assert files(tmp_path / "many") == names
        for name in names:
            data = (tmp_path / "one" / name).read_bytes()
            assert (tmp_path / "many" / name).read_bytes() == data
        assert sorted(os.listdir(tmp_path)) == ["c", "many", "one"]
    else:
        assert unickpt.diff(tmp_path / "one", to).same


def test_all_processes_learn_of_an_error_and_nothing_remains(tmp_path: Path) -> None:
    big(tmp_path / "c")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").touch()

    def run(group: unickpt.ProcessGroup) -> Any:
        mine = SaveOptions(group=group, timeout_s=20, fsync=False)
        return unickpt.convert(tmp_path / "c", tmp_path / "used", to="hf", options=mine)

    first, *others = in_job(3, run)
    assert isinstance(first, CheckpointExists)
    assert all(isinstance(e, ProcessFailed) and "used" in str(e) for e in others)
    assert sorted(os.listdir(tmp_path)) == ["c", "used"]


def test_a_format_or_an_option_that_does_not_exist(tmp_path: Path) -> None:
    save(tmp_path / "c")
    with pytest.raises(ValueError, match="safetensors"):
        unickpt.convert(tmp_path / "c", tmp_path / "x", to="tensorflow")
    with pytest.raises(TypeError, match="max_shard_size"):
        unickpt.convert(tmp_path / "c", tmp_path / "x", to="hf", shard_size=3)
    with pytest.raises(TypeError, match="max_shard_size"):
        unickpt.convert(tmp_path / "c", tmp_path / "x", max_shard_size=3)
    with pytest.raises(ValueError, match="compression"):
        unickpt.convert(
            tmp_path / "c", tmp_path / "x", to="hf", options=SaveOptions(compression="zstd")
        )
    with pytest.raises(UnsupportedLeaf, match="step"):
        unickpt.convert(tmp_path / "c", tmp_path / "x", to="hf")
    assert os.listdir(tmp_path) == ["c"]


def test_object_storage_needs_files_that_fit_into_the_budget(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"w": np.ones(100_000)}, options=FAST)
    with pytest.raises(UnsupportedLeaf, match="budget_bytes=") as caught:
        unickpt.convert(
            tmp_path / "c",
            "memory://export/budget",
            to="safetensors",
            options=SaveOptions(budget_bytes=10_000),
        )
    needed = int(str(caught.value).partition("budget_bytes=")[2].partition(",")[0])
    unickpt.convert(
        tmp_path / "c",
        "memory://export/budget",
        to="safetensors",
        options=SaveOptions(budget_bytes=needed),
    )
