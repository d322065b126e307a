"""Storage schemes: those of unickpt, and how others are added."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.saving import numbers

import unickpt
from unickpt import CheckpointExists
from unickpt.backends import s3
from unickpt.errors import InvalidPath
from unickpt.storage import paths, schemes
from unickpt.storage.locations import Location, folders_with
from unickpt.storage.paths import LocalLocation


def test_cloud_urls_become_the_specs_of_their_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    assert paths.resolve("gs://bucket/a%20b/c/").spec == {
        "driver": "gcs",
        "bucket": "bucket",
        "path": "a b/c/",
    }
    plain: dict[str, Any] = {"driver": "s3", "bucket": "bucket", "path": "run/1/"}
    assert paths.resolve("s3://bucket/run/1").spec == plain
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    assert paths.resolve("s3://bucket/run/1").spec == {**plain, "aws_region": "eu-central-1"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000/")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    expected = {**plain, "aws_region": "eu-west-1", "endpoint": "http://minio:9000"}
    assert paths.resolve("s3://bucket/run/1").spec == expected
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:1")
    assert paths.resolve("s3://bucket/run/1").spec == {**expected, "endpoint": "http://s3:1"}
    for url in ("s3://bucket/run/1", "gs://bucket/run/1"):
        location = paths.resolve(url)
        assert location.is_remote
        assert str(location) == url
        assert str(location.child("processes/x")) == f"{url}/processes/x"


def test_requests_are_tried_as_often_as_the_aws_variable_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
    assert s3.retries()["max_retries"] == 9
    for text, retries in (("3", 2), ("1", 0), ("nonsense", 9), ("0", 9)):
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", text)
        assert s3.retries()["max_retries"] == retries


# --- schemes of others --------------------------------------------------------------------------


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> schemes.Scheme:
    """A scheme of somebody else's, with a resource and a class of locations of its own."""
    schemes.names()  # now the built-in ones are registered
    monkeypatch.setattr(schemes, "_registered", dict(schemes._registered))

    def spec(url: str) -> dict[str, Any]:
        path = url.partition("://")[2].strip("/")
        store = "memory_key_value_store#notebook"
        return {"driver": "memory", "memory_key_value_store": store, "path": path and path + "/"}

    scheme = schemes.Scheme("notebook", spec, {"memory_key_value_store#notebook": NOTEBOOKS}, Page)
    schemes.register(scheme)
    return scheme


# Of which all contexts share the contents.
NOTEBOOKS: dict[str, Any] = {}


class Page(Location):
    def foreign_files(self) -> list[str]:
        return ["cover"] if self.url.endswith("/cover/") else []


def test_a_scheme_of_others_is_used(notebook: schemes.Scheme) -> None:
    assert schemes.names() == ["file", "memory", "s3", "gs", "notebook"]
    assert schemes.find("NoteBook") is notebook
    location = paths.resolve("notebook://run/1")
    assert type(location) is type(location.child("x")) is type(location.parent) is Page
    context = paths.context()
    store = location.store(context)
    store.write("x/manifest.ocdbt", b"1").result()
    assert folders_with(location, "manifest.ocdbt", context) == ["x"]
    assert location.name_for_users("a b") == "notebook://run/1/a b"
    with pytest.raises(CheckpointExists, match="cover"):
        unickpt.save("notebook://run/cover", numbers(1))
    with pytest.raises(InvalidPath, match="two slashes after its scheme: notebook://run"):
        paths.resolve("notebook:/run")


def test_a_scheme_has_a_name_of_its_own(notebook: schemes.Scheme) -> None:
    schemes.register(notebook)
    with pytest.raises(ValueError, match="'notebook' is already registered"):
        schemes.register(schemes.Scheme("notebook", notebook.spec))
    with pytest.raises(ValueError, match="'s3' is already registered"):
        schemes.register(schemes.Scheme("s3", notebook.spec))
    for name in ("", "Note", "a b", "s3://"):
        with pytest.raises(ValueError, match="is not the name of a URL scheme"):
            schemes.register(schemes.Scheme(name, notebook.spec))


def test_the_core_does_not_import_the_schemes() -> None:
    code = "import sys, unickpt; print([m for m in sys.modules if 'unickpt.backends' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_only_local_folders_are_local_locations(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path.as_uri()):
        assert type(paths.resolve(path)) is LocalLocation
    for url in ("memory://run/1", "gs://bucket/run/1"):
        assert type(paths.resolve(url)) is Location
