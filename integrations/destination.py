"""Where a save goes: in a local folder it may replace a checkpoint that the trainer wrote."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import unickpt
from unickpt import SaveOptions
from unickpt.extend import (
    LocalLocation,
    Location,
    PathLike,
    SaveCallbacks,
    SaveRequest,
    resolve_path,
    save_in_background,
    storage_context,
)
from unickpt.types import PendingSave, SaveReport


@dataclass(frozen=True)
class _ReplacedFolder(LocalLocation):
    """A folder with a checkpoint of a trainer, which a save may replace as it may replace our own.

    Arguments:
        theirs: names in it that are the trainer's, or may be.
    """

    theirs: frozenset[str] = frozenset()

    def foreign_files(self) -> list[str]:
        return [name for name in super().foreign_files() if name not in self.theirs]


TORCH_METADATA = ".metadata"


def torch_files(names: Sequence[str]) -> Sequence[str]:
    """The files of a folder that form a checkpoint of torch's DCP, which Megatron also writes."""
    data = [name for name in names if name.endswith(".distcp")]
    return [TORCH_METADATA, *data] if data else []


@dataclass(frozen=True)
class Destination:
    """Where to save, and which files of a trainer's own checkpoint are replaced there.

    Arguments:
        location: the folder.
        theirs: names of files and folders in it.
    """

    location: Location
    theirs: tuple[str, ...] = ()

    @classmethod
    def at_path(
        cls,
        path: PathLike,
        theirs_of: Callable[[Sequence[str]], Sequence[str]],
        keep_names: Sequence[str] = (),
    ) -> Destination:
        """The destination at a path.

        Arguments:
            path: a local path or a URL.
            theirs_of: says which names of those in a folder are a checkpoint of the trainer's; none
                if there is no such checkpoint. They are removed in this order.
            keep_names: names of the trainer's own files in the folder; they stay.

        Raises:
            InvalidPath, StorageError: as `unickpt.save`.
        """
        location = resolve_path(path)
        if not isinstance(location, LocalLocation):
            return cls(location)
        context = storage_context()
        theirs = tuple(theirs_of([*location.files(context), *location.folders(context)]))
        if not theirs and not keep_names:
            return cls(location)
        return cls(
            _ReplacedFolder(location.url, location.spec, frozenset((*theirs, *keep_names))), theirs
        )

    def save(
        self,
        tree: Any,
        *,
        overwrite: bool = True,
        metadata: Mapping[str, Any] | None = None,
        options: SaveOptions | None = None,
    ) -> SaveReport:
        """As `unickpt.save`; then removes the replaced files."""
        report = unickpt.save(
            self.location, tree, overwrite=overwrite, metadata=metadata, options=options
        )
        self.committed()
        return report

    def save_async(
        self,
        tree: Any,
        *,
        overwrite: bool = True,
        metadata: Mapping[str, Any] | None = None,
        options: SaveOptions | None = None,
    ) -> PendingSave:
        """As `unickpt.save_async`; removes the replaced files after the commit."""
        request = SaveRequest(
            *(self.location, tree, SaveOptions.or_default(options), overwrite, lambda: metadata),
            callbacks=SaveCallbacks(committed=self.committed),
        )
        return save_in_background(request)

    def committed(self) -> None:
        """Removes the files that the save replaced; called after the commit, on any rank. Until
        then the trainer's checkpoint stays unchanged; from then on readers find ours."""
        for name in self.theirs:
            path = os.path.join(str(self.location), name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
                continue
            with suppress(FileNotFoundError):
                os.unlink(path)
