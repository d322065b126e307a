"""PyTorch in one process: dtypes, storage, subclasses, meta tensors, ties, modules, mismatches."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes

import unickpt

torch = pytest.importorskip("torch")

DTYPES = [
    *(torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(getattr(torch, name) for name in ["float8_e8m0fnu"] if hasattr(torch, name)),  # torch 2.7
]
OPTIONS = unickpt.SaveOptions(chunk_bytes=64, fsync=False)
Bits = Callable[[object], bytes]
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def random_tensor(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Any bit pattern of a dtype: NaN payloads, signed zeros and all."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), np.uint8)
    return torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(shape)


def raw(tensor: Any) -> bytes:
    """The bits of a tensor's elements in row-major order."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data: bytes = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def numbers(*shape: int) -> Any:
    return torch.arange(float(np.prod(shape))).reshape(shape)


def save(path: Path, tree: Any) -> None:
    unickpt.save(path, tree, options=OPTIONS)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bit_for_bit(dtype: Any, tmp_path: Path, bits: Bits) -> None:
    tree = {
        "matrix": random_tensor(dtype, (7, 11)),
        "transposed": random_tensor(dtype, (5, 9)).T,
        "scalar": random_tensor(dtype, ()),
        "empty": random_tensor(dtype, (0, 3)),
    }
    save(tmp_path / "c", tree)
    like = {name: torch.zeros_like(tensor) for name, tensor in tree.items()}
    filled = unickpt.load(tmp_path / "c", like)
    stored = unickpt.open(tmp_path / "c")
    for name, tensor in tree.items():
        assert filled[name] is like[name]
        assert raw(filled[name]) == raw(tensor) == bits(stored[name][...])
        assert str(stored[name].dtype) == str(dtype).removeprefix("torch.")


def test_every_value_of_the_16_bit_floats(tmp_path: Path) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    tree = {str(d): patterns.view(d) for d in (torch.bfloat16, torch.float16)}
    save(tmp_path / "c", tree)
    filled = unickpt.load(tmp_path / "c", {k: torch.zeros_like(v) for k, v in tree.items()})
    assert all(torch.equal(filled[k].view(torch.uint16), patterns) for k in tree)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype", [torch.complex32, torch.quint4x2, torch.bits8, torch.int4], ids=str
)
def test_a_dtype_without_a_neutral_form_is_refused(dtype: Any, tmp_path: Path) -> None:
    tensor = torch.empty(2, dtype=torch.uint8)
    tensor = tensor.view(dtype) if dtype.itemsize == 1 else torch.empty(2, dtype=dtype)
    with pytest.raises(unickpt.UnsupportedLeaf, match=rf"'x': .*{dtype}.*(view\({dtype}|int_repr)"):
        save(tmp_path / "c", {"x": tensor})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype", [torch.complex32, torch.bits16, torch.int4, torch.float4_e2m1fn_x2], ids=str
)
def test_the_error_says_how_to_store_its_bits(dtype: Any, tmp_path: Path) -> None:
    tensor = torch.arange(12 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(3, 4)
    with pytest.raises(unickpt.UnsupportedLeaf) as error:
        save(tmp_path / "c", {"x": tensor})
    there, back = re.findall(r"\.view\(torch\.(\w+)\)", str(error.value))
    save(tmp_path / "c", {"x": tensor.view(getattr(torch, there))})
    like = {"x": torch.zeros_like(tensor).view(getattr(torch, there))}
    loaded = unickpt.load(tmp_path / "c", like)["x"].view(getattr(torch, back))
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


# --- storage --------------------------------------------------------------------------------------

FORMS = {
    "contiguous": lambda: numbers(6, 8),
    "transposed": lambda: numbers(8, 6).T,
    "permuted": lambda: numbers(4, 6, 8).permute(2, 0, 1),
    "every second column": lambda: numbers(6, 16)[:, ::2],
    "rows of padded storage": lambda: numbers(9, 8)[2:8],
    "columns of padded storage": lambda: numbers(6, 11)[:, 1:9],
    "channels last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar in a vector": lambda: numbers(5)[3],
    "empty in a matrix": lambda: numbers(5, 4)[2:2],
    "conjugate": lambda: torch.complex(numbers(6, 8), numbers(6, 8) + 1).conj(),
    "conjugate, transposed": lambda: torch.complex(numbers(6, 8), numbers(6, 8) + 1).mH,
    "negative": lambda: torch.complex(numbers(6, 8), numbers(6, 8) + 1).conj().imag,
    "parameter": lambda: torch.nn.Parameter(numbers(6, 8)),
    "buffer": lambda: torch.nn.Buffer(numbers(6, 8)),
    "leaf with gradient": lambda: numbers(6, 8).requires_grad_(),
    "non-leaf with gradient": lambda: numbers(6, 8).requires_grad_() * 2,
    "subclass": lambda: numbers(6, 8).as_subclass(type("Named", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_storage_is_saved_and_filled_in_place(form: str, tmp_path: Path) -> None:
    tensor, other = FORMS[form](), FORMS[form]()
    expected = raw(tensor)
    save(tmp_path / "c", {"x": tensor})
    with torch.no_grad():
        other.zero_()
    surrounding = other.detach().untyped_storage()
    filled = unickpt.load(tmp_path / "c", {"x": other})["x"]
    assert filled is other
    assert filled.untyped_storage().data_ptr() == surrounding.data_ptr()
    assert (filled.requires_grad, filled.stride()) == (tensor.requires_grad, tensor.stride())
    assert raw(filled) == expected == raw(tensor)


@pytest.mark.parametrize("form", FORMS)
def test_filling_leaves_the_memory_around_alone(form: str, tmp_path: Path) -> None:
    save(tmp_path / "c", {"x": torch.zeros_like(FORMS[form]())})
    like, twin = FORMS[form](), FORMS[form]()
    unickpt.load(tmp_path / "c", {"x": like})
    with torch.no_grad():
        twin.copy_(torch.zeros_like(twin))
    assert bytes(like.untyped_storage()) == bytes(twin.untyped_storage())


def test_saved_inside_and_outside_of_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        made = numbers(6, 8)
        save(tmp_path / "inside", {"x": made, "t": made.T})
    save(tmp_path / "outside", {"x": made, "t": made.T})
    with torch.inference_mode():
        like = {"x": torch.zeros(6, 8), "t": torch.zeros(6, 8).T}
    for where in ("inside", "outside"):
        unickpt.load(tmp_path / where, like)
        assert raw(like["x"]) == raw(made)
        assert raw(like["t"]) == raw(made.T)
        like["x"].numpy()[:] = 0
    with torch.inference_mode():
        normal = unickpt.load(tmp_path / "inside", {"x": like["x"], "t": like["t"]})
    assert raw(normal["x"]) == raw(made)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("form", ["contiguous", "transposed"])
def test_leaf_parameters_are_filled_in_place(mode: Any, form: str, tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": FORMS[form]()})
    weight = torch.nn.Parameter(torch.zeros_like(FORMS[form]()))
    with mode():
        assert unickpt.load(tmp_path / "c", {"w": weight})["w"] is weight
    assert (weight.is_leaf, weight.requires_grad, weight.grad_fn) == (True, True, None)
    assert raw(weight) == raw(FORMS[form]())


@pytest.mark.parametrize("form", ["contiguous", "transposed"])
def test_autograd_notices_that_a_tensor_was_filled(form: str, tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": FORMS[form]()})
    weight = torch.ones_like(FORMS[form]()).requires_grad_()
    loss = (weight * weight).sum()
    unickpt.load(tmp_path / "c", {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(6, 1).expand(6, 8),
        torch.zeros(13).as_strided((6, 8), (1, 1)),  # overlapping windows
        torch.zeros(20).unfold(0, 8, 2)[:6],
    ],
)
def test_targets_whose_elements_share_memory_are_refused(target: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", {"x": target})
    assert raw(torch.from_numpy(unickpt.load(tmp_path / "c")["x"])) == raw(target)
    with pytest.raises(unickpt.UnsupportedLeaf, match="'x': elements of the tensor share memory"):
        unickpt.load(tmp_path / "c", {"x": target})


# --- what is no tensor of its own -----------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor that stands for another and has no memory."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def two_tensors() -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(3), torch.ones(3))


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def freed() -> Any:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def quiet(make: Callable[[], Any]) -> Callable[[], Any]:
    """Makes what torch calls a prototype or deprecated."""

    def quietly() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return quietly


REFUSED = {
    "_mkldnn tensor": lambda: torch.eye(3).to_mkldnn(),
    "nested tensor": quiet(
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    ),
    "quantized tensor .*int_repr": quiet(
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    ),
    r"uninitialized \(lazy\) parameter": torch.nn.UninitializedParameter,
    "Wrapper has no memory of its own": lambda: Wrapper(torch.ones(3)),
    r"FakeTensor has no data \(it is fake": fake,
    "storage was freed": freed,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_plain_tensor_is_refused(message: str, tmp_path: Path) -> None:
    odd = REFUSED[message]()
    with pytest.raises(unickpt.UnsupportedLeaf, match=f"'a/odd': an? .*{message}"):
        save(tmp_path / "c", {"a": {"odd": odd, "even": torch.ones(2)}})
    assert not (tmp_path / "c" / "manifest.ocdbt").exists()
    save(tmp_path / "d", {"a": {"odd": torch.ones(3), "even": torch.ones(2)}})
    with pytest.raises(unickpt.UnsupportedLeaf, match=f"'a/odd': an? .*{message}"):
        unickpt.load(tmp_path / "d", {"a": {"odd": odd, "even": torch.ones(2)}})


@pytest.mark.parametrize("view", ["rows", "columns"])
def test_a_view_of_which_a_few_bytes_were_freed_is_refused(view: str, tmp_path: Path) -> None:
    table = numbers(6, 8)
    part = {"rows": table[2:], "columns": table[1:, 3:].T}[view]
    storage, nbytes = table.untyped_storage(), table.nbytes
    save(tmp_path / "c", {"w": part})
    expected = part.clone()
    part.zero_()
    unickpt.load(tmp_path / "c", {"w": part})
    assert torch.equal(part, expected)
    storage.resize_(nbytes - 1)
    for refused in (
        lambda: save(tmp_path / "d", {"w": part}),
        lambda: unickpt.load(tmp_path / "c", {"w": part}),
    ):
        with pytest.raises(unickpt.UnsupportedLeaf, match=r"'w': .*its storage was freed"):
            refused()


def test_a_tensor_inside_torch_func_is_refused(tmp_path: Path) -> None:
    def save_inside(x: Any) -> Any:
        save(tmp_path / "c", {"x": x})
        return x

    with pytest.raises(unickpt.UnsupportedLeaf, match=r"'x': .* inside torch\.func"):
        torch.func.vmap(save_inside)(torch.ones(2, 3))


# --- the meta device ------------------------------------------------------------------------------


def test_meta_tensors_are_materialised(tmp_path: Path) -> None:
    tree = {
        "plain": numbers(6, 8),
        "strided": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "gradient": numbers(6, 8).requires_grad_(),
        "parameter": torch.nn.Parameter(numbers(6, 8).bfloat16()),
        "frozen": torch.nn.Parameter(torch.arange(4), requires_grad=False),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
    }
    save(tmp_path / "c", tree)
    like = {
        name: torch.nn.Parameter(x.to("meta"), x.requires_grad)
        if isinstance(x, torch.nn.Parameter)
        else x.detach().to("meta").requires_grad_(x.requires_grad)
        for name, x in tree.items()
    }
    made = unickpt.load(tmp_path / "c", like)
    for name, x in tree.items():
        assert made[name].device.type == "cpu"
        assert type(made[name]) is type(x)
        assert made[name].requires_grad == x.requires_grad
        assert (made[name].stride(), raw(made[name])) == (x.stride(), raw(x))


def test_meta_tensors_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(unickpt.UnsupportedLeaf, match="'w': a tensor on the meta device has no"):
        save(tmp_path / "c", {"w": torch.empty(2, device="meta")})


def test_a_meta_tensor_that_is_not_stored_is_missing_even_if_not_strict(tmp_path: Path) -> None:
    save(tmp_path / "c", {"v": torch.ones(2)})
    with pytest.raises(unickpt.LoadMismatch, match=r"w +missing"):
        unickpt.load(tmp_path / "c", {"w": torch.empty(2, device="meta")}, strict=False)


# --- ties -----------------------------------------------------------------------------------------


def test_tied_parameters_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model = tied_model()
    save(tmp_path / "c", {"model": model})
    stored = unickpt.open(tmp_path / "c")
    assert dict(stored.index.aliases) == {"model/head.weight": "model/embed.weight"}
    other = unickpt.load(tmp_path / "c", {"model": tied_model(seed=1)})["model"]
    assert other.head.weight is other.embed.weight
    assert same_state(other, model)


def test_one_meta_tensor_under_two_names_becomes_one_tensor(tmp_path: Path) -> None:
    w = torch.arange(6.0).reshape(2, 3)
    save(tmp_path / "c", {"a": w, "b": w, "c": w + 1})
    meta = torch.empty(2, 3, device="meta")
    found = unickpt.load(tmp_path / "c", {"a": meta, "b": meta, "c": meta})
    assert found["a"] is found["b"]
    assert raw(found["a"]) == raw(w)
    assert raw(found["c"]) == raw(w + 1)
    two = unickpt.load(tmp_path / "c", {"a": meta, "b": torch.empty_like(meta)}, strict=False)
    assert two["a"].data_ptr() != two["b"].data_ptr(), "they were two, and stay two"
    assert raw(two["b"]) == raw(w)


def test_untied_targets_take_a_tied_array_each(tmp_path: Path) -> None:
    save(tmp_path / "c", {"model": tied_model()})
    untied = tied_model(seed=1)
    untied.head.weight = torch.nn.Parameter(torch.zeros_like(untied.head.weight))
    unickpt.load(tmp_path / "c", {"model": untied})
    assert raw(untied.head.weight) == raw(untied.embed.weight) == raw(tied_model().embed.weight)


def test_tied_targets_refuse_two_different_arrays(tmp_path: Path) -> None:
    save(tmp_path / "c", {"a": torch.ones(3), "b": torch.zeros(3)})
    one = torch.zeros(3)
    with pytest.raises(unickpt.LoadMismatch, match=r"b +tied .* the same memory as a"):
        unickpt.load(tmp_path / "c", {"a": one, "b": one})
    unickpt.load(tmp_path / "c", {"a": one}, strict=False)
    assert raw(one) == raw(torch.ones(3))


def test_views_of_one_storage_that_differ_are_no_ties(tmp_path: Path) -> None:
    base = torch.complex(numbers(4, 4), numbers(4, 4) + 1)
    tree = {
        "base": base,
        "conjugate": base.conj(),  # same memory, offset, shape and strides
        "transposed": base.T,
        "part": base[1:3],
        "real": base.real,
        "imag": base.imag,
        "negative": base.conj().imag,
        "bits": base.view(torch.float32).view(torch.int32),
    }
    save(tmp_path / "c", tree)
    stored = unickpt.open(tmp_path / "c")
    assert not stored.index.aliases
    for name, tensor in tree.items():
        assert raw(torch.from_numpy(stored[name][...])) == raw(tensor), name


def test_targets_that_share_a_part_of_their_storage(tmp_path: Path) -> None:
    base = numbers(6, 8)
    save(tmp_path / "c", {"base": base, "rows": base[2:5], "columns": base[:, 3:]})
    other = torch.zeros(6, 8)
    like = {"base": other, "rows": other[2:5], "columns": other[:, 3:]}
    unickpt.load(tmp_path / "c", like)
    assert raw(other) == raw(base)


# --- modules and other objects with state_dict ----------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5, device=device)
        self.norm = torch.nn.BatchNorm1d(5, device=device)
        self.head = torch.nn.Linear(5, 7, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)
        self.note = "new"

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state["note"]


def tied_model(seed: int = 0, device: str = "cpu") -> Tied:
    torch.manual_seed(seed)
    model = Tied(device)
    if device != "meta":
        model.norm.running_mean += seed + 1
        model.note = f"seed {seed}"
    return model


def same_state(a: Any, b: Any) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return list(one) == list(two) and all(
        raw(one[k]) == raw(two[k]) if isinstance(one[k], torch.Tensor) else one[k] == two[k]
        for k in one
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_is_saved_and_loaded_as_it_is(device: str, tmp_path: Path) -> None:
    model = tied_model()
    save(tmp_path / "c", {"model": model, "epoch": 3})
    other = tied_model(seed=1, device=device)
    got = unickpt.load(tmp_path / "c", {"model": other, "epoch": 0})
    assert got == {"model": other, "epoch": 3}
    assert same_state(other, model)
    assert other.head.weight is other.embed.weight
    assert [p.requires_grad for p in other.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert all(isinstance(p, torch.nn.Parameter) for p in other.parameters())


def test_tied_meta_parameters_refuse_two_different_arrays(tmp_path: Path) -> None:
    """As those in memory do: one of the two would be lost without a word."""
    state = {key: value.clone() for key, value in tied_model().state_dict().items()
             if isinstance(value, torch.Tensor)}  # fmt: skip
    state["head.weight"] += 1
    save(tmp_path / "c", {"model": {**state, "_extra_state": {"note": "x"}}})
    with pytest.raises(unickpt.LoadMismatch, match=r"'model': 'embed.weight' and 'head.weight'"):
        unickpt.load(tmp_path / "c", {"model": tied_model(device="meta")})


def test_a_meta_parameter_that_is_not_stored_says_that_it_holds_nothing(tmp_path: Path) -> None:
    state = tied_model().state_dict()
    del state["head.weight"]
    save(tmp_path / "c", {"model": state})
    with pytest.raises(unickpt.LoadMismatch, match=r"has none[^$]*head.weight +missing"):
        unickpt.load(tmp_path / "c", {"model": tied_model(device="meta")}, strict=False)


class Counter(torch.nn.Module):
    """Its extra state is a plain value, which equals its twin's before loading."""

    def __init__(self, count: int, device: str) -> None:
        super().__init__()
        self.weight, self.count = torch.nn.Parameter(torch.ones(2, device=device)), count

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_extra_states_of_a_meta_module_stay_apart(tmp_path: Path) -> None:
    save(tmp_path / "c", torch.nn.ModuleList([Counter(3, "cpu"), Counter(4, "cpu")]))
    meta = torch.nn.ModuleList([Counter(0, "meta"), Counter(0, "meta")])
    assert [m.count for m in unickpt.load(tmp_path / "c", meta)] == [3, 4]


def test_a_module_as_the_root_and_its_state_dict_are_one_tree(tmp_path: Path) -> None:
    model = tied_model()
    save(tmp_path / "module", model)
    save(tmp_path / "dict", model.state_dict())
    assert set(unickpt.open(tmp_path / "module")) == set(unickpt.open(tmp_path / "dict"))
    other = tied_model(seed=1)
    unickpt.load(tmp_path / "dict", other)
    assert same_state(other, model)
    state = unickpt.load(tmp_path / "module", tied_model(seed=1).state_dict())
    assert state._metadata == model.state_dict()._metadata
    other.load_state_dict(state)
    assert same_state(other, model)


def test_grad_scaler_and_nested_objects(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    save(tmp_path / "c", {"list": [scaler, torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3)})]})
    assert unickpt.open(tmp_path / "c").values["list/0/scale"] == 8.0
    fresh = torch.amp.GradScaler("cpu")
    like = {"list": [fresh, torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3)})]}
    unickpt.load(tmp_path / "c", like)
    assert fresh.state_dict() == scaler.state_dict()


# --- differences ----------------------------------------------------------------------------------


def test_a_table_tells_all_differences_and_nothing_is_touched(tmp_path: Path) -> None:
    save(tmp_path / "c", {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(5), "n": 1})
    like = {
        "a": torch.zeros(3, 2),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "d": torch.zeros(6),
        "n": torch.zeros(()),
    }
    with pytest.raises(unickpt.LoadMismatch) as caught:
        unickpt.load(tmp_path / "c", like)
    rows = [line.split() for line in str(caught.value).splitlines()]
    assert ["a", "shape", "[2,", "3]", "[3,", "2]"] in rows
    assert ["b", "dtype", "float32", "bfloat16"] in rows
    assert ["c", "unexpected", "float32[5]", "-"] in rows
    assert ["d", "missing", "-", "float32[6]"] in rows
    assert ["n", "kind", "plain", "int", "1", "float32[]"] in rows
    assert all(not tensor.any() for tensor in like.values())


@pytest.mark.parametrize("transposed", [False, True])
def test_casting_is_asked_for_and_rounds_like_torch(transposed: bool, tmp_path: Path) -> None:
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    save(tmp_path / "c", {"x": wide})
    like = torch.zeros(8, 6, dtype=torch.bfloat16).T if transposed else wide.bfloat16() * 0
    with pytest.raises(unickpt.LoadMismatch, match=r"x +dtype +float32 +bfloat16"):
        unickpt.load(tmp_path / "c", {"x": like})
    unickpt.load(tmp_path / "c", {"x": like}, cast=True)
    assert raw(like) == raw(wide.bfloat16())
    with pytest.raises(unickpt.LoadMismatch, match=r"x +dtype +float32 +int32"):
        unickpt.load(tmp_path / "c", {"x": torch.zeros(6, 8, dtype=torch.int32)}, cast=True)


def test_not_strict_keeps_what_is_not_stored(tmp_path: Path) -> None:
    save(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(3)})
    kept = torch.full((4,), 7.0)
    got = unickpt.load(tmp_path / "c", {"a": torch.zeros(2), "new": kept}, strict=False)
    assert raw(got["a"]) == raw(torch.ones(2))
    assert got["new"] is kept
    assert raw(kept) == raw(torch.full((4,), 7.0))


# --- per-process values, local fragments, a group of one ------------------------------------------


def test_rng_states_go_through_per_process(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    save(tmp_path / "c", {"rng": unickpt.PerProcess({"cpu": generator.get_state(), "draws": 3})})
    expected = torch.rand(4, generator=generator)
    like = {"rng": unickpt.PerProcess({"cpu": torch.Generator().get_state(), "draws": 0})}
    state = unickpt.load(tmp_path / "c", like)["rng"].value
    assert state["draws"] == 3
    assert raw(torch.rand(4, generator=torch.Generator().set_state(state["cpu"]))) == raw(expected)


def test_local_fragments_hold_tensors_in_both_directions(tmp_path: Path) -> None:
    whole = random_tensor(torch.bfloat16, (5, 7))
    flat = whole.reshape(-1)
    pieces = [(0, flat[:9]), (9, flat[9:30]), (30, flat[30:])]
    save(tmp_path / "c", {"w": unickpt.types.LocalFragments.flat((5, 7), pieces)})
    like = torch.zeros(5, 7, dtype=torch.bfloat16)
    assert raw(unickpt.load(tmp_path / "c", {"w": like})["w"]) == raw(whole)
    cut = [(0, torch.zeros(17, dtype=torch.bfloat16)), (17, torch.zeros(18, dtype=torch.bfloat16))]
    unickpt.load(tmp_path / "c", {"w": unickpt.types.LocalFragments.flat((5, 7), cut)})
    assert raw(torch.cat([data for _, data in cut])) == raw(whole)


@pytest.fixture
def lonely() -> Iterator[Any]:
    """A process group of one rank, as `torchrun --nproc-per-node 1` has it."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_dtensors_of_a_group_of_one(lonely: Any, tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    full = numbers(6, 8)
    save(tmp_path / "c", {"w": distribute_tensor(full, lonely, [Shard(0)])})
    assert unickpt.open(tmp_path / "c")["w"].layout.spec == ("data", None)
    like = distribute_tensor(torch.zeros(6, 8), lonely, [Shard(1)])
    assert raw(unickpt.load(tmp_path / "c", {"w": like})["w"].to_local()) == raw(full)


# --- CUDA -----------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is page-locked memory")
def test_without_page_locked_memory_there_is_plain_memory(caplog: Any, monkeypatch: Any) -> None:
    from unickpt.adapters import torch_cuda

    monkeypatch.setattr(torch_cuda, "_warned", [])
    for _ in range(3):
        buffer = torch_cuda.buffer_for_cuda((1 << 10, 1 << 10), np.dtype(np.float32))
        buffer[:] = 3
        assert (buffer.shape, buffer.dtype) == ((1024, 1024), np.float32)
    assert caplog.text.count("there is no page-locked memory") == 1


@gpu
@needs_cuda
@pytest.mark.parametrize("form", [f for f in FORMS if f != "subclass"])
def test_cuda_tensors_of_every_form(form: str, tmp_path: Path) -> None:
    tensor = FORMS[form]().detach().to("cuda")
    save(tmp_path / "c", {"x": tensor})
    like = torch.zeros_like(tensor)
    assert unickpt.load(tmp_path / "c", {"x": like})["x"] is like
    assert like.device.type == "cuda"
    assert raw(like) == raw(tensor) == raw(FORMS[form]())


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_tensors_of_every_dtype(dtype: Any, tmp_path: Path) -> None:
    tensor = random_tensor(dtype, (7, 11)).cuda()
    save(tmp_path / "c", {"x": tensor, "t": tensor.T})
    like = {"x": torch.zeros_like(tensor), "t": torch.zeros_like(tensor).T}
    unickpt.load(tmp_path / "c", like)
    assert (raw(like["x"]), raw(like["t"])) == (raw(tensor), raw(tensor.T))


def test_a_state_without_dtensors_does_not_import_their_module(
    processes: Processes, tmp_path: Path
) -> None:
    """It takes half a second, of the first save."""
    source = """
import sys, torch, unickpt
x = {"w": torch.ones(3)}
unickpt.save(sys.argv[1], x)
unickpt.load(sys.argv[1], {"w": torch.zeros(3)})
assert "torch.distributed.tensor" not in sys.modules
"""
    processes.finish([processes.start(source, tmp_path / "c")])
