"""Training jobs of Lightning with unickpt.integrations.lightning, killed and gone on with."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import TESTS, s3_server
from support.forked import PRELOADED
from support.forks import Forks
from support.processes import Processes, free_port

import unickpt
from unickpt.reading.checkpoints_below import checkpoints_below

pytest.importorskip("lightning")
pytestmark = pytest.mark.integration

EXAMPLE = Path(TESTS).parent.joinpath("examples", "lightning_job.py").read_text()
FIT = "from support import lightning_jobs; lightning_jobs.fit(*ARGS)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Imports Lightning once for all jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=":")
        patch.setenv("OMP_NUM_THREADS", "1")
        forks = Forks(tmp_path_factory.mktemp("out"), *PRELOADED["torch"], "support.lightning_jobs")
    yield forks
    forks.close()


class Jobs:
    """Starts jobs of several ranks; all are gone when the test ends."""

    def __init__(self, server: Forks, patch: pytest.MonkeyPatch) -> None:
        self._server, self._patch = server, patch
        self.said = server.said

    def start(self, world: int, source: str, *arguments: object) -> list[int]:
        port, pids = str(free_port()), []
        for rank in range(world):
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            for name, value in env.items():
                self._patch.setenv(name, str(value))
            self._patch.setenv("MASTER_ADDR", "127.0.0.1")
            given = [str(x) if isinstance(x, Path) else x for x in arguments]
            pids.append(self._server.start(source, *given))
        return pids

    def finish(self, pids: list[int]) -> list[str]:
        ended = self._server.wait_all(pids)
        for one in ended:
            assert one.code == 0, one.out
        return [one.out for one in ended]

    def run(self, world: int, source: str, *arguments: object) -> list[str]:
        return self.finish(self.start(world, source, *arguments))

    def kill_when(self, pids: list[int], step: int) -> None:
        """Kills all ranks with -9 when the first has begun a step."""
        while f"step {step} " not in self.said(pids[0]):
            assert self._server.runs(pids[0]), self.said(pids[0])
            time.sleep(0.002)
        for pid in pids:
            self._server.kill(pid)
        self.is_killed(pids)

    def is_killed(self, pids: list[int]) -> None:
        ended = self._server.wait_all(pids)
        assert all(one.code == -signal.SIGKILL for one in ended), ended


@pytest.fixture
def jobs(server: Forks, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(server, monkeypatch)


def losses(outputs: list[str]) -> dict[int, float]:
    """The loss of each step, the mean of all ranks; bit for bit if there is one rank."""
    found: dict[int, list[float]] = {}
    for output in outputs:
        for line in output.splitlines():
            if line.startswith("step "):
                _, step, *_, loss = line.split()
                value = float.fromhex(loss) if "x" in loss else float(loss)
                found.setdefault(int(step), []).append(value)
    return {step: sum(x) / len(x) for step, x in found.items()}


def step_of(path: Path | str) -> int:
    return int(unickpt.open(path).values["global_step"])  # type: ignore[arg-type]


@pytest.mark.trainers
def test_a_job_that_is_killed_goes_on_bit_for_bit(jobs: Jobs, tmp_path: Path) -> None:
    wanted = losses(jobs.run(1, FIT, "single", tmp_path / "reference", 12))
    job = jobs.start(1, FIT, "single", tmp_path / "run", 1000)
    jobs.kill_when(job, 7)
    last = step_of(tmp_path / "run" / "last.ckpt")
    assert 3 <= last < 12
    found = losses(jobs.run(1, FIT, "single", tmp_path / "run", 12))
    assert found == {step: loss for step, loss in wanted.items() if step > last}
    reference = unickpt.load(tmp_path / "reference" / "last.ckpt")
    went_on = unickpt.load(tmp_path / "run" / "last.ckpt")
    for name, array in reference["state_dict"].items():
        np.testing.assert_array_equal(went_on["state_dict"][name], array)
    for number, slots in reference["optimizer_states"][0]["state"].items():
        for name, array in slots.items():
            np.testing.assert_array_equal(
                went_on["optimizer_states"][0]["state"][number][name], array
            )
    unickpt.verify(tmp_path / "run" / "last.ckpt")


@pytest.mark.trainers
@pytest.mark.parametrize("kind", ["ddp", "sharded", "sharded1"])
def test_a_job_that_is_killed_goes_on_with_other_ranks(
    jobs: Jobs, tmp_path: Path, kind: str
) -> None:
    wanted = losses(jobs.run(1, FIT, "single", tmp_path / "reference", 9))
    jobs.kill_when(jobs.start(4, FIT, kind, tmp_path / "run", 1000), 6)
    last = step_of(tmp_path / "run" / "last.ckpt")
    assert 2 <= last < 9
    found = losses(jobs.run(2, FIT, kind, tmp_path / "run", 9))
    assert list(found) == list(range(last + 1, 10))
    for step, loss in found.items():  # the ranks add the gradients in another order
        assert loss == pytest.approx(wanted[step], rel=1e-3), step
    assert step_of(tmp_path / "run" / "last.ckpt") == 9
    unickpt.verify(tmp_path / "run" / "last.ckpt")
    stored = unickpt.open(tmp_path / "run" / "last.ckpt")
    assert stored["state_dict/net.0.weight"].shape == (32, 8)
    assert stored.index.processes == (1 if kind == "ddp" else 2)


@pytest.mark.trainers
def test_the_example_is_killed_and_goes_on_with_other_ranks(jobs: Jobs, tmp_path: Path) -> None:
    assert len(EXAMPLE.splitlines()) <= 40
    source = "import sys; sys.argv[1:] = map(str, ARGS)\n" + EXAMPLE
    wanted = losses(jobs.run(1, source, tmp_path / "reference", 8))
    jobs.kill_when(jobs.start(4, source, tmp_path / "run", 1000), 5)
    last = step_of(tmp_path / "run" / "last.ckpt")
    found = losses(jobs.run(2, source, tmp_path / "run", 8))
    assert list(found) == list(range(last + 1, 9))
    for step, loss in found.items():
        assert loss == pytest.approx(wanted[step], rel=1e-3), step


def test_tensor_parallel_ranks_load_what_others_saved(jobs: Jobs, tmp_path: Path) -> None:
    source = "from support import lightning_jobs as l; l.fit(*ARGS[:3], tensor_parallel=ARGS[3])"
    wanted = losses(jobs.run(1, FIT, "single", tmp_path / "reference", 6))
    jobs.run(4, source, "sharded", tmp_path / "run", 3, 2)
    found = losses(jobs.run(2, source, "sharded", tmp_path / "run", 6, 1))
    for step, loss in found.items():
        assert loss == pytest.approx(wanted[step], rel=1e-3), step
    assert list(found) == [4, 5, 6]


SAME = """
import json, os, sys
from lightning.fabric.plugins.io import TorchCheckpointIO
from support import lightning_jobs as l

found = {}
settings = [
    dict(monitor="loss", save_top_k=2, every_n_train_steps=2, save_last=True),
    dict(save_top_k=1, every_n_train_steps=3),
    dict(save_top_k=-1, every_n_train_steps=4, filename="{step}-{loss:.1f}"),
    dict(save_top_k=0, save_last=True, every_n_train_steps=5, save_weights_only=True),
    dict(monitor="loss", mode="max", save_top_k=1, every_n_train_steps=2, save_last="link"),
]
for io in (TorchCheckpointIO(), l.UnickptCheckpointIO(background=ARGS[1])):
    for number, given in enumerate(settings):
        folder = f"{ARGS[0]}/{type(io).__name__}/{number}"
        saving = lambda: l.ModelCheckpoint(folder, **given)
        trainer = l.fit("single", folder, 9, saving=saving, io=io, ckpt_path=None)
        callback = trainer.checkpoint_callback
        facts = [sorted(os.listdir(folder)), os.path.basename(callback.best_model_path)]
        facts += [os.path.basename(os.path.realpath(f"{folder}/last.ckpt"))]
        facts += [str(callback.best_model_score), os.path.basename(callback.last_model_path)]
        if number < 3:  # goes on from a path, and retention goes on with what it was
            best = callback.best_model_path
            trainer = l.fit("single", folder, 14, saving=saving, io=io, ckpt_path=best)
            facts += [trainer.global_step, sorted(os.listdir(folder))]
            best_k = trainer.checkpoint_callback.best_k_models
            facts += [sorted(os.path.basename(x) for x in best_k)]
        found.setdefault(number, []).append(facts)
print(json.dumps(found))
"""


@pytest.mark.parametrize("background", [True, False])
def test_model_checkpoint_does_the_same_as_with_lightnings_plugin(
    jobs: Jobs, tmp_path: Path, background: bool
) -> None:
    (output,) = jobs.run(1, SAME, tmp_path, background)
    found = json.loads(output.splitlines()[-1])
    for number, (theirs, ours) in found.items():
        assert ours == theirs, number
        assert len(theirs[0]) > 0
    assert "last.ckpt" in found["4"][1][0]


def test_a_killed_first_save_leaves_nothing_to_go_on_from(jobs: Jobs, tmp_path: Path) -> None:
    """`ckpt_path="last"` would take a folder of that name for a checkpoint."""
    source = """
import os, signal
from support import lightning_jobs as l
import unickpt
die = lambda done, total: os.kill(os.getpid(), signal.SIGKILL)
l.fit(*ARGS, io=l.UnickptCheckpointIO(unickpt.SaveOptions(progress=die)))
"""
    with pytest.raises(AssertionError):
        jobs.run(1, source, "single", tmp_path, 3)
    hidden = {".last.ckpt.saving", ".epoch=0-step=1.ckpt.saving"}
    assert {path.name for path in tmp_path.iterdir()} <= hidden
    found = losses(jobs.run(1, FIT, "single", tmp_path, 3))
    assert list(found) == [1, 2, 3]  # from the beginning
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "epoch=0-step=3.ckpt"}


def test_sharded_jobs_refuse_what_they_cannot_do(jobs: Jobs, tmp_path: Path) -> None:
    source = """
import pytest, torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from support import lightning_jobs as l
with pytest.raises(TypeError, match="TorchCheckpointIO cannot save with Sharded"):
    l.fit("sharded", ARGS[0], 1, io=TorchCheckpointIO())
one = l.Sharded(1, 1, save_distributed_checkpoint=False)
with pytest.raises(ValueError, match="save_distributed_checkpoint=False"):
    one.setup_environment()
"""
    jobs.run(1, source, tmp_path)


def test_a_value_that_rank_0_cannot_save_fails_all_ranks(jobs: Jobs, tmp_path: Path) -> None:
    source = """
import pytest, unickpt
from support import lightning_jobs as l
class Saving(l.ModelCheckpoint):
    def state_dict(self):
        return {"code": print}
with pytest.raises(unickpt.UnickptError, match="callbacks/.*code"):
    l.fit("sharded", ARGS[0], 3, saving=lambda: Saving(ARGS[0], every_n_train_steps=1))
"""
    jobs.run(2, source, tmp_path)


def test_what_lightning_saved_is_gone_on_with(jobs: Jobs, tmp_path: Path) -> None:
    """A strategy's own sharded folder, into the mixin; and its own file, into the plugin."""
    source = """
import lightning
from lightning.fabric.plugins.io import TorchCheckpointIO
from support import lightning_jobs as l
l.Sharded = l.ModelParallelStrategy
l.fit(*ARGS, io=TorchCheckpointIO(), ckpt_path=None)
"""
    wanted = losses(jobs.run(1, FIT, "single", tmp_path / "reference", 5))
    for kind, ranks in (("sharded", 2), ("single", 1)):
        theirs, ours = tmp_path / f"{kind}_theirs", tmp_path / f"{kind}_ours"
        jobs.run(ranks, source, kind, theirs, 3)
        path = str(theirs / "last.ckpt")
        go_on = f"from support import lightning_jobs as l; l.fit(*ARGS, ckpt_path={path!r})"
        found = losses(jobs.run(ranks, go_on, kind, ours, 5))
        assert found == pytest.approx({step: wanted[step] for step in (4, 5)}, rel=1e-3)


def test_a_sharded_model_is_validated_and_what_does_not_fit_is_named(
    jobs: Jobs, tmp_path: Path
) -> None:
    source = """
import os, pytest, unickpt
from support import lightning_jobs as l

def validate(model):
    os.environ["WORLD_SIZE"] = "2"  # Lightning removes it when a trainer ends
    l.trainer_of("sharded", ARGS[0], 1).validate(model, data, ckpt_path=path)

path = ARGS[0] + "/last.ckpt"
data = l.torch.utils.data.DataLoader(range(1))

class Model(l.Model):
    def validation_step(self, number):
        whole = self.net[0].weight.full_tensor().detach().numpy()
        stored = unickpt.load(path)["state_dict"]["net.0.weight"]
        assert (whole == stored).all() and stored.any()
        print("validated", flush=True)

validate(Model("sharded"))
larger = Model("sharded")
larger.more = l.torch.nn.Linear(2, 2)
with pytest.raises(unickpt.LoadMismatch, match="state_dict/more.weight"):
    validate(larger)
larger.strict_loading = False
validate(larger)
"""
    jobs.run(1, FIT, "sharded", tmp_path, 2)
    for output in jobs.run(2, source, tmp_path):
        assert output.count("validated") == 2


def test_model_checkpoint_in_object_storage(
    jobs: Jobs, moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs")  # for what Lightning itself looks at
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "run")
    source = """
from support import lightning_jobs as l
saving = lambda: l.ModelCheckpoint(ARGS[0], monitor="loss", save_top_k=2, every_n_train_steps=1)
l.fit("single", *ARGS, saving=saving, ckpt_path=l.last_checkpoint(ARGS[0]))
"""
    wanted = losses(jobs.run(1, source, "s3://run/a", 6))
    first = losses(jobs.run(1, source, "s3://run/b", 3))
    found = losses(jobs.run(1, source, "s3://run/b", 6))
    assert first | found == wanted
    assert list(found) in ([2, 3, 4, 5, 6], [3, 4, 5, 6], [4, 5, 6])  # after the last of the best
    assert len(checkpoints_below("s3://run/b")) <= 3


def test_the_package_pytorch_lightning_takes_the_plugin(processes: Processes) -> None:
    source = """
import sys, warnings
import lightning_utilities.core.imports as imports
there = imports.RequirementCache.__bool__
imports.RequirementCache.__bool__ = lambda self: (
    "transformers" not in str(getattr(self, "requirement", "")) and there(self))
import pytorch_lightning as pl
from pytorch_lightning.strategies import ModelParallelStrategy
from unickpt.integrations.lightning import ShardedCheckpoints, UnickptCheckpointIO
io = UnickptCheckpointIO()
assert pl.Trainer(plugins=[io], logger=False).strategy.checkpoint_io is io
class Strategy(ShardedCheckpoints, ModelParallelStrategy): pass
assert Strategy(1, 1).checkpoint_io is not None
assert "lightning.fabric" not in sys.modules
"""
    processes.finish([processes.forked(source, of=["torch"])])


@pytest.mark.trainers
def test_a_killed_job_goes_on_without_unickpt_bit_for_bit(jobs: Jobs, tmp_path: Path) -> None:
    source = "from support import lightning_way_back as job; "
    run, ours = tmp_path / "run", tmp_path / "run-unickpt"
    jobs.is_killed(jobs.start(1, f"{source}job.is_killed(*ARGS)", run))
    run.rename(ours)
    kept = sorted(path.name for path in ours.glob("*.ckpt"))
    assert kept == ["epoch=1-step=4.ckpt", "epoch=2-step=6.ckpt", "last.ckpt"]
    for name in kept:
        unickpt.convert(ours / name, run / name, to="lightning")
    jobs.run(1, f"{source}job.goes_on(*ARGS)", run, tmp_path / "other", tmp_path / "whole")


@pytest.mark.trainers
@pytest.mark.parametrize("kind", ["sharded", "sharded1"])
def test_a_sharded_job_goes_on_without_unickpt(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """From one file of all parts: with the strategy itself, and on one process."""
    plain = """
from lightning.fabric.plugins.io import TorchCheckpointIO
from support import lightning_jobs as l
class Sharded1(l.FSDPStrategy):
    _setup_model = l.Sharded1._setup_model
l.Sharded, l.Sharded1 = l.ModelParallelStrategy, Sharded1
# FSDP's own save would crash without an accelerator.
saving = lambda: l.ModelCheckpoint(ARGS[1], every_n_train_steps=99)
l.fit(*ARGS[:3], io=TorchCheckpointIO(), ckpt_path=ARGS[3], saving=saving)
"""
    jobs.run(2, FIT, kind, tmp_path / "run", 3)
    exported = tmp_path / "exported.ckpt"
    unickpt.convert(tmp_path / "run" / "last.ckpt", exported, to="lightning")
    wanted = losses(jobs.run(2, FIT, kind, tmp_path / "run", 5))
    assert list(wanted) == [4, 5]
    assert losses(jobs.run(2, plain, kind, tmp_path / "plain", 5, exported)) == wanted
    alone = losses(jobs.run(1, plain, "single", tmp_path / "alone", 5, exported))
    assert alone == pytest.approx(wanted, rel=1e-3)
