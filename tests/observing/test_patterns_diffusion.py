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

    found = lines(Rules.observe(convert, {name: (2, 3) for name in names}))
    assert found == [
        "convs.{c+1}.conv1.0.weight <-> blocks.{c}.conv1.weight",
        "convs.{c+1}.conv2.1.weight <-> blocks.{c}.conv2.weight",
    ]
