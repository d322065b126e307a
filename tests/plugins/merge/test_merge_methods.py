"""The arithmetic of merges, against plain NumPy, Python's integers and torch's own averages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unickpt.arrays.box import Box
from unickpt.errors import MergeError
from unickpt.plugins.merge import arithmetic, method_parameters
from unickpt.plugins.merge.arithmetic import (
    ElementSpan,
    KthLargest,
    is_kept,
    merge_box,
    slerp_statistics,
    ties_statistics,
    weighted_sum,
)
from unickpt.plugins.merge.method_parameters import (
    ByMetric,
    ByStep,
    Dare,
    Ema,
    Mean,
    Slerp,
    SourceFacts,
    Ties,
    Weighted,
    method_of,
    slerp_weights,
    weights_of,
)


def facts(*steps: int | None, **metrics: float) -> list[SourceFacts]:
    return [SourceFacts(f"memory://{n}/", step, metrics) for n, step in enumerate(steps)]


def with_losses(*losses: float) -> list[SourceFacts]:
    return [SourceFacts(f"memory://{n}/", n, {"loss": x}) for n, x in enumerate(losses)]


# --- weights --------------------------------------------------------------------------------------


def test_weights_by_loss_are_powers_of_its_inverse() -> None:
    losses = np.array([2.0, 0.5, 1.25])
    for penalty in (0, 1, 2.5):
        expected = losses**-penalty / (losses**-penalty).sum()
        found = weights_of(ByMetric(penalty=penalty), with_losses(*losses), None)
        assert np.allclose(found, expected, rtol=1e-14)
        better = weights_of(ByMetric(penalty=penalty, better="higher"), with_losses(*losses), None)
        assert np.allclose(better, losses**penalty / (losses**penalty).sum(), rtol=1e-14)


def test_weights_by_step_are_powers_of_it_and_a_large_penalty_does_not_overflow() -> None:
    found = weights_of(ByStep(penalty=2), facts(100, 200, 300), None)
    assert np.allclose(found, np.array([1, 4, 9]) / 14, rtol=1e-14)
    assert weights_of(ByStep(penalty=1e6), facts(100, 10**9), None) == (0.0, 1.0)


def test_weights_of_an_average_are_those_of_its_recursion() -> None:
    values = np.array([3.0, -1.0, 4.0, 1.5])
    average = values[0]
    for value in values[1:]:
        average = 0.75 * average + 0.25 * value
    weights = weights_of(Ema(0.75), facts(1, 2, 3, 4), None)
    assert math.isclose(float(np.dot(weights, values)), average, rel_tol=1e-14)
    assert math.isclose(sum(weights), 1, rel_tol=1e-15)
    assert weights_of(Ema(0), facts(1, 2, 3), None) == (0, 0, 1)


def test_what_weights_need_is_told() -> None:
    with pytest.raises(MergeError, match=r"memory://1/: no step is recorded"):
        weights_of(ByStep(), facts(1, None), None)
    with pytest.raises(MergeError, match=r"no metric 'loss' is recorded in it \(recorded: acc\)"):
        weights_of(ByMetric(), facts(1, 2, acc=3), None)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(MergeError, match=r"memory://1/: its metric 'loss' is"):
            weights_of(ByMetric(), with_losses(1, bad), None)
    with pytest.raises(ValueError, match="3 weights for 2 sources"):
        weights_of(Weighted(), facts(1, 2), [1, 2, 3])
    with pytest.raises(ValueError, match="must be a number"):
        weights_of(Weighted(), facts(1, 2), [1, math.nan])
    with pytest.raises(ValueError, match="takes no weights; for a weighted sum say how='weighted'"):
        weights_of(Mean(), facts(1, 2), [1, 2])
    with pytest.raises(ValueError, match="needs weights="):
        weights_of(Weighted(), facts(1, 2), None)


def test_weights_may_be_an_array() -> None:
    weights = np.array([0.25, -2], np.float32)
    assert weights_of(Weighted(), facts(1, 2), weights) == (0.25, -2.0)  # type: ignore[arg-type]


def test_methods_by_name() -> None:
    for kind in method_parameters.METHODS:
        assert method_of(kind.name) == kind()
    assert method_of("ties", {"density": 0.5}) == Ties(density=0.5)
    with pytest.raises(ValueError, match="no method; methods are mean, weighted, metric"):
        method_of("median")
    with pytest.raises(ValueError, match="has no parameter 'decay'; its parameters are density"):
        method_of("ties", {"decay": 0.5})


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        (Ema, {"decay": 1.5}),
        (Slerp, {"t": -0.1}),
        (Ties, {"density": 0}),
        (Ties, {"density": "much"}),
        (Ties, {"scale": math.inf}),
        (Dare, {"drop": 1}),
        (Dare, {"seed": 1.5}),
        (ByStep, {"penalty": -1}),
        (ByStep, {"penalty": True}),
        (ByMetric, {"better": "smaller"}),
    ],
)
def test_parameters_out_of_range(kind: type, parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(parameters))):
        kind(**parameters)


# --- SLERP ----------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(0.05, math.pi - 0.05))
def test_slerp_of_unit_vectors_goes_along_the_arc(t: float, angle: float) -> None:
    (a, b), linear = slerp_weights(t, 1, 1, math.cos(angle))
    assert not linear
    x, y = a + b * math.cos(angle), b * math.sin(angle)
    assert math.isclose(x, math.cos(t * angle), abs_tol=1e-12)
    assert math.isclose(y, math.sin(t * angle), abs_tol=1e-12)


def test_slerp_is_linear_where_there_is_no_arc() -> None:
    for first, second, product in ((1, 1, 1), (4, 9, -6), (0, 1, 0), (1, 1, 0.9996)):
        assert slerp_weights(0.25, first, second, product) == ((0.75, 0.25), True)


def pieces_of(arrays: Sequence[np.ndarray], size: int) -> arithmetic.Pieces:
    def pieces() -> Iterator[Sequence[np.ndarray]]:
        for at in range(0, len(arrays[0]), size):
            yield [array[at : at + size] for array in arrays]

    return pieces


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.float64])
def test_slerp_weights_do_not_depend_on_the_pieces(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    size = 5 * arithmetic.BLOCK + 7
    a, b = (rng.standard_normal(size).astype(dtype) for _ in range(2))
    if dtype is np.complex64:
        a = a * 1j + b
    found = {
        tuple(slerp_statistics(Slerp(0.3), pieces_of([a, b], n * arithmetic.BLOCK)))
        for n in (1, 2, 100)
    }
    assert len(found) == 1
    inner = float(np.vdot(a, b).real)
    cosine = inner / float(np.linalg.norm(a.astype(complex)) * np.linalg.norm(b.astype(complex)))
    angle = math.acos(cosine)
    expected = [math.sin(0.7 * angle) / math.sin(angle), math.sin(0.3 * angle) / math.sin(angle)]
    assert np.allclose(next(iter(found)), expected, rtol=1e-5)


# --- TIES -----------------------------------------------------------------------------------------


@given(st.data(), st.sampled_from([32, 64]), st.integers(1, 60))
def test_the_kth_largest_of_integers(data: st.DataObject, bits: int, size: int) -> None:
    few = st.sampled_from([0, 1, 1 << 16, (1 << bits) - 1])
    keys = data.draw(st.lists(few | st.integers(0, (1 << bits) - 1), min_size=size, max_size=size))
    k = data.draw(st.integers(1, size))
    selection = KthLargest(k, bits)
    for _ in range(bits // 16):
        for half in (keys[: size // 2], keys[size // 2 :]):
            selection.add(np.array(half, f"u{bits // 8}"))
        selection.end_pass()
    assert selection.prefix == sorted(keys, reverse=True)[k - 1]


@pytest.mark.parametrize("wide", [False, True])
def test_thresholds_are_the_exact_quantiles(wide: bool) -> None:
    rng = np.random.default_rng(1)
    size = 2 * arithmetic.BLOCK + 100
    dtype = np.float64 if wide else np.float32
    a, b, base = (rng.standard_normal(size).astype(dtype) for _ in range(3))
    a[:40_000] = base[:40_000]  # many differences are 0
    for density in (1e-9, 0.01, 0.5, 1.0):
        found = ties_statistics(
            Ties(density), pieces_of([a, b, base], arithmetic.BLOCK), size, wide
        )
        kept = max(1, int(density * size))
        for one, threshold in zip((a, b), found, strict=True):
            difference = one.astype(np.float64) - base.astype(np.float64)
            magnitude = np.sort(np.abs(difference).astype(dtype))
            assert threshold == magnitude[-kept]


# --- DARE -----------------------------------------------------------------------------------------


def splitmix64(seed: int, count: int) -> list[int]:
    """Its first outputs, by Python's integers, as its reference implementation makes them."""
    found, x, most = [], seed, (1 << 64) - 1
    for _ in range(count):
        x = (x + 0x9E3779B97F4A7C15) & most
        z = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & most
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & most
        found.append(z ^ (z >> 31))
    return found


def test_random_numbers_are_those_of_splitmix64() -> None:
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # as published
    import xxhash

    method = Dare(drop=0.4, seed=7)
    numbers = splitmix64(xxhash.xxh3_64_intdigest(b"7/2/layers/w"), 500)
    expected = [(number >> 11) / 2**53 >= 0.4 for number in numbers]
    found = is_kept(method, "layers/w", 2, np.arange(500, dtype=np.uint64))
    assert found.tolist() == expected


def test_masks_differ_by_seed_source_and_name_and_drop_as_many_as_asked() -> None:
    positions = np.arange(200_000, dtype=np.uint64)
    masks = [
        is_kept(Dare(0.9, seed), name, source, positions)
        for seed, name, source in ((0, "w", 0), (1, "w", 0), (0, "v", 0), (0, "w", 1))
    ]
    for mask in masks:
        assert abs(mask.mean() - 0.1) < 0.005
    for other in masks[1:]:
        assert abs((masks[0] & other).mean() - 0.01) < 0.002
    assert is_kept(Dare(0), "w", 0, positions).all()


@given(st.data())
def test_positions_are_those_of_the_whole_array(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    box = Box(start, stop)
    numbers = np.arange(math.prod(shape)).reshape(shape)[box.slices].reshape(-1)
    first = data.draw(st.integers(0, box.size - 1))
    last = data.draw(st.integers(first + 1, box.size))
    assert ElementSpan(shape, box, first, last).positions.tolist() == numbers[first:last].tolist()


# --- elements -------------------------------------------------------------------------------------


def merged(weights: Sequence[float], inputs: Sequence[np.ndarray], dtype: Any) -> Any:
    out = np.empty(inputs[0].shape, dtype)
    box = Box.whole(out.shape)
    return out, merge_box(partial(weighted_sum, weights), inputs, out.shape, box, out)


def test_the_mean_of_equal_arrays_is_equal_bit_for_bit() -> None:
    rng = np.random.default_rng(2)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        x = rng.standard_normal(100_000).astype(dtype)
        for count in (2, 3, 7, 20):
            out, outcome = merged([1 / count] * count, [x] * count, dtype)
            assert out.tobytes() == x.tobytes()
            assert not outcome.nonfinite
            assert not outcome.overflows


def test_nan_and_infinity_are_found_in_the_input_that_has_them() -> None:
    x, y = np.ones(100_000, np.float32), np.ones(100_000, np.float32)
    y[99_999] = np.inf
    out, outcome = merged([0.5, 0.5], [x, y], np.float32)
    assert (outcome.nonfinite, outcome.overflows) == ({1}, False)
    assert np.isinf(out[-1])
    x[:2] = np.inf, -np.inf  # whose sum is not finite, nor equal to itself
    assert merged([0.5, 0.5], [x, y], np.float32)[1].nonfinite == {0, 1}
    large = np.full(10, 1e308)  # whose sum overflows
    assert not merged([1.0, 0.0], [large, large], np.float64)[1].nonfinite


@pytest.mark.parametrize(
    "dtype",
    [np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn],
)
def test_what_the_dtype_cannot_hold_is_an_overflow(dtype: Any) -> None:
    most = float(ml_dtypes.finfo(dtype).max)
    x = np.full(3, most, dtype)
    assert merged([2, 0], [x, x], dtype)[1].overflows
    assert not merged([0.5, 0.5], [x, x], dtype)[1].overflows


# --- against torch --------------------------------------------------------------------------------


@pytest.mark.integration
def test_mean_and_average_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    models = [torch.nn.Linear(40, 30) for _ in range(5)]
    arrays = [model.weight.detach().numpy() for model in models]
    for method, function in ((Mean(), None), (Ema(0.9), get_ema_multi_avg_fn(0.9))):
        averaged = AveragedModel(models[0], multi_avg_fn=function)
        for model in models:
            averaged.update_parameters(model)  # the first one is copied
        weights = weights_of(method, facts(*range(5)), None)
        found, _ = merged(weights, arrays, np.float32)
        expected = averaged.module.weight.detach().numpy()
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_the_command_line_names_all_methods() -> None:
    from unickpt.plugins.merge import command

    assert command.METHODS.split(", ") == [kind.name for kind in method_parameters.METHODS]
