"""Files of torch.save: read without torch, bit for bit; nothing in them runs."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import foreign, s3_server

import unickpt
from unickpt import Checkpoint, CheckpointCorrupt, Opaque, UnickptError
from unickpt.backends.torch import reader as torch_files
from unickpt.errors import UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite, nested

CASES = ["pt-zip", "pt-tar-namespace"]
KINDS = {"float32": "Float", "float64": "Double", "int64": "Long", "bool": "Bool"}


def opened(path: Path | str) -> Checkpoint:
    found = foreign.opened(path, torch_files)
    assert found is not None
    return found


class Pickled:
    """Opcodes, as torch's pickler writes them."""

    def __init__(self) -> None:
        self.storages: list[bytes] = []

    def of(self, value: Any) -> bytes:
        if isinstance(value, dict):
            return b"}(" + b"".join(self.of(k) + self.of(v) for k, v in value.items()) + b"u"
        if isinstance(value, np.ndarray):
            return self.tensor(value)
        return pickle.dumps(value, 2)[2:-1]

    def tensor(self, array: np.ndarray) -> bytes:
        kind = KINDS[array.dtype.name]
        key, self.storages = str(len(self.storages)), [*self.storages, array.tobytes()]
        strides = tuple(s // array.itemsize for s in np.empty(array.shape, array.dtype).strides)
        return (
            b"ctorch._utils\n_rebuild_tensor_v2\n((" + self.of("storage")
            + f"ctorch\n{kind}Storage\n".encode() + self.of(key) + self.of("cpu")
            + self.of(array.size) + b"tQ" + self.of(0) + self.of(array.shape) + self.of(strides)
            + b"\x89ccollections\nOrderedDict\n)RtR"
        )  # fmt: skip


def write(file: Path, data: bytes, storages: list[bytes], top: str = "archive") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{top}/data.pkl", data)
        archive.writestr(f"{top}/byteorder", "little")
        for n, storage in enumerate(storages):
            archive.writestr(f"{top}/data/{n}", storage)


def save(file: Path, value: Any) -> None:
    pickled = Pickled()
    write(file, b"\x80\x02" + pickled.of(value) + b".", pickled.storages)


class TestSuite(ReaderSuite):
    has_digests = False
    has_checksums = True

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        save(path / "model.pt", nested({**arrays, **values}))

    def damage(self, path: Path, name: str) -> None:
        file = path / "model.pt"
        data = bytearray(file.read_bytes())
        stored = opened(path)[name][...].tobytes()[:64]
        assert data.count(stored) == 1
        at = data.find(b"archive/data/0", 0)
        data[at - 30 : at - 26] = b"xxxx"  # the local header of its storage
        file.write_bytes(data)


@pytest.mark.parametrize("case", CASES)
def test_what_torch_wrote_reads_bit_for_bit(case: str) -> None:
    found = opened(foreign.folder(case))
    assert foreign.differences(case, found) == []
    assert found.values["epoch"] == 3
    assert [found.values[f"history/{n}"] for n in ("0", "1", "2/0", "2/1")] == [1.0, 2.0, 3, "x"]
    dtype = found.values["dtype"]
    assert isinstance(dtype, Opaque)
    assert (dtype.class_name, b"ctorch\nbfloat16\n" in dtype.pickle) == ("torch.bfloat16", True)


def test_ties_are_one_array_with_two_names() -> None:
    found = opened(foreign.folder("pt-zip"))
    assert found.index.aliases == {"model/tied_b": "model/tied_a"}


def test_nothing_that_a_file_names_runs() -> None:
    made = Path("/tmp/foreign-pickle-ran")  # by the os.system of the fixture's pickle
    data = (foreign.folder("pt-tar-namespace") / "checkpoint.pt").read_bytes()
    assert f"touch {made}".encode() in data
    made.unlink(missing_ok=True)
    found = opened(foreign.folder("pt-tar-namespace"))
    value = found.values["ours"]
    assert isinstance(value, Opaque)
    assert value.class_name == "posix.system"
    assert not made.exists()
    assert found.values["args/lr"] == 0.1


def test_all_of_it_from_s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "torch-files")
    store = resolve("s3://torch-files/a").store(paths.context())
    data = (foreign.folder("pt-zip") / "checkpoint.pt").read_bytes()
    store.write("checkpoint.pt", data).result()
    assert foreign.differences("pt-zip", opened("s3://torch-files/a")) == []
    store.write("checkpoint.pt", data[:-100]).result()
    with pytest.raises(CheckpointCorrupt, match=r"checkpoint\.pt"):
        opened("s3://torch-files/a")


def test_a_file_of_torch_itself(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(60, dtype=torch.float64).reshape(6, 10)
    state = {
        "view": base[1:4, 2:8].T, "all": base, "row": base[2], "p": torch.nn.Parameter(base[0]),
        "half": torch.ones(3, dtype=torch.bfloat16), "none": torch.empty(0, 3),
    }  # fmt: skip
    torch.save(state, tmp_path / "x.pth")
    found = opened(tmp_path)
    for name, tensor in state.items():
        expected = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        assert np.asarray(found[name][...]).tobytes() == expected
    with foreign.registered(torch_files):
        loaded = unickpt.load(tmp_path, {name: torch.zeros_like(t) for name, t in state.items()})
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_part_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = np.arange(4_000_000, dtype=np.int64).reshape(2000, 2000)
    save(tmp_path / "model.pt", {"big": big, "small": np.ones(3)})
    reads = foreign.count_reads(monkeypatch)
    found = opened(tmp_path)
    assert sum(count for _, count in reads) < 70_000
    assert np.array_equal(found["big"][5:6], big[5:6])
    assert sum(count for _, count in reads) < 5 << 20


# --- folders of Hugging Face --------------------------------------------------------------------


def sharded(path: Path) -> dict[str, np.ndarray]:
    arrays = {f"layer.{n}": np.full((3, 2), n, np.float32) for n in range(4)}
    for n in range(2):
        part = {name: arrays[name] for name in list(arrays)[2 * n : 2 * n + 2]}
        extra = {"layer.0": np.zeros((3, 2), np.float32)} if n else {}
        save(path / f"pytorch_model-{n}.bin", {**part, **extra})
    where = {name: f"pytorch_model-{n // 2}.bin" for n, name in enumerate(arrays)}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    (path / "training_args.bin").write_bytes(b"anything")
    return arrays


def test_the_index_says_which_file_counts(tmp_path: Path) -> None:
    arrays = sharded(tmp_path)
    found = opened(tmp_path)
    assert sorted(found) == sorted(arrays)
    assert all(np.array_equal(found[name][...], arrays[name]) for name in arrays)


def test_an_index_that_lacks_a_tensor_does_not_hide_it(tmp_path: Path) -> None:
    arrays = sharded(tmp_path)
    index = tmp_path / "pytorch_model.bin.index.json"
    where = json.loads(index.read_text())["weight_map"]
    del where["layer.3"]
    index.write_text(json.dumps({"weight_map": where}))
    assert np.array_equal(opened(tmp_path)["layer.3"][...], arrays["layer.3"])


def test_a_missing_file_or_tensor_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    save(tmp_path / "pytorch_model-1.bin", {"layer.2": np.ones(3), "layer.3": 5})
    with pytest.raises(CheckpointCorrupt, match=r"'layer\.3' is in pytorch_model-1\.bin"):
        opened(tmp_path)
    (tmp_path / "pytorch_model-1.bin").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"pytorch_model-1\.bin"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": {"a": "../x.bin"}}', '{"weight_map": {"\\ud800": "x.bin"}}',
             '{"weight_map": {"a": 5}}', '{"weight_map": 5}', "[" * 100_000],
)  # fmt: skip
def test_a_bad_index_is_an_error(text: str, tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text(text)
    with pytest.raises(CheckpointCorrupt, match="index"):
        opened(tmp_path)


def test_the_model_counts_beside_the_state_of_a_trainer(tmp_path: Path) -> None:
    save(tmp_path / "pytorch_model.bin", {"a": np.ones(3)})
    save(tmp_path / "optimizer.pt", {"b": np.ones(3)})
    assert list(opened(tmp_path)) == ["a"]


def test_several_files_without_an_index_are_named(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {"a": np.ones(3)})
    save(tmp_path / "b.pt", {"b": np.ones(3)})
    with pytest.raises(UnsupportedFormat, match=r"a\.pt, b\.pt"):
        opened(tmp_path)


def test_other_folders_are_not_torchs(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"other")
    (tmp_path / "y.bin").write_bytes(b"")
    assert foreign.opened(tmp_path, torch_files) is None
    assert foreign.opened(tmp_path / "none", torch_files) is None


def test_a_program_of_torch_jit_without_weights_says_so(tmp_path: Path) -> None:
    write(tmp_path / "x.pt", b"N.", [])
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as archive:
        archive.writestr("archive/constants.pkl", b"N.")
    with pytest.raises(UnsupportedFormat, match=r"torch\.jit without parameters"):
        opened(tmp_path)


# --- damage -------------------------------------------------------------------------------------


def test_truncation_names_the_file(tmp_path: Path) -> None:
    save(tmp_path / "x.pt", {"a": np.ones(5), "b": [1, 2]})
    data = (tmp_path / "x.pt").read_bytes()
    for count in range(0, len(data), 7):
        (tmp_path / "x.pt").write_bytes(data[:count])
        with pytest.raises(CheckpointCorrupt, match=r"x\.pt"):
            opened(tmp_path)


def test_changed_bytes_are_another_checkpoint_or_an_error(tmp_path: Path) -> None:
    shutil.copytree(foreign.folder("pt-zip"), tmp_path, dirs_exist_ok=True)
    data = (tmp_path / "checkpoint.pt").read_bytes()
    rng = np.random.default_rng(5)
    for _ in range(150):
        changed = bytearray(data)
        # Mostly in the pickle, and in the directory at the end.
        for at in rng.choice([0, len(data) - 4000]) + rng.integers(0, 4000, rng.integers(1, 4)):
            changed[at] = rng.integers(256)
        (tmp_path / "checkpoint.pt").write_bytes(changed)
        began = time.perf_counter()
        with contextlib.suppress(UnickptError):
            found = foreign.opened(tmp_path, torch_files)
            for name in found or ():
                found[name][...]
        assert time.perf_counter() - began < 5


def forged(path: Path, code: bytes, storages: tuple[bytes, ...] = (bytes(16),)) -> Checkpoint:
    write(path / "x.pt", b"\x80\x02" + code + b".", list(storages))
    return opened(path)


def tensor(key: str = "0", count: int = 4, offset: int = 0, shape: Any = (4,), steps: Any = (1,)):
    p = Pickled()
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((" + p.of("storage") + b"ctorch\nFloatStorage\n"
        + p.of(key) + p.of("cpu") + p.of(count) + b"tQ" + p.of(offset) + p.of(shape)
        + p.of(steps) + b"\x89NtR"
    )  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        tensor(key="1"), tensor(key="../x"), tensor(count=5), tensor(offset=1), tensor(steps=(2,)),
        tensor(shape=(5,)), tensor(offset=-1), tensor(shape=(-1,)), tensor(shape=(4, 1)),
        tensor(steps=(-1,)), tensor(shape=(1 << 61,), steps=(1 << 61,)), tensor(shape=[4]),
        tensor(shape=(1,) * 33, steps=(1,) * 33), tensor(shape=(4.0,)), tensor(count=1 << 70),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_their_storage_are_refused(code: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"x\.pt|array 'a'"):
        forged(tmp_path, b"}" + Pickled().of("a") + code + b"s")


def test_a_tensor_of_few_bytes_and_a_huge_shape_takes_no_memory(tmp_path: Path) -> None:
    code = tensor(shape=(1 << 40,), steps=(0,))
    found = forged(tmp_path, b"}" + Pickled().of("a") + code + b"s")
    with pytest.raises(CheckpointCorrupt, match=r"array 'a'.*repeats"):
        found["a"][...]


def test_shared_containers_that_double_are_refused(tmp_path: Path) -> None:
    began = time.perf_counter()
    for code in (
        b"(K\x01t" + b"2\x86" * 100,
        b"]q\x00K\x01a" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(100)),
        b"}" + b"q\x00" + b"K\x01h\x00s",
        b")" + b"\x85" * 300,
    ):
        with pytest.raises((CheckpointCorrupt, UnsupportedFormat), match=r"x\.pt"):
            forged(tmp_path, code)
    key = Pickled().of("k" * 1_000_000)
    long = key + b"q\x01" + b"0}(" + b"".join(b"K%cN" % n for n in range(200)) + b"u"
    for _ in range(100):
        long = b"}h\x01" + long + b"s" if long[:1] == b"}" else long + b"q\x020}h\x01h\x02s"
    with pytest.raises(CheckpointCorrupt, match="too many leaves"):
        forged(tmp_path, long)
    assert time.perf_counter() - began < 10


def test_keys_of_any_kind_have_names(tmp_path: Path) -> None:
    tree = {(1, "a"): 1, None: 2, True: 3, 5: 4, "": 5, "a/b": 6, b"x": 7}
    save(tmp_path / "x.pt", tree)
    assert sorted(opened(tmp_path).values.items()) == [
        ("%", 5), ("(1, 'a')", 1), ("5", 4), ("None", 2), ("True", 3), ("a%2Fb", 6), ("b'x'", 7),
    ]  # fmt: skip
    save(tmp_path / "x.pt", {None: 1, "None": 2})
    with pytest.raises(UnsupportedFormat, match="'None'"):
        opened(tmp_path)


def test_a_single_tensor(tmp_path: Path) -> None:
    save(tmp_path / "x.pt", np.arange(4.0))
    assert np.array_equal(opened(tmp_path)[""][...], np.arange(4.0))
