"""Models on `keras.distribution`s of eight devices of JAX, for keras_cases.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np

import unickpt
from support.keras_cases import Losses, bits, callback_of, fit, make, stopped
from unickpt.integrations import keras as ours


def distributions() -> dict[str, Any]:
    from keras import distribution as d

    devices = d.list_devices()
    grid = d.DeviceMesh((2, 4), ("batch", "model"), devices)
    layouts = d.LayoutMap(grid)
    layouts[".*dense/kernel"] = (None, "model")
    layouts[".*dense/bias"] = ("model",)
    other = d.LayoutMap(d.DeviceMesh((4, 2), ("batch", "model"), devices))
    other[".*dense/kernel"] = ("model", None)
    return {
        "none": None,
        "data": d.DataParallel(devices=devices),
        "model": d.ModelParallel(layout_map=layouts, batch_dim_name="batch"),
        "other": d.ModelParallel(layout_map=other, batch_dim_name="batch"),
    }


@contextmanager
def distributed(one: Any) -> Iterator[None]:
    keras.distribution.set_distribution(one)
    try:
        yield
    finally:
        keras.distribution.set_distribution(None)


def moves_between_distributions(folder: Path) -> None:
    written = {}
    for name, one in distributions().items():
        with distributed(one):
            model = make()
            fit(model)
            ours.save(folder / name, model)
            written[name] = bits(model)
            if name == "model":
                kernel = model.get_layer("dense").kernel.value
                assert len({str(s.index) for s in kernel.addressable_shards}) == 4
                stored = unickpt.open(folder / name)["model/model/dense/kernel"]
                assert stored.layout is not None
    for one in distributions().values():
        with distributed(one):
            for source, wanted in written.items():
                model = make(1)
                fit(model)
                before = [v.value.sharding for v in model.variables]
                ours.load(folder / source, model)
                assert bits(model) == wanted
                assert [v.value.sharding for v in model.variables] == before
            fit(model)  # it is jitted for these shardings


def resumes_on_another_distribution(folder: Path) -> None:
    names = distributions()
    with distributed(names["model"]):
        stopped(make(), callback_of(folder / "d", 3), 1, 5, epochs=3)
    whole, reference = make(), Losses()
    fit(whole, reference, epochs=3)
    for name in ("model", "other", "data"):
        with distributed(names[name]):
            model, losses = make(1), Losses()
            copied = folder / f"d_{name}"
            unickpt.copy(folder / "d" / "step_15", copied / "step_15")
            fit(model, ours.UnickptCheckpoint(copied, save_freq=3, resume=True), losses, epochs=3)
            seen = [losses.seen[n] for n in range(16, 31)]
            np.testing.assert_allclose(seen, [reference.seen[n] for n in range(16, 31)], rtol=0.02)


CASES: list[Callable[[Path], None]] = [
    moves_between_distributions,
    resumes_on_another_distribution,
]
