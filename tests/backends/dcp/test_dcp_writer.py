"""torch's distributed checkpoints that unickpt writes, as dcp.load reads them."""

from __future__ import annotations

import os
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.processes import Processes
from support.saving import files

import unickpt
from unickpt import SaveOptions, UnsupportedLeaf
from unickpt.backends.dcp import writer

pytestmark = pytest.mark.integration
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FAST = SaveOptions(fsync=False)


def state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    w = rng.random((64, 24), np.float32)
    return {
        "model": OrderedDict({
            "a.weight": w,
            "half": rng.random((7, 5)).astype(ml_dtypes.bfloat16),
            "f8": rng.random((3, 4)).astype(ml_dtypes.float8_e4m3fn),
            "u16": np.arange(9, dtype=np.uint16),
            "none": np.zeros((0, 3), np.float32),
            "tied": w,
        }),
        "optim": {
            "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "ids": [1, 2, 3]}],
            "moments": [np.arange(5.0), [np.float64(3.5)]],
            "pair": (np.arange(3), "x"),
        },
        "step": 7,
        "note": "text",
        "bytes": b"\x00\xff",
        "nothing": None,
        3: np.int64(4),
    }  # fmt: skip


def same(tensor: Any, array: Any) -> bool:
    import torch

    array = np.asarray(array)
    raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return (tuple(tensor.shape), raw) == (array.shape, array.tobytes())


def check(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert set(found) == {str(key) for key in expected}
        for key, value in expected.items():
            check(found[str(key)], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)
    elif isinstance(expected, np.ndarray | np.generic):
        assert same(found, expected)
    else:
        assert (type(found), found) == (type(expected), expected)


def empty(value: Any) -> Any:
    """The template that dcp.load fills."""
    import torch

    if isinstance(value, dict):
        return {str(key): empty(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(empty, value))
    if isinstance(value, np.ndarray | np.generic):
        dtype = getattr(torch, value.dtype.name)
        return torch.empty(value.shape, dtype=dtype)
    return type(value)() if value is not None else None


def load(path: Path, template: Any) -> Any:
    import torch.distributed.checkpoint as dcp

    dcp.load(template, checkpoint_id=path, no_dist=True)
    return template


@alone
def test_torch_loads_a_nested_state(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", state(), options=FAST)
    unickpt.convert(tmp_path / "c", tmp_path / "dcp", to="dcp", options=FAST)
    assert files(tmp_path / "dcp") == [".metadata", "__0_0.distcp"]
    check(load(tmp_path / "dcp", empty(state())), state())
    assert unickpt.verify(tmp_path / "dcp").ok
    assert unickpt.diff(tmp_path / "c", tmp_path / "dcp").same


@alone
def test_what_torch_saves_itself_has_the_same_names_and_paths(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    unickpt.save(tmp_path / "c", state(), options=FAST)
    unickpt.convert(tmp_path / "c", tmp_path / "ours", to="dcp", options=FAST)
    dcp.save(load(tmp_path / "ours", empty(state())), checkpoint_id=tmp_path / "its", no_dist=True)
    ours, its = (dcp.FileSystemReader(tmp_path / at).read_metadata() for at in ("ours", "its"))
    assert ours.planner_data == its.planner_data
    assert ours.state_dict_metadata == its.state_dict_metadata
    assert unickpt.diff(tmp_path / "ours", tmp_path / "its").same


@alone
def test_large_arrays_are_cut_into_chunks_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(writer, "_FILE_BYTES", 5000)
    unickpt.save(tmp_path / "c", state(), options=FAST)
    unickpt.convert(tmp_path / "c", tmp_path / "dcp", to="dcp", options=FAST)
    assert len(files(tmp_path / "dcp")) > 4
    check(load(tmp_path / "dcp", empty(state())), state())


LOAD = textwrap.dedent("""
    import sys, torch, numpy as np, unickpt
    import torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    source, target = sys.argv[1:]
    dist.init_process_group("gloo")
    report = unickpt.convert(source, target, to="dcp", options=unickpt.SaveOptions(fsync=False))
    assert report.written_bytes < report.bytes
    mesh = init_device_mesh("cpu", (2,))
    spread = lambda full: distribute_tensor(full, mesh, [Shard(1)], src_data_rank=None)
    like = {"w": spread(torch.zeros(700, 50)), "v": spread(torch.zeros(9, 3)), "step": 0}
    dcp.load(like, checkpoint_id=target)
    stored = unickpt.open(source)
    for name in ("w", "v"):
        full = torch.from_numpy(np.ascontiguousarray(stored[name][...]))
        assert torch.equal(like[name].to_local(), spread(full).to_local())
    assert like["step"] == 5
    dist.destroy_process_group()
""")


def test_two_ranks_write_it_and_load_it(processes: Processes, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tree = {"w": rng.random((700, 50), np.float32), "v": rng.random((9, 3), np.float32), "step": 5}
    unickpt.save(tmp_path / "c", tree, options=FAST)
    processes.finish(processes.torch(2, LOAD, tmp_path / "c", tmp_path / "dcp"))
    assert sorted(os.listdir(tmp_path)) == ["c", "dcp"]


def test_what_dcp_cannot_hold(tmp_path: Path) -> None:
    for tree, words in (
        ([np.ones(2)], "a list"),
        ({"a": {"b": np.ones(2)}, "a.b": np.ones(2)}, "'a.b'"),
        ({"x": np.ones(2, ml_dtypes.float8_e3m4)}, "float8_e3m4"),
    ):
        unickpt.save(tmp_path / "c", tree, options=FAST, overwrite=True)
        with pytest.raises(UnsupportedLeaf, match=words):
            unickpt.convert(tmp_path / "c", tmp_path / "x", to="dcp", options=FAST)
        assert not (tmp_path / "x").exists()
