"""gs:// : Google Cloud Storage with its application default credentials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.storage import schemes


def spec(url: str) -> dict[str, Any]:
    bucket, path = schemes.bucket_and_path(url)
    return {"driver": "gcs", "bucket": bucket, "path": path}


def context() -> Mapping[str, Any]:
    """How often requests are tried. As for S3: about one minute instead of 15."""
    retries = {"max_retries": 9, "initial_delay": "500ms", "max_delay": "16s"}
    return {"gcs_request_retries": retries}


schemes.register(schemes.Scheme("gs", spec, context))
