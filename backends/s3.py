"""s3:// : S3-compatible storage; endpoint, region, credentials from the AWS variables and files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import xxhash

from unickpt.errors import InvalidPath
from unickpt.storage import schemes
from unickpt.storage.locations import Location

_ATTEMPTS = 10
_METADATA = "http://169.254.169.254"
_METADATA_TIMEOUT_S = 1.0
# Settings of a profile that TensorStore can get keys with.
_KEY_SETTINGS = ("aws_access_key_id", "role_arn", "credential_process")
_SSO_SETTINGS = ("sso_session", "sso_start_url")
_DIGEST_MASK = (1 << 24) - 1  # fits into nanoseconds below a second


def spec(url: str) -> dict[str, Any]:
    bucket, path = schemes.bucket_and_path(url)
    out: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    profile = Profile.chosen()
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or profile.settings.get("endpoint_url")
    )
    if region:
        out["aws_region"] = region
    if endpoint:
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidPath(
                f"{url!r}: the endpoint {endpoint!r} (AWS_ENDPOINT_URL) must begin with http:// or "
                "https://"
            )
        # With a custom endpoint TensorStore does not look up the region of the bucket.
        region = region or profile.settings.get("region") or "us-east-1"
        out |= {"endpoint": endpoint.rstrip("/"), "aws_region": region}
    return out


def resources() -> dict[str, Any]:
    """The credentials and retries of a new context, so that each save and load has current ones."""
    source = CredentialSource.current()
    return {"aws_credentials": source.spec, "s3_request_retries": retries(source.digest)}


def retries(digest: int = 0) -> dict[str, Any]:
    """How often a request is tried: `AWS_MAX_ATTEMPTS` times; by default for about a minute.

    TensorStore's own default tries for a quarter of an hour before it reports a dead endpoint.

    Arguments:
        digest: of the credentials. TensorStore reads keys once for all stores whose settings are
            equal, as long as one of them is open. So these nanoseconds differ with the keys.
    """
    text = os.environ.get("AWS_MAX_ATTEMPTS", "")
    attempts = int(text) if text.isdecimal() and int(text) > 0 else _ATTEMPTS
    delay = f"16.{digest:09d}s"
    return {"max_retries": attempts - 1, "initial_delay": "500ms", "max_delay": delay}


@dataclass(frozen=True)
class Profile:
    """A profile of the AWS tools' files.

    Arguments:
        name: of the profile.
        is_named: whether `AWS_PROFILE` names it.
        files: the paths of the credentials file and of the config file.
        settings: of both files, by name; empty if neither has the profile.
    """

    name: str
    is_named: bool
    files: tuple[str, str]
    settings: Mapping[str, str]

    @classmethod
    def chosen(cls) -> Profile:
        """The profile that `AWS_PROFILE` names, else "default"."""
        env = os.environ
        named = env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE")
        files = tuple(
            os.path.expanduser(env.get(variable) or path)
            for variable, path in (
                ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
                ("AWS_CONFIG_FILE", "~/.aws/config"),
            )
        )
        name = named or "default"
        settings = _settings(name, *((file, _version(file)) for file in files))
        return cls(name, named is not None, (files[0], files[1]), settings)

    @property
    def source(self) -> CredentialSource:
        """Its keys, as TensorStore reads them."""
        credentials, config = self.files
        spec = {
            "type": "profile",
            "profile": self.name,
            "credentials_file": credentials,
            "config_file": config,
        }
        text = f"the profile {self.name!r} of {credentials} and {config}"
        if not self.settings:
            text += ", which have no such profile: change AWS_PROFILE"
        elif not self.has_keys:
            text += (
                ", which has no keys. For a profile of SSO, pass them on: "
                f'eval "$(aws configure export-credentials --profile {self.name} --format env)"'
            )
        return CredentialSource(spec, text, *map(_version, self.files))

    @property
    def has_keys(self) -> bool:
        """Whether TensorStore finds keys by it."""
        return any(name in self.settings for name in _KEY_SETTINGS)


@cache
def _settings(profile: str, *files: tuple[str, object]) -> Mapping[str, str]:
    """The settings of a profile; the files' versions end the life of cached results."""
    import configparser  # only for S3

    settings: dict[str, str] = {}
    for path, _ in reversed(files):  # the credentials file overrides the config file
        parser = configparser.RawConfigParser(strict=False, default_section="")
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError):
            continue  # TensorStore reports files that it cannot read
        for section in (f"profile {profile}", profile):
            if parser.has_section(section):
                settings |= parser.items(section)
    return settings


def _version(path: str) -> tuple[int, int, int] | None:
    """A value that changes when a file does; None if it cannot be read."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


class CredentialSource:
    """Where the credentials of requests come from.

    Arguments:
        spec: TensorStore's `aws_credentials`.
        text: for messages; never has a secret.
        state: a value that changes with the keys. TensorStore itself renews keys that expire, such
            as those of roles.
    """

    def __init__(self, spec: Mapping[str, str], text: str, *state: object) -> None:
        self.spec, self.text = spec, text
        self.digest = xxhash.xxh32_intdigest(repr(state).encode()) & _DIGEST_MASK

    @classmethod
    def current(cls) -> CredentialSource:
        """The first source that has credentials, in the order of the AWS tools.

        The search of TensorStore's own "default" source writes lines to stderr for every source
        without credentials, and sends unsigned requests if there are none.
        """
        env, profile = os.environ, Profile.chosen()
        keys = [env.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")]
        if all(keys):
            text = f"the key {keys[0]} of AWS_ACCESS_KEY_ID"
            return cls({"type": "environment"}, text, *keys, env.get("AWS_SESSION_TOKEN"))
        if "web_identity_token_file" in profile.settings:
            return cls(
                {"type": "default", "profile": profile.name},
                f"the web identity of the profile {profile.name!r}",
            )
        is_missing = profile.is_named and not profile.settings
        # The keys of some come from a sign-in with a browser, which TensorStore cannot do.
        needs_sso = any(name in profile.settings for name in _SSO_SETTINGS)
        if is_missing or profile.has_keys or needs_sso:
            return profile.source
        if env.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
            return cls(
                {"type": "default", "profile": profile.name},
                f"the web identity of {env['AWS_WEB_IDENTITY_TOKEN_FILE']} "
                "(AWS_WEB_IDENTITY_TOKEN_FILE) for the role in AWS_ROLE_ARN, with AWS_REGION",
            )
        if any(env.get(f"AWS_CONTAINER_CREDENTIALS_{kind}_URI") for kind in ("RELATIVE", "FULL")):
            return cls({"type": "ecs"}, "the role of this container")
        return cls._of_machine(profile)

    @classmethod
    def _of_machine(cls, profile: Profile) -> CredentialSource:
        service = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _METADATA
        is_disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
        if not is_disabled and _has_role(service):
            return cls({"type": "imds"}, "the role of this machine")
        return cls(
            {"type": "anonymous"},
            "no credentials: neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor the profile "
            f"{profile.name!r} of {' or '.join(profile.files)}, nor a role of this machine has "
            "any. Set the variables, or run: aws configure",
        )


def credentials() -> str:
    """For messages: which credentials requests have."""
    return f"s3:// uses {CredentialSource.current().text}"


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


class S3Location(Location):
    """A folder in a bucket. TensorStore writes each object with one PUT, never in parts."""

    most_object_bytes = 5 << 30


# TensorStore has 32. S3 allows 5,500 a second below a prefix; at 30 ms each, 128 are 4,300.
_SMALL = {"s3_request_concurrency": {"limit": 128}}
SCHEME = schemes.Scheme("s3", spec, resources, S3Location, credentials, small_objects=_SMALL)
