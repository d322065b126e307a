"""Checkpoints that name what this program does not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tensorstore as ts

from support.forging import sealed
from unickpt.commit import version
from unickpt.format.index import INDEX_KEY
from unickpt.storage import paths
from unickpt.storage.database import Database
from unickpt.storage.ocdbt import MANIFEST


def with_feature(path: Path | str, feature: str = "telepathy", **members: Any) -> None:
    """Changes the index of a stored checkpoint as if a newer unickpt had written it.

    Arguments:
        path: of the checkpoint.
        feature: that it needs, besides others; empty for none.
        members: of the index that are replaced, such as `format`.
    """
    location, context = paths.resolve(path), paths.context()
    database = Database(location, context)
    body = json.loads(bytes(database.reader().read(INDEX_KEY) or b""))
    del body["xxh3"]
    body["features"] = sorted({*body["features"], feature} - {""})
    found = version.version_at(location)
    assert found is not None
    attempt = found.attempt or "0"
    draft, held = database.draft(version.copied_folder(attempt, found.digest[::-1]))
    transaction = ts.Transaction(atomic=True)
    root = draft.with_transaction(transaction)
    database.store().experimental_copy_range_to(root, ts.KvStore.KeyRange()).result()
    root.write(INDEX_KEY, sealed({**body, **members})).result()
    transaction.commit_async().result()
    manifest = held.read(MANIFEST).result().value
    location.store(context).write(MANIFEST, manifest).result()
