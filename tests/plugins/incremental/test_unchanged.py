"""Saves that neither stage nor hash what is known not to have changed (`SaveOptions.changed`)."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.processes import Processes
from support.saving import same

import unickpt
from unickpt import Checkpointer, SaveOptions, StorageError
from unickpt.adapters import jax as jax_adapter
from unickpt.adapters import numpy as numpy_adapter
from unickpt.adapters import torch_digests
from unickpt.arrays.box import Box
from unickpt.errors import StateChanged
from unickpt.format.chunk_grid import parts
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.adapter_protocol import ArraySource, Fragment, Memory
from unickpt.frameworks.process_group import alone
from unickpt.plugins.incremental import unchanged
from unickpt.plugins.incremental.change_samples import ArraySample
from unickpt.plugins.incremental.unchanged import SeenState, UnchangedArrays
from unickpt.storage.data_files import DataFile

CHUNK = 4096
ROW = 512
"""Bytes of a row of `w`; 8 are a chunk."""


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {"w": rng.random((400, 64)), "frozen": rng.random((40, 64)), "b": np.zeros(9)}


def options(**more: Any) -> SaveOptions:
    return SaveOptions(chunk_bytes=CHUNK, fsync=False, **more)


@pytest.fixture(autouse=True)
def small_arrays_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were large."""
    monkeypatch.setattr(unchanged, "LEAST_BYTES", 0)


@pytest.fixture
def nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the program says."""
    monkeypatch.setattr(unchanged, "_due", lambda *_: ())
    monkeypatch.setattr(ArraySample, "differs", lambda *_: None)


@pytest.fixture
def every_chunk_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "TURNS", 1)
    monkeypatch.setattr(ArraySample, "differs", lambda *_: None)


EVERYTHING = {"w": True, "frozen": True}
"""Said of the first save of a run, so that the second one knows what the first one saw."""


def is_stored(path: Path | str, state: Any) -> None:
    assert same(unickpt.load(path), state)
    report = unickpt.verify(path)
    assert report.ok, report.damage


# --- what is said --------------------------------------------------------------------------------


@given(
    changed=st.lists(st.booleans(), min_size=1, max_size=40),
    bounds=st.tuples(st.integers(0, 40), st.integers(1, 40)),
    due=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 2)), max_size=3),
)
def test_a_box_is_skipped_if_no_row_changed_and_no_chunk_is_due(
    changed: list[bool], bounds: tuple[int, int], due: list[tuple[int, int]]
) -> None:
    start = min(bounds[0], len(changed) - 1)
    box = Box((start, 0), (min(start + bounds[1], len(changed)), 3))
    found = UnchangedArrays({"w": np.array(changed)}, "attempt", {"w": set(due)})
    claimed = not any(changed[box.start[0] : box.stop[0]])
    hashed = any(box.start[0] <= row < box.stop[0] for row, _ in due)
    assert found.claims("w", box) == claimed
    assert found.skips("w", box) == (claimed and not hashed)
    assert found.skips_chunk("w", box) == (claimed and box.start not in due)
    assert not found.claims("other", box)
    assert not UnchangedArrays({"w": None}, "attempt", {"w": None}).skips("w", box)


def test_after_all_turns_each_chunk_was_hashed_once() -> None:
    unickpt.save("memory://unchanged/once", tree(), overwrite=True, options=options())
    entry = unickpt.open("memory://unchanged/once").index.arrays["w"]
    chunks = [part.chunk_box(n).start for part in parts(entry) for n in range(part.count)]
    for on_device in (False, True):
        memory = Memory(on_device=on_device)
        box = Box.whole(entry.shape)
        fragment = Fragment(box, (0,), lambda *_: np.zeros(0), memory)
        source = ArraySource(entry.shape, np.dtype(float), (fragment,))
        due = [unchanged._due(entry, source, turn) for turn in range(unchanged.TURNS)]
        hashed = [start for starts in due for start in (chunks if starts is None else starts)]
        assert sorted(hashed) == sorted(chunks)
        if not on_device:
            assert max(len(starts or ()) for starts in due) <= len(chunks) // unchanged.TURNS + 1


def test_each_save_is_a_turn_whatever_it_skips() -> None:
    """So processes that hold different arrays hash the same chunks of those that both hold."""
    before = SeenState("", "")
    for changed in (True, False):
        source = numpy_adapter.source(np.zeros((40, 64)), alone())
        entry = ArrayEntry("w", (40, 64), "float64", (8, 64), source.layout)
        unchanged.find_unchanged({"w": changed}, {"w": (entry, source)}, {}, before)
    assert next(before.turns) == 2


@pytest.mark.parametrize("storage", ["file", "memory"])
def test_rows_that_did_not_change_are_taken(
    storage: str, nothing_is_checked: None, tmp_path: Path
) -> None:
    root = str(tmp_path) if storage == "file" else "memory://unchanged/rows"
    state, rng = tree(), np.random.default_rng(0)
    with Checkpointer(root, reuse=True, options=options()) as run:
        run.save(0, state, changed=EVERYTHING, wait=True)
        for step in range(1, 6):
            rows = np.zeros(400, bool)
            rows[rng.integers(0, 400, 2)] = True
            state["w"][rows] += 1
            state["b"] += 1
            report = run.save(step, state, changed={"w": rows, "frozen": False}).result()
            most = 2 * CHUNK + state["b"].nbytes
            assert report.staged_bytes <= most, "the rest was not even copied"
            # In memory nothing is linked: what the step before wrote is read there, and written.
            assert report.written_bytes <= most * (1 if storage == "file" else step)
            is_stored(f"{root}/step_{step}", state)


def test_what_is_not_looked_at_is_taken_whatever_it_is(
    nothing_is_checked: None, tmp_path: Path
) -> None:
    """Nothing reads it: this is what the other tests rely on."""
    state = tree()
    unickpt.save(tmp_path / "a", state, options=options(changed=EVERYTHING))
    before = state["frozen"].copy()
    state["frozen"] += 1
    base = options(base=tmp_path / "a", changed={"frozen": False})
    unickpt.save(tmp_path / "b", state, options=base)
    assert np.array_equal(unickpt.load(tmp_path / "b")["frozen"], before)


def test_a_claim_that_is_wrong_is_found(every_chunk_is_hashed: None, tmp_path: Path) -> None:
    state = tree()
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        run.save(0, state, changed=EVERYTHING, wait=True)
        state["frozen"][17] += 1
        with pytest.raises(StateChanged, match=r"'frozen' \[.*said not to have changed"):
            run.save(1, state, changed={"frozen": False}).result()
        run.save(2, state, changed={"frozen": False}, wait=True)  # since the failed one it did not
        assert run.steps() == [0, 2]
        is_stored(tmp_path / "step_2", state)


def test_a_claim_that_is_right_passes(every_chunk_is_hashed: None, tmp_path: Path) -> None:
    state = tree()
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        for step in range(3):
            report = run.save(step, state, changed={"frozen": False, "w": False}).result()
        assert report.reused_bytes == state["frozen"].nbytes + state["w"].nbytes


# --- of which checkpoint it is said --------------------------------------------------------------


def failing_once(monkeypatch: pytest.MonkeyPatch, go: threading.Event | None = None) -> None:
    real, calls = DataFile.add, list[int]()

    def add(self: DataFile, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            assert go is None or go.wait(30)
            raise StorageError("the disk is gone")
        real(self, *arguments)

    monkeypatch.setattr(DataFile, "add", add)


def test_after_a_save_that_failed_every_chunk_is_hashed(
    nothing_is_checked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tree()
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        run.save(0, state, changed=EVERYTHING, wait=True)
        state["w"][5] += 1
        with monkeypatch.context() as patch:
            failing_once(patch)
            with pytest.raises(StorageError, match="gone"):
                run.save(1, state, changed={"frozen": False}).result()
        run.save(2, state, changed={"w": False, "frozen": False}, wait=True)  # since step 1
        is_stored(tmp_path / "step_2", state)


def test_nor_is_anything_lost_if_it_fails_later(
    nothing_is_checked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, go = tree(), threading.Event()
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        run.save(0, state, changed=EVERYTHING, wait=True)
        state["w"][5] += 1
        with monkeypatch.context() as patch:
            failing_once(patch, go)
            first = run.save(1, state, changed={"frozen": False})
            second = run.save(2, state, changed={"w": False, "frozen": False})
            go.set()
            with pytest.raises(StorageError, match="gone"):
                first.result()
            with pytest.raises(StorageError, match=r"did not change.* is another one"):
                second.result()
        run.save(3, state, changed={"w": False, "frozen": False}, wait=True)
        assert run.steps() == [0, 3]
        is_stored(tmp_path / "step_3", state)


def test_after_a_call_that_raised_every_chunk_is_hashed(
    nothing_is_checked: None, tmp_path: Path
) -> None:
    state = tree()
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        run.save(0, state, changed=EVERYTHING, wait=True)
        state["w"][5] += 1
        with pytest.raises(unickpt.UnsupportedLeaf):
            run.save(1, {**state, "bad": lambda: 0}, changed={"frozen": False})
        run.save(1, state, changed={"w": False, "frozen": False}, wait=True)
        report = run.save(2, state, changed={"w": False, "frozen": False}).result()
        assert report.staged_bytes == state["b"].nbytes, "after one that returned it holds again"
    is_stored(tmp_path / "step_1", state)


def test_exact_values_are_not_taken_of_quantised_ones(
    nothing_is_checked: None, tmp_path: Path
) -> None:
    state = tree()
    first = options(quantize={"w": "uint8"}, changed={"w": True})
    unickpt.save(tmp_path / "a", state, options=first)
    second = options(base=tmp_path / "a", changed={"w": False})
    unickpt.save(tmp_path / "b", state, options=second)
    is_stored(tmp_path / "b", state)


@pytest.mark.parametrize("storage", ["file", "memory"])
def test_chunks_with_small_patches_are_taken_whole(
    storage: str, nothing_is_checked: None, tmp_path: Path
) -> None:
    """Patches that lie in the nodes of the B-tree belong to what is taken."""
    root = str(tmp_path) if storage == "file" else "memory://unchanged/patches"
    state = {"w": np.arange(400 * 64, dtype=np.uint16).reshape(400, 64).copy()}
    with Checkpointer(root, reuse="patch", options=options()) as run:
        for step, row in enumerate((0, 3, 99, 3, 200, 99)):
            rows = np.arange(400) == row
            state["w"][row, ::7] += step
            run.save(step, state, changed={"w": rows}, wait=True)
            is_stored(f"{root}/step_{step}", state)


def test_saves_in_flight_refer_to_each_other(nothing_is_checked: None, tmp_path: Path) -> None:
    state = tree()
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        pending = []
        for step in range(6):
            state["b"] += 1
            pending.append(run.save(step, state, changed={"w": False, "frozen": False}))
        reports = [each.result() for each in pending]
    assert all(report.written_bytes == state["b"].nbytes for report in reports[1:])
    is_stored(tmp_path / "step_5", state)


def test_a_job_goes_on_from_what_it_has_loaded(nothing_is_checked: None, tmp_path: Path) -> None:
    state = tree()
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        run.save(0, state)
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        found = run.load()
        found["b"] += 1
        report = run.save(1, found, changed={"w": False, "frozen": False}).result()
        assert report.written_bytes == found["b"].nbytes
    is_stored(tmp_path / "step_1", found)


def test_after_going_back_every_chunk_is_hashed(nothing_is_checked: None, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        for step in range(3):
            run.save(step, tree() | {"b": np.full(9, step)}, wait=True)
        state = run.load(step=1)
        run.drop_later_steps()
        state["w"] += 1
        run.save(3, state, changed={"w": False}, wait=True)
    is_stored(tmp_path / "step_3", state)


def test_a_base_that_was_replaced_is_noticed(nothing_is_checked: None, tmp_path: Path) -> None:
    state, base = tree(), tmp_path / "base"
    unickpt.save(base, state, options=options(changed=EVERYTHING))
    shutil.rmtree(base)
    unickpt.save_async(base, {"w": state["w"] * 0}, options=options()).result()
    again = options(base=base, changed={"w": False})
    with pytest.raises(StorageError, match="is another one"):
        unickpt.save(tmp_path / "b", state, options=again)
    unickpt.save(tmp_path / "b", state, options=again)
    is_stored(tmp_path / "b", state)


def test_a_base_that_is_gone_is_noticed(nothing_is_checked: None, tmp_path: Path) -> None:
    state = tree()
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        run.save(0, state, changed=EVERYTHING, wait=True)
        (tmp_path / "step_0" / "manifest.ocdbt").write_bytes(b"no")
        with pytest.raises(StorageError, match=r"did not change.* is not there or is damaged"):
            run.save(1, state, changed={"frozen": False}).result()
        run.save(2, state, changed={"frozen": False}, wait=True)
    is_stored(tmp_path / "step_2", state)


# --- what frameworks know ------------------------------------------------------------------------


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors and JAX's arrays are tracked as on an accelerator."""
    monkeypatch.setattr(torch_digests, "_is_hashed", lambda tensor: True)
    monkeypatch.setattr(jax_adapter, "_on_cpu", lambda sharding: False)


def test_tracked_arrays_are_taken_until_they_change(devices: None, tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "torch": torch.randn(64, 64),
        "jax": jnp.ones((64, 64)),
        "numpy": np.ones((64, 64)),
    }
    sizes = {name: 64 * 64 * (8 if name == "numpy" else 4) for name in state}
    changes: list[tuple[str, Callable[[], object]]] = [
        ("", lambda: None),
        ("torch", lambda: state["torch"].data[3, 1:2].add_(1)),
        ("jax", lambda: state.update(jax=state["jax"].at[3, 2].add(1))),
        ("numpy", lambda: state["numpy"].__setitem__(3, 5)),
        ("", lambda: state.update(torch=state["torch"].clone(), jax=state["jax"] + 0)),
    ]
    made = SaveOptions(chunk_bytes=1 << 20, fsync=False, changed="tracked")
    with Checkpointer(tmp_path, reuse=True, options=made) as run:
        run.save(0, state, wait=True)
        for step, (name, change) in enumerate(changes, 1):
            change()
            report = run.save(step, state).result()
            assert report.written_bytes == sizes.get(name, 0), (step, name)
            # NumPy's arrays are on the host, so that they are staged and compared.
            assert report.staged_bytes <= sizes["numpy"] + sizes.get(name, 0) * (name != "numpy")
            found = unickpt.load(tmp_path / f"step_{step}")
            for key, array in state.items():
                assert np.array_equal(found[key], np.asarray(array)), (step, key)


def fused(parameter: torch.Tensor, row: int) -> None:
    """A step that changes a row, and that no version counter shows."""
    parameter.requires_grad_(True)
    parameter.grad = torch.zeros_like(parameter)
    parameter.grad[row] = 1
    version = parameter._version
    torch.optim.SGD([parameter], lr=0.1, fused=True).step()
    assert parameter._version == version
    parameter.requires_grad_(False)


WRITERS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "fused": fused,
    "data": lambda tensor, row: tensor.data[row].add_(1),
    "numpy": lambda tensor, row: tensor.numpy().__setitem__(row, 4),
    "dlpack": lambda tensor, row: torch.from_dlpack(tensor)[row].add_(1),
    "storage": lambda tensor, row: (
        torch.empty(0).set_(tensor.untyped_storage(), 0, tensor.shape)[row].add_(1)
    ),
}


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("writer", WRITERS)
def test_writes_that_torch_does_not_count_are_saved(
    writer: str, where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if where == "device":
        request.getfixturevalue("devices")
    state = {"w": torch.randn(2000, 64), "frozen": torch.randn(400, 64)}
    options = SaveOptions(fsync=False, chunk_bytes=16 << 10, changed="tracked")
    with Checkpointer(tmp_path, reuse=True, options=options) as run:
        run.save(0, state, wait=True)
        for step in range(1, 4):
            WRITERS[writer](state["w"], 7 * step)
            report = run.save(step, state).result()
            if where == "device":
                assert report.staged_bytes == state["w"].nbytes
            assert same(unickpt.load(tmp_path / f"step_{step}"), state)


def test_statistics_of_batch_norm_are_saved(devices: None, tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(400)
    options = SaveOptions(fsync=False, changed="tracked")
    with Checkpointer(tmp_path, reuse=True, options=options) as run:
        for step in range(3):
            norm(torch.randn(16, 400))
            run.save(step, {"norm": norm}, wait=True)
            assert same(unickpt.load(tmp_path / f"step_{step}")["norm"], dict(norm.state_dict()))


def test_jax_arrays_before_memory_of_others_are_saved(tmp_path: Path) -> None:
    """JAX does not record that it shares memory with NumPy or torch."""
    tensor = torch.zeros(64, 64)
    state = {"j": jnp.from_dlpack(tensor)}
    options = SaveOptions(fsync=False, changed="tracked")
    with Checkpointer(tmp_path, reuse=True, options=options) as run:
        for step in range(3):
            tensor += 1
            run.save(step, state, wait=True)
            assert np.array_equal(unickpt.load(tmp_path / f"step_{step}")["j"], tensor.numpy())


@pytest.mark.parametrize(
    "more", [{"quantize": {"w": "uint8"}}, {"compression": "zstd"}, {"reuse": "patch"}], ids=str
)
def test_with_other_features(
    more: dict[str, Any], every_chunk_is_hashed: None, tmp_path: Path
) -> None:
    state = tree()
    state["w"] = state["w"].astype(np.float32)
    unickpt.save(tmp_path / "0", state, options=options(**more))
    for step in range(1, 4):
        rows = np.zeros(400, bool)
        rows[step * 7] = True
        state["w"][rows] += 1
        made = options(base=tmp_path / str(step - 1), changed={"w": rows}, **more)
        unickpt.save(tmp_path / str(step), state, options=made)
        plain = options(**{name: value for name, value in more.items() if name != "reuse"})
        unickpt.save(tmp_path / f"whole {step}", state, options=plain)
        assert same(unickpt.load(tmp_path / str(step)), unickpt.load(tmp_path / f"whole {step}"))
        assert unickpt.verify(tmp_path / str(step)).ok


# --- in a job ------------------------------------------------------------------------------------

JOB = """
import json, sys
import numpy as np, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import unickpt
from unickpt.plugins.incremental import unchanged
from unickpt.plugins.incremental.change_samples import ArraySample

unchanged.LEAST_BYTES = 0
unchanged._due = lambda *_: ()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(3)
whole = torch.randn(90, 64)
w, plain = distribute_tensor(whole.clone(), mesh, [Shard(0)]), torch.randn(500, 16)
first = 45 * dist.get_rank()
options = unickpt.SaveOptions(chunk_bytes=4096, fsync=False, changed="tracked", timeout_s=60)
said = []
with unickpt.Checkpointer(sys.argv[1], reuse=True, options=options) as run:
    for step in range(4):
        rows = np.zeros(90, bool)
        rows[[step, 50 + 9 * step]] = True
        mine = [row - first for row in np.flatnonzero(rows) if 0 <= row - first < 45]
        w.to_local()[mine] += 1
        if step == 2 and dist.get_rank() == 1:
            plain = plain.clone()  # this rank alone looks at it
        report = run.save(step, {"w": w, "plain": plain}, changed={"w": rows}).result()
        said.append([report.written_bytes, report.staged_bytes])
full = w.full_tensor()
if dist.get_rank() == 0:
    np.savez(sys.argv[2], w=full.numpy(), plain=plain.numpy())
print(json.dumps(said))
dist.destroy_process_group()
"""


def test_each_process_knows_for_itself(processes: Processes, tmp_path: Path) -> None:
    ranks = processes.torch(2, JOB, tmp_path / "run", tmp_path / "state.npz")
    for out in processes.finish(ranks):
        (line,) = re.findall(r"^\[\[.*$", out, re.M)
        said = json.loads(line)
        assert all(written <= 2 * 4096 for written, _ in said[1:]), said
    with np.load(tmp_path / "state.npz") as state:
        is_stored(tmp_path / "run" / "step_3", dict(state))


# --- mistakes ------------------------------------------------------------------------------------

MISTAKES: list[tuple[Any, type[Exception], str]] = [
    ({"frozn": False}, ValueError, "'frozn'.* match no array.*'frozen'"),
    ({"w": np.zeros(95, bool)}, ValueError, r"95 rows, and 'w' has the shape \[400, 64\]"),
    ({"w": np.zeros((400, 2), bool)}, TypeError, "neither a bool nor an array of bools"),
    ({"w": [0, 1]}, TypeError, "neither a bool nor an array of bools"),
    ({"w": "all"}, ValueError, "the only word is"),
    ({3: False}, TypeError, "dict of patterns"),
    ("all", TypeError, "dict of patterns"),
]


@pytest.mark.parametrize(("changed", "error", "message"), MISTAKES, ids=str)
def test_mistakes_are_said(
    changed: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        unickpt.save(tmp_path / "a", tree(), options=options(changed=changed))
    assert not (tmp_path / "a").exists()


def test_without_reuse_it_means_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reuse=True"):
        Checkpointer(tmp_path, options=options(changed="tracked"))
    with Checkpointer(tmp_path) as run, pytest.raises(ValueError, match="reuse=True"):
        run.save(0, tree(), changed={"w": False})
