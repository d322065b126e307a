"""Few lines for many layers, and one array that no rule makes beside many that rules make."""

import numpy as np
import pytest

from unickpt import Rules
from unickpt.errors import RuleError


def lines(rules):
    return [
        " ".join(line.split()) for line in rules.report.text.splitlines() if line[:1] not in "#"
    ]


def observed(names, shape=lambda name: (2, 3)):
    """The rules of a converter that only renames."""

    def convert(arrays):
        return {names[name]: x for name, x in arrays.items()}

    return lines(Rules.observe(convert, {name: shape(name) for name in names}))


def test_blocks_that_are_numbered_backwards():
    """And of other sizes in each: the decoder of an autoencoder."""
    names = {f"up.{u}.block.{b}.w": f"up.{3 - u}.layers.{b}.w" for u in range(4) for b in range(2)}
    found = observed(names, lambda name: (int(name.split(".")[1]) + 2,))
    assert found == ["up.{u}.block.{b}.w <-> up.{3-u}.layers.{b}.w"]


def test_numbers_that_are_not_the_same_ones():
    names = {f"{k}.norm{n}.w": f"{k}.main.{3 * n - 3}.w" for k in range(3) for n in (1, 2)}
    assert observed(names) == ["{n}.norm{l+1}.w <-> {n}.main.{3*l}.w"]


def test_layers_between_which_there_are_others():
    """A decoder with cross-attention in layers of their own."""
    own = {f"model.{i}.self.w": f"layers.{at}.w" for at, i in enumerate((0, 2, 3, 5))}
    cross = {f"model.{i}.cross.w": f"layers.{at}.fusion.w" for at, i in ((1, 1), (3, 4))}
    assert observed(own | cross) == [
        "model.{3*m+2*l}.self.w <-> layers.{2*m+l}.w l=2",
        "model.{3*m+1}.cross.w <-> layers.{2*m+1}.fusion.w",
    ]


def test_stacks_of_every_fourth_layer():
    """Each place in a cycle of layers is a stack of its own."""

    def convert(arrays):
        return {
            f"layer_{n}/{kind}": np.stack(
                [arrays[f"model.{4 * k + n}.{kind}"] for k in range(2)], 1
            )
            for n, kind in kinds
        }

    kinds = [(n, kind) for n in range(4) for kind in ("norm", "self" if n == 3 else "linear")]
    example = {f"model.{4 * k + n}.{kind}": (5,) for n, kind in kinds for k in range(2)}
    assert lines(Rules.observe(convert, example)) == [
        "model.{4*m+l}.{n=norm|linear} [a] <-> layer_{l}%2F{n=norm|linear} [a m] m=2",
        "model.{4*m+3}.self [a] <-> layer_3%2Fself [a m] m=2",
    ]


@pytest.mark.parametrize("separator", [".", "/", "-"])
def test_words_that_are_other_words_on_the_other_side(separator):
    words = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    names = {
        f"layers.{k}.{one}.weight": separator.join(("model", str(k), other, "kernel"))
        for k in range(3)
        for one, other in words.items()
    }
    found = observed(names, lambda name: (2, 3) if "w2" in name else (3, 2))
    assert len(found) == 1
    assert "{w1|w2|w3}" in found[0]


def test_two_numbers_in_one_component():
    names = {
        f"layers.{k}.norm_{n}.w": f"layers_{k}-norm_{n}-scale" for k in range(3) for n in (1, 2)
    }
    assert observed(names) == ["layers.{l}.norm_{n:1|2}.w <-> layers_{l}-norm_{n:1|2}-scale"]


def test_a_number_that_a_name_has_twice():
    def convert(arrays):
        return {f"layer_{k}": {f"block_{k}": {"w": arrays[f"layers.{k}.w"]}} for k in range(3)}

    rules = Rules.observe(convert, {f"layers.{k}.w": (2, 3) for k in range(3)})
    assert lines(rules) == ["layers.{l}.w <-> layer_{l}/block_{l}/w"]


def test_what_merging_gets_wrong_is_taken_apart_alone():
    """Two rules would match the name that has the numbers of both; all others stay merged."""
    names = {f"a.{x}.{y}.w": f"b.{x}.{y}.w" for x, y in ((0, 0), (0, 1), (1, 0))}
    names |= {"a.1.1.w": "b.1.2.w"} | {f"l.{k}.w": f"m.{k}.w" for k in range(9)}
    found = observed(names)
    assert "l.{l}.w <-> m.{l}.w" in found
    assert len(found) <= 5


def test_an_array_that_a_rule_cannot_make_refuses_only_itself():
    """Numbers are cut to whole ones: rules convert exactly, or not at all."""

    def convert(arrays):
        found = {f"m.{k}": arrays[f"l.{k}"] for k in range(3)}
        return {**found, "whole": arrays["w"].astype(np.int32)}

    example = {"w": (4,)} | {f"l.{k}": (2, 3) for k in range(3)}
    rules = Rules.observe(convert, example, strict=False)
    assert [*rules.report.refused] == ["whole"]
    assert lines(rules) == ["l.{l} <-> m.{l}"]
    with pytest.raises(RuleError, match="'whole' cannot be made by a rule"):
        Rules.observe(convert, example)


def test_heads_that_are_fused_become_kinds_one_after_the_other():
    """Of each head a query, a key and a value: the other direction has them kind by kind."""
    heads, key, value, gate = 3, 5, 7, 4

    def convert(arrays):
        x = arrays["fused"].T.reshape(heads, -1, 6)
        kinds = np.split(x, np.cumsum([key, key, value]), axis=1)
        flat = [kind.reshape(-1, 6) for kind in kinds]
        return {"qkv": np.concatenate(flat[:3]), "gate": flat[3]}

    rules = Rules.observe(convert, {"fused": (6, heads * (2 * key + value + gate))})
    assert lines(rules) == [
        "fused [a (b (c d + e + f))] <-> qkv [(c b d + b e) a], gate [(b f) a] b=3 c=2 d=5 f=4"
    ]
