"""Requests to S3 are signed with the credentials that the AWS tools use."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support import s3_server
from support.s3_server import Request

import unickpt
from unickpt import StorageError
from unickpt.backends import s3
from unickpt.commit import lease
from unickpt.storage import paths

TREE = {"w": np.ones(3)}
PROFILE = "aws_access_key_id = {0}\naws_secret_access_key = secret-{0}\n"


@pytest.fixture
def home(moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder and an environment without credentials."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    s3_server.make_bucket(moto, "bucket")
    return tmp_path


def set_keys(patch: pytest.MonkeyPatch, name: str) -> None:
    patch.setenv("AWS_ACCESS_KEY_ID", name)
    patch.setenv("AWS_SECRET_ACCESS_KEY", f"secret-{name}")
    patch.setenv("AWS_SESSION_TOKEN", f"token-{name}")


def signers(act: Callable[[], object]) -> set[str]:
    """The ids of the keys that sign the requests of a call; empty for unsigned ones."""
    with s3_server.requests() as requests:
        act()
    return {request.signer for request in requests}


def save(path: str) -> None:
    unickpt.save(f"s3://bucket/{path}", TREE, overwrite=True)


def test_the_profile_of_the_credentials_file_signs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"[default]\n{PROFILE.format('KEY-default')}[team]\n{PROFILE.format('KEY-team')}"
    (home / ".aws/credentials").write_text(text)
    assert signers(lambda: save("profile")) == {"KEY-default"}
    assert signers(lambda: unickpt.load("s3://bucket/profile")) == {"KEY-default"}
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert signers(lambda: save("profile")) == {"KEY-team"}
    set_keys(monkeypatch, "KEY-env")
    assert signers(lambda: save("profile")) == {"KEY-env"}, "the variables come before the files"


def test_the_config_file_has_keys_region_and_endpoint(
    home: Path, moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    (home / "elsewhere").write_text(
        f"[default]\nregion = eu-west-1\n[profile team]\n{PROFILE.format('KEY-config')}"
        f"region = eu-west-3\nendpoint_url = {moto}\ns3 =\n  max_queue_size = 10\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", "~/elsewhere")
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert signers(lambda: save("config")) == {"KEY-config"}
    assert paths.resolve("s3://bucket/config").spec["aws_region"] == "eu-west-3"
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    assert paths.resolve("s3://bucket/config").spec["aws_region"] == "eu-west-2"


def test_a_program_that_a_profile_names_provides_keys(home: Path) -> None:
    keys = {"Version": 1, "AccessKeyId": "KEY-program", "SecretAccessKey": "s"}
    (home / "program").write_text(f"#!/bin/sh\necho '{json.dumps(keys)}'\n")
    (home / "program").chmod(0o755)
    (home / ".aws/config").write_text(f"[default]\ncredential_process = {home / 'program'}\n")
    assert signers(lambda: save("program")) == {"KEY-program"}


@contextmanager
def serving(answer: Callable[[str], bytes]) -> Iterator[str]:
    """A server on this machine; `answer` makes a response from the path of a request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = answer(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_role_of_a_container_signs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".aws/config").write_text("[default]\nregion = us-east-1\n")  # no keys
    keys = {"AccessKeyId": "KEY-container", "SecretAccessKey": "s", "Token": "t"}
    data = json.dumps({**keys, "Expiration": "2100-01-01T00:00:00Z"}).encode()
    with serving(lambda path: data) as address:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{address}/keys")
        assert signers(lambda: save("container")) == {"KEY-container"}


def test_other_sources_are_chosen_as_the_aws_tools_choose(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind() -> str:
        return s3.CredentialSource.current().spec["type"]

    assert kind() == "anonymous"
    monkeypatch.setattr(s3, "_has_role", lambda service: True)
    assert kind() == "anonymous", "AWS_EC2_METADATA_DISABLED"
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    assert kind() == "imds"
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/keys")
    assert kind() == "ecs"
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/token")
    assert kind() == "default"
    assert s3.CredentialSource.current().spec["profile"] == "default"
    role = "role_arn = arn:aws:iam::1:role/r\nsource_profile = base\n"
    (home / ".aws/config").write_text(f"[default]\n{role}")
    assert kind() == "profile"
    (home / ".aws/config").write_text("[default]\nrole_arn = r\nweb_identity_token_file = /t\n")
    assert kind() == "default"


# --- keys that change ---------------------------------------------------------------------------


def test_a_save_after_the_keys_were_renewed_signs_with_the_new_ones(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_keys(monkeypatch, "KEY-1")
    save("renewed")
    opened = unickpt.open("s3://bucket/renewed")
    with unickpt.Checkpointer("s3://bucket/renewed_run") as run:
        run.save(1, TREE, wait=True)
        run.wait()
        set_keys(monkeypatch, "KEY-2")
        assert signers(lambda: run.save(2, TREE, wait=True)) == {"KEY-2"}
        assert signers(lambda: save("renewed_beside")) == {"KEY-2"}
        assert signers(lambda: unickpt.load("s3://bucket/renewed")) == {"KEY-2"}
    assert opened["w"].shape == (3,)


def test_a_profile_that_was_written_again_signs_with_the_new_keys(home: Path) -> None:
    file = home / ".aws/credentials"
    file.write_text(f"[default]\n{PROFILE.format('KEY-old')}")
    with unickpt.Checkpointer("s3://bucket/rewritten") as run:
        run.save(1, TREE, wait=True)
        run.wait()
        file.write_text(f"[default]\n{PROFILE.format('KEY-newer')}")
        assert signers(lambda: run.save(2, TREE, wait=True)) == {"KEY-newer"}


def test_a_lease_is_renewed_with_the_new_keys(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_RENEW_S", 0.05)
    set_keys(monkeypatch, "KEY-1")
    with unickpt.Checkpointer("s3://bucket/leased") as run:
        run.save(1, TREE, wait=True)
        run.wait()
        set_keys(monkeypatch, "KEY-2")
        with s3_server.requests() as requests:
            deadline = time.monotonic() + 30
            while not any(is_renewal(request) for request in requests):
                assert time.monotonic() < deadline, requests
                time.sleep(0.02)


def is_renewal(request: Request) -> bool:
    is_lock = request.key.endswith("/.unickpt.lock")
    return is_lock and request.method == "PUT" and request.signer == "KEY-2"


# --- refused requests ---------------------------------------------------------------------------


def test_without_credentials_the_error_names_every_place_for_them(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_keys(monkeypatch, "KEY")
    save("unsigned")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for act in (lambda: save("unsigned"), lambda: unickpt.load("s3://bucket/unsigned")):
        with pytest.raises(StorageError) as caught:
            act()
        text = str(caught.value)
        assert "the server answered 403: check the credentials and their permissions" in text
        assert "s3:// uses no credentials: neither AWS_ACCESS_KEY_ID" in text
        assert f"profile 'default' of {home}/.aws/credentials or {home}/.aws/config" in text
        assert "aws configure" in text


@pytest.fixture
def checked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server checks signatures and permissions."""
    from moto import settings

    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)


def test_a_refused_request_names_its_key_and_no_secret(
    checked: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_keys(monkeypatch, "KEY-wrong")
    with pytest.raises(StorageError) as caught:
        save("refused")
    text = str(caught.value)
    assert "s3:// uses the key KEY-wrong of AWS_ACCESS_KEY_ID" in text
    assert "secret-KEY-wrong" not in text
    assert "token-KEY-wrong" not in text
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (home / ".aws/credentials").write_text(f"[default]\n{PROFILE.format('KEY-bad')}")
    with pytest.raises(StorageError, match=r"uses the profile 'default' of .*/\.aws/credentials"):
        save("refused")


def test_a_profile_without_keys_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(StorageError, match=r"profile 'missing' of .* have no such profile"):
        save("missing")
    (home / ".aws/config").write_text("[profile sso]\nsso_session = x\nsso_role_name = r\n")
    monkeypatch.setenv("AWS_PROFILE", "sso")
    with pytest.raises(StorageError, match=r"export-credentials --profile sso --format env"):
        save("sso")


# --- permissions --------------------------------------------------------------------------------


def become_user(moto: str, patch: pytest.MonkeyPatch, *denied: str) -> None:
    """Signs with the key of a new user, who may do all but some actions."""
    import boto3  # which moto needs, too

    keys = {"aws_access_key_id": "anyone", "aws_secret_access_key": "anything"}
    users = boto3.client("iam", endpoint_url=moto, region_name="us-east-1", **keys)
    name = f"user-{'-'.join(denied).replace(':', '-')}"
    users.create_user(UserName=name)
    allowed = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    refused = {"Effect": "Deny", "Action": list(denied), "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed, refused]})
    users.put_user_policy(UserName=name, PolicyName="policy", PolicyDocument=policy)
    key = users.create_access_key(UserName=name)["AccessKey"]
    patch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    patch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    patch.delenv("AWS_SESSION_TOKEN", raising=False)


def check_permissions(patch: pytest.MonkeyPatch) -> None:
    from moto import settings

    patch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)


def test_a_bucket_that_denies_lists_loads_checkpoints_and_refuses_saves(
    home: Path, moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_keys(monkeypatch, "KEY")
    save("listless")
    become_user(moto, monkeypatch, "s3:ListBucket")
    check_permissions(monkeypatch)
    assert unickpt.load("s3://bucket/listless")["w"].tolist() == [1, 1, 1]
    assert unickpt.verify("s3://bucket/listless").ok
    for act in (lambda: save("listless"), unickpt.Checkpointer("s3://bucket/run").steps):
        with pytest.raises(StorageError, match=r"403: check the credentials and their perm.* key "):
            act()


def test_a_bucket_that_denies_deletion_keeps_more_steps_and_says_so(
    home: Path, moto: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    become_user(moto, monkeypatch, "s3:DeleteObject")
    check_permissions(monkeypatch)
    with unickpt.Checkpointer("s3://bucket/undeleted", keep_last=1) as run:
        for step in range(3):
            run.save(step, TREE, wait=True)
        run.wait()
        assert run.steps() == [0, 1, 2]
        assert run.load()["w"].tolist() == [1, 1, 1]
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert any("AccessDenied" in record.getMessage() for record in warned), warned


@pytest.mark.parametrize("path", ["a%0Ab", "a/%09/b"])
def test_control_characters_in_a_path_are_refused(path: str) -> None:
    with pytest.raises(unickpt.errors.InvalidPath, match="contains a control character"):
        save(path)
