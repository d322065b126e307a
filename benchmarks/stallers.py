"""The contenders of `stall.py`: how each library saves in the background."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import contenders
import numpy as np
from contenders import Contender

DCP, COPYTO, COPY = "dcp", "numpy copyto", "torch copy_"


class Staller(Contender):
    """What may stop a program: a save in the background, one at a time."""

    copies: ClassVar[bool] = True
    """Whether the whole state is copied until it may change."""
    note: ClassVar[str] = ""

    def save(self, path: Path, state: Any, durable: bool) -> None:
        self.begin(path, state)
        self.wait_committed()

    @abstractmethod
    def begin(self, path: Path, state: Any) -> None:
        """The call that is timed."""

    def wait_staged(self) -> None:
        """Waits until the state may change; by default, it may when the call returns."""

    @abstractmethod
    def wait_committed(self) -> None:
        """Waits for the end of the save, if there is one."""

    def close(self) -> None:
        """Ends what is under way."""
        with suppress(Exception):
            self.wait_committed()


class Unickpt(Staller):
    """unickpt.save_async, with a budget that holds two states."""

    staging: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.pending: Any = None

    def begin(self, path: Path, state: Any) -> None:
        import unickpt

        options = save_options(sum(leaf.nbytes for leaf in state.values()), self.staging)
        self.pending = unickpt.save_async(path, state, options=options)

    def wait_staged(self) -> None:
        self.pending.wait_staged()

    def wait_committed(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()


def save_options(nbytes: int, staging: str) -> Any:
    """unickpt's options: two states fit, so that nothing waits for memory."""
    import unickpt

    # A quarter, at most 1 GiB, is not for copies.
    return unickpt.SaveOptions(staging=staging, budget_bytes=3 * nbytes + (64 << 20))


def save_lazily(path: Path, state: Mapping[str, Any], nbytes: int) -> Any:
    """Saves tensors of which all are copied in the background, as of an optimizer that waits."""
    from unickpt.saving import saver
    from unickpt.saving.background import SaveRequest

    owners: set[Hashable] = {tensor.untyped_storage()._cdata for tensor in state.values()}
    options = save_options(nbytes, "lazy")
    return saver.begin(SaveRequest(path, state, options, owners=owners))


class UnickptTorchCopy(Unickpt, contenders.UnickptTorch):
    name = "unickpt torch copy"
    staging = "copy"
    note = "fsyncs files and directories"


class UnickptTorchLazy(Unickpt, contenders.UnickptTorch):
    name = "unickpt torch lazy"
    staging = "lazy"
    note = "fsyncs files and directories; as if an optimizer owned all tensors"

    def begin(self, path: Path, state: Any) -> None:
        self.pending = save_lazily(path, state, sum(leaf.nbytes for leaf in state.values()))


class UnickptTorchDevice(Unickpt, contenders.UnickptTorch):
    name = "unickpt torch device"
    staging = "device"
    note = "fsyncs files and directories; a clone on the accelerator, if there is one"


class UnickptJaxReference(Unickpt, contenders.UnickptJax):
    name = "unickpt jax reference"
    staging = "auto"
    copies = False
    note = 'fsyncs files and directories; staging="auto", by reference on the CPU'


class UnickptJaxCopy(Unickpt, contenders.UnickptJax):
    name = "unickpt jax copy"
    staging = "copy"
    note = "fsyncs files and directories"


class UnickptJaxDevice(Unickpt, contenders.UnickptJax):
    name = "unickpt jax device"
    staging = "device"
    note = "fsyncs files and directories; a clone on the accelerator, if there is one"


class DcpAsync(Staller, contenders.Dcp):
    """dcp.async_save as it comes: each save allocates its copy, and writes with one thread."""

    name = DCP
    note = "fsyncs files, no directories; as it comes"
    staging: ClassVar[bool | None] = None
    """Whether a stager that is kept copies in the background; None: no stager is kept."""

    def __init__(self) -> None:
        super().__init__()
        import torch
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager: Any = None
        if self.staging is not None:
            # Without an accelerator there is no pinned memory, and no copy that does not block.
            cuda = torch.cuda.is_available()
            self.stager = DefaultStager(StagingOptions(cuda, False, self.staging, cuda))
        self.staged: Future[None] | None = None
        self.committed: Future[Any] | None = None

    def begin(self, path: Path, state: Any) -> None:
        response = self.dcp.async_save(
            state, storage_writer=self._writer(path, durable=True), async_stager=self.stager
        )
        self.staged = getattr(response, "staging_completion", None)
        self.committed = getattr(response, "upload_completion", response)

    def wait_staged(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def wait_committed(self) -> None:
        if self.committed is not None:
            self.committed.result()
            self.committed = None

    def close(self) -> None:
        super().close()
        if self.stager is not None:
            self.stager.close()


class DcpKeptStaging(DcpAsync):
    """DCP at its best: memory is used again (page-locked for CUDA), two threads write."""

    name = "dcp kept staging"
    note = "fsyncs files, no directories; DefaultStager kept, 2 writing threads"
    threads = 2
    staging = False


class DcpAsyncStaging(DcpAsync):
    """The same, copied in the background."""

    name = "dcp async staging"
    note = "fsyncs files, no directories; DefaultStager kept, asynchronous, 2 writing threads"
    threads = 2
    staging = True


class TorchSaved(Staller, contenders.TorchSave):
    """torch.save, which blocks until all is written."""

    name = "torch.save"
    copies = False
    note = "fsyncs the file and its directories; nothing is asynchronous"

    def begin(self, path: Path, state: Any) -> None:
        contenders.TorchSave.save(self, path, state, durable=True)

    def wait_committed(self) -> None:
        pass


class TorchCheckpointing(Staller, contenders.Torch):
    """Meta's CheckpointManager: copies to shared memory, from which another process writes."""

    name = "torch_checkpointing"
    note = "never fsyncs; without direct I/O, which not every disk takes"

    def __init__(self) -> None:
        super().__init__()
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager.Config(storage_config=storage).build()
        self.committed: Any = None

    def begin(self, path: Path, state: Any) -> None:
        self.committed = self.manager.save(str(path), state)

    def wait_staged(self) -> None:
        with self.manager.lock():  # as its pages say, for the update
            pass

    def wait_committed(self) -> None:
        if self.committed is not None:
            self.committed.result()
            self.committed = None

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        return dict(self.manager.load(path, into=target))

    def close(self) -> None:
        super().close()
        self.manager.close()


class OrbaxAsync(Staller, contenders.Orbax):
    """Orbax's StandardCheckpointer, which is asynchronous."""

    name = "orbax"
    copies = False  # on the CPU
    note = (
        "TensorStore fsyncs data files and directories, nobody Orbax's own files and the rename; "
        "by reference on the CPU"
    )

    def begin(self, path: Path, state: Any) -> None:
        self.checkpointer.save(path, state)

    def wait_committed(self) -> None:
        self.checkpointer.wait_until_finished()

    def close(self) -> None:
        super().close()
        self.checkpointer.close()


class Memcpy(Staller):
    """A copy into memory touched before: what staging is held against."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        return self.kept

    def wait_committed(self) -> None:
        pass


class NumpyCopyto(Memcpy):
    name = COPYTO
    note = "one thread"

    def begin(self, path: Path, state: Any) -> None:
        for name, array in state.items():
            np.copyto(self.kept.setdefault(name, np.empty_like(array)), array)


class TorchCopy(Memcpy, contenders.Torch):
    name = COPY
    note = "torch's own number of threads"

    def begin(self, path: Path, state: Any) -> None:
        for name, tensor in state.items():
            if name not in self.kept:
                self.kept[name] = self.torch.empty_like(tensor)
            self.kept[name].copy_(tensor)


STALLERS: Mapping[str, type[Staller]] = {
    kind.name: kind
    for kind in (
        UnickptTorchCopy,
        UnickptTorchLazy,
        UnickptTorchDevice,
        DcpAsync,
        DcpKeptStaging,
        DcpAsyncStaging,
        TorchSaved,
        TorchCheckpointing,
        UnickptJaxReference,
        UnickptJaxCopy,
        UnickptJaxDevice,
        OrbaxAsync,
        NumpyCopyto,
        TorchCopy,
    )
}
