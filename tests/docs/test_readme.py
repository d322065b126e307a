"""The README's example and how-tos, run as they stand there."""

from __future__ import annotations

import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.processes import Processes
from support.saving import save_in_job

import unickpt

README = Path(TESTS).parent.joinpath("README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def block(word: str) -> str:
    (found,) = (text for text in BLOCKS if word in text)
    return found


def test_the_example_in_both_frameworks(processes: Processes, tmp_path: Path) -> None:
    here = str(tmp_path / "step_100")
    save = block("# save.py").replace("/tmp/run/step_100", here)
    load = block("# load.py").replace("/tmp/run/step_100", here)
    assert len((save + load).splitlines()) <= 15
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    processes.finish([processes.start(save, env=flags)])
    check = (
        "\nassert state['step'] == 100"
        "\nassert (state['params']['w'].to_local() == 1).all() and w.to_local().shape[1] == 128"
        "\nimport torch.distributed; torch.distributed.destroy_process_group()"
    )
    processes.finish(processes.torch(4, load + check))


def run(word: str, **names: Any) -> dict[str, Any]:
    """Runs a block with the names that it takes for granted, in the current directory."""
    exec(block(word), names)
    return names


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_opening_what_others_wrote() -> None:
    torch = pytest.importorskip("torch")
    Path("hf-model").mkdir()
    torch.save({"model": {"w": torch.arange(6.0).reshape(2, 3).T}}, "hf-model/checkpoint.pt")
    found = run("hf-model", unickpt=unickpt)
    assert np.array_equal(found["weights"]["model"]["w"], np.arange(6.0).reshape(2, 3).T)
    assert unickpt.verify("ckpt/imported").ok


def test_loading_together() -> None:
    unickpt.save("c", {"w": np.ones((3, 5))})
    found = run("exchange=True", path="c", like={"w": np.zeros((3, 5))}, unickpt=unickpt)
    assert (found["state"]["w"] == 1).all()


def test_a_model_and_its_optimizer() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    fresh = torch.nn.Linear(3, 2)
    save, load = block('"optim": optimizer, "step": 1').splitlines()
    exec(save, {"unickpt": unickpt, "model": model, "optimizer": optimizer})
    again = torch.optim.AdamW(fresh.parameters())
    exec(load, {"unickpt": unickpt, "model": fresh, "optimizer": again})
    assert torch.equal(fresh.weight, model.weight)
    assert len(again.state_dict()["state"]) == 2


def test_a_part_into_another_model() -> None:
    torch = pytest.importorskip("torch")

    def model(width: int) -> Any:
        layers = {"body": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, width)}
        return torch.nn.ModuleDict(layers)

    old = model(4)
    optimizer = torch.optim.AdamW(old.parameters())
    for parameter in old.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    unickpt.save("ckpt/step_1", {"model": old, "optim": optimizer, "step": 1})
    new = model(2)
    fresh = torch.optim.AdamW(new.parameters())
    found = run("return_report=True", with_another_head=new, fresh_optimizer=fresh, unickpt=unickpt)
    assert len(found["report"].mismatched) == 2
    assert found["state"]["step"] == 1
    assert torch.equal(new["body"].weight, old["body"].weight)
    assert len(fresh.state) == 2


def test_two_sources_of_one_tree() -> None:
    w = np.ones(2)
    unickpt.save("ckpt/base", {"model": {"w": w, "head": w}})
    unickpt.save("ckpt/adapter", {"model": {"lora_a": 2 * w}})
    unickpt.save("ckpt/step_1", {"model": {"w": w}, "step": 1, "optim": w})
    zero = np.zeros(2)
    like = {"model": {"w": zero, "head": np.full(3, 9.0), "lora_a": zero.copy()}}
    found = run('skip="**/lora_*"', like=like, unickpt=unickpt)
    model = found["like"]["model"]
    assert [model[k].tolist() for k in ("w", "head", "lora_a")] == [[1, 1], [9, 9, 9], [2, 2]]
    assert set(found["weights"]) == {"model", "step"}


def test_into_jax_on_another_mesh() -> None:
    jax = pytest.importorskip("jax")
    from jax.sharding import NamedSharding, PartitionSpec

    init = lambda key: {"w": jax.random.normal(key, (8, 4))}  # noqa: E731
    unickpt.save("ckpt/step_1", init(jax.random.key(0)))
    mesh = jax.make_mesh((8,), ("x",))
    shardings = {"w": NamedSharding(mesh, PartitionSpec("x"))}
    state = run("abstract = ", jax=jax, init=init, shardings=shardings, unickpt=unickpt)["state"]
    assert state["w"].sharding == shardings["w"]
    assert np.array_equal(state["w"], init(jax.random.key(0))["w"])


def test_from_jax_to_torch_and_back() -> None:
    torch = pytest.importorskip("torch")
    optax = pytest.importorskip("optax")
    from unickpt.adapters.torch import NamedOptimizer

    rng = np.random.default_rng(0)
    layers = {"q": {"kernel": rng.random((2, 6, 3, 4), np.float32)}}
    layers["norm"] = {"scale": rng.random((2, 6), np.float32)}
    params = {"embed": {"embedding": rng.random((7, 6), np.float32)}, "layers": layers}
    opt_state = optax.adam(1e-3).init(params)
    unickpt.save("ckpt/jax", {"params": params, "opt_state": opt_state, "step": 5})

    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(7, 6)
    model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for layer in model.layers:
        layer.q, layer.norm = torch.nn.Linear(6, 12, bias=False), torch.nn.RMSNorm(6)
    optimizer = torch.optim.Adam(model.parameters())
    like = {"params": params, "opt_state": opt_state, "step": 0}
    names = {"model": model, "optimizer": optimizer, "NamedOptimizer": NamedOptimizer, "like": like}
    kernel = layers["q"]["kernel"].copy()
    state = run("rules.inverse", unickpt=unickpt, **names)["state"]
    weight = model.layers[1].q.weight.detach().numpy()
    assert np.array_equal(weight, kernel[1].reshape(6, 12).T)
    assert np.array_equal(state["params"]["layers"]["q"]["kernel"], kernel)
    assert len(optimizer.state_dict()["state"]) == 5


def test_looking_inside() -> None:
    unickpt.save("run/step_100", {"params": {"w": np.arange(60).reshape(30, 2)}, "step": 1})
    text = block("reads one small object").replace("s3://bucket/", "")
    exec(text, {"unickpt": unickpt})


def test_elements_held_in_ones_own_way() -> None:
    flat = np.arange(4096 * 1024, dtype=np.float32)
    names = {"start": 0, "flat_tensor": flat, "rows": flat[: 10 * 1024].reshape(10, 1024)}
    lines = block("LocalFragments.flat").splitlines()
    kept = "\n".join(line for line in lines if "any boxes" not in line)
    exec(kept, {**names, "path": "x", "unickpt": unickpt})
    exec("\n".join(lines[:4]), names)
    assert os.path.exists("x")


def test_what_differs_by_process() -> None:
    torch = pytest.importorskip("torch")
    rng = run("PerProcess(torch", torch=torch, path="x", unickpt=unickpt)["rng"]
    assert torch.equal(rng, torch.get_rng_state())


def test_processes_that_no_framework_knows() -> None:
    run("job-8231", index=0, count=1, path="x", tree={"a": 1}, unickpt=unickpt)
    assert unickpt.load("x") == {"a": 1}


def test_saving_while_training_goes_on() -> None:
    torch = pytest.importorskip("torch")

    def train(model: Any, optimizer: Any) -> None:
        model(torch.ones(3)).sum().backward()
        optimizer.step()

    text = block("optimizers=[optimizer]").replace("save_every=500", "save_every=2")
    for total in (5, 9):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        names = {"model": model, "optimizer": optimizer, "total_steps": total, "train": train}
        exec(text, {"unickpt": unickpt, **names})
    with unickpt.Checkpointer("ckpt/run") as checkpointer:
        assert checkpointer.steps() == [0, 4, 6, 8]
        assert checkpointer.load()["optim"]["state"][0]["step"] == 9


def test_being_stopped() -> None:
    def train_step(state: dict[str, int]) -> dict[str, int]:
        if state["n"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"n": state["n"] + 1}

    names = {"first": 0, "total_steps": 100, "state": {"n": 0}, "train_step": train_step}
    run("preemption=True", unickpt=unickpt, **names)
    with unickpt.Checkpointer("ckpt/run") as checkpointer:
        assert checkpointer.steps() == [3]
        assert checkpointer.load() == {"n": 4}


def test_going_back() -> None:
    with unickpt.Checkpointer("ckpt/run") as checkpointer:
        for step in (100, 150, 160, 200):
            checkpointer.save(step, {"n": step})
    run("after=150", unickpt=unickpt, train_step=lambda state: {"n": state["n"] + 1})
    with unickpt.Checkpointer("ckpt/run") as checkpointer:
        assert checkpointer.steps() == [100, 150]
        checkpointer.save(200, {"n": 200})
    text = block("after=150").replace("    ckpt.drop_later_steps()", "    pass")
    exec(text, {"unickpt": unickpt, "train_step": lambda state: {"n": state["n"] + 1}})
    assert unickpt.Checkpointer("ckpt/run").load() == {"n": 151}


def test_two_tiers(tmp_path: Path) -> None:
    text = block('local="/dev/shm/run"').replace("s3://bucket", "bucket")
    names: dict[str, Any] = {"unickpt": unickpt}
    exec(text.replace("/dev/shm", str(tmp_path / "shm")), names)
    with names["ckpt"] as checkpointer:
        checkpointer.save(1, {"w": np.ones(3)})
    assert sorted(os.listdir(tmp_path / "shm" / "run")) == [".unickpt.lock", "step_1"]
    assert unickpt.load("bucket/run/step_1")["w"].all()


def test_only_what_changed_is_written() -> None:
    state = {"frozen": np.zeros(5000), "trained": np.zeros(2000)}
    run("reuse=True", unickpt=unickpt, step=1, state=state)
    with unickpt.Checkpointer("runs/lora", reuse=True) as checkpointer:
        state = checkpointer.load()
        state["trained"] += 1
        report = checkpointer.save(2, state).result()
    assert (report.written_bytes, report.reused_bytes) == (16_000, 40_000)


def test_the_best_steps_and_the_dashboard() -> None:
    dashboard: list[float] = []
    names = run("keep_best=2", unickpt=unickpt, step=1, state={}, loss=0.5, dashboard=dashboard)
    names["ckpt"].close()
    assert len(dashboard) == 1


def test_a_data_loader_of_torch_on_fewer_processes() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    text = block("StatefulDataLoader(dataset")
    dataset = order = list(range(100))
    first = [{"start": 0, "seen": 15, "loader": None} for _ in range(4)]
    saved = save_in_job("ckpt/step_1", 4, lambda i: {"data": unickpt.PerProcess(first[i])})
    assert not any(isinstance(outcome, BaseException) for outcome in saved)
    names = {"dataset": dataset, "order": order, "rank": 0, "world": 1}
    names["StatefulDataLoader"] = stateful.StatefulDataLoader
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata calls what torch deprecates
        exec(text, {"unickpt": unickpt, **names})
    state = unickpt.load("ckpt/step_2", {"data": unickpt.PerProcess()})["data"].value
    assert (state["start"], state["seen"]) == (60, 40)


def test_an_iterator_of_grain_on_fewer_processes() -> None:
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(100)

    def start(number: int) -> Any:
        iterator = iter(dataset[number::4].to_iter_dataset().batch(5))
        next(iterator)
        return iterator.get_state()

    states = [[(number, start(number))] for number in range(4)]
    saved = save_in_job("ckpt/step_1", 4, lambda i: {"data": unickpt.PerProcess(states[i])})
    assert not any(isinstance(outcome, BaseException) for outcome in saved)
    names = run("def deal", unickpt=unickpt, dataset=dataset)
    assert [batch.tolist() for batch in names["batches"]] == [
        list(range(number + 20, number + 40, 4)) for number in range(4)
    ]
