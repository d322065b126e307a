"""Plain numbers and arrays without dimensions serve for each other, exactly.

torch_ranks.py has the case of several processes.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import unickpt
from unickpt import LoadMismatch, Rules

PATH = "memory://numbers/c"


def load(value: Any, like: Any, **options: Any) -> Any:
    unickpt.save(PATH, {"n": value}, overwrite=True)
    return unickpt.load(PATH, {"n": like}, **options)["n"]


def test_the_recipe_of_the_readme_with_a_flax_state_before_its_first_step() -> None:
    model = nn.Dense(3)

    def init(key: Any) -> Any:
        params = model.init(key, jnp.ones((1, 2)))
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    state = init(jax.random.key(0))
    assert type(state.step) is int
    unickpt.save(PATH, state, overwrite=True)
    abstract = jax.eval_shape(init, jax.random.key(0))
    home = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec())
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), abstract)
    for asked in (like, abstract):
        got = unickpt.load(PATH, asked)
        assert isinstance(got.step, jax.Array)
        assert (got.step.dtype, int(got.step)) == (abstract.step.dtype, 0)
        assert jax.tree.all(jax.tree.map(np.array_equal, got.params, state.params))
    assert got.apply_gradients(grads=got.params).step == 1


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_an_int_fits_or_is_refused(dtype: str) -> None:
    limits = np.iinfo(dtype)
    for value in (int(limits.min), int(limits.max), 7):
        for like in (np.zeros((), dtype), torch.zeros((), dtype=getattr(torch, dtype))):
            got = load(value, like)
            assert (got.item(), got.dtype, got.shape) == (value, like.dtype, ())
            assert got is like
    for value in (int(limits.min) - 1, int(limits.max) + 1):
        for cast in (False, True):
            text = rf"n +value +plain int {value} +{dtype}\[\]"
            with pytest.raises(LoadMismatch, match=text) as caught:
                load(value, np.zeros((), dtype), cast=cast)
            assert "request a wider dtype" in str(caught.value)
            assert unickpt.load(PATH, {"n": 0}) == {"n": value}  # the other way out


def test_small_integers_of_accelerators() -> None:
    assert load(-8, np.zeros((), ml_dtypes.int4)) == -8
    with pytest.raises(LoadMismatch, match="plain int 8"):
        load(8, np.zeros((), ml_dtypes.int4))


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_a_float_is_exact_or_cast(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for value in (0.5, -2.0, -0.0, 0.0):
        got = load(value, np.zeros((), kind))
        assert (float(got), got.dtype, math.copysign(1, got)) == (
            value, kind, math.copysign(1, value),
        )  # fmt: skip
    tenth = np.asarray(0.1).astype(kind)
    if dtype != "float64":
        with pytest.raises(LoadMismatch, match=rf"n +dtype +plain float 0.1 +{dtype}") as caught:
            load(0.1, np.zeros((), kind))
        assert "cast=True" in str(caught.value)
    assert load(0.1, np.zeros((), kind), cast=True).tobytes() == tenth.tobytes()


def test_the_bits_of_a_float_survive() -> None:
    odd = struct.unpack(">d", bytes.fromhex("7ff8000000000abc"))[0]
    for value in (odd, math.nan, math.inf, -math.inf, 5e-324):
        got = load(value, np.zeros(()))
        assert got.tobytes() == struct.pack("<d", value)
        assert load(value, torch.zeros((), dtype=torch.float64)).numpy().tobytes() == got.tobytes()
    assert math.isnan(load(math.nan, np.zeros((), np.float32)))
    for value in (odd, 5e-324, 1e300):
        with pytest.raises(LoadMismatch, match="plain float"):
            load(value, np.zeros((), np.float32))


def test_kinds_do_not_mix() -> None:
    likes = {int: np.int32, float: np.float32, bool: np.bool_}
    for stored in (3, 0.5, True):
        for kind, dtype in likes.items():
            if type(stored) is kind:
                assert load(stored, np.zeros((), dtype)).item() == stored
                continue
            text = rf"n +kind +plain {type(stored).__name__} {stored} +{np.dtype(dtype)}\[\]"
            with pytest.raises(LoadMismatch, match=text):
                load(stored, np.zeros((), dtype), cast=True)
    for like in (np.zeros(1, int), np.zeros((), complex), np.zeros((), "datetime64[s]")):
        with pytest.raises(LoadMismatch, match="kind"):
            load(3, like)
    with pytest.raises(LoadMismatch, match="plain str"):
        load("3", np.zeros((), int))


def test_every_kind_of_array_of_each_framework() -> None:
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec())
    likes = [
        jnp.zeros((), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding),
        torch.zeros((), dtype=torch.int32),
        torch.empty((), dtype=torch.int32, device="meta"),
        np.zeros((), np.int32),
        np.int32(0),
    ]
    unickpt.save(PATH, {str(i): 7 + i for i in range(len(likes))}, overwrite=True)
    got = unickpt.load(PATH, {str(i): like for i, like in enumerate(likes)})
    assert [int(x) for x in got.values()] == [7 + i for i in range(len(likes))]
    assert [str(x.dtype).removeprefix("torch.") for x in got.values()] == ["int32"] * len(likes)
    assert got["2"].sharding == sharding
    assert got["4"].device.type == "cpu"
    assert type(got["6"]) is np.int32


def test_one_array_that_stands_for_two_numbers_is_refused() -> None:
    unickpt.save(PATH, {"a": 1, "b": 2}, overwrite=True)
    one = np.zeros((), int)
    with pytest.raises(LoadMismatch, match="tied"):
        unickpt.load(PATH, {"a": one, "b": one})


def test_numbers_go_through_rules() -> None:
    unickpt.save(PATH, {"step": 300, "lr": 0.1}, overwrite=True)
    rules = Rules.parse("step <-> n\nlr <-> rate")
    got = unickpt.load(PATH, {"n": np.zeros((), np.int16), "rate": np.zeros(())}, rules=rules)
    assert (got["n"], got["rate"]) == (300, 0.1)
    like = {"n": np.zeros((), np.int8), "rate": np.zeros((), np.float32)}
    with pytest.raises(LoadMismatch) as caught:
        unickpt.load(PATH, like, rules=rules)
    rows = [line.split() for line in str(caught.value).splitlines()]
    assert ["n", "value", "plain", "int", "300", "int8[]"] in rows
    assert ["rate", "dtype", "plain", "float", "0.1", "float32"] in rows
    got = unickpt.load(PATH, {"n": 0, "rate": np.zeros((), np.float32)}, rules=rules, cast=True)
    assert (got["n"], got["rate"]) == (300, np.float32(0.1))


def test_within_a_value_of_one_process() -> None:
    unickpt.save(PATH, {"r": unickpt.PerProcess({"n": 5, "a": np.int32(6)})}, overwrite=True)
    like = unickpt.PerProcess({"n": np.zeros((), np.int8), "a": 0})
    got = unickpt.load(PATH, {"r": like})["r"].value
    assert (got["n"].dtype, got["n"], got["a"], type(got["a"])) == (np.int8, 5, 6, int)
    with pytest.raises(LoadMismatch, match="'n': stored int"):
        unickpt.load(PATH, {"r": unickpt.PerProcess({"n": np.zeros(()), "a": 0})})
