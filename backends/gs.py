"""gs:// : Google Cloud Storage with its application default credentials."""

from __future__ import annotations

from typing import Any

from unickpt.storage import schemes


def spec(url: str) -> dict[str, Any]:
    bucket, path = schemes.bucket_and_path(url)
    return {"driver": "gcs", "bucket": bucket, "path": path}


# How often requests are tried. As for S3: about one minute instead of 15.
_RETRIES = {"max_retries": 9, "initial_delay": "500ms", "max_delay": "16s"}
# TensorStore has 32.
_SMALL = {"gcs_request_concurrency": {"limit": 128}}
SCHEME = schemes.Scheme("gs", spec, {"gcs_request_retries": _RETRIES}, small_objects=_SMALL)
