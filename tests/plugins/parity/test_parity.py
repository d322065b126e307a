"""Lost and damaged files of checkpoints with parity."""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS, s3_server
from support.dying import start_job
from support.forks import Forks
from support.saving import in_job
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, Checkpointer, CheckpointNotFound, SaveOptions
from unickpt.cli.app import app
from unickpt.extend import Failed
from unickpt.plugins.parity import files
from unickpt.storage import paths

FAST: dict[str, Any] = {"fsync": False, "chunk_bytes": 4096}


def state_of(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        **{f"w{n}": rng.standard_normal((32, 64)).astype(np.float32) for n in range(8)},
        "odd": rng.integers(0, 256, 5001, dtype=np.uint8),
        "small": rng.integers(0, 9, 4),
        "own": unickpt.PerProcess({"rng": rng.integers(0, 256, 900, dtype=np.uint8)}),
    }


def save(path: Path | str, parity: Any = (4, 1), seed: int = 0, **more: Any) -> None:
    options = SaveOptions(parity=parity, **{**FAST, **more})
    unickpt.save(path, state_of(seed), options=options, overwrite=True)


def is_equal(path: Path | str, seed: int = 0) -> bool:
    loaded, state = unickpt.load(path), state_of(seed)
    (own,) = loaded.pop("own").values
    return own["rng"].tobytes() == state.pop("own").value["rng"].tobytes() and all(
        np.asarray(loaded[name]).tobytes() == np.asarray(state[name]).tobytes() for name in state
    )


def files_of(path: Path, *kinds: str) -> list[Path]:
    """Its files in folders of these names; by default all but the manifest."""
    every = sorted(file for file in (path / "processes").rglob("*") if file.is_file())
    return [file for file in every if not kinds or file.parent.name in kinds]


def remove(file: Path) -> None:
    file.unlink()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 0x10
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


DAMAGES: list[Callable[[Path], None]] = [remove, flip, cut]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("parity", "more"),
    [
        ((4, 1), {}),
        ((3, 2), {}),
        ((8, 1), {"compression": "zstd"}),
        ((4, 1), {"compression": "auto"}),
    ],
)
def test_each_file_that_is_lost_comes_back(
    path: Path, damage: Callable[[Path], None], parity: tuple[int, int], more: dict[str, Any]
) -> None:
    save(path, parity, **more)
    originals = {file: file.read_bytes() for file in files_of(path)}
    assert len(files_of(path, "d")) >= parity[0]
    for file, content in originals.items():
        damage(file)
        assert is_equal(path), file
        assert unickpt.repair(path).repaired == (str(file.relative_to(path)),)
        assert file.read_bytes() == content
    assert {file: file.read_bytes() for file in files_of(path)} == originals
    assert unickpt.verify(path).ok


def test_a_read_names_the_file_and_the_way_out(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(path)
    file = files_of(path, "d")[0]
    remove(file)
    assert is_equal(path)
    assert len(caplog.messages) == 1
    assert f"the file {file.relative_to(path)} is restored from parity" in caplog.text
    assert f"`unickpt repair {path}` rewrites it" in caplog.text


def test_lazy_reads_and_parts_are_restored(path: Path) -> None:
    save(path)
    for file in files_of(path, "d"):
        checkpoint, content = unickpt.open(path), file.read_bytes()
        remove(file)
        for name in checkpoint:
            assert np.array_equal(checkpoint[name][...], state_of()[name])
        file.write_bytes(content)


def test_without_verification_a_missing_file_is_restored(path: Path) -> None:
    save(path)
    remove(files_of(path, "d")[1])
    loaded = unickpt.load(path, options=unickpt.LoadOptions(verify=False))
    assert np.array_equal(loaded["w0"], state_of()["w0"])


@pytest.mark.parametrize("parity", [(4, 1), (4, 2), (16, 2)])
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 10))]
)
def test_random_losses_are_restored_or_are_errors(
    path: Path, tmp_path: Path, parity: tuple[int, int], seed: int
) -> None:
    # In `make soak` 300 losses that parity covers, and 150 beyond it; in `make test` 90 and 45.
    save(path, parity)
    assert len(files_of(path, "d")) >= parity[0]
    chance = random.Random(f"{parity} {seed}")
    every = files_of(path, "d", "p")
    every = [file for file in every if file.name != "groups" and "root" not in file.parts]
    originals = {file: file.read_bytes() for file in every}
    from unickpt.plugins.parity.groups import folders_of

    folders = folders_of(paths.resolve(path), paths.context())
    groups = [
        [path / group.name(facts[0]) for facts in (*group.table.files, *group.table.parity)]
        for folder in folders
        for group in folder.groups
        if "root" not in folder.prefix
    ]
    assert sorted(file for group in groups for file in group) == every
    for _ in range(10):
        for group in groups:
            for file in chance.sample(group, chance.randint(0, parity[1])):
                chance.choice(DAMAGES)(file)
        assert is_equal(path)
        for file, content in originals.items():
            file.write_bytes(content)
    for _ in range(5):
        group = chance.choice([group for group in groups if len(group) > 2 * parity[1]])
        lost = [chance.choice([file for file in group if file.parent.name == "d"])]
        lost += chance.sample([file for file in group if file not in lost], parity[1])
        for file in lost:
            chance.choice(DAMAGES)(file)
        with pytest.raises(CheckpointCorrupt) as caught:
            unickpt.load(path)
        assert all(str(file.relative_to(path)) in str(caught.value) for file in lost)
        for file, content in originals.items():
            file.write_bytes(content)


def test_what_is_beyond_parity_is_named(path: Path) -> None:
    save(path)
    assert len(files_of(path, "d")) > 4
    from unickpt.plugins.parity.groups import folders_of

    folder = folders_of(paths.resolve(path), paths.context())[0]
    group, other = sorted(folder.groups, key=lambda group: -len(group.table.files))[:2]
    lost = [path / group.name(facts[0]) for facts in group.table.files[:2]]
    restorable = path / other.name(other.table.files[0][0])
    content = restorable.read_bytes()
    for file in (*lost, restorable):
        remove(file)
    with pytest.raises(CheckpointCorrupt, match="2 files of a parity group of 4 \\+ 1") as caught:
        unickpt.repair(path)
    named = re.findall(r"'(w\d|odd)'", str(caught.value))
    assert named
    assert all(str(file.relative_to(path)) in str(caught.value) for file in lost)
    assert restorable.read_bytes() == content
    reasons = [damage.reason for damage in unickpt.verify(path).damage if not damage.box]
    assert any("parity restores 1" in reason for reason in reasons)
    bad = {damage.array for damage in unickpt.verify(path).damage if damage.box}
    assert bad == set(named)
    result = CliRunner().invoke(app, ["repair", str(path)])
    assert result.exit_code == 2


def test_verify_and_repair_on_the_command_line(path: Path) -> None:
    save(path)
    runner, file = CliRunner(), files_of(path, "d")[0]
    flip(file)
    result = runner.invoke(app, ["verify", str(path), "--json"])
    assert result.exit_code == 1
    name = str(file.relative_to(path))
    assert f"`unickpt repair {path}` restores {name} (its bytes changed)" in result.output
    result = runner.invoke(app, ["repair", str(path)])
    assert result.exit_code == 0, result.output
    assert f"repaired {name}" in result.output
    assert runner.invoke(app, ["verify", str(path)]).exit_code == 0
    assert '"repaired": []' in runner.invoke(app, ["repair", str(path), "--json"]).output


def test_a_damaged_list_and_parity_file_leave_a_group_unknown(path: Path) -> None:
    save(path)
    (lists,) = [
        file for file in files_of(path, "p") if "00000" in file.parts and file.name == "groups"
    ]
    parity = next(file for file in files_of(path, "p") if "00000" in file.parts and file != lists)
    remove(lists)
    cut(parity)
    assert is_equal(path)
    assert unickpt.repair(path).unprotected == (str(parity.relative_to(path)),)
    assert not unickpt.verify(path).ok


def test_a_checkpoint_without_parity_needs_no_repair(path: Path, tmp_path: Path) -> None:
    save(path, None)
    assert files_of(path, "p") == []
    report = unickpt.repair(path)
    assert (report.files, report.repaired) == (0, ())
    remove(files_of(path, "d")[0])
    with pytest.raises(CheckpointCorrupt, match="no file"):
        unickpt.load(path)
    with pytest.raises(CheckpointNotFound):
        unickpt.repair(tmp_path / "nothing")


@pytest.mark.parametrize("value", [(0, 1), (8, 3), (256, 1)])
def test_numbers_out_of_range_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="1 to 255 data files"):
        SaveOptions(parity=value)


@pytest.mark.parametrize("value", [8, (8,), ("8", 1), (8, 1.0), (True, 1)])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="two numbers"):
        SaveOptions(parity=value)


def test_the_index_does_not_need_the_feature(path: Path) -> None:
    save(path)
    assert unickpt.open(path).index.features == []


def test_extra_bytes_are_an_eighth(tmp_path: Path) -> None:
    state = {f"w{n}": np.full(16 << 10, n, np.float32) for n in range(64)}
    for name, parity in {"plain": None, "parity": (8, 1)}.items():
        options = SaveOptions(parity=parity, fsync=False, chunk_bytes=64 << 10)
        unickpt.save(tmp_path / name, state, options=options)
    data = sum(file.stat().st_size for file in files_of(tmp_path / "parity", "d"))
    extra = sum(file.stat().st_size for file in files_of(tmp_path / "parity", "p"))
    assert extra / data < 0.15


def test_asynchronous_saves_have_parity(path: Path) -> None:
    options = SaveOptions(parity=(4, 2), **FAST)
    unickpt.save_async(path, state_of(), options=options).result()
    for file in files_of(path, "d")[:2]:
        remove(file)
    assert is_equal(path)


@pytest.mark.parametrize("parity", [(3, 1), (3, 2)])
def test_data_and_lists_are_flushed_and_sums_are_not_waited_for(
    path: Path, parity: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync = set[str](), os.fsync

    def noted(handle: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{handle}").removesuffix(".repair"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    save(path, parity, fsync=True)
    added = files_of(path, "p")
    assert len({file.parent for file in added}) > 1
    assert {file.name for file in added if str(file) in flushed} == {"groups"}
    assert {str(file.parent) for file in added} <= flushed
    assert {str(file) for file in files_of(path, "d")} <= flushed


@pytest.mark.parametrize("what", ["empty", "zeros"])
def test_sums_that_a_power_failure_lost_are_repaired(path: Path, what: str) -> None:
    save(path)
    sums = [file for file in files_of(path, "p") if file.name != "groups"]
    before = {file: file.read_bytes() for file in sums}
    for file, data in before.items():
        file.write_bytes(b"" if what == "empty" else bytes(len(data)))
    assert is_equal(path)
    result = CliRunner().invoke(app, ["verify", str(path)])
    assert result.exit_code == 1
    assert f"`unickpt repair {path}` restores {sums[0].relative_to(path)}" in result.output
    assert set(unickpt.repair(path).repaired) == {str(file.relative_to(path)) for file in sums}
    assert {file: file.read_bytes() for file in sums} == before
    assert unickpt.verify(path).ok


def test_a_save_that_fails_leaves_no_file_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, fsync=True)
    count, real = len(os.listdir("/proc/self/fd")), files.FolderFiles.write
    calls = list[str]()

    def write(self: files.FolderFiles, name: str, *arguments: Any, **more: Any) -> None:
        real(self, name, *arguments, **more)
        calls.append(name)
        if len(calls) == 2:
            raise Failed("the disk is full", errno.ENOSPC)

    monkeypatch.setattr(files.FolderFiles, "write", write)
    with pytest.raises(unickpt.UnickptError):
        save(path, fsync=True)
    assert len(calls) >= 2
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= count


def test_a_job_of_several_processes(path: Path) -> None:
    def tree(index: int) -> dict[str, Any]:
        return {**state_of(), "own": unickpt.PerProcess({"rng": np.full(900, index)})}

    def work(group: unickpt.ProcessGroup) -> Any:
        options = SaveOptions(parity=(3, 1), group=group, timeout_s=20, **FAST)
        return unickpt.save(path, tree(group.index), options=options)

    assert not [result for result in in_job(3, work) if isinstance(result, BaseException)]
    for process in range(3):
        remove(next(f for f in files_of(path, "d") if f.parent.parent.name == f"{process:05d}"))
    remove(next(file for file in files_of(path, "root") if file.parent.name == "root"))
    loaded = unickpt.load(path)
    assert all(np.array_equal(loaded[f"w{n}"], state_of()[f"w{n}"]) for n in range(8))
    assert [int(value["rng"][0]) for value in loaded["own"].values] == [0, 1, 2]
    assert len(unickpt.repair(path).repaired) == 4
    assert unickpt.verify(path).ok


# --- steps ---------------------------------------------------------------------------------------


def test_linked_files_have_parity_in_each_step(tmp_path: Path) -> None:
    options = SaveOptions(parity=(4, 1), **FAST)
    state = state_of()
    with Checkpointer(tmp_path, keep_last=1, reuse=True, options=options) as run:
        run.save(1, state, wait=True)
        state["w0"] = state["w0"] + 1
        run.save(2, state, wait=True)
    path = tmp_path / "step_2"
    assert files_of(path, "reused")
    for file in files_of(path, "d", "reused"):
        content = file.read_bytes()
        remove(file)
        assert np.array_equal(unickpt.load(path)["w0"], state["w0"])
        assert np.array_equal(unickpt.load(path)["w1"], state["w1"])
        assert unickpt.repair(path).repaired == (str(file.relative_to(path)),)
        assert file.read_bytes() == content
    assert unickpt.verify(path).ok


def test_chunks_of_a_base_are_restored_there(tmp_path: Path) -> None:
    options = {"parity": (4, 1), **FAST}
    unickpt.save("memory://parity-base/1", state_of(), options=SaveOptions(**options))
    more = SaveOptions(**options, base="memory://parity-base/1")
    unickpt.save("memory://parity-base/2", state_of(), options=more)
    assert unickpt.open("memory://parity-base/2").index.bases
    location = paths.resolve("memory://parity-base/1")
    store = location.store(paths.context())
    name = next(key.decode() for key in store.list().result() if b"/d/" in key)
    store.write(name, None).result()
    assert is_equal("memory://parity-base/2")
    assert unickpt.repair("memory://parity-base/1").repaired == (name,)
    assert unickpt.verify("memory://parity-base/2").ok


@pytest.mark.parametrize("link", [True, False])
def test_copies_of_two_tiers_have_parity(
    tmp_path: Path, link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "root") if link else f"memory://parity-tiers-{link}"
    options = SaveOptions(parity=(4, 1), **FAST)
    state = state_of()
    with Checkpointer(root, local=tmp_path / "local", reuse=True, options=options) as run:
        for step in (1, 2):
            state["w0"] = state["w0"] + 1
            run.save(step, state, wait=True)
        run.wait()
    for step in (1, 2):
        url = f"{root}/step_{step}"
        assert unickpt.verify(url).ok
        store = paths.resolve(url).store(paths.context())
        for name in sorted(key.decode() for key in store.list().result() if b"/d/" in key):
            store.write(name, None).result()
            assert np.array_equal(unickpt.load(url)["w1"], state["w1"])
            assert unickpt.repair(url).repaired == (name,)
        assert unickpt.verify(url).ok


def test_copy_convert_and_prune(path: Path, tmp_path: Path) -> None:
    save(path)
    unickpt.copy(path, tmp_path / "copy")
    assert files_of(tmp_path / "copy", "p")
    remove(files_of(tmp_path / "copy", "d")[0])
    assert is_equal(tmp_path / "copy")
    with pytest.raises(CheckpointCorrupt, match="unickpt repair"):
        unickpt.copy(tmp_path / "copy", tmp_path / "second")
    unickpt.convert(tmp_path / "copy", tmp_path / "converted")  # reads restored bytes
    assert unickpt.verify(tmp_path / "converted").ok
    assert np.array_equal(unickpt.load(tmp_path / "converted")["w3"], state_of()["w3"])
    unickpt.repair(tmp_path / "copy")
    unickpt.copy(tmp_path / "copy", tmp_path / "second")
    assert unickpt.verify(tmp_path / "second").ok


def test_removed_steps_and_remains_leave_nothing(tmp_path: Path) -> None:
    options = SaveOptions(parity=(4, 1), **FAST)
    with Checkpointer(tmp_path, keep_last=1, options=options) as run:
        for step in (1, 2):
            run.save(step, state_of(), wait=True)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("step")] == [
        "step_2"
    ]
    shutil.copytree(tmp_path / "step_2" / "processes", tmp_path / "step_3" / "processes")
    with Checkpointer(tmp_path, keep_last=2, options=options) as run:
        run.save(4, state_of(), wait=True)
    assert not (tmp_path / "step_3").exists()  # the remains of a save that was killed


def test_bytes_on_disk_count_parity(tmp_path: Path) -> None:
    from unickpt.extend import bytes_on_disk

    sizes = {}
    for parity in (None, (4, 1)):
        for root in (str(tmp_path / str(parity)), f"memory://parity-bytes-{parity}"):
            save(f"{root}/step_1", parity)
            sizes[parity, root.partition(":")[0] == "memory"] = bytes_on_disk(root)
    for is_memory in (False, True):
        extra = sizes[(4, 1), is_memory] / sizes[None, is_memory] - 1
        assert 0.2 < extra < 0.8


# --- killed, and in object storage ---------------------------------------------------------------

REPAIR = f"""
import sys
sys.path.insert(0, {TESTS!r})
import unickpt
from support.dying import die_at

path, index, count, session, step, when = ARGS
import unickpt.plugins.parity.repairing
die_at(step, when)
unickpt.repair(path)
"""


@pytest.mark.parametrize(
    "dies",
    [
        ("plugins.parity.repairing:_restored", "before"),
        ("plugins.parity.files:_write", "before"),
        ("plugins.parity.files:_write", "after"),
        ("plugins.parity.files:sync_folder", "before"),
        ("plugins.parity.files:sync_folder", "after"),
    ],
)
def test_a_killed_repair_is_repeated(path: Path, forks: Forks, dies: tuple[str, str]) -> None:
    save(path, (3, 2))
    originals = {file: file.read_bytes() for file in files_of(path)}
    for file in (*files_of(path, "d")[:2], *files_of(path, "root")[:1]):
        remove(file)
    (pid,) = start_job(forks, REPAIR, [str(path)], 1, [], 0, dies)
    assert forks.wait(pid).code == -9
    assert is_equal(path)
    unickpt.repair(path)
    now = {file: file.read_bytes() for file in files_of(path)}
    assert {file: now[file] for file in originals} == originals
    assert unickpt.verify(path).ok


@pytest.mark.parametrize("scheme", ["memory", "s3"])
def test_objects_are_restored(scheme: str, request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if scheme == "s3":
        moto = request.getfixturevalue("moto")
        s3_server.use(moto, monkeypatch)
        s3_server.make_bucket(moto, "parity")
    url = f"{scheme}://parity/step"
    save(url, (4, 2))
    store = paths.resolve(url).store(paths.context())
    names = sorted(key.decode() for key in store.list().result() if b"/d/" in key)
    originals = {name: store.read(name).result().value for name in names}
    for first, second in zip(names[::4], names[1::4], strict=False):
        store.write(first, None).result()
        store.write(second, originals[second][:-1] + bytes([originals[second][-1] ^ 1])).result()
        assert is_equal(url)
        assert set(unickpt.repair(url).repaired) == {first, second}
    assert {name: store.read(name).result().value for name in names} == originals
    assert unickpt.verify(url).ok
