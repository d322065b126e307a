"""Tensors of torch that are more than their elements: lazy signs, rare dtypes, own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import foreign

import unickpt
from unickpt import Checkpoint, CheckpointCorrupt
from unickpt.backends.torch import reader as torch_files

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
    with pytest.raises((CheckpointCorrupt, unickpt.errors.UnsupportedFormat), match="special"):
        saved(tmp_path, {"w": torch.arange(4)})


def test_tensors_of_dtypes_that_unickpt_lacks_are_integers_of_the_same_size(tmp_path: Path) -> None:
    import torch

    raw = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    half = complex_numbers().to(torch.complex32)
    state = {
        "half": half.T,
        "packed": raw.view(torch.float4_e2m1fn_x2),
        "bits": raw.clone().view(torch.bits8),
        "beside": torch.ones(3),
    }
    found = saved(tmp_path, state)
    assert sorted(found.index.arrays) == ["beside", "bits/data", "half/data", "packed/data"]
    assert found["packed/data"][...].tobytes() == raw.numpy().tobytes()
    assert found["packed/data"].shape == (4, 6)
    pairs = torch.view_as_real(half).contiguous().view(torch.uint16).numpy()
    assert found["half/data"][...].T.tobytes() == pairs.tobytes()
    assert found["half/data"].shape == (6, 4)
    assert found.values["half/context/dtype"] == "complex32"
    unickpt.convert(found, tmp_path / "own")
    assert unickpt.diff(found, tmp_path / "own").same


@pytest.mark.parametrize("zipped", [True, False])
def test_quantized_tensors_are_their_integers_and_how_these_stand_for_floats(
    zipped: bool, tmp_path: Path
) -> None:
    import torch

    w = torch.linspace(-4, 4, 24).reshape(4, 6)
    scales = torch.rand(4, dtype=torch.float64)
    packed = torch.quantize_per_channel(w, scales.float(), torch.zeros(4), 0, torch.quint4x2)
    state = {
        "q": torch.quantize_per_tensor(w, 0.1, 10, torch.quint8).T,
        "c": torch.quantize_per_channel(w, scales, torch.zeros(4), 0, torch.qint8),
        "i": torch.quantize_per_tensor(w, 0.1, 0, torch.qint32)[1:, 2:],
        "p": packed,
    }
    found = saved(tmp_path, state, _use_new_zipfile_serialization=zipped)
    for name in "qci":
        integers = state[name].int_repr().numpy()
        assert np.array_equal(found[f"{name}/int_repr"][...], integers), name
        assert found[f"{name}/int_repr"].dtype == integers.dtype
    values = {name: found.values[f"q/context/{name}"] for name in ("scheme", "scale", "zero_point")}
    assert values == {"scheme": "per_tensor_affine", "scale": 0.1, "zero_point": 10}
    assert np.array_equal(found["c/scales"][...], state["c"].q_per_channel_scales())
    assert found.values["c/context/axis"] == 0
    assert found["p/packed"].shape == (12,)
    assert found.values["p/context/shape/1"] == 6


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc", "rows"])
def test_a_sparse_tensor_is_loaded_as_from_a_checkpoint_of_unickpt(
    layout: str, tmp_path: Path
) -> None:
    import torch

    dense = torch.eye(4) + torch.eye(4).roll(1, 0) * 2
    block = {"blocksize": (2, 2)} if layout[0] == "b" else {}
    if layout == "coo":
        sparse = dense.to_sparse().coalesce()
    elif layout == "rows":
        sparse = dense.to_sparse(1)  # its values have a dimension of their own
    else:
        sparse = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **block)
    found = saved(tmp_path, {"s": sparse})
    unickpt.save(tmp_path / "own", {"s": sparse})
    own = unickpt.open(tmp_path / "own")
    assert sorted(found) == sorted(own)
    assert found.values == own.values
    like = torch.zeros(4, 4).to_sparse(layout=sparse.layout, **block)
    like = torch.zeros(4, 4).to_sparse(1) if layout == "rows" else like
    loaded = unickpt.load(found, {"s": like})["s"]
    assert torch.equal(loaded.to_dense(), dense)


def test_nested_tensors_and_tensors_of_devices_are_what_they_are_made_of(tmp_path: Path) -> None:
    import torch

    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    array, dtype = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3), torch.float32
    state = {
        "n": torch.nested.nested_tensor(parts),
        "numpy": Call(torch._utils._rebuild_device_tensor_from_numpy, array, dtype, "xla:0", False),
        "xla": Call(torch._utils._rebuild_xla_tensor, array, torch.bfloat16, "xla:0", False),
        "cpu": Call(
            torch._utils._rebuild_device_tensor_from_cpu_tensor,
            torch.from_numpy(array), dtype, "hpu", False,
        ),
    }  # fmt: skip
    found = saved(tmp_path, state)
    assert found["n/buffer"].shape == (9,)
    assert np.array_equal(found["n/sizes"][...], [[2, 3], [1, 3]])
    for name in ("numpy", "cpu", "xla/data"):
        assert found[name][...].tobytes() == array.tobytes()
        assert found[name].shape == (2, 3)
    assert found.values["xla/context/dtype"] == "bfloat16"


class Call:
    """What is pickled as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_torch_before_0_4_are_read(zipped: bool, tmp_path: Path) -> None:
    import torch

    w = torch.arange(12.0).reshape(3, 4).T
    old = Call(torch._utils._rebuild_tensor, w.storage(), 0, tuple(w.shape), w.stride())
    state = {"fc.weight": old, "fc.bias": Call(torch.nn.Parameter, old)}
    found = saved(tmp_path, state, _use_new_zipfile_serialization=zipped)
    assert np.array_equal(found["fc.weight"][...], w.numpy())
    assert found["fc.weight"].shape == (4, 3)
    assert found.index.aliases == {"fc.bias": "fc.weight"}


def _rebuild_of_a_later_torch(*args: Any) -> None: ...


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_an_unknown_function_that_makes_a_tensor_is_refused_by_name(
    zipped: bool, nested: bool, tmp_path: Path
) -> None:
    import torch

    w = torch.arange(12.0)
    args = (w.storage(), 0, (3, 4), (4, 1))
    unknown = Call(_rebuild_of_a_later_torch, *args)
    if nested:
        kind = torch._tensor._rebuild_from_type_v2
        unknown = Call(kind, _rebuild_of_a_later_torch, torch.Tensor, args, {})
    with pytest.raises(unickpt.errors.UnsupportedFormat) as caught:
        saved(tmp_path, {"a": w, "fc.weight": unknown}, _use_new_zipfile_serialization=zipped)
    for words in ("fc.weight", "memory of a tensor", "save plain tensors"):
        assert words in str(caught.value)
    assert "damaged" not in str(caught.value)


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
