"""inspect of files: what the table shows, and what it leaves out."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from support.file_writers import safetensors, torch_zip
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app
from unickpt.tools.terminal import tables


def inspected(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_columns_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(safetensors({"w": np.ones((4, 2), np.float32)}))
    heading = next(x for x in inspected(tmp_path / "x").splitlines() if x.startswith("name"))
    assert heading.split() == ["name", "shape", "dtype", "bytes"]
    lines = inspected(tmp_path / "x").splitlines()
    assert "format safetensors" in lines
    assert "total: 1 array of 8 elements, 32 B" in lines


def test_the_largest_arrays_come_first(tmp_path: Path) -> None:
    arrays = {f"w{n}": np.ones((n * 7 % 5 + 1, 2), np.float32) for n in range(5)}
    (tmp_path / "x").write_bytes(safetensors({**arrays, "b": np.ones(1, np.float64)}))
    text = inspected(tmp_path / "x", "--sort", "size")
    names = [line.split()[0] for line in text.splitlines() if line[:1] in "wb" and line.strip()]
    names = [name for name in names if name in {*arrays, "b"}]
    assert names == ["w2", "w4", "w1", "w3", "w0", "b"]
    assert "by dtype: 120 B float32 (5 arrays), 8 B float64 (1 array)" in text


def test_a_long_list_of_plain_values_is_one_row(tmp_path: Path) -> None:
    state = {"rng": random.Random(0).getstate(), "seen": [1, None, 2.5, "a"] * 10}
    unickpt.save(tmp_path / "c", {"w": np.ones(2), **state})
    lines = inspected(tmp_path / "c").splitlines()
    assert len(lines) < 20
    assert any(
        "seen = 1, None, 2.5" in x and "40 values: int, None, float, str" in x for x in lines
    )
    assert len(inspected(tmp_path / "c", "--all").splitlines()) > 600


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (60, ["model.decoder.self_attention.output.dense.weight"]),
        (30, ["model.decoder.self_attention.", "  output.dense.weight"]),
        (20, ["model.decoder.", "  self_attention.", "  output.dense.", "  weight"]),
    ],
)
def test_names_break_behind_slashes_and_dots(width: int, lines: list[str]) -> None:
    name = "model.decoder.self_attention.output.dense.weight"
    assert tables.wrapped(name, width).splitlines() == lines
    nested = tables.wrapped("  " + name.replace(".", "/"), width + 2).splitlines()
    assert nested[0].startswith("  model/decoder/")
    assert "".join(line.strip() for line in nested) == name.replace(".", "/")


@pytest.mark.integration
def test_quantized_tensors_of_gguf_have_their_types_and_sizes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    data = gguf.quantize(np.ones((64, 32), np.float32), kind)
    writer.add_tensor("blk.0.attn_q.weight", data, raw_shape=data.shape, raw_dtype=kind)
    writer.add_tensor("norm", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = inspected(tmp_path / "m.gguf")
    assert "64 x 32" in text
    assert "Q8_0" in text
    assert "2 arrays of 2,080 elements" in text
    assert "2.2 kB Q8_0 (1 array), 128 B float32 (1 array)" in text
    [array] = [
        a for a in json.loads(inspected(tmp_path / "m.gguf", "--json"))["arrays"] if a["block"]
    ]
    assert array["block"] == {"type": "Q8_0", "shape": [64, 32]}
    assert "Q8_0, blocks for 64 x 32" in inspected(tmp_path / "m.gguf", "blk.0.attn_q.weight")


def test_values_of_files_are_shown(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(torch_zip({"lr": 0.5}))
    assert "lr = 0.5" in inspected(tmp_path / "x.pt")
