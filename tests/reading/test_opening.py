"""Reading beside those who overwrite or remove, in forked processes, and after a pickle."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS, s3_server
from support.forks import Forks
from support.numbered_trees import SHAPES, number_of, tree
from support.processes import Processes

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound, StorageError
from unickpt.commit.coordinator import Coordinator
from unickpt.errors import CheckpointReplaced
from unickpt.format import chunk_encoding, index_json, verified_chunks
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.loading import views
from unickpt.reading import array_reader, checkpoint, chunk_reader, read_plan
from unickpt.runs.checkpointer import Checkpointer
from unickpt.storage import database, paths, regular_files
from unickpt.storage.btree import nodes
from unickpt.storage.data_files import DataFile
from unickpt.storage.database import Database
from unickpt.testing.thread_groups import Threads

# --- overwriting --------------------------------------------------------------------------------

WRITER = """
import os, sys
sys.path.insert(0, ARGS[0])
import unickpt
from support.numbered_trees import tree
number = 0
while not os.path.exists(ARGS[3]):
    number += 1
    given = unickpt.SaveOptions(fsync=False, chunk_bytes=64 << 10, compression=ARGS[2])
    unickpt.save(ARGS[1], tree(number), overwrite=True, options=given)
print(number)
"""

READER = """
import collections, json, sys
sys.path.insert(0, ARGS[0])
import numpy as np
import unickpt
from support.numbered_trees import number_of, tree
path, rounds, seen = ARGS[1], ARGS[2], collections.Counter()
into = tree(0)
while seen["load"] < rounds:
    seen["load"] += 1
    number_of(unickpt.load(path))
    if seen["load"] % 3 == 0:
        number_of(unickpt.load(path, into))
        report = unickpt.verify(path)
        assert report.ok, report
        seen["verify"] += 1
        stored = unickpt.open(path)
        try:
            assert (stored["rows"][3:9, ::7] == stored.values["number"]).all()
            seen["slices"] += 1
        except unickpt.errors.CheckpointReplaced:
            seen["replaced"] += 1
print(json.dumps(seen))
"""


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_readers_beside_overwrites_see_one_whole_version(
    compression: str | None, forks: Forks, tmp_path: Path
) -> None:
    path, stop, here = str(tmp_path / "c"), tmp_path / "stop", TESTS
    unickpt.save(path, tree(0))
    writer = forks.start(WRITER, here, path, compression, str(stop))
    readers = [forks.start(READER, here, path, 60) for _ in range(2)]
    try:
        ended = forks.wait_all(readers)
    finally:
        stop.touch()
    for reader in ended:
        assert reader.code == 0, reader.out
        assert reader.last["load"] == 60
    assert forks.wait(writer).last > 10, "too few overwrites for a race"


def replacing_once(monkeypatch: pytest.MonkeyPatch, path: Any) -> list[int]:
    """Has another save replace the checkpoint right before the first chunk of it is read."""
    numbers = [2]

    def replace() -> None:
        if numbers:
            unickpt.save(path, tree(numbers.pop()), overwrite=True)

    before_chunks(monkeypatch, replace)
    return numbers


def before_chunks(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Does something before chunks are read, each time."""
    real = verified_chunks.ChunkStore.read

    def read(*arguments: Any) -> Any:
        act()
        return real(*arguments)

    monkeypatch.setattr(verified_chunks.ChunkStore, "read", read)


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "s3":
        moto = request.getfixturevalue("moto")
        s3_server.use(moto, monkeypatch)
        s3_server.make_bucket(moto, "opening")
        return f"s3://opening/{tmp_path.name}"
    return str(tmp_path / "c") if request.param == "local" else f"memory://{tmp_path.name}"


def test_what_is_replaced_while_it_is_read_is_read_again(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(place, tree(1))
    monkeypatch.setattr(regular_files, "_MOST_KEPT", 0)  # what is open already is read to its end
    left = replacing_once(monkeypatch, place)
    assert number_of(unickpt.load(place, tree(0))) == 2
    assert not left
    monkeypatch.undo()


def test_verify_of_what_is_replaced_meanwhile_tells_no_damage(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(place, tree(1))
    left = replacing_once(monkeypatch, place)
    assert unickpt.verify(place).damage == ()
    assert not left


@pytest.mark.plugins
@pytest.mark.parametrize("removed", [False, True])
def test_processes_that_exchange_never_mix_two_checkpoints(
    removed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, opened, turn = tmp_path / "c", checkpoint._open, [], threading.Lock()
    unickpt.save(path, tree(1))

    def open_in_turn(of: Any, hints: Any) -> unickpt.Checkpoint:
        with turn:
            opened.append(real(of, hints))
            if len(opened) == 2:  # of four
                unickpt.save(path, tree(2), overwrite=True)
            if removed and len(opened) == 4:
                (path / "manifest.ocdbt").unlink()
        return opened[-1]

    monkeypatch.setattr(checkpoint, "_open", open_in_turn)
    # For a moment after the commit, the data of the old one is still there.
    monkeypatch.setattr(Coordinator, "_remove_older_attempts", lambda *_: None)
    found = Threads(4).run(lambda index, options: unickpt.load(path, tree(0), options=options))
    if removed:
        assert {type(error) for error in found} == {CheckpointNotFound}
        assert all("removed while it was being read" in str(error) for error in found)
    else:
        assert [number_of(each) for each in found] == [2] * 4
        assert len(opened) == 8


def test_an_opened_array_says_that_its_checkpoint_was_replaced(place: str) -> None:
    unickpt.save(place, tree(1))
    opened = unickpt.open(place)
    unickpt.save(place, tree(2), overwrite=True)
    with pytest.raises(CheckpointReplaced, match="another save replaced this checkpoint while"):
        opened["rows"][...]


def test_one_that_is_replaced_at_every_look_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path / "c", tree(1))
    pins, real = list[Any](), Database.pinned

    def pinned(self: Database) -> Any:
        found = real(self)
        pins.append(found)
        given = unickpt.SaveOptions(fsync=False)
        with pytest.MonkeyPatch.context() as patch:  # a save opens what it replaces, too
            patch.setattr(Database, "pinned", real)
            unickpt.save(tmp_path / "c", tree(len(pins) + 1), overwrite=True, options=given)
        return found

    monkeypatch.setattr(Database, "pinned", pinned)
    with pytest.raises(CheckpointReplaced, match="open it again"):
        unickpt.open(tmp_path / "c")
    assert len(pins) < 100


def test_one_that_is_removed_while_it_is_read_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path / "step_1", tree(1))
    monkeypatch.setattr(regular_files, "_MOST_KEPT", 0)  # what is open already is read to its end
    before_chunks(monkeypatch, lambda: Checkpointer(tmp_path)._steps.root.remove(1))
    with pytest.raises(CheckpointNotFound, match="and was removed while it was being read"):
        unickpt.load(tmp_path / "step_1")


def test_damage_is_still_damage(place: str) -> None:
    """Although it is looked for first whether the checkpoint was replaced."""
    unickpt.save(place, tree(1))
    location = paths.resolve(place)
    store = location.store(paths.context())
    (key,) = [k.decode() for k in store.list().result() if b"/00000/d/" in k]
    data = bytearray(store.read(key).result().value)
    data[data.index(np.full(9, 1.0).tobytes()) + 3] ^= 1
    store.write(key, bytes(data)).result()
    with pytest.raises(CheckpointCorrupt, match="do not match their digest"):
        unickpt.load(place)
    assert not unickpt.verify(place).ok
    store.write(key, None).result()
    with pytest.raises(CheckpointCorrupt, match="stored data is damaged or missing"):
        unickpt.load(place)


# --- what is not there --------------------------------------------------------------------------


def test_the_folder_of_a_run_is_named_as_one(place: str) -> None:
    for step in (9, 10):
        unickpt.save(f"{place}/step_{step}", tree(step))
    said = (
        r"it contains checkpoints but is not one itself \(step_9, step_10\); load the newest with "
    )
    with pytest.raises(CheckpointNotFound, match=said) as caught:
        unickpt.load(place)
    assert f"unickpt.Checkpointer({place!r}).load()" in str(caught.value)
    newest = str(caught.value).rpartition(" such as ")[2].strip("'")
    assert number_of(unickpt.load(newest)) == 10


def test_other_folders_of_checkpoints_are_listed(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "best", tree(1))
    with pytest.raises(
        CheckpointNotFound, match=r"\(best\); give the path of one, such as '.*/best'"
    ):
        unickpt.open(tmp_path)


@pytest.mark.parametrize(
    ("parent", "reason"),
    [("/proc/unickpt", "No such file or directory"), ("/sys", "ermi|Read-only|No such file")],
)
def test_a_directory_that_cannot_be_made_is_named(parent: str, reason: str) -> None:
    with pytest.raises(StorageError, match=reason) as caught:
        unickpt.save(f"{parent}/step_1", tree(1))
    said = str(caught.value)
    assert said.startswith(f"saving to {parent}/step_1: the storage failed: cannot make the direc")
    assert "Save to a path where directories can be made" in said
    assert "os_error_code" not in said


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    for act in (lambda path: unickpt.save(path, tree(1)), unickpt.load, unickpt.verify):
        with pytest.raises(
            unickpt.errors.InvalidPath, match="File name too long; give a shorter one"
        ):
            act(tmp_path / ("x" * 300))


# --- bugs of our own ----------------------------------------------------------------------------

BUGS = [ValueError("boom"), IndexError("boom"), OSError("boom"), NotImplementedError("boom")]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: type(bug).__name__)
def test_a_bug_is_never_told_as_damage(
    bug: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor as a storage that failed: it comes out as it is."""
    path = tmp_path / "c"
    unickpt.save(path, tree(1))

    def fail(*arguments: Any, **options: Any) -> Any:
        raise bug

    def outcome(holder: Any, name: str, act: Any) -> BaseException | None:
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, fail)
            try:
                act()
            except Exception as error:
                return error
        return None

    places: list[tuple[Any, str]] = [
        (read_plan.Piece, "place"), (chunk_reader, "_direct"), (array_reader, "consumers_of"),
        (verified_chunks, "chunk_key"),
        (database, "_bytes_of"), (nodes, "_keys"),
        (views.StoredView, "jobs"), (index_json, "_layout"),
        (index_json, "_array"),
        (OcdbtReader, "check_backed"), (verified_chunks.ChunkStore, "read"),
        (verified_chunks.ChunkDigests, "check_length"),
    ]  # fmt: skip
    strided = {k: np.zeros((*s[:-1], 2 * s[-1]))[..., ::2] for k, s in SHAPES.items()}
    like = {**strided, "number": 0}
    for holder, name in places:
        found = outcome(holder, name, lambda: (unickpt.load(path, like), unickpt.verify(path)))
        assert found is bug, name
    saving: list[tuple[Any, str]] = [
        (Coordinator, "_merge"), (Coordinator, "_build_root"), (chunk_encoding, "bytes_of"),
        (chunk_encoding, "encode"), (DataFile, "add"), (index_json, "encode"),
    ]  # fmt: skip
    other = {"w": np.ones(20_000)}
    for holder, name in saving:
        found = outcome(holder, name, lambda: unickpt.save(path, other, overwrite=True))
        assert found is bug, name
    assert number_of(unickpt.load(path)) == 1


# --- fork and pickle ----------------------------------------------------------------------------

FORKING = """
import os, sys
import numpy as np
import unickpt
path, used = sys.argv[1], sys.argv[2] == "used"
opened = None
if used:
    unickpt.save(path, {"w": np.arange(9)})
    opened = unickpt.open(path)
else:
    root = unickpt.Checkpointer(path)
said = []
pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
for act in (
    lambda: unickpt.save(path, {"w": np.arange(9)}, overwrite=True),
    lambda: unickpt.load(path),
    lambda: unickpt.verify(path),
    lambda: unickpt.Checkpointer(path).save(1, {"w": 1}, wait=True),
    lambda: opened["w"][...],
):
    try:
        act()
        print("fine")
    except unickpt.errors.ForkedProcess as error:
        print("told" if 'multiprocessing_context="spawn"' in str(error) else error)
    except Exception as error:
        print(type(error).__name__, error)
    if not used:
        break
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("used", ["used", "imported"])
def test_after_a_fork_unickpt_works_or_says_why_not(
    used: str, processes: Processes, tmp_path: Path
) -> None:
    (out,) = processes.finish([processes.start(FORKING, tmp_path / "c", used)])
    # A local folder is read without TensorStore.
    assert out.split() == (["told", "fine", "fine", "told", "fine"] if used == "used" else ["fine"])


UNPICKLING = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    try:
        checkpoint, array, plain = pickle.load(file)
        print(array[2:4].tolist(), list(checkpoint), dict(plain), array._checkpoint is checkpoint)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_checkpoints_and_arrays_can_be_pickled(processes: Processes, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"w": np.arange(9), "n": 3})
    opened = unickpt.open(tmp_path / "c")
    pickled = tmp_path / "pickled"
    pickled.write_bytes(pickle.dumps((opened, opened["w"], opened.values)))
    (out,) = processes.finish([processes.start(UNPICKLING, pickled)])
    assert out.strip() == "[2, 3] ['w'] {'n': 3} True"
    unickpt.save(tmp_path / "c", {"w": np.arange(9), "n": 4}, overwrite=True)
    with pytest.raises(CheckpointReplaced, match=r"the pickled checkpoint, created 20.*again"):
        pickle.loads(pickled.read_bytes())


# --- noise --------------------------------------------------------------------------------------

ON_S3 = """
import sys
import threading
import numpy as np
import unickpt
for _ in range(2):
    try:
        unickpt.save(sys.argv[1], {"w": np.arange(5)}, overwrite=True)
        print(unickpt.load(sys.argv[1])["w"].tolist())
    except unickpt.StorageError as error:
        print(error)
"""


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("metadata", [True, False])
def test_s3_without_files_of_credentials_is_silent(
    keys: bool, metadata: bool, moto: str, tmp_path: Path
) -> None:
    s3_server.make_bucket(moto, "silent")
    env = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    env |= {"HOME": str(tmp_path), "AWS_ENDPOINT_URL": moto, "AWS_REGION": "us-east-1"}
    env |= {"AWS_MAX_ATTEMPTS": "2"}
    if keys:
        env |= {"AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": "anything"}
    if not metadata:
        env |= {"AWS_EC2_METADATA_DISABLED": "true"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_S3, f"s3://silent/{keys}{metadata}"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stderr == ""
    assert len(ran.stdout.splitlines()) == 2
    if keys:
        assert ran.stdout == "[0, 1, 2, 3, 4]\n" * 2
    else:
        assert "the server answered 403: check the credentials" in ran.stdout
        assert "x-amzn-requestid" not in ran.stdout


def test_an_array_of_no_axes_becomes_an_array_of_numpy() -> None:
    unickpt.save("memory://opening/scalar", {"x": np.array(2.5, np.float32)})
    found = np.asarray(unickpt.open("memory://opening/scalar")["x"])
    assert (found.dtype, found.shape, found.item()) == (np.float32, (), 2.5)


@pytest.mark.parametrize("read", [unickpt.load, unickpt.verify])
def test_only_a_path_is_opened_again_when_it_was_replaced(
    read: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open checkpoint stays replaced: to read it again and again would only take long."""
    unickpt.save(tmp_path / "c", {"w": np.ones(3)})
    opened, reads, attempts = unickpt.open(tmp_path / "c"), 0, []

    def replaced(*_: Any, **__: Any) -> Any:
        nonlocal reads
        reads += 1
        raise CheckpointReplaced("another save replaced it")

    monkeypatch.setattr(OcdbtReader, "read", replaced)
    monkeypatch.setattr(OcdbtReader, "check_unchanged", replaced)
    for source in (opened, tmp_path / "c"):
        reads = 0
        with pytest.raises(CheckpointReplaced):
            read(source)
        attempts.append(reads)
    assert attempts[0] == 1
    assert attempts[1] >= checkpoint._MOST_ATTEMPTS
