"""Values of a database in object storage that are read together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import s3_server

import unickpt
from unickpt import CheckpointCorrupt, SaveOptions
from unickpt.storage import paths
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.errors import Failed
from unickpt.storage.ocdbt import (
    _AHEAD_BYTES,
    _GAP_BYTES,
    _MOST_TOGETHER,
    AheadFetch,
    _neighbours,
    fetch,
)

ARRAYS = {f"a{n:03d}": np.full(50 + n, n, np.int32) for n in range(300)}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["f", "g"]),
            st.integers(0, 3 * _MOST_TOGETHER),
            st.sampled_from([1, 100, _GAP_BYTES, _MOST_TOGETHER // 2, 2 * _MOST_TOGETHER]),
        ),
        max_size=12,
    )
)
def test_values_of_one_read_are_near_each_other(ranges: list[tuple[str, int, int]]) -> None:
    places = {str(number): DataReference(*place) for number, place in enumerate(ranges)}
    runs = list(_neighbours(places))
    assert sorted(key for run in runs for key in run) == sorted(places)
    for run in runs:
        assert {place.path for place in run.values()} == {next(iter(run.values())).path}
        begins = [place.offset for place in run.values()]
        ends = np.maximum.accumulate([place.offset + place.length for place in run.values()])
        assert begins == sorted(begins)
        assert len(run) == 1 or ends[-1] - begins[0] <= _MOST_TOGETHER
        assert all(np.array(begins[1:]) - ends[:-1] <= _GAP_BYTES)


SIZES = {"f": _AHEAD_BYTES + 1000, "g": 300}
FILES = {name: np.random.default_rng(7).bytes(size) for name, size in SIZES.items()}


@given(
    st.lists(
        st.sampled_from(["f", "g"]).flatmap(
            lambda name: st.tuples(
                st.just(name), st.integers(0, SIZES[name] - 1), st.integers(0, SIZES[name])
            )
        ),
        min_size=1,
        max_size=6,
    )
)
def test_what_is_read_ahead_is_what_the_files_have(ranges: list[tuple[str, int, int]]) -> None:
    store = paths.resolve("memory://remote-values/ahead").store(paths.context())
    for name, data in FILES.items():
        store.write(name, data).result()
    ahead = AheadFetch(store)
    for name, first, length in ranges:
        reference = DataReference(name, first, min(length, SIZES[name] - first))
        assert ahead(reference) == fetch(store, reference)
    with pytest.raises(Failed):
        ahead(DataReference("f", SIZES["f"] - 10, 11))


@pytest.mark.integration  # starts a server
def test_small_arrays_of_a_bucket_are_read_together(
    moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "together")
    unickpt.save("s3://together/c", ARRAYS)
    with s3_server.requests() as seen:
        loaded = unickpt.load("s3://together/c", {k: np.zeros_like(v) for k, v in ARRAYS.items()})
    assert all(np.array_equal(loaded[name], array) for name, array in ARRAYS.items())
    keys = [request.key for request in seen if request.method == "GET"]
    assert len([key for key in keys if "/d/" in key]) <= 4, seen
    assert len([key for key in keys if "/root/" in key]) == 1, "the index lies beside the root node"


@pytest.mark.plugins
def test_an_array_with_codes_is_not_blamed_for_its_neighbours() -> None:
    url, options = "memory://remote-values/codes", SaveOptions(quantize={"**": "uint8"})
    arrays = {f"a{n:02d}": np.linspace(0, n, 5000, dtype=np.float32) for n in range(20)}
    unickpt.save(url, arrays, options=options)
    before = unickpt.load(url)
    store, path, data = data_file(url)
    store.write(path, data[:-10]).result()
    (damage,) = unickpt.verify(url).damage
    with pytest.raises(CheckpointCorrupt, match=damage.array):
        unickpt.load(url)
    loaded = unickpt.load(url, skip=damage.array)
    assert len(loaded) == 19
    assert all(np.array_equal(loaded[name], before[name]) for name in loaded)


def data_file(url: str) -> tuple[Any, str, bytes]:
    """The store of a checkpoint, its one data file, and what is in it."""
    store = paths.resolve(url).store(paths.context())
    (path,) = [key.decode() for key in store.list().result() if b"/d/" in key]
    return store, path, bytes(store.read(path).result().value)


@pytest.mark.parametrize("lost", ["end", "flipped"])
def test_damage_is_of_the_arrays_that_have_it(lost: str) -> None:
    """A file in object storage is cut, or a byte of it is another one: arrays that lie in it beside
    the damage, and would be read together with it, can be loaded."""
    url = f"memory://remote-values/{lost}"
    arrays = dict(list(ARRAYS.items())[-25:])
    unickpt.save(url, arrays)
    store, path, data = data_file(url)
    bad = data[:-10] if lost == "end" else data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]
    store.write(path, bad).result()

    def is_sound(name: str) -> bool:
        try:
            loaded: Any = unickpt.load(url, only=name)
        except CheckpointCorrupt:
            return False
        return bool(np.array_equal(loaded[name], arrays[name]))

    (damaged,) = [name for name in arrays if not is_sound(name)]
    found = {damage.array for damage in unickpt.verify(url).damage}
    assert found == {damaged}
    with pytest.raises(CheckpointCorrupt, match=damaged):
        unickpt.load(url)
