"""examples/plugin: an installed package brings its codecs and its format to every program."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from support.processes import Processes

import unickpt
from unickpt.errors import UnsupportedFormat

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package, for PYTHONPATH."""
    copy = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "plugin")
    folder = tmp_path_factory.mktemp("installed")
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(copy)], check=True)
    return folder


def run(installed: Path, program: str, *arguments: str, ok: bool = True) -> str:
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def saved(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with an array of each codec."""
    path = tmp_path_factory.mktemp("saved") / "c"
    run(
        installed,
        """
import sys
import numpy as np, unickpt
from acme_checkpoints import DeltaCodec, GzipCodec
features = [DeltaCodec("*/offsets"), GzipCodec("model/*")]
state = {"model": {"w": np.tile(np.arange(7.0), (5, 9))}, "data": {"offsets": np.arange(999) ** 2}}
for name in ("c", "again"):
    options = unickpt.SaveOptions(features=features, chunk_shape=(2, 40), chunk_bytes=2000)
    report = unickpt.save(sys.argv[1].replace("/c", "/" + name), state, options=options)
    assert report.extra == {"acme-delta": {"data/offsets": {"chunks": 4}}}, report.extra
""",
        str(path),
    )
    return path


def test_gzip_of_a_plug_in_is_read_without_it_and_by_tensorstore(saved: Path) -> None:
    for path in (saved, saved.with_name("again")):  # of which the second had a cached plan
        index = json.loads(stored_index(path))
        assert {"name": "gzip", "configuration": {"level": 9}} in index["codecs"]
        assert index["features"] == ["acme-delta"]
        database = {"driver": "ocdbt", "base": f"file://{path}/", "path": "model/w/"}
        opened = ts.open({"driver": "zarr3", "kvstore": database}).result()
        assert np.array_equal(opened.read().result(), np.tile(np.arange(7.0), (5, 9)))


def stored_index(path: Path) -> bytes:
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    return bytes(store.read("unickpt.json").result().value)


def test_a_codec_that_zarr_lacks_is_found_by_its_entry_point(installed: Path, saved: Path) -> None:
    said = run(
        installed,
        """
import sys
import numpy as np, unickpt
state = unickpt.load(sys.argv[1])
assert np.array_equal(state["data"]["offsets"], np.arange(999) ** 2)
assert np.array_equal(state["model"]["w"], np.tile(np.arange(7.0), (5, 9)))
assert np.array_equal(unickpt.open(sys.argv[1])["data/offsets"][250:260], np.arange(250, 260) ** 2)
assert unickpt.verify(sys.argv[1]).ok
assert unickpt.open(sys.argv[1])["data/offsets"].url == ""
from acme_checkpoints import DeltaCodec, GzipCodec
features = [DeltaCodec("*/offsets"), GzipCodec("model/*")]
facts = dict(features=features, chunk_shape=(2, 40), chunk_bytes=2000, base=sys.argv[1])
for reuse in ("digest", "compare", "patch"):
    options = unickpt.SaveOptions(**facts, reuse=reuse)
    report = unickpt.save(sys.argv[1] + reuse, state, options=options)
    assert report.reused_bytes == 999 * 8, report
    state["data"]["offsets"][3] += 1
    options = unickpt.SaveOptions(**{**facts, "base": sys.argv[1] + reuse}, reuse=reuse)
    report = unickpt.save(sys.argv[1] + reuse + "2", state, options=options)
    assert (report.reused_bytes, report.patched_chunks) == (999 * 8 - 2000, 0), report
    found = unickpt.load(sys.argv[1] + reuse + "2")["data"]["offsets"]
    assert np.array_equal(found, state["data"]["offsets"])
    state["data"]["offsets"][3] -= 1
unickpt.copy(sys.argv[1], sys.argv[1] + "3")
assert unickpt.diff(sys.argv[1], sys.argv[1] + "3").read_bytes == 0
""",
        str(saved),
    )
    assert said == ""


def test_without_the_package_the_checkpoint_is_refused_by_the_codec_s_name(saved: Path) -> None:
    for attempt in (
        lambda: unickpt.load(saved),
        lambda: unickpt.save(saved, {"x": np.ones(1)}, overwrite=True),
    ):
        with pytest.raises(UnsupportedFormat, match=r"the feature 'acme-delta'"):
            attempt()


def test_damage_is_told_as_any_other(installed: Path, saved: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(saved, tmp_path / "broken")
    for file in (broken / "processes").rglob("*"):
        if file.is_file():
            data = bytearray(file.read_bytes())
            data[len(data) // 3 :] = bytes(len(data) - len(data) // 3)
            file.write_bytes(data)
    said = run(installed, "import sys, unickpt; unickpt.load(sys.argv[1])", str(broken), ok=False)
    assert "CheckpointCorrupt" in said


def test_its_format_is_read_by_every_program(
    installed: Path, tmp_path: Path, processes: Processes
) -> None:
    (tmp_path / "arrays.json").write_text(json.dumps({"w": ["int16", [2, 3], 4]}))
    (tmp_path / "data.bin").write_bytes(b"----" + np.arange(6, dtype=np.int16).tobytes())
    program = "import sys, unickpt; print(unickpt.load(sys.argv[1])['w'].tolist())"
    assert run(installed, program, str(tmp_path)) == "[[0, 1, 2], [3, 4, 5]]\n"
    program = "from unickpt.cli.main import main; main()"
    env = {"PYTHONPATH": str(installed)}
    doctor = processes.forked(program, "doctor", of=["jax", "torch"], env=env)  # imports both
    (said,) = processes.finish([doctor])
    assert "acme-delta" in said
    assert "acme-checkpoints 1.0" in said


def test_the_codec_refuses_what_it_cannot_store(installed: Path, tmp_path: Path) -> None:
    program = """
import sys, numpy as np, unickpt
from acme_checkpoints import DeltaCodec
options = unickpt.SaveOptions(features=[DeltaCodec("**")])
unickpt.save(sys.argv[1], {"w": np.ones(3)}, options=options)
"""
    said = run(installed, program, str(tmp_path / "c"), ok=False)
    assert "'w': acme-delta stores int64 of one dimension, not float64[3]" in said
