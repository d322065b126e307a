"""Damage: no changed, cut or missing byte of any file gets through, and none ends the process."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forks import Forks
from support.saving import files, in_job

import unickpt
from unickpt import CheckpointCorrupt, PerProcess, ProcessGroup, SaveOptions
from unickpt.storage import paths
from unickpt.storage.database import Database
from unickpt.types import Box, LocalFragments

# Damages a checkpoint in every way of a list, one after the other, and tells what comes of it.
PROBE = """
import json, shutil, sys
from pathlib import Path
import numpy as np
import unickpt

folder, work, damages = Path(ARGS[0]), Path(ARGS[1]), ARGS[2]

def bits(tree):
    return {
        k: v.tobytes() if isinstance(v, np.ndarray) else repr(v) for k, v in tree.items()
    }

def tried(action):
    try:
        return action()
    except unickpt.UnickptError as error:
        return type(error).__name__
    except BaseException as error:
        return f"!! {type(error).__name__}: {error}"

intact = bits(unickpt.load(folder))
shutil.copytree(folder, work)
for name, kind, *numbers in damages:
    file = work / name
    good = file.read_bytes()
    bad = bytearray(good)
    if kind == "flip":
        bad[numbers[0]] ^= numbers[1]
    elif kind == "cut":
        del bad[numbers[0]:]
    elif kind == "append":
        bad += bytes(numbers[0])
    elif kind == "zero":
        bad = bytearray(len(bad))
    elif kind == "swap":
        bad = (folder / numbers[0]).read_bytes()
    file.write_bytes(bad)
    if kind == "delete":
        file.unlink()
    load = tried(lambda: "intact" if bits(unickpt.load(work)) == intact else "WRONG")
    verify = tried(lambda: "ok" if unickpt.verify(work).ok else "damage")
    print(json.dumps([name, kind, numbers, load, verify]), flush=True)
    file.write_bytes(good)
"""


def tree(index: int) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    table = rng.standard_normal((40, 25)).astype(np.float32)
    mine = Box((3 * index, 0), (3 * index + 3, 25))
    return {
        "table": table,
        "tiny": np.arange(3, dtype=np.int16),
        "zero": np.zeros((0, 2)),
        "flags": rng.integers(0, 2, 50).astype(bool),
        "scalar": np.float64(3),
        "fragments": LocalFragments((6, 25), [(mine, table[mine.slices])]),
        "rng": PerProcess({"seed": index, "key": np.arange(4)}),
        "step": 3,
        "loss": float("inf"),
    }


def make(path: Path, **options: Any) -> Path:
    def save(group: ProcessGroup) -> None:
        given = SaveOptions(group=group, fsync=False, timeout_s=20, **options)
        unickpt.save(path, tree(group.index), options=given)

    assert in_job(2, save) == [None, None]
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("intact") / "c", chunk_bytes=1500)


def probe(forks: Forks, folder: Path, work: Path, damages: list[Any]) -> list[list[Any]]:
    """What load and verify say to each damage; fails where one ended the process or got through."""
    pids = [forks.start(PROBE, str(folder), str(work / str(k)), damages[k::2]) for k in range(2)]
    results = []
    for k, pid in enumerate(pids):
        ended = forks.wait(pid)
        assert ended.code == 0, f"the process ended with {ended.code}:\n{ended.out[-2000:]}"
        found = [json.loads(line) for line in ended.out.splitlines()]
        assert len(found) == len(damages[k::2])
        results += found
    for result in results:
        load, verify = result[3:]
        assert not load.startswith("!!"), result
        assert not verify.startswith("!!"), result
        assert load != "WRONG", f"damage got through: {result}"
        assert verify != "ok" or load == "intact", f"verify misses what load finds: {result}"
    return results


def carries(name: str) -> bool:
    """Whether every byte of a file is of a checkpoint; others hold what led to the commit too."""
    return name == "manifest.ocdbt" or "/root/" in name


def flips(folder: Path, every: int) -> list[Any]:
    damages: list[Any] = []
    for name in files(folder):
        step = 1 if name == "manifest.ocdbt" else every
        size = os.path.getsize(folder / name)
        damages += [[name, "flip", at, 1 << (at * 5 % 8)] for at in range(0, size, step)]
    return damages


def check_flips(results: list[list[Any]]) -> None:
    for name, _, (at, _), load, verify in results:
        if carries(name):
            assert verify != "ok", f"byte {at} of {name} changed unnoticed (load: {load})"
    noticed = {name for name, *_, verify in results if verify != "ok"}
    assert any("/00000/d/" in name for name in noticed)
    assert any("/00001/d/" in name for name in noticed)


def test_no_changed_byte_gets_through(forks: Forks, checkpoint: Path, tmp_path: Path) -> None:
    check_flips(probe(forks, checkpoint, tmp_path, flips(checkpoint, 29)))


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "zstd", "gzip", "blosc"])
def test_no_changed_byte_gets_through_exhaustively(
    compression: str | None, forks: Forks, tmp_path: Path
) -> None:
    folder = make(tmp_path / "c", chunk_bytes=1500, compression=compression)
    for start in range(8):  # in parts, each within the limit of one process
        damages = flips(folder, 1)[start::8]
        check_flips(probe(forks, folder, tmp_path / str(start), damages))


def test_no_cut_missing_or_foreign_file_gets_through(
    forks: Forks, checkpoint: Path, tmp_path: Path
) -> None:
    damages: list[Any] = []
    names = files(checkpoint)
    for name in names:
        size = os.path.getsize(checkpoint / name)
        damages += [[name, "cut", at] for at in {0, 1, 12, size // 3, size // 2, size - 1}]
        damages += [[name, "delete"], [name, "zero"], [name, "append", 1], [name, "append", 5000]]
        damages += [[name, "swap", other] for other in names if other != name]
    for name, kind, _, load, verify in probe(forks, checkpoint, tmp_path, damages):
        if kind in ("cut", "zero", "delete") and carries(name):
            assert verify != "ok", f"{name}: {kind} unnoticed (load: {load})"
        if name == "manifest.ocdbt":
            expected = "CheckpointNotFound" if kind == "delete" else "CheckpointCorrupt"
            assert load == expected


def test_damage_to_large_chunks_is_no_crash(forks: Forks, tmp_path: Path) -> None:
    """TensorStore maps chunks of 256 KiB and more into memory; cut files must not be mapped."""
    for number, compression in enumerate((None, "zstd")):
        folder = tmp_path / f"c{number}"
        data = np.random.default_rng(1).integers(0, 256, (3, 1 << 20)).astype(np.uint8)
        options = SaveOptions(chunk_bytes=1 << 20, compression=compression, fsync=False)
        unickpt.save(folder, {"w": data}, options=options)
        (name,) = [n for n in files(folder) if "/d/" in n]
        size = os.path.getsize(folder / name)
        damages = [[name, "cut", size * k // 12] for k in range(12)]
        damages += [[name, "flip", size * k // 12, 1] for k in range(12)]
        for result in probe(forks, folder, tmp_path / f"w{number}", damages):
            assert result[3:] == ["CheckpointCorrupt", "damage"] or result[1] == "flip", result


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_verify_names_array_box_and_process_of_each_bad_chunk(
    compression: str | None, tmp_path: Path
) -> None:
    folder = make(tmp_path / "c", chunk_bytes=1500, compression=compression)
    assert unickpt.verify(folder).ok
    rng = np.random.default_rng(5)
    table = rng.standard_normal((40, 25)).astype(np.float32)
    (file,) = [folder / n for n in files(folder) if "/00001/d/" in n]
    data = bytearray(file.read_bytes())
    if compression is None:
        data[data.index(table[3:6].tobytes())] ^= 1
        file.write_bytes(data)
        (damage,) = unickpt.verify(folder).damage
        assert (damage.array, damage.box, damage.process) == ("fragments", "[3:6, 0:25]", 1)
        assert damage.reason == "the stored bytes do not match their digest"
        assert str(damage).startswith("'fragments' [3:6, 0:25] written by process 1: the stored")
    else:
        file.write_bytes(bytes(len(data)))
        found = unickpt.verify(folder).damage
        assert {d.process for d in found if d.array == "table"} == {1}
        assert any(d.array == "fragments" and d.box == "[3:6, 0:25]" for d in found)


def test_load_names_array_box_and_process_of_a_bad_chunk(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    for name in files(folder):
        if "/d/" in name:
            file = folder / name
            data = bytearray(file.read_bytes())
            at = data.find(tree(0)["table"][10:11].tobytes())
            if at >= 0:
                data[at + 5] ^= 4
            file.write_bytes(data)
    reason = r"c: array 'table' \[\d+:\d+, 0:25\], written by process [01]: the stored bytes"
    with pytest.raises(CheckpointCorrupt, match=reason):
        unickpt.load(folder)


def test_what_is_not_read_is_not_checked(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    good, bad = np.arange(3000.0), np.arange(3000.0) + 0.5
    unickpt.save(folder, {"good": good, "bad": bad})
    (name,) = [n for n in files(folder) if "/d/" in n]
    data = bytearray((folder / name).read_bytes())
    data[data.index(bad.tobytes()) + 8] ^= 1
    (folder / name).write_bytes(data)
    np.testing.assert_array_equal(unickpt.open(folder)["good"][...], good)
    with pytest.raises(CheckpointCorrupt, match="array 'bad'"):
        unickpt.open(folder)["bad"][...]
    unchecked = unickpt.load(folder, options=unickpt.LoadOptions(verify=False))
    assert (unchecked["bad"] != bad).sum() == 1
    assert [d.array for d in unickpt.verify(folder).damage] == ["bad"]


def test_verify_counts_what_it_read_and_tells_its_progress(checkpoint: Path) -> None:
    told: list[tuple[int, int]] = []
    report = unickpt.verify(checkpoint, progress=lambda done, total: told.append((done, total)))
    assert report.ok
    assert report.bytes == unickpt.open(checkpoint).nbytes == told[-1][0] == told[-1][1]
    assert report.chunks == len(told) == unickpt.open(checkpoint).index.chunks
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_key_that_does_not_belong_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    unickpt.save(folder, {"w": np.arange(4)})
    values = Database(paths.resolve(folder), paths.context()).store()
    values.write("w/c/7", b"what is this").result()
    values.write("w/zarr.json", b"{}").result()
    assert [d.reason for d in unickpt.verify(folder).damage] == [
        "'w/zarr.json' differs from its description in the index",
        "the database has 6 keys, but the index implies 5",
    ]


def test_many_small_arrays_are_checked_in_few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scheduling a task costs more than a small key or chunk, of which there may be 100,000."""
    tree = {f"w{i}": np.full(6, i, np.float32) for i in range(1000)}
    unickpt.save("memory://many/small", tree)
    submitted = []
    submit = ThreadPoolExecutor.submit

    def counted(self: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Any:
        submitted.append(args[0])
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    report = unickpt.verify("memory://many/small")
    assert report.ok
    assert report.chunks == 1000
    assert len(submitted) < 20


@pytest.mark.parametrize("bad", [0, 2, 7])
@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_load_names_the_bad_one_of_chunks_that_are_read_one_after_the_other(
    tmp_path: Path, kind: str, bad: int
) -> None:
    data = np.random.default_rng(2).integers(0, 256, (8, 128 << 10)).astype(np.uint8)
    unickpt.save(tmp_path / "c", {"w": data}, options=SaveOptions(chunk_bytes=128 << 10))
    opened = unickpt.open(tmp_path / "c")  # which reads the nodes, at the end of the file
    (name,) = [n for n in files(tmp_path / "c") if "/d/" in n]
    file = tmp_path / "c" / name
    stored = bytearray(file.read_bytes())
    at = stored.index(data[bad].tobytes()) + 100_000
    if kind == "flip":
        stored[at] ^= 1
    else:  # what follows is lost, too; the first is named
        del stored[at:]
    file.write_bytes(stored)
    why = "digest" if kind == "flip" else f"has no bytes .* its size is {at}"
    with pytest.raises(CheckpointCorrupt, match=rf"'w' \[{bad}:{bad + 1}, 0:131072\].*{why}"):
        opened["w"][...]
