"""Tests that hold for every readable format, which a test class inherits."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound, LoadMismatch, Rules
from unickpt.format import file_ranges
from unickpt.format.reader_protocol import Request
from unickpt.testing.thread_groups import Threads
from unickpt.trees.tree import put
from unickpt.types import Box

ROWS, COLUMNS = 11, 70


def arrays() -> dict[str, np.ndarray]:
    """Arrays of pairwise distinct, uneven extents, and one element, and none."""
    rng = np.random.default_rng(7)
    return {
        "layers/0/w": rng.random((ROWS, COLUMNS), np.float32),
        "layers/1/w": rng.integers(-90, 90, (13, 7, 5), np.int64),
        "scale": np.array(2.5, np.float64),
        "none": np.empty((0, 3), np.float32),
        "flags": rng.random(301) < 0.5,
    }


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dicts that names with slashes stand for."""
    root: dict[str, Any] = {}
    for name, value in flat.items():
        put(root, name.split("/"), value)
    return root


def at(tree: Any, name: str) -> Any:
    """The leaf of nested dicts that a name with slashes stands for; keys may be integers."""
    for key in name.split("/"):
        tree = tree[key if key in tree else int(key)]
    return tree


def same(loaded: Any, expected: np.ndarray) -> bool:
    loaded = np.asarray(loaded)
    return bool(loaded.dtype == expected.dtype and loaded.tobytes() == expected.tobytes())


class FormatCase:
    """A format under test: how a checkpoint of it is written and damaged, and facts about it."""

    values: Mapping[str, Any] = {"step": 7, "name": "run"}
    """The plain values that the format can hold; empty if none."""
    has_digests = True
    """Whether the format stores digests of chunks, as `Reader.digests_of` returns them."""
    has_checksums = False
    """Whether the format stores checksums of another kind, of all its arrays."""

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        """Writes a checkpoint of this format."""
        raise NotImplementedError

    def damage(self, path: Path, name: str) -> None:
        """Damages the data of an array, so that it cannot be read; the other arrays stay."""
        raise NotImplementedError

    def name(self, name: str) -> str:
        """Our name of an array or a value of this suite; `{l}` in it stands for a number."""
        return name

    def shown(self) -> Mapping[str, np.ndarray]:
        """The arrays of `arrays()` that we show, without further names of the same."""
        return {self.name(name): array for name, array in arrays().items()}

    def shown_values(self) -> Mapping[str, Any]:
        """The plain values of `values` that we show."""
        return {self.name(name): value for name, value in self.values.items()}

    @property
    def w(self) -> str:
        """Our name of the first matrix."""
        return self.name("layers/0/w")

    def tree(self, name: str, leaf: Any) -> Any:
        """A tree that has one leaf, by our name of `name`."""
        return nested({self.name(name): leaf})

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """A context in which the format is registered, and files are read in chunks of a KiB.

        A format that is not built in is registered here, and unregistered after.
        """
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_ranges, "CHUNK_BYTES", 1 << 10)
            yield

    @pytest.fixture
    def path(self, tmp_path: Path) -> Iterator[Path]:
        self.write(tmp_path / "c", arrays(), self.values)
        with self.registered():
            yield tmp_path / "c"


class OpeningSuite(FormatCase):
    """Tests of an opened checkpoint."""

    def test_names_shapes_dtypes_and_values(self, path: Path) -> None:
        opened = unickpt.open(path)
        assert {name: (opened[name].shape, opened[name].dtype) for name in opened.index.arrays} == {
            name: (array.shape, array.dtype) for name, array in self.shown().items()
        }
        assert dict(opened.values) == dict(self.shown_values())
        assert opened.nbytes == sum(array.nbytes for array in self.shown().values())

    def test_slices_and_boxes(self, path: Path) -> None:
        opened = unickpt.open(path)
        for name, array in self.shown().items():
            assert same(opened[name][...], array)
        view = opened[self.w]
        assert same(view[3:9, 64:], arrays()["layers/0/w"][3:9, 64:])
        assert same(view.read(Box((1, 2), (10, 69))), arrays()["layers/0/w"][1:10, 2:69])

    def test_nothing_there(self, path: Path) -> None:
        with pytest.raises(CheckpointNotFound):
            unickpt.open(path.parent / "other")


class LoadingSuite(FormatCase):
    """Tests of loading: into trees, onto meshes, through rules."""

    def test_load_as_stored(self, path: Path) -> None:
        tree = unickpt.load(path)
        assert same(at(tree, self.w), arrays()["layers/0/w"])
        assert {n: at(tree, self.name(n)) for n in self.values} == dict(self.values)

    def test_load_into_memory_of_any_strides(self, path: Path) -> None:
        expected = arrays()["layers/0/w"]
        every = {
            "in order": np.empty_like(expected),
            "columns": np.empty((COLUMNS, ROWS), np.float32).T,
            "every second": np.empty((ROWS, 2 * COLUMNS), np.float32)[:, ::2],
        }
        for like in every.values():
            loaded = unickpt.load(path, self.tree("layers/0/w", like), strict=False)
            assert at(loaded, self.w) is like
            assert same(like, expected)

    @pytest.mark.parametrize("spec", [("x", "y"), ("y", None), (None, ("x", "y"))])
    def test_load_onto_a_jax_mesh(self, path: Path, spec: tuple[Any, ...]) -> None:
        jax = pytest.importorskip("jax")
        if len(jax.devices()) < 8:
            pytest.skip("XLA_FLAGS=--xla_force_host_platform_device_count=8 gives as many devices")
        mesh = jax.make_mesh((2, 4), ("x", "y"), devices=jax.devices()[:8])
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        padded = {"x": np.arange(24 * 16, dtype=np.float32).reshape(24, 16)}
        self.write(path.parent / "even", padded, {})
        leaf = jax.ShapeDtypeStruct((24, 16), np.float32, sharding=sharding)
        loaded = unickpt.load(path.parent / "even", self.tree("x", leaf), strict=False)
        array = at(loaded, self.name("x"))
        assert array.sharding == sharding
        assert same(array, padded["x"])

    def test_load_into_torch_tensors(self, path: Path) -> None:
        torch = pytest.importorskip("torch")
        like = self.tree("layers/1/w", torch.zeros((13, 7, 5), dtype=torch.int64))
        tensor = at(unickpt.load(path, like, strict=False), self.name("layers/1/w"))
        assert same(tensor.numpy(), arrays()["layers/1/w"])

    def test_load_through_rules(self, path: Path) -> None:
        other, every = self.name("layers/1/w"), self.name("layers/{l}/w")
        rules = Rules.parse(f"{every} [i o] <-> h.{{l}} [o i]\n{other} <-> drop")
        like = {"h.0": np.empty((COLUMNS, ROWS), np.float32)}
        loaded = unickpt.load(path, like, rules=rules, strict=False)
        assert same(loaded["h.0"], np.ascontiguousarray(arrays()["layers/0/w"].T))

    def test_load_with_a_cast(self, path: Path) -> None:
        like = self.tree("layers/0/w", np.empty((ROWS, COLUMNS), np.float64))
        with pytest.raises(LoadMismatch, match="float32"):
            unickpt.load(path, like, strict=False)
        loaded = unickpt.load(path, like, strict=False, cast=True)
        assert same(at(loaded, self.w), arrays()["layers/0/w"].astype(np.float64))

    def test_load_together(self, path: Path) -> None:
        expected = arrays()["layers/0/w"]

        def part(index: int, options: Any) -> Any:
            box = Box((index * 5, 0), (5 + index * 6, COLUMNS))
            fragment = np.zeros(box.shape, np.float32)
            like = unickpt.types.LocalFragments(expected.shape, [(box, fragment)])
            tree = self.tree("layers/0/w", like)
            loaded = unickpt.load(path, tree, strict=False, options=options)
            return at(loaded, self.w).fragments

        every = Threads(2).run(part)
        for outcome in every:
            if isinstance(outcome, Exception):
                raise outcome
            ((box, array),) = outcome
            assert same(array, expected[box.slices])

    def test_a_part_is_read_without_the_rest(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = unickpt.open(path)
        read, boxes = opened.reader.read, list[Box]()

        def counted(requests: Sequence[Request]) -> Sequence[int]:
            boxes.extend(r.box or r.part.chunk_box(r.number) for r in requests)
            return read(requests)

        monkeypatch.setattr(opened.reader, "read", counted)
        assert opened[self.w][0, 0] == arrays()["layers/0/w"][0, 0]
        entry = opened.index.arrays[self.w]
        (box,) = boxes
        assert (
            box.size == 1 if opened.reader.reads_boxes(entry) else box.size < math.prod(entry.shape)
        )

    def test_what_differs_is_told(self, path: Path) -> None:
        like = self.tree("layers/0/w", np.empty((ROWS, 3), np.float32))
        with pytest.raises(LoadMismatch, match=re.escape(self.w)):
            unickpt.load(path, like, strict=False)


class ToolSuite(FormatCase):
    """Tests of the tools, and of damage."""

    def test_convert_and_diff(self, path: Path, tmp_path: Path) -> None:
        unickpt.convert(path, tmp_path / "own")
        assert unickpt.verify(tmp_path / "own").ok
        array = unickpt.open(tmp_path / "own")[self.name("layers/1/w")]
        assert same(array[...], arrays()["layers/1/w"])
        assert not unickpt.diff(path, tmp_path / "own").differences

    def test_verify(self, path: Path) -> None:
        report = unickpt.verify(path)
        assert report.ok
        assert (report.unverified == "") is (self.has_digests or self.has_checksums)
        assert report.bytes == sum(array.nbytes for array in self.shown().values())

    def test_a_changed_byte_is_noticed_where_there_are_checksums(
        self, path: Path, tmp_path: Path
    ) -> None:
        change = arrays()["layers/1/w"].tobytes()[-80:]
        for file in (file for file in path.rglob("*") if file.is_file()):
            file.write_bytes(file.read_bytes().replace(change, b"~" + change[1:]))
        if not self.has_checksums:
            return
        name = re.escape(self.name("layers/1/w"))
        report = unickpt.verify(path)
        assert any(re.search(f"{name}.*does not match its checksum", str(d)) for d in report.damage)
        with pytest.raises(CheckpointCorrupt, match=f"{name}.*does not match its checksum"):
            unickpt.load(path)
        with pytest.raises(CheckpointCorrupt, match=f"{name}.*does not match its checksum"):
            unickpt.convert(path, tmp_path / "own")
        assert not (tmp_path / "own" / "manifest.ocdbt").exists()
        with pytest.raises(CheckpointCorrupt, match=f"{name}.*does not match its checksum"):
            unickpt.convert(path, tmp_path / "x.pt", to="torch")
        assert not (tmp_path / "x.pt").exists()
        unickpt.load(path, options=unickpt.LoadOptions(verify=False))

    def test_inspect(self, path: Path) -> None:
        pytest.importorskip("typer")
        from typer.testing import CliRunner

        from unickpt.cli.app import app

        for arguments in ([], ["--all"], [self.w], ["--json"]):
            result = CliRunner().invoke(app, ["inspect", str(path), *arguments])
            assert result.exit_code == 0, result.output
            assert f"{ROWS}" in result.output

    def test_damage_is_an_error_that_names_the_array(self, path: Path) -> None:
        self.damage(path, self.w)
        with pytest.raises(CheckpointCorrupt, match=re.escape(self.w)):
            unickpt.open(path)[self.w][...]
        with pytest.raises(CheckpointCorrupt, match=re.escape(self.w)):
            unickpt.load(path)
        report = unickpt.verify(path)
        assert not report.ok
        assert self.w in str(report.damage[0])


class ReaderSuite(OpeningSuite, LoadingSuite, ToolSuite):
    """Tests of one format: a class that derives from this one in a test module inherits them.

    The derived class defines the members of `FormatCase`: how a checkpoint of its format is written
    and damaged (`write`, `damage`); and, if they differ from the defaults, the names of its arrays
    (`name`), the values that it can hold (`values`), and how it is registered during a test
    (`registered`).

    Example:
        >>> import numpy as np
        >>> from unickpt.testing import ReaderSuite
        >>> class TestNumpyFiles(ReaderSuite):
        ...     values = {}
        ...     has_digests = False
        ...     def write(self, path, arrays, values):
        ...         np.savez(path, **arrays)
        ...         path.with_suffix(".npz").rename(path)
        ...     def damage(self, path, name):
        ...         path.write_bytes(path.read_bytes()[:-1000])
    """
