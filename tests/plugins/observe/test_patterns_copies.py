"""Arrays that hold an element more than once, and names that have several numbers twice."""

import numpy as np

from unickpt import Rules


def test_an_array_with_copies_refuses_only_itself() -> None:
    """Positions that are tiled for another size, beside those that they are made of."""

    def convert(arrays):
        position = arrays["position"]
        return {
            "tiled": np.tile(position, (1, 2, 1)),
            "position": position,
            "kernel": arrays["weight"].T,
        }

    example = {"position": (1, 3, 4), "weight": (3, 5)}
    rules = Rules.observe(convert, example, strict=False)
    assert rules.report.refused == {
        "tiled": "cannot be made by a rule: an element is copied to several places of one array"
    }
    lines = rules.report.text.splitlines()
    assert [" ".join(line.split()) for line in lines if line[:1] not in "#"] == [
        "position <-> position",
        "weight [i o] <-> kernel [o i]",
    ]


def test_of_two_numbers_that_a_name_has_twice_one_is_written_out() -> None:
    """An axis can be in a name once only, and two captures in a component would be ambiguous."""
    names = {
        f"layers.{at}.ff.{n}.w": f"conformer_{at}_ff_{n}.conformer_{at}_ff_{n}_dense.kernel"
        for at in range(3)
        for n in (1, 2)
    }

    def convert(arrays):
        return {names[name]: x for name, x in arrays.items()}

    text = Rules.observe(convert, dict.fromkeys(names, (2, 3))).report.text
    assert [" ".join(line.split()) for line in text.splitlines() if line[:1] not in "#"] == [
        f"layers.{{l}}.ff.{n}.w <-> conformer_{{l}}_ff_{n}.conformer_{{l}}_ff_{n}_dense.kernel"
        for n in (1, 2)
    ]
