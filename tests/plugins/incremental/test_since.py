"""`load(since=)`: only what changed since a checkpoint that `like` holds is read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.processes import Processes
from support.strategies import examples

import unickpt
from unickpt import Checkpointer, LoadOptions, Rules, SaveOptions, StorageError
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.types import Box, LocalFragments

CHUNK, ROWS = 4096, 8
"""Bytes of a chunk, which has so many rows of 64 doubles."""


def options(**more: Any) -> SaveOptions:
    return SaveOptions(chunk_bytes=CHUNK, fsync=False, **more)


def tree() -> dict[str, Any]:
    """Arrays of each framework, of several chunks and of one; small ones, and plain values."""
    rng = np.random.default_rng(3)
    return {
        "numpy": rng.random((100, 64)),
        "torch": torch.from_numpy(rng.random((90, 64))),
        "jax": jnp.asarray(rng.random((80, 64)), jnp.float32),
        "key": jax.random.key(3),
        "strided": torch.from_numpy(rng.random((64, 80))).T,
        "frozen": rng.random((60, 64)),
        "half": torch.from_numpy(rng.random((5, 7))).bfloat16(),
        "scalar": np.float32(3),
        "empty": np.zeros((0, 3)),
        "step": 1,
    }


def changed(state: dict[str, Any]) -> dict[str, Any]:
    """The same state later: a row of each large array, and all small ones, changed."""
    later = copy.deepcopy(state)
    later["numpy"][17] += 1
    later["torch"][33] += 1
    later["strided"][3] += 1
    later["jax"] = later["jax"].at[5].add(1)
    later["half"] += 1
    return later | {"key": jax.random.key(4), "scalar": np.float32(4), "step": 2}


def bits(array: Any) -> tuple[Any, ...]:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if isinstance(array, torch.Tensor):
        array = array.float() if array.dtype == torch.bfloat16 else array
    array = np.asarray(array)
    return array.dtype, array.shape, array.tobytes()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bits(one[n]) == bits(other[n]) for n in one)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints, one after the other."""
    unickpt.save(tmp_path / "a", tree(), options=options())
    unickpt.save(tmp_path / "b", changed(tree()), options=options())
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize("verify", [False, True])
def test_only_what_changed_is_read(verify: bool, saved: tuple[Path, Path]) -> None:
    since, newer = saved
    like, before = tree(), tree()
    loaded, report = unickpt.load(
        newer, like, since=since, return_report=True, options=LoadOptions(verify=verify)
    )
    assert same(loaded, changed(before))
    whole = ("jax", "key", "half", "scalar")  # are placed whole
    read = sum(np.asarray(changed(before)[n]).nbytes for n in whole if n not in ("half", "key"))
    assert report.read_bytes == read + 70 + 8 + 3 * CHUNK
    arrays = [n for n in like if n not in ("step", "empty")]
    assert report.unchanged_bytes + report.bytes == unickpt.open(newer).nbytes
    assert set(arrays) <= set(report.loaded)
    assert "unchanged" in report.speed_text
    assert all(loaded[name] is like[name] for name in ("numpy", "torch", "strided", "frozen"))


def test_a_tree_that_holds_the_checkpoint_reads_nothing(saved: tuple[Path, Path]) -> None:
    since, _ = saved
    like = tree()
    loaded, report = unickpt.load(since, like, since=since, return_report=True)
    assert report.read_bytes == report.bytes == 0
    assert report.unchanged_bytes == unickpt.open(since).nbytes
    assert all(loaded[name] is like[name] for name in like)  # also immutable arrays


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "strided", "frozen", "key", "half"])
def test_what_the_program_changed_is_read_all_the_same(name: str, saved: tuple[Path, Path]) -> None:
    """One element is enough."""
    since, newer = saved

    def spoiled() -> dict[str, Any]:
        like = tree()
        if name == "key":
            like["key"] = jax.random.key(9)
        elif name == "jax":
            like["jax"] = like["jax"].at[77, 3].add(1)
        else:
            like[name][-1, -1] += 1
        return like

    for loading in (LoadOptions(), LoadOptions(verify=False)):
        loaded = unickpt.load(newer, spoiled(), since=since, options=loading)
        assert same(loaded, changed(tree()))
        assert same(unickpt.load(since, spoiled(), since=since, options=loading), tree())


def test_a_job_goes_back_to_a_step_by_reading_what_it_trained(tmp_path: Path) -> None:
    state: dict[str, Any] = {"frozen": np.ones((400, 64)), "adapter": np.zeros((20, 64))}
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        for step in range(2):
            state["adapter"] += 1
            run.save(step, state, wait=True)
        state["adapter"] += np.inf
        state, report = run.load(state, step=1, since=run.path(1), return_report=True)
        assert report.read_bytes == state["adapter"].nbytes
        assert (state["adapter"] == 2).all()
        run.save(2, state, wait=True)
        assert (unickpt.load(run.path(2))["frozen"] == 1).all()


@pytest.mark.parametrize("reuse", [True, "patch"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_of_what_saves_refer_to_nothing_is_read(
    reuse: Any, compression: Any, tmp_path: Path
) -> None:
    state = {"w": np.random.default_rng(0).random((200, 64))}
    with Checkpointer(tmp_path, reuse=reuse, options=options(compression=compression)) as run:
        for step in range(3):
            state["w"][step * 50] += 1
            run.save(step, state, wait=True)
            if step == 0:
                like = copy.deepcopy(state)
        loaded, report = unickpt.load(run.path(2), like, since=run.path(0), return_report=True)
    assert np.array_equal(loaded["w"], state["w"])
    assert report.bytes == 2 * CHUNK


def test_what_cannot_be_compared_is_read(tmp_path: Path) -> None:
    """Other chunks, dtypes and codecs, arrays that the earlier one lacks, abstract ones."""
    state = {"w": np.ones((100, 64)), "q": np.ones((90, 64), np.float32), "new": np.ones((80, 64))}
    before = {"w": state["w"], "q": state["q"]}
    unickpt.save(tmp_path / "a", before, options=options(quantize={"q": "uint8"}))
    unickpt.save(tmp_path / "other", before, options=SaveOptions(chunk_bytes=512))
    unickpt.save(tmp_path / "b", state, options=options(quantize={"q": "uint8"}))
    zeros = {name: np.zeros_like(array) for name, array in state.items()}
    for since in ("a", "other"):
        loaded = unickpt.load(tmp_path / "b", copy.deepcopy(zeros), since=tmp_path / since)
        assert all(np.array_equal(loaded[name], state[name]) for name in state)
    abstract = {name: torch.zeros(array.shape, device="meta") for name, array in state.items()}
    loaded = unickpt.load(tmp_path / "b", abstract, since=tmp_path / "a", cast=True)
    assert all(np.array_equal(loaded[name], state[name]) for name in state)
    shape = {"q": jax.ShapeDtypeStruct((90, 64), np.float32)}
    unickpt.save(tmp_path / "plain", {"q": state["q"]}, options=options())
    loaded = unickpt.load(tmp_path / "plain", shape, since=tmp_path / "plain")
    assert np.array_equal(loaded["q"], state["q"])


def test_arrays_that_are_cast_are_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        unickpt.save(tmp_path / name, {"w": np.ones((100, 64))}, options=options())
    like = {"w": np.zeros((100, 64), np.float32)}
    loaded, report = unickpt.load(
        tmp_path / "b", like, since=tmp_path / "a", cast=True, return_report=True
    )
    assert (loaded["w"] == 1).all()
    assert report.unchanged_bytes == 0


def test_the_new_state_of_an_optimizer_is_read(tmp_path: Path) -> None:
    """A load makes it, with whatever was in memory."""
    model = torch.nn.Linear(64, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    for name in ("a", "b"):
        unickpt.save(tmp_path / name, {"model": model, "optimizer": optimizer}, options=options())
    fresh = torch.optim.AdamW(model.parameters())
    like = {"model": model, "optimizer": fresh}
    loading = LoadOptions(verify=False)
    _, report = unickpt.load(
        tmp_path / "b", like, since=tmp_path / "a", options=loading, return_report=True
    )
    assert report.unchanged_bytes >= model.weight.nbytes
    for parameter, slots in optimizer.state.items():
        assert all(torch.equal(slots[name], fresh.state[parameter][name]) for name in slots)


def test_with_rules_arrays_that_are_stored_as_they_are_count(tmp_path: Path) -> None:
    state = {"old": np.ones((100, 64)), "turned": np.arange(6400.0).reshape(100, 64)}
    later = copy.deepcopy(state)
    later["old"][9] = 3
    unickpt.save(tmp_path / "a", state, options=options())
    unickpt.save(tmp_path / "b", later, options=options())
    rules = Rules.parse("old <-> new\nturned[i j] <-> turned[j i]")
    like = {"new": state["old"].copy(), "turned": state["turned"].T.copy()}
    loaded, report = unickpt.load(
        tmp_path / "b", like, since=tmp_path / "a", rules=rules, return_report=True
    )
    assert np.array_equal(loaded["new"], later["old"])
    assert np.array_equal(loaded["turned"], later["turned"].T)
    assert report.unchanged_bytes == 100 * 512 - CHUNK


def test_memory_that_leaves_share(tmp_path: Path) -> None:
    """Tied tensors, views that overlap, and fragments."""
    base = torch.arange(6400.0, dtype=torch.float64).reshape(100, 64)

    def state(of: torch.Tensor) -> dict[str, Any]:
        return {"w": of, "tied": of, "rows": of[20:60]}

    later = base.clone()
    later[33] = 0
    unickpt.save(tmp_path / "a", state(base), options=options())
    unickpt.save(tmp_path / "b", state(later), options=options())
    memory = base.clone()
    for name, values in (("a", base), ("b", later)):
        unickpt.load(tmp_path / name, state(memory), since=tmp_path / "a")
        assert torch.equal(memory, values)
    parts = [
        (Box((0, 0), (50, 64)), base[:50].clone()),
        (Box((50, 0), (100, 64)), base[50:].clone()),
    ]
    like = {"w": LocalFragments((100, 64), parts)}
    _, report = unickpt.load(
        tmp_path / "b", like, only="w", since=tmp_path / "a", return_report=True
    )
    assert torch.equal(torch.cat([part for _, part in parts]), later)
    assert report.unchanged_bytes > report.bytes


def test_what_is_asked_for_is_checked(saved: tuple[Path, Path], tmp_path: Path) -> None:
    since, newer = saved
    with pytest.raises(ValueError, match="for a load into `like`"):
        unickpt.load(newer, since=since)
    with pytest.raises(ValueError, match="leave out one of since= and LoadOptions"):
        unickpt.load(newer, tree(), since=since, options=LoadOptions(exchange=True))
    like = tree()
    with pytest.raises(StorageError, match=r"nosuch.* cannot be read.*Load without since="):
        unickpt.load(newer, like, since=tmp_path / "nosuch")
    assert same(like, tree())
    with Checkpointer(tmp_path / "run") as run:
        run.save(0, {"w": np.ones(3)}, wait=True)
        with pytest.raises(StorageError, match=r"step_7.* cannot be read"):
            run.load({"w": np.ones(3)}, since=run.path(7))


def test_a_checkpoint_that_is_replaced_meanwhile_is_loaded_again(
    saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save replaced the checkpoint when `like` was filled in part."""
    since, newer = saved
    real, reads = OcdbtReader.read, list[int]()

    def read(self: OcdbtReader, requests: Any, *more: Any) -> Any:
        result = real(self, requests, *more)
        reads.append(1)
        if len(reads) == 1:
            unickpt.save(newer, tree(), overwrite=True, options=options())  # as at first
            self.check_unchanged()
        return result

    monkeypatch.setattr(OcdbtReader, "read", read)
    loaded = unickpt.load(newer, tree(), since=since)
    assert len(reads) > 1
    assert same(loaded, tree())


@pytest.mark.integration
@examples(40)
@given(
    writes=st.lists(
        st.tuples(
            st.sampled_from(["numpy", "torch", "jax", "strided", "frozen"]),
            st.integers(0, 59),
            st.booleans(),
        ),
        max_size=8,
    ),
    chunk=st.sampled_from([512, 4096, 1 << 20]),
)
def test_whatever_changed_the_result_is_that_of_a_load(
    writes: list[tuple[str, int, bool]], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Changes of the saved state, and changes of what the program holds."""
    folder, like, later = tmp_path_factory.mktemp("since"), tree(), tree()
    made = SaveOptions(chunk_bytes=chunk, fsync=False)
    unickpt.save(folder / "a", tree(), options=made)
    for name, row, is_saved in writes:
        state = later if is_saved else like
        if name == "jax":
            state[name] = state[name].at[row].add(1)
        else:
            state[name][row] += 1
    unickpt.save(folder / "b", later, options=made)
    assert same(unickpt.load(folder / "b", like, since=folder / "a"), later)


JOB = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import unickpt

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
full = torch.arange(333 * 64, dtype=torch.float32).reshape(333, 64)
options = unickpt.SaveOptions(chunk_bytes=4096, fsync=False, timeout_s=60)

def state(full, placement):
    return {"w": distribute_tensor(full.clone(), mesh, [placement]), "plain": full.clone()}

later = full.clone()
later[300] = 0
for name, values in (("a", full), ("b", later)):
    unickpt.save(f"{sys.argv[1]}/{name}", state(values, Shard(0)), options=options)
for placement in (Shard(0), Shard(1), Replicate()):
    for spoiled in (False, True):
        like = state(full, placement)
        if spoiled and dist.get_rank() == 1:
            like["w"].to_local()[-1, -1] += 1
        _, report = unickpt.load(
            f"{sys.argv[1]}/b", like, since=f"{sys.argv[1]}/a", return_report=True
        )
        assert torch.equal(like["w"].full_tensor(), later)
        assert torch.equal(like["plain"], later)
        held = like["w"].to_local().numel() * 4
        if placement != Shard(1):  # there no process holds a chunk whole
            assert report.unchanged_bytes >= held + full.numel() * 4 - 3 * 4096, report
        assert report.unchanged_bytes + report.bytes == held + full.numel() * 4
dist.destroy_process_group()
"""


def test_dtensors_on_the_same_mesh_and_on_others(processes: Processes, tmp_path: Path) -> None:
    processes.finish(processes.torch(2, JOB, tmp_path))
