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
    names = {"in/norm/0/w": "norm1.w", "in/conv/2/w": "conv1.w"}

    def convert(arrays):
        return {names[name]: x for name, x in arrays.items()}

    assert lines(Rules.observe(convert, dict.fromkeys(names, (2, 3)))) == [
        "in/norm/0/w <-> norm1.w",
        "in/conv/2/w <-> conv1.w",
    ]
