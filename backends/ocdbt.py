"""OCDBT, TensorStore's B-tree database: the container in which all backends keep checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MANIFEST = "manifest.ocdbt"


def spec(base: Mapping[str, Any]) -> dict[str, Any]:
    """The database in the folder that the key-value store `base` names.

    Data files are large, so that a save writes few of them; measured beside smaller ones.
    """
    return {"driver": "ocdbt", "base": dict(base), "target_data_file_size": 256 << 20}
