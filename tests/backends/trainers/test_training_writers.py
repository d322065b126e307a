"""Folders of Hugging Face's Trainer and of accelerate that unickpt writes."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.saving import files, in_job

import unickpt
from unickpt import SaveOptions, UnsupportedLeaf
from unickpt.backends.trainers.transformers import TrainerWriter
from unickpt.format import writer_registry
from unickpt.plugins.export.destinations import LocalDestination

FAST = SaveOptions(fsync=False)
WEIGHTS = {name: np.arange(n, n + 6, dtype=np.float32) for n, name in enumerate("abc")}


class Pair(NamedTuple):
    first: int
    second: int


def rng(number: int) -> dict[str, Any]:
    """As `unickpt.integrations.rng` has it."""
    words = np.arange(625, dtype=np.uint32) + number
    numpy = {"kind": "MT19937", "keys": words[:624], "position": 3, "has_gauss": 0, "cached": 0.0}
    return {
        "python": {"version": 3, "words": words, "gauss": None},
        "numpy": numpy,
        "torch": np.arange(5056, dtype=np.uint16).astype(np.uint8) + np.uint8(number),
        "accelerators": {"cuda": [np.full(16, number, np.uint8)]},
    }


def optimizer(groups: Sequence[Sequence[str]] = (("c",), ("a", "b"))) -> dict[str, Any]:
    state = {name: {"step": np.float32(2), "exp_avg": w + 7} for name, w in WEIGHTS.items()}
    settings = [{"lr": 0.1 * n, "betas": (0.9, 0.99), "params": [*g]} for n, g in enumerate(groups)]
    return {"state": state, "param_groups": settings}


def of_trainer(process: int = 0, **other: Any) -> dict[str, Any]:
    state = {"global_step": 2, "best_model_checkpoint": "runs/step_2", "log_history": []}
    return {
        "model": OrderedDict(WEIGHTS, tied=WEIGHTS["a"]),
        "optimizer": optimizer(),
        "scheduler": {"last_epoch": 2, "base_lrs": [0.1], "lr_lambdas": [{}]},
        "scaler": {"scale": 8.0},
        "trainer_state": unickpt.PerProcess(json.dumps(state) if process == 0 else None),
        "rng": unickpt.PerProcess(rng(process)),
    } | other


def of_accelerate(process: int = 0, position: Any = None, **registered: Any) -> dict[str, Any]:
    loader = {"iteration": 0, "sampler": None, "state": position}
    of_process = {"step": 3, "dataloaders": [loader], "rng": rng(process)}
    return {
        "models": [OrderedDict(WEIGHTS), OrderedDict(a=WEIGHTS["a"])],
        "optimizers": [optimizer(), optimizer()],
        "schedulers": [{"last_epoch": 2}],
        "scaler": {"scale": 8.0},
        "registered": {"1": OrderedDict(WEIGHTS)},
        "values": {"process": unickpt.PerProcess(of_process), "registered": registered},
    }


def save(path: Path, make: Any, count: int = 1, **metadata: Any) -> None:
    def run(group: Any) -> Any:
        options = replace(FAST, group=group)
        return unickpt.save(path, make(group.index), metadata=metadata, options=options)

    for result in in_job(count, run):
        assert not isinstance(result, BaseException), result


def export(path: Path, to: str, **options: Any) -> Path:
    out = path.with_name("out")
    unickpt.convert(path, out, to=to, options=FAST, overwrite=True, **options)
    return out


def load(path: Path) -> Any:
    """As the Trainer and accelerate do, which allow NumPy's arrays."""
    torch = pytest.importorskip("torch")
    numpy: Any = np
    kinds = [numpy._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype("uint32"))]
    with torch.serialization.safe_globals(kinds):
        return torch.load(path, weights_only=True)


@pytest.mark.integration
def test_a_folder_of_the_trainer(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "config").mkdir()
    for name in ("config.json", "trainer_state.json", "model.safetensors"):
        (tmp_path / "config" / name).write_text('{"copied": 1}')
    save(tmp_path / "c", of_trainer, 2)
    out = export(tmp_path / "c", "trainer", config=tmp_path / "config", max_shard_size=48)
    shards = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    of_processes = ["rng_state_0.pth", "rng_state_1.pth"]
    others = ["config.json", "model.safetensors.index.json", "optimizer.pt", "scaler.pt"]
    assert files(out) == sorted(
        [*shards, *of_processes, *others, "scheduler.pt", "trainer_state.json"]
    )
    assert unickpt.open(out).reader.format == "safetensors"
    assert sorted(unickpt.load(out)) == ["a", "b", "c"]  # tied weights have one name
    state = json.loads((out / "trainer_state.json").read_text())
    assert state == {"global_step": 2, "best_model_checkpoint": None, "log_history": []}
    found = torch.load(out / "optimizer.pt", weights_only=True)
    assert [group["params"] for group in found["param_groups"]] == [[0], [1, 2]]
    assert [group["lr"] for group in found["param_groups"]] == [0.0, 0.1]
    for number, name in enumerate("cab"):
        assert found["state"][number]["exp_avg"].tolist() == (WEIGHTS[name] + 7).tolist()
    scheduler = torch.load(out / "scheduler.pt", weights_only=True)
    assert scheduler == {"last_epoch": 2, "base_lrs": [0.1], "lr_lambdas": [{}]}
    assert torch.load(out / "scaler.pt", weights_only=True) == {"scale": 8.0}
    for process in range(2):
        states = load(out / f"rng_state_{process}.pth")
        expected = rng(process)
        assert states["python"] == (3, tuple(expected["python"]["words"].tolist()), None)
        kind, keys, *rest = states["numpy"]
        assert (kind, keys.dtype, rest) == ("MT19937", np.uint32, [3, 0, 0.0])
        assert np.array_equal(keys, expected["numpy"]["keys"])
        assert np.array_equal(states["cpu"].numpy(), expected["torch"])
        assert states["cuda"][0].tolist() == [process] * 16


@pytest.mark.integration
def test_one_process_has_the_state_of_one_accelerator(tmp_path: Path) -> None:
    save(tmp_path / "c", of_trainer)
    states = load(export(tmp_path / "c", "trainer") / "rng_state.pth")
    assert states["cuda"].tolist() == [0] * 16


@pytest.mark.integration
def test_a_folder_of_accelerate(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensor = {"torch.Tensor": WEIGHTS["b"], "dtype": "float32"}
    position = {"seen": 4, "generator": {"torch.Tensor": WEIGHTS["a"], "dtype": "float32"}}
    made = of_accelerate(position=position, **{"0": {"seen": [tensor, (1, "x")]}})
    save(tmp_path / "c", lambda process: made, accelerate={})
    out = export(tmp_path / "c", "accelerate")
    numbered = ("model.safetensors", "model_1.safetensors", "optimizer.bin", "optimizer_1.bin")
    states = ("scheduler.bin", "scaler.pt", "dl_state_dict.bin", "random_states_0.pkl")
    registered = ("custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl")
    assert files(out) == sorted([*numbered, *states, *registered])
    assert list(unickpt.load(out / "model_1.safetensors")) == ["a"]
    second = load(out / "optimizer_1.bin")
    assert second["state"][1]["exp_avg"].tolist() == (WEIGHTS["a"] + 7).tolist()
    own = load(out / "custom_checkpoint_0.pkl")
    assert own["seen"][0].tolist() == WEIGHTS["b"].tolist()
    assert own["seen"][1] == (1, "x")
    assert list(load(out / "custom_checkpoint_1.pkl")) == ["a", "b", "c"]
    found = load(out / "dl_state_dict.bin")
    assert (found["seen"], found["generator"].tolist()) == (4, WEIGHTS["a"].tolist())
    random = load(out / "random_states_0.pkl")
    assert random["step"] == 3
    assert random["random_state"][1] == tuple(rng(0)["python"]["words"].tolist())
    assert random["torch_manual_seed"].dtype == torch.uint8
    assert random["torch_cuda_manual_seed"][0].tolist() == [0] * 16


@pytest.mark.parametrize("to", ["trainer", "accelerate"])
def test_processes_share_the_work(tmp_path: Path, to: str) -> None:
    make, metadata = {"trainer": (of_trainer, {}), "accelerate": (of_accelerate, {to: {}})}[to]
    save(tmp_path / "c", make, 2, **metadata)

    def run(group: Any) -> Any:
        options = replace(FAST, group=group)
        return unickpt.convert(tmp_path / "c", tmp_path / "three", to=to, options=options)

    reports = in_job(3, run)
    assert all(report.written_bytes > 0 for report in reports), reports
    one = export(tmp_path / "c", to)
    unickpt.convert(tmp_path / "c", f"memory://training-writers/{to}", to=to, options=FAST)
    assert files(one) == files(tmp_path / "three")
    for name in files(one):
        assert (one / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


def test_what_is_no_step_of_an_integration_is_refused(tmp_path: Path) -> None:
    def refused(tree: Any, to: str, words: str, **metadata: Any) -> None:
        save(tmp_path / "c", lambda process: tree, **metadata)
        with pytest.raises(UnsupportedLeaf, match=words):
            export(tmp_path / "c", to)
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "c")

    refused({"model": WEIGHTS}, "trainer", "only a step of a Trainer with UnickptMixin")
    refused({"model": WEIGHTS}, "accelerate", "only what its save_state has saved")
    refused(of_trainer(more=1), "trainer", "'more', which a Trainer does not save")
    refused(of_trainer(optimizer={"x": 1}), "trainer", "'optimizer' is not the state of an opt")
    strange = of_trainer(optimizer=optimizer([["a", "b"]]))
    refused(strange, "trainer", "the parameter 'c', but no group in 'param_groups'")
    refused(of_trainer(rng=unickpt.PerProcess({})), "trainer", "'rng' is not what .* drop it by")
    named = of_accelerate(**{"0": {"seen": Pair(1, 2)}})
    refused(named, "accelerate", "registered/0 has a Pair", accelerate={})


def test_positions_of_several_processes_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "c", lambda process: of_accelerate(process, {"seen": 4}), 2, accelerate={})
    with pytest.raises(UnsupportedLeaf, match=r"data loader 0 is stateful, .* all 2 processes"):
        export(tmp_path / "c", "accelerate")


def test_generators_can_be_dropped(tmp_path: Path) -> None:
    save(tmp_path / "c", of_trainer)
    rules = unickpt.Rules.parse("rng <-> drop\ndefault {leaf...} <-> {leaf...}")
    out = export(tmp_path / "c", "trainer", rules=rules)
    assert "rng_state.pth" not in files(out)
    assert "optimizer.pt" in files(out)


@dataclass(frozen=True)
class Damaging(TrainerWriter):
    """Plans one array at the place of another, or another number."""

    wrong: str = ""

    def plan(self, index: Any, most_bytes: int, file: str | None) -> Any:
        plan = super().plan(index, most_bytes, file)
        if self.wrong == "number":
            index = replace(index, values={**index.values, "scheduler/last_epoch": 9})
            return super().plan(index, most_bytes, file)
        names = {"optimizer/state/a/exp_avg": "optimizer/state/b/exp_avg"}

        def swapped(planned: Any) -> Any:
            data = (replace(d, array=names.get(d.array, d.array)) for d in planned.data)
            return replace(planned, data=tuple(data))

        return replace(plan, files=tuple(map(swapped, plan.files)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("array", "'optimizer/state/a/exp_avg': 6 elements differ"),
        ("number", "'last_epoch': 2 is read back as 9"),
        ("bytes", "trainer_state.json has other bytes"),
    ],
)
def test_each_part_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, words: str
) -> None:
    save(tmp_path / "c", of_trainer)
    if wrong == "bytes":  # a disk that lies
        monkeypatch.setattr(LocalDestination, "read", lambda self, file: b"")
    writer_registry.register_writer("damaging", Damaging)
    try:
        with pytest.raises(unickpt.CheckpointCorrupt, match=words):
            export(tmp_path / "c", "damaging", wrong=wrong)
    finally:
        writer_registry.unregister_writer("damaging")
    assert not (tmp_path / "out").exists()
