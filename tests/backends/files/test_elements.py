"""Sequences of elements in files, of which those of arrays are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unickpt.backends._files.elements import ConvertedElements, ElementRun, JoinedElements
from unickpt.extend import FileRange, Files, resolve_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@given(st.data())
def test_elements_of_many_ranges_and_dtypes_read_as_one_sequence(
    folder: Path, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    runs, expected = list[ElementRun](), list[np.ndarray]()
    for number, length in enumerate(lengths):
        before = data.draw(st.integers(0, 3))
        stored = np.arange(length + before, dtype="f4") + 100 * number
        (folder / f"run{number}").write_bytes(b"xy" + stored.tobytes())
        runs.append(ElementRun(FileRange(f"run{number}", 2), before, length))
        expected.append(stored[before:])
    whole_one = np.concatenate(expected)
    nested = JoinedElements(
        [
            ElementRun(JoinedElements(runs), 0, sum(lengths)),
            ElementRun(JoinedElements(runs[:1]), 0, lengths[0]),
        ]
    )
    everything = np.concatenate([whole_one, expected[0]])
    first = data.draw(st.integers(0, nested.count))
    count = data.draw(st.integers(0, nested.count - first))
    for elements, dtype in ((nested, "f4"), (ConvertedElements(nested, "float32"), "f2")):
        out = np.empty(count, dtype)
        elements.read(Files(resolve_path(folder)), first, out)
        assert np.array_equal(out, everything[first : first + count].astype(dtype))
        ranges = list(elements.ranges(first, count, out.itemsize))
        assert sum(end - begin for _, begin, end in ranges) == 4 * count
