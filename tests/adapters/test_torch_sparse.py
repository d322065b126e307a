"""torch's sparse tensors, by their indices and values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import LoadMismatch

torch = pytest.importorskip("torch")

SAVE = unickpt.SaveOptions(fsync=False)
PARTS = {
    "coo": ("indices", "values"),
    "csr": ("crow_indices", "col_indices", "values"),
    "csc": ("ccol_indices", "row_indices", "values"),
    "bsr": ("crow_indices", "col_indices", "values"),
    "bsc": ("ccol_indices", "row_indices", "values"),
}
TO: dict[str, Callable[[Any], Any]] = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 4)),
    "bsc": lambda x: x.to_sparse_bsc((2, 4)),
}


@pytest.fixture(autouse=True)
def _no_warnings_of_torch() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta state")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        yield


def random(layout: str, seed: int, *, fill: int = 9, dtype: Any = torch.float32) -> Any:
    """A sparse 6 x 8 matrix of few elements; a NaN with a payload is among them."""
    at = torch.randperm(48, generator=torch.Generator().manual_seed(seed))[:fill]
    dense = torch.zeros(48, dtype=dtype)
    dense[at] = torch.arange(1, 1 + fill, dtype=dtype) + seed
    if dtype is torch.float32 and fill:
        dense.view(torch.int32)[at[0]] = 0x7FC01234
    return TO[layout](dense.reshape(6, 8))


def parts(tensor: Any) -> dict[str, bytes]:
    layout = str(tensor.layout).removeprefix("torch.sparse_")
    own = tensor.detach()
    found = {
        name: getattr(own, f"_{name}" if layout == "coo" else name)() for name in PARTS[layout]
    }
    return {name: x.contiguous().numpy().tobytes() for name, x in found.items()}


def save(path: Path, tree: Any) -> None:
    unickpt.save(path, tree, options=SAVE)


@pytest.mark.parametrize("layout", TO)
def test_a_sparse_tensor_is_stored_as_its_parts(layout: str, tmp_path: Path) -> None:
    saved = random(layout, 1)
    save(tmp_path / "c", {"a": {"w": saved}})
    found = unickpt.load(tmp_path / "c")["a"]["w"]
    assert list(found) == [*PARTS[layout], "context"]
    assert {name: found[name].tobytes() for name in PARTS[layout]} == parts(saved)
    coalesced = {"coalesced": True} if layout == "coo" else {}
    assert found["context"] == {
        "layout": f"sparse_{layout}", "shape": [6, 8], "dense_dim": 0, **coalesced
    }  # fmt: skip


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("fill", [9, 4, 0])  # as many elements, more and fewer
@pytest.mark.parametrize("layout", TO)
def test_a_sparse_tensor_is_filled(layout: str, fill: int, parameter: bool, tmp_path: Path) -> None:
    saved, like = random(layout, 1), random(layout, 2, fill=fill)
    like = torch.nn.Parameter(like) if parameter else like
    save(tmp_path / "c", {"w": saved})
    assert unickpt.load(tmp_path / "c", {"w": like})["w"] is like
    assert parts(like) == parts(saved)
    assert like.requires_grad is parameter
    save(tmp_path / "d", {"w": like})  # and back
    back = random(layout, 3)
    unickpt.load(tmp_path / "d", {"w": back})
    assert parts(back) == parts(saved)


@pytest.mark.parametrize("layout", TO)
def test_one_without_memory_is_made(layout: str, tmp_path: Path) -> None:
    saved = random(layout, 1)
    save(tmp_path / "c", {"w": saved})
    found = unickpt.load(tmp_path / "c", {"w": random(layout, 2, fill=0).to("meta")})["w"]
    assert found.layout is saved.layout
    assert parts(found) == parts(saved)


@pytest.mark.parametrize("coalesced", [False, True])
def test_elements_that_occur_twice(coalesced: bool, tmp_path: Path) -> None:
    saved = torch.sparse_coo_tensor([[1, 1, 0], [2, 2, 1]], [1.0, 2.0, 3.0], (2, 3))
    saved = saved.coalesce() if coalesced else saved
    save(tmp_path / "c", {"w": saved})
    like = torch.eye(2, 3).to_sparse()
    unickpt.load(tmp_path / "c", {"w": like})
    assert like.is_coalesced() is coalesced
    assert parts(like) == parts(saved)


def test_dense_dimensions_and_batches(tmp_path: Path) -> None:
    hybrid = torch.sparse_coo_tensor([[1, 0], [2, 1]], torch.rand(2, 4), (2, 3, 4))
    batches = torch.stack([torch.eye(4), torch.eye(4).flip(0)]).to_sparse_csr()
    integers = random("csc", 4, dtype=torch.int64)
    save(tmp_path / "c", {"hybrid": hybrid, "batches": batches, "integers": integers})
    like = {
        "hybrid": torch.sparse_coo_tensor([[0], [0]], torch.rand(1, 4), (2, 3, 4)),
        "batches": torch.zeros(2, 4, 4).to_sparse_csr(),
        "integers": random("csc", 5, dtype=torch.int64, fill=2),
    }
    unickpt.load(tmp_path / "c", like)
    assert parts(like["hybrid"]) == parts(hybrid)
    assert parts(like["batches"]) == parts(batches)
    assert parts(like["integers"]) == parts(integers)


def test_a_sparse_parameter_of_a_module(tmp_path: Path) -> None:
    saved, other = torch.nn.Module(), torch.nn.Module()
    for module, seed in (saved, 1), (other, 2):
        module.weight = torch.nn.Parameter(random("coo", seed, fill=3 * seed))
        module.register_buffer("mask", random("csr", seed, fill=3 * seed))
        module.register_buffer("counts", random("csr", seed, fill=3))
    save(tmp_path / "c", {"m": saved})
    state = dict(other.state_dict())
    unickpt.load(tmp_path / "c", {"m": state})
    assert parts(state["mask"]) == parts(saved.mask)
    unickpt.load(tmp_path / "c", {"m": other})
    for name in ("weight", "mask", "counts"):
        assert parts(getattr(other, name)) == parts(getattr(saved, name)), name


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (lambda: random("csc", 1), r"w/ccol_indices +missing"),
        (lambda: random("bsr", 1), r"context/layout is 'sparse_csr', requested is 'sparse_bsr'"),
        (lambda: torch.zeros(6, 9).to_sparse_csr(), r"context/shape/1 is 8, requested is 9"),
        (lambda: random("csr", 1, dtype=torch.float64), r"w/values +dtype +float32 +float64"),
        (lambda: torch.zeros(6, 8), r"w +missing"),
    ],
)
def test_what_does_not_fit_is_a_mismatch(
    like: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path / "c", {"w": random("csr", 1)})
    with pytest.raises(LoadMismatch, match=message):
        unickpt.load(tmp_path / "c", {"w": like()})


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_indices_outside_of_the_shape_are_refused(layout: str, tmp_path: Path) -> None:
    """torch would read and write outside of its memory."""
    save(tmp_path / "c", {"w": random(layout, 1)})
    stored = unickpt.load(tmp_path / "c")
    indices = stored["w"][PARTS[layout][-2]]
    indices[..., -1] = 10_000
    save(tmp_path / "d", stored)
    like = random(layout, 2)
    before = parts(like)
    with pytest.raises(LoadMismatch, match=rf"'w': the stored value is no sparse_{layout} tensor"):
        unickpt.load(tmp_path / "d", {"w": like})
    assert parts(like) == before


def test_per_process_values(tmp_path: Path) -> None:
    saved, like = random("coo", 1), random("coo", 2, fill=3)
    save(tmp_path / "c", {"w": unickpt.PerProcess([saved])})
    unickpt.load(tmp_path / "c", {"w": unickpt.PerProcess([like])})
    assert parts(like) == parts(saved)


def test_a_loop_saves_what_is_there_at_each_step(tmp_path: Path) -> None:
    weight = random("csr", 0)
    with unickpt.Checkpointer(tmp_path / "run", options=SAVE) as checkpointer:
        expected = []
        for step in range(4):
            weight.values().fill_(step)
            expected.append(parts(weight))
            checkpointer.save(step, {"w": weight, "n": np.ones(3)})
            weight.values().fill_(99)
    for step in range(4):
        like = random("csr", 1)
        unickpt.load(tmp_path / f"run/step_{step}", {"w": like, "n": np.zeros(3)})
        assert parts(like) == expected[step]
