"""Programs of torch.jit and torch.export: their weights, by the names of `state_dict()`."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import file_writers, s3_server

import unickpt
from unickpt import CheckpointCorrupt
from unickpt.backends._files.pickle_writer import PickledCall, dumps
from unickpt.backends._files.pickles import Global
from unickpt.backends.torch import programs
from unickpt.errors import UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite

CODE = "class Net(Module):\n  __parameters__ = [{}]\n  __buffers__ = []\n  training : bool\n"
SCALARS = {name: number for number, name in programs._DTYPES.items()}


def module(name: str, state: Mapping[str, Any]) -> PickledCall:
    return PickledCall(Global(f"__torch__.{name}"), (), dict(state), is_new=True)


def script(root: Any, code: Mapping[str, str], levels: int = 0) -> bytes:
    """A program, as torch.jit.save writes it: the storages come first; with so many levels above
    it, each of which has the one below twice."""
    pickled, out = file_writers.TorchPickle(None), io.BytesIO()
    facts = pickled._facts(root)
    for _ in range(levels):
        facts = module("Net", {"a": facts, "b": facts})
    with zipfile.ZipFile(out, "w") as archive:
        for key, array in pickled.storages.items():
            archive.writestr(f"net/data/{key}", array.tobytes())
        archive.writestr("net/data.pkl", dumps(facts))
        for name, text in code.items():
            archive.writestr(f"net/code/{name}", text, zipfile.ZIP_DEFLATED)
        archive.writestr("net/constants.pkl", b"\x80\x02).")
        archive.writestr("net/version", "3")
    return out.getvalue()


def simple(arrays: Mapping[str, np.ndarray]) -> bytes:
    names = "".join(f'"{name}", ' for name in arrays)
    code = {"__torch__.py": CODE.format(names)}
    return script(module("Net", {**arrays, "training": False}), code)


def export(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A program, as torch.export.save writes it since torch 2.9."""
    out, config = io.BytesIO(), {}
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("e/archive_format", "pt2")
        for number, (name, array) in enumerate(arrays.items()):
            archive.writestr(f"e/data/weights/weight_{number}", array.tobytes())
            strides = [s // array.itemsize for s in np.empty(array.shape, array.dtype).strides]
            meta = {
                "dtype": SCALARS[array.dtype.name],
                "sizes": [{"as_int": n} for n in array.shape],
                "strides": [{"as_int": n} for n in strides],
                "storage_offset": {"as_int": 0},
            }
            config[name] = {"path_name": f"weight_{number}", "tensor_meta": meta}
        table = json.dumps({"config": config})
        archive.writestr("e/data/weights/model_weights_config.json", table)
    return out.getvalue()


class OfPrograms(ReaderSuite):
    has_digests = False
    has_checksums = True
    values: Mapping[str, Any] = {}
    storage = ""

    def name(self, name: str) -> str:
        return name.replace("/", ".")

    def tree(self, name: str, leaf: Any) -> Any:
        return {self.name(name): leaf}

    def damage(self, path: Path, name: str) -> None:
        file = path / "model.pt"
        data = bytearray(file.read_bytes())
        header = data.find(self.storage.encode()) - 30
        data[header : header + 4] = b"xxxx"
        file.write_bytes(data)


class TestScript(OfPrograms):
    storage = "net/data/0"

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        path.mkdir()
        (path / "model.pt").write_bytes(
            simple({self.name(name): array for name, array in arrays.items()})
        )


class TestExport(OfPrograms):
    storage = "e/data/weights/weight_0"

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        path.mkdir()
        (path / "model.pt").write_bytes(
            export({self.name(name): array for name, array in arrays.items()})
        )


# --- what torch writes ----------------------------------------------------------------------------


def net() -> Any:
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seq = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
            self.tied = self.seq[0]
            self.p = nn.Parameter(torch.tensor(2.5, dtype=torch.bfloat16))
            self.register_buffer("count", torch.arange(3))
            self.register_buffer("none", torch.empty(0, 4))
            self.register_buffer("view", torch.arange(12.0).reshape(3, 4)[1:, ::2])
            self.extra = torch.full((2,), 7.0)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.seq(x) + self.extra

    return torch, Net().eval()


def check(found: unickpt.Checkpoint, state: Mapping[str, Any]) -> None:
    assert set(found.index.entries) == set(state)
    for name, tensor in state.items():
        expected = tensor.detach().contiguous().reshape(-1).view(dtype=torch_bytes()).numpy()
        assert found[name].shape == tuple(tensor.shape)
        assert np.asarray(found[name][...]).tobytes() == expected.tobytes()


def torch_bytes() -> Any:
    return pytest.importorskip("torch").uint8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["script", "trace"])
@pytest.mark.integration
def test_a_program_of_torch_jit_has_the_arrays_of_its_state_dict(kind: str, tmp_path: Path) -> None:
    torch, model = net()
    made = torch.jit.script(model) if kind == "script" else torch.jit.trace(model, torch.ones(1, 3))
    torch.jit.save(made, tmp_path / "net.pt")
    found = unickpt.open(tmp_path)
    assert found.reader.format == "torchscript"
    check(found, torch.jit.load(tmp_path / "net.pt").state_dict())
    like = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    loaded = unickpt.load(tmp_path / "net.pt", like)
    assert all(torch.equal(loaded[name], t) for name, t in model.state_dict().items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.integration
def test_a_frozen_program_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch, model = net()
    torch.jit.save(torch.jit.freeze(torch.jit.script(model)), tmp_path / "net.pt")
    with pytest.raises(UnsupportedFormat, match=r"net\.pt.*frozen.*save the module before"):
        unickpt.open(tmp_path / "net.pt")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.integration
def test_a_program_of_torch_export_has_the_arrays_of_its_state_dict(tmp_path: Path) -> None:
    torch, model = net()
    program = torch.export.export(model, (torch.ones(1, 3),))
    torch.export.save(program, tmp_path / "net.pt2")
    found = unickpt.open(tmp_path)
    assert found.reader.format == "torch-export"
    check(found, torch.export.load(tmp_path / "net.pt2").state_dict)
    assert unickpt.verify(tmp_path / "net.pt2").unverified == ""


@pytest.mark.parametrize(
    ("marker", "member"),
    [
        ("serialized_exported_program.json", "serialized_state_dict.pt"),  # before torch 2.8
        ("e/archive_format", "e/data/weights/model.pt"),  # of torch 2.8
    ],
)
def test_older_programs_of_torch_export(marker: str, member: str, tmp_path: Path) -> None:
    state = {"0.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3)}
    with zipfile.ZipFile(tmp_path / "x.pt2", "w") as archive:
        archive.writestr(marker, "{}")
        archive.writestr(member, file_writers.torch_zip(state))
        archive.writestr("version", "8.4")
    found = unickpt.open(tmp_path / "x.pt2")
    assert found.reader.format == "torch-export"
    assert list(found) == ["0.weight", "n"]
    assert found["0.weight"][...].tobytes() == state["0.weight"].tobytes()


def test_all_of_it_from_s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "torch-programs")
    store = resolve("s3://torch-programs/a").store(paths.context())
    arrays = {"w": np.arange(600, dtype=np.float32).reshape(20, 30)}
    for data in (simple(arrays), export(arrays)):
        store.write("x.pt", data).result()
        assert unickpt.open("s3://torch-programs/a/x.pt")["w"][3, 4:6].tolist() == [94, 95]
        store.write("x.pt", data[:-40]).result()
        with pytest.raises(CheckpointCorrupt, match=r"x\.pt"):
            unickpt.open("s3://torch-programs/a/x.pt")


# --- which tensors of a module are weights --------------------------------------------------------


ONES = np.ones(2, np.float32)


def test_only_what_the_code_declares_is_a_weight(tmp_path: Path) -> None:
    inner = module("a.b.Inner", {"w": ONES, "scratch": ONES, "training": True})
    other = module("a.b.Plain", {"w": ONES})
    root = module("Net", {"scratch": ONES, "inner": inner, "other": other, "list": [ONES]})
    code = {
        "__torch__.py": CODE.format(""),
        "__torch__/a/b.py": "class Plain:\n  w : Tensor\n"
        'class Inner(Module):\n  __parameters__ = ["w", ]\n  __buffers__ = []\n',
    }
    (tmp_path / "x.pt").write_bytes(script(root, code))
    assert list(unickpt.open(tmp_path / "x.pt")) == ["inner.w"]


def test_code_without_buffers_has_all_tensors_as_before_torch_1_8(tmp_path: Path) -> None:
    code = {"__torch__.py": 'class Net(Module):\n  __parameters__ = ["w", ]\n  w : Tensor\n'}
    (tmp_path / "x.pt").write_bytes(script(module("Net", {"w": ONES, "mean": ONES + 1}), code))
    assert sorted(unickpt.open(tmp_path / "x.pt")) == ["mean", "w"]


# --- damage ---------------------------------------------------------------------------------------


def opened(tmp_path: Path, data: bytes) -> unickpt.Checkpoint:
    (tmp_path / "x.pt").write_bytes(data)
    return unickpt.open(tmp_path / "x.pt")


def test_damaged_and_hostile_programs_of_torch_jit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"x\.pt.*code/__torch__\.py.*missing"):
        opened(tmp_path, script(module("Net", {"w": ONES}), {}))
    packed = module("Net", {})
    packed.state = (1, 2)
    with pytest.raises(UnsupportedFormat, match=r"x\.pt.*'__torch__\.Net'.*state_dict"):
        opened(tmp_path, script(packed, {"__torch__.py": CODE.format("")}))
    bomb = module("Net", {"w": ONES})
    with pytest.raises(CheckpointCorrupt, match=r"x\.pt.*too often"):
        opened(tmp_path, script(bomb, {"__torch__.py": CODE.format('"w", ')}, levels=60))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('[{"as_int": 2}]', '[{"as_int": 3}]', "'w'.*reaches beyond"),
        ('[{"as_int": 2}]', '[{"as_int":-2}]', "'w'.*is damaged"),
        ('[{"as_int": 2}]', '[{"as_txt": 2}]', "'w'.*is damaged"),
        ('set": {"as_int": 0}', 'set": {"as_int": 9}', "'w'.*reaches beyond"),
        ('"weight_0"', '"weight_9"', "'w'.*weight_9 is missing"),
        ('{"config"', '{"config!', "model_weights_config.json is damaged"),
    ],
)
def test_damaged_and_hostile_programs_of_torch_export(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    data = export({"w": ONES})
    assert data.count(old.encode()) == 1
    archive = zipfile.ZipFile(io.BytesIO(data))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as changed:
        for name in archive.namelist():
            changed.writestr(name, archive.read(name).replace(old.encode(), new.encode()))
    with pytest.raises(CheckpointCorrupt, match=rf"x\.pt.*{message}"):
        opened(tmp_path, out.getvalue())


def test_a_weight_of_a_class_of_its_own_is_named_when_it_is_read(tmp_path: Path) -> None:
    data = export({"w": ONES, "b": ONES + 1})
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as changed:
        for name in archive.namelist():
            old, new = b'"weight_0", ', b'"weight_0", "use_pickle": true, '
            changed.writestr(name, archive.read(name).replace(old, new))
    found = opened(tmp_path, out.getvalue())
    assert found["b"][...].tolist() == [2, 2]
    with pytest.raises(UnsupportedFormat, match=r"'w' is a tensor of a class of its own"):
        found["w"][...]
