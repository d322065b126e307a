"""A data-parallel rank that draws samples and saves where it is: `unickpt.data` with real loaders.

    python -c "from support.data_ranks import main; main()" CONFIGURATION   # a Config as JSON

What it drew at each step it appends to a file of its own, a line for each step.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import unickpt
from unickpt import LoadOptions, ProcessGroup, SaveOptions
from unickpt.data import Buffer, Ranks, Samples, Shards

SAMPLES = 480
BATCH = 2


@dataclass(frozen=True)
class Config:
    """What a rank does.

    Arguments:
        kind: the loader.
        folder: of the run.
        run: counts how often the job was started.
        rank: data-parallel, of `ranks`.
        ranks: their number.
        replicas: processes of each rank, as with tensor parallelism.
        replica: of these.
        steps: how many to make.
        shards: of the data.
        workers: processes of each loader.
        saves: whether it saves each step.
        dies: kill -9 in the last step, while it is saved.
    """

    kind: str
    folder: str
    run: int
    rank: int
    ranks: int
    replicas: int
    replica: int
    steps: int
    shards: int
    workers: int
    saves: bool
    dies: bool


def whole_numbers(items: list[int]) -> Iterator[Any]:
    import torch

    class Numbers(torch.utils.data.IterableDataset[int]):
        """Knows where it is; its worker processes share the numbers."""

        def __init__(self) -> None:
            self.given = 0

        def __iter__(self) -> Iterator[int]:
            info = torch.utils.data.get_worker_info()
            own = items if info is None else items[info.id :: info.num_workers]
            for item in own[self.given :]:
                self.given += 1
                yield item
            self.given = 0

        def state_dict(self) -> dict[str, int]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.given = state["given"]

    return Numbers()


def torchdata_map(config: Config, ranks: Ranks) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(shard: int, count: int) -> Any:
        own = list(range(SAMPLES))[shard::count]
        return StatefulDataLoader(own, batch_size=BATCH, num_workers=config.workers)

    return Shards(make, config.shards, ranks)


def torchdata_stream(config: Config, ranks: Ranks) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(shard: int, count: int) -> Any:
        own = whole_numbers(list(range(SAMPLES))[shard::count])
        return StatefulDataLoader(own, batch_size=BATCH, num_workers=config.workers)

    return Shards(make, config.shards, ranks)


def torch_turns(config: Config, ranks: Ranks) -> Any:
    from torch.utils.data import DataLoader

    def make(indexes: list[int]) -> Any:
        numbers: Any = range(SAMPLES)
        return DataLoader(numbers, BATCH, sampler=indexes, num_workers=config.workers)

    return Samples(make, SAMPLES, BATCH, ranks, seed=7)


def grain_dataset(config: Config, ranks: Ranks) -> Any:
    import absl.flags
    import grain

    def make(shard: int, count: int) -> Any:
        own = grain.MapDataset.range(SAMPLES).shuffle(seed=3)[shard::count].batch(BATCH)
        made = own.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        if config.workers:
            absl.flags.FLAGS.mark_as_parsed()  # as absl.app.run does
            made = made.mp_prefetch(grain.MultiprocessingOptions(num_workers=config.workers))
        return made

    return Shards(make, config.shards, ranks)


def grain_loader(config: Config, ranks: Ranks) -> Any:
    import absl.flags
    import grain

    absl.flags.FLAGS.mark_as_parsed()  # as absl.app.run does

    def make(shard: int, count: int) -> Any:
        sampler = grain.samplers.IndexSampler(
            SAMPLES, grain.sharding.ShardOptions(shard, count), shuffle=True, num_epochs=1, seed=3
        )
        return grain.DataLoader(
            data_source=range(SAMPLES),  # type: ignore[arg-type]
            sampler=sampler,
            operations=[grain.transforms.Batch(BATCH)],
            worker_count=config.workers,
            read_options=grain.ReadOptions(num_threads=1, prefetch_buffer_size=2),
        )

    return Shards(make, config.shards, ranks)


def hugging_face(config: Config, ranks: Ranks) -> Any:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    def make(shard: int, count: int) -> Any:
        numbers = Dataset.from_dict({"at": list(range(SAMPLES))})
        stream = numbers.to_iterable_dataset(num_shards=2 * config.shards)
        return split_dataset_by_node(stream, shard, count)

    return Shards(make, config.shards, ranks)


def hugging_face_workers(config: Config, ranks: Ranks) -> Any:
    """As torch users read such a dataset: with worker processes, each of which has files."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(shard: int, count: int) -> Any:
        numbers = Dataset.from_dict({"at": list(range(SAMPLES))})
        stream = numbers.to_iterable_dataset(num_shards=2 * config.shards)
        own = split_dataset_by_node(stream, shard, count)
        return StatefulDataLoader(own, batch_size=BATCH, num_workers=config.workers)

    return Shards(make, config.shards, ranks)


TOKENS, LENGTH = 6, 4
"""Of each text, and of each sequence that torchtitan packs them into: texts are cut."""


def torchtitan(config: Config, ranks: Ranks) -> Any:
    import functools

    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import (
        DATASETS,
        HuggingFaceTextDataLoader,
        HuggingFaceTextDataset,
    )

    if config.workers:
        # Its state is the lists that it goes on changing, which torchdata's workers compare with
        # what they sent before: they find no change, and torchtitan's own restart loses tokens.
        given = HuggingFaceTextDataset.state_dict
        HuggingFaceTextDataset.state_dict = lambda self: copy.deepcopy(given(self))

    class Tokenizer:
        def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
            return [int(text)] * (TOKENS + 1)

    texts = {"text": [str(i) for i in range(SAMPLES)]}
    DATASETS["numbers"] = DatasetConfig(
        "", lambda path: Dataset.from_dict(texts), lambda sample: sample["text"]
    )
    own = functools.partial(
        HuggingFaceTextDataLoader,
        HuggingFaceTextDataLoader.Config(
            dataset="numbers", infinite=False, num_workers=config.workers
        ),
        tokenizer=Tokenizer(),
        seq_len=LENGTH,
        local_batch_size=BATCH,
    )
    return Shards(lambda s, n: own(dp_rank=s, dp_world_size=n), config.shards, ranks)


class Packed:
    """Packs texts into sequences of one length; what is over stays in a buffer."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        def make(indexes: list[int]) -> Iterator[Any]:
            return ((i, np.full(TOKENS, i, np.int32)) for i in indexes)

        self.source = Samples(make, SAMPLES, None, ranks, seed=5)
        self.buffer = Buffer(ranks=ranks)

    def __iter__(self) -> Iterator[Any]:
        texts = iter(self.source)
        while True:
            for _, text in texts:
                self.buffer.append(text)
                if len(self.buffer) >= 5:  # it reads ahead
                    break
            if not len(self.buffer):
                return
            first = self.buffer.popleft()
            if len(first) > LENGTH:
                self.buffer.appendleft(first[LENGTH:])
            yield first[:LENGTH]

    def prefetch(self, step: int) -> None:
        self.source.prefetch(step)
        self.buffer.prefetch(step)


def packed(config: Config, ranks: Ranks) -> Any:
    return Packed(config, ranks)


KINDS: dict[str, Callable[[Config, Ranks], Any]] = {
    each.__name__: each
    for each in (
        torchdata_map,
        torchdata_stream,
        torch_turns,
        grain_dataset,
        grain_loader,
        hugging_face,
        hugging_face_workers,
        torchtitan,
        packed,
    )
}


def numbers_of(batch: Any) -> list[int]:
    """The samples of a batch of any loader here."""
    if isinstance(batch, tuple | list) and isinstance(batch[0], dict):  # torchtitan
        batch = batch[0]["input"]
    if isinstance(batch, dict):
        batch = batch["at"]
    return [int(x) for x in np.asarray(batch).reshape(-1)]


def main() -> None:
    config = Config(**json.loads(sys.argv[1]))
    ranks = Ranks(config.rank, config.ranks, writes=config.replica == 0)
    index, count = config.rank * config.replicas + config.replica, config.ranks * config.replicas
    group = ProcessGroup(index, count, session=f"run-{config.run}")
    folder = Path(config.folder)
    loader = KINDS[config.kind](config, ranks)
    state: dict[str, Any] = {"step": 0, "data": loader}
    if config.kind == "packed":
        state["data"] = {"source": loader.source, "buffer": loader.buffer}
    options = SaveOptions(group=group, fsync=False, timeout_s=60)
    with unickpt.Checkpointer(folder / "run", options=options) as run:
        if run.latest() is not None:
            state["step"] = run.load(state, step=run.latest(), options=LoadOptions(group=group))[
                "step"
            ]
        first = state["step"] + 1
        batches = iter(loader)
        with open(folder / f"seen-{config.run}-{index}", "w") as seen:
            for step in range(first, first + config.steps):
                batch = next(batches, None)
                drawn = [] if batch is None else numbers_of(batch)
                print(json.dumps([step, drawn]), file=seen, flush=True)
                if not config.saves:
                    continue
                if step % 2:
                    loader.prefetch(step)
                pending = run.save(step, state | {"step": step})
                if config.dies and step == first + config.steps - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                pending.result()
    print(first - 1)
