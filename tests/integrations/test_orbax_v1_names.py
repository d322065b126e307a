"""Names of `orbax.checkpoint.v1` beside those that save and load a run: Context, options, handlers,
metadata, deletion. Each is ours, Orbax's own, or refused with what to use."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import CheckpointExists, LoadMismatch, UnsupportedLeaf

jax = pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint.experimental.v1")
import jax.numpy as jnp  # noqa: E402
from orbax.checkpoint import v1 as theirs  # noqa: E402

from unickpt.integrations.orbax import v1 as ours  # noqa: E402
from unickpt.integrations.orbax import v1_names  # noqa: E402

pytestmark = [
    pytest.mark.integration,  # imports Orbax
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]
BOTH = pytest.mark.parametrize("ocp", [theirs, ours], ids=["orbax", "unickpt"])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Orbax logs each step."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def context(**options: Any) -> Any:
    """Orbax's Context with options by their paths, with __ for dots."""
    made = theirs.Context()
    for path, value in options.items():
        *above, last = path.split("__")
        at = made
        for name in above:
            at = getattr(at, name)
        setattr(at, last, value)
    return made


# --- names ---------------------------------------------------------------------------------------

OURS = ("errors", "training", "training.errors")
"""Modules with classes of ours."""
POLICIES = ("training.save_decision_policies", "training.preservation_policies")


def public(module: Any) -> Iterator[str]:
    """What a module of Orbax offers, not what it imports for itself."""
    for name in dir(module):
        value = getattr(module, name)
        of = getattr(
            value, "__module__", value.__name__ if isinstance(value, types.ModuleType) else ""
        )
        if not name.startswith("_") and str(of or "").startswith("orbax"):
            yield name


def found(module: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        module = getattr(module, name)
    return module


@pytest.mark.parametrize("path", ["", *OURS, *POLICIES])
def test_each_public_name_resolves_or_says_what_to_use(path: str) -> None:
    names = [n for n in public(found(theirs, path)) if path not in POLICIES or n[0].isupper()]
    assert names
    refused = v1_names.REFUSED.get(path, {})
    for name in names:
        if name in refused:
            with pytest.raises(AttributeError, match=r"is not supported: .*unickpt="):
                getattr(found(ours, path), name)
        else:
            value = getattr(found(ours, path), name)
            is_own = path == "" and name in v1_names.OWN
            assert (value is getattr(theirs, name)) == is_own if path == "" else value is not None
    assert set(dir(found(ours, path))) >= set(names) - set(refused) - set(POLICIES)


def test_what_saves_or_loads_is_never_orbaxs_own() -> None:
    for name in public(theirs):
        if any(word in name for word in ("save", "load", "metadata", "delete", "is_orbax")):
            assert getattr(ours, name).__module__.startswith("unickpt."), name
    for name in ("Checkpointer", "CheckpointMetadata", "RootMetadata"):
        assert getattr(ours.training, name).__module__.startswith("unickpt."), name


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(AttributeError, match=r"there are .*load_checkpointables.*orbax.checkpoint"):
        _ = ours.load_everything
    with pytest.raises(AttributeError, match=r"v1\.training\.Loader; there are Checkpoint"):
        _ = ours.training.Loader


def test_ours_work_without_orbax() -> None:
    source = """
import sys
sys.modules["orbax"] = sys.modules["orbax.checkpoint"] = None
import numpy as np
from unickpt.integrations.orbax import v1 as ocp
ocp.save("memory://one", {"w": np.ones(2), "n": 3})
assert ocp.load_async("memory://one").result()["n"] == 3
assert ocp.metadata("memory://one").metadata["w"].shape == (2,)
assert ocp.delete("memory://one") and not ocp.is_orbax_checkpoint("memory://one")
try:
    ocp.Context
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Context" in done.stdout
    assert "install orbax-checkpoint" in done.stdout


# --- Context -------------------------------------------------------------------------------------


@BOTH
def test_a_part_is_loaded_with_partial_load(ocp: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "c", {"a": np.arange(3), "b": np.ones(2)})
    with context(pytree__loading__partial_load=True):
        assert list(ours.load(tmp_path / "c", {"a": np.zeros(3, int)})) == ["a"]
    with pytest.raises(LoadMismatch, match="b"):
        ours.load(tmp_path / "c", {"a": np.zeros(3, int)})


@BOTH
def test_arrays_are_cast_as_the_context_says(ocp: Any, tmp_path: Path) -> None:
    tree = {"big": jnp.arange(4.0), "small": np.arange(4.0), "n": 3, "key": jax.random.key(0)}
    if ocp is theirs:
        del tree["key"]  # its own version of this casts it, and fails
    storage = theirs.options.ArrayOptions.Saving.StorageOptions

    def small(path: Any, value: Any) -> Any:
        return storage(dtype=jnp.float16) if "small" in jax.tree_util.keystr(path) else None

    with context(
        array__saving__storage_options__dtype=np.float32,
        array__saving__scoped_storage_options_creator=small,
    ):
        ocp.save(tmp_path / "c", tree)
    stored = unickpt.open(tmp_path / "c")
    assert {name: str(stored[name].dtype) for name in ("big", "small")} == {
        "big": "float32",
        "small": "float16",
    }
    assert stored.values["n"] == 3


def test_a_context_tells_a_save_how(tmp_path: Path) -> None:
    called: list[str] = []
    told = context(
        asynchronous__timeout_secs=30,
        asynchronous__post_finalization_callback=lambda: called.append("committed"),
        array__saving__storage_options__chunk_byte_size=1 << 10,
        array__saving__use_ocdbt=False,  # of no effect
    )
    with told:
        ours.save(tmp_path / "c", {"w": np.arange(4096.0)})
    assert called == ["committed"]
    assert unickpt.open(tmp_path / "c").index.entry("w").chunk == (128,)
    with ours.training.Checkpointer(tmp_path / "run", context=told) as run:
        run.save(1, {"w": np.arange(4096.0)})
    assert called == ["committed"] * 2
    assert unickpt.open(tmp_path / "run" / "step_1").index.entry("w").chunk == (128,)


def test_the_context_of_the_block_counts_before_the_checkpointers(tmp_path: Path) -> None:
    with ours.training.Checkpointer(
        tmp_path, context=context(pytree__loading__partial_load=True)
    ) as run:
        run.save(1, {"a": np.arange(3), "b": np.ones(2)})
        assert list(run.load(1, {"a": np.zeros(3, int)})) == ["a"]
        assert list(run.load_async(1, {"a": np.zeros(3, int)}).result()) == ["a"]
        with theirs.Context(), pytest.raises(LoadMismatch, match="b"):
            run.load(1, {"a": np.zeros(3, int)})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"multiprocessing__primary_host": 1}, "process 0 is the coordinator"),
        ({"multiprocessing__active_processes": {0}}, "group="),
        ({"file__path_permission_mode": 0o750}, "umask"),
        ({"memory__serialization_status_callback": object()}, "progress="),
        ({"checkpoint_layout": "safetensors"}, "unickpt export"),
    ],
)
def test_what_a_save_cannot_honour_is_refused(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    (name,) = options
    refused = pytest.raises(ValueError, match=f"{name.replace('__', '.')}=.*{says}")
    with context(**options), refused:
        ours.save(tmp_path / "c", {"w": np.ones(2)})
    with refused:
        ours.training.Checkpointer(tmp_path / "run", context=context(**options))
    assert not (tmp_path / "c").exists()


def test_what_a_load_or_a_deletion_cannot_honour_is_refused(tmp_path: Path) -> None:
    ours.save(tmp_path / "c", {"w": np.ones(2)})
    with (
        context(array__loading__enable_padding_and_truncation=True),
        pytest.raises(ValueError, match=r"enable_padding_and_truncation=True.*not padded"),
    ):
        ours.load(tmp_path / "c")
    with (
        context(deletion__gcs_deletion_options__todelete_full_path="trash"),
        pytest.raises(ValueError, match=r"todelete_full_path='trash'.*not moved"),
    ):
        ours.delete(tmp_path / "c")
    assert ours.load(tmp_path / "c")["w"].tolist() == [1, 1]


def test_another_layout_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"w": np.arange(3.0)}, file, metadata={"by": "a test"})
    with context(checkpoint_layout="safetensors"):
        assert ours.load(file)["w"].tolist() == [0, 1, 2]
        described = ours.metadata(file)
    assert described.metadata["w"].shape == (3,)
    assert described.custom_metadata == {"by": "a test"}
    assert described.commit_timestamp_nsecs is None
    assert not ours.is_orbax_checkpoint(file)


# --- handlers ------------------------------------------------------------------------------------


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class AbstractPoint:
    pass


class PointHandler:
    """Writes a file, as handlers of version 1 do."""

    async def save(self, directory: Any, checkpointable: Point) -> Any:
        async def write() -> None:
            folder = await directory.await_creation()
            (folder / "x.txt").write_text(str(checkpointable.x))

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        async def read() -> Point:
            return Point(int((directory / "x.txt").read_text()))

        return read()

    async def metadata(self, directory: Any) -> AbstractPoint:
        assert (directory / "x.txt").exists()
        return AbstractPoint()

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Point)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return isinstance(abstract_checkpointable, AbstractPoint)


@BOTH
def test_handlers_of_ones_own(ocp: Any, tmp_path: Path) -> None:
    registry = theirs.handlers.local_registry()
    registry.add(PointHandler)
    registry.add(theirs.handlers.JsonHandler, checkpointable_name="about")
    about = {"seen": [1, 2], "name": "run"}
    parts = {"model": {"w": np.arange(3)}, "at": Point(7), "about": about}
    with context(checkpointables__registry=registry):
        ocp.save_checkpointables(tmp_path / "c", parts)
        with ocp.training.Checkpointer(tmp_path / "run") as run:
            run.save_checkpointables(1, parts)
    # Orbax's Checkpointer has left the block of a Context that it was called in.
    with context(checkpointables__registry=registry):
        with ours.training.Checkpointer(tmp_path / "run") as run:
            described = run.checkpointables_metadata(1).metadata
            for loaded in (
                ours.load_checkpointables(tmp_path / "c"),
                ours.load_checkpointables(
                    tmp_path / "c", ours.checkpointables_metadata(tmp_path / "c")
                ),
                ours.load_checkpointables(tmp_path / "c", {"at": AbstractPoint(), "about": None}),
                run.load_checkpointables(1),
                run.load_checkpointables(1, described),
            ):
                assert loaded["at"].x == 7
                assert loaded["about"] == about
        assert isinstance(described["at"], AbstractPoint)
        assert described["about"] is None
        assert described["model"]["w"].shape == (3,)


def test_an_exported_step_has_its_parts_in_orbax(tmp_path: Path) -> None:
    registry = theirs.handlers.local_registry()
    registry.add(PointHandler)
    registry.add(theirs.handlers.JsonHandler, checkpointable_name="about")
    parts = {"model": {"w": np.arange(3)}, "at": Point(7), "about": {"seen": [1, 2]}}
    with context(checkpointables__registry=registry):
        with ours.training.Checkpointer(tmp_path / "run") as run:
            run.save_checkpointables(3, parts, metrics={"loss": 0.5}, custom_metadata={"a": 1})
        unickpt.convert(tmp_path / "run" / "step_3", tmp_path / "back" / "3", to="orbax")
        with theirs.training.Checkpointer(tmp_path / "back") as back:
            assert back.latest.metrics == {"loss": 0.5}
            loaded = back.load_checkpointables(3)
    assert theirs.metadata(tmp_path / "back" / "3", "model").custom_metadata == {"a": 1}
    assert loaded["model"]["w"].tolist() == [0, 1, 2]
    assert loaded["at"].x == 7
    assert loaded["about"] == {"seen": [1, 2]}


def test_a_handlers_files_are_not_given_as_a_tree(tmp_path: Path) -> None:
    registry = theirs.handlers.local_registry()
    registry.add(PointHandler)
    with context(checkpointables__registry=registry):
        ours.save_checkpointables(tmp_path / "c", {"at": Point(7)})
    with pytest.raises(LoadMismatch, match=r"'at' consists of files.*register the handler"):
        ours.load_checkpointables(tmp_path / "c", {"at": {"x": np.zeros(2)}})
    with pytest.raises(UnsupportedLeaf, match="Point"):
        ours.save_checkpointables(tmp_path / "d", {"at": Point(7)})
    with pytest.raises(UnsupportedLeaf, match="none to save"):
        ours.save_checkpointables(tmp_path / "d", {})


# --- metadata, deletion --------------------------------------------------------------------------


@BOTH
def test_metadata_of_a_checkpoint(ocp: Any, tmp_path: Path) -> None:
    tree = {"w": np.arange(6.0).reshape(2, 3), "n": 3, "s": "t", "x": 1.5}
    ocp.save_checkpointables(tmp_path / "c", {"model": tree}, custom_metadata={"by": "a test"})
    found = ours.metadata(tmp_path / "c")
    assert isinstance(found, ours.CheckpointMetadata)
    assert found.custom_metadata == {"by": "a test"}
    assert found.init_timestamp_nsecs is not None
    assert abs(found.commit_timestamp_nsecs - (tmp_path / "c").stat().st_mtime_ns) < 60 * 10**9
    assert found.metadata["w"].shape == (2, 3)
    assert {k: type(found.metadata[k]) for k in "nsx"} == {"n": int, "s": str, "x": float}
    for like in (found, found.metadata):
        loaded = ours.load(tmp_path / "c", like)
        assert np.array_equal(loaded["w"], tree["w"])
        assert {k: loaded[k] for k in "nsx"} == {k: tree[k] for k in "nsx"}
    assert ours.checkpointables_metadata(tmp_path / "c").metadata.keys() == {"model"}
    like = ours.CheckpointMetadata[Any](found.path, metadata={"model": found.metadata})
    assert ours.load_checkpointables(tmp_path / "c", like)["model"]["n"] == 3


def test_a_folder_of_one_tree_of_version_0(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    ocp.StandardCheckpointer().save(tmp_path / "c", {"a": np.arange(3), "b": {"c": np.ones(2)}})
    ocp.StandardCheckpointer().wait_until_finished()
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "d", {"a": np.arange(3)})
    checkpointer.close()
    assert ours.load(tmp_path / "d")["a"].tolist() == [0, 1, 2]
    assert ours.metadata(tmp_path / "d").metadata.keys() == {"a"}


def test_a_step_of_version_0_without_its_metadata(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    items = {
        "state": ocp.args.StandardSave({"a": np.arange(3)}),
        "about": ocp.args.JsonSave({"n": 1}),
    }
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.Composite(**items))
    (tmp_path / "5" / "_CHECKPOINT_METADATA").unlink()
    loaded = ours.load_checkpointables(tmp_path / "5")
    assert loaded["about"] == {"n": 1}
    assert loaded["state"]["a"].tolist() == [0, 1, 2]
    assert ours.load(tmp_path / "5")["a"].tolist() == [0, 1, 2]


@BOTH
def test_the_metadata_of_a_run_is_the_first_ones(ocp: Any, tmp_path: Path) -> None:
    with ocp.training.Checkpointer(tmp_path, custom_metadata={"by": "the first"}) as run:
        run.save(1, {"w": np.ones(2)})
    with ours.training.Checkpointer(tmp_path, custom_metadata={"by": "the second"}) as run:
        assert run.root_metadata().custom_metadata == {"by": "the first"}


@BOTH
def test_a_checkpoint_is_deleted(ocp: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "c", {"w": np.ones(2)})
    assert ours.is_orbax_checkpoint(tmp_path / "c")
    assert ours.delete(tmp_path / "c")
    assert not ours.is_orbax_checkpoint(tmp_path / "c")
    assert not ours.delete(tmp_path / "c", missing_ok=True)
    with pytest.raises(ours.errors.InvalidLayoutError, match="nothing is there"):
        ours.delete(tmp_path / "c")
    with pytest.raises(ours.errors.InvalidLayoutError, match="nothing is there"):
        ours.load(tmp_path / "c")


@BOTH
def test_a_part_is_deleted_by_orbax_only(ocp: Any, tmp_path: Path) -> None:
    ocp.save_checkpointables(tmp_path / "c", {"a": {"w": np.arange(3)}, "b": {"v": np.ones(2)}})
    if ocp is ours:
        with pytest.raises(ValueError, match=r"checkpointable_name='b'.*save it again without"):
            ours.delete(tmp_path / "c", checkpointable_name="b")
        assert sorted(ours.load_checkpointables(tmp_path / "c")) == ["a", "b"]
    else:
        assert ours.delete_async(tmp_path / "c", checkpointable_name="b").result()
        assert sorted(ours.load_checkpointables(tmp_path / "c")) == ["a"]
        with pytest.raises(LoadMismatch, match="no item 'b'; there are a"):
            ours.load(tmp_path / "c", checkpointable_name="b")


def test_a_folder_that_is_no_checkpoint_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")
    for missing_ok in (False, True):
        with pytest.raises(ours.errors.InvalidLayoutError):
            ours.delete(tmp_path / "c", missing_ok=missing_ok)
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"
    np.save(tmp_path / "one.npy", np.ones(2))
    with pytest.raises(unickpt.UnsupportedFormat, match="remove the folder yourself"):
        ours.delete(tmp_path / "one.npy")
    assert (tmp_path / "one.npy").exists()


def test_a_step_is_deleted_in_the_background(tmp_path: Path) -> None:
    done: list[bool] = []
    with ours.training.Checkpointer(tmp_path) as run:
        for step in (1, 2):
            run.save(step, {"w": np.ones(2)})
        response = run.delete_async(1)
        response.on_complete(done.append)
        assert response.result()
        assert done == [True]
        assert [each.step for each in run.checkpoints] == [2]
        with pytest.raises(NotImplementedError, match="wait"):
            run.cancel()


# --- arguments of the Checkpointer ---------------------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def log_entry(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)


@BOTH
def test_a_logger_is_told_of_saves_and_loads(ocp: Any, tmp_path: Path) -> None:
    log = Log()
    with ocp.training.Checkpointer(tmp_path, logger=log) as run:
        run.save(3, {"w": np.ones(2)})
        run.load(3)
    assert [(each["event_type"], each["step"]) for each in log.entries] == [
        ("save", 3),
        ("restore", 3),
    ]
    assert json.dumps(log.entries)


def test_a_format_of_names_says_which_steps_of_orbax_count(tmp_path: Path) -> None:
    names = theirs.path.step.standard_name_format
    for prefix in ("a", "b"):
        with theirs.training.Checkpointer(
            tmp_path, step_name_format=names(step_prefix=prefix)
        ) as r:
            r.save(1, {"w": np.ones(2) if prefix == "a" else np.zeros(2)})
    with ours.training.Checkpointer(tmp_path, step_name_format=names(step_prefix="a")) as run:
        assert run.load(1)["w"].tolist() == [1, 1]
        assert run.latest is not None
        assert run.latest.path.name == "a_1"
        run.save(2, {"w": np.ones(2)})
    with ours.training.Checkpointer(tmp_path, step_name_format=names(step_prefix="b")) as run:
        assert [each.path.name for each in run.checkpoints] == ["b_1", "step_2"]
        with pytest.raises(CheckpointExists, match="Orbax"):
            run.delete(1)
