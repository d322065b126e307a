"""Folders for checkpoints: on disks with and without hard links, in memory, in object storage."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import s3_server


def refuse(*_: Any, **__: Any) -> None:
    """In place of `os.link`, on a file system that has no hard links."""
    raise PermissionError(1, "no links here")


@contextmanager
def run_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder that does not exist, of the kind that the fixture's parameter says: "memory", "s3",
    "no links", or any other word for a local disk."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "memory":
            yield f"memory://{secrets.token_hex(6)}/run"
        elif request.param == "s3":
            endpoint, bucket = request.getfixturevalue("moto"), f"runs-{secrets.token_hex(4)}"
            s3_server.use(endpoint, patch)
            s3_server.make_bucket(endpoint, bucket)
            yield f"s3://{bucket}/run"
        else:
            if request.param == "no links":
                patch.setattr(os, "link", refuse)
            yield str(tmp_path / "run")
