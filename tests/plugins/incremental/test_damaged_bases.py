"""A base that is damaged or gone: the save writes what it cannot take from it, and says so once."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server
from support.saving import in_job, same

import unickpt
from unickpt import (
    Checkpointer,
    CheckpointNotFound,
    SaveConflict,
    SaveOptions,
    StorageError,
)
from unickpt.runs import save_leftovers
from unickpt.storage import paths

OPTIONS = SaveOptions(chunk_bytes=8192, fsync=False)
FROZEN = np.random.default_rng(0).random((64, 512), np.float32)


def state(step: int) -> dict[str, Any]:
    small = {f"s{i}": np.full(50, i + step, np.float32) for i in range(100)}
    return {"frozen": FROZEN, "w": FROZEN[:16] + (np.arange(512) == step), "step": step, **small}


@pytest.fixture(params=["links", "no links"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "no links here")

    if request.param == "no links":
        monkeypatch.setattr(os, "link", refuse)
    return bool(request.param == "links")


def largest(folder: Path) -> Path:
    return max(folder.glob("processes/*/00000/*/*"), key=lambda file: file.stat().st_size)


def rots(part: float) -> Callable[[Path], None]:
    """Changes a byte of the nodes, the index or the digests."""

    def harm(step: Path) -> None:
        (file,) = step.glob("processes/*/root/0")
        data = bytearray(file.read_bytes())
        data[int(part * len(data))] ^= 1
        file.write_bytes(data)

    return harm


def is_short(step: Path) -> None:
    os.truncate(largest(step), 20_000)


def is_folder(step: Path) -> None:
    file = largest(step)
    file.unlink()
    file.mkdir()


HARMS: dict[str, Callable[[Path], Any]] = {
    **{f"rots at {part}": rots(part) for part in (0.1, 0.5, 0.95)},
    "the data are gone": lambda step: largest(step).unlink(),
    "the data are short": is_short,
    "the data cannot be read": is_folder,
    "the database of a process is gone": lambda step: shutil.rmtree(
        next(step.glob("processes/*/00000"))
    ),
    "it is gone": shutil.rmtree,
    "the manifest is empty": lambda step: (step / "manifest.ocdbt").write_bytes(b""),
}


def harmed() -> Iterator[Any]:
    """Each harm with each kind of reuse: one with links, the other without; slow tests have all."""
    for row, what in enumerate(HARMS):
        for column, reuse in enumerate(("digest", "patch")):
            for number, links in enumerate(("links", "no links")):
                marks = [pytest.mark.slow] if (row + column + number) % 2 else []
                yield pytest.param(what, reuse, links, marks=marks)


@pytest.mark.parametrize(("what", "reuse", "links"), [*harmed()], indirect=["links"])
def test_later_saves_are_whole(
    what: str, reuse: Any, links: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, reuse=reuse, options=OPTIONS) as run:
        run.save(0, state(0)).result()
        assert run.save(1, state(1)).result().reused_bytes >= FROZEN.nbytes
        # Without links, the later one borrows of the first; short patches are in no data file.
        for step in tmp_path.glob("step_*"):
            if "data" not in what or any(step.glob("processes/*/00000/*/*")):
                HARMS[what](step)
        run.save(2, state(2)).result()
        said = [record.getMessage() for record in caplog.records]
        assert run.save(3, state(3)).result().reused_bytes >= FROZEN.nbytes
        for step in (2, 3):
            report = unickpt.verify(tmp_path / f"step_{step}")
            assert report.ok, report.damage
            assert same(unickpt.load(tmp_path / f"step_{step}"), state(step))
    warned = [message for message in said if "the base of this save" in message]
    # A byte between the values of a database means nothing.
    assert len(warned) == 1 or (what.startswith("rots") and not warned)
    assert all("step_1" in message for message in warned)


@pytest.mark.parametrize("what", ["rots at 0.5", "the data are gone", "the data are short"])
def test_of_an_explicit_base_only_its_absence_is_an_error(
    what: str, links: bool, tmp_path: Path
) -> None:
    options = SaveOptions(chunk_bytes=8192, fsync=False, base=tmp_path / "base")
    unickpt.save(tmp_path / "base", state(0), options=OPTIONS)
    HARMS[what](tmp_path / "base")
    for step in (1, 2):
        unickpt.save(tmp_path / f"{step}", state(step), options=options)
        assert unickpt.verify(tmp_path / f"{step}").ok
        assert same(unickpt.load(tmp_path / f"{step}"), state(step))
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(CheckpointNotFound, match="base"):
        unickpt.save(tmp_path / "3", state(3), options=options)


@pytest.mark.parametrize("what", ["gone", "short"])
def test_one_process_sees_it(what: str, links: bool, tmp_path: Path) -> None:
    """What it cannot take it writes; the other one refers to its own."""

    def save(name: str, base: Path | None) -> int:
        def one(group: Any) -> unickpt.types.SaveReport:
            options = SaveOptions(chunk_bytes=8192, fsync=False, base=base, group=group)
            return unickpt.save(tmp_path / name, {"frozen": FROZEN}, options=options)

        return sum(report.reused_bytes for report in in_job(2, one))

    save("a", None)
    victim = max(tmp_path.glob("a/processes/*/00001/d/*"), key=lambda file: file.stat().st_size)
    if what == "gone":
        victim.unlink()
    else:
        os.truncate(victim, 20_000)
    assert 0 < save("b", tmp_path / "a") < FROZEN.nbytes
    assert unickpt.verify(tmp_path / "b").ok
    assert same(unickpt.load(tmp_path / "b"), {"frozen": FROZEN})


@pytest.fixture
def borrowed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is marked who borrows from step 0: step 1, a step that was never committed, and what
    a process leaves that is killed while it marks."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with Checkpointer(tmp_path, reuse=True, options=OPTIONS) as run:
        for step in (0, 1):
            run.save(step, state(step)).result()
    (marks,) = tmp_path.glob("step_0/processes/*/borrowers")
    assert os.listdir(marks) == ["step_1"]
    for name in ("step_2", "step_3", "step_2_4598d5ca95edb05d.__lock"):
        (marks / name).touch()
    (tmp_path / "step_3/processes/0123-0/00000/d").mkdir(parents=True)
    return marks


def test_only_checkpoints_keep_a_base(borrowed_from: Path, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=OPTIONS) as run:
        with pytest.raises(SaveConflict, match="has chunks of step_1, which"):
            run.delete(0)
        run.delete(1)
        run.delete(0)
    assert not (tmp_path / "step_0").exists()


def test_retention_removes_a_base_that_only_a_killed_job_marked(
    borrowed_from: Path, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path, keep_last=1, options=OPTIONS) as run:
        for step in (5, 6):
            run.save(step, state(step)).result()
        run.wait()
        assert run.steps() == [6]


@pytest.mark.parametrize("by", ["the next job", "clean"])
def test_old_locks_of_marks_are_removed(by: str, borrowed_from: Path, tmp_path: Path) -> None:
    def remove() -> list[str]:
        if by == "clean":
            return [
                r.name
                for r in save_leftovers.clean(tmp_path, save_leftovers.find(tmp_path).orphans)
            ]
        with Checkpointer(tmp_path, options=OPTIONS) as run:
            run.save(10 + len(run.steps()), state(5)).result()
        return []

    lock = borrowed_from / "step_2_4598d5ca95edb05d.__lock"
    remove()
    assert lock.exists()  # another process may be writing the mark
    os.utime(lock, (0, 0))
    removed = remove()
    assert not lock.exists()
    assert by != "clean" or str(lock.relative_to(tmp_path)) in removed
    assert sorted(os.listdir(borrowed_from)) == ["step_1", "step_2", "step_3"]
    assert same(unickpt.load(tmp_path / "step_1"), state(1))


@pytest.mark.plugins
@pytest.mark.parametrize("what", ["rots at 0.5", "the database of a process is gone", "it is gone"])
def test_experts_that_a_base_lost_cost_one_save(what: str, links: bool, tmp_path: Path) -> None:
    """They are nowhere else; the next save writes all."""
    experts = {str(n): {"w": np.full((16, 512), n, np.float32)} for n in range(4)}
    tree = {"frozen": FROZEN, "experts": experts}
    with Checkpointer(
        tmp_path, reuse=True, experts=unickpt.Experts({"experts/{x}/**": 1}), options=OPTIONS
    ) as run:
        for step in (0, 1):
            run.save(step, tree).result()
        for folder in tmp_path.glob("step_*"):
            HARMS[what](folder)
        with pytest.raises(StorageError, match="this save"):
            run.save(2, tree).result()
        for step in (3, 4):
            run.save(step, tree).result()
            assert unickpt.verify(tmp_path / f"step_{step}").ok
            found = unickpt.load(tmp_path / f"step_{step}")["experts"]
            assert all(same(found[number], experts[number]) for number in experts)


def test_a_base_in_object_storage_that_lost_an_object(
    moto: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    s3_server.use(moto, monkeypatch)
    bucket = f"bases-{secrets.token_hex(4)}"
    s3_server.make_bucket(moto, bucket)
    with Checkpointer(f"s3://{bucket}/run", reuse=True, options=OPTIONS) as run:
        for step in (0, 1):
            report = run.save(step, state(step)).result()
        assert report.bases == ("step_0",)
        location, context = paths.resolve(f"s3://{bucket}/run/step_0"), paths.context()
        names = [key.decode() for key in location.store(context).list().result()]
        for name in names:
            if "/00000/d/" in name:
                location.remove_file(name, context)
        for step in (2, 3):
            run.save(step, state(step)).result()
            assert unickpt.verify(f"s3://{bucket}/run/step_{step}").ok
            assert same(unickpt.load(f"s3://{bucket}/run/step_{step}"), state(step))
    assert caplog.text.count("the base of this save") == 1
