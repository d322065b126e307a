"""What a reader would refuse is an error of the save, before the commit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.counts import lines_run

import unickpt
from unickpt import CheckpointNotFound, PerProcess, SaveOptions, UnsupportedLeaf
from unickpt.commit.coordinator import CheckedStructures, check_readable
from unickpt.extend import Sections
from unickpt.format import index_json, ocdbt_reader
from unickpt.format.index import Index
from unickpt.saving import describe
from unickpt.storage import paths
from unickpt.types import LocalFragments

FAST = SaveOptions(fsync=False)
MANY = np.ones((1,) * 32 + (2,))


def index_of(tree: Any) -> Index:
    """The index of a checkpoint of a tree."""
    unickpt.save("memory://written", tree, overwrite=True)
    reader = ocdbt_reader.open(paths.resolve("memory://written"))
    assert reader is not None
    return reader.index


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (MANY, "it has 33 dimensions, and the format stores at most 32"),
        (torch.ones((1,) * 39 + (2,)), "40 dimensions"),
        (torch.zeros(2**30, 0, 2**30), r"\(1073741824, 0, 1073741824\) has 2\^62 bytes or more"),
        (torch.zeros(2**62, 0), r"2\^62 bytes or more"),
        (LocalFragments((2**62, 0), [], "int8"), r"2\^62 bytes or more"),
        (np.zeros(1, "timedelta64[1000000000s]"), r"timedelta64\[1000000000s\] cannot be stored"),
        (PerProcess(Sections({}, {3: 1})), "keys of Sections must be str, not 3"),  # type: ignore[dict-item]
    ],
    ids=range(7),
)
def test_what_the_format_does_not_store_is_refused_by_name(
    tmp_path: Path, array: Any, words: str
) -> None:
    with pytest.raises(UnsupportedLeaf, match=f"'state': .*{words}"):
        unickpt.save(tmp_path / "step", {"model": np.arange(3.0), "state": array}, options=FAST)
    assert not (tmp_path / "step").exists()


@pytest.mark.parametrize("shape", [(0, 3), (0,) * 32, (1,) * 32, (2**61, 0), (2**40, 0, 2**20)])
def test_the_largest_shapes_of_the_format_are_read_back(shape: tuple[int, ...]) -> None:
    unickpt.save("memory://limits", {"w": np.zeros(shape, np.int8)}, overwrite=True)
    assert unickpt.load("memory://limits")["w"].shape == shape


def test_a_checkpoint_that_could_not_be_read_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe, "shape_problem", lambda *arguments: None)
    path = tmp_path / "step"
    unickpt.save(path, {"model": np.arange(3.0)}, options=FAST)
    words = "could not be read again, so it is not committed: .* array 'state': it has 33 dim"
    with pytest.raises(UnsupportedLeaf, match=words):
        unickpt.save(path, {"model": np.ones(3), "state": MANY}, overwrite=True, options=FAST)
    assert unickpt.load(path)["model"].tolist() == [0, 1, 2]
    with pytest.raises(UnsupportedLeaf, match=words):
        unickpt.save(tmp_path / "new", {"state": MANY}, options=FAST)
    with pytest.raises(CheckpointNotFound):
        unickpt.load(tmp_path / "new")


def test_a_tree_with_other_leaves_than_the_lists_is_refused() -> None:
    index = index_of({"w": np.ones(2), "step": 1})
    for wrong in (
        replace(index, values={"other": 1}),
        replace(index, tree={"dict": [["w", "*"], ["w", "*"]]}),
        replace(index, tree={"dict": [["w", "*"], ["step", {"set": []}]]}),
    ):
        checked = CheckedStructures()
        check_readable(index_json.encode(index), "here", checked)
        with pytest.raises(UnsupportedLeaf, match=r"here: .* not committed: .*(both|twice|set)"):
            check_readable(index_json.encode(wrong), "here", checked)


def test_values_and_metadata_are_read_back_in_every_save() -> None:
    index = index_of({"w": np.ones(2), "step": 1})
    checked = CheckedStructures()
    data = index_json.encode(index)
    check_readable(data, "here", checked)
    for before, after, words in (
        (b'"values":{"step":1}', b'"values":{"step":{"int":"x"}}', "leaf 'step': plain value"),
        (b'"metadata":{}', b'"metadata":[]', "'metadata'"),
        (b'"chunks":1', b'"chunks":null', "'chunks'"),
    ):
        assert before in data
        with pytest.raises(UnsupportedLeaf, match=words):
            check_readable(data.replace(before, after), "here", checked)


def test_a_structure_that_was_read_back_takes_little_time() -> None:
    first, again = [], []
    for count in (10, 1000):
        index = index_of({f"layer_{n}": {"w": np.ones(2)} for n in range(count)} | {"step": 1})
        checked, step_2 = CheckedStructures(), replace(index, values={"step": 2})
        data = [index_json.encode(each) for each in (index, step_2)]
        first.append(lines_run(lambda d=data[0], c=checked: check_readable(d, "here", c)))
        again.append(lines_run(lambda d=data[1], c=checked: check_readable(d, "here", c)))
    assert first[1] > 50 * first[0], first
    assert again[1] < 2 * again[0], again
