"""Patterns that converters of other projects showed: each was not one rule, or not few, before."""

import numpy as np

from unickpt import Rules


def lines(rules):
    return [line for line in rules.report.text.splitlines() if line and line[0] != "#"]


def test_a_number_within_a_word_does_not_match_other_words():
    """`ln_{l}` would match `ln_cross`: GPT-2 as a decoder."""
    example = {f"h.{h}.ln_{name}.scale": (4 + h,) for h in range(3) for name in ("1", "2", "cross")}

    def to_torch(arrays):
        return {name.replace("scale", "weight"): x for name, x in arrays.items()}

    rules = Rules.observe(to_torch, example)
    assert len(lines(rules)) <= 2, rules.report.text


def test_of_several_numbers_only_one_tells_two_rules_apart():
    """Convolutions of 1 x 1 and of 3 x 3 in the same layers: a ResNet."""
    example = {
        f"layers.{n}.conv.{c}.kernel": (1, 1, 4, 6) if c != 1 else (3, 3, 4, 6)
        for n in range(4)
        for c in range(3)
    }

    def to_torch(arrays):
        return {
            name.replace("kernel", "weight"): np.transpose(x, (3, 2, 0, 1))
            for name, x in arrays.items()
        }

    rules = Rules.observe(to_torch, example)
    assert len(lines(rules)) == 2, rules.report.text
    assert "layers.{l}.conv.{c=0|2}.kernel" in rules.report.text


def test_constants_whose_numbers_are_no_grid_are_a_few_rules():
    """Counts of batches of stages with several numbers of layers."""
    depths = (2, 3, 1)

    def count(arrays):
        counts = {
            f"stages.{s}.layers.{n}.count": np.zeros((), np.int64)
            for s, depth in enumerate(depths)
            for n in range(depth)
        }
        return {**arrays, **counts}

    rules = Rules.observe(count, {"w": (3,)})
    assert len(lines(rules)) <= 1 + len(depths), rules.report.text


def test_a_number_that_is_shifted_is_no_axis_of_arrays_of_several_shapes():
    """`fc0` and `fc1` become `fc1` and `fc2`, and have other sizes than each other."""
    example = {
        f"blocks.{b}.fc{f}.weight": (5, 7) if f else (7, 5) for b in range(3) for f in (0, 1)
    }
    example["blocks.0.norm.bias"] = (3,)

    def shift(arrays):
        return {name.replace("fc1", "fc2").replace("fc0", "fc1"): x for name, x in arrays.items()}

    rules = Rules.observe(shift, example)
    assert len(lines(rules)) <= 3, rules.report.text


def test_numbers_that_are_no_multiples_of_each_other_are_told_apart():
    """`LayerNorm_0` and `LayerNorm_2` become `norm1` and `norm2`: a ViT of Google."""
    example = {f"block_{b}.LayerNorm_{n}.scale": (5,) for b in range(4) for n in (0, 2)}
    numbers = {0: 1, 2: 2}

    def to_torch(arrays):
        return {
            f"blocks.{b}.norm{numbers[n]}.weight": arrays[f"block_{b}.LayerNorm_{n}.scale"]
            for b in range(4)
            for n in (0, 2)
        }

    rules = Rules.observe(to_torch, example)
    assert len(lines(rules)) <= 2, rules.report.text
