"""GGUF files: read in place, bit for bit; quantized tensors as their bytes, or dequantized."""

from __future__ import annotations

import contextlib
import shutil
import struct
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import foreign, s3_server
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, UnickptError
from unickpt.backends.gguf import reader as gguf
from unickpt.cli.app import app
from unickpt.errors import HintError, UnsupportedFormat
from unickpt.format import file_ranges
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite

KINDS = {"float32": 0, "float16": 1, "int8": 24, "int16": 25, "int32": 26, "int64": 27,
         "float64": 28, "uint8": 24, "bool": 24}  # fmt: skip
AS_FLOAT = {"dequantize": "float32"}


def text(value: str, order: str = "<") -> bytes:
    return struct.pack(f"{order}Q", len(value.encode())) + value.encode()


def packed(tensors: list[tuple[str, tuple[int, ...], int, bytes]], pairs: bytes = b"",
           count: int = 0, version: int = 3, align: int = 32, order: str = "<"
           ) -> bytes:  # fmt: skip
    """A file of tensors: name, shape, type and bytes of each."""
    infos, data = b"", b""
    for name, shape, kind, of in tensors:
        dims = struct.pack(f"{order}I{len(shape)}Q", len(shape), *shape[::-1])
        infos += text(name, order) + dims + struct.pack(f"{order}IQ", kind, len(data))
        data += of + bytes(-len(of) % align)
    head = struct.pack(f"{order}4sIQQ", b"GGUF", version, len(tensors), count) + pairs + infos
    return head + bytes(-len(head) % align) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def of_array(name: str, array: np.ndarray) -> tuple[str, tuple[int, ...], int, bytes]:
    return name, array.shape, KINDS[array.dtype.name], array.tobytes()


def written(path: Path, data: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.gguf").write_bytes(data)
    return path


class TestSuite(ReaderSuite):
    values: Mapping[str, Any] = {}
    has_digests = False

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        written(path, packed([of_array(name, array) for name, array in arrays.items()]))

    def damage(self, path: Path, name: str) -> None:
        file = path / "model.gguf"
        data = bytearray(file.read_bytes())
        at = data.find(name.encode()) + len(name)
        data[at + 4 : at + 12] = struct.pack("<Q", 1 << 40)
        file.write_bytes(data)

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        with foreign.registered(gguf), pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_ranges, "CHUNK_BYTES", 1 << 10)
            # The suite's names are nested, and one of its arrays is of truth values.
            patch.setattr(gguf, "name_component", lambda name: name)
            patch.setitem(gguf._DTYPES, KINDS["bool"], "bool")
            yield


def test_what_gguf_wrote_reads_bit_for_bit() -> None:
    path = foreign.folder("gguf")
    found = unickpt.open(path, hints=AS_FLOAT)
    told = foreign.expected("gguf")["arrays"]
    assert foreign.differences("gguf", found) == [
        "dequantized/blk.0.ffn_up.weight", "blk.0.ffn_up.weight"
    ]  # fmt: skip
    loaded = found["blk.0.ffn_up.weight"]
    facts = told["dequantized/blk.0.ffn_up.weight"]
    assert foreign.digest(loaded[...]) == facts["sha256"]
    assert found.metadata["general.name"] == "tiny"
    assert unickpt.open(path / "model.gguf").reader.version == "3"


def test_what_gguf_quantized_is_dequantized_bit_for_bit(tmp_path: Path) -> None:
    path = foreign.folder("gguf-quantized")
    found = unickpt.open(path, hints=AS_FLOAT)
    assert foreign.differences("gguf-quantized", found) == []
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ä"]
    assert found.metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
    whole = found["Q5_1"][...]
    for begin in range(0, 64, 7):
        for end in range(begin, 64, 9):
            assert np.array_equal(found["Q5_1"][1:, begin:end], whole[1:, begin:end])
    unickpt.convert(found, tmp_path / "ours")
    assert np.array_equal(unickpt.open(tmp_path / "ours")["Q5_1"][...], whole)


def test_chunks_need_not_begin_with_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_ranges, "CHUNK_BYTES", 100)
    found = unickpt.open(foreign.folder("gguf-quantized"), hints=AS_FLOAT)
    assert found.index.arrays["Q8_0"].chunk[-1] % 32
    assert foreign.differences("gguf-quantized", found) == []


def test_without_the_hint_quantized_tensors_are_their_bytes() -> None:
    found = unickpt.open(foreign.folder("gguf-quantized"))
    names = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    assert {name: found[name].shape for name in names} == {
        name: (3, nbytes) for name, nbytes in zip(names, (36, 40, 44, 48, 68), strict=True)
    }
    assert {found[name].dtype.name for name in names} == {"uint8"}
    assert found.metadata["quantized"] == {name: name for name in names}
    command = ["inspect", str(foreign.folder("gguf-quantized")), "--hint", "dequantize=float32"]
    result = CliRunner().invoke(app, [*command, "Q4_0"])
    assert "float32" in result.output


def blocks_of(kind: int, count: int) -> np.ndarray:
    """Random blocks, whose scales are no NaNs."""
    rng = np.random.default_rng(kind)
    found = rng.integers(0, 256, (count, gguf._QUANTIZED[kind].nbytes), np.uint8)
    for at in gguf._QUANTIZED[kind].halves or (0,):
        found[:, at : at + 2] = rng.normal(size=(count, 1)).astype("<f2").view(np.uint8)
    return found


DEQUANTIZED = [kind for kind, of in gguf._QUANTIZED.items() if of.name not in ("Q8_K", "Q1_0")]


@pytest.mark.parametrize("kind", DEQUANTIZED, ids=lambda kind: gguf._QUANTIZED[kind].name)
def test_every_type_is_dequantized_as_the_package_does(kind: int, tmp_path: Path) -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    of = gguf._QUANTIZED[kind]
    if of.name not in GGMLQuantizationType.__members__:
        pytest.skip("this version of the package does not know it")
    assert GGML_QUANT_SIZES[GGMLQuantizationType[of.name]] == (of.elements, of.nbytes)
    blocks = blocks_of(kind, 6)
    path = written(tmp_path / "x", packed([("w", (2, 3 * of.elements), kind, blocks.tobytes())]))
    found = unickpt.open(path, hints=AS_FLOAT)["w"]
    expected = dequantize(blocks.reshape(2, -1), GGMLQuantizationType(kind)).view(np.uint32)
    assert np.array_equal(found[...].view(np.uint32), expected)
    part = found[1:, 7 : of.elements + 3].view(np.uint32)
    assert np.array_equal(part, expected[1:, 7 : of.elements + 3])


@pytest.mark.parametrize(("kind", "name"), [(15, "Q8_K"), (41, "Q1_0"), (99, "unknown type 99")])
def test_what_cannot_be_dequantized_refuses_only_its_tensor(
    kind: int, name: str, tmp_path: Path
) -> None:
    nbytes = gguf._QUANTIZED[kind].nbytes if kind < 99 else 0
    tensors = [("w", (2, 256), kind, bytes(4 * nbytes)), ("v", (2,), 0, struct.pack("<2f", 1, 2))]
    path = written(tmp_path / "x", packed(tensors))
    found = unickpt.open(path, hints=AS_FLOAT)
    assert unickpt.load(found, only=["v"])["v"].tolist() == [1, 2]
    for read in (unickpt.load, lambda opened: opened["w"][...]):
        with pytest.raises(UnsupportedFormat, match=f"'w' (is of|has) the (type )?{name}.*only="):
            read(found)
    assert unickpt.open(path).metadata["quantized"] == {"w": name.removeprefix("unknown ")}
    with pytest.raises(HintError, match="'float16': it can be 'float32'"):
        unickpt.open(path, hints={"dequantize": "float16"})


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "x", packed([("w", (2, 256), 12, bytes(288))]))
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    assert unickpt.open(path)["w"].shape == (2, 144)
    with pytest.raises(UnsupportedFormat, match=r"install unickpt\[gguf\]"):
        unickpt.open(path, hints=AS_FLOAT)


def test_big_endian_files_hold_the_same(tmp_path: Path) -> None:
    import gguf as package

    arrays = {
        "f2": np.arange(6, dtype=np.float16).reshape(2, 3),
        "f4": np.linspace(-1, 1, 5, dtype=np.float32),
        "i8": np.arange(-3, 3, dtype=np.int64),
    }
    (tmp_path / "x").mkdir()
    file = str(tmp_path / "x" / "model.gguf")
    writer = package.GGUFWriter(file, "tiny", endianess=package.GGUFEndian.BIG)
    writer.add_name("model")
    writer.add_token_scores([0.5, -2.0])
    for name, array in arrays.items():
        writer.add_tensor(name, array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = unickpt.open(tmp_path / "x")
    assert found.metadata["general.name"] == "model"
    assert found.metadata["tokenizer.ggml.scores"] == [0.5, -2.0]
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name][...], array)


def test_big_endian_blocks(tmp_path: Path) -> None:
    from gguf.quants import dequantize

    endian = pytest.importorskip("gguf.scripts.gguf_convert_endian")
    if not hasattr(endian, "byteswap_tensors"):
        pytest.skip("this version of the package does not say it in a table")
    byteswap_tensors = endian.byteswap_tensors
    for kind, swap in byteswap_tensors.items():
        of, blocks = gguf._QUANTIZED[int(kind)], blocks_of(int(kind), 2)
        tensor = types.SimpleNamespace(data=blocks.copy().reshape(-1))
        for block in range(2):
            swap(tensor, block * of.nbytes)
        data = packed([("w", (2, of.elements), int(kind), tensor.data.tobytes())], order=">")
        path = written(tmp_path / of.name, data)
        found = unickpt.open(path, hints=AS_FLOAT)["w"][...]
        assert np.array_equal(found.view(np.uint32), dequantize(blocks, kind).view(np.uint32))
        assert unickpt.open(path).metadata["quantized"] == {"w": f"{of.name}, big-endian"}
        assert unickpt.open(path)["w"][...].tobytes() == tensor.data.tobytes()
    path = written(tmp_path / "y", packed([("w", (2, 256), 16, bytes(132))], order=">"))
    with pytest.raises(UnsupportedFormat, match=r"'w' is of the type IQ2_XXS.*big-endian"):
        unickpt.load(unickpt.open(path, hints=AS_FLOAT))


def test_from_s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "gguf")
    data = (foreign.folder("gguf-quantized") / "model.gguf").read_bytes()
    store = resolve("s3://gguf/a").store(paths.context())
    store.write("model.gguf", data).result()
    found = unickpt.open("s3://gguf/a/model.gguf", hints=AS_FLOAT)
    assert foreign.differences("gguf-quantized", found) == []
    store.write("model.gguf", data[:-64]).result()
    with pytest.raises(CheckpointCorrupt, match="Q8_0"):
        unickpt.load("s3://gguf/a/model.gguf")


def test_a_part_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 255, (2000, 64, 34), np.uint8)
    path = written(tmp_path / "x", packed([("w", (2000, 2048), 8, blocks.tobytes())]))
    reads = foreign.count_reads(monkeypatch)
    found = unickpt.open(path, hints=AS_FLOAT)
    assert sum(count for _, count in reads) < 70_000
    reads.clear()
    _ = found["w"][3:5]
    assert sum(count for _, count in reads) < 1_300_000  # of 4.3 MB


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_smaller_count_hides_no_tensors(count: int, tmp_path: Path) -> None:
    tensors = [of_array(name, np.ones(100, np.float32)) for name in "abc"]
    data = bytearray(packed(tensors))
    assert len(unickpt.open(written(tmp_path / "x", bytes(data)))) == 3
    struct.pack_into("<Q", data, 8, count)
    with pytest.raises(CheckpointCorrupt, match=f"the last of its {count} tensors"):
        unickpt.open(written(tmp_path / "x", bytes(data)))


# --- a model in several files ---------------------------------------------------------------------

SPLIT = "tiny-{:05d}-of-00003.gguf"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A model in three files, to be damaged."""
    return Path(shutil.copytree(foreign.folder("gguf-split"), tmp_path / "parts"))


def test_any_file_of_a_model_and_its_folder_are_the_whole_model(
    parts: Path, tmp_path: Path
) -> None:
    for at in (parts, *(parts / SPLIT.format(n) for n in (1, 2, 3))):
        found = unickpt.open(at)
        assert foreign.differences("gguf-split", found) == []
        assert len(found) == 5
        assert found.metadata["general.name"] == "tiny"
        assert not [key for key in found.metadata if key.startswith("split.")]
    unickpt.convert(parts, tmp_path / "own")
    assert foreign.differences("gguf-split", unickpt.open(tmp_path / "own")) == []
    result = CliRunner().invoke(app, ["inspect", str(parts)])
    assert "beside it" not in result.output


def test_an_array_is_read_from_its_file(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = unickpt.open(parts)
    reads = foreign.count_reads(monkeypatch)
    _ = found["blk.0.d.weight"][1:3]
    assert reads == [(SPLIT.format(2), 2 * 3 * 4)]


def test_a_missing_file_of_a_model_is_named(parts: Path, tmp_path: Path) -> None:
    for missing in (1, 2, 3):
        (parts / SPLIT.format(missing)).rename(tmp_path / "away")
        left = [parts / SPLIT.format(n) for n in (1, 2, 3) if n != missing]
        for at in (parts, *left):
            message = f"{SPLIT.format(missing)} is missing, which belongs to tiny-0000"
            with pytest.raises(CheckpointCorrupt, match=message):
                unickpt.open(at)
        (tmp_path / "away").rename(parts / SPLIT.format(missing))


def test_files_of_other_models_are_noticed(parts: Path) -> None:
    first, last = parts / SPLIT.format(1), parts / SPLIT.format(3)
    whole = last.read_bytes()
    shutil.copy(parts / SPLIT.format(2), last)
    with pytest.raises(CheckpointCorrupt, match=r"00003-of-00003.*file 1 of 3.*it is 2 of 3"):
        unickpt.open(parts)
    changed = {"split.no": 2, "split.count": 3, "split.tensors.count": 5}

    def last_with(tensors: list[Any], **more: int) -> None:
        facts = changed | more
        pairs = [pair(key, 2, struct.pack("<H", value)) for key, value in facts.items()]
        last.write_bytes(packed(tensors, b"".join(pairs), len(pairs)))

    other = of_array("x", np.ones(3, np.float32))
    last_with([other, of_array("y", np.ones(3, np.float32))])
    with pytest.raises(CheckpointCorrupt, match="all files have 5 tensors, and they have 6"):
        unickpt.open(parts)
    last_with([of_array("a.weight", np.ones(3, np.float32))])
    with pytest.raises(CheckpointCorrupt, match=r"00003.*two tensors are called 'a.weight'"):
        unickpt.open(first)
    last_with([other], **{"llama.block_count": 2})
    with pytest.raises(CheckpointCorrupt, match=r"another 'llama.block_count'"):
        unickpt.open(parts)
    last.write_bytes(whole[:-40])
    with pytest.raises(CheckpointCorrupt, match="00003-of-00003"):
        unickpt.open(parts)
    last.write_bytes(b"other")
    with pytest.raises(CheckpointCorrupt, match=r"00003-of-00003.* no GGUF file"):
        unickpt.open(first)


def test_two_models_in_a_folder_are_ambiguous(parts: Path) -> None:
    shutil.copy(parts / SPLIT.format(1), parts / "other-00001-of-00003.gguf")
    with pytest.raises(UnsupportedFormat, match="several checkpoints"):
        unickpt.open(parts)
    with pytest.raises(CheckpointCorrupt, match=r"other-00002-of-00003\.gguf is missing"):
        unickpt.open(parts / "other-00001-of-00003.gguf")
    assert len(unickpt.open(parts / SPLIT.format(2))) == 5


def test_a_model_in_several_files_from_s3(
    parts: Path, moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "parts")
    store = resolve("s3://parts/a").store(paths.context())
    for file in parts.iterdir():
        store.write(file.name, file.read_bytes()).result()
    for at in ("", "/" + SPLIT.format(3)):
        assert foreign.differences("gguf-split", unickpt.open(f"s3://parts/a{at}")) == []
    store.write(SPLIT.format(2), None).result()
    with pytest.raises(CheckpointCorrupt, match=f"{SPLIT.format(2)} is missing"):
        unickpt.open(f"s3://parts/a/{SPLIT.format(3)}")


# --- metadata, and what is not read ---------------------------------------------------------------


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    kinds = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
             12: "d"}  # fmt: skip
    pairs = [pair(f"k{kind}", kind, struct.pack(f"<{code}", 1)) for kind, code in kinds.items()]
    pairs += [
        pair("text", 8, text("ä")), pair("nan", 6, struct.pack("<f", float("nan"))),
        pair("list", 9, struct.pack("<IQ3B", 0, 3, 1, 2, 3)),
        pair("general.alignment", 4, struct.pack("<I", 64)),
    ]  # fmt: skip
    array = np.arange(3, dtype=np.int32)
    data = packed([of_array("a", array)] * 1, b"".join(pairs), len(pairs), align=64)
    found = unickpt.open(written(tmp_path / "x", data))
    assert np.array_equal(found["a"][...], array)
    assert [found.metadata[f"k{kind}"] for kind in kinds] == [1] * len(kinds)
    assert (found.metadata["text"], found.metadata["nan"], found.metadata["list"]) == (
        "ä", "nan", [1, 2, 3],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (packed([], version=1), "version 1"),
        (packed([], version=4, order=">"), "version 4"),
        (packed([], pair("split.count", 2, struct.pack("<H", 3)), 1), "one of 3 files.*rename"),
        (packed([], pair("k", 13, b""), 1), "'k' is of the unknown type 13"),
        (packed([], pair("k", 9, struct.pack("<IQ", 9, 1)), 1), "list of lists"),
        (packed([], pair("k", 9, struct.pack("<IQ", 0, 1 << 50)), 1), "too many"),
    ],
)
def test_what_is_not_read_is_named(data: bytes, told: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=told):
        unickpt.open(written(tmp_path / "x", data))


W = ("w", (4,), 0, bytes(16))


@pytest.mark.parametrize(
    "data",
    [
        packed([W, W]), packed([("w", (4,), 8, bytes(34))]), packed([("w", (1 << 62,), 0, b"")]),
        packed([W])[:-17], packed([W])[:30], packed([("w", (1,) * 5, 0, bytes(4))]),
        packed([W, ("v", (4,), 0, bytes(16))]).replace(
            struct.pack("<IQ", 0, 32), struct.pack("<IQ", 0, 8)),
        packed([W, ("v", (4,), 0, bytes(16))]).replace(
            struct.pack("<IQ", 0, 32), struct.pack("<IQ", 0, 1 << 61)),
        packed([], pair("k", 8, struct.pack("<Q", 1 << 40)), 1),
        packed([], pair("k", 4, bytes(4)) * 2, 2),
        packed([W], pair("general.alignment", 4, bytes(4)), 1),
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0),
    ],
)  # fmt: skip
def test_damage_is_named(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"model\.gguf"):
        unickpt.open(written(tmp_path / "x", data))


@given(st.data())
def test_any_damage_is_an_error_or_other_data(data: st.DataObject) -> None:
    pairs = pair("text", 8, text("x")) + pair("list", 9, struct.pack("<IQ3B", 0, 3, 1, 2, 3))
    whole = bytearray(packed([W, ("q", (2, 32), 8, bytes(68))], pairs, 2))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    memory = f"memory://gguf-damage-{id(whole)}"
    store = resolve(memory).store(paths.context())
    store.write("x.gguf", bytes(whole[: data.draw(st.integers(1, len(whole)))])).result()
    for hints in ({}, AS_FLOAT):
        with contextlib.suppress(UnickptError):
            unickpt.load(unickpt.open(memory, hints=hints))
    store.write("x.gguf", None).result()
