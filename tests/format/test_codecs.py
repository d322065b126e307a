"""Codecs at the seam: what they may store, and what happens if one fails."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import (
    CheckpointCorrupt,
    Checkpointer,
    CheckpointNotFound,
    SaveOptions,
    UnsupportedLeaf,
    doors,
    extend,
)
from unickpt.errors import PluginError
from unickpt.format import codec_protocol, verified_chunks

STATE = {"w": np.arange(3000.0), "b": np.ones(3)}


class Zlib(extend.SaveFeature):
    """Stores `w` by zlib; with `gzip`, in a codec that Zarr has."""

    name = "zlib"

    def __init__(self, name: str = "zlib", gzip: bool = False, fails: str = "") -> None:
        self.name, self.gzip, self.fails = name, gzip, fails

    def configure(self, entry: Any) -> dict[str, Any] | None:
        return {"level": 5} if entry.name == "w" else None

    def zarr_codec(self, settings: Any) -> dict[str, Any] | None:
        return {"name": "gzip", "configuration": settings} if self.gzip else None

    def encode(self, entry: Any, chunk: Any) -> extend.StoredChunk:
        if self.fails == "encode":
            raise KeyError("out of codes")
        made = zlib.compressobj(5, wbits=31 if self.gzip else 15)
        data = np.frombuffer(made.compress(chunk.tobytes()) + made.flush(), np.uint8)
        return extend.StoredChunk(data.view(np.int8) if self.fails == "dtype" else data, {"n": 1})

    def decode(self, entry: Any, data: Any, out: Any) -> None:
        if self.fails == "decode":
            raise LookupError("no such code")
        out[:] = np.frombuffer(zlib.decompress(data.tobytes()), out.dtype)

    def stored_bytes(self, entry: Any, shape: Any) -> int | None:
        return 7 if self.fails == "length" else None

    def merge(self, notes: Any) -> dict[str, int]:
        return {"n": sum(note["n"] for note in notes)}

    def validate(self, entry: Any, note: Any) -> None: ...

    def facts(self, entry: Any) -> Mapping[str, Any]:
        return {**entry.settings, **entry.extra[self.name]}


@pytest.fixture
def registered() -> Iterator[Zlib]:
    codec = Zlib()
    extend.register_codec(codec)
    yield codec
    extend.unregister_codec(codec.name)


def save(path: Path, codec: Zlib, **more: Any) -> Any:
    options = SaveOptions(features=[codec], fsync=False, **more)
    return unickpt.save(path, STATE, options=options)


@pytest.mark.parametrize("gzip", [True, False])
def test_a_chunk_that_readers_refuse_is_not_saved(
    gzip: bool, registered: Zlib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save(tmp_path / "fits", Zlib(gzip=gzip)).arrays == 2
    monkeypatch.setattr(verified_chunks, "COMPRESSED_MOST", 20_000)
    with pytest.raises(
        UnsupportedLeaf, match=r"'w': its chunks would have 24000 bytes, but .*20000"
    ):
        save(tmp_path / "large", Zlib(gzip=gzip))
    assert not (tmp_path / "large").exists()
    assert save(tmp_path / "small", Zlib(gzip=gzip), chunk_bytes=8000).chunks > 2
    assert np.array_equal(unickpt.load(tmp_path / "small")["w"], STATE["w"])


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("encode", "failed: KeyError: 'out of codes'"),
        ("dtype", r"returned int8\[\d+\] for a chunk of \[3000\], not bytes"),
        ("length", r"returned uint8\[\d+\] for a chunk of \[3000\], not 7 bytes"),
    ],
)
@pytest.mark.parametrize("gzip", [True, False])
def test_a_codec_that_fails_is_named_with_the_array(
    fails: str, reason: str, gzip: bool, registered: Zlib, tmp_path: Path
) -> None:
    registered.fails = fails
    named = rf"array 'w' \(float64\[3000\]\): the codec 'zlib' {reason}"
    with pytest.raises(UnsupportedLeaf, match=named):
        save(tmp_path / "c", Zlib(gzip=gzip, fails=fails))
    with pytest.raises(CheckpointNotFound):
        unickpt.open(tmp_path / "c")


def test_a_codec_that_cannot_decode_is_named_with_the_array(
    registered: Zlib, tmp_path: Path
) -> None:
    report = save(tmp_path / "c", Zlib())
    assert report.extra == {"zlib": {"w": {"n": 1}}}
    registered.fails = "decode"
    named = "array 'w' .*: the codec 'zlib' failed: LookupError: no such code"
    with pytest.raises(CheckpointCorrupt, match=named):
        unickpt.load(tmp_path / "c")
    (damage,) = unickpt.verify(tmp_path / "c").damage
    assert "array 'w'" in str(damage)
    assert np.array_equal(unickpt.open(tmp_path / "c")["b"][...], STATE["b"])


def test_names_that_mean_something_else_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedLeaf, match="no codec can be called 'patches': rename it"):
        save(tmp_path / "c", Zlib("patches"))
    with pytest.raises(UnsupportedLeaf, match="the codec 'unknown' is not registered"):
        save(tmp_path / "c", Zlib("unknown"))
    door = doors.Door("codecs", "mine", f"{__name__}:OTHER", "acme 1.0")
    monkeypatch.setattr(doors, "find", lambda group, name: door)
    with pytest.raises(PluginError, match=r"'mine' of acme 1\.0 .* calls itself 'other'"):
        codec_protocol.find("mine")


OTHER = Zlib("other")


@pytest.mark.parametrize("features", [[Zlib], [object()], ["quantize"]])
def test_features_are_checked(features: Any) -> None:
    with pytest.raises(TypeError, match=r"features=.* must be a list of objects"):
        SaveOptions(features=features)
    with pytest.raises(ValueError, match="the feature 'zlib' twice"):
        SaveOptions(features=[Zlib(), Zlib()])


def test_a_feature_of_a_run_cannot_change_what_the_run_says(tmp_path: Path) -> None:
    class Counting(extend.SaveFeature, extend.RunFeature):
        name = "counting"
        loaded: list[int] = []  # noqa: RUF012

        def in_run(self, run: extend.Run) -> extend.RunFeature:
            return self

        def before_save(self, call: extend.SaveCall) -> tuple[extend.SaveFeature, dict[str, Any]]:
            return self, {"step": -1, "counted": 10 * call.step}

        def after_load(self, step: int, path: str, stored: extend.Reader | None) -> None:
            assert stored is not None
            self.loaded.append(stored.index.metadata["unickpt"]["counted"])

    options = SaveOptions(features=[Counting()], fsync=False)
    with Checkpointer(tmp_path / "run", options=options) as job:
        job.save(3, STATE).result()
    with Checkpointer(tmp_path / "run", options=options) as job:
        job.load()
    assert unickpt.open(tmp_path / "run/step_3").metadata["unickpt"]["step"] == 3
    assert Counting.loaded == [30]
