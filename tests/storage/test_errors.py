"""Failures of the storage have types; only `tensorstore_calls` reads TensorStore's messages."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from unickpt.errors import CheckpointCorrupt, StorageError
from unickpt.storage import errors, paths, regular_files, tensorstore_calls
from unickpt.storage.errors import Damaged, Failed, MissingFolder
from unickpt.storage.locations import folders_with


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (ValueError("NOT_FOUND: no such key"), Damaged, "NOT_FOUND: no such key"),
        (ValueError("cannot decode"), Damaged, "cannot decode"),
        (OSError("PERMISSION_DENIED: no"), Failed, "PERMISSION_DENIED: no"),
        (
            ValueError("NOT_FOUND: NoSuchBucket [http_response_code='404']"),
            Failed,
            "NOT_FOUND: NoSuchBucket (the server answered 404)",
        ),
        (
            ValueError("PERMISSION_DENIED: no [http_response_code='403']"),
            Failed,
            "PERMISSION_DENIED: no (the server answered 403: check the credentials and their "
            "permissions)",
        ),
        (ValueError("OUT_OF_RANGE: short [http_response_code='416']"), Damaged, None),
    ],
)
def test_what_tensorstore_raises_has_a_type(
    raised: Exception, kind: type[Failed], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorstore_calls, "_credentials", str)  # S3 has its own tests
    with pytest.raises(Failed) as caught, tensorstore_calls.asking():
        raise raised
    assert type(caught.value) is kind
    assert said is None or str(caught.value) == said


def test_the_number_of_the_operating_system_is_kept() -> None:
    with pytest.raises(Failed) as caught, tensorstore_calls.asking():
        raise OSError("RESOURCE_EXHAUSTED: Failed to write: \\x41 [os_error_code='28'] [a='b']")
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value) == "RESOURCE_EXHAUSTED: Failed to write: A"
    with pytest.raises(Failed) as caught, regular_files.system_calls():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.errno == errno.ENOSPC


def test_only_a_reader_hears_of_damage() -> None:
    damaged = Damaged("the end is missing", status="OUT_OF_RANGE")
    found = errors.reading_failed(damaged, "run/1")
    assert isinstance(found, CheckpointCorrupt)
    assert str(found) == "run/1: stored data is damaged or missing: the end is missing"
    for told in (
        errors.writing_failed(damaged, "run/1"),
        errors.reading_failed(Failed("the end is missing", status="OUT_OF_RANGE"), "run/1"),
    ):
        assert type(told) is StorageError
        assert str(told) == "run/1: the storage failed: OUT_OF_RANGE: the end is missing"


def test_a_folder_that_is_not_there_cannot_be_listed(tmp_path: Path) -> None:
    with pytest.raises(MissingFolder):
        folders_with(paths.resolve(tmp_path / "none"), "manifest.ocdbt", paths.context())
