"""Digests that an accelerator computes of what it holds: here on the CPU, with the same code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.adapters import jax as jax_adapter
from unickpt.adapters import jax_digests, torch_digests
from unickpt.adapters import torch as torch_adapter
from unickpt.adapters.torch_cuda import sampler

Digest = Callable[[np.ndarray[Any, Any]], bytes]


def of_torch(bits: np.ndarray[Any, Any]) -> bytes:
    return torch_digests.digest(torch.from_numpy(bits)).numpy().tobytes()


def of_jax(bits: np.ndarray[Any, Any]) -> bytes:
    return bytes(np.asarray(jax_digests.digest(jnp.asarray(bits))))


DIGESTS = pytest.mark.parametrize("digest", [of_torch, of_jax])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is small has many."""
    monkeypatch.setattr(torch_digests, "_BLOCK_BYTES", 256)


@DIGESTS
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 99), bit=st.integers(0, 8 * 500 - 1), is_zero=st.booleans())
def test_each_flipped_bit_changes_both_halves(
    digest: Digest, seed: int, bit: int, is_zero: bool
) -> None:
    data = np.random.default_rng(seed).integers(0, 256, 500).astype(np.uint8) * (not is_zero)
    flipped = data.copy()
    flipped[bit // 8] ^= 1 << bit % 8
    before, after = digest(data), digest(flipped)
    assert digest(data.copy()) == before
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


@DIGESTS
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 99), data=st.data())
def test_elements_that_move_change_it(digest: Digest, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((40, 6)).astype(np.float32)
    if data.draw(st.booleans()):
        rows = np.round(rows)  # many are equal
    first, second = data.draw(st.tuples(st.integers(0, 39), st.integers(0, 39)))
    swapped, sign = rows.copy(), rows.copy()
    swapped[[first, second]] = swapped[[second, first]]
    sign[[first, second]] *= -1
    others = [
        swapped,
        sign,
        np.roll(rows, 1),
        np.roll(rows, 1, axis=0),
        rows[::-1].copy(),
        rows[rng.permutation(40)],
        np.sort(rows, axis=0),
        rows.T.copy().reshape(40, 6),
    ]
    for other in others:
        is_same = other.tobytes() == rows.tobytes()
        assert (digest(other) == digest(rows)) == is_same


@DIGESTS
def test_many_changes_have_as_many_digests(digest: Digest) -> None:
    """Two signs that flip, say, must not cancel out."""
    size, found = 24, set()
    for first in range(size):
        for second in range(first, size):
            for before in (0.0, 1.0, -1.0):
                signs = np.full(size, before, np.float32)
                signs[first] = -signs[first]
                signs[second] = -signs[second]
                found.add((digest(signs), signs.tobytes()))
    assert len({each for each, _ in found}) == len({content for _, content in found})


DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16, torch.float16),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64),
    *(torch.complex64, torch.complex128),
]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_digests, "_is_hashed", lambda tensor: True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_layout(dtype: torch.dtype, on_device: None) -> None:
    numbers = torch.arange(30 * 40).reshape(30, 40) % 2
    whole = numbers.to(dtype)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[3:, 1:],
        lambda t: t[:, 1::3],
        lambda t: t.reshape(5, 6, 40).permute(2, 0, 1),
        lambda t: t[0, 1],
        lambda t: t[:0],
        lambda t: t[:1].expand(20, 40),
    ]
    if dtype.is_complex:
        views.append(lambda t: t.conj())
    for view in views:
        tensor = view(whole)
        (token,) = torch_adapter.tokens([tensor])
        assert torch_adapter.tokens([view(whole.clone())]) == [token]
        if tensor.numel():
            changed = numbers.clone()
            changed[3, 1] = changed[0, 1] = 1 - changed[0, 1]
            assert torch_adapter.tokens([view(changed.to(dtype))]) != [token]


def test_a_token_is_of_the_dtype_and_the_shape_too(on_device: None) -> None:
    tensor = torch.zeros(4, 6)
    others = [tensor.view(torch.int32), tensor.view(6, 4), tensor[:2], torch.zeros(4, 6).t()]
    first, *rest = torch_adapter.tokens([tensor, *others])
    assert first not in rest


def test_what_lies_on_the_host_has_no_token() -> None:
    assert torch_adapter.tokens([torch.ones(3), torch.nn.Parameter(torch.ones(2))]) == [None, None]
    assert jax_adapter.tokens([jnp.ones(3)]) == [None]


JAX_DTYPES = [
    *("bool", "uint8", "int16", "float32", "bfloat16", "float16", "float8_e4m3fn", "complex64"),
    *("int4", "uint4", "float4_e2m1fn"),
]


@pytest.mark.parametrize("dtype", JAX_DTYPES)
def test_jax_arrays_of_every_dtype(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_adapter, "_on_cpu", lambda sharding: False)
    kind = np.dtype(dtype) if dtype in np.sctypeDict else np.dtype(getattr(ml_dtypes, dtype))
    numbers = np.arange(30 * 40).reshape(30, 40) % 2
    for view in (lambda a: a, lambda a: a[3:, 1:], lambda a: a[0, 1], lambda a: a[:0]):
        array = jnp.asarray(view(numbers).astype(kind))
        (token,) = jax_adapter.tokens([array])
        assert token is not None
        assert jax_adapter.tokens([jnp.array(array)]) == [token]
        if array.size:
            changed = numbers.copy()
            changed[3, 1] = changed[0, 1] = 1 - changed[0, 1]
            assert jax_adapter.tokens([jnp.asarray(view(changed).astype(kind))]) != [token]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_of_many_tensors_come_together(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers, cpu = list[int](), torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: transfers.append(t.numel()) or cpu(t))
    whole = (torch.arange(600).reshape(20, 30) % 7).to(dtype)
    tensors = [whole, whole.t(), whole[3, 4], whole.conj()]
    places: list[tuple[np.ndarray[Any, Any], ...]] = [
        (np.array([0, 19, 3]), np.array([1, 29, 4])),
        (np.array([7]), np.array([2])),
        (np.array([0]),),
        (np.array([11, 0]), np.array([0, 0])),
    ]
    for _ in range(2):
        bring = [
            sampler(tensor, (5,) * tensor.ndim)(tuple(i + 5 * (tensor.ndim > 0) for i in at))
            for tensor, at in zip(tensors, places, strict=True)
        ]
        for tensor, at, values in zip(tensors, places, bring, strict=True):
            expected = tensor.reshape(1)[0] if not tensor.ndim else tensor[tuple(map(list, at))]
            data = expected.resolve_conj().reshape(-1).contiguous().view(torch.uint8)
            assert values().tobytes() == bytes(data.tolist())
    assert len(transfers) == 2


def test_jax_keys_and_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_adapter, "_on_cpu", lambda sharding: False)
    mesh = jax.make_mesh((4,), ("x",))
    values = np.arange(40.0, dtype=np.float32)
    places = [jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P("x"), jax.P())]

    def tokens_of(values: np.ndarray[Any, Any], seed: int) -> Any:
        arrays = [jax.device_put(values, place) for place in places]
        return jax_adapter.tokens([*arrays, jax.random.key(seed)])

    tokens = tokens_of(values, 1)
    assert tokens == tokens_of(values.copy(), 1)
    assert len(set(map(repr, tokens))) == 3
    values[33] += 1
    others = tokens_of(values, 2)
    assert all(one != other for one, other in zip(tokens, others, strict=True))
