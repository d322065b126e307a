"""Tensors that consist of tensors: torchao's, and such as TransformerEngine's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import LoadMismatch, UnsupportedLeaf

torch = pytest.importorskip("torch")

from support.quantized_tensors import (  # noqa: E402
    Float8,
    Kind,
    Pair,
    Recipe,
    bits,
    float8,
)

SAVE = unickpt.SaveOptions(fsync=False)


def save(path: Path, tree: Any) -> None:
    unickpt.save(path, tree, options=SAVE)


def test_a_tensor_is_stored_as_its_parts(tmp_path: Path) -> None:
    weight = float8(6, 5, block=3)
    save(tmp_path / "c", {"m": {"w": weight}})
    found = unickpt.load(tmp_path / "c")["m"]["w"]
    assert list(found) == ["data", "scale_inv", "context"]
    assert found["data"].tobytes() == weight._data.numpy().tobytes()
    assert found["scale_inv"].tobytes() == weight._scale_inv.numpy().tobytes()
    assert found["context"] == {
        "class": "Float8",
        "outer_shape": [6, 5],
        "outer_dtype": "bfloat16",
        "fp8_dtype": "E4M3",
        "recipe": {"class": "Recipe", "block": 3, "amax": 448.0},
    }
    assert sorted(unickpt.open(tmp_path / "c")) == ["m/w/data", "m/w/scale_inv"]


MADE: dict[str, Callable[[int], Any]] = {
    "one scale": lambda seed: float8(6, 5, seed=seed),
    "a scale for each block": lambda seed: float8(6, 5, block=2, seed=seed),
    "tensors within": lambda seed: Pair(float8(6, 5, seed=seed), float8(6, 5, 3, seed=seed)),
    "three levels": lambda seed: Pair(
        Pair(float8(6, 5, seed=seed), torch.full((6, 5), seed, dtype=torch.bfloat16)),
        torch.full((6, 5), 2.0 * seed, dtype=torch.bfloat16),
    ),
    "nothing": lambda seed: float8(0, 5),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_tensor_is_filled_in_place(kind: str, tmp_path: Path) -> None:
    saved, like = MADE[kind](1), MADE[kind](2)
    parts = {name: getattr(like, name) for name in like.__tensor_flatten__()[0]}
    save(tmp_path / "c", {"w": saved})
    assert unickpt.load(tmp_path / "c", {"w": like})["w"] is like
    assert bits(like) == bits(saved)
    assert all(getattr(like, name) is part for name, part in parts.items())


@pytest.mark.parametrize("parameter", [False, True])
def test_one_without_memory_is_made(parameter: bool, tmp_path: Path) -> None:
    saved = float8(6, 5, block=2)
    save(tmp_path / "c", {"w": saved})
    like = saved.to("meta")
    like = torch.nn.Parameter(like, requires_grad=False) if parameter else like
    found = unickpt.load(tmp_path / "c", {"w": like})["w"]
    assert type(found) is Float8
    assert isinstance(found, torch.nn.Parameter) is parameter
    assert (found._kind, found._recipe, bits(found)) == (Kind.E4M3, Recipe(2), bits(saved))


def module(*weights: Any) -> Any:
    made = torch.nn.ParameterList(torch.nn.Parameter(w, requires_grad=False) for w in weights)
    made.register_buffer("count", torch.zeros(()))
    return made


@pytest.mark.parametrize("meta", [False, True])
def test_parameters_of_modules(meta: bool, tmp_path: Path) -> None:
    saved = module(float8(6, 5, block=2), float8(4, 3, seed=1))
    other = module(float8(6, 5, block=2, seed=5), float8(4, 3, seed=6))
    saved.count.fill_(7)
    save(tmp_path / "c", {"m": saved})
    if meta:
        other = module(*(w.detach().to("meta") for w in other))
    unickpt.load(tmp_path / "c", {"m": other})
    assert [bits(w) for w in other] == [bits(w) for w in saved]
    assert all(isinstance(w, torch.nn.Parameter) and type(w) is Float8 for w in other)
    assert other.count.item() == 7


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    weight = float8(6, 5, block=2)
    save(tmp_path / "c", {"a": weight, "b": weight})
    assert set(unickpt.open(tmp_path / "c").index.aliases) == {"b/data", "b/scale_inv"}
    like = float8(6, 5, block=2, seed=3)
    unickpt.load(tmp_path / "c", {"a": like, "b": like})
    assert bits(like) == bits(weight)


OTHERS = {
    r"context/recipe/block is 2, requested is 3": lambda: Float8(
        torch.zeros(6, 5, dtype=torch.uint8), torch.zeros(3, 1), recipe=Recipe(3)
    ),
    r"context/fp8_dtype is 'E4M3', requested is 'E5M2'": lambda: Float8(
        torch.zeros(6, 5, dtype=torch.uint8), torch.zeros(3, 1), Kind.E5M2, Recipe(2)
    ),
    r"context/outer_dtype is 'bfloat16', requested is 'float32'": lambda: Float8(
        torch.zeros(6, 5, dtype=torch.uint8), torch.zeros(3, 1), Kind.E4M3, Recipe(2), torch.float32
    ),
}


@pytest.mark.parametrize("message", OTHERS)
def test_another_context_is_a_mismatch(message: str, tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": float8(6, 5, block=2), "a": torch.ones(3)})
    like, first = OTHERS[message](), torch.zeros(3)
    with pytest.raises(LoadMismatch, match=f"'m/w'.*|'w': .*Float8.*{message}"):
        unickpt.load(tmp_path / "c", {"w": like, "a": first})
    assert not first.any()
    assert not like._data.any()


def test_other_blocks_are_another_shape(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": float8(6, 5, block=2)})
    with pytest.raises(LoadMismatch, match=r"w/scale_inv +shape +\[3, 1\] +\[2, 1\]"):
        unickpt.load(tmp_path / "c", {"w": float8(6, 5, block=3)})


def test_a_plain_array_in_place_of_parts_is_explained(tmp_path: Path) -> None:
    plain = torch.zeros(6, 5, dtype=torch.bfloat16)
    save(tmp_path / "c", {"m": {"w": float8(6, 5), "x": plain}})
    words = r"'m/w' is stored as the arrays that .* consists of.*\(Function\.dequantised\)"
    with pytest.raises(LoadMismatch, match=words):
        unickpt.load(tmp_path / "c", {"m": {"w": plain, "x": plain.clone()}})
    words = r"'m/x' is stored as a plain array, but .* and quantise that"
    with pytest.raises(LoadMismatch, match=words):
        unickpt.load(tmp_path / "c", {"m": {"w": float8(6, 5), "x": float8(6, 5)}})


class Hiding(Float8):
    """Its context has what is no plain value."""

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_data", "_scale_inv"], {"quantizers": [{"of": abs}]}


class Computing(Float8):
    """Makes a part whenever it is asked."""

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_data", "floats"], {}

    @property
    def floats(self) -> Any:
        return self._scale_inv.float() * 2


class Naming(Float8):
    """Names a part that it does not have."""

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_data", "_transpose"], {}

    _transpose = None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Hiding, r"quantizers/0/of is of type builtin_function_or_method.*the plain tensor that"),
        (Computing, r"a Computing computes 'floats' at each call"),
        (Naming, r"a Naming names '_transpose' as one of its tensors, but it is None"),
    ],
)
def test_what_cannot_be_stored_plainly_is_refused(kind: Any, message: str, tmp_path: Path) -> None:
    weight = kind(torch.zeros(2, 3, dtype=torch.uint8), torch.ones(()))
    with pytest.raises(UnsupportedLeaf, match=f"'a/w': .*{message}"):
        save(tmp_path / "c", {"a": {"w": weight}})


def test_one_on_the_meta_device_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeaf, match=r"'w/data': a tensor on the meta device has no data"):
        save(tmp_path / "c", {"w": float8(2, 3).to("meta")})


def test_per_process_values(tmp_path: Path) -> None:
    saved, like = float8(4, 3, block=2), float8(4, 3, block=2, seed=1)
    save(tmp_path / "c", {"w": unickpt.PerProcess({"x": saved, "n": 3})})
    found = unickpt.load(tmp_path / "c", {"w": unickpt.PerProcess({"x": like, "n": 0})})
    assert found["w"].value == {"x": like, "n": 3}
    assert bits(like) == bits(saved)


def test_a_loop_saves_what_is_there_at_each_step(tmp_path: Path) -> None:
    weight, plain = float8(256, 1024, block=2), torch.zeros(3)
    with unickpt.Checkpointer(tmp_path / "run", options=SAVE) as checkpointer:
        expected = []
        for step in range(4):
            weight._data.fill_(step)
            weight._scale_inv.fill_(step)
            expected.append(bits(weight))
            checkpointer.save(step, {"w": weight, "plain": plain})
            weight._data.fill_(200)  # the snapshot must not see this
    for step in range(4):
        like = float8(256, 1024, block=2, seed=9)
        unickpt.load(tmp_path / f"run/step_{step}", {"w": like, "plain": torch.ones(3)})
        assert bits(like) == expected[step]


def test_a_rule_dequantises(tmp_path: Path) -> None:
    weight = float8(6, 5, block=2)
    save(tmp_path / "c", {"w": weight})
    rules = unickpt.Rules.parse(
        """
        w/data [o i], w/scale_inv [b 1] <-> kernel [i o] as bfloat16 via dequantised
        w/context/{x...} <-> drop
        """,
        functions={
            "dequantised": unickpt.Function.dequantised(
                "bfloat16", codes="float8_e4m3fn", axes=(1, 0)
            )
        },
    )
    like = {"kernel": torch.zeros(5, 6, dtype=torch.bfloat16)}
    unickpt.load(tmp_path / "c", like, rules=rules)
    values = weight._data.view(torch.float8_e4m3fn).float()
    expected = (values * weight._scale_inv.repeat_interleave(2, 0)).bfloat16().T
    assert torch.equal(like["kernel"].nan_to_num(), expected.nan_to_num())


# --- torchao --------------------------------------------------------------------------------------


def from_torchao(kind: str) -> Callable[[], Any]:
    """A function that makes a random one; skips the test without torchao."""
    logging.getLogger("torchao").setLevel(logging.ERROR)  # kernels that are not for this machine
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao")
        return _TORCHAO[kind]


def _weight(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.bfloat16)


def _float8(granularity: str) -> Any:
    from torchao.quantization import granularity as of
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

    each = of.PerBlock([128, 128]) if granularity == "PerBlock" else getattr(of, granularity)()
    return Float8Tensor.from_hp(_weight(256, 384), granularity=each)


def _mx(dtype: Any) -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(_weight(6, 64), dtype, 32)


def _nvfp4() -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return NVFP4Tensor.to_nvfp4(_weight(16, 64), per_tensor_scale=torch.rand(()) + 0.5)


def _int4() -> Any:
    from torchao.quantization.quantize_.workflows.int4.int4_tensor import Int4Tensor

    # Its kernels need a GPU; made of parts as they make them.
    codes = torch.randint(-128, 128, (16, 32), dtype=torch.int8)
    return Int4Tensor(codes, _weight(2, 16), _weight(2, 16), [1, 32], torch.Size((16, 64)))


def _int8() -> Any:
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    return Int8Tensor.from_hp(_weight(6, 64), granularity=PerRow())


def _intx() -> Any:
    from torchao.quantization.quantize_.workflows.intx import intx_unpacked_to_int8_tensor as of

    return of.IntxUnpackedToInt8Tensor.from_hp(_weight(6, 64), [1, 32], torch.int4)


def _nf4() -> Any:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return to_nf4(_weight(512, 256), 64, 256)


def _for_training() -> Any:
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    return WeightWithDynamicFloat8CastTensor(_weight(6, 4), LinearMMConfig(), torch.float8_e4m3fn)


_TORCHAO: dict[str, Callable[[], Any]] = {
    "float8, a scale for each row": lambda: _float8("PerRow"),
    "float8, one scale": lambda: _float8("PerTensor"),
    "float8, a scale for each block": lambda: _float8("PerBlock"),
    "mxfp8": lambda: _mx(torch.float8_e4m3fn),
    "mxfp4": lambda: _mx(torch.float4_e2m1fn_x2),
    "nvfp4": _nvfp4,
    "int4": _int4,
    "int8": _int8,
    "int4, unpacked": _intx,
    "nf4": _nf4,
    "float8 training": _for_training,
}


@pytest.mark.integration  # torchao takes seconds to import
@pytest.mark.parametrize("kind", _TORCHAO)
def test_tensors_of_torchao(kind: str, tmp_path: Path) -> None:
    make = from_torchao(kind)
    saved, like = make(), make()
    assert bits(saved) != bits(like)
    save(tmp_path / "c", {"w": saved, "m": module(saved)})
    unickpt.load(tmp_path / "c", {"w": like, "m": module(make())}, only="w/**")
    assert bits(like) == bits(saved)
    other = module(make())
    unickpt.load(tmp_path / "c", {"m": other}, only="m/**")
    assert bits(other[0]) == bits(saved)
    found = unickpt.load(tmp_path / "c")["w"]
    names = [name.lstrip("_") for name in saved.__tensor_flatten__()[0]]
    assert list(found) == [*names, "context"]
    assert found["context"]["outer_shape"] == list(saved.shape)


@pytest.mark.integration
@pytest.mark.parametrize(
    "kind",
    [
        "float8, a scale for each row",
        "float8, one scale",
        "float8, a scale for each block",
        "mxfp8",
        "int8",
        "int4, unpacked",
    ],
)
def test_a_rule_dequantises_as_torchao(kind: str, tmp_path: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    saved = from_torchao(kind)()
    save(tmp_path / "c", {"w": saved})
    zero = ", w/zero_point [b c]" if hasattr(saved, "zero_point") else ""
    rules = unickpt.Rules.parse(
        f"w/qdata [o i], w/scale [b c]{zero} <-> w [o i] as bfloat16 via f\n"
        "w/context/{x...} <-> drop",
        functions={"f": unickpt.Function.dequantised("bfloat16")},
    )
    like = {"w": jnp.zeros(tuple(saved.shape), jnp.bfloat16)}
    found = np.asarray(unickpt.load(tmp_path / "c", like, rules=rules)["w"])
    assert found.tobytes() == saved.dequantize().view(torch.uint8).numpy().tobytes()
