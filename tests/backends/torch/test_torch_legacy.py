"""Files as torch wrote them before 1.6: pickles, then storages; read in place."""

from __future__ import annotations

import contextlib
import math
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import file_writers, foreign, s3_server

import unickpt
from unickpt import Checkpoint, CheckpointCorrupt, UnickptError
from unickpt.backends._files.pickle_writer import PickledCall, dumps
from unickpt.backends._files.pickles import Global, PersistentId
from unickpt.errors import UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite, nested

MAGIC = 0x1950A86A20F9469CFC6C


def written(path: Path, data: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "x.pt").write_bytes(data)
    return path


def read(path: Path, value: Any) -> Checkpoint:
    return unickpt.open(written(path, file_writers.torch_legacy(value)))


class TestSuite(ReaderSuite):
    has_digests = False

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        written(path, file_writers.torch_legacy(nested({**arrays, **values})))

    def damage(self, path: Path, name: str) -> None:
        data = bytearray((path / "x.pt").read_bytes())
        at = data.find(struct.pack("<q", math.prod(unickpt.open(path)[name].shape)), 300)
        data[at] ^= 1  # the number of elements before its storage
        (path / "x.pt").write_bytes(data)


@pytest.mark.integration
def test_a_file_of_torch_itself(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(60, dtype=torch.float64).reshape(6, 10)
    state = {
        "view": base[1:4, 2:8].T, "all": base, "row": base[2], "p": torch.nn.Parameter(base[0]),
        "half": torch.ones(3, dtype=torch.bfloat16), "none": torch.empty(0, 3),
        "f8": torch.ones(5).to(torch.float8_e4m3fn), "u16": torch.arange(3).to(torch.uint16),
        "tied": base, "storage": torch.arange(3).untyped_storage(), "step": 3,
    }  # fmt: skip
    torch.save(state, tmp_path / "x.pth", _use_new_zipfile_serialization=False)
    found = unickpt.open(tmp_path / "x.pth")
    assert found.index.aliases == {"tied": "all"}
    assert found.values["step"] == 3
    assert found["storage"][...].view(np.int64).tolist() == [0, 1, 2]
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            expected = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            assert np.asarray(found[name][...]).tobytes() == expected


def test_from_s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "torch-legacy")
    store = resolve("s3://torch-legacy/a").store(paths.context())
    state = {"w": np.arange(50.0), "text": "x" * 200_000, "step": 3}
    data = file_writers.torch_legacy(state)
    store.write("x.pt", data).result()
    found = unickpt.open("s3://torch-legacy/a/x.pt")
    assert np.array_equal(found["w"][5:], state["w"][5:])
    assert found.values["text"] == state["text"]
    store.write("x.pt", data[:-8]).result()
    with pytest.raises(CheckpointCorrupt, match="'w'"):
        unickpt.load("s3://torch-legacy/a")
    store.write("x.pt", data[:1000]).result()
    with pytest.raises(CheckpointCorrupt, match=r"x\.pt.*within a pickle"):
        unickpt.open("s3://torch-legacy/a")


def test_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = np.arange(2_000_000)
    reads = foreign.count_reads(monkeypatch)
    found = read(tmp_path / "x", {"big": big, "other": big})
    assert sum(count for _, count in reads) < 100_000
    reads.clear()
    assert np.array_equal(found["other"][5:9], big[5:9])
    assert sum(count for _, count in reads) < 5 << 20


def parts(value: Any, *view: Any) -> tuple[list[bytes], list[bytes]]:
    pickled = file_writers.TorchPickle(value, *view)
    head = [dumps(MAGIC), dumps(1001), dumps({"little_endian": True}), pickled.data]
    keys = dumps(list(pickled.storages))
    stored = [a.size.to_bytes(8, "little") + a.tobytes() for a in pickled.storages.values()]
    return [*head, keys], stored


def test_big_endian_files(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    pickles, _ = parts({"w": array}, None)
    pickles[2] = dumps({"little_endian": False})
    data = b"".join(pickles) + struct.pack(">q", 6) + array.astype(">i8").tobytes()
    assert np.array_equal(unickpt.open(written(tmp_path / "x", data))["w"][...], array)


def test_a_whole_module(tmp_path: Path) -> None:
    cls = PersistentId(("module", Global("mine.Net"), "mine.py", "class Net: ..."))
    data = dumps({"kind": cls, "step": 3})
    head = [dumps(MAGIC), dumps(1001), dumps({}), data, dumps([])]
    found = unickpt.open(written(tmp_path / "x", b"".join(head)))
    assert found.values["step"] == 3
    assert found.values["kind"].class_name == "mine.Net"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({1: dumps(1000)}, "protocol is 1000"),
        ({2: dumps([])}, "protocol"),
        ({4: dumps(["0", "0"])}, "'0' is not one of its storages"),
        ({4: dumps(["9"])}, "'9' is not one"),
        ({4: dumps(5)}, "is not one"),
        ({4: dumps([])}, "storage '0' is missing"),
        ({3: b"\x80\x02K\x01K\x02R."}, "a pickle is damaged"),
        ({3: b"\x80\x02X\xff\xff\xff\xff"}, "within a pickle"),
    ],
)
def test_damage_is_named(change: dict[int, bytes], told: str, tmp_path: Path) -> None:
    pickles, stored = parts({"w": np.arange(3)}, None)
    data = b"".join(change.get(n, p) for n, p in enumerate(pickles)) + b"".join(stored)
    with pytest.raises(CheckpointCorrupt, match=rf"x\.pt: .*{told}"):
        unickpt.open(written(tmp_path / "x", data))


def test_storages_within_storages_are_refused(tmp_path: Path) -> None:
    pickles, stored = parts({"w": np.arange(3)}, ("1", 0, 3))
    with pytest.raises(UnsupportedFormat, match=r"part of another, as in files of torch before"):
        unickpt.open(written(tmp_path / "x", b"".join([*pickles, *stored])))


@given(st.data())
def test_any_damage_is_an_error_or_other_data(data: st.DataObject) -> None:
    ours = PickledCall(Global("mine.Ours"), (), {"w": np.arange(3.0), "x": 1})
    whole = bytearray(file_writers.torch_legacy({"w": np.arange(4), "ours": ours, "step": 3}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(15, len(whole) - 1))] = data.draw(st.integers(0, 255))
    memory = f"memory://torch-damage-{id(whole)}"
    store = resolve(memory).store(paths.context())
    store.write("x.pt", bytes(whole[: data.draw(st.integers(15, len(whole)))])).result()
    with contextlib.suppress(UnickptError):
        unickpt.load(memory)
    store.write("x.pt", None).result()


def test_python_reads_what_the_tests_write() -> None:
    data = file_writers.torch_legacy({"step": 3})
    assert pickle.loads(data) == MAGIC


@pytest.mark.parametrize("pad", range(12))
def test_a_pickle_may_be_cut_anywhere_while_it_is_read(pad: int, tmp_path: Path) -> None:
    state = {f"{'x' * pad}name{n}": np.ones(2, np.float32) for n in range(1000)}
    (tmp_path / "x.pt").write_bytes(file_writers.torch_legacy(state))
    assert len(unickpt.open(tmp_path / "x.pt")) == 1000
