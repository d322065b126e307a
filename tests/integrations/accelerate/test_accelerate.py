"""unickpt.integrations.accelerate in place of Accelerator.save_state and load_state."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import TESTS
from support.processes import Processes

import unickpt

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.integration  # imports accelerate

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration  # noqa: E402

from unickpt.integrations import accelerate as integration  # noqa: E402
from unickpt.integrations.accelerate import (  # noqa: E402
    load_state,
    save_state,
    save_state_async,
)
from unickpt.saving.writer import ChunkWriter  # noqa: E402

EXAMPLE = Path(TESTS).parent.joinpath("examples", "hf_accelerate.py").read_text()

# accelerate itself makes no FSDP2 on the CPU; torch does.
SHARDED = EXAMPLE.replace(
    "torch.manual_seed(0)\n",
    """torch.manual_seed(0)
from accelerate import DistributedType, FullyShardedDataParallelPlugin
accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
)
""",
)


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes accelerators; their states are shared by all of a process."""

    def made(**arguments: Any) -> Any:
        forget()
        return Accelerator(cpu=True, **arguments)

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()

    yield made
    forget()


class Registered:
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Pair(NamedTuple):
    first: Any
    second: int


class Job:
    """A training with all that an accelerator saves."""

    def __init__(self, accelerator: Any) -> None:
        torch.manual_seed(3)
        self.accelerator = accelerator
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
        data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
        own = torch.Generator().manual_seed(2)  # else iterating draws from the global one
        batches = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=own)
        prepared = accelerator.prepare(model, optimizer, schedule, batches)
        self.model, self.optimizer, self.schedule, self.batches = prepared
        self.ema = torch.nn.Linear(2, 2)
        self.registered = Registered([])
        accelerator.register_for_checkpointing(self.registered, self.ema)

    def train(self, begin: int, end: int) -> list[float]:
        """The losses of steps of the epoch in which the loader is."""
        losses = []
        for number, batch in enumerate(self.accelerator.skip_first_batches(self.batches, begin)):
            if begin + number == end:
                break
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
            self.registered.seen.append(torch.tensor(loss.item(), dtype=torch.bfloat16))
            torch.nn.init.constant_(self.ema.weight, loss.item())
        return losses


def seeded() -> Any:
    return DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)


@pytest.mark.parametrize("save", [save_state, save_state_async])
def test_a_job_goes_on_as_if_it_had_not_stopped(
    make: Callable[..., Any], tmp_path: Path, save: Callable[..., Any]
) -> None:
    arguments = {"dataloader_config": seeded(), "gradient_accumulation_steps": 2}
    job = Job(make(**arguments))
    job.batches.set_epoch(3)
    job.train(0, 4)
    saved = save(job.accelerator, tmp_path / "c")
    expected = job.train(4, 8)
    if save is save_state_async:
        saved.result()
    other = Job(make(**arguments))
    other.train(0, 2)  # what it has is replaced
    load_state(other.accelerator, tmp_path / "c")
    assert other.batches.iteration == 3
    assert [each.dtype for each in other.registered.seen] == [torch.bfloat16] * 4
    assert other.train(4, 8) == expected
    assert other.schedule.get_last_lr() == job.schedule.get_last_lr()
    assert torch.equal(other.ema.weight, job.ema.weight)
    assert all(map(torch.equal, other.registered.seen, job.registered.seen))
    unickpt.verify(tmp_path / "c")


def test_a_job_goes_back_to_before_its_first_step(make: Callable[..., Any], tmp_path: Path) -> None:
    job = Job(make(dataloader_config=seeded()))
    save_state(job.accelerator, tmp_path / "c")
    expected = job.train(0, 4)
    load_state(job.accelerator, tmp_path / "c")
    assert not job.optimizer.optimizer.state
    assert job.train(0, 4) == expected
    before = copy.deepcopy(job.optimizer.optimizer.state_dict()["state"])
    other = Job(make(dataloader_config=seeded()))
    other.ema.weight.data = torch.zeros(3, 3)
    save_state(other.accelerator, tmp_path / "other")
    with pytest.raises(unickpt.LoadMismatch, match="registered/1/weight"):
        load_state(job.accelerator, tmp_path / "other")
    found = job.optimizer.optimizer.state_dict()["state"]
    assert found.keys() == before.keys()
    assert all(torch.equal(found[k]["exp_avg"], before[k]["exp_avg"]) for k in before)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata
def test_a_scaler_and_a_stateful_loader_are_saved(make: Callable[..., Any], tmp_path: Path) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = make(dataloader_config=config)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    batches = accelerator.prepare(torch.utils.data.DataLoader(list(range(8))))
    first = iter(batches)
    assert [next(first).item() for _ in range(3)] == [0, 1, 2]
    save_state(accelerator, tmp_path / "c")
    accelerator = make(dataloader_config=config)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    batches = accelerator.prepare(torch.utils.data.DataLoader(list(range(8))))
    load_state(accelerator, tmp_path / "c")
    assert accelerator.scaler.get_scale() == 8.0
    assert next(iter(batches)).item() == 3


def test_the_oldest_is_removed_from_the_folder_where_the_save_began(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        monkeypatch.chdir(folder)
        names = ProjectConfiguration("run", automatic_checkpoint_naming=True)
        job = Job(make(project_config=names))
        for _ in range(2):
            save_state(job.accelerator)
    monkeypatch.chdir(first)
    names = ProjectConfiguration(
        "run", automatic_checkpoint_naming=True, total_limit=1, iteration=2
    )
    job, gone = Job(make(project_config=names)), threading.Event()
    real = ChunkWriter.write_all

    def write_all(*arguments: Any, **named: Any) -> Any:
        assert gone.wait(60)
        return real(*arguments, **named)

    monkeypatch.setattr(ChunkWriter, "write_all", write_all)
    ended = threading.Event()
    pending = save_state_async(job.accelerator)
    pending.add_done_callback(ended.set)  # after the removal
    monkeypatch.chdir(second)
    unickpt.copy(second / "run/checkpoints/checkpoint_1", second / "run/checkpoints/checkpoint_2")
    gone.set()
    pending.result()
    assert ended.wait(60)
    there = [sorted(os.listdir(folder / "run" / "checkpoints")) for folder in (first, second)]
    assert there == [["checkpoint_2"], ["checkpoint_0", "checkpoint_1", "checkpoint_2"]]


def test_automatic_names_go_on_and_the_oldest_are_removed(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    names = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    job = Job(make(project_config=names))
    for _ in range(3):
        save_state(job.accelerator)
    save_state_async(job.accelerator).result()
    folder = tmp_path / "checkpoints"
    late = time.monotonic() + 20  # it is removed when the save has ended
    while (folder / "checkpoint_1").exists() and time.monotonic() < late:
        time.sleep(0.02)
    assert sorted(each.name for each in folder.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    names = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, iteration=3)
    job = Job(make(project_config=names))
    with pytest.raises(FileExistsError, match=r"checkpoint_3 exists.*iteration"):
        save_state(job.accelerator)
    # What was killed while it saved is no checkpoint.
    (folder / "checkpoint_7" / "processes" / "x").mkdir(parents=True)
    load_state(job.accelerator)
    assert job.accelerator.save_iteration == 4


@pytest.mark.parametrize("save", [save_state, save_state_async])
def test_what_accelerate_saved_is_loaded_and_replaced(
    make: Callable[..., Any], tmp_path: Path, save: Callable[..., Any]
) -> None:
    arguments = {"dataloader_config": seeded(), "gradient_accumulation_steps": 2}
    job = Job(make(**arguments))
    job.train(0, 4)
    job.accelerator.save_state(str(tmp_path / "c"))
    expected = job.train(4, 8)
    other = Job(make(**arguments))
    (tmp_path / "c" / "mine.txt").touch()
    with pytest.raises(unickpt.CheckpointExists, match=r"mine\.txt"):
        save_state(other.accelerator, tmp_path / "c")
    (tmp_path / "c" / "mine.txt").unlink()
    called: list[Any] = []
    other.accelerator.register_load_state_pre_hook(lambda models, folder: called.append(folder))
    load_state(other.accelerator, tmp_path / "c", {"weights_only": False})  # for accelerate
    assert called == [str(tmp_path / "c")]
    assert other.accelerator.step == 4
    saved = save(other.accelerator, tmp_path / "c")
    assert other.train(4, 8) == expected
    if save is save_state_async:
        saved.result()
    assert sorted(each.name for each in (tmp_path / "c").iterdir()) == [
        *("manifest.ocdbt", "processes")
    ]
    third = Job(make(**arguments))
    load_state(third.accelerator, tmp_path / "c")
    assert third.train(4, 8) == expected


def test_the_newest_is_taken_of_what_accelerate_and_unickpt_saved(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    names = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    job = Job(make(project_config=names))
    for number in range(3):
        job.train(number, number + 1)
        job.accelerator.save_state()
    folder = tmp_path / "checkpoints"
    # The last one was killed while it wrote.
    last = folder / "checkpoint_2" / "custom_checkpoint_1.pkl"
    last.write_bytes(last.read_bytes()[:-30])
    names = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    job = Job(make(project_config=names))
    names.iteration = 1
    with pytest.raises(unickpt.CheckpointExists, match="checkpoint_1 exists"):
        save_state(job.accelerator)
    load_state(job.accelerator)
    assert len(job.registered.seen) == 2
    assert names.iteration == 2
    save_state(job.accelerator)  # in the place of what was killed
    found = {each.name: (each / "manifest.ocdbt").exists() for each in folder.iterdir()}
    assert found == {"checkpoint_1": False, "checkpoint_2": True}
    job.train(2, 3)
    load_state(job.accelerator)
    assert len(job.registered.seen) == 2


def test_registered_states_keep_their_tensors(make: Callable[..., Any], tmp_path: Path) -> None:
    accelerator = make()
    registered = Registered([Pair(torch.ones(2), 3), defaultdict(list, {"a": torch.zeros(1)})])
    accelerator.register_for_checkpointing(registered)
    save_state(accelerator, tmp_path / "c")
    registered.seen = []
    load_state(accelerator, tmp_path / "c")
    pair, found = registered.seen
    assert pair._fields == Pair._fields
    assert torch.equal(pair.first, torch.ones(2))
    assert pair.second == 3
    assert torch.equal(found["a"], torch.zeros(1))


def test_a_state_that_looks_like_a_stored_tensor_is_refused(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    accelerator = make()
    accelerator.register_for_checkpointing(Registered([{"torch.Tensor": 1, "dtype": "int8"}]))
    with pytest.raises(unickpt.UnsupportedLeaf, match="registered object 0 has a dict with the"):
        save_state(accelerator, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["save", "int8", "no such", 3, None])
def test_the_dtype_of_a_stored_tensor_is_not_trusted(
    make: Callable[..., Any], tmp_path: Path, name: Any
) -> None:
    accelerator = make()
    accelerator.register_for_checkpointing(Registered([]))
    tree, metadata = integration._tree(accelerator), integration._metadata(accelerator)
    array = np.ones(2, np.float32)
    tree["values"]["registered"]["0"] = {"seen": {"torch.Tensor": array, "dtype": name}}
    unickpt.save(tmp_path / "c", tree, metadata=metadata)
    with pytest.raises(unickpt.CheckpointCorrupt, match=r"dtype float32 is said to be a tensor of"):
        load_state(accelerator, tmp_path / "c")


class Interrupting(torch.optim.lr_scheduler.ConstantLR):
    """Calls a function when its state is asked for."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def state_dict(self) -> dict[str, Any]:
        then, self.then = self.then, lambda: None
        then()
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = state["last_epoch"]


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_mixed(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    accelerator = make()
    model = torch.nn.Linear(64, 64)
    schedule = Interrupting(torch.optim.SGD(model.parameters(), lr=1.0))
    registered = Registered([])
    accelerator.prepare(model, schedule)
    accelerator.register_for_checkpointing(registered)

    def save(number: int) -> None:
        torch.nn.init.constant_(model.weight, number)
        schedule.last_epoch, registered.seen = number, [number]
        save_state(accelerator, tmp_path / "c")

    save(1)
    schedule.then = lambda: save(2)
    load_state(accelerator, tmp_path / "c")
    assert registered.seen == [schedule.last_epoch] == [int(model.weight[0, 0])]


def test_only_names_that_it_gives_are_numbered(make: Callable[..., Any], tmp_path: Path) -> None:
    def automatic() -> Any:
        return make(
            project_config=ProjectConfiguration(
                str(tmp_path), automatic_checkpoint_naming=True, total_limit=1
            )
        )

    save_state(automatic())
    folder = tmp_path / "checkpoints"
    for name in ("checkpoint_\N{SUPERSCRIPT TWO}", "checkpoint_007", "checkpoint_best"):
        unickpt.save(folder / name, {"mine": 1})
    accelerator = automatic()
    load_state(accelerator)
    save_state(accelerator)
    assert {path.name.removeprefix("checkpoint_") for path in folder.iterdir()} == {
        *("1", "\N{SUPERSCRIPT TWO}", "007", "best")
    }


def test_other_objects_than_saved_are_refused_before_anything_changes(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    job = Job(make())
    save_state(job.accelerator, tmp_path / "c")
    other = make()
    model = other.prepare(torch.nn.Linear(4, 8))
    before = model.weight.clone()
    with pytest.raises(unickpt.LoadMismatch, match="1 optimizers, not 0"):
        load_state(other, tmp_path / "c")
    assert torch.equal(model.weight, before)
    unickpt.save(tmp_path / "other", {"w": torch.ones(2)})
    with pytest.raises(unickpt.LoadMismatch, match="not saved by"):
        load_state(other, tmp_path / "other")


def test_what_cannot_be_honoured_is_refused_by_name(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    accelerator = make()
    with pytest.raises(ValueError, match="safe_serialization"):
        save_state(accelerator, tmp_path, safe_serialization=False)
    with pytest.raises(TypeError, match="exclude_frozen"):
        save_state(accelerator, tmp_path, exclude_frozen=True)
    with pytest.raises(TypeError, match="weights_only"):
        load_state(accelerator, tmp_path, {"weights_only": False})
    with pytest.raises(ValueError, match="output_dir"):
        save_state(accelerator)
    accelerator.register_save_state_pre_hook(print)
    with pytest.raises(ValueError, match="register_save_state_pre_hook"):
        save_state(accelerator, tmp_path)
    with pytest.raises(TypeError, match="exclude_frozen_parameters"):  # of DeepSpeed only
        save_state(accelerator, tmp_path, exclude_frozen_parameters=True)
    accelerator.state.distributed_type = DistributedType.MEGATRON_LM
    with pytest.raises(ValueError, match="MEGATRON_LM"):
        load_state(accelerator, tmp_path)


@pytest.mark.trainers
@pytest.mark.parametrize("source", [EXAMPLE, SHARDED], ids=["ddp", "fsdp2"])
def test_a_killed_job_goes_on_with_another_number_of_ranks(
    processes: Processes, tmp_path: Path, source: str
) -> None:
    assert len(EXAMPLE.splitlines()) <= 40
    folder = tmp_path / "run"
    job = processes.torch(2, source, folder, 10**6)
    while newest(folder) < 5:
        assert all(process.poll() is None for process in job)
        time.sleep(0.05)
    for process in job:
        process.send_signal(signal.SIGKILL)
    for process in job:
        process.wait()
    last = newest(folder) + 1  # the first one is number 0
    names = f"checkpoints/checkpoint_{last - 1}"
    unickpt.convert(folder / names, tmp_path / "back" / names, to="accelerate")
    reference = processes.start(EXAMPLE, tmp_path / "reference", last + 4)
    found = losses(processes.finish([processes.start(EXAMPLE, folder, last + 4)])[0])
    expected = losses(processes.finish([reference])[0])
    assert list(found) == list(range(last + 1, last + 5))
    for step, loss in found.items():  # ranks add gradients in another order
        assert loss == pytest.approx(expected[step], rel=0.02, abs=1e-4)
    if source == SHARDED:  # the way back to one process of accelerate's own
        going_on = f"    accelerator.load_state()\n    names.iteration = {last}\n"
        plain = EXAMPLE.replace("    load_state(accelerator)\n", going_on)
        plain = plain.replace("save_state_async(accelerator)", "accelerator.save_state()")
        back = losses(processes.finish([processes.start(plain, tmp_path / "back", last + 4)])[0])
        assert back == found


def newest(folder: Path) -> int:
    found = (folder / "checkpoints").glob("checkpoint_*/manifest.ocdbt")
    return max((int(each.parent.name.split("_")[1]) for each in found), default=-1)


def losses(output: str) -> dict[int, float]:
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(step): float(loss) for _, step, loss in lines}
