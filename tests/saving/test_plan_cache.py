"""What is known of a tree from an earlier save: recognised only if nothing but data has changed."""

from __future__ import annotations

import gc
import os
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from support.recognised import note_recognised
from support.saving import in_job
from support.strategies import examples

import unickpt
from unickpt import PerProcess, ProcessGroup, SaveOptions, UnsupportedLeaf
from unickpt.errors import StateChanged
from unickpt.saving import plan_cache, saver
from unickpt.saving.background import SaveQueue, SaveRequest
from unickpt.trees import tree as trees
from unickpt.trees.tree import leaves_of, skeleton

FAST = SaveOptions(fsync=False)
Pair = namedtuple("Pair", "a b")


class Saves:
    """Saves one after another, and says which recognised their tree.

    Arguments:
        folder: for the checkpoints.
        monkeypatch: pytest's.
        waits: whether by `save`, which waits for each, or by a queue.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, waits: bool = False) -> None:
        self.folder, self.queue, self.recognised = folder, SaveQueue(), list[bool]()
        self.waits, plans = waits, plan_cache.PlanCache(most=2)
        find, mine = plan_cache.PlanCache.find, plans if waits else self.queue._plans

        def noted(cache: plan_cache.PlanCache, *arguments: Any) -> Any:
            found = find(cache, *arguments)
            if cache is mine:
                self.recognised.append(isinstance(found, plan_cache.SameTree))
            return found

        monkeypatch.setattr(plan_cache.PlanCache, "find", noted)
        if waits:
            monkeypatch.setattr(saver, "_plans", lambda process: plans)
            monkeypatch.setattr(plans, "is_repeated", lambda sources: True)

    def save(self, tree: Any, options: SaveOptions = FAST, **named: Any) -> Any:
        """Saves a tree; returns what is stored."""
        return self.pending(tree, options, **named)()

    def pending(
        self,
        tree: Any,
        options: SaveOptions = FAST,
        metadata: Callable[[], Any] = lambda: None,
    ) -> Callable[[], Any]:
        path = self.folder / str(len(self.recognised))
        if self.waits:
            wait: Callable[[], object] = list
            unickpt.save(path, tree, options=options, metadata=metadata())
        else:
            wait = self.queue.save(SaveRequest(path, tree, options, metadata=metadata)).result

        def result() -> Any:
            wait()
            assert unickpt.verify(path).ok
            return unickpt.load(path)

        return result


@pytest.fixture(params=["async", "waits"])
def saves(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saves:
    return Saves(tmp_path, monkeypatch, request.param == "waits")


@pytest.fixture
def queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saves:
    return Saves(tmp_path, monkeypatch)


def bits(tree: Any) -> Any:
    """A tree with its arrays as dtype, shape and bytes."""
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [bits(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        plain = tree.detach().resolve_conj().resolve_neg().contiguous()
        return str(tree.dtype)[6:], tuple(tree.shape), plain.reshape(-1).view(torch.uint8).tolist()
    if isinstance(tree, np.ndarray | np.generic | jax.Array):
        array = np.ascontiguousarray(tree)
        array = array.astype(array.dtype.newbyteorder("="))
        return str(array.dtype), tree.shape, array.reshape(-1).view(np.uint8).tolist()
    return tree


MODELS: dict[str, Callable[[int], Any]] = {
    "torch": lambda n: {"w": torch.full((5, 3), float(n)), "b": torch.arange(n, n + 7)},
    "numpy": lambda n: {"w": np.full((5, 3), float(n)), "s": np.float32(n), "e": np.zeros((0, 3))},
    "jax": lambda n: {"w": jnp.full((5, 3), float(n)), "k": [jnp.arange(n, n + 7)]},
}


@pytest.mark.parametrize("framework", MODELS)
def test_a_tree_of_the_same_arrays_is_recognised(framework: str, saves: Saves) -> None:
    for n in (2, 2, 2):
        tree = {"model": MODELS[framework](n), "step": n}
        assert bits(saves.save(tree)) == bits(tree)
    assert saves.recognised == [False, True, True]


def test_data_changed_in_place_is_saved_as_it_is_at_each_call(saves: Saves) -> None:
    small, large = torch.zeros(3, 5), torch.zeros(700, 301)
    mine, flags, key = np.zeros(11), torch.zeros(4, dtype=torch.bool), {"a": torch.zeros(0, 3)}
    results, expected = [], []
    for step in range(6):
        for array in (small, large, mine):
            array += step + 1
        flags[step % 4] = True
        tree = {
            "s": small,
            "l": large,
            "m": (mine, key),
            "f": flags,
            "step": step,
            "x": "ab" * step,
        }
        expected.append(bits(tree))
        results.append(saves.pending(tree))
        if step == 2:
            results[-1]()
    assert [bits(result()) for result in results] == expected
    assert saves.recognised[0] is False
    assert any(saves.recognised)


def test_many_tensors_are_copied_by_several_threads(
    queued: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unickpt.adapters.torch._EACH_COPIES", 1 << 10)
    monkeypatch.setattr("unickpt.adapters.torch._COPYING_THREADS", 3)
    tree = [torch.full((5, n), float(n)).t() for n in range(1, 41)]
    results = []
    for _ in range(3):
        expected = bits(tree)
        results.append((queued.pending(tree), expected))
        for tensor in tree:
            tensor += 1
        results[-1][0]()
    assert all(bits(result()) == expected for result, expected in results)
    assert queued.recognised == [False, True, True]


def test_values_per_process_and_metadata_are_those_of_each_call(saves: Saves) -> None:
    for n in range(3):
        tree = {
            "w": torch.ones(3),
            "rng": PerProcess({"seed": n, "a": np.full(2, n)}),
            "none": None,
        }
        found = saves.save(tree, metadata=lambda n=n: {"loss": n})
        assert bits(found["rng"].values[0]) == bits({"seed": n, "a": np.full(2, n)})
        assert unickpt.open(saves.folder / str(n)).metadata == {"loss": n}
    assert saves.recognised == [False, True, True]


def test_values_that_cannot_be_stored_are_named(saves: Saves) -> None:
    saves.save({"w": A, "rng": PerProcess(1)})
    with pytest.raises(UnsupportedLeaf, match=r"(?s)cannot be stored:.*'rng': .*object"):
        saves.save({"w": A, "rng": PerProcess(object())})
    with pytest.raises(UnsupportedLeaf, match="metadata must be a dict"):
        saves.save({"w": A, "rng": PerProcess(1)}, metadata=lambda: 3)


def test_memory_that_was_replaced_is_read_where_it_is_now(saves: Saves) -> None:
    tensor = torch.nn.Parameter(torch.zeros(3, 5))
    saves.save({"w": tensor})
    tensor.data = torch.arange(15.0).reshape(3, 5)
    assert saves.save({"w": tensor})["w"].tolist() == tensor.tolist()
    assert saves.recognised == [False, True]


def _swap(tensor: torch.Tensor) -> None:
    tensor.data = torch.arange(12, dtype=torch.int32).reshape(3, 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.resize_(3, 3),
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(0),
        lambda t: t.as_strided_((2, 2), (2, 1)),
        lambda t: t.set_(torch.arange(5.0)),
        _swap,
    ],
)
def test_a_tensor_that_became_another_is_described_again(
    change: Callable[[torch.Tensor], object], saves: Saves
) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).clone()
    tree = {"w": tensor, "v": torch.ones(2)}
    saves.save(tree)
    change(tensor)
    assert bits(saves.save(tree)) == bits(tree)
    assert saves.recognised == [False, False]


A = np.arange(6.0)
Z = torch.arange(6.0).to(torch.complex64) * 1j
PAIRS: dict[str, tuple[Any, Any]] = {
    "name": ({"a": A}, {"b": A}),
    "order": ({"a": A, "b": A + 1}, {"b": A + 1, "a": A}),
    "one more": ({"a": A}, {"a": A, "b": A + 1}),
    "one less": ({"a": A, "b": A + 1}, {"a": A}),
    "kind": ({"a": [A]}, {"a": (A,)}),
    "ordered": ({"a": {"x": A}}, {"a": OrderedDict(x=A)}),
    "named": ({"a": Pair(A, 1)}, {"a": (A, 1)}),
    "key's type": ({"a": {1: A}}, {"a": {"1": A}}),
    "empty": ({"a": A, "b": {}}, {"a": A, "b": []}),
    "value's type": ({"a": A, "n": 1}, {"a": A, "n": True}),
    "value to array": ({"a": A, "n": 1}, {"a": A, "n": np.float64(1)}),
    "dtype": ({"a": A}, {"a": A.astype(np.float32)}),
    "byte order": ({"a": A}, {"a": A.astype(">f8")}),
    "shape": ({"a": A}, {"a": A.reshape(2, 3)}),
    "framework": ({"a": A}, {"a": torch.from_numpy(A)}),
    "leaf to container": ({"a": A}, {"a": [A]}),
    "container to leaf": ({"a": [A]}, {"a": A}),
    "tied": ({"a": A, "b": A + 0}, {"a": A, "b": A}),
    "untied": ({"a": A, "b": A}, {"a": A, "b": A + 1}),
    "tied to a view": ({"a": A, "b": A + 0}, {"a": A, "b": A[:]}),
    "untied from a view": ({"a": A, "b": A[:]}, {"a": A, "b": A + 1}),
    "conjugated": ({"a": Z, "b": Z}, {"a": Z, "b": Z.conj()}),
    "negated": ({"a": Z.imag, "b": Z.imag}, {"a": Z.imag, "b": Z.conj().imag}),
    "tied to another": ({"a": A, "b": A, "c": A + 1}, (lambda b: {"a": A, "b": b, "c": b})(A + 2)),
}


@pytest.mark.parametrize("case", PAIRS)
def test_another_tree_is_not_recognised(case: str, saves: Saves) -> None:
    before, after = PAIRS[case]
    for tree in (before, after):
        found, path = saves.save(tree), saves.folder / str(len(saves.recognised) - 1)
        expected = path.parent / f"expected {path.name}"
        SaveQueue().save(SaveRequest(expected, tree, FAST)).result()
        assert bits(found) == bits(unickpt.load(expected))
        index, wanted = (unickpt.open(p).index for p in (path, expected))
        assert (index.tree, index.arrays, index.aliases, index.values) == (
            wanted.tree,
            wanted.arrays,
            wanted.aliases,
            wanted.values,
        )
    assert saves.recognised == [False, False]


def test_keys_that_only_compare_equal_are_refused_as_ever(saves: Saves) -> None:
    saves.save({1: A})
    with pytest.raises(UnsupportedLeaf, match="key True is a bool"):
        saves.save({True: A})


def test_other_options_are_not_mixed_up(saves: Saves) -> None:
    tree = {"w": jnp.arange(12.0)}
    for options in (FAST, SaveOptions(fsync=False, chunk_bytes=16), FAST):
        assert bits(saves.save(tree, options)) == bits(tree)
    assert unickpt.open(saves.folder / "1").index.arrays["w"].chunk == (4,)
    assert saves.recognised == [False, False, True]


def test_whether_files_are_flushed_is_no_matter(saves: Saves) -> None:
    tree = {"w": jnp.arange(12.0)}
    for fsync in (True, False, True):
        assert bits(saves.save(tree, SaveOptions(fsync=fsync))) == bits(tree)
    assert saves.recognised == [False, True, True]


def test_functions_that_are_new_in_each_call_do_not_matter(saves: Saves) -> None:
    tree, seen = {"w": jnp.arange(12.0)}, []
    for n in range(2):
        group = ProcessGroup(0, 1, f"session{n}")
        given = {"group": group, "metrics": lambda report: seen.append(report.url)}
        saves.save(tree, SaveOptions(fsync=False, progress=lambda *_: None, **given))
    assert saves.recognised == [False, True]
    assert len(seen) == 2


def test_two_trees_in_turn_are_both_recognised(saves: Saves) -> None:
    for n in range(3):
        for tree in ({"a": np.full(3, n)}, {"b": np.full(5, n)}):
            assert bits(saves.save(tree)) == bits(tree)
    assert saves.recognised == [False, False, True, True, True, True]


def test_a_jax_array_of_another_sharding_is_described_again(saves: Saves) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    for spec in (("x", "y"), ("x", "y"), ("y", "x")):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        tree = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding), "r": jnp.ones(3)}
        assert bits(saves.save(tree)) == bits(tree)
    assert saves.recognised == [False, True, False]
    layout = unickpt.open(saves.folder / "2").index.arrays["w"].layout
    assert layout is not None
    assert layout.dims == (("y",), ("x",))


def test_prng_keys_are_described_again_each_time(saves: Saves) -> None:
    for seed in range(3):
        tree = {"key": jax.random.key(seed), "w": jnp.full(3, seed)}
        saves.save(tree)
        path = saves.folder / str(seed)
        found = unickpt.load(path, {"key": jax.random.key(9), "w": jnp.zeros(3, jnp.int32)})
        assert (jax.random.key_data(found["key"]) == jax.random.key_data(tree["key"])).all()
    assert saves.recognised == [False, True, True]


def test_a_deleted_array_is_named(saves: Saves) -> None:
    tree = {"w": jnp.ones(3)}
    saves.save(tree)
    tree["w"].delete()
    with pytest.raises(UnsupportedLeaf, match="'w': the array was deleted"):
        saves.save(tree)


def test_a_tensor_whose_memory_was_freed_is_named(saves: Saves) -> None:
    tree = {"w": torch.ones(3)}
    saves.save(tree)
    tree["w"].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeaf, match="'w': a Tensor has no data"):
        saves.save(tree)


def test_nothing_of_the_program_stays_in_memory(saves: Saves) -> None:
    tree = {
        "t": {"small": torch.ones(3), "large": torch.ones(99, 999)},
        "n": np.ones(4),
        "m": np.ones((99, 999)),
    }
    plain = [weakref.ref(x) for x in (tree["t"]["small"], tree["t"]["large"], tree["n"], tree["m"])]
    for _ in range(2):
        saves.save(tree)
    other = {"w": jnp.ones(5), "s": jax.device_put(jnp.ones(8), jax.devices()[1])}
    refs = [*plain, *(weakref.ref(x) for x in other.values())]
    for _ in range(2):
        saves.save(other)
    assert saves.recognised == [False, True, False, True]
    del tree, other
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(64, 1024), (3,), ()])
def test_donated_arrays_are_saved_as_they_were(
    shape: tuple[int, ...], dtype: str, saves: Saves
) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    array, results = jnp.zeros(shape, dtype), []
    for _ in range(5):
        results.append((saves.pending({"w": array}), float(array.max())))
        array = step(array)
        if len(results) == 2:
            results[0][0]()
    for result, expected in results:
        assert set(np.ravel(result()["w"]).tolist()) == {expected}
    assert True in saves.recognised


def test_jax_arrays_beside_memory_that_changes_are_looked_at_each_time(saves: Saves) -> None:
    memory = np.zeros(1024 + 16, np.float32)
    memory = memory[-(memory.ctypes.data // 4) % 16 :][:1024]  # JAX shares such memory
    tree = {"n": memory, "j": jax.device_put(memory)}
    results = []
    for step in range(3):
        memory[:] = step
        results.append((saves.pending(tree), np.asarray(tree["j"]).copy()))
        memory[:] = -1
    for result, expected in results:
        assert bits(result()["j"]) == bits(expected)
    assert saves.recognised == [False] * 3


def test_staging_by_copy_copies_immutable_arrays_each_time(saves: Saves) -> None:
    memory = np.zeros(1024 + 16, np.float32)
    memory = memory[-(memory.ctypes.data // 4) % 16 :][:1024]
    array, copy = jax.device_put(memory), SaveOptions(staging="copy", fsync=False)
    for step in range(3):
        memory[:] = step
        expected, pending = bits(array), saves.pending({"j": array}, copy)
        memory[:] = -1
        assert bits(pending()["j"]) == expected
    assert saves.recognised == [False, True, True]


def test_a_state_dict_is_asked_for_once_in_each_save(saves: Saves) -> None:
    class Asked:
        def __init__(self) -> None:
            self.times, self.state = 0, {"w": np.ones(3)}

        def state_dict(self) -> dict[str, Any]:
            self.times += 1
            return dict(self.state)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    asked = Asked()
    for n in range(4):
        if n == 2:
            asked.state["v"] = np.zeros(2)
        saves.save({"a": asked, "b": [1]})
        assert asked.times == n + 1
    assert saves.recognised == [False, True, False, True]


def test_modules_and_optimizers_are_recognised(saves: Saves) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    for n in range(4):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        found = saves.save({"model": model, "optimizer": optimizer, "n": n})
        assert bits(found["model"]) == bits(model.state_dict())
        steps = {float(state["step"]) for state in found["optimizer"]["state"].values()}
        assert steps == {n + 1.0}
    assert saves.recognised == [False, True, True, True]


def test_a_save_that_failed_leaves_no_plan(queued: Saves) -> None:
    tree = {"w": torch.ones(1 << 19)}
    lazy = SaveOptions(staging="lazy", fsync=False)
    owners: set[Hashable] = {tree["w"].untyped_storage()._cdata}  # as of an optimizer that waits
    pending = queued.queue.save(SaveRequest(queued.folder / "0", tree, lazy, owners=owners))
    tree["w"] += 1
    with pytest.raises(StateChanged):
        pending.result()
    assert bits(queued.save(tree, lazy)) == bits(tree)
    assert queued.recognised == [False, False]


def test_a_save_that_failed_while_its_caller_waited_leaves_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, tree = Saves(tmp_path, monkeypatch, waits=True), {"w": torch.ones(3), "v": np.ones(3)}
    saves.save(tree)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "in the way").touch()
    with pytest.raises(unickpt.CheckpointExists):
        saves.save(tree)
    tree["w"] += 1
    assert bits(saves.save(tree)) == bits(tree)
    assert saves.recognised == [False, True, False]


def test_of_trees_that_are_saved_once_nothing_is_kept(tmp_path: Path) -> None:
    saver._plans.cache_clear()
    plans, kept = saver._plans(os.getpid()), []
    for step in range(4):
        for name in ("a", "b") if step else ("a", "b", "c"):
            tree = {name: np.full(3, step)}
            unickpt.save(tmp_path / f"{name}{step}", tree, options=FAST)
            kept.append(len(plans._free))
            assert bits(unickpt.load(tmp_path / f"{name}{step}")) == bits(tree)
    assert kept == [0, 0, 0, 1, 2, 2, 2, 2, 2]


def test_of_the_last_trees_a_few_plans_are_kept(tmp_path: Path) -> None:
    saver._plans.cache_clear()
    plans, kept = saver._plans(os.getpid()), []
    for step in range(3):
        for name in "aabbccddee":
            unickpt.save(tmp_path / "c", {name: np.full(3, step)}, options=FAST, overwrite=True)
            kept.append(len(plans._free))
    assert kept == [0, 1, 1, 2, 2, 3, 3, 4, 4, 4] + [4] * 20


def test_trees_of_three_frameworks_in_turn_are_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver._plans.cache_clear()
    found = note_recognised(monkeypatch)
    for n in range(3):
        for framework, make in MODELS.items():
            tree = {framework: make(2), "n": n}
            path = tmp_path / f"{framework}{n}"
            unickpt.save(path, tree, options=SaveOptions(fsync=n == 1))
            assert bits(unickpt.load(path)) == bits(tree)
    assert found == [False] * 6 + [True] * 3


@pytest.mark.parametrize("waits", [False, True])
def test_replicas_that_begin_to_differ_are_noticed(waits: bool, tmp_path: Path) -> None:
    """Small ones are copied together, large ones described one by one."""
    trees = [{"s": torch.ones(5), "l": torch.ones(300, 301)} for _ in range(2)]

    def work(group: ProcessGroup) -> list[Any]:
        queue, tree = SaveQueue(), trees[group.index]
        options = SaveOptions(fsync=False, group=group, timeout_s=20)
        found = []
        for step, name in enumerate(("", "", "s", "l")):
            if name and group.index:
                tree[name] += 1
            if waits:
                report = unickpt.save(tmp_path / str(step), tree, options=options)
            else:
                report = queue.save(SaveRequest(tmp_path / str(step), tree, options)).result()
            found.append(report.replicas_differ)
        return found

    with pytest.warns(unickpt.errors.ReplicasDiffer):
        found = in_job(2, work)
    assert found[0] == [(), (), ("s",), ("s", "l")], found[0]


ARRAYS = [
    lambda n: np.full(3, n),
    lambda n: np.full((2, 2), n, ">f4").T,
    lambda n: torch.full((4,), n),
    lambda n: torch.full((3, 2), n, dtype=torch.bfloat16).t(),
    lambda n: torch.full((5,), n, dtype=torch.complex64).conj(),
    lambda n: torch.full((2, 40_000), float(n)),
    lambda n: torch.tensor(n),
    lambda n: torch.tensor([n % 2 == 0, n % 3 == 0]),
    lambda n: n,
    lambda n: str(n),
    lambda n: jnp.full((3, 2), n, jnp.bfloat16),
    lambda n: jnp.float32(n),
]


@pytest.mark.integration  # thirty histories of saves take seconds
@examples(30)
@given(st.lists(st.lists(st.integers(0, len(ARRAYS) - 1), max_size=4), min_size=2, max_size=5))
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_saved_is_what_was_there(waits: bool, steps: list[list[int]]) -> None:
    queue = SaveQueue()
    kept = [{number: make(0) for number, make in enumerate(ARRAYS)}]
    for n, numbers in enumerate(steps):
        tree = {"all": [ARRAYS[number](n) for number in numbers], "same": kept, "n": n}
        for number, array in kept[0].items():
            if number < 4:
                array += number
        expected = bits(tree)
        path = f"memory://plan_cache/{id(queue)}/{n}"
        if waits:
            unickpt.save(path, tree, options=FAST, overwrite=True)
        else:
            pending = queue.save(SaveRequest(path, tree, FAST, overwrite=True))
        for array in kept[0].values():
            if isinstance(array, np.ndarray):
                array += 1
        if not waits:
            pending.result()
        assert bits(unickpt.load(path)) == expected


def test_a_skeleton_finds_the_leaves_of_its_own_structure_only() -> None:
    def level(obj: Any, name: str) -> Any:
        return trees.level_of(obj, name, lambda obj, name: None)

    def flat(obj: Any) -> Any:
        return trees.flatten(obj, lambda x: isinstance(x, int), lambda obj, name: None)

    root = {"a": [1, {"b": 2}], "c": Pair(3, (4,)), 5: {}}
    like = skeleton(flat(root))
    assert like is not None
    assert leaves_of(root, like, level) == [1, 2, 3, 4]
    for other in ({"a": [1, {"b": 2}], "c": Pair(3, (4,)), "5": {}}, {}, [], 3, {"a": 1}):
        assert leaves_of(other, like, level) is None
    assert skeleton(flat(3)) is None
