"""DeepSpeed's mixtures of experts without ZeRO: the optimizers of expert-parallel ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import deepspeed_cases, foreign, s3_server

import unickpt
from unickpt import CheckpointCorrupt
from unickpt.errors import UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve

EXPERT = "layers.1.deepspeed_moe.experts.deepspeed_experts.{}.w1.weight"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepspeed_cases.unpack(tmp_path_factory.mktemp("experts"), deepspeed_cases.EXPERTS)


@pytest.fixture
def copy(cases: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a case, to be damaged; returns the folder of its tag."""

    def copied(case: str) -> Path:
        shutil.copytree(cases / case, tmp_path / case)
        return tmp_path / case / "ckpt" / "global_step3"

    return copied


def optimizer_of(tag: Path, rank: int) -> Path:
    return tag / f"expp_rank_{rank}_mp_rank_00_optim_states.pt"


def change(file: Path, what: Callable[[dict[str, Any]], None]) -> None:
    """Writes a file of torch.save again, with its optimizer's state changed."""
    torch = pytest.importorskip("torch")
    state = torch.load(file, weights_only=False)
    what(state["optimizer"])
    torch.save(state, file)


def test_names_are_those_that_torch_recorded(cases: Path) -> None:
    found = unickpt.open(cases / "moe-z0-ep2-named" / "ckpt")
    slots = {name.partition("/")[2] for name in found if name.startswith("exp_avg/")}
    weights = {name.partition("/")[2] for name in found if name.startswith("module/")}
    assert slots == weights - {"scale"}
    assert {EXPERT.format(n) for n in range(4)} < slots
    assert found[f"step/{EXPERT.format(3)}"][...] == 3
    assert found.values["optimizer@1/param_groups/0/weight_decay"] == 0.1


def test_without_names_each_rank_has_its_numbers(cases: Path) -> None:
    found = unickpt.open(cases / "moe-z0-ep2" / "ckpt")
    slots = {name for name in found if name.startswith("exp_avg/")}
    assert slots == {f"exp_avg/{n}@{rank}" for n in range(18) for rank in range(2)}
    assert (found["exp_avg/0@0"][...] == found["exp_avg/0@1"][...]).all()
    assert (found["exp_avg/6@0"][...] != found["exp_avg/6@1"][...]).any()
    one = unickpt.open(cases / "moe-z0-ep1" / "ckpt")
    assert "exp_avg/29" in one
    assert one.values["optimizer/param_groups/1/name"] == "ep_size_1"


def test_an_expert_is_read_from_the_file_of_its_rank(
    cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = unickpt.open(cases / "moe-z0-ep2-named" / "ckpt")
    reads = foreign.count_reads(monkeypatch)
    _ = found[f"exp_avg/{EXPERT.format(2)}"][2:4]
    assert reads == [("expp_rank_1_mp_rank_00_optim_states.pt", 2 * 6 * 4)]


def test_convert_keeps_every_bit(cases: Path, tmp_path: Path) -> None:
    case = cases / "moe-z0-mixed-named"
    unickpt.convert(case / "ckpt", tmp_path / "own")
    assert deepspeed_cases.differences(case, unickpt.open(tmp_path / "own")) == []


def test_into_a_module_and_its_optimizer(cases: Path) -> None:
    torch = pytest.importorskip("torch")
    from unickpt.adapters.torch import NamedOptimizer

    found = unickpt.open(cases / "moe-z0-mixed-named" / "ckpt")
    model = torch.nn.Module()
    for name in (n.removeprefix("module/") for n in found if n.startswith("module/")):
        *path, last = name.split(".")
        at = model
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        value = torch.zeros(found[f"module/{name}"].shape)
        if name == "scale":
            at.register_buffer(last, value)
        else:
            at.register_parameter(last, torch.nn.Parameter(value))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": NamedOptimizer(optimizer, model)}
    unickpt.load(found, state, rules=unickpt.Rules.preset("deepspeed"))
    for name, parameter in model.named_parameters():
        assert parameter.detach().numpy().tobytes() == found[f"module/{name}"][...].tobytes()
        loaded = optimizer.state[parameter]
        assert loaded["step"] == 3
        assert loaded["exp_avg_sq"].numpy().tobytes() == found[f"exp_avg_sq/{name}"][...].tobytes()


@pytest.mark.integration
def test_in_an_object_store(cases: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "experts")
    case = cases / "moe-z0-ep2-named"
    store = resolve("s3://experts/x/").store(paths.context())
    for file in (case / "ckpt").rglob("*"):
        if file.is_file():
            store.write(str(file.relative_to(case / "ckpt")), file.read_bytes()).result()
    assert deepspeed_cases.differences(case, unickpt.open("s3://experts/x/")) == []


# --- what is missing, mixed up or not told --------------------------------------------------------


def test_a_plain_optimizer_with_names_has_them_too(
    cases: Path, copy: Callable[[str], Path]
) -> None:
    tag = copy("moe-z0-ep2-named")
    for file in (*tag.glob("expp_*"), *tag.glob("layer_*")):
        file.unlink()

    def dense(optimizer: dict[str, Any]) -> None:
        for group in optimizer["param_groups"]:
            both = [
                both
                for both in zip(group["params"], group["param_names"], strict=True)
                if "experts" not in both[1]
            ]
            group["params"], group["param_names"] = map(list, zip(*both, strict=True))
        left = [n for group in optimizer["param_groups"] for n in group["params"]]
        optimizer["state"] = {n: optimizer["state"][n] for n in left}

    change(tag / "mp_rank_00_model_states.pt", dense)
    found = unickpt.open(tag)
    whole = unickpt.open(cases / "moe-z0-ep2-named" / "ckpt")
    assert found["exp_avg/first.weight"][...].tobytes() == (
        whole["exp_avg/first.weight"][...].tobytes()
    )
    assert found.values["optimizer/param_groups/1/weight_decay"] == 0


def test_names_that_the_module_does_not_have_do_not_count(copy: Callable[[str], Path]) -> None:
    tag = copy("moe-z0-ep2-named")

    def rename(optimizer: dict[str, Any]) -> None:
        optimizer["param_groups"][0]["param_names"][0] = "other"

    change(optimizer_of(tag, 1), rename)
    assert "exp_avg/0@1" in unickpt.open(tag)


@pytest.mark.parametrize("case", ["moe-z0-ep2", "moe-z0-ep2-named", "moe-z0-ep2-bf16"])
def test_the_last_file_of_an_expert_rank_is_missed(copy: Callable[[str], Path], case: str) -> None:
    tag = copy(case)
    optimizer_of(tag, 1).unlink()
    with pytest.raises(CheckpointCorrupt, match=r"expp_rank_0.*copied as a whole"):
        unickpt.open(tag)


def test_it_is_refused_if_nothing_tells_how_many_files_there_are(
    copy: Callable[[str], Path],
) -> None:
    tag = copy("moe-z0-ep2")

    def unmark(optimizer: dict[str, Any]) -> None:
        del optimizer["param_groups"][1]["moe"]

    for rank in (0, 1):
        change(optimizer_of(tag, rank), unmark)
    assert "exp_avg/17@1" in unickpt.open(tag)  # all weights are trained, which tells it
    optimizer_of(tag, 1).unlink()
    with pytest.raises(UnsupportedFormat, match=r"expp_rank_0.*18 parameters; 6 weights.* 24 of"):
        unickpt.open(tag)


def test_steps_that_an_optimizer_counts_for_its_groups(copy: Callable[[str], Path]) -> None:
    tag = copy("moe-z0-ep2")

    def as_fused(step: int) -> Callable[[dict[str, Any]], None]:
        def changed(optimizer: dict[str, Any]) -> None:
            for state in optimizer["state"].values():
                del state["step"]
            for group in optimizer["param_groups"]:
                group["step"] = step

        return changed

    change(tag / "mp_rank_00_model_states.pt", as_fused(3))
    change(optimizer_of(tag, 0), as_fused(3))
    change(optimizer_of(tag, 1), as_fused(3))
    assert unickpt.open(tag).values["step/17@1"] == 3
    change(optimizer_of(tag, 1), lambda optimizer: optimizer["param_groups"][0].update(step=4))
    with pytest.raises(CheckpointCorrupt, match=r"expp_rank_1.*the optimizer is 4, but 3"):
        unickpt.open(tag)


def test_files_of_two_saves_are_noticed(copy: Callable[[str], Path]) -> None:
    tag = copy("moe-z0-ep2")

    def step(optimizer: dict[str, Any]) -> None:
        optimizer["state"][0]["step"] += 1

    change(optimizer_of(tag, 1), step)
    with pytest.raises(CheckpointCorrupt, match=r"expp_rank_1.*the optimizer is 4.0, but 3.0"):
        unickpt.open(tag)

    def fewer(optimizer: dict[str, Any]) -> None:
        step(optimizer)
        optimizer["param_groups"][1]["params"].pop()

    change(optimizer_of(tag, 1), fewer)
    with pytest.raises(CheckpointCorrupt, match=r"expp_rank_1.*number of parameters is 17, but 18"):
        unickpt.open(tag)


def test_verify_compares_what_all_expert_ranks_hold(copy: Callable[[str], Path]) -> None:
    tag = copy("moe-z0-ep2-named")

    def other(optimizer: dict[str, Any]) -> None:
        optimizer["state"][0]["exp_avg"][1, 1] += 1

    change(optimizer_of(tag, 1), other)
    (problem,) = unickpt.verify(tag).damage
    assert "exp_avg/first.weight" in problem.array


def test_files_without_a_state_as_old_versions_write_with_zero(copy: Callable[[str], Path]) -> None:
    torch = pytest.importorskip("torch")
    tag = copy("moe-z0-ep2")
    torch.save({"optimizer": None}, optimizer_of(tag, 1))
    with pytest.raises(CheckpointCorrupt, match="some optimizer files of experts"):
        unickpt.open(tag)
    torch.save({"optimizer": None}, optimizer_of(tag, 0))
    model = tag / "mp_rank_00_model_states.pt"
    state = torch.load(model, weights_only=False)
    torch.save({**state, "optimizer": None}, model)
    found = unickpt.open(tag)
    assert {name.partition("/")[0] for name in found.index.arrays} == {"module"}


def test_a_truncated_file_is_named(copy: Callable[[str], Path]) -> None:
    for name in ("expp_rank_1_mp_rank_00_optim", "layer_1_expert_3_mp_rank_00_model"):
        tag = copy("moe-z0-ep2")
        file = tag / f"{name}_states.pt"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(CheckpointCorrupt, match=name):
            unickpt.open(tag)
        shutil.rmtree(tag.parent.parent)
