"""NaN and infinity are counted in each array, and the first step that has any is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app
from unickpt.errors import CheckpointReplaced
from unickpt.plugins.nonfinite import counting as nonfinite

FLOATS = [
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e5m2),
]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_are_counted(dtype: Any, tmp_path: Path) -> None:
    array = np.ones((5, 4), dtype)
    array[1, 2], array[3, 0], array[4, 3] = np.nan, np.inf, -np.inf
    unickpt.save(tmp_path / "c", {"w": array, "ok": np.ones(3, dtype), "n": np.arange(3)})
    report = unickpt.find_nonfinite(tmp_path / "c")
    assert report.arrays == (("w", 1, 2, 20, (1, 2)),)
    assert (report.ok, report.checked) == (False, 2)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz])
def test_dtypes_without_infinity_have_nan(dtype: Any, tmp_path: Path) -> None:
    array = np.ones(6, dtype)
    array[4] = np.nan
    unickpt.save(tmp_path / "c", {"w": array})
    assert unickpt.find_nonfinite(tmp_path / "c").arrays == (("w", 1, 0, 6, (4,)),)


def test_chunks_are_read_once_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.ones((64, 32), np.float32)
    array[40, 7] = np.nan
    options = unickpt.SaveOptions(chunk_shape=(16, 32))
    unickpt.save(tmp_path / "c", {"w": array, "v": array[:8], "empty": array[:0]}, options=options)
    monkeypatch.setattr(nonfinite, "_BATCH_BYTES", 2048)
    read: list[tuple[str, str]] = []
    original = nonfinite.read_boxes

    def counting(view: Any, batch: Any, *rest: Any) -> Any:
        assert sum(box.size for _, box in batch) * 4 <= 2048
        read.extend((entry.name, str(box)) for entry, box in batch)
        return original(view, batch, *rest)

    monkeypatch.setattr(nonfinite, "read_boxes", counting)
    found = unickpt.find_nonfinite(tmp_path / "c")
    assert found.arrays == (("w", 1, 0, 2048, (40, 7)),)
    assert len(read) == len(set(read)) == 5


def test_damage_is_an_error(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"w": np.zeros(4096, np.float32)})
    data = max(tmp_path.rglob("d/*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes().replace(b"\0" * 64, b"\1" * 64, 1))
    with pytest.raises(unickpt.CheckpointCorrupt):
        unickpt.find_nonfinite(tmp_path / "c")


def run_of(root: Path) -> None:
    for step in (2, 10, 30):
        w = np.ones(3, np.float32)
        w[0] = np.nan if step >= 10 else 1
        unickpt.save(root / f"step_{step}", {"w": w, "step": step})


def test_the_first_step_with_any_is_found(tmp_path: Path) -> None:
    run_of(tmp_path)
    report = unickpt.find_nonfinite(tmp_path)
    assert report.url.rstrip("/").endswith("step_10")
    assert (report.checkpoints, report.arrays[0].name) == (2, "w")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.find_nonfinite(tmp_path / "nothing")


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, words)])
    return done.exit_code, done.stdout


def test_commands_count(tmp_path: Path) -> None:
    run_of(tmp_path)
    code, out = run("verify", "--nonfinite", tmp_path)
    assert code == 1
    assert "not finite: 1 of 1 array of floats" in out
    assert "step_10" in out
    code, out = run("verify", "--nonfinite", tmp_path / "step_2")
    assert (code, "no NaN or infinity in 1 array" in out) == (0, True)
    code, out = run("inspect", "--nonfinite", tmp_path / "step_30")
    assert (code, "[0]" in out) == (0, True)
    code, out = run("inspect", "--nonfinite", tmp_path / "step_30", "--json")
    (array,) = json.loads(out)["arrays"]
    assert array == {"name": "w", "nan": 1, "infinite": 0, "elements": 3, "first": [0]}
    assert run("inspect", "--nonfinite", tmp_path / "step_30", "w")[0] == 2


@pytest.mark.parametrize("opened", [True, False])
def test_only_a_path_is_counted_again_when_it_was_replaced(
    opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open checkpoint stays replaced: to read it again and again would only take long."""
    unickpt.save(tmp_path / "c", {"w": np.ones(3)})
    reads = 0

    def replaced(*_: Any, **__: Any) -> Any:
        nonlocal reads
        reads += 1
        raise CheckpointReplaced("another save replaced it")

    monkeypatch.setattr(nonfinite, "_report", replaced)
    with pytest.raises(CheckpointReplaced):
        unickpt.find_nonfinite(unickpt.open(tmp_path / "c") if opened else tmp_path / "c")
    assert (reads == 1) is opened
