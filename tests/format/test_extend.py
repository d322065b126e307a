"""unickpt.extend: formats and storages of others, as somebody would write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import npy_folder

import unickpt
from unickpt import extend


@pytest.fixture
def format() -> Iterator[None]:
    found = npy_folder.NpyFolder()
    extend.register_format(found)
    extend.register_writer("npy-folder", npy_folder.NpyWriter)
    yield
    extend.unregister_writer("npy-folder")
    extend.unregister_format(found)


@pytest.mark.plugins
@pytest.mark.usefixtures("format")
def test_a_checkpoint_goes_into_a_format_of_others_and_back(tmp_path: Path) -> None:
    state = {"w": np.arange(1000.0).reshape(40, 25), "step": 3}
    unickpt.save(tmp_path / "c", state)
    unickpt.convert(tmp_path / "c", tmp_path / "npy", to="npy-folder")
    assert unickpt.open(tmp_path / "npy").reader.format == npy_folder.NpyReader.format
    found = unickpt.load(tmp_path / "npy")
    assert found["step"] == 3
    assert found["w"].tobytes() == state["w"].tobytes()
    assert unickpt.verify(tmp_path / "npy").ok


@pytest.mark.plugins
@pytest.mark.usefixtures("format")
def test_a_name_is_given_once() -> None:
    for name in ("npy-folder", "hf"):
        with pytest.raises(ValueError, match=f"'{name}' already"):
            extend.register_writer(name, npy_folder.NpyWriter)


def test_what_is_no_format_any_more_is_unknown(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"w": np.ones(3)})
    with pytest.raises(ValueError, match="'npy-folder'; there are"):
        unickpt.convert(tmp_path / "c", tmp_path / "npy", to="npy-folder")


def test_every_name_is_there() -> None:
    assert all(hasattr(extend, name) for name in extend.__all__)
    assert sorted(extend.__all__) == extend.__all__
