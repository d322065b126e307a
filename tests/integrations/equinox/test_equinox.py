"""unickpt.integrations.equinox, and examples/equinox_train.py killed in the middle."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.processes import Processes

import unickpt

jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
import jax.numpy as jnp  # noqa: E402

from unickpt.integrations import equinox as ours  # noqa: E402

pytestmark = pytest.mark.integration

EXAMPLE = Path(TESTS).parent.joinpath("examples", "equinox_train.py").read_text()


def attention(heads: int = 4, seed: int = 0) -> Any:
    return eqx.nn.MultiheadAttention(heads, 16, key=jax.random.key(seed))


class Mixed(eqx.Module):
    """What models have beside JAX arrays."""

    layers: list[Any]
    activation: Any
    table: np.ndarray
    key: Any
    scale: float = 0.5
    name: str = eqx.field(static=True, default="mixed")
    kinds: tuple[int, ...] = eqx.field(static=True, default=(1, 2))


def mixed(seed: int = 0, **settings: Any) -> Mixed:
    first, second, key = jax.random.split(jax.random.key(seed), 3)
    layers = [eqx.nn.Linear(3, 4, key=first), None, eqx.nn.Linear(4, 2, key=second)]
    return Mixed(layers, jax.nn.relu, np.full(3, seed, np.int8), key, **settings)


def test_a_model_loads_into_a_model_and_into_its_shapes(tmp_path: Path) -> None:
    model, other = mixed(), mixed(1)
    before = other.table.copy()
    ours.save(tmp_path / "c", model)
    for like in (other, eqx.filter_eval_shape(mixed, 2)):
        found = ours.load(tmp_path / "c", like)
        same = eqx.tree_equal(found, model, typematch=like is other)
        assert same
        assert found.activation is jax.nn.relu
    assert np.array_equal(other.table, before)  # it is not changed
    pending = ours.save_async(tmp_path / "later", model)
    pending.result()
    assert unickpt.diff(tmp_path / "c", tmp_path / "later").same
    # An ordinary checkpoint, with the names of the fields.
    stored = unickpt.load(tmp_path / "c")
    assert np.array_equal(stored["layers"][2]["weight"], model.layers[2].weight)


def test_settings_that_differ_are_refused(tmp_path: Path) -> None:
    ours.save(tmp_path / "a", attention(4))
    with pytest.raises(unickpt.LoadMismatch, match="num_heads: stored 4, requested 8"):
        ours.load(tmp_path / "a", attention(8))
    kept = ours.load(tmp_path / "a", attention(8, seed=1), static="keep")
    assert kept.num_heads == 8
    assert bool((kept.query_proj.weight == attention(4).query_proj.weight).all())
    ours.save(tmp_path / "m", mixed())
    for settings, text in (
        ({"scale": 0.25}, "scale: stored 0.5, requested 0.25"),
        ({"name": "x"}, "name: stored 'mixed', requested 'x'"),
        ({"kinds": (1, 3)}, r"kinds: stored \(1, 2\), requested \(1, 3\)"),
    ):
        with pytest.raises(unickpt.LoadMismatch, match=text):
            ours.load(tmp_path / "m", mixed(**settings))
    with pytest.raises(unickpt.LoadMismatch, match="layers/0"):
        ours.load(tmp_path / "m", eqx.tree_at(lambda m: m.layers[0], mixed(), attention()))
    with pytest.raises(ValueError, match="static="):
        ours.load(tmp_path / "m", mixed(), static="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [500, 0.99, float("inf"), float("nan"), True, 1 - 2j, "a'b", -3])
def test_numbers_of_the_tree_come_back(tmp_path: Path, value: Any) -> None:
    """As from `eqx.tree_deserialise_leaves`, for scripts that go over."""
    saved = {"model": mixed(), "at": [0, {"step": value}], "dropout": eqx.nn.Dropout(0.3)}
    fresh = {"model": mixed(1, scale=0.1), "at": [7, {"step": type(value)()}]}
    fresh["dropout"] = eqx.nn.Dropout(0.1)
    ours.save(tmp_path / "c", saved)
    with pytest.raises(unickpt.LoadMismatch, match="pass static='stored'"):
        ours.load(tmp_path / "c", fresh)
    found = ours.load(tmp_path / "c", fresh, static="stored")
    assert repr(found["at"]) == repr(saved["at"])
    assert (found["model"].scale, found["dropout"].p) == (0.5, 0.3)
    assert bool(eqx.tree_equal(found["model"], saved["model"]))
    fresh["at"][1]["step"] = object if isinstance(value, str) else ""  # of another type
    with pytest.raises(unickpt.LoadMismatch, match="at/1/step: stored"):
        ours.load(tmp_path / "c", fresh, static="stored")
    with pytest.raises(unickpt.LoadMismatch, match="name: stored 'mixed', requested 'x'"):
        ours.load(tmp_path / "c", {**saved, "model": mixed(name="x")}, static="stored")


@dataclasses.dataclass(frozen=True)
class Config:
    heads: int
    kinds: tuple[str, ...] = ("a", "b")
    act: Any = jax.nn.relu


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


@pytest.mark.parametrize(
    ("stored", "asked", "text"),
    [
        ({"heads": 4}, {"heads": 8}, "{'heads': 4}, requested {'heads': 8}"),
        (Config(4), Config(8), "Config(heads=4, kinds=('a', 'b'), act=...)"),
        (jnp.float32, jnp.bfloat16, "stored float32, requested bfloat16"),
        (np.dtype("i4"), np.dtype("i8"), "stored int32, requested int64"),
        (frozenset({1, 2}), frozenset({1, 3}), "stored {1, 2}, requested {1, 3}"),
        (Size.SMALL, Size.LARGE, "stored Size.SMALL, requested Size.LARGE"),
        ((Config(4),), (Config(5),), "(Config(heads=5"),
    ],
    ids=["dict", "dataclass", "jax_dtype", "dtype", "set", "enum", "nested"],
)
def test_settings_of_all_kinds_are_compared(
    tmp_path: Path, stored: Any, asked: Any, text: str
) -> None:
    ours.save(tmp_path / "c", mixed(kinds=stored))
    with pytest.raises(unickpt.LoadMismatch, match=re.escape(text)):
        ours.load(tmp_path / "c", mixed(kinds=asked))
    assert ours.load(tmp_path / "c", mixed(kinds=stored)).kinds == stored


def test_equal_settings_are_equal_in_another_order_and_with_other_functions(
    tmp_path: Path,
) -> None:
    ours.save(tmp_path / "c", mixed(kinds={"a": np.float32, "b": Config(1)}))
    other = {"b": Config(1, act=jax.nn.gelu), "a": jnp.float32}
    assert ours.load(tmp_path / "c", mixed(kinds=other)).kinds is other


def test_settings_whose_names_have_slashes_are_told_apart(tmp_path: Path) -> None:
    ours.save(tmp_path / "c", {"a/b": 2, "a": {"b": 3}})
    with pytest.raises(unickpt.LoadMismatch, match="a%2Fb: stored 2, requested 9"):
        ours.load(tmp_path / "c", {"a/b": 9, "a": {"b": 3}})


def test_a_scalar_of_numpy_stays_one(tmp_path: Path) -> None:
    ours.save(tmp_path / "c", {"a": np.float32(3)})
    given = {"a": np.float32(0)}
    found = ours.load(tmp_path / "c", given)["a"]
    assert (type(found), found, given["a"]) == (np.float32, 3, 0)


def test_what_unickpt_saved_itself_has_no_settings_to_compare(tmp_path: Path) -> None:
    model = attention()
    unickpt.save(tmp_path / "c", eqx.filter(model, eqx.is_array))
    assert bool(eqx.tree_equal(ours.load(tmp_path / "c", attention(seed=1)), model))


SHARDED = """
import sys, jax, equinox as eqx, numpy as np, unickpt
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from unickpt.integrations import equinox as ours

def make(seed):
    return eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(seed))

def sharding(shape, axes):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("a", "b"))
    return lambda x: NamedSharding(mesh, P(*axes[: x.ndim]))

path, model = sys.argv[1], make(0)
split = sharding((2, 4), ("a", "b"))
placed = eqx.filter_shard(model, jax.tree.map(split, eqx.filter(model, eqx.is_array)))
placed = jax.tree.map(lambda x: jax.device_put(x, split(x)) if eqx.is_array(x) else x, model)
ours.save(path, placed)
skeleton = eqx.filter_eval_shape(make, 0)
for shape, axes in [((2, 4), ("a", "b")), ((4, 2), ("b", None)), ((8, 1), (None, "a"))]:
    choose = sharding(shape, axes)
    wanted = jax.tree.map(choose, eqx.filter(skeleton, lambda x: hasattr(x, "shape")))
    found = ours.load(path, skeleton, shardings=wanted)
    assert eqx.tree_equal(jax.device_get(eqx.filter(found, eqx.is_array)),
                          jax.device_get(eqx.filter(model, eqx.is_array)))
    assert found.layers[0].weight.sharding == choose(found.layers[0].weight)
    again = ours.load(path, found)
    assert again.layers[1].weight.sharding == found.layers[1].weight.sharding
one = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P("a"))
assert ours.load(path, skeleton, shardings=one).layers[0].bias.sharding == one
print("fine")
"""


def test_shapes_with_shardings(processes: Processes, tmp_path: Path) -> None:
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    job = processes.forked(SHARDED, tmp_path / "c", of=["jax"], env=env)
    assert processes.finish([job]) == ["fine\n"]


def losses(output: str) -> dict[int, str]:
    return {int(i): x for i, x in re.findall(r"iteration (\d+) loss (\S+)", output)}


@pytest.mark.trainers
def test_a_job_that_is_killed_goes_on_with_the_same_losses(
    processes: Processes, tmp_path: Path
) -> None:
    assert len(EXAMPLE.splitlines()) <= 40
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    job = processes.start(EXAMPLE, tmp_path / "run", 10**6, env=env)
    first = killed_after(job, 30)
    with unickpt.Checkpointer(tmp_path / "run") as run:
        last = run.latest() or 0
    assert 0 < last <= 31
    whole, going = processes.finish(
        [processes.start(EXAMPLE, tmp_path / name, 60, env=env) for name in ("whole", "run")]
    )
    wanted, rest = losses(whole), losses(going)
    assert sorted(rest) == list(range(last + 1, 61))
    assert {**first, **rest} == {i: wanted[i] for i in {**first, **rest}}


def killed_after(process: subprocess.Popen[str], iteration: int) -> dict[int, str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if f"iteration {iteration} " in line:
            os.kill(process.pid, signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    return losses("".join(lines))
