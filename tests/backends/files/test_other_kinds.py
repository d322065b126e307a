"""Sound files of kinds that are not read: each error names the kind and the way out."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support import file_writers

import unickpt
from unickpt import CheckpointCorrupt
from unickpt.backends._files import other_kinds
from unickpt.errors import UnsupportedFormat

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"
ARRAY = np.ones((3, 2), np.float32)


def npy(*arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    for array in arrays:
        np.save(out, array)
    return out.getvalue()


def zipped(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/"), data)
    return out.getvalue()


def tarred(*names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 700
            archive.addfile(info, io.BytesIO(bytes(700)))
    return out.getvalue()


WEIGHTS = file_writers.torch_zip({"w": 1})
THINC = b"\x84\xa5nodes\x91\x80\xa5attrs\x91\x80\xa6params\x91\x80\xa5shims\x91\x90"
ND = b"\x81\xa1W\x85\xc4\x02nd\xc3\xc4\x04type\xa3<f4\xc4\x04kind\xc4\x00\xc4\x05shape\x91\x01"
FILES: dict[str, tuple[bytes, str, str]] = {
    "model.safetensors": (LFS, "Git LFS", "git lfs pull"),
    "page.bin": (b"\n<!DOCTYPE html><html>401</html>", "HTML", "download the file again"),
    "denied.pt": (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "XML", "credentials"),
    "model.txt.gz": (gzip.compress(b"text"), "gzip", "gunzip"),
    "model.pt.xz": (lzma.compress(WEIGHTS), "xz", "unxz"),
    "model.pt.bz2": (bz2.compress(WEIGHTS), "bzip2", "bunzip2"),
    "zeros.safetensors": (bytes(5000), "zeros", "repeat it"),
    "model.pkl": (pickle.dumps(Fraction(1, 3), 4), "fractions.Fraction", "numpy.savez"),
    "m.joblib": (
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00\x8c\x13joblib.numpy_pickle" + bytes(99),
        "joblib", "joblib.load",
    ),
    "z.joblib": (zlib.compress(b"joblib"), "joblib", "joblib.load"),
    "model": (THINC, "spaCy", "numpy.savez"),
    "vectors": (ND, "msgpack_numpy", "numpy.savez"),
    "m.tflite": (b"\x1c\0\0\0TFL3" + bytes(64), "TFLite", "tf.lite.Interpreter"),
    "m.mlmodel": (b"\x08\x05\x12\x20\x0a\x0a" + bytes(30), "CoreML", "coremltools"),
    "coreml": (b"\x08\x05\x12\xa0\x01\x0a\x0a" + bytes(30), "CoreML", "coremltools"),
    "m.engine": (b"ftrt" + bytes(60), "TensorRT", "from which it was built"),
    "ft.bin": (struct.pack("<ii", 793712314, 12) + bytes(99), "fastText", "get_input_matrix"),
    "ggml.bin": (struct.pack("<I", 0x67676D6C) + bytes(99), "ggml", "GGUF"),
    "xgb.json": (b'{"learner":{"attributes":{}},"version":[3,0,0]}', "XGBoost", "xgboost.Booster"),
    "xgb.ubj": (b"{L\x00\x00\x00\x00\x00\x00\x00\x07learner{", "XGBoost", "xgboost.Booster"),
    "lgb.txt": (b"tree\nversion=v4\n", "LightGBM", "that library"),
    "config.json": (b'{\n  "architectures": ["LlamaForCausalLM"]}', "JSON", "file of weights"),
    "x.mat": (b"MATLAB 5.0 MAT-file, Platform" + bytes(99), "MATLAB", "scipy.io.loadmat"),
    "old.pth.tar": (tarred("sys_info", "pickle", "tensors", "storages"), "before 0.2", "torch"),
    "data.tar": (tarred("a.jpg", "a.txt"), "a tar file", "tar xf"),
    "images.zip": (zipped(**{"a.jpg": b"x", "b.jpg": b"x"}), "a zip file", "a.jpg"),
    "sk.skops": (zipped(**{"1.npy": npy(ARRAY), "schema.json": b"{}"}), "skops", "skops.io.load"),
    "saved_model.pb": (b"\x08\x01\x12\x00", "TensorFlow", "numpy.savez"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_sound_file_of_another_kind_is_named_with_the_way_out(name: str, tmp_path: Path) -> None:
    data, kind, way_out = FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UnsupportedFormat) as caught:
        unickpt.open(tmp_path / name)
    message = str(caught.value).replace(str(tmp_path / name), "PATH")
    assert kind in message
    assert way_out in message.partition("; ")[2]
    assert "damaged" not in message


@pytest.mark.parametrize(
    "data", [LFS, gzip.compress(b"x" * 1000), b"<html>login</html>"], ids=["LFS", "gzip", "HTML"]
)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "x.pt", "x.ckpt", "x.gguf", "x.h5", "x.npz"]
)
def test_in_a_folder_too(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UnsupportedFormat, match=r"Git LFS|gzip|HTML") as caught:
        unickpt.open(tmp_path)
    assert name in str(caught.value)


def test_a_pointer_among_the_files_of_an_index_is_named(tmp_path: Path) -> None:
    where = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "model-1.safetensors").write_bytes(file_writers.safetensors({"a": ARRAY}))
    (tmp_path / "model-2.safetensors").write_bytes(LFS)
    with pytest.raises(UnsupportedFormat, match=r"model-2\.safetensors.*git lfs pull"):
        unickpt.open(tmp_path)


@pytest.mark.parametrize("name", ["sk.skops", "m.tflite"])
def test_a_folder_with_nothing_else_is_named_by_such_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name][0])
    with pytest.raises(UnsupportedFormat, match=FILES[name][1]):
        unickpt.open(tmp_path)


def test_the_prefix_of_a_checkpoint_of_tensorflow_is_named(tmp_path: Path) -> None:
    for suffix in ("index", "data-00000-of-00001"):
        (tmp_path / f"model-1000.{suffix}").write_bytes(b"x")
    with pytest.raises(UnsupportedFormat, match=r"prefix.*TensorFlow.*numpy\.savez"):
        unickpt.open(tmp_path / "model-1000")
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open(tmp_path / "model-2000")


def test_a_file_that_claims_a_format_and_breaks_its_rules_is_damaged(tmp_path: Path) -> None:
    whole = {
        "x.pt": WEIGHTS,
        "x.safetensors": file_writers.safetensors({"w": ARRAY}),
        "x.npy": npy(ARRAY),
        "x.npz": zipped(**{"w.npy": npy(ARRAY)}),
    }
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data[: len(data) - 3])
        with pytest.raises(CheckpointCorrupt):
            unickpt.open(tmp_path / name)


def test_every_kind_is_tested() -> None:
    """Or it is one of these, whose signature is a few bytes."""
    untested = ("7-Zip", "Zstandard", "LZ4", "Caffe", "Parquet", "MXNet", "keeps in a folder")
    names = " ".join(kind for _, kind, _ in FILES.values())
    for kind in other_kinds.KINDS:
        words = [k for _, k, _ in FILES.values() if k and k in kind.name]
        assert words or any(word in kind.name for word in untested), (kind.name, names)
