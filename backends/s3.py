"""s3:// : S3-compatible storage; endpoint, region, credentials from the AWS variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unickpt.errors import InvalidPath
from unickpt.storage import schemes

_ATTEMPTS = 10
_CREDENTIALS = "aws_credentials#"
# Sources of credentials, as resources of a context; a spec names one of them.
_SOURCES: Mapping[str, Any] = {
    _CREDENTIALS + kind: {"type": kind}
    for kind in ("environment", "default", "ecs", "imds", "anonymous")
}
_METADATA = "http://169.254.169.254"
_METADATA_TIMEOUT_S = 1.0


def spec(url: str) -> dict[str, Any]:
    bucket, path = schemes.bucket_and_path(url)
    out: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if region:
        out["aws_region"] = region
    if endpoint:
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidPath(
                f"{url!r}: the endpoint {endpoint!r} (AWS_ENDPOINT_URL) must begin with http:// or "
                "https://"
            )
        # With a custom endpoint TensorStore does not look up the region.
        out |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    return out | {"aws_credentials": _CREDENTIALS + _source(), "s3_request_retries": retries()}


def _source() -> str:
    """The source of the credentials, searched in the order of the AWS SDK.

    The SDK's own search writes lines to stderr for every source without credentials, for each
    context. So the SDK only searches if this function cannot decide.
    """
    env = os.environ
    if env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"):
        return "environment"
    home = Path.home() / ".aws"
    files = [
        env.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials",
        env.get("AWS_CONFIG_FILE") or home / "config",
    ]
    if any(map(os.path.exists, files)) or env.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return "default"
    if env.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") or env.get(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI"
    ):
        return "ecs"
    if env.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return "anonymous"
    service = env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _METADATA
    return "imds" if _has_role(service) else "anonymous"


@cache
def _has_role(service: str) -> bool:
    """Whether this is an EC2 machine with a role; checked once per process."""
    import http.client  # slow to import, and rarely needed

    parts = urlsplit(service)
    metadata = http.client.HTTPConnection(parts.netloc, timeout=_METADATA_TIMEOUT_S)
    try:
        seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        metadata.request("PUT", "/latest/api/token", headers=seconds)
        token = metadata.getresponse().read().decode()
        headers = {"X-aws-ec2-metadata-token": token}
        metadata.request("GET", "/latest/meta-data/iam/security-credentials/", headers=headers)
        answer = metadata.getresponse()
        return answer.status == http.HTTPStatus.OK and bool(answer.read().strip())
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        metadata.close()


def retries() -> dict[str, Any]:
    """How often a request is tried: `AWS_MAX_ATTEMPTS` times; by default for about a minute.

    TensorStore's own default tries for a quarter of an hour before it reports a dead endpoint.
    """
    text = os.environ.get("AWS_MAX_ATTEMPTS", "")
    attempts = int(text) if text.isdecimal() and int(text) > 0 else _ATTEMPTS
    return {"max_retries": attempts - 1, "initial_delay": "500ms", "max_delay": "16s"}


schemes.register(schemes.Scheme("s3", spec, _SOURCES))
