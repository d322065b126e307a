"""Loaders that .venv lacks, of Hugging Face and torchtitan: as test_resharding.py."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support import pages
from support.data_runs import there_and_back
from support.processes import Processes

import unickpt
import unickpt.data

pytestmark = [pytest.mark.integration, pytest.mark.environment]

pytest.importorskip("datasets")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11
def test_the_snippets_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of these two loaders in docs/integrations/data.md."""
    text_datasets = pytest.importorskip("torchtitan.hf_datasets.text_datasets")
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig

    class Tokenizer:
        def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
            return [int(text)] * 5

    numbers = list(range(240))
    monkeypatch.setitem(
        text_datasets.DATASETS,
        "numbers",
        DatasetConfig(
            "", lambda _: Dataset.from_dict({"text": [*map(str, numbers)]}), lambda x: x["text"]
        ),
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"unickpt": unickpt, "numbers": numbers, "tokenizer": Tokenizer()}
    names |= {"Shards": unickpt.data.Shards, "Ranks": unickpt.data.Ranks}
    found = [
        s
        for s in pages.snippets("docs/integrations/data.md")
        if "test_loaders" in (s.not_run or "")
    ]
    *found, trainer = found
    for snippet, folder, count in zip(found, ("datasets", "titan"), (240, 120), strict=True):
        exec(snippet.text, names)
        make = names["loader"]._shards[0]._make
        again = unickpt.data.Shards(make, 24)
        unickpt.load(f"runs/{folder}", {"data": again})
        assert len(list(again)) == count - 1
    exec(trainer.text, names)
    config = names["ShardedLoader"].Config(dataset="numbers", infinite=False)
    more = {"tokenizer": Tokenizer(), "seq_len": 4, "local_batch_size": 2}
    one = config.build(dp_rank=0, dp_world_size=1, **more)
    first = next(iter(one))
    unickpt.save("runs/trainer", {"dataloader": one})
    two = config.build(dp_rank=0, dp_world_size=1, **more)
    unickpt.load("runs/trainer", {"dataloader": two})
    assert [first[1].tolist(), *(y.tolist() for _, y in two)] == [
        y.tolist() for _, y in config.build(dp_rank=0, dp_world_size=1, **more)
    ]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11
@pytest.mark.parametrize("in_loader", [False, True])
def test_epochs_of_hugging_face_datasets(in_loader: bool, tmp_path: Path) -> None:
    """A dataset that was loaded begins anew in the next epoch, not where it was loaded."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(shard: int, count: int) -> Any:
        stream = Dataset.from_dict({"at": [*range(24)]}).to_iterable_dataset(num_shards=12)
        own = split_dataset_by_node(stream, shard, count)
        return StatefulDataLoader(own, batch_size=1) if in_loader else own

    def numbers(batches: Any) -> list[int]:
        return [int(batch["at"]) for batch in batches]

    whole = unickpt.data.Shards(make, 2)
    epochs = [numbers(whole) for _ in range(3)]
    assert [sorted(each) for each in epochs] == [[*range(24)]] * 3
    first, second = unickpt.data.Shards(make, 2), unickpt.data.Shards(make, 2)
    assert numbers(first) == epochs[0]
    assert numbers(islice(first, 7)) == epochs[1][:7]
    unickpt.save(tmp_path / "c", {"data": first})
    unickpt.load(tmp_path / "c", {"data": second})
    assert numbers(second) == epochs[1][7:]
    assert numbers(second) == epochs[2]


def test_hugging_face_datasets(tmp_path: Path, processes: Processes) -> None:
    there_and_back(processes, tmp_path, "hugging_face", 60)


def test_hugging_face_datasets_with_worker_processes(tmp_path: Path, processes: Processes) -> None:
    there_and_back(processes, tmp_path, "hugging_face_workers", 32, workers=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_torchtitan(workers: int, tmp_path: Path, processes: Processes) -> None:
    pytest.importorskip("torchtitan")
    there_and_back(processes, tmp_path, "torchtitan", 50, times=6, workers=workers)
