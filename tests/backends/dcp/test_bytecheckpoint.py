"""ByteCheckpoint's folders, as ByteCheckpoint wrote them, and damaged ones."""

from __future__ import annotations

import contextlib
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import foreign, s3_server
from support.file_writers import TorchPickle, torch_zip
from support.foreign import unpacked

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound, Rules
from unickpt.backends._files.pickle_writer import PickledCall, dumps
from unickpt.backends._files.pickles import BadPickle, Global
from unickpt.backends.dcp.bytecheckpoint.reader import parts_of
from unickpt.errors import UnickptError, UnsupportedFormat
from unickpt.format import file_ranges
from unickpt.storage.paths import context, resolve
from unickpt.testing.readers import ReaderSuite, arrays

CASES = ["bcp-ddp", "bcp-fsdp1", "bcp-fsdp2", "bcp-fsdp1-flat", "bcp-fsdp1-flat-nested"]
STEP = "global_step_2"


def ours(name: str) -> str:
    """Our name of an array: ByteCheckpoint joins the keys of the optimizer by dots."""
    found = re.fullmatch(r"optimizer/state\.(.*)\.(\w+)", name)
    return f"optimizer/state/{found[1]}/{found[2]}" if found else name


def differences(case: str, path: Path | str) -> list[str]:
    stored = unickpt.open(path)
    arrays = {ours(name): fact for name, fact in foreign.expected(case)["arrays"].items()}
    return foreign.differing(arrays, stored, but=("requires_grad_numel", "/rng"))


# --- what ByteCheckpoint wrote ------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_as_the_model_says(case: str, tmp_path: Path) -> None:
    path = unpacked(case, tmp_path)
    assert differences(case, path) == []
    assert differences(case, path / STEP) == []
    assert unickpt.open(path).reader.format == "bytecheckpoint"


def test_values_and_a_value_of_each_process(tmp_path: Path) -> None:
    state = unickpt.load(unpacked("bcp-fsdp2", tmp_path))
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert {n: value["rank"] for n, value in state["extra_state"].items()} == dict(
        enumerate(range(4))
    )
    assert state["extra_state"][2]["rng"].shape == (5056,)
    unickpt.convert(tmp_path / "ckpt", tmp_path / "own")
    assert unickpt.diff(tmp_path / "ckpt", tmp_path / "own").same


@pytest.mark.parametrize("case", ["bcp-fsdp2", "bcp-fsdp1-flat"])
def test_onto_a_module_and_its_optimizer(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from unickpt.adapters.torch import NamedOptimizer

    model = torch.nn.Sequential(
        torch.nn.Linear(6, 11), torch.nn.LayerNorm(11), torch.nn.Linear(11, 3, bias=False)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    path = unpacked(case, tmp_path)
    like = {"model": model, "optim": NamedOptimizer(optimizer, model)}
    unickpt.load(path, like, rules=Rules.preset("bytecheckpoint"))
    stored = unickpt.open(path)
    for name, parameter in model.named_parameters():
        assert (parameter.detach().numpy() == stored[f"model/{name}"][...]).all()
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            expected = stored[f"optimizer/state/{name}/{slot}"][...]
            assert (optimizer.state[parameter][slot].numpy() == expected).all()
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_names_of_ddp_onto_a_module_without_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 11), torch.nn.LayerNorm(11), torch.nn.Linear(11, 3, bias=False)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    path = unpacked("bcp-ddp", tmp_path)
    unickpt.load(path, {"model": model, "optimizer": optimizer}, strict=False)
    stored = unickpt.open(path)
    assert (model[2].weight.detach().numpy() == stored["model/module.2.weight"][...]).all()
    slots = optimizer.state[model[2].weight]
    assert (slots["exp_avg"].numpy() == stored["optimizer/state/4/exp_avg"][...]).all()


def test_in_an_object_store(tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "bytes")
    path = unpacked("bcp-fsdp1-flat", tmp_path)
    store = resolve("s3://bytes/run/").store(context())
    for file in path.rglob("*"):
        if file.is_file():
            store.write(str(file.relative_to(path)), file.read_bytes()).result()
    assert differences("bcp-fsdp1-flat", "s3://bytes/run/") == []


# --- the suite ----------------------------------------------------------------------------------

DCP, OWN = "torch.distributed.checkpoint.metadata.", "bytecheckpoint.checkpointer.meta_type."


class TestSuite(ReaderSuite):
    """As two processes write it, each half of the rows; and the values of the first process."""

    has_digests = False

    def name(self, name: str) -> str:
        above = "extra_state/0/" if name in self.values else "model/"
        return above + (name if name in self.values else name.replace("/", "."))

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        files = [bytearray(), bytearray()]
        described, stored, forms = dict[str, Any](), dict[Any, Any](), dict[Any, Any]()
        for long, array in arrays.items():
            name, chunks = long.replace("/", "."), []
            for rank, start, chunk in halves(array):
                offset = (start, *[0] * (array.ndim - 1)) if array.ndim else ()
                fields = {"offsets": size(offset), "sizes": size(chunk.shape)}
                chunks.append(a(f"{DCP}ChunkStorageMetadata", fields))
                index = a(f"{DCP}MetadataIndex", {"fqn": name, "offset": size(offset), "index": 0})
                where = {"offset": len(files[rank]), "length": chunk.nbytes}
                where["relative_path"] = f"__{rank}_0.distcp"
                stored[index] = a(f"{OWN}_StorageInfo", where)
                forms[index] = TorchPickle(chunk).data
                files[rank] += chunk.tobytes()
            properties = (Global(f"torch.{array.dtype.name}"), None, False, None, False)
            facts = {"size": size(array.shape), "chunks": chunks}
            facts["properties"] = PickledCall(Global(f"{DCP}TensorProperties"), (), properties)
            described[name] = a(f"{DCP}TensorStorageMetadata", facts)
        metadata = {
            "state_dict_metadata": described,
            "storage_data": stored,
            "all_tensor_metadata": forms,
            "planner_data": {name: (name,) for name in described},
            "user_defined_dict": {},
        }
        step = path / "global_step_7"
        for folder in ("model", "extra_state"):
            (step / folder).mkdir(parents=True)
        (path / "latest_checkpointed_iteration.txt").write_text("7")
        (step / "model" / ".metadata").write_bytes(dumps(a(f"{OWN}Metadata", metadata)))
        for rank, data in enumerate(files):
            (step / "model" / f"__{rank}_0.distcp").write_bytes(data)
        (step / "extra_state" / "extra_state_rank_0.pt").write_bytes(torch_zip(dict(values)))

    def damage(self, path: Path, name: str) -> None:
        file = path / "global_step_7" / "model" / ".metadata"
        *_, (_, _, chunk) = halves(arrays()["layers/0/w"])
        form, data = TorchPickle(chunk).data.decode("latin-1").encode(), file.read_bytes()
        assert data.count(form) == 1
        file.write_bytes(data.replace(form, b"x" * len(form)))


def a(name: str, fields: Any) -> PickledCall:
    """An object of a class."""
    return PickledCall(Global(name), (), fields)


def size(shape: Sequence[int]) -> PickledCall:
    return PickledCall(Global("torch.Size"), (tuple(shape),))


def halves(array: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """For each process that has elements: its number, its first row, and its rows."""
    if not array.ndim:
        yield 0, 0, array
        return
    middle = -(-len(array) // 2)
    for rank, start, part in ((0, 0, array[:middle]), (1, middle, array[middle:])):
        if part.size:
            yield rank, start, part


# --- parts --------------------------------------------------------------------------------------


def test_a_part_reads_its_own_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_ranges, "CHUNK_BYTES", 24)
    stored = unickpt.open(unpacked("bcp-fsdp1-flat", tmp_path))
    flat, sharded = stored["optimizer/state/0.weight/exp_avg"], stored["model/2.weight"]
    reads = foreign.count_reads(monkeypatch)
    _ = flat[10:11]  # elements 60 to 65 of the flat parameter: those of process 1
    assert reads == [("optimizer/__1_0.distcp", 24)]
    _ = sharded[2:3, 5:]  # elements 129 to 134: those of process 3
    assert {file for file, _ in reads[1:]} == {"model/__3_0.distcp"}
    assert sum(count for _, count in reads[1:]) <= 44


# --- flat parameters ----------------------------------------------------------------------------


def flat(above: str, *names: str) -> Any:
    """The facts of a flat parameter of vectors of two elements, each with one of padding."""
    return {
        "fsdp_flat_param_to_fqns": {f"{above}_flat_param": list(names)},
        "fsdp_shapes": {f"{above}_flat_param": [(2,)] * len(names)},
        "fsdp_numels_with_padding": {f"{above}_flat_param": (2, 1) * len(names)},
        "fsdp_is_padding_mask": {f"{above}_flat_param": [False, True] * len(names)},
    }


@pytest.mark.parametrize(
    ("above", "names", "known", "whole"),
    [
        ("", ("a.w", ".b"), (), ["a.w", "b"]),
        ("m.0.", ("a.w", ".b"), (), ["m.0.a.w", "m.0.b"]),
        ("1.", ("0.w", "1.0.w"), ("0.w", "1.0.w", "1.1.0.w"), ["1.0.w", "1.1.0.w"]),
        ("m.", ("m.w", "m.b"), (), ["m.m.w", "m.m.b"]),
        ("m.", ("m.w", "m.b"), ("m.m.w",), ["m.m.w", "m.m.b"]),
        ("m.", ("m.w", "m.b"), ("m.b",), ["m.w", "m.b"]),  # of an old version
    ],
)
def test_names_in_a_flat_parameter(above: str, names: Any, known: Any, whole: list[str]) -> None:
    parts = parts_of(flat(above, *names), known)[f"{above}_flat_param"]
    assert [part.name for part in parts] == whole
    assert [part.first for part in parts] == [0, 3]


def test_parameters_that_are_not_trained_have_no_slots(tmp_path: Path) -> None:
    path = unpacked("bcp-fsdp1-flat", tmp_path)

    def frozen(metadata: Any) -> None:  # 1.bias is elements 92 to 103
        for name in ("exp_avg", "exp_avg_sq"):
            chunks = metadata.state_dict_metadata[f"state._flat_param.{name}"].chunks
            chunks[:] = [chunk for chunk in chunks if chunk.offsets != (92,)]

    change(path / STEP / "optimizer" / ".metadata", frozen)
    stored = unickpt.open(path)
    assert "optimizer/state/1.bias/exp_avg" not in stored
    assert stored["optimizer/state/1.weight/exp_avg"][...].shape == (11,)


# --- damage -------------------------------------------------------------------------------------


class _Stub:
    """A class of ByteCheckpoint in a pickle."""


def change(file: Path, by: Callable[[Any], Any]) -> None:
    """Changes a metadata, with torch's own objects in it."""
    pytest.importorskip("torch")
    made: dict[str, type] = {}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.startswith("bytecheckpoint"):
                return made.setdefault(name, type(name, (_Stub,), {"__module__": module}))
            return super().find_class(module, name)

    class Pickler(pickle._Pickler):  # type: ignore[name-defined]
        def save_global(self, obj: Any, name: str | None = None) -> None:
            if isinstance(obj, type) and issubclass(obj, _Stub):
                self.write(f"c{obj.__module__}\n{obj.__name__}\n".encode())
                self.memoize(obj)
            else:
                super().save_global(obj, name)

    with file.open("rb") as source:
        metadata = Unpickler(source).load()
    by(metadata)
    with file.open("wb") as target:
        Pickler(target, protocol=2).dump(metadata)


def test_the_metadata_can_be_written_again(tmp_path: Path) -> None:
    path = unpacked("bcp-fsdp1-flat", tmp_path)
    change(path / STEP / "model" / ".metadata", lambda metadata: None)
    assert differences("bcp-fsdp1-flat", path) == []


def test_an_element_that_is_missing_is_noticed(tmp_path: Path) -> None:
    path = unpacked("bcp-fsdp1-flat", tmp_path)

    def shorter(metadata: Any) -> None:
        metadata.state_dict_metadata["state._flat_param.exp_avg"].chunks.pop()

    change(path / STEP / "optimizer" / ".metadata", shorter)
    with pytest.raises(CheckpointCorrupt, match=r"exp_avg' holds 1 elements of '2\.weight'"):
        unickpt.open(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fsdp_shapes", [(11, 7), (11,), (11,), (11,), (3, 11)], r"66 elements of '0\.weight'"),
        ("fsdp_shapes", [(11, 6)], "contradict each other"),
        ("fsdp_numels_with_padding", (66, 2, 11), "contradict each other"),
        ("fsdp_numels_with_padding", 7, "are no lists"),
        ("fsdp_numels_with_padding", (-1,) * 10, "no tuple of sizes"),
        ("fsdp_is_padding_mask", [True] * 10, "lacks elements of its last"),
        ("fsdp_is_padding_mask", [False] * 10, "2 elements of '0.bias', whose shape is"),
    ],
)
def test_facts_of_flat_parameters_that_do_not_fit(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    path = unpacked("bcp-fsdp1-flat", tmp_path)

    def by(metadata: Any) -> None:
        metadata.user_defined_dict[key]["_flat_param"] = value

    change(path / STEP / "model" / ".metadata", by)
    with pytest.raises(CheckpointCorrupt, match=rf"model/\.metadata.*{message}"):
        unickpt.open(path)


def test_flat_slots_without_the_model_are_refused(tmp_path: Path) -> None:
    path = unpacked("bcp-fsdp1-flat", tmp_path)
    shutil.rmtree(path / STEP / "model")
    with pytest.raises(UnsupportedFormat, match=r"_flat_param.*put the folder model next to"):
        unickpt.open(path)


def test_shared_lists_of_parts_end_soon() -> None:
    shared = flat("", "w")
    for table in shared.values():
        (value,) = table.values()
        if isinstance(value, tuple | list) and len(value) == 2:
            value = value * 1000
        table.update(dict.fromkeys(map(str, range(5000)), value))
    with pytest.raises(BadPickle, match="more than 1000000 parts"):
        parts_of(shared, ())


def test_several_models_are_refused(tmp_path: Path) -> None:
    path = unpacked("bcp-fsdp1-flat", tmp_path)

    def by(metadata: Any) -> None:
        metadata.user_defined_dict["model_dict_keys"] = ["a", "b"]

    change(path / STEP / "model" / ".metadata", by)
    with pytest.raises(UnsupportedFormat, match="several models"):
        unickpt.open(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = unpacked("bcp-fsdp2", tmp_path)
    (path / STEP / "extra_state" / "extra_state_rank_1.pt").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"extra_state/extra_state_rank_1\.pt is missing"):
        unickpt.open(path)
    (path / STEP / "optimizer" / "__2_0.distcp").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"the file optimizer/__2_0\.distcp, with data of"):
        unickpt.open(path)


def test_a_truncated_file_and_one_of_another_save_are_named(tmp_path: Path) -> None:
    path = unpacked("bcp-fsdp2", tmp_path)
    file = path / STEP / "model" / "__3_0.distcp"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointCorrupt, match=r"'model/1\.bias'.*model/__3_0\.distcp"):
        unickpt.open(path)["model/1.bias"][...]
    (path / STEP / "extra_state" / "extra_state_rank_0.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointCorrupt, match=r"extra_state_rank_0\.pt"):
        unickpt.load(path)


def test_a_description_that_contradicts_the_metadata(tmp_path: Path) -> None:
    path = unpacked("bcp-fsdp2", tmp_path)

    def exchanged(metadata: Any) -> None:
        table = metadata.all_tensor_metadata
        first, second, *_ = table
        table[first], table[second] = table[second], table[first]

    change(path / STEP / "model" / ".metadata", exchanged)
    with pytest.raises(CheckpointCorrupt, match=r"__0_0\.distcp contains .* where .* is expected"):
        unickpt.load(path)

    def without(metadata: Any) -> None:
        metadata.all_tensor_metadata.clear()

    change(path / STEP / "model" / ".metadata", without)
    with pytest.raises(CheckpointCorrupt, match=r"does not describe '0\.weight' at \[0, 0\]"):
        unickpt.open(path)


def test_other_folders_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.copytree(tmp_path, tmp_path / STEP / "model")
    with pytest.raises(CheckpointNotFound):
        unickpt.open(tmp_path)


@pytest.mark.parametrize(
    "file", ["model/.metadata", "optimizer/.metadata", "extra_state/extra_state_rank_0.pt"]
)
def test_any_changed_byte_is_an_error_of_ours_or_harmless(file: str, tmp_path: Path) -> None:
    path, rng = unpacked("bcp-fsdp1-flat", tmp_path) / STEP, random.Random(4)
    data = (path / file).read_bytes()
    for _ in range(40):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] = rng.randrange(256)
        (path / file).write_bytes(changed)
        with contextlib.suppress(UnickptError):
            stored = unickpt.open(path)
            for array in stored.values():
                if array.nbytes < 1 << 20:
                    array[...]
