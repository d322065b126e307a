"""Keys of containers: each enters as exactly a str or an int, and what is saved can be loaded."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unickpt
from unickpt import Checkpointer, Retention, SaveOptions, UnsupportedLeaf
from unickpt.trees import tree

FAST = SaveOptions(fsync=False)


class Part(str, enum.Enum):  # noqa: UP042  # formatted as "Part.MODEL", as a StrEnum is not
    MODEL = "model"
    SLASH = "a/b"
    LOSS = "loss"


class Number(int, enum.Enum):
    ONE = 1
    TWO = 2


class Stubborn(str):
    """A key that equals nothing but itself."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def array(start: float = 0) -> np.ndarray[Any, Any]:
    return np.arange(start, start + 3)


def test_a_key_of_an_enumeration_is_stored_by_its_value(tmp_path: Path) -> None:
    state = {Part.MODEL: {Number.ONE: array(1), Part.SLASH: 5}, np.int64(7): array(7)}
    unickpt.save(tmp_path / "step", state, options=FAST)
    loaded = unickpt.load(tmp_path / "step")
    assert str(loaded) == str({"model": {1: array(1), "a/b": 5}, 7: array(7)})
    same = unickpt.load(
        tmp_path / "step", {Part.MODEL: {Number.ONE: array(), Part.SLASH: 0}, 7: array()}
    )
    assert [type(key) for key in same] == [Part, int]
    assert list(same[Part.MODEL]) == [Number.ONE, Part.SLASH]
    np.testing.assert_array_equal(same[Part.MODEL][Number.ONE], array(1))


def test_a_key_of_an_enumeration_changes_no_later_save_of_the_process(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "enum", {Part.MODEL: np.arange(11.0)}, options=FAST)
    unickpt.save(tmp_path / "plain", {"model": np.arange(11.0)}, options=FAST)
    assert unickpt.verify(tmp_path / "plain").ok
    assert list(unickpt.load(tmp_path / "plain")["model"]) == list(range(11))


def test_keys_that_are_stored_as_one_are_an_error_that_names_both() -> None:
    with pytest.raises(UnsupportedLeaf, match="'a' and 'a' are both stored as 'a'"):
        unickpt.save("memory://twice", {"x": {Stubborn("a"): 1, Stubborn("a"): 2}})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (True, "key True is a bool"),
        (np.True_, "is a bool"),
        (None, "key None is a NoneType"),
        (1.0, "key 1.0 is a float"),
        (b"x", "key b'x' is a bytes"),
        ((1, 2), r"key \(1, 2\) is a tuple"),
        ("\ud800", "not valid Unicode"),
        (1 << 5000, "int of 5001 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else "key",
)
def test_another_key_is_refused_by_name(key: Any, words: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=f"'x': .*{words}"):
        unickpt.save("memory://refused", {"x": {key: array()}})


def test_metrics_that_an_enumeration_names_keep_the_best_step(tmp_path: Path) -> None:
    def run(number: int, steps: dict[int, float]) -> list[int]:
        keep = Retention(keep_last=1, keep_best=1, metric=Part.LOSS)
        with Checkpointer(tmp_path, keep=keep, options=FAST) as checkpointer:
            metrics: dict[str, float] = {}
            for step, loss in steps.items():
                metrics[Part.LOSS] = loss  # one dict for all steps
                checkpointer.save(step, {"w": array()}, metrics=metrics)
            checkpointer.wait()
            return checkpointer.steps()

    assert run(1, {0: 3.0, 1: 1.0, 2: 2.0, 3: 4.0}) == [1, 3]
    assert unickpt.open(tmp_path / "step_1").metadata["unickpt"]["metrics"] == {"loss": 1.0}
    assert run(2, {7: 5.0, 8: 6.0}) == [1, 8]


def test_metrics_that_are_stored_as_one_are_an_error_that_names_both(tmp_path: Path) -> None:
    metrics = {Stubborn("a"): 1.0, Stubborn("a"): 2.0}
    words = "two names are stored as one: 'a', 'a'"
    with Checkpointer(tmp_path, options=FAST) as run, pytest.raises(UnsupportedLeaf, match=words):
        run.save(1, {}, metrics=metrics)


@pytest.mark.plugins
def test_texts_of_an_enumeration_are_options_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Word(str, enum.Enum):  # noqa: UP042
        PATH = "run"
        ZSTD = "zstd"
        UINT8 = "uint8"
        PATTERN = "w*"

    monkeypatch.chdir(tmp_path)
    weights = np.linspace(0, 1, 4096, dtype=np.float32)
    options = SaveOptions(
        compression=Word.ZSTD,  # type: ignore[arg-type]
        quantize={Word.PATTERN: Word.UINT8},
        fsync=False,
    )
    unickpt.save(Word.PATH, {"w": weights, "b": weights}, options=options)
    assert (tmp_path / "run").is_dir()
    loaded = unickpt.load("run", only=Word.PATTERN)
    np.testing.assert_allclose(loaded["w"], weights, atol=1 / 255)


plain_keys = st.one_of(
    st.integers(-(10**20), 10**20),
    st.text(max_size=6),
    st.sampled_from(["", "/", "%", ".", "..", "__x", "0", "1", "a/b", "a%2Fb", "c", "zarr.json"]),
    st.sampled_from(["\0", "é", "e\u0301", "\ud800", "process_00000", "unickpt.json"]),
)
other_keys = st.one_of(
    st.sampled_from([*Part, *Number, None, True, False, b"x", (1, 2), 0.5, 1.0]),
    plain_keys.map(lambda key: Stubborn(key) if isinstance(key, str) else np.int64(key % 2**60)),
)
leaf = st.one_of(
    st.integers(0, 9).map(lambda n: np.arange(float(n))),
    st.sampled_from([None, 0, True, "text", b"\xff", float("inf"), 1 << 70, "\ud800"]),
)
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(plain_keys, plain_keys, other_keys), inner, max_size=3),
    ),
    max_leaves=8,
)


def as_stored(obj: Any) -> Any:
    if isinstance(obj, dict):
        return {tree.plain_key(key): as_stored(child) for key, child in obj.items()}
    return list(map(as_stored, obj)) if isinstance(obj, list) else obj


def is_same(ours: Any, theirs: Any) -> bool:
    """Whether two trees are equal, their keys with the same types, in the same order."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, dict):
        keys = list(zip(ours, theirs, strict=False))
        return len(ours) == len(theirs) and all(
            type(a) is type(b) and (a is b or a == b) and is_same(ours[a], theirs[b])
            for a, b in keys
        )
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    return np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else bool(ours == theirs)


@settings(max_examples=15)
@example({Part.MODEL: array(), "loss": {Part.LOSS: 1, Number.ONE: array()}})
@example({"é": array(), "e\u0301": array(1)})
@given(trees)
def test_every_tree_that_a_save_accepts_is_loaded_with_the_same_keys(state: Any) -> None:
    try:
        unickpt.save("memory://keys", state, overwrite=True)
    except UnsupportedLeaf:
        return
    assert is_same(unickpt.load("memory://keys"), as_stored(state))
    assert is_same(unickpt.load("memory://keys", state), state)
