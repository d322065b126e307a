"""Memory of the host: what is saved is the state of the call, and whose memory it is stays free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.torch_versions import needs_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import unickpt
from unickpt import PerProcess, SaveOptions
from unickpt.arrays import guarded_copy
from unickpt.errors import StateChanged
from unickpt.frameworks import host_memory
from unickpt.saving import snapshot, snapshot_policy, write_plan
from unickpt.types import LocalFragments

MODES = ["auto", "copy", "reference", "lazy", "device"]


@pytest.fixture
def lonely() -> Iterator[Any]:
    """The mesh of a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is copied or written behind the call before it is set."""
    opened, real, caller = threading.Event(), host_memory.stage, threading.current_thread()

    def stopped(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is not caller:
            assert opened.wait(30)
        return real(*arguments, **named)

    for module in (snapshot, write_plan):
        monkeypatch.setattr(module, "stage", stopped)
    monkeypatch.setattr(snapshot_policy, "_THREADS", 1)  # so that the call copies on its own thread
    yield opened
    opened.set()


CHANGES: dict[str, Callable[[Any], object]] = {
    "one element through .data": lambda p: p.data[1033].__setitem__(77, -1.0),
    "one row through NumPy": lambda p: p.detach().numpy()[1033].fill(-1),
    "all in place through .data": lambda p: p.data.mul_(2),
    "a sparse row of a DTensor": lambda p: p.to_local().data[1033].fill_(-1),
    "all of a DTensor": lambda p: p.data.to_local().mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_auto_asks_nothing_of_the_loop_on_the_host(
    change: str, lonely: Any, behind: threading.Event, tmp_path: Path
) -> None:
    start = torch.arange(2048 * 1024.0).reshape(2048, 1024)
    weight = distribute_tensor(start, lonely, [Shard(0)]) if "DTensor" in change else start.clone()
    param = torch.nn.Parameter(weight)
    optimizer = torch.optim.SGD([param], lr=1.0)
    with unickpt.Checkpointer(tmp_path, optimizers=[optimizer]) as checkpointer:
        pending = checkpointer.save(0, {"w": param})
        with torch.no_grad():
            CHANGES[change](param)
        behind.set()
        pending.result(30)
        assert np.array_equal(unickpt.load(checkpointer.path(0))["w"], start.numpy())


def aligned(count: int) -> Any:
    """A NumPy array that JAX takes over without a copy."""
    raw = np.arange(count + 16, dtype=np.float32)
    at = -raw.ctypes.data % 64 // 4
    return raw[at : at + count]


KINDS = [(kind, mode) for kind in ("numpy", "a part", "small") for mode in MODES]


# A tensor that is kept lazily must not change, wherever its memory comes from.
@pytest.mark.parametrize(("kind", "mode"), [*KINDS, ("torch", "auto"), ("torch", "reference")])
def test_jax_arrays_in_memory_that_is_written_to_are_copied(
    kind: str, mode: Any, behind: threading.Event, tmp_path: Path
) -> None:
    memory = aligned(100 if kind == "small" else 1 << 20)
    shared, owner = jax.device_put(memory), memory
    if kind == "torch":
        owner = torch.arange(float(1 << 20), dtype=torch.float32)
        shared = jnp.from_dlpack(owner)
    if kind == "a part":
        owner = memory[1000:1001]
    apart = jnp.arange(1 << 20) * 2
    expected = np.array(shared)
    tree = {"jax": shared, "owner": owner, "apart": apart}
    pending = unickpt.save_async(tmp_path / "c", tree, options=SaveOptions(staging=mode))
    owner[:] = -1
    assert not np.array_equal(np.asarray(shared), expected), "it does not share memory here"
    behind.set()
    staged = pending.result(30).staged_bytes
    assert mode == "copy" or staged <= 2 * memory.nbytes, "what is apart was copied as well"
    found = unickpt.load(tmp_path / "c")
    assert np.array_equal(found["jax"], expected)
    assert np.array_equal(found["apart"], apart)


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of every kind of memory that can be saved."""
    base = torch.arange(60_000.0).reshape(200, 300)
    complex_ = torch.complex(base, base + 1)
    return {
        "plain": base.clone(),
        "small": torch.arange(5),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(3, 0),
        "view": base.clone()[7:, 3:],
        "transposed": base.clone().t(),
        "spread": base.clone()[::3, ::7],
        "broadcast": torch.ones(1, 300).expand(200, 300),
        "bool": base > 700,
        "bfloat16": base.bfloat16(),
        "float16": base.half()[1:],
        "float8": base.to(torch.float8_e4m3fn).t(),
        "uint8": base.to(torch.uint8),
        "complex": complex_,
        "conjugated": complex_.clone().conj(),
        "negated": complex_.clone().conj().imag,
        "grown": torch.nn.Parameter(base.clone()),
    }


def bits(tensor: Any) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return (
        bytes(plain.view(torch.uint8).flatten().tolist()) if plain.dim() else repr(plain).encode()
    )


def resize(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)  # raises where something forbade it


@pytest.mark.parametrize("mode", [None, *MODES])
def test_tensors_stay_resizable_after_a_save(mode: Any, tmp_path: Path) -> None:
    state = tensors()
    large = torch.arange(1 << 20)  # so that it is worth a lazy copy
    flat = torch.arange(40_000.0)
    own = torch.arange(7)
    tree = {
        **state,
        "large": large,
        "mine": LocalFragments.flat((200, 200), [(0, flat)]),
        "own": PerProcess(own),
    }
    if mode is None:
        unickpt.save(tmp_path / "c", tree)
    else:
        unickpt.save_async(tmp_path / "c", tree, options=SaveOptions(staging=mode)).result(30)
    like = {name: torch.zeros_like(t, memory_format=torch.contiguous_format).detach()
            for name, t in state.items()}  # fmt: skip
    filled = {
        **like,
        "large": torch.zeros_like(large),
        "mine": LocalFragments.flat((200, 200), [(0, other := torch.zeros(40_000))]),
        "own": PerProcess(torch.zeros_like(own)),
    }
    loaded = unickpt.load(tmp_path / "c", filled)
    kept = {name: bits(loaded[name].clone()) for name in state}
    for name, tensor in state.items():
        assert kept[name] == bits(tensor.clone()), name
        resize(tensor)
        resize(like[name])
    assert torch.equal(loaded["large"], large)
    assert torch.equal(other, flat)
    assert torch.equal(loaded["own"].value, own)
    for tensor in [large, flat, own, other, loaded["own"].value]:
        resize(tensor)


@pytest.mark.parametrize("meta", [False, True])
def test_modules_stay_resizable_after_a_load(meta: bool, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"model": torch.nn.Linear(30, 40)})
    with torch.device("meta" if meta else "cpu"):
        model = torch.nn.Linear(30, 40)
    unickpt.load(tmp_path / "c", {"model": model})
    for param in model.parameters():
        resize(param)


@needs_torch("2.7", "FSDP2 on CPUs")
def test_fsdp_goes_on_after_a_save_of_what_is_unsharded(lonely: Any, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 5))
    fully_shard(model, mesh=lonely)
    batch = torch.randn(4, 300)
    expected = model(batch)
    for number, mode in enumerate([None, *MODES]):
        model.unshard()
        tree = dict(model.named_parameters())
        if mode is None:
            unickpt.save(tmp_path / f"{number}", tree)
        else:
            options = SaveOptions(staging=mode)  # type: ignore[arg-type]
            unickpt.save_async(tmp_path / f"{number}", tree, options=options).result(30)
        model.reshard()
        unickpt.load(tmp_path / f"{number}", model.state_dict())
        model.unshard()
        model.reshard()
        assert torch.equal(model(batch), expected)


@pytest.mark.parametrize("again", [False, True])
def test_memory_that_is_freed_before_it_was_read_is_an_error(
    again: bool, behind: threading.Event, tmp_path: Path
) -> None:
    weight = torch.arange(16 << 20, dtype=torch.float32)
    optimizers = [torch.optim.SGD([weight])]
    options = SaveOptions(staging="lazy")
    with unickpt.Checkpointer(tmp_path, optimizers=optimizers, options=options) as checkpointer:
        pending = checkpointer.save(0, {"w": weight})
        resize(weight)
        if again:
            weight.untyped_storage().resize_(4 * (17 << 20))
        behind.set()
        with pytest.raises(StateChanged, match="'w'"):
            pending.result(30)
        assert checkpointer.steps() == []


def test_memory_that_is_freed_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.arange(16 << 20, dtype=torch.float32)  # what the C library gives back at once
    real = guarded_copy.copy

    def late(source: Any, out: Any) -> None:
        if source.nbytes > 1 << 20:
            resize(weight)
        real(source, out)

    monkeypatch.setattr(guarded_copy, "copy", late)
    optimizers, options = [torch.optim.SGD([weight])], SaveOptions(staging="lazy")
    with (
        unickpt.Checkpointer(tmp_path, optimizers=optimizers, options=options) as checkpointer,
        pytest.raises(StateChanged, match="'w'"),
    ):
        checkpointer.save(0, {"w": weight}).result(30)


def test_memory_that_is_freed_during_the_call_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.arange(1 << 20)
    real = host_memory.stage

    def late(*arguments: Any, **named: Any) -> Any:
        resize(weight)
        return real(*arguments, **named)

    monkeypatch.setattr(write_plan, "stage", late)
    with pytest.raises(StateChanged, match=r"'w'.*freed"):
        unickpt.save(tmp_path / "c", {"w": weight})


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_peek_copies_views_of_any_strides(shape: list[int], data: st.DataObject) -> None:
    assert guarded_copy.is_possible()
    order = data.draw(st.permutations(range(len(shape))))
    steps = [data.draw(st.integers(1, 3)) for _ in shape]
    whole = np.arange(np.prod([n * s for n, s in zip(shape, steps, strict=True)], dtype=int))
    whole = whole.reshape([n * s for n, s in zip(shape, steps, strict=True)])
    source = whole[(*(slice(None, None, s) for s in steps), ...)].transpose(order)
    out = np.empty(source.shape, source.dtype)
    guarded_copy.copy(source, out)
    assert np.array_equal(out, source)


def test_peek_takes_many_runs_and_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.arange(3000 * 20).reshape(3000, 20)
    for view in (source, source[:, :7], source.T):
        for most in (1 << 30, 24):
            monkeypatch.setattr(guarded_copy, "_BYTES", most)
            out = np.empty(view.shape, view.dtype)
            guarded_copy.copy(view, out)
            assert np.array_equal(out, view)
