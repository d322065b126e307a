"""Exports: a checkpoint streams into another format, from any number of processes, at once."""

from __future__ import annotations

import os
import pickle
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import TESTS, foreign, npy_folder
from support.forks import Forks
from support.saving import files, in_job

import unickpt
from unickpt import (
    CheckpointCorrupt,
    CheckpointExists,
    Rules,
    SaveConflict,
    SaveOptions,
    UnsupportedLeaf,
)
from unickpt.errors import CheckpointReplaced, ProcessFailed
from unickpt.frameworks.host_memory import HostBuffers
from unickpt.loading.views import StoredView
from unickpt.plugins.export import destinations
from unickpt.plugins.export import job as export_job
from unickpt.plugins.export.exporting import export
from unickpt.rules.view import through
from unickpt.testing.readers import arrays, same

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


class CountedBuffers(HostBuffers):
    """Knows how much was in use at once."""

    used = most = 0

    def take(self, nbytes: int) -> Any:
        CountedBuffers.used += nbytes
        CountedBuffers.most = max(self.most, self.used)
        return super().take(nbytes)

    def give(self, buffer: Any) -> None:
        CountedBuffers.used -= len(buffer)
        super().give(buffer)


def test_memory_is_bounded_by_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_job, "HostBuffers", CountedBuffers)
    state = {"w": np.ones((1000, 3000), np.float32), **{f"b{n}": np.ones(n) for n in range(99)}}
    unickpt.save(tmp_path / "c", state, options=SaveOptions(fsync=False, chunk_bytes=1 << 18))
    budget = 3 << 20
    for to in ("npz", "dcp", "orbax", "hf"):
        CountedBuffers.used = CountedBuffers.most = 0
        unickpt.convert(
            tmp_path / "c",
            tmp_path / to,
            to=to,
            options=SaveOptions(budget_bytes=budget, fsync=False),
        )
        # Each slab is a sixth; usually two are in use, but the first may be written already.
        assert budget // 8 < CountedBuffers.most <= budget // 3


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


@pytest.mark.parametrize("target", ["local", "memory://export/files"])
def test_a_single_file_is_refused_or_replaced(target: str, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", {"w": np.arange(5)}, options=FAST)
    unickpt.save(tmp_path / "b", {"w": np.arange(7.0)}, options=FAST)
    above = str(tmp_path / "files") if target == "local" else target
    options: dict[str, Any] = {"to": "npz", "options": FAST}
    report = unickpt.convert(tmp_path / "a", f"{above}/x.npz", **options)
    assert report.url == f"{above}/x.npz"
    with pytest.raises(CheckpointExists, match=r"x\.npz"):
        unickpt.convert(tmp_path / "b", f"{above}/x.npz", **options)
    assert same(unickpt.open(above)["w"][...], np.arange(5))
    unickpt.convert(tmp_path / "b", f"{above}/x.npz", overwrite=True, **options)
    assert same(unickpt.open(above)["w"][...], np.arange(7.0))
    if target == "local":
        assert files(tmp_path / "files") == ["x.npz"]


def test_the_source_is_not_replaced_by_its_own_export(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "run" / "a", {"w": np.arange(5)}, options=FAST)
    for path in (tmp_path / "run" / "a", tmp_path / "run"):
        with pytest.raises(CheckpointExists, match="contains the source"):
            unickpt.convert(tmp_path / "run" / "a", path, to="hf", overwrite=True, options=FAST)
    assert unickpt.verify(tmp_path / "run" / "a").ok


@pytest.mark.parametrize("url", ["memory://export/damaged", "local"])
def test_what_differs_when_read_back_is_an_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path / "c", {"w": np.arange(50.0), "step": 7, "v": np.ones(3)}, options=FAST)
    target = tmp_path / "st" if url == "local" else url
    as_it_is = export_job._bytes_of

    def damaged(array: np.ndarray) -> memoryview:
        data = bytearray(as_it_is(array))
        data[0] ^= len(data) == 400
        return memoryview(data)

    monkeypatch.setattr(export_job, "_bytes_of", damaged)
    rules = Rules.parse("step <-> drop\ndefault {leaf...} <-> {leaf...}")
    with pytest.raises(CheckpointCorrupt, match="'w': 1 elements differ"):
        unickpt.convert(tmp_path / "c", target, to="safetensors", rules=rules, options=FAST)


@pytest.mark.parametrize(
    ("to", "last"),
    [("hf", "model.safetensors.index.json"), ("dcp", ".metadata"), ("orbax", "_METADATA")],
)
def test_on_object_storage_what_readers_look_for_comes_last(
    to: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big(tmp_path / "c")
    url, budget = f"memory://export/order-{to}", 12 << 20
    real, written = destinations.ObjectDestination.opened, list[str]()

    def opened(self: Any, file: Any) -> Any:
        written.append(file.name)
        if len(written) > 1 and (to, file.name) != ("hf", last):  # all files are there, and say so
            with pytest.raises((unickpt.CheckpointNotFound, CheckpointCorrupt)):
                unickpt.open(url)
        return real(self, file)

    monkeypatch.setattr(destinations.ObjectDestination, "opened", opened)
    options: dict[str, Any] = {"max_shard_size": 300_000} if to == "hf" else {}
    unickpt.convert(tmp_path / "c", url, to=to, options=SaveOptions(budget_bytes=budget), **options)
    assert written[-1] == last
    assert unickpt.diff(tmp_path / "c", url).same


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


def test_processes_that_open_different_sources_write_no_mixture(tmp_path: Path) -> None:
    for number in range(2):
        unickpt.save(tmp_path / f"{number}", {"x": np.full((300, 200), float(number))})

    def run(group: unickpt.ProcessGroup) -> Any:
        mine = SaveOptions(group=group, timeout_s=20, fsync=False)
        source, to = tmp_path / f"{group.index}", tmp_path / "to"
        return unickpt.convert(source, to, to="hf", verify=False, options=mine)

    first, second = in_job(2, run)
    assert isinstance(first, CheckpointReplaced)
    assert isinstance(second, ProcessFailed)
    assert f"{tmp_path / '0'} and {tmp_path / '1'}" in str(second)
    assert not (tmp_path / "to").exists()


def test_a_session_that_was_used_before_is_refused(tmp_path: Path) -> None:
    """A killed attempt left notes that say that processes are done."""
    big(tmp_path / "c")
    notes = tmp_path / ".out.again-000000.notes" / "notes"
    notes.mkdir(parents=True)
    (notes / "begin").touch()
    (notes / "done-00001").write_text("{}")

    def run(group: unickpt.ProcessGroup) -> Any:
        mine = SaveOptions(group=group, timeout_s=20, fsync=False)
        return unickpt.convert(tmp_path / "c", tmp_path / "out", to="hf", options=mine)

    first, second = in_job(2, run, "again")
    assert isinstance(first, SaveConflict)
    assert isinstance(second, ProcessFailed)
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize(
    ("to", "dtype", "helps"),
    [
        ("npz", ml_dtypes.bfloat16, "float32"), ("npz", ml_dtypes.int4, "int8"),
        ("hf", ml_dtypes.int4, "int8"), ("safetensors", np.complex128, "complex64"),
        ("torch", ml_dtypes.float8_e3m4, "float32"), ("dcp", ml_dtypes.int2, "int8"),
        ("orbax", "M8[s]", ""), ("dcp", "M8[s]", ""),
    ],
)  # fmt: skip
def test_the_advice_for_a_dtype_that_a_format_lacks_helps(
    to: str, dtype: Any, helps: str, tmp_path: Path
) -> None:
    state = {"w": np.ones(3).astype(dtype), "v": np.ones(2, np.float32)}
    unickpt.save(tmp_path / "c", state, options=FAST)
    told = f"`w <-> w as {helps}`" if helps else "`w <-> drop`"
    with pytest.raises(UnsupportedLeaf, match=re.escape(told)) as caught:
        unickpt.convert(tmp_path / "c", tmp_path / "x", to=to, options=FAST)
    rules = Rules.parse("\n".join(re.findall("`([^`]*)`", str(caught.value))))
    unickpt.convert(tmp_path / "c", tmp_path / "x", to=to, rules=rules, options=FAST)
    found = unickpt.open(tmp_path / "x")
    assert found["v"][...].tolist() == [1, 1]
    assert (str(found["w"].dtype) if helps else "") == helps


def test_a_part_of_a_training_step_is_suggested_first(tmp_path: Path) -> None:
    state = {"model": {"w": np.ones(2), "b": np.ones(1)}, "ema": {"w": np.ones(2)}}
    rest = {"optim": {"mu": np.ones(2), "lr": 0.1}, "rng": unickpt.PerProcess(1), "step": 3}
    unickpt.save(tmp_path / "c", state)
    unickpt.save(tmp_path / "step", {**state, **rest})
    with pytest.raises(UnsupportedLeaf) as refused:
        unickpt.convert(tmp_path / "step", tmp_path / "hf", to="hf")
    first, *others = str(refused.value).splitlines()
    assert "pass under='model' (2 arrays), or under='ema' (1 array)" in first
    assert "--under model" in first
    assert "'rng' differs by process" in others[0]
    unickpt.convert(tmp_path / "step", tmp_path / "hf", to="hf", under="model")
    assert set(unickpt.load(tmp_path / "hf")) == {"w", "b"}
    with pytest.raises(UnsupportedLeaf, match=r"^the format 'hf' cannot hold"):
        unickpt.convert(tmp_path / "step", tmp_path / "no", to="hf", under="optim")


def test_objects_of_unknown_classes_must_be_dropped(tmp_path: Path) -> None:
    args = unickpt.Opaque("fractions.Fraction", pickle.dumps(Fraction(1, 3)))
    unickpt.save(tmp_path / "c", {"w": np.ones(2), "args": args}, options=FAST)
    for to in ("torch", "dcp", "orbax", "hf"):
        with pytest.raises(UnsupportedLeaf, match="args <-> drop"):
            unickpt.convert(tmp_path / "c", tmp_path / "x", to=to, options=FAST)
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


KILLED = f"""
import sys
sys.path.insert(0, {TESTS!r})
from support.dying import die_at
import unickpt
step, when, source, target, to, index, count = ARGS
if index == 0:
    die_at(step, when)
group = unickpt.ProcessGroup(index, count, "killed")
options = unickpt.SaveOptions(group=group, fsync=False, timeout_s=0.5, budget_bytes=1 << 20)
unickpt.convert(source, target, to=to, options=options)
"""
STEPS = [
    ("plugins.export.job.ExportJob:_read_slab", "after"),
    ("plugins.export.job.ExportJob:_write_texts", "before"),
    ("plugins.export.destinations.LocalDestination:_replace_folder", "before"),
    ("plugins.export.destinations.LocalDestination:_replace_folder", "after"),
]


@pytest.mark.parametrize(
    ("to", "count"), [("hf", 1), ("hf", 2), ("dcp", 1), ("orbax", 1), ("torch", 1), ("npz", 1)]
)
def test_a_killed_export_leaves_nothing_that_reads_as_a_checkpoint(
    to: str, count: int, tmp_path: Path, forks: Forks
) -> None:
    source = tmp_path / "c"
    big(source)
    for number, (step, when) in enumerate(STEPS):
        target = tmp_path / str(number)
        arguments = (step, when, str(source), str(target), to)
        pids = [forks.start(KILLED, *arguments, index, count) for index in range(count)]
        first, *others = forks.wait_all(pids)
        assert first.code == -9, first
        assert all("SaveTimeout" in other.out for other in others)
        if (step, when) == STEPS[-1]:
            assert unickpt.open(target).nbytes == unickpt.open(source).nbytes
            continue
        with pytest.raises(unickpt.CheckpointNotFound):
            unickpt.open(target)
        unickpt.convert(source, target, to=to, options=FAST)


SUFFIXES = [
    ("x.safetensors", "safetensors"), ("x.npz", "npz"), ("x.pt", "torch"), ("x.pth", "torch"),
    ("x.bin", "torch"), ("X.SafeTensors", "safetensors"), ("x.pth.tar", "torch"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "format"), SUFFIXES)
def test_the_suffix_of_the_destination_chooses_the_format(
    name: str, format: str, tmp_path: Path
) -> None:
    state = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    unickpt.save(tmp_path / "c", state, options=FAST)
    unickpt.convert(tmp_path / "c", tmp_path / name, options=FAST)
    assert (tmp_path / name).is_file()
    written = unickpt.open(tmp_path / name)
    assert written.reader.format == format
    assert written["w"][...].tobytes() == state["w"].tobytes()
    unickpt.convert(tmp_path / "c", tmp_path / name, to=format, overwrite=True, options=FAST)


def test_a_suffix_that_does_not_fit_the_format_is_an_error(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"w": np.ones(3)}, options=FAST)
    for name, to, words in [
        ("x.gguf", None, r"does not write \.gguf files.*\.safetensors"),
        ("x.h5", None, r"does not write \.h5 files"),
        ("x.ckpt", None, r"'torch' or 'lightning'; pass to="),
        ("x.npz", "safetensors", r"\.npz does not fit the format 'safetensors'"),
        ("x.safetensors", "hf", r"\.safetensors does not fit the format 'hf'"),
        ("x.pt", "unickpt", r"unickpt's own format, which is a folder"),
        ("x.onnx", "torch", r"\.onnx does not fit"),
    ]:
        with pytest.raises(ValueError, match=words):
            unickpt.convert(tmp_path / "c", tmp_path / name, to=to, options=FAST)
        assert not (tmp_path / name).exists()
    unickpt.convert(tmp_path / "c", tmp_path / "x.ckpt", to="torch", options=FAST)
    assert (tmp_path / "x.ckpt").is_file()
    unickpt.convert(tmp_path / "c", tmp_path / "step_2.5", options=FAST)
    assert unickpt.open(tmp_path / "step_2.5").reader.format == "unickpt"


NESTED = {
    "model": {"w": np.ones((3, 2), np.float32), "__b": np.zeros(2, np.float32)},
    "layers": [{"w": np.ones(2)}, {"w": np.zeros(2)}],
    "norm": np.ones(4, np.float16),
}


@pytest.mark.parametrize("to", ["safetensors", "hf", "npz", "torch", "dcp", "orbax"])
@pytest.mark.parametrize("slashes", [False, True])
def test_a_checkpoint_is_the_same_as_its_own_export(to: str, slashes: bool, tmp_path: Path) -> None:
    state = {**NESTED, **({"a/b": np.ones(3)} if slashes else {})}
    unickpt.save(tmp_path / "c", state, options=FAST)
    unickpt.convert(tmp_path / "c", tmp_path / "x", to=to, options=FAST)
    report = unickpt.diff(tmp_path / "c", tmp_path / "x")
    if slashes and to in ("safetensors", "hf", "npz"):
        assert not report.same  # the file does not tell which slashes are those of keys
    else:
        assert report.same, report.differences
        unickpt.convert(tmp_path / "x", tmp_path / "back", options=FAST)
        assert sorted(unickpt.open(tmp_path / "back")) == sorted(unickpt.open(tmp_path / "c"))


def test_names_of_one_file_that_cannot_be_containers_stay_flat(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.ones(2), "a/b": np.ones(3)}, tmp_path / "x", {"unickpt.separator": "/"})
    assert sorted(unickpt.open(tmp_path / "x")) == ["a", "a%2Fb"]


def test_the_parts_that_can_be_exported_are_found_at_any_depth(tmp_path: Path) -> None:
    state = {
        "model": {"state_dict": {"w": np.ones(2), "b": np.ones(2)}, "args": {"a": 1, "b": 2}},
        "ema": {"x": {"w": np.ones(3)}, "decay": 0.5},
        "optimizer": {"state": [np.ones(2)] * 9, "lr": 0.1},
        "epoch": 1,
    }
    unickpt.save(tmp_path / "c", state, options=FAST)
    with pytest.raises(UnsupportedLeaf) as caught:
        unickpt.convert(tmp_path / "c", tmp_path / "x.safetensors", options=FAST)
    told = str(caught.value)
    assert "under='model/state_dict' (2 arrays), or under='ema/x' (1 array)" in told
    assert "--under model/state_dict" in told
    unickpt.convert(
        tmp_path / "c", tmp_path / "x.safetensors", under="model/state_dict", options=FAST
    )
    assert sorted(unickpt.open(tmp_path / "x.safetensors")) == ["b", "w"]


def test_an_object_that_cannot_be_exported_is_named_with_its_class(tmp_path: Path) -> None:
    state = {"w": np.ones(2), "conf": unickpt.Opaque("my.Config", pickle.dumps(1))}
    unickpt.save(tmp_path / "c", state, options=FAST)
    with pytest.raises(UnsupportedLeaf, match=r"'conf' is an object of the class my\.Config"):
        unickpt.convert(tmp_path / "c", tmp_path / "x.pt", options=FAST)
