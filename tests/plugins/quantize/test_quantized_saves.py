"""Checkpoints with quantised arrays: everything reads them, and nothing reads them wrongly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jsonschema
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import TESTS, s3_server
from support.forging import array, forge_index, index_of, sealed
from support.quantized import codes_of, errors_of, quantized_as
from support.saving import in_job
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, LoadOptions, Rules, SaveOptions, UnsupportedLeaf
from unickpt.arrays import dtypes
from unickpt.cli.app import app
from unickpt.errors import ProcessFailed, UnsupportedFormat
from unickpt.format import chunk_encoding, index_json
from unickpt.format.index import ArrayEntry
from unickpt.plugins.quantize import choice, quantized_chunk
from unickpt.plugins.quantize import codes as kinds
from unickpt.testing.thread_groups import Threads
from unickpt.types import Box, LocalFragments

SMALL = {"chunk_bytes": 4096, "fsync": False}
QUANTIZED = {"optim/**": "uint8", "embed": "int4", "odd/*": "int3", "half": "int2", "r": "bfloat16"}


def tree(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def some(*shape: int, dtype: Any = np.float32) -> Any:
        return np.asarray(rng.standard_normal(shape)).astype(dtype)

    return {
        "optim": {"m": some(40, 300), "v": some(30, 3, 3) ** 2, "deep": {"x": some(dtype=float)}},
        "embed": some(100, 64, dtype=ml_dtypes.bfloat16),
        "odd": {"a": some(7, 11, dtype=np.float16), "empty": some(0, 3)},
        "half": some(33, 70, dtype=np.float64),
        "r": some(50, 50),
        "plain": some(20, 20),
        "count": np.int32(7),
        "step": 7,
    }


def stored(path: object) -> dict[str, Any]:
    """What a checkpoint decodes to."""
    return {name: found[...] for name, found in unickpt.open(str(path)).items()}


def save(path: object, state: Any = None, **options: Any) -> Any:
    given = {"quantize": QUANTIZED, **SMALL, **options}
    return unickpt.save(str(path), state or tree(), options=SaveOptions(**given))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "q"
    save(path)
    return path


# --- what is stored, and how it is told -----------------------------------------------------------


def test_arrays_load_in_their_own_dtypes_near_what_they_were(saved: Path) -> None:
    loaded, given = unickpt.load(str(saved)), tree()
    assert jax.tree.structure(loaded) == jax.tree.structure(given)
    limits = {"uint8": 0.01, "int4": 0.3, "int3": 0.4, "int2": 0.9, "bfloat16": 0.01}
    for name, found in unickpt.open(str(saved)).items():
        entry = unickpt.open(str(saved)).index.arrays[name]
        x: Any = given
        for key in name.split("/"):
            x = x[key]
        assert (found.dtype, found.shape) == (x.dtype, x.shape)
        apart = np.abs(found[...].astype(np.float64) - np.asarray(x).astype(np.float64))
        if codes_of(entry) is None:
            assert not apart.any()
        elif apart.size:
            assert float(apart.max()) == pytest.approx(errors_of(entry)[0], rel=1e-6)
            assert errors_of(entry)[1] <= limits[entry.settings["codes"]]


def test_the_report_the_index_and_inspect_say_the_errors(tmp_path: Path, saved: Path) -> None:
    def shown(*arguments: str) -> str:
        return CliRunner().invoke(app, ["inspect", str(saved), *arguments]).output

    report = save(tmp_path / "q")
    arrays = unickpt.open(str(saved)).index.arrays
    assert report.quantized == {n: errors_of(e) for n, e in arrays.items() if codes_of(e)}
    assert 0 < report.stored_bytes < report.written_bytes / 2
    assert report.writers[0]["stored_bytes"] == report.stored_bytes
    text = f"codes: int4, largest_error: {errors_of(arrays['embed'])[0]:.3g}"
    assert text in " ".join(shown("embed").split())
    assert "TensorStore" not in shown("embed")
    assert "bfloat16+int4" in shown()
    facts = json.loads(shown("embed", "--json"))["quantized"]
    assert facts == {
        "codes": "int4",
        "largest_error": errors_of(arrays["embed"])[0],
        "largest_relative_error": errors_of(arrays["embed"])[1],
    }


def test_the_index_fits_the_schema_and_names_the_feature(saved: Path) -> None:
    body = json.loads(unickpt.open(str(saved)).reader.chunks.read_key("unickpt.json"))
    schema = json.loads((Path(TESTS).parent / "docs" / "index.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(body)
    assert body["features"] == ["quantized"]
    embed, plain = (body["arrays"][name] for name in ("embed", "plain"))
    assert (embed["dtype"], body["codecs"][embed["codec"]]["configuration"]["codes"]) == (
        "bfloat16",
        "int4",
    )
    assert not {"codec", "extra"} & plain.keys()


def test_tensorstore_refuses_the_array_by_name(saved: Path) -> None:
    opened = unickpt.open(str(saved))
    with pytest.raises(UnsupportedFormat, match="'embed', which is stored by the codec"):
        opened["embed"].tensorstore()
    assert opened["embed"].url == ""
    plain = opened["plain"].url
    assert ts.open(plain).result().shape == (20, 20)
    with pytest.raises(ValueError, match=r'"unickpt\.quantized" is not registered'):
        ts.open(plain.replace("plain", "embed")).result()


# --- reading it -----------------------------------------------------------------------------------


def test_parts_and_layouts_have_the_bits_of_the_whole(saved: Path) -> None:
    opened, whole = unickpt.open(str(saved)), stored(saved)
    for name, found in opened.items():
        if found.shape and found.nbytes:
            cut = tuple(slice(n // 3, n - n // 4) for n in found.shape)
            assert found[cut].tobytes() == whole[name][cut].tobytes()


def test_any_mesh_loads_the_same_bits(saved: Path) -> None:
    whole = stored(saved)
    devices = np.array(jax.devices()).reshape(2, 4)
    for spec in (P("a", "b"), P(None, ("b", "a")), P(("a", "b"))):
        sharding = NamedSharding(Mesh(devices, ("a", "b")), spec)
        like = {
            "optim": {"m": jax.ShapeDtypeStruct((40, 300), np.float32, sharding=sharding)},
            "r": jax.ShapeDtypeStruct((50, 50), np.float32),
        }
        if spec == P(None, ("b", "a")):  # which does not divide it evenly
            like["optim"]["m"] = jax.ShapeDtypeStruct((40, 300), np.float32)
        loaded = unickpt.load(str(saved), like, strict=False)
        for shard in loaded["optim"]["m"].addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole["optim/m"][shard.index].tobytes()
        assert np.asarray(loaded["r"]).tobytes() == whole["r"].tobytes()


def test_rules_and_casts_see_the_decoded_elements(saved: Path) -> None:
    whole = stored(saved)
    rules = Rules.parse("embed [v d] <-> table [d v]\nr [(a b) c] <-> r/{a} [b c] where a=5")
    like = {
        "table": np.zeros((64, 100), np.float32),
        "r": {str(k): np.zeros((10, 50), np.float32) for k in range(5)},
    }
    loaded = unickpt.load(str(saved), like, rules=rules, strict=False, cast=True)
    assert (loaded["table"] == whole["embed"].astype(np.float32).T).all()
    assert (loaded["r"]["3"] == whole["r"][30:40]).all()


def test_processes_that_exchange_load_the_same_bits(saved: Path) -> None:
    def work(index: int, options: LoadOptions) -> Any:
        return unickpt.load(str(saved), options=options)

    for loaded in Threads(3).run(work):
        assert loaded["embed"].tobytes() == stored(saved)["embed"].tobytes()
        assert loaded["optim"]["m"].tobytes() == stored(saved)["optim/m"].tobytes()


def test_object_storage_has_the_same_bits(
    moto: str, monkeypatch: pytest.MonkeyPatch, saved: Path
) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "quantized")
    save("s3://quantized/q")
    assert unickpt.verify("s3://quantized/q").ok
    assert unickpt.diff(str(saved), "s3://quantized/q").read_bytes == 0
    assert stored("s3://quantized/q")["embed"].tobytes() == stored(saved)["embed"].tobytes()
    cut = unickpt.open("s3://quantized/q")["optim/m"][5:9, 200:]
    assert cut.tobytes() == stored(saved)["optim/m"][5:9, 200:].tobytes()


# --- tools ----------------------------------------------------------------------------------------


def test_verify_finds_a_changed_byte_of_a_code(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    save(tmp_path / "q", {"x": x}, quantize={"x": "int4"}, chunk_bytes=1 << 20)
    assert unickpt.verify(str(tmp_path / "q")).ok
    (reader,) = [unickpt.open(str(tmp_path / "q")).reader]
    (part,) = unickpt.open(str(tmp_path / "q"))["x"].parts
    where: Any = reader.chunk_values.where(reader.index.arrays["x"], part, 0)  # type: ignore[attr-defined]
    file = tmp_path / "q" / where.path
    data = bytearray(file.read_bytes())
    data[where.offset + where.length // 2] ^= 1
    file.write_bytes(bytes(data))
    (damage,) = unickpt.verify(str(tmp_path / "q")).damage
    assert damage.array == "x"
    assert "do not match their digest" in damage.reason
    with pytest.raises(CheckpointCorrupt, match="'x'"):
        unickpt.load(str(tmp_path / "q"))


def test_convert_makes_plain_arrays_and_quantised_ones(tmp_path: Path, saved: Path) -> None:
    plain, again = str(tmp_path / "plain"), str(tmp_path / "again")
    unickpt.convert(str(saved), plain)
    arrays = unickpt.open(plain).index.arrays
    assert not any(codes_of(entry) for entry in arrays.values())
    assert unickpt.diff(str(saved), plain).same
    save(tmp_path / "exact", quantize={})
    unickpt.convert(
        str(tmp_path / "exact"), again, options=SaveOptions(quantize=QUANTIZED, **SMALL)
    )
    assert unickpt.diff(str(saved), again).same
    with pytest.raises(ValueError, match="quantize are options of unickpt's own format"):
        unickpt.convert(
            str(saved), tmp_path / "n", to="npz", options=SaveOptions(quantize=QUANTIZED)
        )
    rules = Rules.parse("step <-> drop\nembed <-> drop\ndefault {leaf...} <-> {leaf...}")
    unickpt.convert(str(saved), tmp_path / "n.npz", to="npz", rules=rules)
    assert np.load(tmp_path / "n.npz")["optim/m"].tobytes() == stored(saved)["optim/m"].tobytes()


def test_diff_compares_decoded_elements(tmp_path: Path, saved: Path) -> None:
    save(tmp_path / "same")
    found = unickpt.diff(str(saved), str(tmp_path / "same"))
    assert (found.same, found.read_bytes) == (True, 0)
    save(tmp_path / "exact", quantize={})
    rows = {row.name: row for row in unickpt.diff(str(saved), str(tmp_path / "exact")).differences}
    entries = unickpt.open(str(saved)).index.arrays
    assert rows.keys() == {n for n, e in entries.items() if codes_of(e) and errors_of(e)[0]}
    assert rows["optim/m"].max_abs == pytest.approx(errors_of(entries["optim/m"])[0], rel=1e-5)


def test_arrays_of_other_codes_are_not_equal_by_their_digests(tmp_path: Path) -> None:
    x = np.arange(512, dtype=np.float32)
    save(tmp_path / "a", {"x": x}, quantize={"x": "uint8"})
    one = unickpt.open(str(tmp_path / "a")).reader
    from unickpt.rules.view import same_digests

    entry = one.index.arrays["x"]
    assert same_digests(one, entry, one, entry)
    for other in (quantized_as("int4")["encoding"], None):
        assert not same_digests(one, entry, one, dataclasses.replace(entry, encoding=other))


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", ["digest", "compare"])
def test_equal_chunks_of_a_base_are_not_written_again(
    tmp_path: Path, saved: Path, reuse: str
) -> None:
    state = tree()
    state["embed"] = state["embed"].copy()
    state["embed"][:3] = 9
    report = save(tmp_path / "next", state, base=str(saved), reuse=reuse)
    large = sum(e.nbytes for e in unickpt.open(str(saved)).index.arrays.values())
    assert report.reused_bytes > large * 0.5
    assert report.written_bytes + report.reused_bytes == report.bytes
    assert unickpt.verify(str(tmp_path / "next")).ok
    again = save(tmp_path / "full", state)
    assert again.reused_bytes == 0
    assert unickpt.diff(str(tmp_path / "next"), str(tmp_path / "full")).read_bytes == 0
    both = [unickpt.open(str(tmp_path / name)).index.arrays for name in ("next", "full")]
    assert [e.extra for e in both[0].values()] == [e.extra for e in both[1].values()]


@pytest.mark.parametrize("reuse", ["digest", "compare"])
def test_equal_chunks_of_a_base_are_borrowed_where_there_are_no_links(
    tmp_path: Path, saved: Path, reuse: str
) -> None:
    save(f"memory://quantized/{reuse}/a")
    state = tree()
    state["plain"] += 1
    report = save(
        f"memory://quantized/{reuse}/b", state, base=f"memory://quantized/{reuse}/a", reuse=reuse
    )
    assert report.reused_bytes > report.bytes * 0.5
    assert unickpt.verify(f"memory://quantized/{reuse}/b").ok
    found = unickpt.diff(str(saved), f"memory://quantized/{reuse}/b")
    assert [row.name for row in found.differences] == ["plain"]
    unickpt.copy(f"memory://quantized/{reuse}/b", tmp_path / "copy")
    assert unickpt.verify(str(tmp_path / "copy")).ok
    assert unickpt.diff(f"memory://quantized/{reuse}/b", str(tmp_path / "copy")).read_bytes == 0


def test_a_run_reuses_and_copies_quantised_steps(tmp_path: Path) -> None:
    options = SaveOptions(quantize=QUANTIZED, **SMALL)
    with unickpt.Checkpointer(
        tmp_path / "run", local=tmp_path / "local", reuse=True, options=options
    ) as run:
        for step in (1, 2):
            report = run.save(step, tree() | {"step": step}).result()
        run.wait()
    assert report.reused_bytes > report.bytes * 0.5
    save(tmp_path / "q")
    for root in ("run", "local"):
        assert unickpt.verify(str(tmp_path / root / "step_2")).ok
        found = unickpt.diff(str(tmp_path / "q"), str(tmp_path / root / "step_2"))
        assert [row.name for row in found.differences] == ["step"]


def test_chunks_of_other_codes_are_not_reused(tmp_path: Path, saved: Path) -> None:
    others = {"optim/**": "int4", "embed": None}
    report = save(tmp_path / "next", base=str(saved), quantize=others)
    assert unickpt.load(str(tmp_path / "next"))["embed"].tobytes() == tree()["embed"].tobytes()
    names = {"plain", "count"}
    arrays = unickpt.open(str(saved)).index.arrays
    assert report.reused_bytes <= sum(arrays[name].nbytes for name in names)


def test_a_save_in_the_background_stores_the_same(tmp_path: Path, saved: Path) -> None:
    for staging in ("copy", "auto", "lazy"):
        options = SaveOptions(quantize=QUANTIZED, staging=staging, **SMALL)  # type: ignore[arg-type]
        state = tree()
        pending = unickpt.save_async(str(tmp_path / staging), state, options=options)
        pending.wait_staged()
        state["embed"][...] = 0
        pending.result()
        assert unickpt.diff(str(saved), str(tmp_path / staging)).read_bytes == 0


def test_compression_is_of_the_other_arrays(tmp_path: Path, saved: Path) -> None:
    save(tmp_path / "z", compression="zstd")
    assert unickpt.verify(str(tmp_path / "z")).ok
    assert unickpt.diff(str(saved), str(tmp_path / "z")).read_bytes == 0


def test_a_checkpoint_with_memory_for_one_chunk_saves_and_loads(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((64, 1 << 12)).astype(np.float32)
    save(tmp_path / "q", {"x": x}, quantize={"x": "int3"}, budget_bytes=1, chunk_bytes=1 << 16)
    assert unickpt.verify(str(tmp_path / "q")).ok


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "reason"),
    [
        ({"opt/**": "uint8"}, "'opt/\\*\\*' matches no array"),
        ({"*": "uint8"}, r"'count': SaveOptions.quantize\['\*'\] would .*, but it counts steps"),
        ({"n": "int4"}, "'n': .* but int64 is not one of float32"),
        ({"flag": "int4"}, "'flag': .* but bool is not one of"),
        ({"z": "int4"}, "'z': .* but complex64 is not one of"),
        ({"f8": "int4"}, "'f8': .* but float8_e4m3fn is not one of"),
        ({"key": "int4"}, "'key': .* but it holds PRNG keys"),
        ({"opt.step": "int4"}, "'opt.step': .* but it counts steps"),
        ({"half": "bfloat16"}, "'half': .* but float16 has no more bytes than bfloat16"),
        ({"*al*": "int4", "half": "int2"}, "'half' matches no array, or only"),
        ({"seven": "int4"}, "'seven' matches no array"),
    ],
)
def test_what_cannot_be_quantised_is_refused_first(
    patterns: dict[str, str], reason: str, tmp_path: Path
) -> None:
    state = {
        "count": np.float32(3),
        "n": np.arange(3),
        "flag": np.ones(3, bool),
        "z": np.ones(3, np.complex64),
        "f8": np.ones(3, ml_dtypes.float8_e4m3fn),
        "key": jax.random.key(0),
        "opt.step": np.float32(3),
        "half": np.ones(3, np.float16),
        "seven": 7,
    }
    with pytest.raises(UnsupportedLeaf, match=reason):
        save(tmp_path / "q", state, quantize=patterns)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ({"a": "int5"}, ValueError, "'int5', not one of uint8"),
        ({"a": 4}, ValueError, "is 4, not one of"),
        ({4: "int4"}, TypeError, "must be a dict of patterns"),
        ("int4", TypeError, "must be a dict of patterns"),
    ],
)
def test_options_are_checked(given: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        SaveOptions(quantize=given)


def test_the_first_pattern_that_matches_counts() -> None:
    names = ["a", "a/b", "a/b/c", "x/b", "opt/w/m", "opt/w/step", "l.0.w"]

    def chosen(patterns: dict[str, Any]) -> dict[str, str]:
        entries = [ArrayEntry(name, (2,), "float32", (2,)) for name in names]
        found = {entry.name: choice.codes_for(patterns, entry) for entry in entries}
        return {name: codes for name, codes in found.items() if codes}

    assert chosen({"a/**": "int4"}).keys() == {"a", "a/b", "a/b/c"}
    assert chosen({"a/*": "int4"}).keys() == {"a/b"}
    assert chosen({"**/b": "int4"}).keys() == {"a/b", "x/b"}
    assert chosen({"**": "int4"}).keys() == set(names)
    assert chosen({"*": "int4"}).keys() == {"a", "l.0.w"}
    assert chosen({"l.*.w": "int4"}).keys() == {"l.0.w"}
    assert chosen({"**/step": None, "opt/**": "int2"}) == {"opt/w/m": "int2"}
    assert chosen({"a/b/c": "int2", "**/c": "int3", "a/**": "int4"})["a/b/c"] == "int2"


def test_elements_that_are_not_finite_name_their_array(tmp_path: Path) -> None:
    state = {"w": np.array([1, np.nan], np.float32)}
    with pytest.raises(UnsupportedLeaf, match=r"array 'w' \(float32\[2\]\) .* are not finite"):
        save(tmp_path / "q", state, quantize={"w": "int4"})
    assert not (tmp_path / "q").exists()


# --- several processes ----------------------------------------------------------------------------


def shared(path: Path, count: int, work: Callable[[int], Any], **options: Any) -> list[Any]:
    def run(group: Any) -> Any:
        given = SaveOptions(group=group, timeout_s=20, **SMALL, **options)
        return unickpt.save(str(path), work(group.index), options=given)

    return in_job(count, run)


def test_processes_save_their_parts_and_the_largest_error_counts(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((9, 400)).astype(np.float32)
    x[:3] *= 50

    def own(index: int) -> Any:
        rows = slice(3 * index, 3 * index + 3)
        return {
            "x": LocalFragments((9, 400), [(Box((rows.start, 0), (rows.stop, 400)), x[rows])]),
            "both": x[0],
        }  # fmt: skip

    reports = shared(tmp_path / "q", 3, own, quantize={"x": "int4", "both": "uint8"})
    found = unickpt.open(str(tmp_path / "q"))
    errors = errors_of(found.index.arrays["x"])
    assert errors[0] == np.abs(found["x"][...] - x).max() > 1
    assert reports[0].quantized["x"] == errors
    assert unickpt.verify(str(tmp_path / "q")).ok
    whole = np.concatenate([values_of(x[i : i + 3]) for i in (0, 3, 6)])
    assert found["x"][...].tobytes() == whole.tobytes()


def values_of(x: Any) -> Any:
    out = np.empty_like(x)
    quantized_chunk.decode(quantized_chunk.encode(x, "int4").data, out, "int4")
    return out


def test_replicas_are_compared_as_they_are_stored(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((60, 400)).astype(np.float32)
    found = shared(
        tmp_path / "q", 2, lambda index: {"x": x}, quantize={"x": "int4"}, check_replicas=True
    )
    assert not [each for each in found if isinstance(each, Exception)]
    assert unickpt.verify(str(tmp_path / "q")).ok
    assert 0 < found[0].written_bytes < found[0].bytes


def test_a_pattern_must_match_an_array_of_some_process(tmp_path: Path) -> None:
    def stage(index: int) -> Any:
        return {f"stage{index}": np.arange(6, dtype=np.float32)}

    found = shared(tmp_path / "q", 2, stage, quantize={"stage1": "int4"})
    assert not [each for each in found if isinstance(each, Exception)]
    assert codes_of(unickpt.open(str(tmp_path / "q")).index.arrays["stage1"]) == "int4"
    found = shared(tmp_path / "bad", 2, stage, quantize={"stage2": "int4"})
    assert isinstance(found[0], UnsupportedLeaf)
    assert isinstance(found[1], ProcessFailed)
    assert "'stage2' matches no array" in str(found[1])
    assert not (tmp_path / "bad" / "manifest.ocdbt").exists()


def test_a_process_that_cannot_quantise_fails_the_save(tmp_path: Path) -> None:
    def own(index: int) -> Any:
        return {f"w{index}": np.full(5, np.nan if index else 1, np.float32)}

    found = shared(tmp_path / "q", 2, own, quantize={"*": "int4"})
    assert isinstance(found[1], UnsupportedLeaf)
    assert isinstance(found[0], ProcessFailed)
    assert "array 'w1'" in str(found[0])


def test_processes_must_agree_on_the_codes(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        codes = "int4" if group.index else "int3"
        options = SaveOptions(group=group, timeout_s=20, quantize={"w": codes}, **SMALL)
        return unickpt.save(str(tmp_path / "q"), {"w": np.ones(3)}, options=options)

    found = in_job(2, work)
    assert r"float64+int3" in str(found[0])
    assert r"float64+int4" in str(found[0])


# --- hostile checkpoints --------------------------------------------------------------------------


def quantised(shape: tuple[int, ...], **fields: Any) -> Any:
    return array("w", shape, **quantized_as("int4"), **fields)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (None, "no bytes stored, 136 expected"),
        (b"", "0 bytes stored, 136 expected"),
        (b"\0" * 135, "135 bytes stored, 136 expected"),
        (b"\0" * 137, "137 bytes stored, 136 expected"),
        (np.float32([0, np.nan]).tobytes() + b"\0" * 128, "a scale is negative or NaN"),
        (np.float32([np.inf, 1]).tobytes() + b"\0" * 128, "range of a block is not finite"),
    ],
)
def test_a_bad_chunk_is_damage(chunk: bytes | None, reason: str, tmp_path: Path) -> None:
    index, table = index_of(quantised((256,)))
    forge_index(tmp_path / "c", index, table, **({} if chunk is None else {"w/part_0/c/0": chunk}))
    for verify in (True, False):
        with pytest.raises(CheckpointCorrupt, match=f"array 'w' .*{reason}"):
            unickpt.load(str(tmp_path / "c"), options=LoadOptions(verify=verify))
    assert reason in "".join(map(str, unickpt.verify(str(tmp_path / "c")).damage))


def test_no_memory_is_given_for_a_chunk_that_nothing_backs(tmp_path: Path) -> None:
    index, table = index_of(quantised((1 << 40,)))
    forge_index(tmp_path / "c", index, table, **{"w/part_0/c/0": b"\0" * 1000})
    with pytest.raises(CheckpointCorrupt, match="no bytes stored"):
        unickpt.load(str(tmp_path / "c"))
    with pytest.raises(CheckpointCorrupt, match="no bytes stored"):
        unickpt.open(str(tmp_path / "c"))["w"].read(Box((0,), (1,)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"codecs": [{"name": "unickpt.quantized", "configuration": {}}]}, "has the settings {}"),
        ({"codes": "int5"}, "'int5' is not one of"),
        ({"codes": ""}, "'' is not one of"),
        ({"dtype": "int32"}, "int32 is not one of float32"),
        ({"dtype": "bfloat16", "codes": "bfloat16"}, "has no more bytes"),
        ({"dtype": "float32+int4"}, "unknown dtype"),
        ({"errors": None}, "its errors are None"),
        ({"errors": [1]}, r"array 'w': its errors are \[1\]"),
        ({"errors": [1, -1]}, r"array 'w': its errors are \[1, -1\]"),
        ({"errors": [True, 0]}, r"array 'w': its errors are \[True, 0\]"),
        ({"errors": ["1", 0]}, r"array 'w': its errors are \['1', 0\]"),
        ({"extra": {}}, "array 'w': its errors are None"),
    ],
)
def test_a_bad_entry_is_damage(change: dict[str, Any], reason: str) -> None:
    index, _ = index_of(quantised((256,)))
    body = json.loads(index_json.encode(index))
    del body["xxh3"]
    assert codes_of(index_json.decode(sealed(body), "here").arrays["w"]) == "int4"
    if "codes" in change:
        body["codecs"][0]["configuration"]["codes"] = change.pop("codes")
    if "errors" in change:
        change = {"extra": {"quantized": {"errors": change["errors"]}}}
    (body if "codecs" in change else body["arrays"]["w"]).update(change)
    with pytest.raises(CheckpointCorrupt, match=reason):
        index_json.decode(sealed(body), "here")


def test_the_zarr_metadata_names_a_codec_that_nobody_knows() -> None:
    entry = quantised((256,))
    (part,) = unickpt.format.chunk_grid.parts(entry)
    found = chunk_encoding.zarr_metadata(entry, part)
    assert found["codecs"] == [{"name": "unickpt.quantized", "configuration": {"codes": "int4"}}]
    assert found["data_type"] == "float32"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_every_dtype_and_code_is_saved_and_loaded(dtype: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((37, 91)).astype(dtypes.from_name(dtype))
    fit = [c for c in kinds.NAMES if c in kinds.BITS or dtype in ("float32", "float64")]
    save(tmp_path / "q", dict.fromkeys(fit, x), quantize={c: c for c in fit[:1]})
    state = {codes: x.copy() for codes in fit}
    save(tmp_path / "p", state, quantize={codes: codes for codes in fit}, chunk_bytes=1 << 20)
    for codes in fit:
        out = np.empty_like(x)
        quantized_chunk.decode(quantized_chunk.encode(x, codes).data, out, codes)
        assert unickpt.load(str(tmp_path / "p"))[codes].tobytes() == out.tobytes()
