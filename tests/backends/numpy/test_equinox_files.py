"""Arrays one after the other, as Equinox writes them: leaves with numbers, bit for bit."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import foreign, s3_server

import unickpt
from unickpt import CheckpointCorrupt
from unickpt.backends._files.tree_tables import table_of_tree
from unickpt.backends.numpy import equinox
from unickpt.errors import UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing import readers
from unickpt.testing.readers import ReaderSuite, nested


def npy(*arrays: Any) -> bytes:
    out = io.BytesIO()
    for array in arrays:
        np.save(out, array)
    return out.getvalue()


class TestSuite(ReaderSuite):
    has_digests = False
    values: Mapping[str, Any] = {}

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        path.write_bytes(b"{}\n" + npy(*arrays.values()))

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        def table(files: Any, leaves: Any, *args: Any) -> Any:
            """The suite's names, which a file has not."""
            names = list(readers.arrays()) if len(leaves) > 1 else ["x"]
            return table_of_tree(files, nested(dict(zip(names, leaves, strict=True))), *args)

        with super().registered(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(equinox, "table_of_tree", table)
            yield

    def test_damage_is_an_error_that_names_the_array(self, path: Path) -> None:
        """By its number, as all heads are read at the beginning."""
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(CheckpointCorrupt, match=r"c ends at byte 2000, within its leaf 0"):
            unickpt.open(path)


LEAVES = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(5).astype(ml_dtypes.bfloat16),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(3, dtype=">i4"),
    np.zeros((0, 3), np.int64),
    np.array(2.5),
    np.array(True),
    np.array([1 + 2j], np.complex64),
]


def check(found: unickpt.Checkpoint) -> None:
    assert list(found) == [str(n) for n in range(len(LEAVES))]
    for name, leaf in zip(found, LEAVES, strict=True):
        native = np.ascontiguousarray(leaf.astype(leaf.dtype.newbyteorder("=")))
        assert (found[name].shape, found[name].dtype) == (leaf.shape, native.dtype)
        assert np.asarray(found[name][...]).tobytes() == native.tobytes()


@pytest.mark.parametrize("line", [b"", b'{"size": 3, "x": NaN}\n'])
@pytest.mark.parametrize("name", ["mlp.eqx", "mlp", "two.npy"])
def test_leaves_are_a_list(name: str, line: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(line + npy(*LEAVES))
    found = unickpt.open(tmp_path / name)
    assert found.reader.format == "equinox"
    check(found)
    assert found.metadata == ({"hyperparameters": {"size": 3, "x": "NaN"}} if line else {})
    loaded = unickpt.load(tmp_path / name)
    assert isinstance(loaded, list)
    unickpt.convert(tmp_path / name, tmp_path / "ours")
    check(unickpt.open(tmp_path / "ours"))


def test_a_folder_with_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "mlp.eqx").write_bytes(npy(*LEAVES))
    check(unickpt.open(tmp_path))


def test_a_single_array_is_a_leaf_only_in_a_file_of_equinox(tmp_path: Path) -> None:
    for name, format in (("x.eqx", "equinox"), ("x.npy", "npy")):
        (tmp_path / name).write_bytes(npy(LEAVES[0]))
        assert unickpt.open(tmp_path / name).reader.format == format


@pytest.mark.integration
def test_what_equinox_writes(tmp_path: Path) -> None:
    eqx, jax = pytest.importorskip("equinox"), pytest.importorskip("jax")
    model = [
        eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0)),
        {"step": 3, "lr": 0.5, "on": True, "half": jax.numpy.arange(5, dtype=jax.numpy.bfloat16)},
    ]
    with (tmp_path / "m.eqx").open("wb") as file:
        file.write((json.dumps({"width": 4}) + "\n").encode())
        eqx.tree_serialise_leaves(file, model)
    found = unickpt.open(tmp_path / "m.eqx")
    leaves = [leaf for leaf in jax.tree.leaves(model) if eqx.is_array_like(leaf)]
    assert len(found) == len(leaves) == 8
    for stored, leaf in zip(found, leaves, strict=True):
        array = np.asarray(leaf)
        assert found[stored].shape == array.shape
        assert np.asarray(found[stored][...]).astype(array.dtype).tobytes() == array.tobytes()
    assert found.metadata == {"hyperparameters": {"width": 4}}


def test_arrays_are_not_read_before_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.eqx").write_bytes(npy(*(np.full(300_000, n, np.float32) for n in range(5))))
    reads = foreign.count_reads(monkeypatch)
    found = unickpt.open(tmp_path / "x.eqx")
    assert sum(count for _, count in reads) < 500_000  # of 6 MB
    assert found["3"][5:7].tolist() == [3, 3]


def test_all_of_it_from_s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "equinox-files")
    store = resolve("s3://equinox-files/a").store(paths.context())
    store.write("x.eqx", b"{}\n" + npy(*LEAVES)).result()
    check(unickpt.open("s3://equinox-files/a/x.eqx"))


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"", b'{"size": 3}\n'])
def test_every_end_of_a_file_is_damage_or_fewer_leaves(line: bytes, tmp_path: Path) -> None:
    """A file does not tell how many leaves it has."""
    data = line + npy(*LEAVES)
    for end in range(len(line) + 16, len(data), 37):
        (tmp_path / "x.eqx").write_bytes(data[:end])
        whole = [n for n in range(1, 9) if data[:end] == line + npy(*LEAVES[:n])]
        if whole:
            assert len(unickpt.open(tmp_path / "x.eqx")) == whole[0]
            continue
        with pytest.raises((CheckpointCorrupt, UnsupportedFormat), match=r"x\.eqx"):
            unickpt.open(tmp_path / "x.eqx")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no JSON\n" + npy(LEAVES[0]), "neither with an array of NumPy nor with a line of JSON"),
        (b"[" * 100_000 + b"\n", "neither with an array"),
        (b"{}", "ends at byte 2"),
        (npy(LEAVES[0]).replace(b"(2, 3)", b"(2,-3)"), "leaf 0 at byte 0: its header is damaged"),
        (npy(LEAVES[0]).replace(b"(2, 3)", b"(9, 9)"), "within its leaf 0"),
    ],
    ids=range(5),
)
def test_damage_names_the_file_and_the_leaf(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.eqx").write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=rf"x\.eqx.*{message}"):
        unickpt.open(tmp_path / "x.eqx")


@pytest.mark.parametrize("leaf", [np.array([None], object), np.zeros(2, "V1")], ids=["O", "V1"])
def test_leaves_without_a_dtype_are_named(leaf: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "x.eqx").write_bytes(npy(LEAVES[0], leaf))
    with pytest.raises(UnsupportedFormat, match=r"x\.eqx: leaf 1 at byte 152 has the dtype"):
        unickpt.open(tmp_path / "x.eqx")
