"""OCDBT, TensorStore's B-tree database: the container in which all backends keep checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorstore as ts

MANIFEST = "manifest.ocdbt"
# Without a cache of its own, every chunk that is read would read the B-tree's nodes anew.
NODE_CACHE = "cache_pool#nodes"
NODE_CACHE_BYTES = 64 << 20


def spec(
    base: Mapping[str, Any],
    *,
    manifest: Mapping[str, Any] | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """The database in the folder that the key-value store `base` names.

    Data files are large, so that a save writes few of them; measured beside smaller ones.

    Arguments:
        base: the folder.
        manifest: the key-value store that holds the manifest, where that is not the folder.
        data: where below the folder new data goes, ending with `/`; `d/` where not given.
    """
    out = {
        "driver": "ocdbt",
        "base": dict(base),
        "target_data_file_size": 256 << 20,
        "cache_pool": NODE_CACHE,
    }
    if manifest is not None:
        out["manifest"] = dict(manifest)
    if data is not None:
        kinds = ("value_data", "btree_node_data", "version_tree_node_data")
        out |= {f"{kind}_prefix": data for kind in kinds}
    return out


def count_keys(base: ts.KvStore, context: ts.Context) -> int:
    """Number of keys of the database whose manifest lies in `base`, as that manifest tells.

    Raises:
        ValueError: there is no such manifest, or it cannot be read.
    """
    versions = ts.ocdbt.dump(base, context=context).result()["versions"]
    return int(versions[-1]["root"]["statistics"]["num_keys"]) if versions else 0
