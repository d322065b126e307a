"""zarr-python opens compressed arrays by their metadata, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import unickpt
from unickpt import SaveOptions

zarr = pytest.importorskip("zarr")


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((600, 701)) * np.exp(rng.normal(-4, 0.5, (600, 1)))
    return {
        "w32": weights.astype(np.float32),
        "w16": weights.astype(np.float16),
        "w64": weights.astype(np.float32).astype(np.float64),
        "tokens": rng.zipf(1.3, 70_000) % 50_257,
        "mask": rng.random((300, 999)) < 0.1,
        "complex": np.zeros((99, 100), np.complex128) + 2j,
        "noise": rng.integers(0, 256, 300_001, np.uint8),
        "brain": weights.astype(ml_dtypes.bfloat16),
    }


@pytest.mark.plugins
@pytest.mark.parametrize("chunk_bytes", [70_000, 8 << 20])
def test_it_reads_what_was_written(chunk_bytes: int, tmp_path: Path) -> None:
    options = SaveOptions(compression="auto", chunk_bytes=chunk_bytes, fsync=False)
    unickpt.save(tmp_path / "c", tree(), options=options)
    store = ts.KvStore.open(f"file://{tmp_path / 'c'}/|ocdbt:").result()
    for key in store.list().result():
        file = tmp_path / "zarr" / key.decode()
        file.parent.mkdir(parents=True, exist_ok=True)
        data = store.read(key).result().value
        if key.startswith(b"brain/") and key.endswith(b"zarr.json"):
            data = data.replace(b"bfloat16", b"uint16")  # which zarr-python does not know
        file.write_bytes(data)
    group = zarr.open_group(tmp_path / "zarr", mode="r")
    for name, array in tree().items():
        found = group[name]
        assert found[:].tobytes() == array.tobytes(), name
        blosc = [codec for codec in found.metadata.codecs if "Blosc" in type(codec).__name__]
        assert len(blosc) == (name != "noise"), name
    assert np.array_equal(group["w32"][17:300, 5:9], tree()["w32"][17:300, 5:9])
