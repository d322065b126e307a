"""Rules from converters that are run: what is found, and that it does the same in both directions.

`Rules.observe` itself compares what rules make with what the converter made, both ways, so these
tests look at the text, and at what reaches a checkpoint.
"""

# ruff: noqa: E741 - `l` is the number of a layer
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import unickpt
from unickpt import Rules
from unickpt.errors import RuleError, RuleWarning

State = dict[str, Any]


def lines_of(rules: Rules) -> list[str]:
    assert rules.report is not None
    text = rules.report.text.splitlines()
    return [" ".join(line.split()) for line in text if line and not line.startswith("#")]


def observed(function: Callable[[State], Any], example: Any, **options: Any) -> list[str]:
    rules = Rules.observe(function, example, **options)
    assert rules.report is not None
    assert not rules.report.refused
    return lines_of(rules)


# --- axes -----------------------------------------------------------------------------------------


def test_a_transpose_of_many_layers_is_one_line() -> None:
    def convert(state: State) -> State:
        return {
            f"model.layers.{l}.{n}_proj.weight": state[f"layers_{l}"][f"{n}_proj"]["kernel"].T
            for l in range(12)
            for n in ("gate", "up")
        }

    example = {f"layers_{l}": {f"{n}_proj": {"kernel": (3, 5)} for n in ("gate", "up")}
               for l in range(12)}  # fmt: skip
    assert observed(convert, example) == [
        "layers_{l}/{n=gate_proj|up_proj}/kernel [i o] <-> "
        "model.layers.{l}.{n=gate_proj|up_proj}.weight [o i]"
    ]


def test_square_kernels_are_told_apart() -> None:
    def convert(state: State) -> State:
        return {"a": state["a"].T, "b": state["b"]}

    assert observed(convert, {"a": (4, 4), "b": (4, 4)}) == ["a [i o] <-> a [o i]", "b <-> b"]


def test_stacked_layers_and_experts() -> None:
    def convert(state: State) -> State:
        return {
            f"model.layers.{l}.experts.{x}.up.weight": state["layers"]["up"][x, l].T
            for l in range(3)
            for x in range(4)
        }

    assert observed(convert, {"layers": {"up": (4, 3, 5, 7)}}) == [
        "layers/up [x l a b] <-> model.layers.{l}.experts.{x}.up.weight [b a]"
    ]


def test_heads_are_merged() -> None:
    def convert(state: State) -> State:
        return {
            "q_proj.weight": state["q"].reshape(7, -1).T,
            "o_proj.weight": state["o"].reshape(-1, 7).T,
        }

    assert observed(convert, {"q": (7, 3, 5), "o": (3, 5, 7)}) == [
        "q [a b c] <-> q_proj.weight [(b c) a] b=3?",
        "o [a b c] <-> o_proj.weight [c (a b)] a=3?",
    ]


def test_unequal_pieces() -> None:
    def convert(state: State) -> State:
        q, k, v = np.split(state["qkv"], [6, 8], 1)
        return {"q": q.T, "k": k.T, "v": v.T}

    assert observed(convert, {"qkv": (5, 11)}) == [
        "qkv [a (b + c + d)] <-> q [b a], k [c a], v [d a] c=2? d=3?"
    ]


def test_grouped_heads_in_one_fused_kernel() -> None:
    def convert(state: State) -> State:
        parts = [state[n].reshape(2, -1, 5) for n in ("q", "k", "v")]
        return {"qkv": np.concatenate(parts, 1).reshape(-1, 5)}

    assert observed(convert, {"q": (24, 5), "k": (6, 5), "v": (6, 5)}) == [
        "q [(a b) c], k [(a d) c], v [(a e) c] <-> qkv [(a (b + d + e)) c] a=2 d=3 e=3"
    ]


def test_interleaved_gate_and_up() -> None:
    def convert(state: State) -> State:
        return {"gate": state["w"][..., ::2], "up": state["w"][..., 1::2]}

    assert observed(convert, {"w": (4, 6)}) == [
        "w [a (b (c + d))] <-> gate [(a c) b], up [(a d) b] c=1? d=1?"
    ]


def test_rotary_pairs() -> None:
    def convert(state: State) -> State:
        return {"q": state["q"].reshape(3, 2, 4, 5).transpose(0, 2, 1, 3).reshape(24, 5)}

    assert observed(convert, {"q": (24, 5)}) == ["q [(a b c) d] <-> q [(a c b) d] a=3 b=2"]


def test_reversed_axes() -> None:
    def convert(state: State) -> State:
        return {"w": state["w"][::-1, :, ::-1].transpose(2, 0, 1)}

    assert observed(convert, {"w": (2, 3, 5)}) == ["w [a b c] <-> w [-c -a b]"]


def test_swapped_halves() -> None:
    def convert(state: State) -> State:
        return {"w": np.concatenate([state["w"][4:], state["w"][:4]])}

    assert observed(convert, {"w": (11, 3)}) == ["w [(a + b) c] <-> w [(b + a) c] a=4"]


def test_padding_on_either_side() -> None:
    def convert(state: State) -> State:
        return {"padded": np.pad(state["a"], ((0, 3), (0, 0))), "cropped": state["b"][:13]}

    rules = Rules.observe(convert, {"a": (13, 4), "b": (16, 4)})
    assert rules.report is not None
    assert rules.report.cropped == ("b",)
    assert lines_of(rules) == [
        "a [i o] <-> padded [(i + _) o] _=3? i=13?",
        "b [(i + _) o] <-> cropped [i o] _=3? i=13?",
    ]


def test_ones_and_scalars() -> None:
    def convert(state: State) -> State:
        return {
            "cls": state["cls"][None, None],
            "scale": state["scale"],
            "n": state["n"].reshape(()),
        }

    assert observed(convert, {"cls": (4,), "scale": (), "n": (1,)}) == [
        "cls [a] <-> cls [1 1 a]",
        "scale <-> scale",
        "n [1] <-> n []",
    ]


def test_ties() -> None:
    def convert(state: State) -> State:
        return {"wte": state["embed"], "lm_head": state["embed"].T, "copy": state["embed"]}

    assert observed(convert, {"embed": (7, 3)}) == [
        "embed [i o] <-> wte [i o] = lm_head [o i] = copy [i o]"
    ]


def test_an_example_of_other_sizes_than_the_model(tmp_path: Path) -> None:
    """Sizes that both sides' shapes tell are those of the model, not of the example."""

    def convert(state: State) -> State:
        return {"q": state["q"].reshape(state["q"].shape[0], -1).T}

    rules = Rules.observe(convert, {"q": (7, 3, 5)})
    q = np.random.default_rng(0).random((8, 4, 6), np.float32)
    unickpt.save(tmp_path / "a", {"q": q})
    like = {"q": np.zeros((24, 8), np.float32)}
    unickpt.load(tmp_path / "a", like, rules=rules)
    assert like["q"].tobytes() == convert({"q": q})["q"].tobytes()
    unickpt.save(tmp_path / "b", like)
    back = {"q": np.zeros_like(q)}
    unickpt.load(tmp_path / "b", back, rules=rules.inverse)
    assert back["q"].tobytes() == q.tobytes()
    with pytest.warns(RuleWarning, match="b=3 is assumed, the rule's usual size"):
        unickpt.convert(tmp_path / "b", tmp_path / "c", rules=rules.inverse)
    given = Rules.parse(str(rules), sizes={"b": 4}).inverse  # without a warning
    unickpt.convert(tmp_path / "b", tmp_path / "d", rules=given)
    assert unickpt.load(tmp_path / "d")["q"].tobytes() == q.tobytes()


# --- names ----------------------------------------------------------------------------------------


def test_layers_that_are_numbered_from_another_number() -> None:
    def convert(state: State) -> State:
        return {f"h.{l}.w": state[f"layers_{l + 1}"]["w"].T for l in range(5)}

    assert observed(convert, {f"layers_{l + 1}": {"w": (3, 4)} for l in range(5)}) == [
        "layers_{l+1}/w [i o] <-> h.{l}.w [o i]"
    ]


def test_blocks_that_repeat() -> None:
    def convert(state: State) -> State:
        return {
            **{f"layers.{3 * b + j}.w": state["local"][b, j] for b in range(4) for j in range(2)},
            **{f"layers.{3 * b + 2}.w": state["global"][b] for b in range(4)},
        }

    assert observed(convert, {"local": (4, 2, 5), "global": (4, 5)}) == [
        "local [l n a] <-> layers.{3*l+n}.w [a] l=4 n=2",
        "global [l a] <-> layers.{3*l+2}.w [a] l=4",
    ]


def test_layers_of_two_kinds_under_one_name() -> None:
    def convert(state: State) -> State:
        return {
            f"h.{l}.w": x.T if l % 2 else x
            for l, x in enumerate(state["h"][str(l)] for l in range(6))
        }

    assert observed(convert, {"h": {str(l): (3, 3) for l in range(6)}}) == [
        "h/{h=0|2|4} <-> h.{h=0|2|4}.w",
        "h/{h=1|3|5} [i o] <-> h.{h=1|3|5}.w [o i]",
    ]


def test_names_with_signs_of_the_notation() -> None:
    def convert(state: State) -> State:
        return {"a (b)": state["x [y]"].T, "0": state["{z}"]}

    found = Rules.observe(convert, {"x [y]": (2, 3), "{z}": (4,)})
    assert found.report is not None
    assert found.report.covered == 2


# --- elements -------------------------------------------------------------------------------------


def test_arithmetic() -> None:
    def convert(state: State) -> State:
        return {
            "norm": state["norm"] + 1,
            "q": state["q"].T * np.float32(8**-0.5),
            "scaled": state["scaled"] * np.float32(0.1234567),
            "minus": -state["minus"],
            "both": state["both"] * 2 - 3,
        }

    example = {"norm": (5,), "q": (3, 8), "scaled": (4,), "minus": (4,), "both": (6,)}
    assert observed(convert, example) == [
        "norm [a] + 1 <-> norm [a]",
        "q [i o] / o**0.5 <-> q [o i]",
        "scaled [a] * 0.1234567 <-> scaled [a]",
        "minus [a] * -1 <-> minus [a]",
        "both [a] * 2 - 3 <-> both [a]",
    ]


def test_one_piece_is_scaled() -> None:
    def convert(state: State) -> State:
        q, k = state["qk"][:6], state["qk"][6:]
        return {"q": q * np.float32(0.5), "k": k}

    assert observed(convert, {"qk": (10, 3)}) == ["qk [(a + b) c] <-> q [a c] * 2, k [b c] b=4?"]


def test_constants_and_what_is_made_of_nothing() -> None:
    def convert(state: State) -> State:
        return {
            "w": state["w"],
            **{f"h.{l}.bias": np.zeros(5, np.float32) for l in range(3)},
            "eps": np.full((2, 2), 0.25, np.float32),
            "inv_freq": np.arange(4, dtype=np.float32),
            "batches": np.zeros((), np.int64),
        }

    rules = Rules.observe(convert, {"w": (3,), "unused": (4,), "count": ()})
    assert lines_of(rules) == [
        "w <-> w",
        "unused <-> drop",
        "count <-> drop",
        "0 <-> h.{h}.bias [a0] a0=5 h=3",
        "0.25 <-> eps [a0 a1] a0=2 a1=2",
        "drop <-> inv_freq",
        "0 <-> batches [] as int64",
    ]
    assert rules.report is not None
    assert rules.report.dropped == ("unused", "count")
    assert rules.report.not_made == ("inv_freq",)


def test_dtypes_that_a_converter_changes() -> None:
    def convert(state: State) -> State:
        return {
            "w": state["w"].astype(ml_dtypes.bfloat16),
            "step": state["step"].astype(np.float32),
        }

    example = {"w": np.zeros((3, 5), np.float32), "step": np.zeros((), np.int32)}
    assert observed(convert, example) == [
        "w as float32 <-> w as bfloat16",
        "step as int32 <-> step as float32",
    ]


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float64", "int8", "uint8", "bool", "float8_e4m3fn"]
)
def test_every_dtype(dtype: str) -> None:
    def convert(state: State) -> State:
        return {"w": state["w"].transpose(1, 2, 0), "half": state["v"][3:], "rest": state["v"][:3]}

    of = np.dtype(getattr(ml_dtypes, dtype, dtype))
    example = {"w": np.zeros((13, 5, 7), of), "v": np.zeros((8, 11), of)}
    assert observed(convert, example) == [
        "w [a b c] <-> w [b c a]",
        "v [(a + b) c] <-> half [b c], rest [a c] a=3?",
    ]


# --- what cannot be a rule ------------------------------------------------------------------------


def quantise(state: State) -> State:
    scale = np.abs(state["w"]).max()
    return {"codes": np.round(state["w"] / scale * 127).astype(np.int8), "b": state["b"]}


def branch(state: State) -> State:
    return {
        "codes": state["w"] / 2 if np.abs(state["w"]).max() > 3000 else state["w"],
        "b": state["b"],
    }


def add(state: State) -> State:
    return {"codes": state["w"] + state["w"].T, "b": state["b"]}


def squares(state: State) -> State:
    return {"codes": state["w"] ** 2, "b": state["b"]}


def repeats(state: State) -> State:
    return {"codes": np.repeat(state["w"], 2, 0), "b": state["b"]}


def shuffles(state: State) -> State:
    order = np.random.default_rng(3).permutation(49)
    return {"codes": state["w"].reshape(-1)[order].reshape(7, 7), "b": state["b"]}


@pytest.mark.parametrize("convert", [quantise, branch, add, squares, repeats, shuffles])
def test_what_depends_on_values_is_refused_with_the_element(
    convert: Callable[[State], State],
) -> None:
    example = {"w": (7, 7), "b": (3,)}
    with pytest.raises(
        RuleError, match=r"'codes' (depends on values: element \[\d, \d\]|cannot be)"
    ):
        Rules.observe(convert, example)
    rules = Rules.observe(convert, example, strict=False)
    assert lines_of(rules) == ["b <-> b"]
    assert rules.report is not None
    assert list(rules.report.refused) == ["codes"]


def test_which_arrays_there_are_may_not_depend_on_values() -> None:
    def convert(state: State) -> State:
        return {"w": state["w"]} if state["w"].sum() > 1e5 else {"v": state["w"]}

    with pytest.raises(RuleError, match=r"'[vw]' is missing for some values.*depends on values"):
        Rules.observe(convert, {"w": (100,)})


def test_an_example_without_arrays() -> None:
    with pytest.raises(
        RuleError, match="the example has no arrays: give a dict of arrays, or of shapes"
    ):
        Rules.observe(lambda state: state, {})
    with pytest.raises(RuleError, match="framework='tf' must be one of numpy, torch, jax"):
        Rules.observe(lambda state: state, {"w": (3,)}, framework="tf")


def test_an_error_of_the_converter_is_shown_with_the_names_of_the_example() -> None:
    def convert(state: State) -> State:
        raise KeyError("model.norm")

    message = r"(?s)convert raised KeyError: 'model\.norm'.*the example has 1 array: 'w'"
    with pytest.raises(RuleError, match=message) as caught:
        Rules.observe(convert, {"w": (3,)})
    assert isinstance(caught.value.__cause__, KeyError)


# --- forms of converters --------------------------------------------------------------------------


def test_a_converter_that_changes_its_argument() -> None:
    def convert(state: State) -> None:
        state["weight"] = state.pop("kernel").T

    assert observed(convert, {"kernel": (3, 5)}) == ["kernel [i o] <-> weight [o i]"]


def test_a_converter_that_yields_pairs() -> None:
    def convert(state: State) -> Any:
        yield "weight", state["kernel"].T

    assert observed(convert, {"kernel": (3, 5)}) == ["kernel [i o] <-> weight [o i]"]


def test_torch_tensors_and_a_model_that_is_filled() -> None:
    torch = pytest.importorskip("torch")

    def convert(state: State) -> Any:
        model = torch.nn.Linear(3, 5, dtype=torch.bfloat16)
        model.load_state_dict({"weight": state["kernel"].T, "bias": state["bias"]})
        return model

    example = {
        "kernel": torch.zeros(3, 5, dtype=torch.bfloat16),
        "bias": torch.zeros(5, dtype=torch.bfloat16),
    }
    assert observed(convert, example) == ["kernel [i o] <-> weight [o i]", "bias <-> bias"]


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")

    def convert(state: State) -> Any:
        return {"w": jax.numpy.swapaxes(state["w"], 0, 1), "b": jax.numpy.asarray(state["b"])}

    example = {"w": jax.ShapeDtypeStruct((3, 5), "bfloat16"), "b": jax.numpy.zeros(3)}
    assert observed(convert, example) == ["w [i o] <-> w [o i]", "b <-> b"]


# --- what it is for -------------------------------------------------------------------------------


def test_a_checkpoint_is_converted_as_the_converter_does_it(tmp_path: Path) -> None:
    def convert(state: State) -> State:
        found = {"embed.weight": state["embed"], "norm.weight": state["norm"] + 1}
        for l in range(4):
            kernel = state["layers"]["qkv"][l]
            q, k, v = kernel[:, :12], kernel[:, 12:16], kernel[:, 16:]
            found |= {f"h.{l}.q": q.T, f"h.{l}.k": k.T, f"h.{l}.v": v.T}
        return found

    random = np.random.default_rng(5)
    small = {"embed": (5, 6), "norm": (6,), "layers": {"qkv": (4, 6, 20)}}
    state = {
        "embed": random.standard_normal((50, 6), np.float32),
        "norm": random.standard_normal(6, np.float32),
        "layers": {"qkv": random.standard_normal((4, 6, 20), np.float32)},
    }
    rules = Rules.observe(convert, small)
    assert rules.report is not None
    (tmp_path / "my.rules").write_text(rules.report.text)
    rules = Rules.load(tmp_path / "my.rules")
    unickpt.save(tmp_path / "jax", state)
    with pytest.warns(
        RuleWarning, match=r"layers/qkv.*\n.*c=4, d=4 is assumed.*no shape determines it"
    ):
        unickpt.convert(tmp_path / "jax", tmp_path / "torch", rules=rules)
    found, expected = unickpt.load(tmp_path / "torch"), convert(state)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].tobytes() == x.tobytes(), name
    like = {"embed": np.zeros((50, 6), np.float32), "norm": np.zeros(6, np.float32),
            "layers": {"qkv": np.zeros((4, 6, 20), np.float32)}}  # fmt: skip
    unickpt.load(tmp_path / "torch", like, rules=rules.inverse)
    assert like["layers"]["qkv"].tobytes() == state["layers"]["qkv"].tobytes()


def test_an_example_can_be_a_checkpoint(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", {"params": {"w": np.zeros((3, 5), np.float32)}, "step": 7})

    def convert(state: State) -> State:
        assert state["step"] == 7
        return {"w": state["params"]["w"].T}

    for example in (tmp_path / "a", unickpt.open(tmp_path / "a")):
        rules = Rules.observe(convert, example)
        assert lines_of(rules) == ["params/w [i o] <-> w [o i]", "step <-> drop"]
        assert rules.report is not None
        assert rules.report.dropped == ("step",)


def test_values_that_are_no_arrays(tmp_path: Path) -> None:
    state = {"w": np.ones((3, 5), np.float32), "step": 7, "name": "a", "old": 1}
    unickpt.save(tmp_path / "a", state)

    def convert(given: State) -> State:
        return {"w": given["w"].T, "step": given["step"], "name": "b", "version": 2}

    rules = Rules.observe(convert, tmp_path / "a")
    assert lines_of(rules) == [
        "w [i o] <-> w [o i]", "step <-> step", "name <-> drop", "drop <-> name", "old <-> drop",
        "drop <-> version",
    ]  # fmt: skip
    unickpt.convert(tmp_path / "a", tmp_path / "b", rules=rules)
    assert unickpt.load(tmp_path / "b")["step"] == 7
    unickpt.save(tmp_path / "c", convert(state))
    assert rules.check(tmp_path / "a", tmp_path / "c")
    unickpt.save(tmp_path / "c", {**convert(state), "step": 8}, overwrite=True)
    assert rules.check(tmp_path / "a", tmp_path / "c").differences == {
        "step": f"it is 8, and would be made as 7 by `{rules.rules[1]}`"
    }
    draft = Rules.draft(tmp_path / "a", tmp_path / "c").report
    assert draft is not None
    assert "step <-> step" in draft.text


def test_many_arrays() -> None:
    names = [f"{n}_{l}" for l in range(300) for n in ("a", "b", "c")]

    def convert(state: State) -> State:
        return {f"model.{name.replace('_', '.')}.w": state[name].T for name in names}

    found = observed(convert, dict.fromkeys(names, (5, 6)))
    assert len(found) <= 3
