"""Storage that fails under asynchronous saves: full, read-only, removed, slow, silent, far away."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from support import TESTS, s3_server
from support.forks import Forks
from support.saving import files, in_job, numbers, same
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

import unickpt
from unickpt import Checkpointer, ProcessGroup, SaveConflict, SaveOptions, StorageError
from unickpt.commit import attempt, coordinator, lease, participant
from unickpt.errors import InvalidPath, ProcessFailed, SaveTimeout
from unickpt.storage import paths

LONG_S = 30.0  # what is waited for takes a fraction of it; only a hang takes longer
FAST = SaveOptions(fsync=False, timeout_s=20, chunk_bytes=64 << 10)
LARGE = {"w": np.ones(400_000), "v": np.zeros(300_000)}  # more than a small disk holds
FULL = "No space left on device"


def check(where: Path | str, steps: list[int], **arguments: Any) -> None:
    """Makes sure that these steps are listed, and that each is whole and as it was saved."""
    reader = Checkpointer(where, **arguments)
    assert reader.steps() == steps
    for step in steps:
        assert same(reader.load(step=step), numbers(step)), f"step {step}"
        assert unickpt.verify(reader.path(step)).ok


def folders(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name != ".unickpt.lock")


def after_commit(patch: pytest.MonkeyPatch, work: Callable[[str], object]) -> None:
    """Has something done right after each commit, before the save ends; with the URL."""
    real = coordinator.Coordinator._remove_older_attempts

    def then(self: coordinator.Coordinator, older: Any) -> None:
        real(self, older)
        work(self.attempt.location.url)

    patch.setattr(coordinator.Coordinator, "_remove_older_attempts", then)


class Stop:
    """Keeps a save from ending after its commit, so that the next one waits in the queue."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        after_commit(patch, self._stop)

    def _stop(self, url: str) -> None:
        self.reached.set()
        assert self.go_on.wait(LONG_S)


# --- disks that are full -------------------------------------------------------------------------


Mount = Callable[..., None]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts something at a folder, or changes how it is mounted, until the test ends."""
    mounted: set[str] = set()

    def call(*arguments: str | Path) -> None:
        command = ["mount", *map(str, arguments)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("this test needs the right to mount")
        mounted.add(command[-1])

    try:
        yield call
    finally:
        for folder in mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path, mount: Mount) -> Path:
    """2 MiB for at most 100 files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m,nr_inodes=100", "tmpfs", disk)
    return disk


def fill(disk: Path, what: str) -> Path:
    """Takes all space or all inodes; what is returned gives them back if it is removed."""
    filler = disk / "filler"
    filler.mkdir()
    count = 0
    while what == "files" and os.statvfs(disk).f_favail:
        (filler / str(count)).touch()
        count += 1
    if what == "bytes":
        with open(filler / "large", "wb", buffering=0) as out:
            while os.statvfs(disk).f_bavail:
                out.write(bytes(4096))
    return filler


def test_a_full_disk_fails_the_save_and_the_next_works(small_disk: Path) -> None:
    one, two = small_disk / "one", small_disk / "two"
    unickpt.save_async(one, numbers(1)).result(LONG_S)
    for path, overwrite in ((two, False), (one, True)):
        pending = unickpt.save_async(path, LARGE, overwrite=overwrite)
        with pytest.raises(StorageError, match=f"saving to {path}: .*{FULL}"):
            pending.result(LONG_S)
    pending = unickpt.save_async(two, LARGE)
    assert wait([pending._finished], LONG_S).done
    with pytest.raises(StorageError, match=FULL) as caught:
        unickpt.save_async(two, numbers(2))
    assert any("in the background" in note for note in caught.value.__notes__)
    assert same(unickpt.load(one), numbers(1))
    unickpt.save_async(two, numbers(2)).result(LONG_S)
    assert same(unickpt.load(two), numbers(2))
    assert same(unickpt.load(one), numbers(1))


@pytest.mark.parametrize("what", ["bytes", "files"])
def test_a_disk_that_fills_up_under_a_run(what: str, small_disk: Path) -> None:
    root = small_disk / "run"
    with Checkpointer(root, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1), wait=True)
        filler = fill(small_disk, what)
        pending = checkpointer.save(2, numbers(2))
        with pytest.raises(StorageError, match=f"step_2: .*{FULL}"):
            pending.result(LONG_S)
        checkpointer.save(3, numbers(3))
        with pytest.raises(StorageError, match=f"step_3: .*{FULL}"):
            checkpointer.wait()
        check(root, [1])
        shutil.rmtree(filler)
        checkpointer.save(4, numbers(4))
    check(root, [1, 4])
    assert not [name for name in files(root) if name.startswith(("step_2", "step_3"))]
    with Checkpointer(root, options=FAST) as checkpointer:
        checkpointer.save(5, numbers(5))
    check(root, [1, 4, 5])
    assert folders(root) == ["step_1", "step_4", "step_5"]


@pytest.mark.parametrize("what", ["bytes", "files"])
def test_a_disk_that_is_full_before_the_first_save(what: str, small_disk: Path) -> None:
    root = small_disk / "run"
    filler = fill(small_disk, what)
    with Checkpointer(root, options=FAST) as checkpointer:
        pending = checkpointer.save(1, numbers(1))
        with pytest.raises(StorageError, match=FULL):
            pending.result(LONG_S)
        shutil.rmtree(filler)
        checkpointer.save(2, numbers(2), wait=True)
    check(root, [2])


def test_a_disk_without_room_for_the_lock(small_disk: Path) -> None:
    """The folder is there, and its lock's file can be made, but nothing can be written to it."""
    root = small_disk / "run"
    root.mkdir()
    (root / ".unickpt.lock").touch()
    filler = fill(small_disk, "bytes")
    with Checkpointer(root, options=FAST) as checkpointer:
        pending = checkpointer.save(1, numbers(1))
        with pytest.raises(StorageError, match=FULL):
            pending.result(LONG_S)
        shutil.rmtree(filler)
        checkpointer.save(2, numbers(2), wait=True)
    check(root, [2])


def test_a_full_local_tier(small_disk: Path, tmp_path: Path) -> None:
    root, local = tmp_path / "root", small_disk / "local"
    with Checkpointer(root, local=local, keep_last=2, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1), wait=True)
        filler = fill(small_disk, "bytes")
        pending = checkpointer.save(2, numbers(2))
        with pytest.raises(StorageError, match=f"disk/local/step_2: .*{FULL}"):
            pending.result(LONG_S)
        shutil.rmtree(filler)
        checkpointer.save(3, numbers(3))
    check(root, [1, 3])
    check(local, [3])


def test_a_full_root_behind_a_local_tier(small_disk: Path, tmp_path: Path) -> None:
    root, local = small_disk / "root", tmp_path / "local"
    with Checkpointer(root, local=local, keep_last=3, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1))
        checkpointer.wait()
        filler = fill(small_disk, "bytes")
        checkpointer.save(2, numbers(2)).result(LONG_S)
        with pytest.raises(
            StorageError, match=f"copying .*local/step_2 to .*root/step_2: .*{FULL}"
        ):
            checkpointer.wait()
        check(root, [1])
        check(root, [1, 2], local=local)
        shutil.rmtree(filler)
    with Checkpointer(root, local=local, keep_last=3, options=FAST) as checkpointer:
        checkpointer.save(3, numbers(3))
    check(root, [1, 2, 3])
    assert folders(root) == ["step_1", "step_2", "step_3"]


@pytest.mark.parametrize("keep_last", [1, 5])
def test_a_copy_that_failed_is_made_up_for(
    keep_last: int, small_disk: Path, tmp_path: Path
) -> None:
    root, local = small_disk / "root", tmp_path / "local"
    with Checkpointer(root, local=local, keep_last=keep_last, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1))
        checkpointer.wait()
        filler = fill(small_disk, "bytes")
        checkpointer.save(2, numbers(2))
        with pytest.raises(StorageError, match=FULL):
            checkpointer.wait()
        shutil.rmtree(filler)
        checkpointer.save(3, numbers(3))
    with Checkpointer(root, local=local, keep_last=keep_last, options=FAST) as checkpointer:
        checkpointer.save(4, numbers(4))
    check(root, [1, 2, 3, 4][-keep_last:])
    check(local, [4])


# --- folders that cannot be written to, that go away, that are none -------------------------------


@pytest.fixture
def unchangeable() -> Iterator[Callable[[Path, bool], None]]:
    """Makes a folder one that even root cannot change, or undoes that."""
    changed: set[Path] = set()

    def change(folder: Path, on: bool) -> None:
        command = ["chattr", "+i" if on else "-i", str(folder)]
        if not shutil.which("chattr") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this file system has no unchangeable folders, or not for this user")
        (changed.add if on else changed.discard)(folder)

    yield change
    for folder in changed.copy():
        change(folder, False)


def test_a_folder_that_nobody_can_change(
    tmp_path: Path, unchangeable: Callable[[Path, bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, keep_last=1, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1), wait=True)
        unchangeable(tmp_path, True)
        pending = checkpointer.save(2, numbers(2))
        with pytest.raises(StorageError, match=f"{tmp_path}/step_2: .*not permitted"):
            pending.result(LONG_S)
        checkpointer.save(3, numbers(3))
        with pytest.raises(StorageError, match="not permitted"):
            checkpointer.wait()
        check(tmp_path, [1])
        unchangeable(tmp_path, False)
        unchangeable(tmp_path / "step_1", True)
        checkpointer.save(4, numbers(4))
        checkpointer.wait()
        assert "cleaning up: " in caplog.text
        check(tmp_path, [1, 4])
        unchangeable(tmp_path / "step_1", False)
        checkpointer.save(5, numbers(5))
    check(tmp_path, [5])
    assert folders(tmp_path) == ["step_5"]


@pytest.mark.parametrize("with_local", [False, True])
def test_what_could_not_be_removed_is_removed_after_a_later_save(
    with_local: bool,
    tmp_path: Path,
    unchangeable: Callable[[Path, bool], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {"local": tmp_path / "local"} if with_local else {}
    root = tmp_path / ("local" if with_local else "run")
    with Checkpointer(tmp_path / "run", keep_last=1, options=FAST, **options) as checkpointer:
        checkpointer.save(1, numbers(1), wait=True)
        checkpointer.wait()
        (data,) = (root / "step_1" / "processes").glob("*/00000/d")
        unchangeable(data, True)
        for step in (2, 3, 4):  # step 1 has no manifest after the first of them
            checkpointer.save(step, numbers(step))
            checkpointer.wait()
        assert checkpointer.steps() == [4]
        assert "step_1" in folders(root)
        assert caplog.text.count("files are left in processes/") == 1
        unchangeable(data, False)
        checkpointer.save(5, numbers(5))
        checkpointer.wait()
        assert folders(root) == ["step_5"]


def test_a_read_only_mount(small_disk: Path, mount: Mount) -> None:
    with Checkpointer(small_disk, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1))
    mount("-o", "remount,ro", small_disk)
    checkpointer = Checkpointer(small_disk, options=FAST)
    pending = checkpointer.save(2, numbers(2))
    with pytest.raises(StorageError, match=f"{small_disk}: .*Read-only file system"):
        pending.result(LONG_S)
    pending = unickpt.save_async(small_disk / "step_3", numbers(3))
    with pytest.raises(StorageError, match=f"{small_disk}/step_3: .*Read-only file system"):
        pending.result(LONG_S)
    check(small_disk, [1])
    mount("-o", "remount,rw", small_disk)
    checkpointer.save(4, numbers(4))
    checkpointer.close()
    check(small_disk, [1, 4])
    assert folders(small_disk) == ["step_1", "step_4"]


def test_a_root_that_is_not_there_is_made(tmp_path: Path) -> None:
    root = tmp_path / "far" / "below" / "run"
    with Checkpointer(root, options=FAST) as checkpointer:
        assert checkpointer.steps() == []
        assert not root.exists(), "looking leaves no trace"
        checkpointer.save(1, numbers(1))
    check(root, [1])
    unickpt.save_async(tmp_path / "other" / "run" / "c", numbers(2)).result(LONG_S)
    assert same(unickpt.load(tmp_path / "other" / "run" / "c"), numbers(2))


def test_a_root_that_is_removed_while_a_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, stop = tmp_path / "run", Stop(monkeypatch)
    with Checkpointer(root, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1))
        assert stop.reached.wait(LONG_S)
        checkpointer.save(2, numbers(2))
        shutil.rmtree(root)
        stop.go_on.set()
        checkpointer.wait()
        check(root, [2])
        checkpointer.save(3, numbers(3))
    check(root, [2, 3])


def test_a_root_that_is_removed_is_still_held(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, options=FAST) as first, Checkpointer(root, options=FAST) as second:
        first.save(1, numbers(1), wait=True)
        shutil.rmtree(root)
        first.save(2, numbers(2), wait=True)
        with pytest.raises(SaveConflict):
            second.save(3, numbers(3), wait=True)


MOMENTS = [
    ("publish", "before"),
    ("publish", "after"),
    ("_build_root", "before"),
    ("_build_root", "after"),
    ("_write_root", "before"),
]


@pytest.mark.parametrize("removed", ["root", "step"])
@pytest.mark.parametrize(("step", "when"), MOMENTS)
def test_a_folder_that_is_removed_under_a_save(
    step: str, when: str, removed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    options = SaveOptions(fsync=False, timeout_s=1, chunk_bytes=4096)
    with Checkpointer(root, options=options) as checkpointer:
        checkpointer.save(1, numbers(1), wait=True)
        kind = attempt.Attempt if hasattr(attempt.Attempt, step) else coordinator.Coordinator
        real = getattr(kind, step)

        def removing(*arguments: Any, **named: Any) -> Any:
            if when == "after":
                result = real(*arguments, **named)
            shutil.rmtree(root if removed == "root" else root / "step_2")
            return result if when == "after" else real(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(kind, step, removing)
            pending = checkpointer.save(2, numbers(2))
            with pytest.raises((StorageError, SaveTimeout), match="step_2"):
                pending.result(LONG_S)
        kept = [] if removed == "root" else [1]
        check(root, kept)
        checkpointer.save(3, numbers(3), wait=True)
    check(root, [*kept, 3])
    with Checkpointer(root, options=options) as checkpointer:
        checkpointer.save(4, numbers(4))
    check(root, [*kept, 3, 4])
    assert folders(root) == [f"step_{n}" for n in (*kept, 3, 4)]


def test_a_file_in_place_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, stop = tmp_path / "run", Stop(monkeypatch)
    with Checkpointer(root, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1))
        assert stop.reached.wait(LONG_S)
        pending = checkpointer.save(2, numbers(2))
        (root / "step_2").write_text("precious")
        (root / "step_3").write_text("precious")
        stop.go_on.set()
        with pytest.raises(StorageError, match=r"step_2/: .*Not a directory"):
            pending.result(LONG_S)
        with pytest.raises(InvalidPath, match="step_3' is not a directory"):
            checkpointer.save(3, numbers(3))
        check(root, [1])
        checkpointer.save(4, numbers(4))
    check(root, [1, 4])
    assert (root / "step_2").read_text() == (root / "step_3").read_text() == "precious"


def test_a_file_in_place_of_the_root(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, options=FAST) as checkpointer:
        root.write_text("precious")
        with pytest.raises(InvalidPath, match="run' is not a directory"):
            checkpointer.save(1, numbers(1))
        with pytest.raises(InvalidPath, match="run' is not a directory"):
            checkpointer.steps()
        root.unlink()
        checkpointer.save(1, numbers(1))
    check(root, [1])


# --- S3 ------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """What an S3 server does wrong.

    Arguments:
        kind: "500" or "503"; "reset", which closes the connection; "lost", which does what is
            asked, but answers 500; "hold", which answers only once it is released.
        method: of the requests that it concerns; "" for all.
        key: what the path or the query of the request must hold.
        times: how often.
        then: what to do with a request that was held; "" to answer it as if nothing had been.
    """

    kind: str
    method: str = ""
    key: str = ""
    times: float = float("inf")
    then: str = ""
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class Server:
    """An S3 server with the bucket `faulty`, which does as its `fault` says."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self._lock = threading.Lock()
        s3_server.prepare_moto()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=_Handler
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        s3_server.make_bucket(self.endpoint, "faulty")

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def break_down(self, kind: str, **arguments: Any) -> Fault:
        self.fault = Fault(kind, **arguments)
        return self.fault

    def heal(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            fault.released.set()

    def _next(self, method: str, asked: str) -> Fault | None:
        with self._lock:
            fault = self.fault
            if fault is None or fault.times <= 0:
                return None
            if fault.method not in ("", method) or fault.key not in asked:
                return None
            fault.times -= 1
            return fault

    def _answer(self, request: dict[str, Any], start: Callable[..., Any]) -> Any:
        asked = f"{request['PATH_INFO']}?{request['QUERY_STRING']}"
        fault = self._next(request["REQUEST_METHOD"], asked)
        if fault is None:
            return self._app(request, start)
        kind = fault.kind
        if kind == "hold":
            fault.reached.set()
            assert fault.released.wait(LONG_S)
            kind = fault.then
            if not kind:
                return self._app(request, start)
        if kind == "lost":
            list(self._app(request, lambda *_: None))
        else:
            request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        fault.reached.set()
        if kind == "reset":
            reset: socket.socket = request["werkzeug.socket"]
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(reset.detach())  # at once, although there are files made of it
            raise ConnectionResetError
        code = "SlowDown" if kind == "503" else "InternalError"
        start(f"{503 if kind == '503' else 500} {code}", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()]


class _Handler(WSGIRequestHandler):
    def log(self, *arguments: Any, **named: Any) -> None:
        pass

    def connection_dropped(self, *arguments: Any, **named: Any) -> None:
        self.close_connection = True


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def s3(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    s3_server.use(server.endpoint, monkeypatch)
    monkeypatch.setattr(lease, "_RENEW_S", 0.1)
    monkeypatch.setattr(lease, "_EXPIRES_S", 0.5)
    monkeypatch.setattr(participant, "_GRACE_S", 0.2)
    yield server
    server.heal()


@pytest.fixture
def run(s3: Server, tmp_path: Path) -> str:
    """A folder of its own."""
    return f"s3://faulty/{tmp_path.name}"


def keys(url: str) -> list[str]:
    """All objects below a path."""
    store = paths.resolve(url).store(paths.context())
    return sorted(key.decode() for key in store.list().result())


def step_names(url: str) -> set[str]:
    return {key.partition("/")[0] for key in keys(url)}


def test_s3_steps_are_saved_removed_and_resumed_from(run: str) -> None:
    with Checkpointer(run, keep_last=2, options=FAST) as checkpointer:
        for step in range(5):
            checkpointer.save(step, numbers(step))
        checkpointer.wait()
        assert step_names(run) == {"step_3", "step_4", ".unickpt.lock"}
    assert step_names(run) == {"step_3", "step_4"}
    check(run, [3, 4])
    with Checkpointer(run, keep_last=2, options=FAST) as checkpointer:
        assert same(checkpointer.load(numbers(0)), numbers(4))
        assert checkpointer.loaded_step == 4
        checkpointer.save(5, numbers(5))
    check(run, [4, 5])


def test_s3_of_two_jobs_the_second_is_refused(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_EXPIRES_S", LONG_S)  # on a busy machine renewing may take long
    with Checkpointer(run, options=FAST) as first, Checkpointer(run, options=FAST) as second:
        first.save(1, numbers(1), wait=True)
        pending = second.save(2, numbers(2))
        with pytest.raises(SaveConflict, match="another Checkpointer of this same process"):
            pending.result(LONG_S)
        first.save(3, numbers(3), wait=True)
        first.close()
        second.save(4, numbers(4), wait=True)
    check(run, [1, 3, 4])


JOB = f"""
import json, sys
sys.path.insert(0, {TESTS!r})
import unickpt
from support.saving import numbers
from unickpt.commit import lease
lease._RENEW_S = 0.1
checkpointer = unickpt.Checkpointer(ARGS[0], options=unickpt.SaveOptions(chunk_bytes=65536))
said = []
for step in (1, 2):
    try:
        checkpointer.save(step, numbers(step), wait=True)
        said.append("saved")
    except unickpt.UnickptError as error:
        said.append(f"{{type(error).__name__}}: {{error}}")
checkpointer.close()
print(json.dumps(said))
"""


def test_s3_a_job_that_was_killed_is_taken_over(s3: Server, run: str, forks: Forks) -> None:
    fault = s3.break_down("hold", method="PUT", key="step_2/processes", then="reset")
    doomed = forks.start(JOB, run)
    assert fault.reached.wait(LONG_S)
    forks.kill(doomed)
    assert forks.wait(doomed).code == -9
    s3.heal()
    with Checkpointer(run, options=FAST) as checkpointer:
        assert checkpointer.steps() == [1]
        checkpointer.save(3, numbers(3), wait=True)
    check(run, [1, 3])
    assert step_names(run) == {"step_1", "step_3"}


def test_s3_a_commit_that_comes_after_the_lease_was_lost(
    s3: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_RENEW_S", 3600.0)  # cut off, as far as others can see
    first = Checkpointer(run, options=FAST)
    first.save(1, numbers(1), wait=True)
    monkeypatch.setattr(lease, "_RENEW_S", 0.1)
    fault = s3.break_down("hold", method="PUT", key="step_2/manifest.ocdbt", times=1)
    pending = first.save(2, numbers(2))
    assert fault.reached.wait(LONG_S)
    with Checkpointer(run, options=FAST) as second:
        second.save(3, numbers(3), wait=True)
        s3.heal()
        pending.result(LONG_S)  # late, but whole: what it had written was left alone
        first.close()
        check(run, [1, 2, 3])


def test_s3_behind_a_local_tier(run: str, tmp_path: Path) -> None:
    local = tmp_path / "local"
    with Checkpointer(run, local=local, keep_last=2, options=FAST) as checkpointer:
        for step in range(4):
            checkpointer.save(step, numbers(step))
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
        assert checkpointer.path(3) == f"{run}/step_3"
    check(run, [2, 3])
    check(local, [3])
    assert step_names(run) == {"step_2", "step_3"}
    shutil.rmtree(local)
    with Checkpointer(run, local=local, options=FAST) as checkpointer:
        assert same(checkpointer.load(), numbers(3))


# --- S3 that fails for a while -------------------------------------------------------------------

KINDS = ["500", "503", "reset"]


@pytest.mark.parametrize(
    ("kind", "method", "key"),
    [("500", "PUT", "/d/"), ("503", "", ""), ("reset", "PUT", "step_2/manifest.ocdbt")],
)
def test_s3_that_fails_for_a_while_costs_only_time(
    kind: str, method: str, key: str, s3: Server, run: str
) -> None:
    with Checkpointer(run, keep_last=1, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1), wait=True)
        fault = s3.break_down(kind, method=method, key=key, times=1)
        checkpointer.save(2, numbers(2))
        checkpointer.wait()
        assert fault.times == 0
    check(run, [2])
    assert step_names(run) == {"step_2"}


@pytest.mark.parametrize(
    ("attempts", "key"),
    [
        ("2", "/d/"),
        ("2", "processes/"),
        ("2", "step_1/manifest.ocdbt"),
        ("1", "step_1/manifest.ocdbt"),
    ],
)
def test_s3_whose_answer_is_lost(
    attempts: str, key: str, s3: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked is done, but only asking again tells."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", attempts)
    with Checkpointer(run, options=FAST) as checkpointer:
        fault = s3.break_down("lost", method="PUT", key=key, times=1)
        checkpointer.save(1, numbers(1), wait=True)
        assert fault.times == 0
    check(run, [1])


def test_s3_whose_answer_about_the_lease_is_lost(s3: Server, run: str) -> None:
    fault = s3.break_down("lost", method="PUT", key=lease.NAME, times=1)
    with Checkpointer(run, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1), wait=True)
        assert fault.times == 0
    check(run, [1])


def test_s3_whose_answer_about_renewing_is_lost(
    s3: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_EXPIRES_S", 2.0)  # a request that is tried again takes a while
    with Checkpointer(run, options=FAST) as first, Checkpointer(run, options=FAST) as second:
        first.save(1, numbers(1), wait=True)
        fault = s3.break_down("lost", method="PUT", key=lease.NAME, times=1)
        assert fault.reached.wait(LONG_S)
        with pytest.raises(SaveConflict):
            second.save(2, numbers(2), wait=True)
        first.save(3, numbers(3), wait=True)
    check(run, [1, 3])
    assert lease.NAME not in keys(run), "it was given back"


# --- S3 that answers late ------------------------------------------------------------------------


def test_s3_that_is_slow_keeps_the_training_thread_free(s3: Server, run: str) -> None:
    fault = s3.break_down("hold")
    tree = numbers(1)
    with Checkpointer(run, options=FAST) as checkpointer:
        both = [
            unickpt.save_async(f"{run}-alone/step_1", tree, options=FAST),
            checkpointer.save(1, tree),
        ]
        for pending in both:
            pending.wait_staged(LONG_S)
            with pytest.raises(SaveTimeout, match="not committed within"):
                pending.result(0.01)
        tree["large"][:] = 0
        assert fault.reached.wait(LONG_S)
        s3.heal()
        for pending in both:
            pending.result(LONG_S)
    check(run, [1])
    check(f"{run}-alone", [1])


def test_s3_that_never_answers_fails_the_save(
    s3: Server, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorStore waits for 60 s without another word; the shorter time is for the test alone."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    forks = Forks(tmp_path, env={"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1"})
    fault = s3.break_down("hold", method="PUT", key="step_2/processes", then="reset")
    try:
        ended = forks.wait(forks.start(JOB, run))
    finally:
        forks.close()
        s3.heal()
    assert fault.reached.is_set()
    assert ended.code == 0, ended.out
    first, second = ended.last
    assert first == "saved"
    assert second.startswith(f"StorageError: saving to {run}/step_2: the storage failed: "), second
    check(run, [1])


# --- S3 that fails for good ----------------------------------------------------------------------

PLACES = [
    *((kind, "", "") for kind in KINDS),
    ("500", "PUT", "/d/"),
    ("reset", "PUT", "step_{}/processes"),
    *((kind, "PUT", "step_{}/manifest.ocdbt") for kind in KINDS),
    ("503", "", lease.NAME),
    ("reset", "GET", ""),
]


@pytest.mark.parametrize(("kind", "method", "key"), PLACES)
def test_s3_that_fails_for_good_fails_the_save(
    kind: str, method: str, key: str, s3: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(lease, "_SETTLES_S", 0.0)
    checkpointer = Checkpointer(run, options=FAST)
    checkpointer.save(1, numbers(1), wait=True)
    s3.break_down(kind, method=method, key=key.format(2))
    with pytest.raises(StorageError, match=run):
        checkpointer.save(2, numbers(2)).result(LONG_S)
    if not key and not method:
        with pytest.raises(StorageError, match=run):
            checkpointer.steps()
    s3.break_down(kind, method=method, key=key.format(3))
    checkpointer.save(3, numbers(3))
    with pytest.raises(StorageError, match=f"{run}/step_3"):
        checkpointer.close()
    s3.heal()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "10")  # moto itself fails rarely
    check(run, [1])
    with Checkpointer(run, options=FAST) as checkpointer:
        checkpointer.save(4, numbers(4))
    check(run, [1, 4])
    assert step_names(run) == {"step_1", "step_4"}


def test_s3_that_fails_at_the_first_save(
    s3: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3.break_down("500")
    checkpointer = Checkpointer(run, options=FAST)
    pending = checkpointer.save(1, numbers(1))
    assert wait([pending._finished], LONG_S).done
    with pytest.raises(StorageError, match=run):
        checkpointer.save(2, numbers(2))
    s3.heal()
    checkpointer.save(3, numbers(3))
    checkpointer.close()
    check(run, [3])
    assert step_names(run) == {"step_3"}


def test_s3_that_fails_while_steps_are_removed(
    s3: Server, run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with Checkpointer(run, keep_last=1, options=FAST) as checkpointer:
        checkpointer.save(1, numbers(1), wait=True)
        s3.break_down("503", method="DELETE", key="step_1/processes")
        checkpointer.save(2, numbers(2))
        checkpointer.wait()
        assert "cleaning up: " in caplog.text
        s3.heal()
        check(run, [2])
    with Checkpointer(run, keep_last=1, options=FAST) as checkpointer:
        checkpointer.save(3, numbers(3))
    check(run, [3])
    assert step_names(run) == {"step_3"}


# --- S3 that fails behind a local tier -----------------------------------------------------------

COPIES = [
    ("500", "PUT", "step_2/processes"),
    ("reset", "PUT", "step_2/manifest.ocdbt"),
    ("503", "GET", lease.NAME),
    ("500", "", ""),
]


@pytest.mark.parametrize(("kind", "method", "key"), COPIES)
def test_s3_that_fails_while_a_step_is_copied(
    kind: str,
    method: str,
    key: str,
    s3: Server,
    run: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    def break_down(url: str) -> None:
        """Between the local commit and the copy."""
        if url.endswith("step_2/"):
            s3.break_down(kind, method=method, key=key)

    after_commit(monkeypatch, break_down)
    local = tmp_path / "local"
    checkpointer = Checkpointer(run, local=local, keep_last=5, options=FAST)
    try:
        checkpointer.save(1, numbers(1))
        checkpointer.wait()
        checkpointer.save(2, numbers(2)).result(LONG_S)
        with pytest.raises(StorageError, match=run) as caught:
            checkpointer.wait()
        assert any("copying a step to" in note for note in caught.value.__notes__)
    finally:
        s3.heal()
        checkpointer.close()
    assert lease.NAME not in keys(run)
    check(run, [1])
    check(run, [1, 2], local=local)
    with Checkpointer(run, local=local, keep_last=5, options=FAST) as checkpointer:
        checkpointer.save(3, numbers(3))
    check(run, [1, 2, 3])


def test_s3_that_is_slow_holds_up_no_local_commit(s3: Server, run: str, tmp_path: Path) -> None:
    local = tmp_path / "local"
    with Checkpointer(run, local=local, options=FAST) as checkpointer:
        fault = s3.break_down("hold", method="PUT", key="step_1/processes")
        checkpointer.save(1, numbers(1)).result(LONG_S)
        assert fault.reached.wait(LONG_S)
        checkpointer.save(2, numbers(2)).result(LONG_S)
        check(local, [1, 2])
        check(run, [])
        s3.heal()
    check(run, [1, 2])
    check(local, [2])


@pytest.mark.parametrize("key", ["", "list-type", lease.NAME])
def test_s3_that_fails_keeps_no_step_from_the_local_tier(
    key: str, s3: Server, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    local = tmp_path / "local"
    checkpointer = Checkpointer(run, local=local, options=FAST)
    try:
        checkpointer.save(1, numbers(1))
        checkpointer.wait()
        s3.break_down("503", method="GET", key=key)
        checkpointer.save(2, numbers(2)).result(LONG_S)
        check(local, [1, 2])
        with pytest.raises(StorageError, match=run):
            checkpointer.wait()
        s3.heal()
        checkpointer.save(3, numbers(3))
        checkpointer.wait()
        check(run, [1, 2, 3])
    finally:
        s3.heal()
        checkpointer.close()


def test_s3_that_fails_at_first_is_sent_all_that_was_left(
    s3: Server, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    local = tmp_path / "local"
    unickpt.save(local / "step_1", numbers(1))
    with Checkpointer(run, local=local, options=FAST) as checkpointer:
        s3.break_down("503", method="GET", key="list-type")
        checkpointer.save(2, numbers(2), wait=True)
        with pytest.raises(StorageError, match=run):
            checkpointer.wait()
        s3.heal()
        checkpointer.save(3, numbers(3))
    check(run, [1, 2, 3])


# --- one process of a job ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "failing"), [("/00001/", 1), (lease.NAME, 0), ("step_1/manifest.ocdbt", 0)]
)
def test_s3_that_fails_one_process_fails_all(
    key: str, failing: int, s3: Server, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3.break_down("500", method="PUT", key=key)
    together = threading.Barrier(3)

    def work(group: ProcessGroup) -> Exception:
        options = SaveOptions(group=group, timeout_s=20, chunk_bytes=8192)
        with Checkpointer(run, options=options) as checkpointer:
            with pytest.raises((StorageError, ProcessFailed)) as caught:
                checkpointer.save(1, numbers(1)).result(LONG_S)
            together.wait(LONG_S)
            s3.heal()
            checkpointer.save(2, numbers(2))
        return caught.value

    errors = in_job(3, work)
    for index, error in enumerate(errors):
        assert isinstance(error, StorageError if index == failing else ProcessFailed), error
        assert "InternalError" in str(error)
    assert f"process {failing} failed: " in str(errors[2])
    check(run, [2])


def test_a_process_that_cannot_write_even_a_note(tmp_path: Path, mount: Mount) -> None:
    """To the others it is as good as dead."""
    root, view = tmp_path / "root", tmp_path / "view"
    root.mkdir()
    view.mkdir()
    mount("--bind", root, view)
    mount("-o", "remount,bind,ro", view)

    def work(group: ProcessGroup) -> Exception:
        options = SaveOptions(group=group, timeout_s=1, chunk_bytes=8192, fsync=False)
        with (
            Checkpointer(view if group.index == 1 else root, options=options) as checkpointer,
            pytest.raises((StorageError, SaveTimeout)) as caught,
        ):
            checkpointer.save(1, numbers(1)).result(LONG_S)
        return caught.value

    first, second = in_job(2, work)
    assert isinstance(first, SaveTimeout), first
    assert "process 1 (not begun) did not finish" in str(first)
    assert isinstance(second, StorageError), second
    assert "Read-only file system" in str(second)
    check(root, [])
    with Checkpointer(root, options=FAST) as checkpointer:
        checkpointer.save(2, numbers(2))
    check(root, [2])
    assert folders(root) == ["step_2"]
