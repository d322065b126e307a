"""A second tier by fsspec: in memory, in local files, and in servers where their packages are."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS, s3_server
from support.processes import Processes, free_port
from support.unknown import with_feature

import unickpt

fsspec = pytest.importorskip("fsspec")

from unickpt.integrations.fsspec import MirroredCheckpointer, StepsFolder  # noqa: E402
from unickpt.saving.background import PendingSave  # noqa: E402

STORAGES = ("memory", "file", "s3", "abfs")


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The connection string of a server on this machine that speaks Azure Blob Storage."""
    if (program := shutil.which("azurite-blob")) is None:
        pytest.skip("needs azurite, of npm")
    port, folder = free_port(), tmp_path_factory.mktemp("azurite")
    command = [program, "--location", folder, "--blobPort", str(port), "--skipApiVersionCheck"]
    # An account of its own; the key is no secret, "anything" in base64.
    env = {**os.environ, "AZURITE_ACCOUNTS": "anyone:YW55dGhpbmc="}
    server = subprocess.Popen([*command, "--silent"], env=env)
    try:
        while server.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/anyone"
        yield f"AccountName=anyone;AccountKey=YW55dGhpbmc=;{endpoint};DefaultEndpointsProtocol=http"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=STORAGES)
def mirror(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The URL of an empty folder, and the options of its file system."""
    name = uuid.uuid4().hex
    if request.param == "memory":
        yield f"memory://{name}/run", {}
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)
    elif request.param == "file":
        yield f"file://{tmp_path}/mirror/run", {}
    elif request.param == "s3":
        pytest.importorskip("s3fs")
        moto = request.getfixturevalue("moto")
        s3_server.make_bucket(moto, name)
        given = {"key": "a", "secret": "b", "endpoint_url": moto}
        yield f"s3://{name}/run", given
    else:
        pytest.importorskip("adlfs")
        given = {"connection_string": request.getfixturevalue("azurite")}
        fsspec.filesystem("abfs", **given).mkdir(name)
        yield f"abfs://{name}/run", given


def checkpointer(
    root: Path, mirror: tuple[str, dict[str, Any]], **given: Any
) -> MirroredCheckpointer:
    return MirroredCheckpointer(root, mirror[0], storage_options=mirror[1], **given)


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(1000.0) + step, "b": np.full((3, 5), step), "step": step}


def assert_state(found: dict[str, Any], step: int) -> None:
    assert found["step"] == step
    for name, value in state(step).items():
        assert np.array_equal(found[name], value)


@pytest.mark.integration
def test_steps_are_copied_kept_and_restored(tmp_path: Path, mirror: Any) -> None:
    rules = {"keep_last": 1, "mirror_keep_last": 2, "mirror_keep_every": 4}
    with checkpointer(tmp_path / "a", mirror, **rules) as ckpt:
        assert ckpt.restore() is None
        for step in range(2, 8):
            ckpt.save(step, state(step))
            ckpt.wait()
        assert ckpt.steps() == [7]
    assert StepsFolder(*mirror).steps() == [4, 6, 7]
    with checkpointer(tmp_path / "b", mirror, **rules) as ckpt:
        assert ckpt.restore() == 7
        assert ckpt.restore() is None
        assert_state(ckpt.load(), 7)
        assert unickpt.verify(tmp_path / "b" / "step_7").ok
        with pytest.raises(unickpt.CheckpointNotFound, match=r"step 5 is not in .*4, 6, 7"):
            ckpt.restore(5)
        assert ckpt.restore(4) == 4
        assert_state(ckpt.load(step=4), 4)
        ckpt.drop_later_steps(4)
        assert StepsFolder(*mirror).steps() == [4]
        ckpt.save(5, state(5), wait=True)
        ckpt.wait()
        ckpt.delete(5)
        assert StepsFolder(*mirror).steps() == [4]
    assert not list(tmp_path.glob("*/.step*"))


def in_memory() -> tuple[str, dict[str, Any]]:
    return f"memory://{uuid.uuid4().hex}/run", {}


def test_a_replaced_step_is_copied_again(tmp_path: Path) -> None:
    mirror = in_memory()
    with checkpointer(tmp_path / "a", mirror) as ckpt:
        ckpt.save(3, state(3))
        ckpt.wait()
        ckpt.save(3, state(4), overwrite=True)
        ckpt.wait()
    with checkpointer(tmp_path / "b", mirror) as ckpt:
        assert ckpt.restore() == 3
        assert_state(ckpt.load(), 4)


def test_a_step_that_is_replaced_while_it_is_copied_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, real = in_memory(), StepsFolder.put

    def slow(self: StepsFolder, step: int, source: Any) -> bool:
        put = real(self, step, source)
        if not replaced:
            replaced.append(4)
            ckpt.save(3, state(4), overwrite=True).result()
        return put

    replaced: list[int] = []
    with checkpointer(tmp_path / "a", mirror) as ckpt:
        monkeypatch.setattr(StepsFolder, "put", slow)
        ckpt.save(3, state(3))
        ckpt.wait()
    with checkpointer(tmp_path / "b", mirror) as ckpt:
        assert ckpt.restore() == 3
        assert_state(ckpt.load(), 4)


def test_wait_waits_for_copies_of_saves_that_have_just_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_ended = PendingSave.wait_ended

    def late(self: PendingSave) -> None:
        wait_ended(self)
        time.sleep(0.3)

    monkeypatch.setattr(PendingSave, "wait_ended", late)
    mirror = in_memory()
    with checkpointer(tmp_path, mirror) as ckpt:
        ckpt.save(3, state(3))
        ckpt.wait()
        assert StepsFolder(*mirror).steps() == [3]


ENDS = """
import sys, numpy as np
from unickpt.integrations.fsspec import MirroredCheckpointer
ckpt = MirroredCheckpointer(sys.argv[1], "file://" + sys.argv[2])
ckpt.save(3, {"w": np.arange(1000.0) + 3, "b": np.full((3, 5), 3), "step": 3})
"""


def test_a_program_that_ends_copies_its_steps_first(processes: Processes, tmp_path: Path) -> None:
    processes.finish([processes.start(ENDS, tmp_path / "a", tmp_path / "there")])
    assert StepsFolder(f"file://{tmp_path}/there", {}).steps() == [3]


def test_steps_that_a_job_left_are_copied_by_the_next(tmp_path: Path) -> None:
    mirror = in_memory()
    with unickpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
        ckpt.wait()
    with checkpointer(tmp_path, mirror, keep_last=1) as ckpt:
        ckpt.save(3, state(3))
    assert StepsFolder(*mirror).steps() == [1, 2, 3]


def test_a_mirror_of_another_run_is_not_mixed(tmp_path: Path) -> None:
    mirror = in_memory()
    with checkpointer(tmp_path / "a", mirror) as ckpt:
        ckpt.save(30, state(30))
    ckpt = checkpointer(tmp_path / "b", mirror)
    ckpt.save(10, state(10))
    with pytest.raises(unickpt.errors.LaterStepsExist, match=r"later .* 10: 30; .*drop_later"):
        ckpt.wait()
    assert StepsFolder(*mirror).steps() == [30]
    ckpt.drop_later_steps(10)
    ckpt.close()
    assert StepsFolder(*mirror).steps() == []


class Failing:
    """Changes what a file system in memory does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.system = monkeypatch, type(fsspec.filesystem("memory"))

    def put(self, change: Any) -> None:
        real = self.system.put_file

        def put_file(system: Any, local: str, there: str, **given: Any) -> None:
            real(system, local, there, **given)
            change(system, there)

        self.patch.setattr(self.system, "put_file", put_file)


def test_an_error_is_raised_and_the_step_stays_until_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = in_memory()

    def full(*_: object) -> None:
        raise OSError(28, "no space")

    with checkpointer(tmp_path, mirror, keep_last=1) as ckpt:
        with monkeypatch.context() as patch:
            Failing(patch).put(full)
            ckpt.save(1, state(1))
            with pytest.raises(unickpt.StorageError, match=r"memory.* copy step 1: .*no space"):
                ckpt.wait()
        assert StepsFolder(*mirror).steps() == []
        ckpt.save(2, state(2))
        ckpt.wait()
    assert StepsFolder(*mirror).steps() == [1, 2]


def test_bytes_that_changed_on_the_way_never_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = in_memory()

    def spoil(system: Any, there: str) -> None:
        data = bytearray(system.cat_file(there))
        data[len(data) // 2] ^= 1
        system.pipe_file(there, bytes(data))

    ckpt = checkpointer(tmp_path, mirror)
    Failing(monkeypatch).put(spoil)
    ckpt.save(1, state(1))
    with pytest.raises(unickpt.StorageError, match=r"differs from .* when it is read back"):
        ckpt.close()
    assert StepsFolder(*mirror).steps() == []
    assert not fsspec.filesystem("memory").find(mirror[0])


def test_damage_is_not_copied_and_not_restored(tmp_path: Path) -> None:
    mirror = in_memory()
    with checkpointer(tmp_path / "a", mirror) as ckpt:
        ckpt.save(1, state(1))
    system = fsspec.filesystem("memory")
    data = max(system.find(mirror[0]), key=system.size)
    content = bytearray(system.cat_file(data))
    content[len(content) // 2] ^= 1
    system.pipe_file(data, bytes(content))
    ckpt = checkpointer(tmp_path / "b", mirror)
    with pytest.raises(unickpt.CheckpointCorrupt, match="step 1 is damaged"):
        ckpt.restore()
    assert ckpt.steps() == []
    assert not list((tmp_path / "b").glob(".step*"))
    ckpt.close()
    ckpt = MirroredCheckpointer(tmp_path / "a", in_memory()[0])
    local = max((tmp_path / "a" / "step_1").rglob("d/*"), key=lambda file: file.stat().st_size)
    spoiled = bytearray(local.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    local.write_bytes(spoiled)
    ckpt.save(2, state(2))
    with pytest.raises(unickpt.CheckpointCorrupt, match=r"step_1 is damaged; not copied"):
        ckpt.wait()
    ckpt.delete(1)
    ckpt.close()


@pytest.mark.parametrize("left", ["all but the manifest", "another attempt", "an empty folder"])
def test_a_step_is_restored_where_a_killed_save_or_removal_left_something(
    tmp_path: Path, left: str
) -> None:
    mirror = f"file://{tmp_path}/mirror", dict[str, Any]()
    with checkpointer(tmp_path / "a", mirror) as ckpt:
        ckpt.save(1, state(1))
    step = tmp_path / "a" / "step_1"
    (step / "manifest.ocdbt").unlink()
    if left == "another attempt":
        (attempt,) = (step / "processes").iterdir()
        attempt.rename(attempt.with_name("other-1"))
    elif left == "an empty folder":
        shutil.rmtree(step)
        step.mkdir()
    with checkpointer(tmp_path / "a", mirror) as ckpt:
        assert ckpt.restore() == 1
        assert_state(ckpt.load(), 1)
    assert unickpt.verify(step).ok
    assert [path.name for path in step.parent.iterdir() if "download" in path.name] == []


def test_a_link_in_place_of_a_download_is_not_followed(tmp_path: Path) -> None:
    mirror = f"file://{tmp_path}/mirror", dict[str, Any]()
    with checkpointer(tmp_path / "a", mirror) as ckpt:
        ckpt.save(1, state(1))
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a" / ".step_1.unickpt-download").symlink_to(tmp_path / "elsewhere")
    with checkpointer(tmp_path / "a", mirror) as ckpt:
        assert ckpt.restore() == 1
        assert_state(ckpt.load(), 1)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_mirror_in_its_own_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    for url in (f"file://{tmp_path}/a", f"{tmp_path}/link/", f"local://{tmp_path}/b/../a"):
        with pytest.raises(ValueError, match="is the folder of root="):
            MirroredCheckpointer(tmp_path / "a", url)


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    mirror = in_memory()
    with checkpointer(tmp_path / "a", mirror) as ckpt:
        ckpt.save(1, state(1))
    fsspec.filesystem("memory").pipe_file(f"{mirror[0]}/step_1/processes/x/..\\y", b"")
    with checkpointer(tmp_path / "b", mirror) as ckpt:
        with pytest.raises(unickpt.CheckpointCorrupt, match="has a file"):
            ckpt.restore()
        assert not list((tmp_path / "b").glob(".step*"))


def test_arguments_that_cannot_be_honoured(tmp_path: Path) -> None:
    for name, value in {
        "after": 3,
        "local": "/dev/shm/x",
        "experts": unickpt.Experts({"e/{x}/**": 1}),
    }.items():
        with pytest.raises(ValueError, match=f"{name}= is not supported"):
            MirroredCheckpointer(tmp_path, "memory://x", **{name: value})
    with pytest.raises(ValueError, match="must be a local path"):
        MirroredCheckpointer("s3://bucket/run", "memory://x")
    with pytest.raises(unickpt.MissingPackage, match=r"sftp.*paramiko"):
        MirroredCheckpointer(tmp_path, "sftp://host/run")


JOB = """
import sys, time
sys.path.insert(0, sys.argv[1])
import fsspec, numpy as np
from fsspec.implementations.local import LocalFileSystem
from unickpt.integrations.fsspec import MirroredCheckpointer

class Slow(LocalFileSystem):
    protocol = "slow"

    def put_file(self, local, there, **given):
        # As many storages do: the file is there before its bytes are.
        with open(local, "rb") as ours, open(self._strip_protocol(there), "wb") as theirs:
            data = ours.read()
            theirs.write(data[: len(data) // 2])
            theirs.flush()
            time.sleep(0.01)
            theirs.write(data[len(data) // 2 :])

fsspec.register_implementation("slow", Slow)
last, rules = int(sys.argv[4]), {"keep_last": 2, "mirror_keep_last": 3}
with MirroredCheckpointer(sys.argv[2], "slow://" + sys.argv[3], **rules) as ckpt:
    state = {"w": np.zeros(5000), "step": 0}
    if ckpt.restore() is not None or ckpt.latest() is not None:
        state = ckpt.load()
    while state["step"] < last:
        state = {"w": state["w"] + 1, "step": state["step"] + 1}
        ckpt.save(state["step"], state)
"""


def test_a_job_that_is_killed_leaves_whole_steps(processes: Processes, tmp_path: Path) -> None:
    root, there = tmp_path / "root", tmp_path / "there"
    last = -1
    for killed in range(4):
        job = processes.forked(JOB, TESTS, root, there, 10**6)
        while max(StepsFolder(str(there), {}).steps(), default=-1) <= last:
            assert job.poll() is None, job.communicate()
            time.sleep(0.01)
        time.sleep(0.031 * killed)
        job.send_signal(signal.SIGKILL)
        job.wait()
        for step in StepsFolder(str(there), {}).steps():
            assert unickpt.verify(there / f"step_{step}").ok
            last = step
    for folder in root.iterdir():
        if folder.name.startswith("step_"):  # the machine is lost
            folder.rename(tmp_path / f"lost_{folder.name}")
    processes.finish([processes.forked(JOB, TESTS, root, there, last + 3)])
    assert StepsFolder(str(there), {}).steps() == [last + 1, last + 2, last + 3]
    found = unickpt.load(there / f"step_{last + 3}")
    assert np.array_equal(found["w"], np.full(5000, last + 3.0))
    for step in (last + 1, last + 2, last + 3):
        assert unickpt.verify(there / f"step_{step}").ok


def test_a_step_that_is_not_known_stays_in_the_mirror(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there, tree = tmp_path / "there", {"w": np.ones(3)}
    with MirroredCheckpointer(tmp_path / "here", f"file://{there}", mirror_keep_last=1) as run:
        run.save(0, tree)
    with_feature(there / "step_0")
    with MirroredCheckpointer(tmp_path / "here", f"file://{there}", mirror_keep_last=1) as run:
        run.save(1, tree)
    assert sorted(path.name for path in there.iterdir()) == ["step_0", "step_1"]
    with pytest.raises(
        unickpt.errors.UnsupportedFormat, match=f"{there}/step_0: it needs the feature"
    ):
        StepsFolder(f"file://{there}", {}).remove(0)
    assert "needs the feature 'telepathy'" in caplog.text
    assert unickpt.load(there / "step_1")["w"].tolist() == [1, 1, 1]
    StepsFolder(f"file://{there}", {}).remove(1)
    assert sorted(path.name for path in there.iterdir()) == ["step_0"]
