"""Where a save goes: in a local folder it may replace a checkpoint that torch has written."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from unickpt.storage import paths
from unickpt.storage.locations import Location
from unickpt.storage.paths import LocalLocation

_TORCHS_METADATA, _TORCHS_DATA = ".metadata", ".distcp"


class _TorchsFolder(LocalLocation):
    """A folder with a checkpoint of torch, which a save may replace as it may replace our own."""

    def foreign_files(self) -> list[str]:
        return [name for name in super().foreign_files() if not name.endswith(_TORCHS_DATA)]


@dataclass(frozen=True)
class DcpDestination:
    """Where to save, and which files of torch's own checkpoint there are replaced."""

    location: Location
    torchs: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: paths.PathLike, *, overwrite: bool) -> DcpDestination:
        """The destination at a path. Raises InvalidPath, StorageError."""
        found = paths.resolve(path)
        if not overwrite or not isinstance(found, LocalLocation):
            return cls(found)
        names = found.files(paths.context())
        data = [name for name in names if name.endswith(_TORCHS_DATA)]
        if not data:
            return cls(found)
        return cls(_TorchsFolder(found.url, found.spec), (_TORCHS_METADATA, *data))

    def committed(self) -> None:
        """Removes what the save has replaced; called after the commit, on any rank. Until then
        torch's checkpoint stays as it is, and from then on ours is what readers find."""
        for name in self.torchs:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(str(self.location), name))
