"""Every readable format passes one suite; a tiny one proves that nothing else knows formats."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import foreign, npy_folder

import unickpt
from unickpt.format import reader_registry
from unickpt.format.files import Files
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite, nested


class CoreSuite(ReaderSuite):
    """For formats that the core reads without plug-ins."""

    @pytest.mark.plugins
    def test_load_together(self, path: Path) -> None:
        super().test_load_together(path)


class TestOcdbt(CoreSuite):
    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        options = unickpt.SaveOptions(chunk_bytes=1 << 10, fsync=False)
        unickpt.save(path, nested({**arrays, **values}), options=options)

    def damage(self, path: Path, name: str) -> None:
        for file in sorted(path.glob("processes/*/00000/d/*")):
            data = bytearray(file.read_bytes())
            at = data.find(unickpt.open(path)[name][...][:1].tobytes()[:64])
            if at >= 0:
                data[at] ^= 1
                file.write_bytes(data)
                return
        raise AssertionError("the array's bytes are in no file")


class TestNpyFolder(CoreSuite):
    has_digests = False

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        npy_folder.write(path, arrays, values)

    def damage(self, path: Path, name: str) -> None:
        (path / "0.npy").write_bytes((path / "0.npy").read_bytes()[:200])

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        format = npy_folder.NpyFolder()
        reader_registry.register(format)
        try:
            yield
        finally:
            reader_registry.unregister(format)


def test_an_array_of_another_format_has_no_tensorstore(tmp_path: Path) -> None:
    npy_folder.write(tmp_path / "c", {"w": np.ones(3)}, {})
    reader = npy_folder.NpyFolder().open(Files(resolve(tmp_path / "c")), {})
    assert reader is not None
    stored = unickpt.Checkpoint(reader)["w"]
    assert stored.url == ""
    with pytest.raises(unickpt.errors.UnsupportedFormat, match="npy folder"):
        stored.tensorstore()


def test_a_format_that_is_not_registered_is_not_found(tmp_path: Path) -> None:
    npy_folder.write(tmp_path / "c", {}, {"step": 1})  # an array alone is a format as well
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open(tmp_path / "c")


def test_hints_reach_the_format_that_takes_them_and_others_are_refused(tmp_path: Path) -> None:
    npy_folder.write(tmp_path / "c", {"w": np.arange(3)}, {})
    unickpt.save(tmp_path / "own", {"w": np.arange(3)})
    with foreign.registered(npy_folder.NpyFolder()):
        checkpoint = unickpt.open(tmp_path / "c", hints={"known": 1})
        assert unickpt.load(checkpoint)["w"].tolist() == [0, 1, 2]
        assert unickpt.diff(checkpoint, tmp_path / "own").same
        assert unickpt.verify(pickle.loads(pickle.dumps(checkpoint))).ok
        with pytest.raises(
            unickpt.errors.HintError, match=r"takes the hints known; leave out 'other'"
        ):
            unickpt.open(tmp_path / "c", hints={"other": 1})
        with pytest.raises(unickpt.errors.HintError, match=r"'knwon' \(did you mean 'known'\?\)"):
            unickpt.open(tmp_path / "c", hints={"knwon": 1})
    with pytest.raises(unickpt.errors.HintError, match="takes no hints"):
        unickpt.open(tmp_path / "own", hints={"known": 1})
