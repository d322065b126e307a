"""unickpt.integrations.dcp in one process: arguments, values, storage for torch's planners."""

from __future__ import annotations

import io
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.torch_versions import has_torch

import unickpt
from unickpt import LoadMismatch

torch = pytest.importorskip("torch")
torch_dcp = pytest.importorskip("torch.distributed.checkpoint")
if not has_torch("2.9"):
    pytest.skip("torch 2.9 has what unickpt.integrations.dcp replaces", allow_module_level=True)
dcp = pytest.importorskip("unickpt.integrations.dcp")
pytestmark = [
    pytest.mark.integration,  # imports torch's distributed checkpoints
    pytest.mark.filterwarnings("ignore:.*single process.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage.*:UserWarning"),
]


class Progress:
    """A Stateful with a `BytesIO`, as trainers have them."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def state_dict(self) -> dict[str, Any]:
        data = io.BytesIO()
        torch.save(self.losses, data)
        return {"losses": data, "at": [len(self.losses)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"])
        assert state["at"] == [len(self.losses)]


class Dict(dict):  # type: ignore[type-arg]
    """Knows which of its items were set."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.changed: set[str] = set()

    def __setitem__(self, key: str, value: Any) -> None:
        self.changed.add(key)
        super().__setitem__(key, value)

    def update(self, items: Any) -> None:  # type: ignore[override]
        for key, value in items:
            self[key] = value


# --- by function ----------------------------------------------------------------------------------


def test_stateful_objects_are_loaded_in_place_and_others_replaced(tmp_path: Path) -> None:
    saved = Dict(progress=Progress([1.5, 2.5]), plain={"t": torch.arange(3), "list": [1, 2]})
    dcp.save(saved, checkpoint_id=tmp_path / "c")
    loaded = Dict(progress=Progress([]), plain={"t": torch.zeros(3, dtype=torch.int64), "list": []})
    progress, tensor = loaded["progress"], loaded["plain"]["t"]
    dcp.load(loaded, checkpoint_id=tmp_path / "c")
    assert loaded["progress"] is progress
    assert progress.losses == [1.5, 2.5]
    assert loaded.changed == {"plain"}
    assert loaded["plain"]["t"] is tensor
    assert tensor.tolist() == [0, 1, 2]
    assert loaded["plain"]["list"] == [1, 2]


def test_what_else_is_stored_in_a_dict_is_skipped(tmp_path: Path) -> None:
    """As in torchtitan, where a dict has the position of each data-parallel rank."""
    state = {"loader": {"rank_0": b"one", "rank_1": b"two"}, "w": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    found = {"loader": {"rank_1": b""}, "w": torch.zeros(2)}
    dcp.load(found, checkpoint_id=tmp_path / "c")
    assert found["loader"] == {"rank_1": b"two"}
    assert found["w"].tolist() == [1, 1]


def test_an_empty_state_dict(tmp_path: Path) -> None:
    dcp.save({}, checkpoint_id=tmp_path / "c")
    state: dict[str, Any] = {}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state == {}


def test_a_checkpoint_at_the_path_is_replaced(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((3,), value)}, checkpoint_id=tmp_path / "c")
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=str(tmp_path / "c"))
    assert state["w"].tolist() == [2, 2, 2]
    kept = dcp.StorageWriter(tmp_path / "c", overwrite=False)
    with pytest.raises(unickpt.CheckpointExists):
        dcp.save({"w": torch.ones(3)}, storage_writer=kept)


def test_floats_are_cast_and_shapes_and_missing_keys_are_errors(tmp_path: Path) -> None:
    stored = {"w": torch.arange(4.0), "n": torch.arange(4), "more": torch.ones(1)}
    dcp.save(stored, checkpoint_id=tmp_path / "c")
    state = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["w"].tolist() == [0, 1, 2, 3]
    for like in ({"w": torch.zeros(5)}, {"x": torch.zeros(4)}, {"n": torch.zeros(4)}):
        with pytest.raises(LoadMismatch, match=next(iter(like))):
            dcp.load(like, checkpoint_id=tmp_path / "c")


def test_meta_tensors_are_materialised(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "c")
    state = {"w": torch.empty(4, device="meta")}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["w"].tolist() == [0, 1, 2, 3]


def test_jax_loads_it(tmp_path: Path) -> None:
    dcp.save({"model": torch.nn.Linear(2, 3), "step": 4}, checkpoint_id=tmp_path / "c")
    spec = jax.ShapeDtypeStruct((3, 2), jnp.float32)
    found = unickpt.load(tmp_path / "c", {"model": {"weight": spec}}, only="model/weight")
    assert isinstance(found["model"]["weight"], jax.Array)
    assert unickpt.load(tmp_path / "c", only="step") == {"step": 4}


def test_what_torch_saved_is_loaded(tmp_path: Path) -> None:
    stored = {"a": {"w": torch.arange(4.0), "list": [1, 2, 3]}, "step": 4}
    torch_dcp.save(stored, checkpoint_id=tmp_path / "c")
    state: dict[str, Any] = {"a": {"w": torch.zeros(4), "list": []}, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["a"]["w"].tolist() == [0, 1, 2, 3]
    assert (state["a"]["list"], state["step"]) == ([1, 2, 3], 4)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("storage_writer=", {"storage_writer": torch_dcp.FileSystemWriter("/nowhere")}),
    ("planner=", {"planner": type("Mine", (torch_dcp.DefaultSavePlanner,), {})()}),
    ("flatten_state_dict=False", {"planner": torch_dcp.DefaultSavePlanner(False)}),
    (
        "dedup_save_to_lowest_rank",
        {"planner": torch_dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)},
    ),
]


@pytest.mark.parametrize(("text", "arguments"), REFUSED, ids=[text for text, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_its_name(
    tmp_path: Path, text: str, arguments: dict[str, Any]
) -> None:
    for function in (dcp.save, dcp.async_save):
        with pytest.raises((ValueError, TypeError), match=text):
            function({"w": torch.ones(1)}, checkpoint_id=tmp_path / "c", **arguments)
    assert not (tmp_path / "c").exists()


def test_more_that_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(1)}
    for function in (dcp.save, dcp.async_save, dcp.load):
        with pytest.raises(ValueError, match="checkpoint_id= is missing"):
            function(state)
    kinds = torch_dcp.state_dict_saver.AsyncCheckpointerType
    with pytest.raises(ValueError, match="async_checkpointer_type="):
        dcp.async_save(state, checkpoint_id=tmp_path, async_checkpointer_type=kinds.PROCESS)
    with pytest.raises(TypeError, match="async_stager="):
        dcp.async_save(
            state,
            checkpoint_id=tmp_path,
            async_stager=torch_dcp.staging.BlockingAsyncStager(),
        )
    with pytest.raises(TypeError, match="storage_reader="):
        dcp.load(state, storage_reader=torch_dcp.FileSystemReader(tmp_path))
    planner = type("Mine", (torch_dcp.DefaultLoadPlanner,), {})()
    with pytest.raises(TypeError, match="planner="):
        dcp.load(state, checkpoint_id=tmp_path, planner=planner)


# --- the future -----------------------------------------------------------------------------------


def test_a_future_of_a_save(tmp_path: Path) -> None:
    ended = threading.Event()
    future = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    assert isinstance(future, Future)
    future.add_done_callback(lambda _: ended.set())
    assert wait([future], 60).done == {future}
    assert ended.wait(60)
    assert future.done()
    assert not future.cancel()
    assert future.exception() is None
    assert future.result().arrays == 1


def test_a_future_of_a_save_that_fails(tmp_path: Path) -> None:
    options = unickpt.SaveOptions(group=unickpt.ProcessGroup(1, 2, "alone"), timeout_s=0.5)
    writer = dcp.StorageWriter(tmp_path / "c", options=options)
    future = dcp.async_save({"w": torch.ones(3)}, storage_writer=writer)
    assert isinstance(future.exception(60), unickpt.errors.SaveTimeout)
    with pytest.raises(unickpt.errors.SaveTimeout, match="process 0"):
        future.result()
    # Whoever was told of it is not told again.
    dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "d").result()


# --- storage for torch's functions ----------------------------------------------------------------


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "m": torch.nn.Linear(3, 2).state_dict(),
        "n": {"x": [torch.arange(3), {"k": 1.5}], "list": [1, {"a": 2}], "tuple": (1, "b")},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "half": torch.ones(2, 2, dtype=torch.bfloat16)[:, 1],
        "none": None,
    }


def zeros(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: zeros(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [zeros(value) for value in tree]
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else 0


def check(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            check(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            check(*pair)
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    else:
        assert found == wanted
        assert type(found) is type(wanted)


@pytest.mark.parametrize("saver", ["torch's planner", "ours"])
@pytest.mark.parametrize("loader", ["torch's planner", "ours"])
def test_both_ways_of_saving_and_of_loading(tmp_path: Path, saver: str, loader: str) -> None:
    if saver == "ours":
        dcp.save(state(), checkpoint_id=tmp_path / "c")
    else:
        torch_dcp.save(state(), storage_writer=dcp.StorageWriter(tmp_path / "c"))
    like = zeros(state())
    if loader == "torch's planner":
        torch_dcp.load(like, storage_reader=dcp.StorageReader(tmp_path / "c"))
        check(like, state())
    elif saver == "ours":
        dcp.load(like, checkpoint_id=tmp_path / "c")
        check(like, state())
    else:  # bytes that only torch's planner unpickles
        with pytest.raises(LoadMismatch, match="stored by a StorageWriter"):
            dcp.load(like, checkpoint_id=tmp_path / "c")
        tensors = {"m": like["m"], "half": like["half"]}
        dcp.load(tensors, checkpoint_id=tmp_path / "c")
        check(tensors, {"m": state()["m"], "half": state()["half"]})
    stored = unickpt.load(tmp_path / "c")
    assert np.array_equal(stored["m"]["weight"], state()["m"]["weight"])


def test_torch_takes_parts_by_their_keys(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    dcp.save(state(), checkpoint_id=tmp_path / "c")
    reader = dcp.StorageReader(tmp_path / "c")
    check(_load_state_dict_from_keys("m", storage_reader=reader), {"m": dict(state()["m"])})


def test_a_planner_that_does_not_flatten(tmp_path: Path) -> None:
    planner = torch_dcp.DefaultSavePlanner(flatten_state_dict=False)
    flat = {"a.b": torch.arange(3), "a/c": torch.ones(2)}
    torch_dcp.save(flat, storage_writer=dcp.StorageWriter(tmp_path / "c"), planner=planner)
    like = zeros(flat)
    torch_dcp.load(
        like,
        storage_reader=dcp.StorageReader(tmp_path / "c"),
        planner=torch_dcp.DefaultLoadPlanner(flatten_state_dict=False),
    )
    check(like, flat)
    assert set(unickpt.load(tmp_path / "c")) == {"a.b", "a/c"}


def test_a_writer_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    writer = dcp.StorageWriter(tmp_path / "c")
    with pytest.raises(ValueError, match="use_collectives=False"):
        torch_dcp.save({"w": torch.ones(1)}, storage_writer=writer, use_collectives=False)
    planner = torch_dcp.DefaultSavePlanner(enable_plan_caching=True)
    with pytest.raises(torch_dcp.api.CheckpointException, match="enable_plan_caching"):
        torch_dcp.save({"w": torch.ones(1)}, storage_writer=writer, planner=planner)
    assert not dcp.StorageWriter.validate_checkpoint_id("no://where")
    assert dcp.StorageReader.validate_checkpoint_id(tmp_path)


def test_names_that_torch_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    dcp.save(
        {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}}, checkpoint_id=tmp_path / "c"
    )
    with pytest.raises(LoadMismatch, match=r"'a\.b\.c'"):
        dcp.StorageReader(tmp_path / "c").read_metadata()


def test_a_damaged_chunk_is_an_error_for_torchs_planner(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(5000.0)}, checkpoint_id=tmp_path / "c")
    (data,) = [
        file
        for file in (tmp_path / "c").rglob("*")
        if file.is_file() and file.stat().st_size >= 20_000
    ]
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.chmod(0o644)
    data.write_bytes(content)
    with pytest.raises(torch_dcp.api.CheckpointException, match="digest"):
        torch_dcp.load({"w": torch.zeros(5000)}, storage_reader=dcp.StorageReader(tmp_path / "c"))


# --- the names of torch's module -----------------------------------------------------------------


def test_torchs_own_classes_of_files_have_ours_by_their_names(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0), "step": 2}
    writer = dcp.FileSystemWriter(tmp_path / "c", True, False, 4, overwrite=False)
    assert not writer.options.fsync
    dcp.save(state, storage_writer=writer)
    found = {"w": torch.zeros(3), "step": 0}
    torch_dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "c"), no_dist=True)
    assert found["w"].tolist() == [0, 1, 2]
    assert found["step"] == 2
    with pytest.raises(unickpt.CheckpointExists):
        dcp.save(state, storage_writer=writer)


def test_arguments_that_change_torchs_files_are_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    with pytest.raises(ValueError, match="to safetensors"):
        dcp.FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(ValueError, match="compression="):
        dcp.FileSystemWriter(tmp_path, _extensions=[object()])


def test_what_else_torchs_module_has_is_torchs_own() -> None:
    assert dcp.DefaultSavePlanner is torch_dcp.DefaultSavePlanner
    assert dcp.Metadata is torch_dcp.Metadata
    assert dcp.stateful is torch_dcp.stateful
    for name, instead in (
        ("save_state_dict", "use save, or"),
        ("HuggingFaceStorageWriter", "to='hf'"),
    ):
        with pytest.raises(AttributeError, match=instead):
            getattr(dcp, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = dcp.nothing
