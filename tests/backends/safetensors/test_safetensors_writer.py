"""safetensors and Hugging Face folders that unickpt writes, as the other libraries read them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import s3_server
from support.saving import damage, files

import unickpt
from unickpt import SaveOptions, UnsupportedLeaf

FAST = SaveOptions(fsync=False)


def state() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    kinds = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
             "float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn",
             "float8_e5m2", "float8_e8m0fnu"]  # fmt: skip
    raw = rng.integers(0, 256, (len(kinds), 5, 3, 8), np.uint8)
    found: dict[str, Any] = {}
    for kind, data in zip(kinds, raw, strict=True):
        dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        data = data & 1 if kind == "bool" else data
        found[kind] = data.reshape(-1).view(dtype)[: 5 * 3].reshape(5, 3)
    return {**found, "none": np.empty((0, 4), np.float32), "one": np.float32(2.5)}


def save(path: Path, tree: Any, **more: Any) -> None:
    unickpt.save(path, tree, options=FAST, **more)


def check(found: Any, path: Path) -> None:
    """That tensors of torch are, bit for bit, what a checkpoint holds."""
    opened = unickpt.open(path)
    assert set(found) == set(opened.index.arrays)
    for name, tensor in found.items():
        expected = opened[name][...]
        assert tuple(tensor.shape) == expected.shape
        assert str(tensor.dtype).removeprefix("torch.") == expected.dtype.name
        assert bytes(tensor.contiguous().reshape(-1).view(_bytes()).numpy()) == expected.tobytes()


def _bytes() -> Any:
    import torch

    return torch.uint8


@pytest.mark.integration
def test_the_library_reads_every_dtype(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    save(tmp_path / "c", state(), metadata={"run": "llama", "lr": 0.5})
    for name in ("x.safetensors", "folder"):
        unickpt.convert(tmp_path / "c", tmp_path / name, to="safetensors", options=FAST)
    check(load_file(tmp_path / "x.safetensors"), tmp_path / "c")
    assert files(tmp_path / "folder") == ["model.safetensors"]
    check(load_file(tmp_path / "folder" / "model.safetensors"), tmp_path / "c")
    with safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt", "run": "llama"}
    assert unickpt.diff(tmp_path / "c", tmp_path / "folder").same


@pytest.mark.integration
def test_transformers_loads_it_with_its_configuration_and_ties(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    save(tmp_path / "c", model.state_dict())
    assert unickpt.open(tmp_path / "c").index.aliases == {
        "lm_head.weight": "model.embed_tokens.weight"
    }
    model.save_pretrained(tmp_path / "its", max_shard_size=5000)
    unickpt.convert(
        tmp_path / "c",
        tmp_path / "ours",
        to="hf",
        max_shard_size="5KB",
        config=tmp_path / "its",
        options=FAST,
    )
    assert set(files(tmp_path / "its")) >= {"config.json", "generation_config.json"}
    index = "model.safetensors.index.json"
    theirs, ours = (json.loads((tmp_path / f / index).read_text()) for f in ("its", "ours"))
    assert theirs["metadata"]["total_size"] == ours["metadata"]["total_size"]
    assert set(theirs["weight_map"]) == set(ours["weight_map"])
    assert all(os.path.getsize(f) < 7000 for f in (tmp_path / "ours").glob("*.safetensors"))
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, local_files_only=True
    )
    assert not any(info.values()), info
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    # A cast that was asked for, also in the configuration.
    unickpt.convert(
        tmp_path / "c", tmp_path / "half", to="hf", dtype="bfloat16", config=tmp_path / "its"
    )
    assert files(tmp_path / "half") == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(half.state_dict()[name], tensor.bfloat16())


def test_what_the_format_cannot_hold_is_named_before_anything_is_written(tmp_path: Path) -> None:
    save(tmp_path / "c", {"z": np.ones(2, np.complex128), "w": np.ones(2), "lr": 0.1, "s": "x"})
    for to in ("hf", "safetensors"):
        with pytest.raises(UnsupportedLeaf) as caught:
            unickpt.convert(tmp_path / "c", tmp_path / to, to=to, options=FAST)
        told = str(caught.value)
        assert all(word in told for word in ("'z': complex128[2]", "'lr': a plain float", "'s'"))
        assert "default {leaf...} <-> {leaf...}" in told
    save(tmp_path / "two", {"a/b": np.ones(1), "a": {"b": np.ones(1)}})
    with pytest.raises(UnsupportedLeaf, match="'a/b'"):
        unickpt.convert(tmp_path / "two", tmp_path / "x", to="hf", options=FAST)
    assert sorted(os.listdir(tmp_path)) == ["c", "two"]


def test_containers_become_names_with_slashes(tmp_path: Path) -> None:
    from safetensors import safe_open

    save(tmp_path / "c", {"layers": [{"w": np.arange(3)}, {"w": np.arange(4)}]})
    unickpt.convert(tmp_path / "c", tmp_path / "st", to="safetensors", options=FAST)
    with safe_open(tmp_path / "st" / "model.safetensors", "numpy") as file:
        assert set(file.keys()) == {"layers/0/w", "layers/1/w"}
    assert set(unickpt.open(tmp_path / "st")) == {"layers/0/w", "layers/1/w"}


@pytest.mark.parametrize("size", ["5 XB", "-1", 0, -3, True, 1.5, "GB"])
def test_a_size_that_is_none(size: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": np.ones(2)})
    with pytest.raises(ValueError, match="max_shard_size"):
        unickpt.convert(tmp_path / "c", tmp_path / "hf", to="hf", max_shard_size=size)


def test_a_folder_without_some_of_its_files_is_no_checkpoint(tmp_path: Path) -> None:
    """On object storage, the index comes last; the names of files tell how many there are."""
    save(tmp_path / "c", {f"w{n}": np.ones(100) for n in range(5)})
    unickpt.convert(tmp_path / "c", tmp_path / "hf", to="hf", max_shard_size=1000, options=FAST)
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    (tmp_path / "hf" / "model-00003-of-00005.safetensors").unlink()
    with pytest.raises(unickpt.CheckpointCorrupt, match="00003-of-00005"):
        unickpt.open(tmp_path / "hf")


def test_to_s3_with_the_index_last(
    tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "hf-export")
    save(tmp_path / "c", {f"w{n}": np.full(100, n) for n in range(5)})
    url = "s3://hf-export/models/a"
    options: dict[str, Any] = {"to": "hf", "max_shard_size": 1000, "options": FAST}
    unickpt.convert(tmp_path / "c", url, **options)
    assert unickpt.diff(tmp_path / "c", url).same
    with pytest.raises(unickpt.CheckpointExists, match="overwrite"):
        unickpt.convert(tmp_path / "c", url, **options)
    save(tmp_path / "d", {"x": np.arange(3)})
    unickpt.convert(tmp_path / "d", url, overwrite=True, **options)
    assert list(unickpt.open(url)) == ["x"]
    # A failure leaves nothing that reads as a checkpoint, and removes what it wrote.
    damage(tmp_path / "c")
    with pytest.raises(unickpt.CheckpointCorrupt):
        unickpt.convert(tmp_path / "c", "s3://hf-export/models/b", **options)
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open("s3://hf-export/models/b")


def test_a_whole_training_step_is_no_model(tmp_path: Path) -> None:
    params, mu, nu = ({"up": {"kernel": np.full((3, 5), n, np.float32)}} for n in (1, 2, 3))
    count = np.zeros((), np.int32)
    steps = {
        "jax": {"params": params, "opt_state": [{"count": count, "mu": mu, "nu": nu}]},
        "torch": {
            "model": {"up.weight": np.ones((5, 3), np.float32)},
            "optim": {"state": {"up.weight": {"exp_avg": np.ones((5, 3), np.float32)}}},
        },
    }
    for name, step in steps.items():
        unickpt.save(tmp_path / name, step)
        part = next(iter(step))
        with pytest.raises(UnsupportedLeaf) as caught:
            unickpt.convert(tmp_path / name, tmp_path / f"{name}-hf", to="hf")
        said = str(caught.value)
        assert "look like moments of an optimizer" in said
        assert f"pass under={part!r} (1 array)" in said
        assert "docs/howto/convert.md" in said
        assert not (tmp_path / f"{name}-hf").exists()
        unickpt.convert(tmp_path / name, tmp_path / f"{name}-hf", to="hf", under=part)
        unickpt.convert(tmp_path / name, tmp_path / f"{name}.safetensors", to="safetensors")
