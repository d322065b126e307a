"""A feature's notes: each process adds one, and the coordinator merges them into the index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saving import in_job

import unickpt
from unickpt import ProcessGroup, SaveOptions
from unickpt.extend import SaveFeature


@dataclass(frozen=True)
class Tally(SaveFeature):
    """Sums a number of each process; 13 is refused, and None is no note."""

    number: int | None
    name = "tally"

    def note(self) -> int | None:
        return self.number

    def merge_notes(self, notes: Mapping[int, Any]) -> Any:
        if 13 in notes.values():
            raise ValueError("13 is refused")
        return {"sum": sum(notes.values()), "processes": sorted(notes)}


def save(path: Path, numbers: list[int | None]) -> list[Any]:
    def work(group: ProcessGroup) -> Any:
        options = SaveOptions(
            group=group, timeout_s=20, fsync=False, features=[Tally(numbers[group.index])]
        )
        return unickpt.save(path, {"w": np.arange(4.0)}, options=options)

    return in_job(len(numbers), work)


def test_notes_are_merged_into_the_index(tmp_path: Path) -> None:
    save(tmp_path / "c", [1, None, 5])
    extra = unickpt.open(tmp_path / "c").index.extra
    assert extra["tally"] == {"sum": 6, "processes": [0, 2]}
    assert unickpt.load(tmp_path / "c")["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_without_notes_the_index_has_nothing_of_the_feature(tmp_path: Path) -> None:
    save(tmp_path / "c", [None, None])
    assert "tally" not in unickpt.open(tmp_path / "c").index.extra


def test_an_error_of_the_merge_fails_the_save_of_all(tmp_path: Path) -> None:
    for error in save(tmp_path / "c", [1, 13]):
        assert "13 is refused" in str(error)
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open(tmp_path / "c")


@pytest.mark.parametrize("name", ["incremental", "compress", "timing"])
def test_a_feature_with_the_name_of_other_notes_is_refused(name: str) -> None:
    @dataclass(frozen=True)
    class Other(SaveFeature):
        pass

    Other.name = name
    with pytest.raises(ValueError, match=f"the feature '{name}' has the name of an entry"):
        SaveOptions(features=[Other()])


@pytest.mark.parametrize("note", [np.float32(3), {1, 2}, float("nan"), np.ones(2), b"x"])
def test_a_note_that_json_lacks_names_the_feature(tmp_path: Path, note: Any) -> None:
    with pytest.raises(TypeError, match=r"note\(\) of the feature 'tally' returned .* JSON"):
        unickpt.save(tmp_path / "c", {"w": np.ones(3)}, options=SaveOptions(features=[Tally(note)]))


def test_a_merged_note_may_be_zero(tmp_path: Path) -> None:
    class Count(Tally):
        def merge_notes(self, notes: Mapping[int, Any]) -> Any:
            return 0

    options = SaveOptions(features=[Count(1)], fsync=False)
    unickpt.save(tmp_path / "c", {"w": np.ones(3)}, options=options)
    assert unickpt.open(tmp_path / "c").index.extra["tally"] == 0
