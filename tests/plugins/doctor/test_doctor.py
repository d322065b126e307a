"""What `unickpt doctor` tells: packages, and what storages support; plug-ins in test_doors."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import s3_server
from typer.testing import CliRunner

from unickpt.cli.app import app
from unickpt.plugins.doctor import abilities
from unickpt.plugins.doctor.abilities import Ability
from unickpt.plugins.doctor.examining import examine


def of(path: object) -> dict[str, Ability]:
    return {ability.name: ability for ability in examine(str(path)).abilities}


def test_a_folder_supports_all_and_nothing_stays(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "not" / "yet"):
        found = of(path)
        assert list(found) == [
            *("write and flush", "hard links", "locks", "atomic exchange", "free space")
        ]
        assert all(ability.works for ability in found.values()), found
        assert os.listdir(tmp_path) == []


def test_what_a_file_system_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(abilities.local_folders, "exchange", lambda one, other: False)
    report = examine(tmp_path)
    details = {each.name: each.detail for each in report.abilities if not each.works}
    assert details == {
        "hard links": "Operation not supported; unchanged arrays are copied",
        "locks": "Operation not supported; a second job may go unnoticed",
        "atomic exchange": "not supported here; an export that replaces another is missing for a "
        "moment",
    }
    assert report.ok, "a checkpoint can be saved all the same"


def test_a_path_that_cannot_be_written_ends_with_2() -> None:
    done = CliRunner().invoke(app, ["doctor", "/proc/nothing", "--json"])
    report = json.loads(done.output)
    assert (done.exit_code, report["ok"]) == (2, False)
    [ability] = report["abilities"]
    assert (ability["name"], ability["works"], ability["is_needed"]) == ("write", False, True)


def test_packages_and_plug_ins_are_told() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "tensorstore" in done.output
    assert "schemes: file, memory, s3, gs" in done.output


def test_a_bucket_is_tried(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "doctor")
    found = of("s3://doctor/run")
    assert list(found) == ["write and read", "list", "conditional writes"]
    assert found["write and read"].works
    assert found["list"].works
    missing = of("s3://of-which-there-is-none/run")
    assert not missing["write"].works
