"""Checkpoints in archives, read in place: of NeMo, TorchServe and Stable-Baselines3, and others."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import tarfile
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import file_writers, foreign, s3_server

import unickpt
from unickpt import CheckpointCorrupt
from unickpt.backends._files import archives
from unickpt.errors import UnsupportedFormat
from unickpt.extend import Damaged
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite, nested


def tarred(
    members: Mapping[str, bytes], mode: str = "w", format: int = tarfile.PAX_FORMAT
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=format) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zipped(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def nemo(weights: bytes, mode: str = "w") -> bytes:
    members = {"./model_config.yaml": b"target: x\n", "./model_weights.ckpt": weights}
    return tarred(members, mode)


class OfArchives(ReaderSuite):
    has_digests = False
    has_checksums = True

    def pack(self, weights: bytes) -> bytes:
        raise NotImplementedError

    def unpack(self, data: bytes) -> bytes:
        return data

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        path.mkdir()
        weights = file_writers.torch_zip(nested({**arrays, **values}))
        (path / "asr.nemo").write_bytes(self.pack(weights))

    def damage(self, path: Path, name: str) -> None:
        data = bytearray(self.unpack((path / "asr.nemo").read_bytes()))
        at = data.find(b"archive/data/0")
        data[at - 30 : at - 26] = b"xxxx"  # the local header of its storage
        (path / "asr.nemo").write_bytes(gzip.compress(data) if self.compressed else bytes(data))

    compressed = False


class TestTar(OfArchives):
    def pack(self, weights: bytes) -> bytes:
        return nemo(weights)


class TestGzip(OfArchives):
    compressed = True

    def pack(self, weights: bytes) -> bytes:
        return nemo(weights, "w:gz")

    def unpack(self, data: bytes) -> bytes:
        return gzip.decompress(data)

    def test_a_changed_byte_is_noticed_where_there_are_checksums(
        self, path: Path, tmp_path: Path
    ) -> None:
        """In what is decompressed, which is packed again here."""
        file = path / "asr.nemo"
        file.write_bytes(gzip.decompress(file.read_bytes()))
        super().test_a_changed_byte_is_noticed_where_there_are_checksums(path, tmp_path)


# --- each kind ------------------------------------------------------------------------------------

W = np.arange(300_000, dtype=np.float32).reshape(300, 1000)
STATE = {"w": W, "step": np.array(7), "none": np.zeros((0, 3), np.float32)}
TORCH = file_writers.torch_zip(STATE)
SAFETENSORS = file_writers.safetensors(STATE)
INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
FILES = {
    "a.nemo": nemo(TORCH),
    "gzip.nemo": nemo(TORCH, "w:gz"),
    "long.tar": tarred({"x" * 150 + "/model.pt": TORCH}, format=tarfile.GNU_FORMAT),
    "old.tar": tarred({"model/model.pt": TORCH}, format=tarfile.USTAR_FORMAT),
    "m.mar": zipped({"MAR-INF/MANIFEST.json": b"{}", "model.pt": TORCH, "handler.py": b""}),
    "deflated.mar": zipped(
        {"MAR-INF/MANIFEST.json": b"{}", "model.pt": TORCH}, zipfile.ZIP_DEFLATED
    ),
    "hf.zip": zipped({"hf/config.json": b"{}", "hf/model.safetensors": SAFETENSORS}),
    "both.zip": zipped({"config.json": b"{}", "model.safetensors": SAFETENSORS, "x.bin": b"x"}),
    "model.pt.gz": gzip.compress(TORCH),
    "params.gz": gzip.compress(pickle.dumps(STATE)),
    "twice.gz": gzip.compress(TORCH[:1000]) + gzip.compress(TORCH[1000:]),
}


def check(found: unickpt.Checkpoint) -> None:
    assert set(found) == set(STATE)
    for name, array in STATE.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert found[name][...].tobytes() == array.tobytes()
    assert found["w"][200, 3:5].tolist() == [200_003, 200_004]


@pytest.mark.parametrize("name", FILES)
def test_bit_for_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_SPACING", 50_000)
    (tmp_path / name).write_bytes(FILES[name])
    found = unickpt.open(tmp_path / name)
    check(found)
    assert pickle.loads(pickle.dumps(found))["w"][0, 1] == 1
    assert unickpt.verify(tmp_path / name).ok
    unickpt.convert(tmp_path / name, tmp_path / "ours")
    check(unickpt.open(tmp_path / "ours"))


def test_a_folder_of_a_distributed_checkpoint_in_a_nemo_file(tmp_path: Path) -> None:
    folder = foreign.unpacked("mc-optim-tp2-pp2", tmp_path)
    with tarfile.open(tmp_path / "x.nemo", "w") as archive:
        archive.add(folder, "model_weights")
    found = unickpt.open(tmp_path / "x.nemo")
    assert found.reader.format == "megatron"
    assert unickpt.diff(found, folder).same


def test_stable_baselines(tmp_path: Path) -> None:
    data = {"gamma": 0.99, "policy_class": {":type:": "abc", ":serialized:": "gA=="}}
    members = {
        "data": json.dumps(data).encode(),
        "pytorch_variables.pth": file_writers.torch_zip({}),
        "policy.pth": TORCH,
        "policy.optimizer.pth": file_writers.torch_zip({"state": {0: {"exp_avg": W}}}),
        "_stable_baselines3_version": b"2.9.2",
    }
    with zipfile.ZipFile(tmp_path / "ppo.zip", "w") as archive:
        for name, content in members.items():
            with archive.open(name, "w", force_zip64=True) as file:
                file.write(content)
    found = unickpt.open(tmp_path / "ppo.zip")
    assert found.reader.format == "stable-baselines3"
    loaded = unickpt.load(found)
    assert set(loaded) == {"data", "policy", "policy.optimizer", "pytorch_variables"}
    assert loaded["data"] == data
    assert loaded["policy"]["w"].tobytes() == W.tobytes()
    assert loaded["policy.optimizer"]["state"][0]["exp_avg"].tobytes() == W.tobytes()
    (tmp_path / "bad.zip").write_bytes(zipped({**members, "data": b"{"}))
    with pytest.raises(CheckpointCorrupt, match=r"bad\.zip: its member data is damaged"):
        unickpt.open(tmp_path / "bad.zip")


def test_ranges_alone_are_read_of_what_is_not_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.nemo").write_bytes(FILES["a.nemo"])
    reads = foreign.count_reads(monkeypatch)
    found = unickpt.open(tmp_path)
    assert found["w"][7, 7] == 7007
    assert sum(count for _, count in reads) < 30_000


def test_all_of_it_from_s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "archive-files")
    store = resolve("s3://archive-files/a").store(paths.context())
    for name in ("a.nemo", "gzip.nemo", "deflated.mar", "model.pt.gz"):
        store.write(name, FILES[name]).result()
        check(unickpt.open(f"s3://archive-files/a/{name}"))


# --- what is refused ------------------------------------------------------------------------------


def opened(path: Path, data: bytes) -> unickpt.Checkpoint:
    path.write_bytes(data)
    return unickpt.open(path)


def test_several_checkpoints_in_an_archive_are_named(tmp_path: Path) -> None:
    for name, members in {
        "x.zip": {"a/model.pt": TORCH, "b/model.pt": TORCH},
        "y.zip": {"a.pt": TORCH, "b.pt": TORCH},
    }.items():
        with pytest.raises(UnsupportedFormat, match=rf"{name}.*several checkpoints.*unpack it"):
            opened(tmp_path / name, zipped(members))


@pytest.mark.parametrize("name", ["x.tar", "x.zip", "x.tar.gz", "x.gz"])
def test_an_archive_without_a_checkpoint_is_named_with_the_way_out(
    name: str, tmp_path: Path
) -> None:
    members = {"a.jpg": b"a" * 3000, "b.txt": b"b"}
    data = {
        "x.tar": tarred(members), "x.tar.gz": tarred(members, "w:gz"), "x.zip": zipped(members),
        "x.gz": gzip.compress(b"text"),
    }[name]  # fmt: skip
    with pytest.raises(UnsupportedFormat, match=r"(tar file|zip file|gzip).*(unpack|gunzip)"):
        opened(tmp_path / name, data)


# --- damage ---------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_in_an_archive_is_damage_with_its_name(tmp_path: Path) -> None:
    bad = TORCH[:-200]
    for name, data in {
        "x.nemo": nemo(bad), "x.nemo.gz": nemo(bad, "w:gz"), "x.mar": zipped({"m.pt": bad}),
        "x.pt.gz": gzip.compress(bad),
    }.items():  # fmt: skip
        with pytest.raises(CheckpointCorrupt, match=rf"{name}: .*(ckpt|pt)"):
            opened(tmp_path / name, data)


@pytest.mark.parametrize("name", ["a.nemo", "gzip.nemo", "m.mar", "deflated.mar", "model.pt.gz"])
def test_every_end_of_an_archive_is_damage(name: str, tmp_path: Path) -> None:
    data = FILES[name]
    for end in [600, 1500, *range(5000, len(data) - 20_000, 1 + len(data) // 9)]:
        with pytest.raises((CheckpointCorrupt, UnsupportedFormat), match=name):
            opened(tmp_path / name, data[:end])["w"][...]


def forged(size: bytes) -> bytes:
    """A tar file with a member of such a size."""
    data = bytearray(nemo(TORCH))
    data[124:136] = size.ljust(12, b"\0")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


@pytest.mark.parametrize(
    "size", [b"77777777777", b"\x80" + (1 << 62).to_bytes(11, "big"), b"\xff" * 12, b"abc"]
)
def test_a_hostile_size_in_a_tar_file_is_damage(size: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"x\.nemo: x\.nemo: its (member|headers)"):
        opened(tmp_path / "x.nemo", forged(size))


def test_a_damaged_header_is_not_the_end_of_a_tar_file(tmp_path: Path) -> None:
    data = bytearray(nemo(TORCH))
    data[1024 + 100] ^= 1  # of the second member
    with pytest.raises(CheckpointCorrupt, match=r"its headers are damaged: no member at .*1024"):
        opened(tmp_path / "x.nemo", bytes(data))


# --- decompression --------------------------------------------------------------------------------


def in_memory(data: bytes) -> archives.ArchivePart:
    def read_into(offset: int, out: memoryview) -> None:
        out[:] = data[offset : offset + len(out)]

    return archives.ArchivePart(len(data), read_into)


def test_any_place_of_what_is_compressed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_SPACING", 3000)
    monkeypatch.setattr(archives, "_STEP", 1000)
    monkeypatch.setattr(archives, "_MOST_STATES", 20)
    rng = random.Random(5)
    data = b"".join(rng.choice([b"a" * 500, rng.randbytes(300)]) for _ in range(600))
    compressed = gzip.compress(data[:90_000]) + gzip.compress(data[90_000:])
    found = archives.Inflated(in_memory(compressed), archives.WITH_HEADER, "x.gz")
    assert found.head(700) == data[:700]

    def read(_: int) -> bool:
        at = rng.randrange(len(data))
        out = bytearray(rng.randrange(min(5000, len(data) - at)))
        found.read_into(at, memoryview(out))
        return bytes(out) == data[at : at + len(out)]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(300)))
    assert found.all().size == len(data)
    assert len(found._states) <= 20
    with pytest.raises(Damaged, match=r"x\.gz ends after"):
        found.read_into(len(data) - 5, memoryview(bytearray(6)))


@pytest.mark.parametrize("change", [slice(-8, -4), slice(500, 510)])
def test_what_was_changed_in_a_file_of_gzip_is_noticed_at_its_end(change: slice) -> None:
    data = bytearray(gzip.compress(random.Random(1).randbytes(5000)))
    data[change] = bytes(b ^ 255 for b in data[change])
    found = archives.Inflated(in_memory(bytes(data)), archives.WITH_HEADER, "x.gz")
    with pytest.raises(Damaged, match=r"x\.gz cannot be decompressed"):
        found.all()
