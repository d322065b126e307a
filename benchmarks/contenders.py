"""The contenders of the benchmarks: how each library saves and loads the same named arrays.

Every contender gets the same NumPy arrays and turns them, outside the timings, into what its
library works on. A durable save has fsynced every file it wrote and the directories that name them:
where a library leaves part of that out, the contender does the rest, inside the timing.
"""

from __future__ import annotations

import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xxhash

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
Shapes = Mapping[str, tuple[int, ...]]

DTYPE = np.dtype(np.float32)


class Contender(ABC):
    """One library, used in one way."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[bool] = True
    """Whether `load` fills memory that `target` allocated, or allocates its own."""
    verifies: ClassVar[bool] = False
    """Whether `load` checks content digests, unless told not to."""

    def prepare(self, arrays: Arrays) -> Any:
        """The library's own view (or copy) of `arrays`, to be saved."""
        return arrays

    def target(self, shapes: Shapes) -> Any:
        """What `load` fills: memory already touched, or only shapes."""
        return {name: np.full(shape, 0, DTYPE) for name, shape in shapes.items()}

    @abstractmethod
    def save(self, path: Path, state: Any, durable: bool) -> None:
        """Write `state`, as `prepare` gave it, at `path`, which does not exist."""

    @abstractmethod
    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        """Read everything below `path` into memory, into `target` where the library can."""


def fsync(*paths: Path) -> None:
    """Bring files, or the entries of directories, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Raw(Contender):
    """What the disk and the memory can do: two threads, a file each, pwritev and preadv.

    Nothing is recorded about the arrays; each thread takes half of them, back to back.
    Durable: fsync of both files by their threads, then of the directory and its parent.
    """

    name = "raw"

    def save(self, path: Path, state: Any, durable: bool) -> None:
        path.mkdir()

        def write(file: Path, arrays: list[Any]) -> None:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                self.write(descriptor, arrays)
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

        in_two_threads(write, path, state)
        if durable:
            fsync(path, path.parent)

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        def read(file: Path, arrays: list[Any]) -> None:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                self.read(descriptor, arrays, verify)
            finally:
                os.close(descriptor)

        in_two_threads(read, path, target)
        return target  # type: ignore[no-any-return]

    def write(self, descriptor: int, arrays: list[Any]) -> None:
        transfer(os.pwritev, descriptor, arrays)

    def read(self, descriptor: int, arrays: list[Any], verify: bool) -> None:
        transfer(os.preadv, descriptor, arrays)


class Pieces(Raw):
    """The limit for a library that hashes: as `Raw`, but piece by piece.

    A piece is hashed with xxh3 while it is in the processor's cache: before it is written, and
    after it was read.
    """

    name = "pieces"
    packages: ClassVar[tuple[str, ...]] = ("xxhash",)
    verifies: ClassVar[bool] = True
    nbytes = 512 << 10

    def write(self, descriptor: int, arrays: list[Any]) -> None:
        for piece, offset in self.pieces(arrays):
            xxhash.xxh3_64_intdigest(piece)
            if os.pwrite(descriptor, piece, offset) != len(piece):
                raise OSError(f"short transfer at offset {offset}")

    def read(self, descriptor: int, arrays: list[Any], verify: bool) -> None:
        for piece, offset in self.pieces(arrays):
            if os.preadv(descriptor, [piece], offset) != len(piece):
                raise OSError(f"short transfer at offset {offset}")
            if verify:
                xxhash.xxh3_64_intdigest(piece)

    def pieces(self, arrays: Iterable[Any]) -> Iterator[tuple[memoryview, int]]:
        """The pieces of arrays, and where they are in a file."""
        offset = 0
        for array in arrays:
            data = memoryview(array).cast("B")
            for first in range(0, len(data), self.nbytes):
                piece = data[first : first + self.nbytes]
                yield piece, offset
                offset += len(piece)


def in_two_threads(work: Callable[[Path, list[Any]], None], path: Path, arrays: Arrays) -> None:
    """Give each of two threads its file and half of the arrays."""
    values = list(arrays.values())
    halves = values[: len(values) // 2], values[len(values) // 2 :]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (path / "0", path / "1"), halves))


def transfer(call: Callable[[int, Any, int], int], descriptor: int, arrays: Iterable[Any]) -> None:
    """Apply pwritev or preadv to `arrays`, one after the other in the file."""
    offset = 0
    for batch in batches(arrays):
        size = sum(array.nbytes for array in batch)
        if call(descriptor, batch, offset) != size:
            raise OSError(f"short transfer at offset {offset}")
        offset += size


def batches(
    arrays: Iterable[Any], count: int = 1024, nbytes: int = 256 << 20
) -> Iterator[list[Any]]:
    """Cut `arrays` into lists that one call of pwritev or preadv takes."""
    batch: list[Any] = []
    size = 0
    for array in arrays:
        if batch and (len(batch) == count or size + array.nbytes > nbytes):
            yield batch
            batch, size = [], 0
        batch.append(array)
        size += array.nbytes
    yield batch


class Torch(Contender):
    """Shared by the contenders that work on torch tensors; CPU tensors are views of the arrays."""

    packages: ClassVar[tuple[str, ...]] = ("torch",)

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch

    def prepare(self, arrays: Arrays) -> Any:
        return {name: self.torch.from_numpy(array) for name, array in arrays.items()}

    def target(self, shapes: Shapes) -> Any:
        return self.prepare(super().target(shapes))


class TorchSave(Torch):
    """`torch.save` and `torch.load(mmap=False)`: one zip file, tensors allocated by the load.

    It never fsyncs. Durable: fsync of the file, the directory and its parent.
    """

    name = "torch.save"
    in_place = False

    def target(self, shapes: Shapes) -> Any:
        return None

    def save(self, path: Path, state: Any, durable: bool) -> None:
        path.mkdir()
        file = path / "state.pt"
        self.torch.save(state, file)
        if durable:
            fsync(file, path, path.parent)

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        return self.torch.load(path / "state.pt", mmap=False, weights_only=True)  # type: ignore[no-any-return]


class Safetensors(Torch):
    """`safetensors.torch`: `save_file`, and `load_file` copied into tensors that exist.

    On the CPU `load_file` only maps the file, so that nothing would be read without the copy.
    It never fsyncs. Durable: fsync of the file, the directory and its parent.
    """

    name = "safetensors"
    packages: ClassVar[tuple[str, ...]] = ("safetensors", "torch")

    def save(self, path: Path, state: Any, durable: bool) -> None:
        from safetensors.torch import save_file

        path.mkdir()
        file = path / "state.safetensors"
        save_file(state, file)
        if durable:
            fsync(file, path, path.parent)

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        from safetensors.torch import load_file

        loaded = load_file(path / "state.safetensors")
        for name, tensor in target.items():
            tensor.copy_(loaded[name])
        return target  # type: ignore[no-any-return]


class SafetensorsClone(Safetensors):
    """`safetensors.torch`: `load_file`, and a clone of each tensor, into memory of its own."""

    name = "safetensors clone"
    in_place = False

    def target(self, shapes: Shapes) -> Any:
        return None

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        from safetensors.torch import load_file

        loaded = load_file(path / "state.safetensors")
        return {name: tensor.clone() for name, tensor in loaded.items()}


class Dcp(Torch):
    """`torch.distributed.checkpoint` as it comes, loaded in place: one file, one thread.

    FileSystemWriter fsyncs the data files and the metadata unless `sync_files=False`, and no
    directory. Durable: with `sync_files=True`, then fsync of the directory and its parent.
    """

    name = "dcp"
    threads: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        import torch.distributed.checkpoint as dcp

        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        self.dcp: Any = dcp

    def _writer(self, path: Path, durable: bool) -> Any:
        return self.dcp.FileSystemWriter(path, thread_count=self.threads, sync_files=durable)

    def _reader(self, path: Path) -> Any:
        return self.dcp.FileSystemReader(path)

    def save(self, path: Path, state: Any, durable: bool) -> None:
        self.dcp.save(state, storage_writer=self._writer(path, durable), no_dist=True)
        if durable:
            fsync(path, path.parent)

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        self.dcp.load(target, storage_reader=self._reader(path), no_dist=True)
        return target  # type: ignore[no-any-return]


class DcpTwoThreads(Dcp):
    """DCP with two writing threads, a file each; faster with large arrays, slower with small."""

    name = "dcp 2 threads"
    threads = 2


class DcpSafetensors(Dcp):
    """DCP with its Hugging Face writer and reader: a safetensors file, made for interchange.

    One file: more than one needs a mapping by hand. The writer fsyncs it, and cannot be told not
    to, so the save that is not durable only leaves the directories out.
    """

    name = "dcp hf"
    packages: ClassVar[tuple[str, ...]] = ("torch", "safetensors")

    def _writer(self, path: Path, durable: bool) -> Any:
        return self.dcp.HuggingFaceStorageWriter(str(path))

    def _reader(self, path: Path) -> Any:
        return self.dcp.HuggingFaceStorageReader(str(path))


class Jax(Contender):
    """Shared by the contenders that work on JAX arrays, on the CPU; loads allocate the arrays."""

    packages: ClassVar[tuple[str, ...]] = ("jax",)
    in_place = False

    def __init__(self) -> None:
        import jax

        self.jax: Any = jax

    def prepare(self, arrays: Arrays) -> Any:
        state = {name: self.jax.numpy.array(array) for name, array in arrays.items()}
        return self.jax.block_until_ready(state)

    def target(self, shapes: Shapes) -> Any:
        sharding = self.jax.sharding.SingleDeviceSharding(self.jax.devices()[0])
        return {
            name: self.jax.ShapeDtypeStruct(shape, DTYPE, sharding=sharding)
            for name, shape in shapes.items()
        }


class Orbax(Jax):
    """Orbax as it comes: StandardCheckpointer (OCDBT, zarr, zstd), restored to JAX arrays.

    TensorStore fsyncs the data files and their directories, and neither Orbax's own JSON files nor
    the final rename. Durable: these are fsynced afterwards. Orbax has no switch for TensorStore's
    fsync, so for the save that is not durable its private context is changed, in its favour.
    """

    name = "orbax"
    packages: ClassVar[tuple[str, ...]] = ("orbax-checkpoint", "jax", "tensorstore")

    def __init__(self) -> None:
        super().__init__()
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        self.ocp: Any = ocp
        self.checkpointer = self._checkpointer()

    def _checkpointer(self) -> Any:
        return self.ocp.StandardCheckpointer()

    def _save(self, path: Path, state: Any) -> None:
        self.checkpointer.save(path, state)
        self.checkpointer.wait_until_finished()

    def _restore(self, path: Path, target: Any) -> Any:
        return self.checkpointer.restore(path, target)

    def save(self, path: Path, state: Any, durable: bool) -> None:
        from unittest import mock

        from orbax.checkpoint._src.serialization import tensorstore_utils

        context = {} if durable else {"file_io_sync": False}
        with mock.patch.dict(tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT, context):
            self._save(path, state)
        if durable:
            files = [p for p in path.rglob("*") if p.is_file() and not is_ocdbt(p)]
            fsync(*files, *{file.parent for file in files}, path, path.parent)

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        return self.jax.block_until_ready(self._restore(path, target))  # type: ignore[no-any-return]


def is_ocdbt(file: Path) -> bool:
    """Whether TensorStore wrote this file, in a checkpoint of Orbax."""
    return file.name == "manifest.ocdbt" or file.parent.name == "d"


class OrbaxUncompressed(Orbax):
    """Orbax with a handler that does not compress: faster where the disk is."""

    name = "orbax uncompressed"

    def _checkpointer(self) -> Any:
        handler = self.ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
        return self.ocp.AsyncCheckpointer(handler)

    def _save(self, path: Path, state: Any) -> None:
        self.checkpointer.save(path, args=self.ocp.args.PyTreeSave(state))
        self.checkpointer.wait_until_finished()

    def _restore(self, path: Path, target: Any) -> Any:
        restore_args = self.ocp.checkpoint_utils.construct_restore_args(target)
        args = self.ocp.args.PyTreeRestore(target, restore_args=restore_args)
        return self.checkpointer.restore(path, args=args)


def unickpt_save(path: Path, state: Any, durable: bool) -> None:
    """Save with unickpt, which fsyncs files and directories by default."""
    import unickpt

    unickpt.save(path, state, options=unickpt.SaveOptions(fsync=durable))


def unickpt_load(path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
    """Load with unickpt, which verifies digests by default."""
    import unickpt

    return unickpt.load(path, target, options=unickpt.LoadOptions(verify=verify))  # type: ignore[no-any-return]


class UnickptNumpy(Contender):
    """unickpt with NumPy arrays, loaded in place."""

    name = "unickpt numpy"
    packages: ClassVar[tuple[str, ...]] = ("unickpt", "tensorstore")
    verifies = True

    def __init__(self) -> None:
        import unickpt  # noqa: F401

    def save(self, path: Path, state: Any, durable: bool) -> None:
        unickpt_save(path, state, durable)

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        return unickpt_load(path, target, verify)


class UnickptTorch(Torch):
    """unickpt with torch tensors, loaded in place: beside DCP."""

    name = "unickpt torch"
    packages: ClassVar[tuple[str, ...]] = ("unickpt", "torch", "tensorstore")
    verifies = True

    def __init__(self) -> None:
        super().__init__()
        import unickpt  # noqa: F401

    def save(self, path: Path, state: Any, durable: bool) -> None:
        unickpt_save(path, state, durable)

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        return unickpt_load(path, target, verify)


class UnickptJax(Jax):
    """unickpt with JAX arrays, loaded into new ones: beside Orbax."""

    name = "unickpt jax"
    packages: ClassVar[tuple[str, ...]] = ("unickpt", "jax", "tensorstore")
    verifies = True

    def __init__(self) -> None:
        super().__init__()
        import unickpt  # noqa: F401

    def save(self, path: Path, state: Any, durable: bool) -> None:
        unickpt_save(path, state, durable)

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        return self.jax.block_until_ready(unickpt_load(path, target, verify))  # type: ignore[no-any-return]


CONTENDERS: Mapping[str, type[Contender]] = {
    kind.name: kind
    for kind in (
        Raw,
        Pieces,
        UnickptNumpy,
        UnickptTorch,
        UnickptJax,
        Dcp,
        DcpTwoThreads,
        DcpSafetensors,
        Orbax,
        OrbaxUncompressed,
        Safetensors,
        SafetensorsClone,
        TorchSave,
    )
}
