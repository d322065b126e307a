"""`compression="auto"`: what shrinks is stored compressed, all else as it is, each bit for bit."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.forks import Forks
from support.run_folders import refuse
from support.saving import files, in_job, same

import unickpt
from unickpt import CheckpointCorrupt, Checkpointer, ProcessGroup, SaveOptions, doors
from unickpt.arrays import dtypes
from unickpt.format import chunk_grid
from unickpt.plugins.compress import auto, blosc_frames
from unickpt.types import Box, LocalFragments

CHUNK = 64 << 10


def weights(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Like those of a trained model."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(-4, 0.5, (shape[0], *[1] * (len(shape) - 1))))
    return (rng.standard_normal(shape) * scales).astype(ml_dtypes.bfloat16)


def noise(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def state() -> dict[str, Any]:
    return {
        "w": weights(200, 700),
        "moment": weights(100, 400).astype(np.float32) ** 2,
        "noise": noise(3, 100_001),
        "zeros": np.zeros((300, 70), np.complex128),
        "mask": np.random.default_rng(2).random((333, 334)) < 0.1,
        "codes": np.random.default_rng(1).integers(-8, 8, (350, 333)).astype(ml_dtypes.int4),
        "small": np.arange(1000),
        "scalar": np.float32(3),
        "none": np.zeros((0, 5), np.float16),
        "step": 4,
    }


def save(path: Path | str, tree: Any, **options: Any) -> unickpt.types.SaveReport:
    made = {"compression": "auto", "chunk_bytes": CHUNK, "fsync": False, **options}
    return unickpt.save(path, tree, options=SaveOptions(**made))


def is_whole(path: Path | str, tree: Any) -> None:
    assert same(unickpt.load(path), tree)
    report = unickpt.verify(path)
    assert report.ok, report.damage


def chosen(path: Path | str) -> dict[str, str]:
    """How arrays are stored for which compression was looked at."""
    arrays = unickpt.open(path).index.arrays
    words = {name: entry.encoding for name, entry in arrays.items() if entry.encoding is not None}
    return {name: found[0][0] if found else "raw" for name, found in words.items()}


@pytest.fixture(params=["zstandard", "TensorStore"], autouse=True)
def encoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With zstandard installed, and without."""
    if request.param == "TensorStore":
        monkeypatch.setattr(blosc_frames, "compressor", lambda: None)
    return str(request.param)


# --- one process ----------------------------------------------------------------------------------


def test_each_array_is_stored_as_it_pays(tmp_path: Path) -> None:
    report = save(tmp_path / "c", state())
    is_whole(tmp_path / "c", state())
    shrunk = dict.fromkeys(("w", "moment", "zeros", "mask", "codes"), "blosc")
    assert chosen(tmp_path / "c") == {**shrunk, "noise": "raw"}
    assert not unickpt.open(tmp_path / "c").index.features  # plain Zarr reads it
    stored = sum((tmp_path / "c" / name).stat().st_size for name in files(tmp_path / "c"))
    assert stored < report.bytes - report.saved_bytes + 30_000
    assert report.saved_bytes > 0.3 * report.bytes


def test_what_does_not_shrink_is_stored_as_without_compression(tmp_path: Path) -> None:
    tree = {"a": noise(5, 40_000), "b": noise(CHUNK * 3)}
    assert save(tmp_path / "auto", tree).saved_bytes == 0
    save(tmp_path / "plain", tree, compression=None)
    own, plain = (unickpt.open(tmp_path / name).reader for name in ("auto", "plain"))
    assert not own.index.features
    for name, entry in own.index.arrays.items():
        for part in chunk_grid.parts(entry):
            for number in range(part.count):
                at, there = (
                    own.chunk_values.where(entry, part, number),
                    plain.chunk_values.where(entry, part, number),
                )
                assert at.length == there.length == math.prod(part.chunk) * entry.itemsize, name
                file = tmp_path / "auto" / at.path
                data = file.read_bytes()[at.offset : at.offset + at.length]
                box = part.chunk_box(number)
                assert data.startswith(tree[name][box.slices].tobytes())
            keys = [f"{part.key}/zarr.json" for part in chunk_grid.parts(entry)]
            assert [own.chunks.read_key(key) for key in keys] == [
                plain.chunks.read_key(key) for key in keys
            ]
    is_whole(tmp_path / "auto", tree)


DTYPES = [
    *("bool", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "int4", "int2"),
    *("float4_e2m1fn", "datetime64[s]"),
]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(1, 5),
    st.booleans(),
)
def test_all_bits_of_all_dtypes(
    dtype: str, shape: list[int], random_bytes: int, chunks: int, tensorstore: bool
) -> None:
    """In the least number of bytes that is looked at, so that small arrays are."""
    kind, rng = dtypes.from_name(dtype), np.random.default_rng(sum(shape))
    raw = np.zeros((*shape, kind.itemsize), np.uint8)
    raw[..., :random_bytes] = rng.integers(0, 256, raw[..., :random_bytes].shape)
    if kind.itemsize == 1:
        raw %= {"bool": 2, "int2": 4, "int4": 16, "float4_e2m1fn": 16}.get(dtype, 255)
    data = raw.view(np.uint8).reshape(*shape, kind.itemsize)
    array = data.view(kind).reshape(shape) if kind.itemsize > 1 else data[..., 0].view(kind)
    if dtype in ("int4", "int2"):
        array = array.astype(np.int8).astype(kind)
    path = f"memory://compression/{secrets.token_hex(8)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "_LEAST_BYTES", 1)
        if tensorstore:
            patch.setattr(blosc_frames, "compressor", lambda: None)
        save(path, {"a": array}, chunk_bytes=max(1, array.nbytes // chunks))
    found = unickpt.load(path)["a"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert unickpt.verify(path).ok
    if not dtype.startswith(("datetime", "float8_e4m3")):
        assert plain(path, "a").tobytes() == array.tobytes()


def plain(path: Path | str, name: str) -> np.ndarray[Any, Any]:
    """An array as TensorStore reads it, by what `zarr.json` says."""
    text = str(path)
    if text.startswith("memory://"):
        stored = unickpt.open(path)
        reader = stored.reader
        store = reader.chunks.database.store()
        kv = {"driver": "memory", "path": "x/"}
        context = ts.Context({"memory_key_value_store": {}})
        copied = ts.KvStore.open(kv, context=context).result()
        for key in store.list().result():
            if key.startswith(f"{name}/".encode()):
                copied.write(key, store.read(key).result().value).result()
        spec = {"driver": "zarr3", "kvstore": {**kv, "path": f"x/{name}/"}}
        return np.asarray(ts.open(spec, context=context).result().read().result())
    return np.asarray(ts.open(f"file://{text}/|ocdbt:{name}/").result().read().result())


def test_tensorstore_opens_each_array_by_its_url(tmp_path: Path) -> None:
    save(tmp_path / "c", state())
    for name in ("w", "moment", "noise", "zeros", "mask", "codes", "small"):
        found = plain(tmp_path / "c", name)
        assert found.dtype == state()[name].dtype
        assert found.tobytes() == state()[name].tobytes(), name
    kept = ts.open(f"file://{tmp_path / 'c'}/|ocdbt:w/").result()
    blosc = kept.spec().to_json()["metadata"]["codecs"][1]
    assert blosc["configuration"]["cname"] == "zstd"
    assert blosc["configuration"]["typesize"] == 2


def test_parts_of_arrays_are_read(tmp_path: Path) -> None:
    save(tmp_path / "c", state())
    stored = unickpt.open(tmp_path / "c")
    for rows, columns in ((slice(3, 190), slice(1, 700, 3)), (slice(77, 78), slice(0, 700))):
        assert np.array_equal(stored["w"][rows, columns], state()["w"][rows, columns])
    assert np.array_equal(stored["noise"][1, 50_000:50_009], state()["noise"][1, 50_000:50_009])


def test_a_sample_is_of_several_places() -> None:
    entry = unickpt.format.index.ArrayEntry(
        "w", (1 << 22,), "uint8", (1 << 22,), encoding=auto.chosen_encoding("uint8")
    )
    chunk = noise(1 << 22)
    assert not auto.pays(entry, chunk)
    chunk[1 << 20 : 1 << 21] = 0  # a quarter of it
    assert auto.pays(entry, chunk)


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="compression 'lz4' is not one of None, auto, zstd, gzip"):
        SaveOptions(compression="lz4")


def test_in_the_background_with_little_memory(tmp_path: Path) -> None:
    tree = {f"w{n}": weights(256, 1024, seed=n) for n in range(16)}
    options = SaveOptions(compression="auto", chunk_bytes=CHUNK, fsync=False, budget_bytes=4 << 20)
    for staging in ("auto", "copy", "reference"):
        path = tmp_path / staging
        given = dataclasses.replace(options, staging=staging)
        report = unickpt.save_async(path, tree, options=given).result()
        assert report.saved_bytes > 0.15 * report.bytes
        is_whole(path, tree)


@pytest.mark.plugins
def test_quantised_arrays_are_left_alone(tmp_path: Path) -> None:
    tree = {"w": weights(200, 700), "q": weights(200, 700).astype(np.float32)}
    save(tmp_path / "c", tree, quantize={"q": "uint8"})
    assert chosen(tmp_path / "c") == {"w": "blosc", "q": "unickpt.quantized"}
    assert np.array_equal(unickpt.load(tmp_path / "c")["w"], tree["w"])
    assert unickpt.verify(tmp_path / "c").ok


# --- readers --------------------------------------------------------------------------------------


def test_a_changed_byte_is_an_error_that_names_the_array(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": weights(200, 700), "noise": noise(100_001)})
    reader = unickpt.open(tmp_path / "c").reader
    for name in ("w", "noise"):
        entry = reader.index.arrays[name]
        (part,) = chunk_grid.parts(entry)
        at = reader.chunk_values.where(entry, part, 1)
        file = tmp_path / "c" / at.path
        good = file.read_bytes()
        length = at.length if name == "w" else entry.nbytes - CHUNK  # without what fills it up
        for place in (0, 1, 2, 3, 5, 9, 13, 17, length // 3, length - 1):
            bad = bytearray(good)
            bad[at.offset + place] ^= 0x10
            file.write_bytes(bad)
            if place in (0, 1, 3, 9) and name == "w":  # what the decoder need not look at
                continue
            with pytest.raises(CheckpointCorrupt, match=f"array '{name}'"):
                unickpt.load(tmp_path / "c")
            found = unickpt.verify(tmp_path / "c").damage
            assert {each.array for each in found} == {name}
        file.write_bytes(good)


HOSTILE = """
import json, sys
from pathlib import Path
import numpy as np
import unickpt
folder, name, begin, length = Path(ARGS[0]), ARGS[1], ARGS[2], ARGS[3]
file, good = folder / name, (folder / name).read_bytes()
intact = unickpt.load(folder)["w"].tobytes()
rng, said = np.random.default_rng(0), {}
for number in range(600):
    bad = bytearray(good)
    for _ in range(rng.integers(1, 4)):
        most = 40 if number % 2 else length
        bad[begin + rng.integers(0, most)] = rng.integers(0, 256)
    file.write_bytes(bad)
    try:
        found = "intact" if unickpt.load(folder)["w"].tobytes() == intact else "WRONG"
    except unickpt.UnickptError as error:
        found = type(error).__name__
    said[found] = said.get(found, 0) + 1
print(json.dumps(said))
"""


def test_no_frame_ends_the_process_or_gets_through(forks: Forks, tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": weights(40, 1000)}, chunk_bytes=1 << 20)
    reader = unickpt.open(tmp_path / "c").reader
    entry = reader.index.arrays["w"]
    at = reader.chunk_values.where(entry, chunk_grid.parts(entry)[0], 0)
    ended = forks.wait(forks.start(HOSTILE, str(tmp_path / "c"), at.path, at.offset, at.length))
    assert ended.code == 0, ended.out[-2000:]
    assert ended.last.keys() <= {"CheckpointCorrupt", "intact", "StorageError"}
    assert ended.last["CheckpointCorrupt"] > 400


# --- several processes ----------------------------------------------------------------------------


def in_two(path: Path | str, tree: Any, **options: Any) -> list[Any]:
    """Saves by two processes; `tree` gives what each has."""

    def work(group: ProcessGroup) -> Any:
        given = {"chunk_bytes": CHUNK, "fsync": False, "compression": "auto", **options}
        given = {
            name: value(group.index) if callable(value) else value for name, value in given.items()
        }
        options_of = SaveOptions(group=group, timeout_s=30, **given)
        return unickpt.save(path, tree(group.index), overwrite=True, options=options_of)

    return in_job(2, work)


HALF = 1500


def halves(first: Any, second: Any) -> Any:
    def tree(index: int) -> Any:
        box = Box((HALF * index, 0), (HALF * index + HALF, 100))
        own = (first, second)[index]
        return {
            "w": LocalFragments((2 * HALF, 100), [(box, own)]),
            "all": weights(99, 999),
        }

    return tree


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (noise(HALF, 100), noise(HALF, 100, seed=1), "raw"),
        (noise(HALF, 100), noise(HALF, 100) % 3, "blosc"),
        (noise(HALF, 100) % 3, noise(HALF, 100), "blosc"),
        (noise(HALF, 100) % 3, noise(HALF, 100) % 5, "blosc"),
    ],
    ids=["neither", "second", "first", "both"],
)
def test_processes_need_not_find_the_same(
    first: Any, second: Any, expected: str, tmp_path: Path
) -> None:
    reports = in_two(tmp_path / "c", halves(first, second))
    assert all(isinstance(report, unickpt.types.SaveReport) for report in reports), reports
    assert chosen(tmp_path / "c") == {"w": expected, "all": "blosc"}
    whole = {"w": np.concatenate([first, second]), "all": weights(99, 999)}
    is_whole(tmp_path / "c", whole)
    for number, half in enumerate((first, second)):
        found = plain(tmp_path / "c", f"w/part_{HALF * number}_0")
        assert np.array_equal(found, half)


def test_all_must_ask_for_it(tmp_path: Path) -> None:
    tree = halves(noise(HALF, 100), noise(HALF, 100))
    errors = in_two(tmp_path / "c", tree, compression=lambda index: ("auto", None)[index])
    assert all(isinstance(error, unickpt.UnickptError) for error in errors), errors
    assert not (tmp_path / "c" / "manifest.ocdbt").exists()


def test_what_a_process_cannot_know_of_the_base_is_stored_raw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 1 cannot open the base of which process 0 takes raw chunks: it compresses nothing."""
    from unickpt.plugins.incremental import base as reuse_base
    from unickpt.plugins.incremental import reference_policy

    same_noise, tree = noise(HALF, 100), halves(noise(HALF, 100), noise(HALF, 100, seed=2))
    assert all(in_two(tmp_path / "a", tree))
    assert chosen(tmp_path / "a") == {"w": "raw", "all": "blosc"}
    real = reuse_base.open_base

    def failing(location: Any, save: Any, *rest: Any, **more: Any) -> Any:
        if save.folder.url.rstrip("/").endswith("00001"):
            raise CheckpointCorrupt("not on this node")
        return real(location, save, *rest, **more)

    monkeypatch.setattr(reference_policy, "open_base", failing)
    tree = halves(same_noise, noise(HALF, 100) % 3)
    reports = in_two(tmp_path / "b", tree, base=tmp_path / "a")
    assert [report.reused_bytes > 0 for report in reports] == [True, False]
    assert chosen(tmp_path / "b") == {"w": "raw", "all": "blosc"}
    is_whole(tmp_path / "b", {"w": np.concatenate([same_noise, noise(HALF, 100) % 3]),
                              "all": weights(99, 999)})  # fmt: skip


def test_a_contradiction_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should it ever happen, nothing is read as what it is not."""
    real = auto.Auto.settle

    def settle(self: auto.Auto, arrays: Any, stored: Any, notes: Any) -> Any:
        notes[0][1]["follows"][0] = False
        return real(self, arrays, stored, notes)

    monkeypatch.setattr(auto.Auto, "settle", settle)
    with pytest.raises(
        unickpt.errors.CoverageError, match="array 'w': some processes compressed it"
    ):
        save(tmp_path / "c", {"w": weights(200, 700)})


# --- bases ----------------------------------------------------------------------------------------


def test_equal_chunks_are_taken_and_keep_their_form(tmp_path: Path) -> None:
    tree = state()
    save(tmp_path / "a", tree)
    tree |= {"noise": tree["noise"].copy(), "w": tree["w"].copy()}
    tree["noise"][1] = 0
    tree["w"][:50] += 1
    report = save(tmp_path / "b", tree, base=tmp_path / "a")
    assert report.reused_bytes > 0.5 * report.bytes
    assert chosen(tmp_path / "b") == chosen(tmp_path / "a")
    is_whole(tmp_path / "b", tree)
    for name in ("w", "noise"):
        assert np.array_equal(plain(tmp_path / "b", name), tree[name])


def test_a_compressed_array_that_no_longer_shrinks_stays_readable(tmp_path: Path) -> None:
    """Its chunks are stored in frames, beside those of the base."""
    tree = {"w": np.zeros(CHUNK * 4, np.uint8)}
    save(tmp_path / "a", tree)
    for step, many in (("b", 3), ("c", 4)):
        tree["w"][: CHUNK * many] = noise(CHUNK * many)
        save(tmp_path / step, tree, base=tmp_path / "a")
        assert chosen(tmp_path / step) == {"w": "blosc"}
        is_whole(tmp_path / step, tree)
        assert np.array_equal(plain(tmp_path / step, "w"), tree["w"])
    save(tmp_path / "d", tree)
    assert chosen(tmp_path / "d") == {"w": "raw"}


def test_a_base_without_compression_is_no_reason_to_go_on_without(tmp_path: Path) -> None:
    tree = {"w": weights(200, 700), "noise": noise(900_000), "small": np.arange(3000)}
    save(tmp_path / "none", tree, compression=None)
    report = save(tmp_path / "auto", tree, base=tmp_path / "none")
    assert chosen(tmp_path / "auto") == {"w": "blosc", "noise": "raw"}
    assert report.reused_bytes <= tree["small"].nbytes  # which is not looked at
    is_whole(tmp_path / "auto", tree)
    report = save(tmp_path / "off", tree, base=tmp_path / "auto", compression=None)
    assert report.reused_bytes >= tree["noise"].nbytes
    assert chosen(tmp_path / "off") == {}
    is_whole(tmp_path / "off", tree)
    save(tmp_path / "zstd", tree, base=tmp_path / "auto", compression="zstd")
    is_whole(tmp_path / "zstd", tree)


def test_patches_and_borrowed_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for links in (True, False):
        if not links:
            monkeypatch.setattr("os.link", refuse)
        tree = {"w": weights(200, 700), "noise": noise(200_000), "n": 0}
        run = tmp_path / str(links)
        save(run / "0", tree, reuse="patch", kept_cost=0.0)
        patched = 0
        for step in range(1, 5):
            tree = {"w": tree["w"].copy(), "noise": tree["noise"].copy(), "n": step}
            tree["w"][step::50, ::9] *= 2
            tree["noise"][step::1000] ^= 1
            base = run / str(step - 1)
            report = save(run / str(step), tree, base=base, reuse="patch", kept_cost=0.0)
            patched += report.patched_chunks
            is_whole(run / str(step), tree)
            assert chosen(run / str(step)) == {"w": "blosc", "noise": "raw"}
        assert patched > 10
        features = unickpt.open(run / "4").index.features
        assert features == (["patches"] if links else ["patches", "references"])
        unickpt.copy(run / "4", tmp_path / f"copy {links}")
        is_whole(tmp_path / f"copy {links}", tree)


@pytest.mark.parametrize("reuse", ["digest", "compare"])
def test_a_run_without_links_borrows(
    reuse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.link", refuse)
    tree = state()
    save(tmp_path / "a", tree)
    tree["noise"] = tree["noise"].copy()
    tree["noise"][0] = 0
    report = save(tmp_path / "b", tree, base=tmp_path / "a", reuse=reuse)
    assert report.bases == ("a",)
    assert chosen(tmp_path / "b") == chosen(tmp_path / "a")
    is_whole(tmp_path / "b", tree)


def test_a_checkpointer_with_tiers(tmp_path: Path) -> None:
    options = SaveOptions(compression="auto", chunk_bytes=CHUNK, fsync=False)
    tree = state()
    fast, run_folder = tmp_path / "fast", tmp_path / "run"
    with Checkpointer(run_folder, local=fast, reuse="digest", keep_last=3, options=options) as run:
        for step in range(4):
            tree = {**tree, "w": tree["w"] * ml_dtypes.bfloat16(2), "step": step}
            run.save(step, tree).result()
        run.wait()
        assert same(run.load(), tree)
    is_whole(tmp_path / "run" / "step_3", tree)
    assert chosen(tmp_path / "run" / "step_3")["w"] == "blosc"


# --- tools ----------------------------------------------------------------------------------------


def test_copies_conversions_and_exports(tmp_path: Path) -> None:
    tree = {"w": weights(200, 700), "noise": noise(200_000)}
    save(tmp_path / "c", tree)
    unickpt.copy(tmp_path / "c", tmp_path / "copy")
    is_whole(tmp_path / "copy", tree)
    assert chosen(tmp_path / "copy") == {"w": "blosc", "noise": "raw"}
    unickpt.convert(tmp_path / "c", tmp_path / "plain", options=SaveOptions(fsync=False))
    is_whole(tmp_path / "plain", tree)
    assert chosen(tmp_path / "plain") == {}
    again = SaveOptions(compression="auto", fsync=False)
    unickpt.convert(tmp_path / "plain", tmp_path / "again", options=again)
    is_whole(tmp_path / "again", tree)
    assert chosen(tmp_path / "again") == {"w": "blosc", "noise": "raw"}
    assert not unickpt.diff(tmp_path / "c", tmp_path / "plain").differences


def test_inspect_says_what_is_compressed(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from unickpt.cli.app import app

    save(tmp_path / "c", state())
    found = CliRunner().invoke(app, ["inspect", str(tmp_path / "c")])
    assert "compression blosc of 5 arrays" in " ".join(found.output.split())
    found = CliRunner().invoke(app, ["inspect", str(tmp_path / "c"), "--json"])
    arrays = {each["name"]: each for each in json.loads(found.output)["arrays"]}
    assert arrays["w"]["codecs"][0]["name"] == "blosc"
    assert (arrays["noise"]["codecs"], arrays["small"]["codecs"]) == ([], [])


def test_a_chunk_is_read_though_a_file_of_others_is_gone(tmp_path: Path) -> None:
    first, second = noise(HALF, 100) % 3, noise(HALF, 100) % 5
    in_two(tmp_path / "c", halves(first, second))
    (victim,) = (tmp_path / "c").glob("processes/*/00001/d/*")
    victim.unlink()
    stored = unickpt.open(tmp_path / "c")
    assert np.array_equal(stored["w"][:HALF], first)
    with pytest.raises(CheckpointCorrupt, match="array 'w'"):
        stored["w"][HALF:]


def test_a_process_alone_chooses_anew_where_its_base_is_lost(tmp_path: Path) -> None:
    tree = {"w": np.zeros((200, 700), ml_dtypes.bfloat16), "noise": noise(200_000)}
    save(tmp_path / "a", tree)
    (tmp_path / "a" / "manifest.ocdbt").write_bytes(b"")
    report = save(tmp_path / "b", tree, base=tmp_path / "a")
    assert report.reused_bytes == 0
    assert chosen(tmp_path / "b") == {"w": "blosc", "noise": "raw"}


def test_nothing_is_looked_at_in_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[int]()
    real_look, real_encode = auto.Compressing.look, auto.Compressing.encode

    def look(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return real_look(*arguments)

    def encode(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return real_encode(*arguments)

    monkeypatch.setattr(auto.Compressing, "look", look)
    monkeypatch.setattr(auto.Compressing, "encode", encode)
    options = SaveOptions(compression="auto", fsync=False)
    unickpt.save_async(tmp_path / "c", state(), options=options).result()
    assert threads
    assert threading.get_ident() not in threads


def test_a_program_without_it_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doors.find
    monkeypatch.setattr(doors, "find", lambda g, name: None if g == "encodings" else real(g, name))
    with pytest.raises(unickpt.errors.PluginError, match="lacks the plug-in 'auto'"):
        SaveOptions(compression="auto")
    SaveOptions(compression="zstd")
