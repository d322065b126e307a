"""What the ranks of a Megatron job do in tests: `scenario(name, arguments)`, in processes that are
forked from one that has imported this."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

import unickpt
from support import megatron_values
from support.megatron_gpt import Shape, Trainer, start
from unickpt.integrations.megatron import AsyncCallsQueue, LoadStrategy, SaveStrategy

LATEST = "latest_checkpointed_iteration.txt"
ASKS = hasattr(megatron_torch, "get_async_strategy")
"""Whether this Megatron asks which implementation of asynchronous saves to use."""
SCENARIOS: dict[str, Callable[..., Any]] = {
    "write values": megatron_values.write,
    "read values": megatron_values.read,
}


def scenario(function: Callable[..., Any]) -> Callable[..., Any]:
    SCENARIOS[function.__name__] = function
    return function


def run(name: str, arguments: list[Any], more: dict[str, Any]) -> None:
    """Runs a scenario; its last line is what it returns."""
    start()
    print(json.dumps(SCENARIOS[name](*arguments, **more)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Job:
    """Trains, saves and loads as Megatron-LM does: a folder for each iteration, and a file that
    names the latest.

    Arguments:
        folder: of the run.
        shape: see `Shape`.
        strategy: "ours" or "theirs"; None as load strategy leaves it to `metadata.json`.
        wrapped: whether Megatron's fully parallel strategies are around it.
        queue: "ours" or "theirs", of asynchronous saves; None for others.
        options: of `SaveOptions`.
    """

    def __init__(
        self,
        folder: str,
        shape: dict[str, Any],
        *,
        save: str = "ours",
        load: str | None = "ours",
        wrapped: bool = False,
        queue: str | None = None,
        options: dict[str, Any] | None = None,
        strict: str = "assume_ok_unexpected",
    ) -> None:
        self.folder, self.trainer = Path(folder), Trainer(Shape(**shape))
        self.shape = self.trainer.shape
        self.queue = async_utils.AsyncCallsQueue() if queue == "theirs" else AsyncCallsQueue()
        self._save, self._load, self._wrapped = save, load, wrapped
        self._background, self._strict = queue is not None, strict
        self._options = {"timeout_s": 60, "fsync": False, **(options or {})}
        self._strategy: Any = None

    def train(self, steps: int, every: int) -> dict[str, Any]:
        """Goes on from the latest iteration."""
        first, losses = self.load() + 1, {}
        for step in range(first, steps + 1):
            loss = self.trainer.step(step)
            self.queue.maybe_finalize_async_calls()
            if loss is not None:
                losses[step] = loss
            if every and step % every == 0:
                self.save(step)
        self.queue.maybe_finalize_async_calls(blocking=True)
        return {"first": first, "losses": losses}

    def path(self, step: int) -> str:
        return str(self.folder / f"iter_{step:07}")

    def state(self, step: int, loading: bool, with_rng: bool = True) -> dict[str, Any]:
        tp = parallel_state.get_tensor_model_parallel_rank()
        pp = parallel_state.get_pipeline_model_parallel_rank()
        dp = parallel_state.get_data_parallel_rank()
        sizes = self.shape.pp, self.shape.tp
        rng = [{"torch_rng_state": torch.get_rng_state(), "at": (pp, tp), "step": step}]
        given = {"rng_state": ShardedObject("rng_state", rng, sizes, (pp, tp), replica_id=dp)}
        return {
            **self.trainer.sharded(loading),
            **(given if with_rng else {}),
            "iteration": step,
            "args": Namespace(sizes=sizes, hidden_size=self.shape.hidden, names=["a", None]),
            "checkpoint_version": 3.0,
        }

    def save(self, step: int) -> None:
        path = self.path(step)
        if dist.get_rank() == 0:
            os.makedirs(path, exist_ok=True)
        dist.barrier()
        request = dist_checkpointing.save(
            self.state(step, loading=False),
            path,
            self.save_strategy(),
            async_sharded_save=self._background,
            content_metadata={"form": self.shape.form},
            **({"async_strategy": "mcore"} if ASKS else {}),
        )
        if self._background:
            request.add_finalize_fn(partial(self._track, step))
            self.queue.schedule_async_request(request)
        else:
            self._track(step)

    def save_strategy(self) -> Any:
        if self._strategy is None:
            if self._save == "theirs":
                made: Any = megatron_torch.TorchDistSaveShardedStrategy("torch_dist", 1)
            else:
                options = unickpt.SaveOptions(**self._options)
                made = SaveStrategy(self.trainer.optimizer, options=options)
            if self._wrapped:
                made = FullyParallelSaveStrategyWrapper(made, _replicas())
            self._strategy = made
        return self._strategy

    def _track(self, step: int) -> None:
        if dist.get_rank() == 0:
            (self.folder / "new").write_text(str(step))
            os.replace(self.folder / "new", self.folder / LATEST)
        dist.barrier()

    def load(self) -> int:
        """Loads the latest iteration; returns its number, 0 without one."""
        tracker = self.folder / LATEST
        if not tracker.exists():
            return 0
        step = int(tracker.read_text())
        self.trainer.make_states()
        # As Megatron-LM, which leaves the generators alone if the sizes have changed.
        saved = dist_checkpointing.load_common_state_dict(self.path(step))["args"].sizes
        with_rng = tuple(saved) == (self.shape.pp, self.shape.tp)
        found = dist_checkpointing.load(
            self.state(0, loading=True, with_rng=with_rng),
            self.path(step),
            self.load_strategy(),
            strict=self._strict,
        )
        self.trainer.model.load_state_dict(found["model"], strict=False)
        self.trainer.optimizer.load_state_dict(found["optimizer"])
        self.trainer.unshare_steps()
        assert found["iteration"] == step, (found["iteration"], step)
        assert found["args"].names == ["a", None], found["args"]
        if with_rng:
            (rng,) = found["rng_state"]
            assert rng["step"] == step, rng
            torch.set_rng_state(rng["torch_rng_state"])
        return step

    def load_strategy(self) -> Any:
        if self._load is None:
            return None
        if self._load == "theirs":
            return megatron_torch.TorchDistLoadShardedStrategy()
        made: Any = LoadStrategy(self.trainer.optimizer)
        return FullyParallelLoadStrategyWrapper(made, _replicas()) if self._wrapped else made


def _replicas() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


@scenario
def train(folder: str, shape: dict[str, Any], steps: int, every: int, **more: Any) -> Any:
    return Job(folder, shape, **more).train(steps, every)


@scenario
def resave(folder: str, again: str, shape: dict[str, Any], steps: int, **more: Any) -> Any:
    """Loads, saves the same elsewhere, and makes some steps; returns the losses."""
    job = Job(folder, shape, **more)
    step = job.load()
    job.folder = Path(again)
    job.save(step)
    losses = [job.trainer.step(step + 1 + n) for n in range(steps)]
    job.queue.maybe_finalize_async_calls(blocking=True)
    return {"step": step, "losses": losses}


@scenario
def both(ours: str, theirs: str, shape: dict[str, Any], their_form: str, steps: int) -> None:
    """Saves the same state with our strategy and with Megatron's."""
    job = Job(ours, shape)
    for step in range(1, steps + 1):
        job.trainer.step(step)
    job.save(steps)
    job.folder, job._save, job._strategy = Path(theirs), "theirs", None
    job.trainer.shape = replace(job.shape, form=their_form)
    job.save(steps)


@scenario
def change_over(folder: str, shape: dict[str, Any]) -> Any:
    """Megatron saves; ours go on, and overwrite a step; Megatron loads no more, ours do."""
    Job(folder, shape, save="theirs", load="theirs").train(2, 2)
    said = Job(folder, shape).train(4, 1)
    (Path(folder) / LATEST).write_text("2")
    dist.barrier()
    job = Job(folder, shape)
    step = job.load()
    job.save(step)
    left = sorted(os.listdir(job.path(2)))
    again = Job(folder, shape).train(4, 0)
    return {"first": said["first"], "losses": said["losses"], "again": again, "left": left}


@scenario
def refuse(folder: str, shape: dict[str, Any], what: str) -> str:
    """Mistakes; returns the error."""
    job, rank = Job(folder, shape), dist.get_rank()
    job.trainer.step(1)
    os.makedirs(job.path(1), exist_ok=True)
    state = job.state(1, loading=False)
    try:
        _mistake(what, job, state, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return "nothing"


class OwnTensor(torch.Tensor):
    """As those of quantised parameters."""


def _mistake(what: str, job: Job, state: dict[str, Any], rank: int) -> None:
    path = job.path(1)
    if what == "no optimizer":
        dist_checkpointing.save(state, path, SaveStrategy())
    elif what == "class of one rank":
        (first, *_), model = state["model"], state["model"]
        if rank == 1:
            model[first].data = model[first].data.detach().as_subclass(OwnTensor)
        dist_checkpointing.save(state, path, job.save_strategy())
    elif what == "object of one rank":
        state["rng_state"].data = lambda: 0
        dist_checkpointing.save(state, path, job.save_strategy())
    elif what == "object in the background":
        state["rng_state"].data = lambda: 0
        request = dist_checkpointing.save(
            state,
            path,
            job.save_strategy(),
            async_sharded_save=True,
            **({"async_strategy": "mcore"} if ASKS else {}),
        )
        job.queue.schedule_async_request(request)
        job.queue.maybe_finalize_async_calls(blocking=True)
    elif what == "not all are covered":
        for name in [n for n in state["model"] if rank == 1 and n.endswith("proj.weight")]:
            del state["model"][name]
        dist_checkpointing.save(state, path, job.save_strategy(), validate_access_integrity=False)
    elif what == "sizes":  # one rank believes in four tensor-parallel ranks, not two
        model = state["model"]
        name = next(n for n in model if n.endswith("word_embeddings.weight"))
        if rank == 1:
            model[name] = ShardedTensor.from_rank_offsets(
                model[name].key, model[name].data, (0, rank, 4)
            )
        dist_checkpointing.save(state, path, job.save_strategy(), validate_access_integrity=False)
    else:
        job.save(1)
        dist.barrier()
        asked = job.state(1, loading=True)
        if what == "one asks for more" and rank == 1:
            more = ShardedTensor.from_rank_offsets("model.more", torch.zeros(3))
            asked["model"]["more"] = more
        elif what == "another shape":
            model = asked["model"]
            name = next(n for n in model if n.endswith("word_embeddings.weight"))
            grid = (0, rank, job.shape.tp)
            model[name] = ShardedTensor.from_rank_offsets(model[name].key, torch.zeros(7, 16), grid)
        elif what == "common of another save" and rank == 0:
            torch.save({"iteration": 9}, Path(path) / "common.pt")
        elif what == "later version" and rank == 0:
            config = Path(path) / "metadata.json"
            config.write_text(config.read_text().replace('version": 1', 'version": 2', 1))
        dist.barrier()
        if what == "no optimizer to load":
            dist_checkpointing.load(asked, path)
        dist_checkpointing.load(asked, path, job.load_strategy(), validate_access_integrity=False)
