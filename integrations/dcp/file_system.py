"""`FileSystemWriter` and `FileSystemReader` with torch's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unickpt import SaveOptions
from unickpt.extend import PathLike
from unickpt.integrations.dcp.storage import StorageReader, StorageWriter


class FileSystemWriter(StorageWriter):
    """A `StorageWriter` with the arguments of `torch.distributed.checkpoint.FileSystemWriter`.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs).
        single_file_per_rank, thread_count, per_thread_copy_ahead, cache_staged_state_dict: of no
            effect: each rank writes a few files, with as many threads as pay.
        sync_files: whether files are flushed, as `SaveOptions.fsync`.
        overwrite: whether to replace a checkpoint at `path`.
        _extensions: None.
        serialization_format: torch's own; the checkpoint is one of unickpt.
        options: see `unickpt.SaveOptions`, whose `fsync` counts instead of `sync_files`.

    Raises:
        ValueError: an argument cannot be honoured; names it.

    Example:
        >>> import torch, unickpt.integrations.dcp as dcp
        >>> writer = dcp.FileSystemWriter("memory://dcp/files", thread_count=4)
        >>> _ = dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    """

    def __init__(
        self,
        path: PathLike | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        *,
        options: SaveOptions | None = None,
    ) -> None:
        if _extensions:
            raise ValueError(
                "_extensions= is not supported: say SaveOptions(compression=), which every reader "
                "of the checkpoint knows"
            )
        if getattr(serialization_format, "value", "torch_save") != "torch_save":
            raise ValueError(
                f"serialization_format={serialization_format} is not supported: save, and write "
                "such files with `unickpt export --to safetensors` or `--to hf`"
            )
        chosen = SaveOptions(fsync=sync_files) if options is None else options
        super().__init__(path, options=chosen, overwrite=overwrite)


class FileSystemReader(StorageReader):
    """A `StorageReader` with the arguments of `torch.distributed.checkpoint.FileSystemReader`.

    Arguments:
        path: a path or URL of a checkpoint that `unickpt.open` can open.
        _extension_registry: of no effect: torch's files with extensions are refused when read.
    """

    def __init__(self, path: PathLike, _extension_registry: Any = None) -> None:
        super().__init__(path)
