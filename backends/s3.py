"""s3:// : S3 and what speaks its protocol; endpoint, region, credentials by the AWS variables."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

from unickpt.errors import InvalidPath

_ATTEMPTS = 10


def spec(url: str) -> dict[str, Any]:
    bucket, path = bucket_and_path(url)
    out: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if region:
        out["aws_region"] = region
    if endpoint:
        # With an endpoint of its own TensorStore does not look the region up.
        out |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    return out


def bucket_and_path(url: str) -> tuple[str, str]:
    """Splits `scheme://bucket/path`; the path ends with a slash, or is empty."""
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/")
    if not parts.netloc:
        raise InvalidPath(f"{url!r}: give a bucket and a path, as in {parts.scheme}://bucket/run/1")
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise InvalidPath(f"{url!r}: the path holds an empty name, '.' or '..'")
    return parts.netloc, path and path + "/"


def retries() -> dict[str, Any]:
    """How often a request is tried: `AWS_MAX_ATTEMPTS` times; by default for about a minute.

    TensorStore's own default tries for a quarter of an hour before it reports a dead endpoint.
    """
    text = os.environ.get("AWS_MAX_ATTEMPTS", "")
    attempts = int(text) if text.isdecimal() and int(text) > 0 else _ATTEMPTS
    return {"max_retries": attempts - 1, "initial_delay": "500ms", "max_delay": "16s"}
