"""A sealed folder loads as it was, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from seal_soak import ARRAYS, MAKERS, SealSoak, block_size, make_gguf, make_safetensors
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, CheckpointExists, CheckpointNotFound
from unickpt.cli.app import app
from unickpt.errors import HintError, UnsupportedFormat
from unickpt.plugins.seal import check_seal, seal, seal_file

pytestmark = pytest.mark.plugins


def assert_as_made(path: Path) -> None:
    loaded = unickpt.load(path)
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert loaded[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("make", MAKERS)
def test_a_sealed_folder_is_read_as_before(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    assert_as_made(tmp_path / "sealed")
    before = {f.name: f.read_bytes() for f in (tmp_path / "sealed").iterdir()}
    report = seal(tmp_path / "sealed")
    assert (report.ok, report.files) == (True, len(before))
    assert all((tmp_path / "sealed" / n).read_bytes() == data for n, data in before.items())
    assert_as_made(tmp_path / "sealed")
    assert check_seal(tmp_path / "sealed") == report
    verified = unickpt.verify(tmp_path / "sealed")
    assert verified.ok
    reader = unickpt.open(tmp_path / "sealed").reader
    assert (reader.format in report.format, list(reader.unchecked())) == (True, [])
    assert unickpt.open(tmp_path / "sealed")["a.weight"][3, 4] == 154


def test_files_that_are_missing_added_or_longer_are_named(tmp_path: Path) -> None:
    make_safetensors(tmp_path)
    folder = tmp_path / "sealed"
    seal(folder)
    (folder / ".cache").mkdir()
    (folder / ".cache/hidden").write_text("x")
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "chat.json").write_text("{}")
    with pytest.raises(CheckpointCorrupt, match=r"config\.json is missing, chat\.json was added"):
        unickpt.load(folder)
    assert check_seal(folder).problems == ("config.json is missing", "chat.json was added")
    (folder / "chat.json").unlink()
    (folder / "config.json").write_text('{"layers": 22}')
    with pytest.raises(CheckpointCorrupt, match=r"config\.json has 14 bytes, and had 13"):
        unickpt.open(folder)
    (folder / "config.json").write_text('{"layers": 3}')
    with pytest.raises(CheckpointCorrupt, match=r"config\.json differs from what was sealed"):
        unickpt.open(folder)
    shutil.move(tmp_path / "config.json", folder / "config.json")
    assert_as_made(folder)


def test_a_byte_of_an_array_is_noticed_where_it_is_read(tmp_path: Path) -> None:
    make_safetensors(tmp_path)
    folder, options = tmp_path / "sealed", {"only": "c.bias"}
    with block_size(256):
        seal(folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[content.index(ARRAYS["a.weight"].tobytes()) + 4000] ^= 1
    file.write_bytes(content)
    assert unickpt.load(folder, **options)["c.bias"].tobytes() == ARRAYS["c.bias"].tobytes()
    message = r"'a.weight'.*model\.safetensors differs from what was sealed, within bytes"
    with pytest.raises(CheckpointCorrupt, match=message):
        unickpt.load(folder)
    with pytest.raises(CheckpointCorrupt, match=message):  # the file alone, too
        unickpt.load(file)
    assert not unickpt.verify(folder).ok
    assert not check_seal(folder).ok


def test_a_damaged_seal_is_not_believed(tmp_path: Path) -> None:
    make_safetensors(tmp_path)
    folder = tmp_path / "sealed"
    seal(folder)
    (folder / seal_file.NAME).write_text("{}")
    with pytest.raises(CheckpointCorrupt, match=r"unickpt\.seal\.json is damaged"):
        unickpt.load(folder)
    seal(folder, overwrite=True)
    assert_as_made(folder)


def test_a_seal_that_links_to_another_one_is_refused(tmp_path: Path) -> None:
    make_gguf(tmp_path / "a")
    make_gguf(tmp_path / "b")
    folder = tmp_path / "a/sealed"
    seal(tmp_path / "b/sealed")
    (folder / seal_file.NAME).symlink_to(tmp_path / "b/sealed" / seal_file.NAME)
    for path in (folder, folder / "model.gguf"):
        with pytest.raises(CheckpointCorrupt, match="a link may not lead out of it"):
            unickpt.open(path)


def test_a_seal_is_replaced_only_on_request(tmp_path: Path) -> None:
    make_safetensors(tmp_path)
    folder = tmp_path / "sealed"
    with pytest.raises(CheckpointNotFound, match="has no seal"):
        check_seal(folder)
    seal(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointExists, match="--overwrite"):
        seal(folder)
    assert seal(folder, overwrite=True).ok
    assert_as_made(folder)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "ours", ARRAYS)
    with pytest.raises(UnsupportedFormat, match="no folder of safetensors or gguf"):
        seal(tmp_path / "ours")
    (tmp_path / "none").mkdir()
    for name in ("none", "nowhere"):
        with pytest.raises(CheckpointNotFound, match=f"there are no files in .*{name}"):
            seal(tmp_path / name)


def test_hints_are_those_of_the_format(tmp_path: Path) -> None:
    make_safetensors(tmp_path)
    seal(tmp_path / "sealed")
    with pytest.raises(HintError, match="dequantize"):
        unickpt.open(tmp_path / "sealed", hints={"dequantize": True})


def test_the_command(tmp_path: Path) -> None:
    make_gguf(tmp_path)
    folder, runner = tmp_path / "sealed", CliRunner()
    done = runner.invoke(app, ["seal", str(folder)])
    assert (done.exit_code, "sealed: 2 files of gguf" in done.output) == (0, True)
    assert runner.invoke(app, ["seal", str(folder)]).exit_code == 2
    assert runner.invoke(app, ["seal", str(folder), "--check"]).exit_code == 0
    (folder / "README.md").write_text("b model")
    done = runner.invoke(app, ["seal", str(folder), "--check", "--json"])
    body = json.loads(done.output)
    assert (done.exit_code, body["ok"], len(body["problems"])) == (1, False, 1)
    done = runner.invoke(app, ["seal", str(folder), "--check"])
    assert "NOT as sealed" in done.output
    assert runner.invoke(app, ["seal", str(folder), "--overwrite"]).exit_code == 0


@pytest.mark.parametrize("make", MAKERS)
def test_a_seal_can_be_required(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    folder = tmp_path / "sealed"
    for required in (True, "0" * 32):
        with pytest.raises(CheckpointCorrupt, match="is missing, which the hint `sealed` requires"):
            unickpt.open(folder, hints={"sealed": required})
    digest = seal(folder).digest
    assert check_seal(folder).digest == digest
    for hint in (True, digest, False):
        assert set(unickpt.open(folder, hints={"sealed": hint})) == set(ARRAYS)
    with pytest.raises(HintError, match="neither True nor the digest"):
        unickpt.open(folder, hints={"sealed": 1.5})
    (folder / "notes.txt").write_text("added")
    other = seal(folder, overwrite=True).digest
    assert other != digest
    with pytest.raises(CheckpointCorrupt, match=f"has the digest {other}.*sealed again"):
        unickpt.open(folder, hints={"sealed": digest})


@pytest.mark.integration
def test_no_damage_is_accepted(tmp_path: Path) -> None:
    SealSoak(tmp_path, seed=0).run(200)


@pytest.mark.slow
def test_none_of_many_damages_is_accepted(tmp_path: Path) -> None:
    SealSoak(tmp_path, seed=1).run(10_000)
