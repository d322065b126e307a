"""Names as diffusion models have them."""

from unickpt import Rules


def lines(rules):
    return [
        " ".join(line.split()) for line in rules.report.text.splitlines() if line[:1] not in "#"
    ]


def test_a_name_with_one_number_in_two_sums():
    """Of Wan's motion encoder: a convolution, whose place in its sequence grows with its number."""
    names = {
        f"convs.{c + 1}.conv{n + 1}.{n}.weight": f"blocks.{c}.conv{n + 1}.weight"
        for c in range(7)
        for n in range(2)
    }

    def convert(arrays):
        return {names[name]: x for name, x in arrays.items()}

    assert lines(Rules.observe(convert, dict.fromkeys(names, (2, 3)))) == [
        "convs.{c+1}.{conv1.0|conv2.1}.weight <-> blocks.{c}.{conv1|conv2}.weight"
    ]


def test_places_in_a_sequence_that_have_names_on_the_other_side():
    """Of latent diffusion: two components become one, and of a part of the names three."""
    parts = {"in_layers.2": "conv1", "emb_layers.1": "time_proj", "out_layers.3": "conv2"}
    kinds = {"up": "lora_B.weight", "down": "lora_A.weight"}
    names = {
        f"input.{n}.0.{part}.{kind}": f"down.{n}.{other}.{own}"
        for n in range(3)
        for part, other in parts.items()
        for kind, own in kinds.items()
    }

    def convert(arrays):
        return {names[name]: x for name, x in arrays.items()}

    assert lines(Rules.observe(convert, dict.fromkeys(names, (2, 3)))) == [
        "input.{i}.0.{n:in_layers.2|emb_layers.1|out_layers.3}.{up|down} "
        "<-> down.{i}.{n:conv1|time_proj|conv2}.lora_{B|A}.weight"
    ]


def test_components_between_which_there_is_a_slash():
    """No enumeration takes these."""

    def convert(tree):
        kinds = {"norm1": tree["in"]["norm"]["0"], "conv1": tree["in"]["conv"]["2"]}
        return {f"{name}.{leaf}": x for name, kind in kinds.items() for leaf, x in kind.items()}

    leaves = {"w": (2, 3), "b": (2, 3)}
    assert lines(
        Rules.observe(convert, {"in": {"norm": {"0": leaves}, "conv": {"2": leaves}}})
    ) == [
        "in/norm/0/{n=w|b} <-> norm1.{n=w|b}",
        "in/conv/2/{n=w|b} <-> conv1.{n=w|b}",
    ]
