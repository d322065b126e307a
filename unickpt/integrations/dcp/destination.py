"""Where a save goes: in a local folder it may replace a checkpoint that torch has written."""

from __future__ import annotations

from collections.abc import Sequence

from unickpt.integrations.destination import Destination
from unickpt.storage import paths


def destination(path: paths.PathLike, *, overwrite: bool) -> Destination:
    """The destination at a path. Raises InvalidPath, StorageError."""
    return Destination.of(path, _torchs if overwrite else lambda names: ())


def _torchs(names: Sequence[str]) -> Sequence[str]:
    """What of a folder is a checkpoint of torch's."""
    data = [name for name in names if name.endswith(".distcp")]
    return [".metadata", *data] if data else []
