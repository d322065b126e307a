"""DeepSpeed's checkpoints, as DeepSpeed wrote them, and damaged and incomplete ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import deepspeed_cases, file_writers, foreign, s3_server
from support.processes import Processes

import unickpt
from unickpt import CheckpointCorrupt
from unickpt.arrays.layout import Layout
from unickpt.backends.deepspeed import patterns, states, tensor_parallel_boxes
from unickpt.errors import HintError, UnickptError, UnsupportedFormat
from unickpt.format.file_ranges import FileRange, TensorSource
from unickpt.format.files import Files
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite, arrays

CASES = [
    "z0-fp32-dp2", "z1-bf16-dp4", "z1-fp16-dp2", "z1-elastic-dp2", "z1-aligned-bf16-dp2",
    "z1-bf16opt-bf16-dp2", "z2-bf16-rr-dp4", "z3-bf16-dp4", "z3-fp32-dp2", "z3-subgroups-bf16-dp4",
    "tp2-z1-dp2", "tp2-z3-dp2", "mpu2-z1-dp2", "pp2-z1-dp2", "pp2-tp2-z1", "moe-z2-ep2",
    "uc-z1-bf16-dp4", "uc-z3-fp32-dp2", "moe-z0-ep1", "moe-z0-ep2", "moe-z0-ep2-named",
    "moe-z0-ep2-bf16", "moe-z0-mixed-named",
]  # fmt: skip
ROWS = "parameter_with_row_parallelism_patterns"
# What DeepSpeed's `universal_checkpoint_info` says of the case mpu2-z1-dp2.
TOLD = {
    "original_vocab_size": 11,
    "vocabulary_parameter_patterns": ["^words$"],
    "tp_replicated_parameter_patterns": ["^norm$"],
    "parameter_to_average_patterns": ["^mean$"],
    ROWS: ["^row$"],
    "parameter_with_2_sub_params_cat_dim_0": ["^h_to_4h$"],
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepspeed_cases.unpack(tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture
def copy(cases: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a case, to be damaged; returns the folder of its tag."""

    def copied(case: str) -> Path:
        shutil.copytree(cases / case, tmp_path / case)
        (tag,) = [path for path in (tmp_path / case / "ckpt").iterdir() if path.is_dir()]
        return tag

    return copied


# --- what DeepSpeed wrote -----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_as_deepspeed_says(cases: Path, case: str) -> None:
    found = unickpt.open(cases / case / "ckpt")
    assert found.reader.format == "deepspeed"
    assert deepspeed_cases.differences(cases / case, found) == []
    for name, value in deepspeed_cases.expected(cases / case)["values"].items():
        if name.startswith("step/"):
            assert found[name][...] == value
    known = {"fp32", "module", "optimizer@0", "optimizer@1"}
    extra = {n.split("/")[0] for n in found.index.entries} - {"step", "exp_avg", "exp_avg_sq"}
    assert extra <= known


@pytest.mark.parametrize("case", ["z3-bf16-dp4", "uc-z3-fp32-dp2", "tp2-z1-dp2"])
def test_the_folder_above_and_that_of_the_tag_are_the_same(cases: Path, case: str) -> None:
    (tag,) = [path for path in (cases / case / "ckpt").iterdir() if path.is_dir()]
    ours, above = unickpt.open(tag), unickpt.open(tag.parent)
    assert ours.index == above.index


def test_values_that_are_no_arrays(cases: Path) -> None:
    found = unickpt.load(cases / "z1-fp16-dp2" / "ckpt")
    assert found["global_steps"] == 3
    assert found["client_state"] == {"iteration": 3, "note": "mine"}
    assert found["ds_config"]["zero_optimization"]["stage"] == 1
    assert found["optimizer"]["loss_scaler"]["cur_scale"] == 64.0
    assert [group["weight_decay"] for group in found["optimizer"]["param_groups"]] == [0.1, 0.0]
    universal = unickpt.load(cases / "uc-z3-fp32-dp2" / "ckpt")
    assert universal["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert (universal["step"]["temp"], universal["step"]["temp"].dtype) == (3, np.float32)


@pytest.mark.parametrize("case", ["z1-bf16-dp4", "z3-bf16-dp4", "uc-z1-bf16-dp4"])
def test_float32_has_all_of_the_module_and_tied_names_are_one_array(cases: Path, case: str) -> None:
    found = unickpt.open(cases / case / "ckpt")
    of = [{n.partition("/")[2] for n in found if n.startswith(kind)} for kind in ("module", "fp32")]
    assert of[0] == of[1]
    assert "head.weight" in of[0]
    assert found.index.aliases["fp32/head.weight"] == "fp32/embed.weight"
    assert found.index.aliases["module/head.weight"] == "module/embed.weight"
    for name in ("frozen", "scale"):
        narrow = found[f"module/{name}"][...]
        assert (found[f"fp32/{name}"][...] == narrow.astype(np.float32)).all()


def test_tensor_parallelism_has_its_layout(cases: Path) -> None:
    found = unickpt.open(cases / "tp2-z1-dp2" / "ckpt").index.arrays
    layout = found["fp32/blocks.0.out.weight"].layout
    assert isinstance(layout, Layout)
    assert (layout.spec, layout.mesh.axes) == ((None, "tp"), ("tp",))
    uneven = found["module/lm_head.weight"].layout
    assert uneven is not None
    assert uneven.intervals((13, 12), 0) == ((0, 7), (7, 13))
    assert found["fp32/blocks.0.qkv.weight"].layout is None  # three times as many boxes as ranks


@pytest.mark.parametrize("case", ["z3-bf16-dp4", "tp2-z1-dp2"])
def test_convert_keeps_every_bit(cases: Path, tmp_path: Path, case: str) -> None:
    unickpt.convert(cases / case / "ckpt", tmp_path / "own")
    assert deepspeed_cases.differences(cases / case, unickpt.open(tmp_path / "own")) == []
    assert unickpt.verify(cases / case / "ckpt").ok


@pytest.mark.integration
def test_in_an_object_store(cases: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "deepspeed")
    for case in ("z3-bf16-dp4", "uc-z3-fp32-dp2"):
        url, root = f"s3://deepspeed/{case}/", cases / case / "ckpt"
        store = resolve(url).store(paths.context())
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            store.write(str(file.relative_to(root)), file.read_bytes()).result()
        assert deepspeed_cases.differences(cases / case, unickpt.open(url)) == []


@pytest.mark.integration
@pytest.mark.parametrize("case", ["z3-fp32-dp2", "tp2-z1-dp2"])
def test_onto_a_jax_mesh(cases: Path, case: str) -> None:
    jax = pytest.importorskip("jax")
    mesh = jax.make_mesh((2, 4), ("x", "y"), devices=jax.devices()[:8])
    found = unickpt.open(cases / case / "ckpt")
    like = {}
    for name in (n for n in found.index.arrays if n.startswith(("fp32", "exp_avg"))):
        spec = [
            "x" if n % 2 == 0 and d == 0 else "y" if n % 4 == 0 else None
            for d, n in enumerate(found[name].shape)
        ]
        spec = spec if spec.count("x") < 2 and spec.count("y") < 2 else []
        kind, _, rest = name.partition("/")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        leaf = jax.ShapeDtypeStruct(found[name].shape, np.float32, sharding=sharding)
        like.setdefault(kind, {})[rest] = leaf
    loaded = unickpt.load(cases / case / "ckpt", like, strict=False)
    for name in (n for n in found.index.arrays if n.startswith(("fp32", "exp_avg"))):
        kind, _, rest = name.partition("/")
        assert np.asarray(loaded[kind][rest]).tobytes() == found[name][...].tobytes()


ONTO_DTENSORS = """
import json
import sys
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from unickpt import load

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for case in map(Path, sys.argv[1:]):
    facts = json.loads((case / "expected.json").read_text())["arrays"]
    stored = np.load(case / "expected.npz")
    expected, like = {}, {}
    for name, fact in facts.items():
        bits = stored[name]
        signed = torch.from_numpy(bits.view(bits.dtype.str.replace("u", "i")))
        full = signed.view(getattr(torch, fact["dtype"])).reshape(fact["shape"])
        for dim in range(full.ndim):
            kind, _, rest = name.partition("/")
            one = expected.setdefault(dim, {}).setdefault(kind, {})
            one[rest] = distribute_tensor(full, mesh, [Shard(dim)], src_data_rank=None)
            other = like.setdefault(dim, {}).setdefault(kind, {})
            other[rest] = torch.zeros_like(one[rest])
    for dim in expected:
        load(case / "ckpt", like[dim], strict=False)
        for kind in expected[dim]:
            for name, full in expected[dim][kind].items():
                pair = [x.to_local().contiguous() for x in (like[dim][kind][name], full)]
                found, told = (x.view(torch.uint8) for x in pair)
                assert torch.equal(found, told), (case.name, kind, name, dim)
    print(case.name, sum(len(names) for kinds in like.values() for names in kinds.values()))
dist.destroy_process_group()
"""


@pytest.mark.integration
def test_onto_dtensors_of_two_ranks(cases: Path, processes: Processes) -> None:
    pytest.importorskip("torch")
    names = ["z3-bf16-dp4", "z3-fp32-dp2", "tp2-z1-dp2", "uc-z1-bf16-dp4", "uc-z3-fp32-dp2"]
    ranks = processes.torch(2, ONTO_DTENSORS, *(cases / name for name in names))
    for output in processes.finish(ranks):
        assert [line.split()[0] for line in output.splitlines()] == names


@pytest.mark.parametrize(
    ("case", "name", "of"),
    [
        ("mpu2-z1-dp2", "norm", "mp_rank_01"),
        ("pp2-z1-dp2", "tied_modules.embed.weight", "mp_rank_01"),
    ],
)
def test_verify_compares_what_several_ranks_hold(
    copy: Callable[[str], Path], case: str, name: str, of: str
) -> None:
    tag = copy(case)
    assert unickpt.verify(tag).ok
    for file in sorted(tag.glob(f"zero_pp_rank_*_{of}_optim_states.pt")):
        state = states.optimizer_state(states.StateFile(Files(resolve(tag)), file.name))
        (group,) = state.groups
        if name in group.fragments:
            break
    flat = group.slots["exp_avg"]
    assert isinstance(flat.elements, FileRange)
    start, _ = group.fragments[name]
    data = bytearray(file.read_bytes())
    data[flat.elements.offset + 4 * (flat.first + start)] ^= 1
    file.write_bytes(data)
    report = unickpt.verify(tag)
    assert not report.ok
    assert f"exp_avg/{name}" in str(report)


# --- the suite ----------------------------------------------------------------------------------


class TestSuite(ReaderSuite):
    """As 2 ranks of ZeRO 3 write it: matrices in float32 are trained, all else are buffers."""

    has_digests = False
    has_checksums = True

    def name(self, name: str) -> str:
        return f"client_state/{name}" if name in self.values else f"module/{name.replace('/', '.')}"

    def shown(self) -> Mapping[str, np.ndarray]:
        return {**super().shown(), "exp_avg/layers.0.w": -arrays()["layers/0/w"]}

    def shown_values(self) -> Mapping[str, Any]:
        return {**super().shown_values(), "optimizer/zero_stage": 3}

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        trained = {n: a for n, a in arrays.items() if a.dtype == np.float32 and a.size}
        module = {
            name.replace("/", "."): array[:0].reshape(-1) if name in trained else array
            for name, array in arrays.items()
        }
        model = {
            "module": module,
            "buffer_names": [name.replace("/", ".") for name in arrays if name not in trained],
            "param_shapes": [{name.replace("/", "."): a.shape for name, a in trained.items()}],
            **values,
        }
        (path / "global_step7").mkdir(parents=True)
        (path / "latest").write_text("global_step7")
        for rank in range(2):
            parts = [part(array, rank) for array in trained.values()]
            flat = np.concatenate(parts)
            state = {
                "zero_stage": 3,
                "partition_count": 2,
                "fp32_flat_groups": [flat],
                "optimizer_state_dict": {"state": {0: {"exp_avg": -flat}}},
            }
            file = path / "global_step7" / f"zero_pp_rank_{rank}_mp_rank_00_"
            for kind, value in {"model": model, "optim": {"optimizer_state_dict": state}}.items():
                Path(f"{file}{kind}_states.pt").write_bytes(file_writers.torch_zip(value))

    def test_damage_is_an_error_that_names_the_array(self, path: Path) -> None:
        """Where tensors begin is looked up when it is opened: the file and the group are named."""
        file = path / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        data = bytearray(file.read_bytes())
        at = data.find(b"archive/data/0")
        data[at - 30 : at - 26] = b"xxxx"  # the local header of the storage of the weights
        file.write_bytes(data)
        told = "the weights of group 0: zero_pp_rank_1_mp"
        for work in (unickpt.open, unickpt.load):
            with pytest.raises(CheckpointCorrupt, match=told):
                work(path)
        report = unickpt.verify(path)
        assert not report.ok
        assert told in str(report.damage[0])


def part(array: np.ndarray, rank: int) -> np.ndarray:
    """What a rank of two has of a parameter; the end of the last part is padding."""
    flat = np.append(array.reshape(-1), np.zeros(array.size % 2, array.dtype))
    return flat.reshape(2, -1)[rank]


# --- what is read -------------------------------------------------------------------------------


def test_opening_reads_no_tensors_and_a_row_reads_few_bytes(
    cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = cases / "z3-fp32-dp2" / "ckpt" / "global_step3"
    reads = foreign.count_reads(monkeypatch)
    found = unickpt.open(tag)
    # A step of each rank is read, to notice files of another save.
    assert [size for file, size in reads if "optim" in file].count(4) == 2
    del reads[:]
    expected = found["exp_avg/embed.weight"][...]
    whole = sum(size for _, size in reads)
    assert (len({file for file, _ in reads}), whole) == (2, 13 * 6 * 4)
    assert expected.shape == (13, 6)


def test_a_parameter_of_many_ranks_is_read_by_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stage3(tmp_path, {"w": (1 << 9, 1 << 9)}, ranks=4)
    array = unickpt.open(tmp_path)["fp32/w"]
    reads = foreign.count_reads(monkeypatch)
    quarter = array[128:256, :]
    assert (quarter.reshape(-1) == np.arange(1 << 16, 1 << 17, dtype=np.float32)).all()
    assert {file for file, _ in reads} == {"zero_pp_rank_1_mp_rank_00_optim_states.pt"}
    assert sum(size for _, size in reads) == 4 << 16


# --- hints --------------------------------------------------------------------------------------


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Writes a file again, with another state."""
    torch = pytest.importorskip("torch")
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def without_info(tag: Path) -> None:
    for file in tag.glob("mp_rank_*_model_states.pt"):
        rewrite(file, lambda state: state.pop("universal_checkpoint_info"))


def test_without_information_each_rank_has_its_own_array(
    copy: Callable[[str], Path], cases: Path
) -> None:
    tag = copy("mpu2-z1-dp2")
    without_info(tag)
    found, told = unickpt.open(tag), unickpt.open(cases / "mpu2-z1-dp2" / "ckpt")
    assert "fp32/row" not in found
    parts = [found[f"exp_avg/row@{rank}"][...] for rank in range(2)]
    assert (np.concatenate(parts, 1) == told["exp_avg/row"][...]).all()
    assert found["module/words@1"].shape == (6, 4)


def test_hints_say_what_the_folder_does_not(copy: Callable[[str], Path], cases: Path) -> None:
    tag = copy("mpu2-z1-dp2")
    without_info(tag)
    found = unickpt.open(tag, hints=TOLD)
    assert deepspeed_cases.differences(cases / "mpu2-z1-dp2", found) == []


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({ROWS: "^row$"}, "is no list"),
        ({ROWS: [3]}, "no texts"),
        ({ROWS: ["("]}, "not valid"),
        ({ROWS: [r"(a+)+b"]}, "too long"),
        ({ROWS: ["^norm$"]}, "norm.*1 dimensions"),
        ({ROWS: ["^rows$"]}, "matches no"),
        ({"original_vocab_size": -1}, "original_vocab_size"),
        ({"vocabulary_parameter_patterns": ["^words$"]}, "original_vocab_size"),
        ({"parameter_with_sub_params": [{"patterns": ["row"]}]}, "parameter_with_sub_params"),
        ({"rows": []}, "takes the hints tp_replicated"),
    ],
)
def test_wrong_hints(copy: Callable[[str], Path], hints: dict[str, Any], message: str) -> None:
    tag = copy("mpu2-z1-dp2")
    without_info(tag)
    with pytest.raises(HintError, match=message):
        unickpt.open(tag, hints=hints)


# --- incomplete and mixed-up folders ------------------------------------------------------------


def files_of(cases: Path, case: str) -> list[str]:
    (tag,) = [path for path in (cases / case / "ckpt").iterdir() if path.is_dir()]
    return sorted(str(path.relative_to(tag)) for path in tag.rglob("*.pt"))


@pytest.mark.parametrize("case", CASES)
def test_any_missing_file_is_noticed(cases: Path, copy: Callable[[str], Path], case: str) -> None:
    tag = copy(case)
    for name in files_of(cases, case):
        if name.endswith("zero/optimizer_state.pt") or "frozen" in name or "scale" in name:
            continue  # opens without what is only there, or is also in the model file
        if name.startswith("zero/head.weight"):
            continue
        if case == "z0-fp32-dp2" or (case.startswith("uc") and "model_states" in name):
            continue  # the only file; optional
        (tag / name).rename(tag.parent / "away")
        with pytest.raises(CheckpointCorrupt, match=r"missing|there is no|rank"):
            unickpt.open(tag)
        (tag.parent / "away").rename(tag / name)
    unickpt.open(tag)


@pytest.mark.parametrize("case", ["z1-bf16-dp4", "z3-bf16-dp4", "tp2-z1-dp2", "uc-z3-fp32-dp2"])
def test_truncated_files_are_named(cases: Path, copy: Callable[[str], Path], case: str) -> None:
    tag = copy(case)
    for name in files_of(cases, case)[::3]:
        whole = (tag / name).read_bytes()
        (tag / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointCorrupt, match=name):
            unickpt.open(tag)
        (tag / name).write_bytes(whole)


def test_a_flipped_byte_is_an_error_or_changes_nothing(copy: Callable[[str], Path]) -> None:
    tag = copy("z1-bf16-dp4")
    file = tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = bytearray(file.read_bytes())
    for at in range(0, 3000, 101):  # its pickle, whose checksum is stored
        whole[at] ^= 0x55
        file.write_bytes(whole)
        try:
            found = unickpt.open(tag)
            assert len(found) > 30
        except UnickptError as error:
            if file.name not in str(error):
                raise
        whole[at] ^= 0x55


def test_files_of_two_saves_are_noticed(copy: Callable[[str], Path]) -> None:
    tag = copy("z1-elastic-dp2")
    file = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = states.optimizer_state(states.StateFile(Files(resolve(tag)), file.name))
    step = state.groups[0].scalars["step"]
    assert isinstance(step, TensorSource)
    assert isinstance(step.elements, FileRange)
    data = bytearray(file.read_bytes())
    data[step.elements.offset : step.elements.offset + 4] = np.float32(4).tobytes()
    file.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"rank_1.*step of the optimizer is 4.0, but 3.0"):
        unickpt.open(tag)


def test_another_number_of_ranks_is_noticed(copy: Callable[[str], Path]) -> None:
    tag = copy("z3-fp32-dp2")
    for kind in ("optim", "model"):
        names = [f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (1, 2)]
        shutil.copy(tag / names[0], tag / names[1])
    with pytest.raises(CheckpointCorrupt, match=r"2 data-parallel ranks.*files of 3"):
        unickpt.open(tag)


def test_what_the_files_say_must_agree(copy: Callable[[str], Path], tmp_path: Path) -> None:
    tag = copy("tp2-z1-dp2")
    file = tag / "mp_rank_01_model_states.pt"
    for key, value in {"global_steps": 9, "ds_version": "0.1", "dp_world_size": 4}.items():
        whole = file.read_bytes()
        rewrite(file, lambda state, k=key, v=value: state.update({k: v}))  # type: ignore[misc]
        with pytest.raises(CheckpointCorrupt, match=f"mp_rank_01.*{key}.*one save"):
            unickpt.open(tag)
        file.write_bytes(whole)


def test_shapes_must_fit_what_is_stored(tmp_path: Path) -> None:
    write_stage3(tmp_path, {"w": (3, 4), "v": (5,)}, ranks=2, told={"w": (3, 5), "v": (5,)})
    with pytest.raises(CheckpointCorrupt, match=r"rank_0.*'fp32/w'.*9 elements.*need 11"):
        unickpt.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ds_config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}}, "NVMe"),
        ({"ds_autoep_layers": [{}]}, "AutoEP"),
    ],
)
def test_what_is_not_supported_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_stage3(tmp_path, {"w": (3, 4)}, ranks=2, **change)
    with pytest.raises(UnsupportedFormat, match=message):
        unickpt.open(tmp_path)


def test_partitions_of_a_subset_of_ranks_are_refused(tmp_path: Path) -> None:
    write_stage3(tmp_path, {"w": (3, 4)}, ranks=4, partitions=2)
    with pytest.raises(UnsupportedFormat, match=r"2 ranks share.*files of 4.*MiCS"):
        unickpt.open(tmp_path)


def test_a_tag_that_is_not_there(copy: Callable[[str], Path]) -> None:
    tag = copy("z3-fp32-dp2")
    (tag.parent / "zero_to_fp32.py").touch()
    shutil.rmtree(tag)
    with pytest.raises(CheckpointCorrupt, match="latest names the checkpoint 'global_step3'"):
        unickpt.open(tag.parent)


def test_flat_parameters_without_a_shape_are_refused(copy: Callable[[str], Path]) -> None:
    tag = copy("uc-z3-fp32-dp2")
    for file in tag.glob("*_model_states.pt"):
        file.unlink()
    with pytest.raises(UnsupportedFormat, match=r"stored flat.*model file"):
        unickpt.open(tag)


def test_masters_without_names_are_not_replaced_by_weights_of_16_bits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    flat = torch.arange(6.0)
    optimizer = {"fp32_groups_flat": [flat], "cur_scale": 8.0, "optimizer_state_dict": {}}
    module = {"w": flat.reshape(2, 3).half()}
    torch.save(
        {"module": module, "param_shapes": None, "optimizer": optimizer},
        tmp_path / "mp_rank_00_model_states.pt",
    )
    found = unickpt.open(tmp_path)
    assert [*found.index.entries] == ["module/w", "optimizer/fp32_groups_flat/0"]
    assert found.values["optimizer/cur_scale"] == 8.0


# --- tensor parallelism -------------------------------------------------------------------------


def affine(**changes: Any) -> dict[str, Any]:
    """An affine map of [4, 6], whose columns two ranks hold, the second one transposed."""
    first = {"shape": [4, 3], "source": [0, [6, 1]], "dest": [0, [3, 1]], "locations": [0]}
    second = {"shape": [4, 3], "source": [3, [6, 1]], "dest": [0, [1, 4]], "locations": [1]}
    pieces = [first | changes, second]
    ranks = {r: {"shard_shape": [4, 3], "pieces": [p]} for r, p in enumerate(pieces)}
    params = {"^w$": {"logical_shape": [4, 6], "ranks": ranks}}
    return {"affine_map": {"version": 1, "params": params}}


def test_affine_maps_with_strides(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    parts = [whole[:, :3].reshape(-1), whole[:, 3:].T.reshape(-1)]
    write_stage3(tmp_path, {"w": (4, 3)}, ranks=1, values=parts, universal_checkpoint_info=affine())
    found = unickpt.open(tmp_path)["fp32/w"]
    assert (found[...] == whole).all()
    assert (found[1:3, 2:5] == whole[1:3, 2:5]).all()


@pytest.mark.parametrize(
    ("info", "kind", "message"),
    [
        (affine(dest=[1, [3, 1]]), CheckpointCorrupt, "outside"),
        (affine(source=[4, [6, 1]]), UnsupportedFormat, "not a box"),
        (affine(source=[0, [2, 1]]), UnsupportedFormat, "not a box"),
        (affine(shape=[4, 2]), CheckpointCorrupt, "array .*/w.*no process holds"),
        (affine(scale=0.5), UnsupportedFormat, "0.5"),
        ({"affine_map": {"version": 2, "params": {}}}, UnsupportedFormat, "version 2"),
        (
            {"autotp_unsupported_parameter_patterns": {"^w$": "why not"}},
            UnsupportedFormat,
            "why not",
        ),
        ({"tp_replicated_parameter_patterns": 7}, CheckpointCorrupt, "is no list"),
    ],
)
def test_what_affine_maps_and_patterns_must_not_say(
    tmp_path: Path, info: Any, kind: Any, message: str
) -> None:
    parts = [np.zeros(12, np.float32)] * 2
    write_stage3(tmp_path, {"w": (4, 3)}, ranks=1, values=parts, universal_checkpoint_info=info)
    with pytest.raises(kind, match=message):
        unickpt.open(tmp_path)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"shape": (3, -1), "partition_dim": 0}, [0, 3, 1, 4, 2, 5]),
        ({"shape": ((2, 4), -1), "partition_dim": 0}, [0, 3, 1, 2, 4, 5]),
    ],
)
def test_sub_parameters_without_widths_are_split_evenly(said: Any, expected: list[int]) -> None:
    rules = tensor_parallel_boxes.TensorParallelRules(
        {"parameter_with_sub_params": [{**said, "patterns": ["w"]}]}, {}, 2
    )
    plan = rules.plan("w", [(3, 2), (3, 2)])
    rows = {}
    for piece in plan.pieces:
        for n, row in enumerate(range(piece.box.start[0], piece.box.stop[0])):
            rows[row] = 3 * piece.rank + piece.first // 2 + n
    assert (plan.shape, [rows[row] for row in range(6)]) == ((6, 2), expected)


def test_patterns_take_little_time() -> None:
    names = [f"layers.{n}.weight" for n in range(3000)]
    literal = patterns.PatternTable(
        dict.fromkeys("^" + name.replace(".", r"\.") + "$" for name in names)
    )
    assert all(literal.find(name) for name in names)
    assert not literal.unused
    for pattern in ("(a+)+b", "(a|a)*b", r"(a)\1", "(?:a?){30}", "a?" * 40 + "a" * 40):
        with pytest.raises(patterns.BadPattern, match="too long"):
            patterns.PatternTable({pattern: None}).find("a" * 40)
    general = patterns.PatternTable({r".*\.weight": None})
    assert general.find("x.weight") is not None
    assert general.find("x.bias") is None


# --- checkpoints as DeepSpeed writes them, made here --------------------------------------------


def write_stage3(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    ranks: int,
    *,
    told: dict[str, tuple[int, ...]] | None = None,
    partitions: int | None = None,
    values: list[np.ndarray] | None = None,
    **more: Any,
) -> None:
    """Writes what ZeRO 3 writes; the elements of all parameters are numbered.

    Arguments:
        folder: where to.
        shapes: of the parameters.
        ranks: data-parallel.
        told: what param_shapes says instead of them.
        partitions: what partition_count says instead of `ranks`.
        values: by tensor-parallel rank, the elements of the parameters, instead of numbers.
        more: of the model files.
    """
    torch = pytest.importorskip("torch")
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    for mp, flat in enumerate(values or [np.arange(count, dtype=np.float32)]):
        parts: list[list[np.ndarray]] = [[] for _ in range(ranks)]
        at = 0
        for shape in shapes.values():
            n = int(np.prod(shape))
            part = -(-n // ranks)
            padded = np.zeros(part * ranks, np.float32)
            padded[:n] = flat[at : at + n]
            at += n
            for rank in range(ranks):
                parts[rank].append(padded[rank * part :][:part])
        sizes = told or shapes
        for rank in range(ranks):
            weights = torch.from_numpy(np.concatenate(parts[rank]))
            model = {
                "module": {name: torch.empty(0) for name in shapes},
                "param_shapes": [{name: torch.Size(shape) for name, shape in sizes.items()}],
                "dp_world_size": ranks,
                **more,
            }
            optimizer = {
                "zero_stage": 3,
                "partition_count": partitions or ranks,
                "fp32_flat_groups": [weights],
                "optimizer_state_dict": {"state": {}, "param_groups": []},
            }
            name = f"zero_pp_rank_{rank}_mp_rank_{mp:02d}"
            torch.save(model, folder / f"{name}_model_states.pt")
            torch.save({"optimizer_state_dict": optimizer}, folder / f"{name}_optim_states.pt")
