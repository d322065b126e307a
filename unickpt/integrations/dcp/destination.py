"""Where a save goes: in a local folder it may replace a checkpoint that torch has written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from unickpt.format.index import REPLACED
from unickpt.integrations.destination import Destination
from unickpt.storage import paths


def destination(path: paths.PathLike, *, overwrite: bool) -> Destination:
    """The destination at a path. Raises InvalidPath, StorageError."""
    return Destination.of(path, _torchs if overwrite else lambda names: ())


def replaced_metadata(to: Destination) -> dict[str, Any]:
    """What a checkpoint says of torch's checkpoint that it replaces, whose files are removed after
    the commit: a job that is killed in between leaves both, and readers know which one counts."""
    if _METADATA not in to.theirs:
        return {}
    content = Path(os.path.join(str(to.location), _METADATA)).read_bytes()
    return {REPLACED: {_METADATA: xxhash.xxh3_64_hexdigest(content)}}


_METADATA = ".metadata"


def _torchs(names: Sequence[str]) -> Sequence[str]:
    """What of a folder is a checkpoint of torch's."""
    data = [name for name in names if name.endswith(".distcp")]
    return [_METADATA, *data] if data else []
