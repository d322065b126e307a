"""gs:// : Google Cloud Storage with its application default credentials."""

from __future__ import annotations

from typing import Any

from unickpt.backends.s3 import bucket_and_path


def spec(url: str) -> dict[str, Any]:
    bucket, path = bucket_and_path(url)
    return {"driver": "gcs", "bucket": bucket, "path": path}
