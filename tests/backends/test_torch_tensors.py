"""Tensors of torch that are more than their elements: lazy signs, rare dtypes, own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import foreign

import unickpt
from unickpt import Checkpoint, CheckpointCorrupt
from unickpt.backends import torch_files

pytestmark = [
    pytest.mark.integration,  # imports torch
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of torch: experimental, deprecated
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def saved(path: Path, state: Any, **options: Any) -> Checkpoint:
    import torch

    torch.save(state, path / "x.pt", **options)
    found = foreign.opened(path, torch_files)
    assert found is not None
    return found


def complex_numbers(dtype: Any = None) -> Any:
    import torch

    parts = torch.linspace(-4, 4, 24, dtype=dtype or torch.float32).reshape(4, 6)
    return torch.complex(parts, 1 - parts)


@pytest.mark.parametrize("zipped", [True, False])
def test_signs_that_torch_left_to_be_changed_are_changed(zipped: bool, tmp_path: Path) -> None:
    import torch

    for dtype in (torch.float32, torch.float64):
        full = complex_numbers(dtype)
        state = {"plain": full, "conj": full.conj(), "transposed": full.t().conj()}
        state["both"] = torch._neg_view(full.conj())
        imag = complex_numbers(dtype).conj().imag
        state |= {"imag": imag, "again": imag.t()}
        assert imag.is_neg()
        assert (state["both"].is_neg(), state["both"].is_conj()) == (True, True)
        found = saved(tmp_path, state, _use_new_zipfile_serialization=zipped)
        for name, tensor in state.items():
            told = tensor.resolve_conj().resolve_neg().contiguous().numpy()
            assert found[name][...].tobytes() == told.tobytes(), name
            assert found[name][1:3, 2:].tobytes() == told[1:3, 2:].tobytes(), name
        assert found.index.aliases == {}  # the same elements, but not the same values


def test_signs_in_distributed_checkpoints(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    full = complex_numbers()
    dcp.save({"w": full.conj(), "values": [full.conj()]}, checkpoint_id=tmp_path, no_dist=True)
    found = unickpt.open(tmp_path)
    for name in ("w", "values/0"):
        assert found[name][...].tobytes() == full.conj().resolve_conj().numpy().tobytes()


@pytest.mark.parametrize("told", [{"conj": True}, {"other": True}, {"neg": True}, [1]])
def test_what_is_special_about_a_tensor_in_an_unknown_way_is_refused(
    told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch._utils, "get_tensor_metadata", lambda tensor: told)
    with pytest.raises(CheckpointCorrupt, match="special"):
        saved(tmp_path, {"w": torch.arange(4)})


def test_tensors_of_dtypes_that_unickpt_lacks_are_what_they_are_made_of(tmp_path: Path) -> None:
    import torch

    raw = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    state = {
        "half": complex_numbers().to(torch.complex32),
        "packed": raw.view(torch.float4_e2m1fn_x2),
        "bits": raw.clone().view(torch.bits8),
        "beside": torch.ones(3),
    }
    found = saved(tmp_path, state)
    assert sorted(found.index.arrays) == ["beside", "bits/args/0", "half/args/0", "packed/args/0"]
    assert found["packed/args/0"][...].tobytes() == raw.numpy().tobytes()
    unickpt.convert(found, tmp_path / "own")
    assert unickpt.diff(found, tmp_path / "own").same


def test_quantized_and_sparse_tensors_are_what_they_are_made_of(tmp_path: Path) -> None:
    import torch

    w = torch.linspace(-4, 4, 24).reshape(4, 6)
    state = {
        "q": torch.quantize_per_tensor(w, 0.1, 10, torch.quint8),
        "c": torch.quantize_per_channel(w, torch.rand(4), torch.zeros(4), 0, torch.qint8),
        "i": torch.quantize_per_tensor(w, 0.1, 0, torch.qint32),
        "s": torch.eye(3).to_sparse(),
    }
    found = saved(tmp_path, state)
    assert found["q/args/0"][...].tobytes() == state["q"].int_repr().numpy().tobytes()
    assert found["c/args/0"][...].tobytes() == state["c"].int_repr().numpy().tobytes()
    assert found["i/args/0"][...].tobytes() == state["i"].int_repr().numpy().tobytes()
    assert found.values["q/args/4/1"] == 0.1
    assert np.array_equal(found["s/args/1/1"][...], np.ones(3, np.float32))


def test_tensors_of_unknown_classes_are_what_they_hold(tmp_path: Path) -> None:
    import torch
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.arange(3.0), torch.arange(3.0) + 1
    state = {"two": TwoTensor(a, b), "parameter": torch.nn.Parameter(TwoTensor(a, b)), "w": a}
    found = saved(tmp_path, state)
    assert np.array_equal(found["two/args/3/b"][...], b.numpy())
    assert "two" not in found
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    found = saved(tmp_path, {"n": nested, "w": a})
    assert found["n/args/2/0/values"].shape == (3, 3)
