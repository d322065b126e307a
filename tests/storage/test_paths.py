"""Paths and URLs, and what each names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from support.saving import numbers, save_in_job, sound

import unickpt
from unickpt import CheckpointExists, CheckpointNotFound
from unickpt.errors import InvalidPath

ODD_NAMES = ["a b", "ä ö 漢", "100%", "a%20b", "a'b\"c", "x|y", "q?r#s", "~", "-rf", "a:b", "[c]*"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_local_path_may_hold_any_character(name: str, tmp_path: Path) -> None:
    path = tmp_path / name / "step_1"
    report = unickpt.save(path, numbers(1))
    assert os.listdir(tmp_path) == [name]
    assert sound(path, 1)
    assert report.url == unickpt.open(path).url == path.as_uri() + "/"
    assert sound(report.url, 1), "its URL leads to it as well"
    array = ts.open(unickpt.open(path)["large"].url).result()
    np.testing.assert_array_equal(array.read().result(), numbers(1)["large"])


def test_paths_may_be_relative_or_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    unickpt.save("run/../run/step_1/", numbers(1))
    unickpt.save("~/step_2", numbers(2))
    assert sound(tmp_path / "run" / "step_1", 1)
    assert sound(str(tmp_path) + "//home///step_2", 2)
    assert sound(f"file://localhost{tmp_path}/run/step_1", 1)


def test_a_checkpoint_in_memory(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/step 1"
    save_in_job(url, 3, lambda index: numbers(1))
    save_in_job(url, 3, lambda index: numbers(2), overwrite=True)
    assert sound(url, 2)
    with pytest.raises(CheckpointExists):
        unickpt.save(url, numbers(1))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "is not a path"),
        ("a\0b", "is not a path"),
        (b"bytes", "is not a path"),
        ("ftp://host/x", "unknown scheme 'ftp'; known are file://, memory://, s3://, gs://"),
        ("file://host/x", "three slashes"),
        ("file:relative", None),
        ("file:///a?b", "no '\\?' or '#'"),
        ("s3://bucket/a#b", "no '\\?' or '#'"),
        ("s3://bucket", "add the checkpoint's path, such as s3://bucket/run/1"),
        ("s3:/bucket/run", "two slashes after its scheme: s3://bucket/run"),
        ("file:/run/1", "two slashes after its scheme: file:///run/1"),
        ("s3:///path", "give a bucket and a path"),
        ("s3://Not_A_Bucket!/x", "Invalid S3 bucket name"),
        ("s3://[bucket/x", "is not a valid URL"),
        ("s3://bucket/a/../b", "'\\.\\.'"),
        ("gs://bucket/", "add the checkpoint's path, such as gs://bucket/run/1"),
        ("memory://", "add the checkpoint's path, such as memory://run/1"),
        ("back\\slash", "TensorStore accepts no"),
        ("x.__lock/y", "TensorStore accepts no"),
        ("sur\udcffrogate", "not valid Unicode"),
    ],
)
def test_what_names_no_storage_is_refused(
    path: Any, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if reason is None:  # a single colon is part of a file name
        unickpt.save(path, numbers(1))
        assert sound(tmp_path / path, 1)
        return
    for act in (lambda: unickpt.save(path, numbers(1)), lambda: unickpt.load(path)):
        with pytest.raises(InvalidPath, match=reason):
            act()
    assert os.listdir(tmp_path) == []


def test_a_path_that_is_none_is_named() -> None:
    for wrong in ({"w": 1}, None, 3):
        with pytest.raises(
            InvalidPath, match=f"the path is of type {type(wrong).__name__}; pass the"
        ):
            unickpt.save(wrong, "run/1")  # type: ignore[arg-type]


def test_nothing_is_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", "memory://nobody"):
        with pytest.raises(CheckpointNotFound, match="no checkpoint at"):
            unickpt.load(path)
        with pytest.raises(CheckpointNotFound, match="no checkpoint at"):
            unickpt.verify(path)
    assert os.listdir(tmp_path) == [], "looking leaves no trace"


NAMES = ["a b", "100%", "%41", "a%2Fb", "ü日本", "e\u0301", " lead", "trail ", "new\nline", "a:b"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_folders_are_taken_as_they_are(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    unickpt.save(path, {"w": 1})
    unickpt.save(path, {"w": 2}, overwrite=True)
    with unickpt.Checkpointer(tmp_path / f"{name}-run") as run:
        run.save(1, {"w": 3}, wait=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, f"{name}-run"])
    assert unickpt.load(path) == {"w": 2}
    assert unickpt.load(tmp_path / f"{name}-run" / "step_1") == {"w": 3}


@pytest.mark.plugins
@pytest.mark.parametrize("name", ["x" * 255, "日" * 85])
def test_the_longest_names_hold_checkpoints(name: str, tmp_path: Path) -> None:
    unickpt.save(tmp_path / name, {"w": 1})
    unickpt.save(tmp_path / name, {"w": 2}, overwrite=True)
    assert unickpt.load(tmp_path / name) == {"w": 2}
    with pytest.raises(unickpt.errors.InvalidPath, match="File name too long; give a shorter one"):
        unickpt.save(tmp_path / f"{name}y", {"w": 1})
    unickpt.save(tmp_path / "arrays", {"w": np.ones(3)})
    with pytest.raises(unickpt.errors.InvalidPath, match=r"too long .*at most \d+ bytes"):
        unickpt.convert(tmp_path / "arrays", tmp_path / f"{name[:-1]}z", to="dcp")
    assert sorted(os.listdir(tmp_path)) == sorted([name, "arrays"])
