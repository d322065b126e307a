"""S3 servers on this machine, for tests."""

from __future__ import annotations

from urllib.request import Request, urlopen

import pytest


def make_bucket(endpoint: str, name: str) -> None:
    urlopen(Request(f"{endpoint}/{name}", method="PUT"), timeout=60).close()


def use(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    """Has TensorStore talk to this server."""
    patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    patch.setenv("AWS_ENDPOINT_URL", endpoint)
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_MAX_ATTEMPTS", "2")
