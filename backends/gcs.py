"""gs:// : Google Cloud Storage with its application default credentials."""

from __future__ import annotations

from typing import Any

from unickpt.backends.s3 import bucket_and_path


def spec(url: str) -> dict[str, Any]:
    bucket, path = bucket_and_path(url)
    return {"driver": "gcs", "bucket": bucket, "path": path}


def retries() -> dict[str, Any]:
    """As for S3: about one minute instead of 15."""
    return {"max_retries": 9, "initial_delay": "500ms", "max_delay": "16s"}
