"""The `CheckpointIO` of unickpt.integrations.lightning: its values, its order, its refusals."""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import s3_server
from support.lightning_values import VALUES, assert_same

import unickpt

pytest.importorskip("lightning")
pytestmark = pytest.mark.integration

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from support.lightning_jobs import (
        Model,
        ModelCheckpoint,
        Sharded,
        UnickptCheckpointIO,
        last_checkpoint,
        lightning,
        torch,
    )


def checkpoint(step: int) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((4,), float(step))}, "global_step": step}


def step_of(path: Path | str) -> Any:
    return unickpt.open(path).values["global_step"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def held_back() -> Iterator[tuple[UnickptCheckpointIO, Callable[[], None]]]:
    """A plugin whose saves end only after the returned function is called."""
    go = threading.Event()

    def progress(done: int, total: int) -> None:
        assert not done or go.wait(60)

    io = UnickptCheckpointIO(unickpt.SaveOptions(progress=progress, fsync=False))
    try:
        yield io, go.set
    finally:
        go.set()
        io._saves.wait()


def test_values_of_many_types_come_back_as_they_were(tmp_path: Path) -> None:
    io = UnickptCheckpointIO()
    io.save_checkpoint(VALUES, tmp_path / "a.ckpt")
    assert_same(io.load_checkpoint(tmp_path / "a.ckpt"), VALUES)
    stored = unickpt.open(tmp_path / "a.ckpt")
    assert stored.values["callbacks/A{'monitor': 'x%2Fy'}/dirpath"] == "/a/b"
    assert stored["state_dict/w"].shape == (2, 3)


def test_hyper_parameters_of_omegaconf_come_back_as_they_were(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"lr": 0.1, "sizes": [1, {"of": "${lr}"}], "later": "???"})
    omegaconf.OmegaConf.set_struct(config, True)
    given = {"hyper_parameters": config, "hparams_type": omegaconf.DictConfig, "epoch": 1}
    plugin = UnickptCheckpointIO(background=False)
    plugin.save_checkpoint(given, tmp_path / "c.ckpt")
    found = plugin.load_checkpoint(tmp_path / "c.ckpt")
    assert found["hparams_type"] is omegaconf.DictConfig
    assert type(found["hyper_parameters"]) is omegaconf.DictConfig
    assert found["hyper_parameters"] == config
    assert found["hyper_parameters"].sizes[1].of == 0.1
    assert omegaconf.OmegaConf.is_struct(found["hyper_parameters"])

    @dataclasses.dataclass
    class Optimizer:
        lr: float = 0.1

    structured = omegaconf.OmegaConf.create({"optimizer": Optimizer})
    with pytest.raises(unickpt.UnsupportedLeaf, match=r"Optimizer; leave it out: .*'optimizer'"):
        plugin.save_checkpoint({"hyper_parameters": structured}, tmp_path / "d.ckpt")


def test_what_needs_pickle_is_refused_by_name_with_what_to_do(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Config:
        lr: float = 0.1

    class Sub(dict[str, int]):
        pass

    bad = {
        "hyper_parameters": {"loss": torch.nn.MSELoss(), "ok": 1},
        "callbacks": {"C": {"config": Config(), "function": print}},
        "data": {"sub": Sub(a=1), "made": defaultdict(lambda: 3), "module": torch.nn.Linear(1, 1)},
    }
    with pytest.raises(unickpt.UnsupportedLeaf) as caught:
        UnickptCheckpointIO().save_checkpoint(bad, tmp_path / "a.ckpt")
    message = str(caught.value)
    for words in (
        "hyper_parameters/loss: torch.nn.modules.loss.MSELoss; leave it out: "
        "self.save_hyperparameters(ignore=['loss'])",
        "callbacks/C/config: ",
        "store dataclasses.asdict(x)",
        "callbacks/C/function: builtins.builtin_function_or_method; leave it out: code",
        "data/sub: ",
        "store dict(x)",
        "data/made: collections.defaultdict",
        "data/module: torch.nn.modules.linear.Linear; store x.state_dict()",
    ):
        assert words in message, message
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("types", "error", "words"),
    [
        ('{"x": ["path"]}', unickpt.CheckpointCorrupt, "'x' is not a path"),
        ('{"x": ["os.system"]}', unickpt.errors.UnsupportedFormat, "os.system"),
        ('{"x": "path"}', unickpt.CheckpointCorrupt, "unickpt_types"),
        ("[", unickpt.CheckpointCorrupt, "unickpt_types"),
    ],
)
def test_forged_types_are_an_error(
    tmp_path: Path, types: str, error: type[Exception], words: str
) -> None:
    unickpt.save(tmp_path / "a", {"x": 3, "unickpt_types": types})
    with pytest.raises(error, match=words):
        UnickptCheckpointIO().load_checkpoint(tmp_path / "a")


def test_a_checkpoint_has_its_name_when_it_is_complete(tmp_path: Path) -> None:
    with held_back() as (io, go):
        state = checkpoint(1)
        io.save_checkpoint(state, tmp_path / "new.ckpt")
        state["state_dict"]["w"].zero_()  # it was copied
        while not names(tmp_path):
            time.sleep(0.01)
        assert names(tmp_path) == [".new.ckpt.saving"]
        assert last_checkpoint(tmp_path) is None
        go()
        io.teardown()
    assert names(tmp_path) == ["new.ckpt"]
    assert UnickptCheckpointIO().load_checkpoint(tmp_path / "new.ckpt")["state_dict"]["w"][0] == 1


def test_the_last_checkpoint_is_removed_when_the_next_is_committed(tmp_path: Path) -> None:
    UnickptCheckpointIO(background=False).save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    with held_back() as (io, go):
        io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
        io.remove_checkpoint(tmp_path / "1.ckpt")
        assert step_of(tmp_path / "1.ckpt") == 1
        go()
        io.teardown()
    assert names(tmp_path) == ["2.ckpt"]
    io.remove_checkpoint(tmp_path / "2.ckpt")  # nothing is in flight
    io.remove_checkpoint(tmp_path / "2.ckpt")  # nor there
    assert names(tmp_path) == []


def test_a_checkpoint_stays_if_the_save_after_it_fails(tmp_path: Path) -> None:
    UnickptCheckpointIO(background=False).save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    with held_back() as (io, go):
        io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
        io.remove_checkpoint(tmp_path / "1.ckpt")
        tmp_path.joinpath("2.ckpt", "of others").mkdir(parents=True)  # takes the name
        go()
        io._saves.wait()
        with pytest.raises(unickpt.StorageError, match=r"2\.ckpt.*its name.*2\.ckpt\.saving"):
            io.save_checkpoint(checkpoint(3), tmp_path / "3.ckpt")
        io.teardown()  # raised once
    assert step_of(tmp_path / "1.ckpt") == 1
    assert step_of(tmp_path / ".2.ckpt.saving") == 2


def test_an_error_in_the_background_is_raised_by_teardown(tmp_path: Path) -> None:
    with held_back() as (io, go):
        io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
        tmp_path.joinpath("2.ckpt", "of others").mkdir(parents=True)
        go()
        with pytest.raises(unickpt.StorageError, match=r"2\.ckpt") as caught:
            io.teardown()
        assert "in the background" in "".join(caught.value.__notes__)
        io.teardown()


def test_a_path_may_be_saved_removed_and_saved_again_at_once(tmp_path: Path) -> None:
    io, path = UnickptCheckpointIO(unickpt.SaveOptions(fsync=False)), tmp_path / "a.ckpt"
    for step in range(1, 6):
        io.save_checkpoint(checkpoint(step), path)
    io.save_checkpoint(checkpoint(6), tmp_path / "b.ckpt")
    io.remove_checkpoint(path)
    io.save_checkpoint(checkpoint(7), path)
    assert io.load_checkpoint(path)["global_step"] == 7  # waits for it
    io.teardown()
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]


def test_what_one_trainer_still_saves_another_waits_for(tmp_path: Path) -> None:
    with held_back() as (io, go):
        io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
        threading.Timer(0.3, go).start()
        assert UnickptCheckpointIO().load_checkpoint(tmp_path / "2.ckpt")["global_step"] == 2
        UnickptCheckpointIO(background=False).save_checkpoint(checkpoint(3), tmp_path / "2.ckpt")
        io.teardown()
    assert step_of(tmp_path / "2.ckpt") == 3


def test_a_save_is_not_moved_by_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    (other / "a.ckpt").mkdir()
    (other / "last.ckpt").symlink_to("a.ckpt")
    monkeypatch.chdir(one)
    UnickptCheckpointIO(background=False).save_checkpoint({"epoch": 1}, "a.ckpt")
    with held_back() as (io, go):
        io.save_checkpoint({"epoch": 2, "w": torch.ones(2)}, "last.ckpt")
        io.remove_checkpoint("a.ckpt")
        monkeypatch.chdir(other)
        go()
        io.teardown()
    assert names(one) == ["last.ckpt"]
    assert names(other) == ["a.ckpt", "last.ckpt"]


def test_a_path_saved_again_by_another_name_is_the_same_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    io = UnickptCheckpointIO()
    given = ["real/a.ckpt", str(tmp_path / "real/a.ckpt"), "link/a.ckpt", "./real/../real/a.ckpt"]
    for number, name in enumerate(given):
        io.save_checkpoint({"epoch": number, "w": torch.full((300, 300), number)}, name)
    io.teardown()
    assert io.load_checkpoint("real/a.ckpt")["epoch"] == 3


def test_a_save_before_slurm_starts_the_job_again_is_waited_for(tmp_path: Path) -> None:
    with held_back() as (io, go):
        timer = threading.Timer(0.5, go)
        timer.start()
        io.save_checkpoint(checkpoint(1), tmp_path / "hpc_ckpt_1.ckpt")
        assert names(tmp_path) == ["hpc_ckpt_1.ckpt"]
        timer.join()
    with held_back() as (io, go):
        io.save_checkpoint(checkpoint(1), tmp_path / "not_hpc_ckpt_2.ckpt")
        assert "hpc_ckpt_" not in "".join(set(names(tmp_path)) - {"hpc_ckpt_1.ckpt"})
        go()
        io.teardown()


def trainer(folder: Path, io: Any, **given: Any) -> Any:
    saving = ModelCheckpoint(folder, every_n_train_steps=1, **given)
    return lightning.Trainer(
        max_steps=3, plugins=[io], callbacks=[saving], logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


DATA = torch.utils.data.DataLoader(range(10**6))


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_checkpoint_outside_of_a_training_is_there_when_the_call_returns(tmp_path: Path) -> None:
    waited = []
    io = UnickptCheckpointIO(unickpt.SaveOptions(fsync=False))
    job = trainer(tmp_path / "run", io)

    class Saving(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            job.save_checkpoint(tmp_path / "within.ckpt")
            waited.append(not io._saves.in_flight())

    with held_back() as (held, go):
        io.options = held.options
        model = Saving("single")
        threading.Timer(1, go).start()
        job.fit(model, DATA)
        assert waited[0] is False  # the loop went on
    job.save_checkpoint(tmp_path / "after.ckpt")
    assert not io._saves.in_flight()
    assert step_of(tmp_path / "after.ckpt") == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            {"filename": "fixed", "save_top_k": -1, "monitor": "loss"},
            ["fixed-v1.ckpt", "fixed-v2.ckpt", "fixed.ckpt"],
        ),
        ({"save_last": "link", "save_top_k": 1}, ["epoch=0-step=3.ckpt", "last.ckpt"]),
    ],
)
def test_names_that_lightning_looks_for_at_once_are_there(
    tmp_path: Path, given: dict[str, Any], kept: list[str]
) -> None:
    """Also when a save takes longer than a step."""

    class Looking(Model):
        def on_train_batch_start(self, *_: Any) -> None:
            link = tmp_path / "last.ckpt"
            assert link.exists() == link.is_symlink()

    slowly = unickpt.SaveOptions(fsync=False, progress=lambda done, total: time.sleep(0.05))
    job = trainer(tmp_path, UnickptCheckpointIO(slowly), **given)
    job.fit(Looking("single"), DATA)
    assert names(tmp_path) == kept
    assert [step_of(tmp_path / name) for name in kept] in ([2, 3, 1], [3, 3])


def test_memory_is_that_of_fsspec_as_for_lightning(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    io, path = UnickptCheckpointIO(), "memory://unickpt-test/a.ckpt"
    io.save_checkpoint(checkpoint(3), path)
    assert fsspec.filesystem("memory").exists(path)
    assert io.load_checkpoint(path)["global_step"] == 3
    io.remove_checkpoint(path)
    assert not fsspec.filesystem("memory").exists(path)
    with pytest.raises(unickpt.errors.InvalidPath, match="belongs to one process"):
        Sharded(1, 1).save_checkpoint({}, path)


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    io = UnickptCheckpointIO(background=False)
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    tmp_path.joinpath("last.ckpt").symlink_to("1.ckpt")
    io.save_checkpoint(checkpoint(2), tmp_path / "last.ckpt")
    assert (step_of(tmp_path / "1.ckpt"), step_of(tmp_path / "last.ckpt")) == (1, 2)
    tmp_path.joinpath("link.ckpt").symlink_to("1.ckpt")
    io.remove_checkpoint(tmp_path / "link.ckpt")
    assert names(tmp_path) == ["1.ckpt", "last.ckpt"]


def test_files_of_lightnings_own_are_loaded_removed_and_never_overwritten(tmp_path: Path) -> None:
    from lightning.fabric.plugins.io import TorchCheckpointIO

    path = tmp_path / "last.ckpt"
    TorchCheckpointIO().save_checkpoint(checkpoint(4), path)
    io = UnickptCheckpointIO()
    assert io.load_checkpoint(path)["global_step"] == 4
    with pytest.raises(unickpt.errors.InvalidPath, match=r"last\.ckpt"):
        io.save_checkpoint(checkpoint(5), path)
    assert io.load_checkpoint(path)["global_step"] == 4
    io.remove_checkpoint(path)
    assert names(tmp_path) == []


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_file_in_the_way_of_save_last_is_named_before_the_training(tmp_path: Path) -> None:
    from lightning.fabric.plugins.io import TorchCheckpointIO

    trainer(tmp_path, TorchCheckpointIO(), save_last=True).fit(Model("single"), DATA)
    trained: list[int] = []

    class Counting(Model):
        def on_train_batch_start(self, *_: Any) -> None:
            trained.append(1)

    def resume(path: Path) -> Any:
        job = trainer(tmp_path, UnickptCheckpointIO(), save_last=True)
        job.fit_loop.epoch_loop.max_steps = 5
        job.fit(Counting("single"), DATA, ckpt_path=path)

    with pytest.raises(unickpt.CheckpointExists, match=r"last\.ckpt is a file.*\.old, and resume"):
        resume(tmp_path / "last.ckpt")
    assert trained == []
    (tmp_path / "last.ckpt").rename(tmp_path / "last.ckpt.old")  # as the message says
    resume(tmp_path / "last.ckpt.old")
    assert len(trained) == 2
    assert step_of(tmp_path / "last.ckpt") == 5


def test_the_newest_checkpoint_is_found(tmp_path: Path) -> None:
    io = UnickptCheckpointIO(background=False)
    assert last_checkpoint(tmp_path / "none") is None
    while time.time() % 1 > 0.2:
        time.sleep(0.01)
    for step in (9, 11, 10):  # within a second, the step decides
        io.save_checkpoint(checkpoint(step), tmp_path / f"step={step}.ckpt")
    created = {unickpt.open(path).reader.index.created for path in tmp_path.iterdir()}
    if len(created) > 1:
        pytest.skip("this machine took more than a second for three small saves")
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert step_of(found) == 11
    time.sleep(1.1)
    io.save_checkpoint(checkpoint(2), tmp_path / "a.ckpt")
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert step_of(found) == 2


def test_metrics_are_told_where_the_checkpoint_is(tmp_path: Path) -> None:
    told: list[unickpt.types.SaveReport] = []
    io = UnickptCheckpointIO(unickpt.SaveOptions(metrics=told.append), background=False)
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    assert [step_of(report.url) for report in told] == [1]


def test_arguments_that_cannot_be_honoured_are_refused(tmp_path: Path) -> None:
    io = UnickptCheckpointIO(background=False)
    with pytest.raises(TypeError, match="storage_options="):
        io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt", storage_options={})
    io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    with pytest.raises(TypeError, match="map_location= is a dict"):
        io.load_checkpoint(tmp_path / "a.ckpt", {"cuda:0": "cpu"})
    with pytest.raises(TypeError, match="state="):
        io.load_checkpoint(tmp_path / "a.ckpt", state={})  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "b.ckpt")
    meta = io.load_checkpoint(tmp_path / "a.ckpt", map_location="cpu", weights_only=True)
    assert meta["state_dict"]["w"].device.type == "cpu"


def test_checkpoints_in_object_storage(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "lightning")
    io, run = UnickptCheckpointIO(), "s3://lightning/run"
    for step in (1, 2):
        io.save_checkpoint(VALUES | checkpoint(step), f"{run}/{step}.ckpt")
        io.save_checkpoint(checkpoint(step), f"{run}/last.ckpt")
    io.remove_checkpoint(f"{run}/1.ckpt")
    assert io.load_checkpoint(f"{run}/last.ckpt")["global_step"] == 2
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(f"{run}/1.ckpt")
    found = last_checkpoint(run)
    assert found is not None
    assert found.rstrip("/").endswith("last.ckpt")
    assert_same(io.load_checkpoint(f"{run}/2.ckpt")["callbacks"], VALUES["callbacks"])


def test_a_checkpoint_of_a_deepspeed_engine_needs_its_strategy(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"module": {"w": torch.ones(2)}}, metadata={"deepspeed": {}})
    with pytest.raises(unickpt.LoadMismatch, match="saved with DeepSpeed, and this job trains"):
        UnickptCheckpointIO().load_checkpoint(tmp_path / "c")
