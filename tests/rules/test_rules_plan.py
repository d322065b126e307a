"""Plans that are refused, and what is said: each array that is in the way, and the rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rule_cases import flat_names, flat_tree

import unickpt
from unickpt import LoadMismatch, Rules
from unickpt.errors import RuleError


def arrays(text: str) -> dict[str, Any]:
    """Arrays out of `name 3x5, name 7`; float32, counted from 1."""
    found = {}
    for item in text.split(","):
        name, _, shape = item.strip().partition(" ")
        extents = tuple(map(int, shape.split("x"))) if shape else ()
        found[name] = np.arange(1, 1 + int(np.prod(extents)), dtype=np.float32).reshape(extents)
    return found


def load(path: Path, rules: str, stored: str, like: str | None = None, **options: Any) -> Any:
    unickpt.save(path, flat_tree(arrays(stored)))
    wanted = None if like is None else flat_tree(arrays(like))
    return flat_names(unickpt.load(path, wanted, rules=Rules.parse(rules), **options))


# Rules, what is stored, what is asked for (or nothing), and what the refusal says.
REFUSED = {
    "an array that no rule takes": (
        "a [i o] <-> b [o i]", "a 3x5, c 2", "b 5x3",
        ["'c' (float32[2]) is stored, and no rule takes it", "to leave it out: c <-> drop"],
    ),
    "an array that no rule makes": (
        "a [i o] <-> b [o i]", "a 3x5", "b 5x3, c 2",
        ["'c' (float32[2]) is requested, and no rule makes it"],
    ),
    "many of one kind": (
        "a <-> b", "a 2, x/0/w 2, x/1/w 2, x/2/w 2", None,
        ["1 problem", "'x/0/w' (float32[2]) (and 2 like it) is stored, and no rule takes it",
         "to leave them out: x/{n0}/w <-> drop"],
    ),
    "a near miss": (
        "params/{m...}/kernel [i o] <-> {m...}.weight [o i]", "params/up/kernel 3x5",
        "upp.weight 5x3",
        ["'up.weight', which is not requested", "line 1"],
    ),
    "two rules that take one array": (
        "a/{m} <-> b/{m}\na/x <-> c", "a/x 2, a/y 2", None,
        ["'a/x' is taken twice", "line 1: a/{m} <-> b/{m}", "line 2: a/x <-> c"],
    ),
    "two rules that make one array": (
        "a <-> c\nb <-> c", "a 2, b 2", None, ["'c' is made twice"],
    ),
    "a count that is taken by another rule, too": (
        "a <-> b\nlift n <-> s/{p}\nn <-> drop", "a 2, n", "b 2, s/b",
        ["'n' is taken twice", "line 2: lift n <-> s/{p}"],
    ),
    "a rule that matches nothing": (
        "a <-> b\nx [e] <-> y [e]", "a 2", None,
        ["line 2: x [e] <-> y [e]", "matches nothing; if that is intended, begin it with `opt"],
    ),
    "an index that is missing": (
        "w [l e] <-> w.{l} [e]", "w 3x2", "w.0 2, w.2 2",
        ["'w.1', which is not requested"],
    ),
    "an index too many": (
        "w [l e] <-> w.{l} [e]", "w 2x5", "w.0 5, w.1 5, w.2 5",
        ["'w.2' (float32[5]) is requested, and no rule makes it"],
    ),
    "a stored index that is missing": (
        "w.{l} [e] <-> w [l e]", "w.0 2, w.2 2", None,
        ["'w.1', which is not stored"],
    ),
    "another number of dimensions": (
        "a [i o] <-> b [o i]", "a 3x5x2", None,
        ["'a' is float32[3, 5, 2], but the rule gives it the axes [i o]"],
    ),
    "an axis of two sizes": (
        "a [e] <-> b [e]", "a 3", "b 4",
        ["'b' is float32[4]: e has 4 elements here, but 3"],
    ),
    "a wrong order": (
        "a [i o] <-> b [i o]", "a 3x5", "b 5x3", ["i has 5 elements here, but 3"],
    ),
    "a product that does not come out even": (
        "a [(h d)] <-> b [h d]  h=4", "a 10", None,
        ["(h d): 10 elements are not a multiple of 4"],
    ),
    "a product of another size": (
        "a [(h d)] <-> b [h d]", "a 12", "b 3x5",
        ["(h d) has 12 elements here, but 15"],
    ),
    "a sum of another size": (
        "a [(q + k)] <-> b [q], c [k]", "a 12", "b 3, c 8",
        ["(q + k) has 12 elements here, but 11"],
    ),
    "pieces larger than the whole": (
        "a [(q + k)] <-> b [q], c [k]  q=13", "a 12", None, ["(q + k)"],
    ),
    "sizes that nothing tells": (
        "a [(q + k)] <-> b [q], c [k]", "a 12", None,
        ["the size of k, q is unknown: give it, as in `k=8`"],
    ),
    "an enumeration that is not whole": (
        "a/{q|k} [e] <-> b [({q|k} e)]", "a/q 2", None, ["it needs 'a/k', which is not stored"],
    ),
    "numbers that two indices make": (
        "a [b j e] <-> a.{2*b+j} [e]  j=3", "a 2x3x5", None,
        ["two sets of indices make one number"],
    ),
    "arithmetic with an unknown size": (
        "a [e] * d <-> b [e]", "a 2", None, ["the arithmetic needs the size of 'd'"],
    ),
    "a rule that fits nothing, where another takes what it is about": (
        "a/q [e h d] <-> q.w [(h d) e]  h=3\n{m...}/q [i o] <-> {m...}.q.w [o i]\n"
        "default {n} [i o] <-> {n} [o i]",
        "a/q 5x12, b/q 2x3", "q.w 12x5, b.q.w 3x2, a.q.w 12x5",
        ["line 1: a/q [e h d] <-> q.w [(h d) e]", "'a/q' is float32[5, 12], but the rule"],
    ),
    "a rule that fits nothing, beside a general one": (
        "a/q [e h d] <-> a.q [(h d) e]  h=3\n{m...}/q [i o] <-> {m...}.q [o i]",
        "a/q 5x12", "a.q 12x5",
        ["1 problem\n  rules, line 1", "applies to nothing: 'a/q' is float32[5, 12], but"],
    ),
    "a default beside a rule that does not fit": (
        "default {m...}/q [i o] <-> {m...}.q [o i]\n"
        "{m...}/q [e (half two)] <-> {m...}.q [(two half) e]  two=4",
        "x/q 4x6, y/q 4x8", "x.q 6x4, y.q 8x4",
        ["1 problem\n  rules, line 2", "'x/q' is float32[4, 6]: (half two): 6 elements are not a",
         "where two=4 is given; to let the default rule handle such arrays, begin this r"],
    ),
    "the same, without `like`": (
        "default {m...} <-> drop\n{m...}/q [x i o] <-> {m...}.q [x o i]",
        "x/q 4x6, y/q 2x4x8", None, ["'x/q' is float32[4, 6], but the rule gives it the axes"],
    ),
    "many families that one rule does not fit": (
        "{m}/w [(h d) e] <-> {m}.w [h d e]  h=4", "a/w 6x2, b/w 6x2, c/w 6x2", None,
        ["1 problem\n", "not a multiple of 4, where h=4 is given (it matches 'a/w' and 2 more)"],
    ),
    "many arrays about which two rules are": (
        "{m}/w <-> {m}.w\n{m}/w <-> x.{m}", "a/w 2, b/w 2", None,
        ["1 problem\n", "'a/w' (and 1 more) is taken twice", "the more general one with `def"],
    ),
    "an enumeration of other sizes": (
        "m/{a|b} [i o] <-> m.ab [o ({a|b} i)]", "m/a 2x3, m/b 2x4", None,
        ["o has 4 elements here, but 3", "such as {a|b} means all of its names together"],
    ),
    "a near counterpart": (
        "w [e] <-> w [e]", "w 2, norm/scale 3, up 7", "w 2, final_norm.scale 3, n 5",
        ["'norm/scale' (float32[3]) is stored, and no rule takes it\n    perhaps a rule is "
         "missing: from 'norm/scale' to 'final_norm.scale'",
         "no rule makes it\n    perhaps a rule is missing: from 'norm/scale' to 'final_"],
    ),
    "a name that both sides have": (
        "w [e] <-> w [e]", "w 2, b 3", "w 2, b 3",
        ["'b' (float32[3]) is stored, and no rule takes it\n    perhaps a rule is missing: from "
         "'b' to 'b'"],
    ),
    "a name requested twice": (
        "a/w <-> w\nb [e] <-> b [e]", "a/w 2x3, b 2, eps", "w 2x3, b 2, eps_w 2x3",
        ["'eps_w' (float32[2, 3]) is requested, but no stored array is left for it",
         "as in `w [...] = eps_w [...]`, in\n    rules, line 1: a/w <-> w"],
    ),
    "a head that is tied": (
        "default include transformers-llama\nembed/w [v e] <-> embed.weight [v e]",
        "embed/w 7x3", "embed.weight 7x3, lm_head.weight 7x3",
        ["1 problem\n  'lm_head.weight' (float32[7, 3]) is requested, but no stored array is left",
         "`embed.weight [...] = lm_head.weight [...]`, in\n    rules, line 2: embed/w"],
    ),
    "dots for slashes": (
        "p.a.{l}.w [e] <-> a.{l} [e]", "p/a/0/w 2, p/a/1/w 2", "a.0 2, a.1 2",
        ["1 problem\n  rules, line 1: p.a.{l}.w [e] <-> a.{l} [e]\n                 ^\n",
         "it needs 'p.a.0.w', which is not stored; there is 'p/a/0/w': check where"],
    ),
    "dots for slashes, on both sides": (
        "p.w [e] <-> a.w [e]", "p/w 2", "a/w 2",
        ["matches nothing; there is 'p/w': check where the name has `/` and where `.`"],
    ),
    "a slip of the pen": (
        "params/embd [v e] <-> embed [v e]", "params/embed 5x2", "embed 5x2",
        ["1 problem\n", "'params/embd', which is not stored; did you mean 'params/embed'?"],
    ),
    "one rule with its sides swapped": (
        "a <-> x\nb <-> y\nz <-> c", "a 2, b 2, c 2", "x 2, y 2, z 2",
        ["line 3: z <-> c\n    has its sides swapped: stored names belong on the left"],
    ),
    "another order that would fit": (
        "a [i o] <-> b [i o]", "a 3x5", "b 5x3",
        ["i has 5 elements here, but 3 elsewhere (in 'a'); the order [o i] would fit"],
    ),
    "braces that are doubled": (
        "a/{{l}} <-> a.{{l}}", "a/0 2", "a.0 2", ["a capture has single braces"],
    ),
    "rules of another model": (
        "include transformers-llama", "p/x 2", "x 2",
        ["none of the 11 rules applies; is it the right preset", "4 more rules match nothing"],
    ),
    "a flat tree": (
        "a/w <-> a.w", "a%2Fw 2", "a.w 2", ["%2F in a name is a `/` within a key"],
    ),
    "state under numbers": (
        "w <-> w\nlift m/{p} <-> o/state/{p}/exp_avg", "w 2, m/w 2", "w 2, o/state/0/exp_avg 2",
        ["unickpt.adapters.torch.NamedOptimizer(optimizer, module)"],
    ),
    "other shapes where no axes are named": (
        "{m}/w <-> {m}.w", "a/w 2x3", "a.w 3x2",
        ["unnamed dimension 0 has 3 elements here, but 2 elsewhere (in 'a/w'); if the axes are in "
         "another order, name them: [i o] there and [o i] here"],
    ),
    "another order of three axes that are not named": (
        "a <-> b", "a 2x3x5", "b 5x2x3", ["name them: [a b c] there and [c a b] here"],
    ),
    "repeated sizes of axes that are not named": (
        "a <-> b", "a 3x3x5", "b 5x3x3", ["unnamed dimension 0 has 5 elements here, but 3"],
    ),
    "a slot of a scaled parameter": (
        "a [e] * 2 <-> b [e]\nlift m/{p} <-> v/{p}", "a 2, m/a 2", None,
        ["that is scaled by 2 needs a law"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    rules, stored, like, said = REFUSED[case]
    with pytest.raises(RuleError) as raised:
        load(tmp_path / "c", rules, stored, like)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path / 'c'}: the rules do not fit: ")
    for text in said:
        assert text in message, message


def test_a_plain_value_has_no_axes(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"step": 3})
    with pytest.raises(RuleError, match="'step' is a plain value, which has no axes: a rule for"):
        unickpt.load(tmp_path / "c", {"n": np.zeros(2)}, rules=Rules.parse("step [e] <-> n [e]"))


def test_all_problems_at_once_but_not_without_end(tmp_path: Path) -> None:
    stored = ", ".join(f"{chr(97 + i)}{'x' * i} 2" for i in range(26))
    with pytest.raises(RuleError) as raised:
        load(tmp_path / "c", "none <-> none", stored)
    message = str(raised.value)
    assert "27 problems" in message
    assert len(message.splitlines()) <= 25
    assert message.endswith(" more")


def test_a_root_cause_is_told_once(tmp_path: Path) -> None:
    """Slots whose parameter's rule does not fit are not told again."""
    rules = """
        params/{m}/w [(h d) e] <-> {m}.w [h d e]
        lift mu/{p} <-> optim/{p}/mu  for params/{p} <-> {p}
        lift count <-> optim/{p}/step
    """
    stored = "params/a/w 6x2, params/b/w 6x2, mu/a/w 6x2, mu/b/w 6x2, count"
    with pytest.raises(RuleError) as raised:
        load(tmp_path / "c", rules, stored)
    assert str(raised.value).count("the size of d, h is unknown") == 1
    assert "1 problem\n" in str(raised.value), str(raised.value)


def test_planning_takes_as_long_as_there_are_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names made and matched, counted: four times the arrays need about four times as many."""
    from unickpt.rules.name_patterns import Pattern

    work: list[str] = []
    for method in ("format", "match"):
        original = getattr(Pattern, method)

        def counted(*arguments: Any, original: Any = original) -> Any:
            work.append("")
            return original(*arguments)

        monkeypatch.setattr(Pattern, method, counted)
    rules = Rules.parse("""
        x/{n=up|gate} [l x i o] <-> l.{l}.x.{x}.{n} [o i]
        default {n} <-> {n}
        lift m/{p} <-> s/{p}/m
        lift count <-> s/{p}/step
    """)
    counts = []
    for layers in (4, 16):
        experts = {n: np.zeros((layers, 5, 2, 3)) for n in ("up", "gate")}
        path = tmp_path / str(layers)
        unickpt.save(path, {"x": experts, "m": {"x": experts}, "count": 3, "other": np.ones(2)})
        work.clear()
        made = unickpt.load(path, rules=rules)
        counts.append(len(work))
        unickpt.save(path / "back", made)
        work.clear()
        unickpt.load(path / "back", rules=rules.inverse)
        counts.append(len(work))
    assert counts[2] < 5 * counts[0]
    assert counts[3] < 5 * counts[1]


def test_rules_that_fit_nothing_may_be_optional(tmp_path: Path) -> None:
    rules = "optional a/q [e h d] <-> a.q [(h d) e]  h=3\n{m...}/q [i o] <-> {m...}.q [o i]"
    assert load(tmp_path / "c", rules, "a/q 5x12", "a.q 12x5").keys() == {"a.q"}


def test_defaults_take_what_no_other_rule_is_about(tmp_path: Path) -> None:
    rules = """
        default {m...}/w [i o] <-> {m...}.w [o i]
        a/w [i o] * 2          <-> a.w [o i]
        b/w                    <-> drop
        c/w [v e]              <-> c.w [v e] = d.w [v e]
        default e/{m...}       <-> drop
    """
    stored = "a/w 2x3, b/w 2x3, c/w 2x3, f/w 2x3, e/x 4"
    made = load(tmp_path / "c", rules, stored)
    assert {name: x.shape for name, x in made.items()} == {
        "a.w": (3, 2), "c.w": (2, 3), "d.w": (2, 3), "f.w": (3, 2),
    }  # fmt: skip
    assert made["a.w"][0, 0] == 2
    unickpt.save(tmp_path / "d", flat_tree(made))  # d.w is tied, and no array of its own
    back = flat_names(unickpt.load(tmp_path / "d", rules=Rules.parse(rules).inverse))
    assert back.keys() == {"a/w", "c/w", "f/w"}
    with pytest.raises(RuleError, match="'e/w' is taken twice"):
        load(tmp_path / "e", rules, "a/w 2x3, b/w 2x3, c/w 2x3, e/w 2x3")
    (tmp_path / "all.rules").write_text("{m...}/w [i o] <-> {m...}.w [o i]")
    (tmp_path / "my.rules").write_text('default include "all.rules"\na/w [i o] <-> a.w [i o]')
    unickpt.save(tmp_path / "f", flat_tree(arrays("a/w 2x3, b/w 2x3")))
    made = flat_names(unickpt.load(tmp_path / "f", rules=Rules.load(tmp_path / "my.rules")))
    assert {name: x.shape for name, x in made.items()} == {"a.w": (2, 3), "b.w": (3, 2)}


def test_one_of_some_names(tmp_path: Path) -> None:
    rules = "{m...}/{n=q|k}_proj/w [i o] <-> {m...}.{n}.w [o i]\n{m...}/v_proj/w <-> {m...}.v.w"
    made = load(tmp_path / "c", rules, "a/q_proj/w 2x3, b/k_proj/w 4x5, b/v_proj/w 2x3")
    assert {name: x.shape for name, x in made.items()} == {
        "a.q.w": (3, 2), "b.k.w": (5, 4), "b.v.w": (2, 3),
    }  # fmt: skip
    unickpt.save(tmp_path / "d", flat_tree(made))
    back = unickpt.load(
        tmp_path / "d",
        rules=Rules.parse(
            rules + "\nz/w <-> drop",
        ).inverse,
        strict=False,
    )
    assert flat_names(back).keys() == {"a/q_proj/w", "b/k_proj/w", "b/v_proj/w"}


def test_not_strict_leaves_the_rest_be(tmp_path: Path) -> None:
    rules = "a [l i o] <-> w.{l} [o i]\nx <-> y\noptional n <-> m"
    like = {"w.1": np.zeros((5, 3), np.float32), "z": np.full(2, 7.0)}
    unickpt.save(tmp_path / "c", flat_tree(arrays("a 4x3x5, x 2, other 3")))
    found = unickpt.load(tmp_path / "c", like, rules=Rules.parse(rules), strict=False)
    assert np.array_equal(found["w.1"], arrays("a 4x3x5")["a"][1].T)
    assert np.array_equal(found["z"], [7.0, 7.0])


def test_names_of_both_sides_tell_rules_apart(tmp_path: Path) -> None:
    """From torch, `weight` may be a kernel, a scale or an embedding: what is asked for tells."""
    rules = Rules.parse("""
        optional {m...}/kernel [i o] <-> {m...}.weight [o i]
        optional {m...}/embedding [v e] <-> {m...}.weight [v e]
        optional {m...}/scale [e] <-> {m...}.weight [e]
    """)
    stored = {"up.weight": np.ones((5, 3)), "wte.weight": np.ones((7, 3)), "n.weight": np.ones(3)}
    unickpt.save(tmp_path / "c", stored)
    like = {
        "up": {"kernel": np.empty((3, 5))},
        "wte": {"embedding": np.empty((7, 3))},
        "n": {"scale": np.empty(3)},
    }
    assert flat_names(unickpt.load(tmp_path / "c", like, rules=rules.inverse)).keys() == {
        "up/kernel", "wte/embedding", "n/scale",
    }  # fmt: skip
    with pytest.raises(RuleError, match=r"'up.weight' \(and 1 more\) is taken twice"):
        unickpt.load(tmp_path / "c", rules=rules.inverse)


def test_a_cast_is_asked_for(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"a": np.arange(3, dtype=np.float32), "n": np.int64(3)})
    rules = Rules.parse("a [e] <-> b [e]\nn <-> m")
    like = {"b": np.empty(3, np.float16), "m": np.zeros((), np.int64)}
    with pytest.raises(LoadMismatch, match=r"b +dtype +float32 +float16"):
        unickpt.load(tmp_path / "c", like, rules=rules)
    found = unickpt.load(tmp_path / "c", like, rules=rules, cast=True)
    assert found["b"].tolist() == [0, 1, 2]
    like["m"] = np.zeros((), np.float32)
    with pytest.raises(LoadMismatch, match=r"m +dtype +int64 +float32"):
        unickpt.load(tmp_path / "c", like, rules=rules, cast=True)
    told = Rules.parse("a [e] <-> b [e] as float16\nn [] <-> m [] as float32")
    assert unickpt.load(tmp_path / "c", like, rules=told)["m"] == 3


def test_pieces_of_different_dtypes(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"a": np.ones(2, np.float16), "c": np.ones(3, np.float32)})
    with pytest.raises(RuleError, match="'b' is made from arrays of float16 and float32; add `as`"):
        unickpt.load(tmp_path / "c", rules=Rules.parse("a [q], c [k] <-> b [(q + k)]"))
    rules = Rules.parse("a [q], c [k] <-> b [(q + k)] as float32")
    assert unickpt.load(tmp_path / "c", rules=rules)["b"].tolist() == [1] * 5


@pytest.mark.parametrize(("value", "dtype"), [(2**24 + 1, "float32"), (300, "int8")])
def test_integers_come_through_exactly_or_not_at_all(
    value: int, dtype: str, tmp_path: Path
) -> None:
    unickpt.save(tmp_path / "c", {"array": np.array([value]), "value": value})
    for name, axes in (("array", "[e]"), ("value", "")):
        other = "value" if name == "array" else "array"
        rules = Rules.parse(f"{name} {axes} <-> b {axes} as {dtype}\n{other} <-> drop")
        with pytest.raises(LoadMismatch, match=rf"'{name}'.*{dtype}"):
            unickpt.load(tmp_path / "c", {"b": np.zeros([1] * bool(axes), dtype)}, rules=rules)


def test_arithmetic_is_for_floats(tmp_path: Path) -> None:
    """In float32, large integers would not be what they were."""
    unickpt.save(tmp_path / "c", {"a": np.array([2**24 + 1])})
    with pytest.raises(RuleError, match="'a' is int64: arithmetic is for floats"):
        unickpt.load(tmp_path / "c", rules=Rules.parse("a [e] + 1 <-> b [e]"))


@pytest.mark.parametrize(("value", "dtype"), [(0.5, "bool"), (1 + 2j, "float32"), (2.5, "int8")])
def test_no_cast_loses_what_a_value_is(value: complex, dtype: str, tmp_path: Path) -> None:
    rules = Rules.parse(f"a [e] <-> b [e] as {dtype}")
    unickpt.save(tmp_path / "lost", {"a": np.array([1, value])})
    with pytest.raises(LoadMismatch, match="which does not hold all its values"):
        unickpt.load(tmp_path / "lost", rules=rules)
    unickpt.save(tmp_path / "kept", {"a": np.array([0, 1]).astype(type(value))})
    assert unickpt.load(tmp_path / "kept", rules=rules)["b"].tolist() == [0, 1]


def test_what_is_left_out_must_be_what_the_rule_says(tmp_path: Path) -> None:
    rules = Rules.parse("w <-> w\n0 <-> bias [e]\n").inverse
    unickpt.save(tmp_path / "zero", {"w": np.ones(2), "bias": np.zeros(5)})
    assert unickpt.load(tmp_path / "zero", rules=rules).keys() == {"w"}
    unickpt.save(tmp_path / "one", {"w": np.ones(2), "bias": np.array([0, 0, 1e-9])})
    with pytest.raises(LoadMismatch, match="'bias' is not 0 everywhere, so leaving it out would"):
        unickpt.load(tmp_path / "one", rules=rules)


def test_names_of_one_array_must_hold_the_same(tmp_path: Path) -> None:
    rules = Rules.parse("embed [v e] <-> wte [v e] = head [v e]").inverse
    wte = np.arange(6.0).reshape(3, 2)
    unickpt.save(tmp_path / "tied", {"wte": wte, "head": wte})
    unickpt.save(tmp_path / "equal", {"wte": wte, "head": wte.copy()})
    other_grid = unickpt.SaveOptions(chunk_bytes=16)
    unickpt.save(tmp_path / "one", {"wte": wte}, options=other_grid)
    for name in ("tied", "equal", "one"):
        assert np.array_equal(unickpt.load(tmp_path / name, rules=rules)["embed"], wte)
    unickpt.save(tmp_path / "untied", {"wte": wte, "head": wte + 1})
    with pytest.raises(LoadMismatch, match="'wte' and 'head' are to become one, but differ"):
        unickpt.load(tmp_path / "untied", rules=rules)


def test_a_tied_array_is_one_again(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"embed": np.ones((3, 2))})
    rules = Rules.parse("embed [v e] <-> wte [v e] = head [v e]")
    found = unickpt.load(tmp_path / "c", rules=rules)
    assert found["wte"] is found["head"]
    apart = {"wte": np.zeros((3, 2)), "head": np.zeros((3, 2))}
    unickpt.load(tmp_path / "c", apart, rules=rules)
    assert (apart["wte"] == 1).all()
    assert (apart["head"] == 1).all()


def test_names_of_one_array_with_other_axes(tmp_path: Path) -> None:
    """A head that is the transposed embedding: an array of its own, with the same numbers."""
    rules = Rules.parse("embed [v e] = head/kernel [e v] * 2 <-> wte [v e] = lm_head [v e]")
    wte = np.arange(9.0).reshape(3, 3)
    unickpt.save(tmp_path / "torch", {"wte": wte, "lm_head": wte})
    made = unickpt.load(tmp_path / "torch", rules=rules.inverse)
    assert np.array_equal(made["embed"], wte)
    assert np.array_equal(made["head"]["kernel"], wte.T / 2)
    unickpt.save(tmp_path / "jax", made)
    assert np.array_equal(unickpt.load(tmp_path / "jax", rules=rules)["lm_head"], wte)
    made["head"]["kernel"][1, 2] += 1
    unickpt.save(tmp_path / "other", made)
    with pytest.raises(LoadMismatch, match="'embed' and 'head/kernel' are to become one, but"):
        unickpt.load(tmp_path / "other", rules=rules)


def test_a_further_name_is_left_to_a_rule_of_its_own(tmp_path: Path) -> None:
    """One set of rules for tied and for untied models."""
    rules = Rules.parse("""
        embed [v e]         <-> wte [v e] = head [v e]
        optional out [e v]  <-> head [v e]
    """)
    wte, head = np.arange(6.0).reshape(3, 2), np.arange(6.0, 12).reshape(3, 2)
    unickpt.save(tmp_path / "tied", {"embed": wte})
    made = unickpt.load(tmp_path / "tied", rules=rules)
    assert made["wte"] is made["head"]
    unickpt.save(tmp_path / "untied", {"embed": wte, "out": head.T})
    made = unickpt.load(tmp_path / "untied", rules=rules)
    assert np.array_equal(made["wte"], wte)
    assert np.array_equal(made["head"], head)
    unickpt.save(tmp_path / "back", made)
    like = {"embed": np.empty((3, 2)), "out": np.empty((2, 3))}
    back = unickpt.load(tmp_path / "back", like, rules=rules.inverse)
    assert np.array_equal(back["out"], head.T)
    tied = {"embed": np.empty((3, 2))}
    for strict in (True, False):
        with pytest.raises(LoadMismatch, match="'wte' and 'head' are to become one, but differ"):
            unickpt.load(tmp_path / "back", tied, rules=rules.inverse, strict=strict)
    unickpt.save(tmp_path / "one", {"wte": wte, "head": wte})
    assert unickpt.load(tmp_path / "one", rules=rules.inverse).keys() == {"embed"}
    unickpt.load(tmp_path / "one", like, rules=rules.inverse)
    assert np.array_equal(like["out"], wte.T)


def test_constants_for_arrays_that_captures_name(tmp_path: Path) -> None:
    """Without `like` nothing tells which there are; two that are the same do no harm."""
    unickpt.save(tmp_path / "c", {"a": {"scale": np.ones(3)}})
    text = "{m...}/scale <-> {m...}.weight\ndrop 0 <-> {m...}.count [] as int64\n"
    rules = Rules.parse(text + text.splitlines()[1])
    assert unickpt.load(tmp_path / "c", rules=rules).keys() == {"a.weight"}
    like = {"a.weight": np.zeros(3), "a.count": np.int64(5)}
    assert unickpt.load(tmp_path / "c", like, rules=rules)["a.count"] == 0


def test_counts_of_all_parameters_must_agree(tmp_path: Path) -> None:
    rules = Rules.parse(
        "a <-> b\nc <-> d\nlift count as int32 <-> state/{p}/step as float32"
    ).inverse
    state = {"b": {"step": np.float32(3)}, "d": {"step": np.float32(3)}}
    unickpt.save(tmp_path / "c", {"b": np.ones(2), "d": np.ones(3), "state": state})
    assert unickpt.load(tmp_path / "c", rules=rules)["count"] == 3
    state["d"]["step"] = np.float32(4)
    unickpt.save(tmp_path / "e", {"b": np.ones(2), "d": np.ones(3), "state": state})
    with pytest.raises(LoadMismatch, match="'state/b/step' and 'state/d/step' are to become one"):
        unickpt.load(tmp_path / "e", rules=rules)


@pytest.mark.parametrize("rules", ["my.rules", "a <-> b", ["a <-> b"], {}])
def test_rules_are_rules(rules: Any, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"a": np.ones(2)})
    for action in (
        lambda: unickpt.load(tmp_path / "c", rules=rules),
        lambda: unickpt.load(tmp_path / "c", {"b": np.ones(2)}, rules=rules),
        lambda: unickpt.convert(tmp_path / "c", tmp_path / "d", rules=rules),
        lambda: unickpt.diff(tmp_path / "c", tmp_path / "c", rules=rules),
    ):
        with pytest.raises(
            TypeError, match=r"rules is of type (str|list|dict); make it with unickpt"
        ):
            action()


def test_values_go_where_they_are_asked_for(tmp_path: Path) -> None:
    """A step count is a number here, and an array there."""
    unickpt.save(tmp_path / "c", {"step": 7, "rng": unickpt.PerProcess(5), "name": "run"})
    rules = Rules.parse("step <-> count\nrng <-> state/rng\nname <-> name")
    found = unickpt.load(tmp_path / "c", rules=rules)
    assert (found["count"], found["state"]["rng"].values, found["name"]) == (7, (5,), "run")
    like = {"count": np.zeros((), np.int32), "state": {"rng": unickpt.PerProcess()}, "name": ""}
    found = unickpt.load(tmp_path / "c", like, rules=rules)
    assert found["count"].dtype == np.int32
    assert (found["count"], found["state"]["rng"].value, found["name"]) == (7, 5, "run")
    with pytest.raises(LoadMismatch, match=r"count +kind +plain int 7 +float32\[\]"):
        unickpt.load(tmp_path / "c", {**like, "count": np.zeros((), np.float32)}, rules=rules)


def test_functions(tmp_path: Path) -> None:
    """A function of two arrays of another shape, box by box, and back."""
    from unickpt import Function
    from unickpt.types import Box

    asked: list[str] = []

    def outer(box: Box, x: Any, y: Any) -> Any:
        asked.append(str(box))
        return x[:, None] * y

    def rows_and_columns(box: Box, *shapes: Any) -> list[Box]:
        return [Box(box.start[:1], box.stop[:1]), Box(box.start[1:], box.stop[1:])]

    function = Function(outer, rows_and_columns, lambda x, y: (*x, *y))
    text = "{m}/x [i], {m}/y [o] <-> {m} [i o] via f"
    rules = Rules.parse(text, functions={"f": function})
    x, y = np.arange(5.0), np.arange(7.0)
    unickpt.save(tmp_path / "c", {"a": {"x": x, "y": y}, "b": {"x": y, "y": x}})
    found = unickpt.load(tmp_path / "c", rules=rules)
    assert np.array_equal(found["a"], np.outer(x, y))
    assert np.array_equal(found["b"], np.outer(y, x))
    part = unickpt.types.LocalFragments((5, 7), [(Box((1, 2), (3, 6)), np.empty((2, 4)))])
    unickpt.load(tmp_path / "c", {"a": part}, rules=rules, strict=False)
    assert np.array_equal(part.fragments[0][1], np.outer(x, y)[1:3, 2:6])
    assert asked[-1] == "[1:3, 2:6]"
    unickpt.convert(tmp_path / "c", tmp_path / "d", rules=rules)
    assert np.array_equal(unickpt.load(tmp_path / "d")["b"], np.outer(y, x))
    wrong = Function(lambda box, x, y: x, rows_and_columns, function.shape)
    with pytest.raises(LoadMismatch, match=r"array 'a': the function made \[5\] for the box"):
        unickpt.load(tmp_path / "c", rules=Rules.parse(text, functions={"f": wrong}))


def test_functions_without_a_region_move_axes(tmp_path: Path) -> None:
    """Of every element: through transposes, stacked layers, shards, two inputs, and back."""
    from unickpt import Function
    from unickpt.types import Box

    log = Function(lambda box, x: np.log(x))
    negexp = Function(lambda box, x: -np.exp(x), inverse=Function(lambda box, x: np.log(-x)))
    add = Function(lambda box, x, y: x + y)
    text = """
        ssm/A [l h n] <-> layers.{l}.A [n h] via negexp
        w/{a|b} [i o] <-> w [({a|b} o) i] via negexp
        u [i o], v [o i] <-> uv [o i] via add
    """
    rules = Rules.parse(text, functions={"negexp": negexp, "add": add})
    rng = np.random.default_rng(1)
    stored = {"ssm/A": rng.random((3, 5, 7)), "w/a": rng.random((4, 6)), "w/b": rng.random((4, 6))}
    stored |= {"u": rng.random((2, 3)), "v": rng.random((3, 2))}
    unickpt.save(tmp_path / "c", flat_tree(stored), options=unickpt.SaveOptions(chunk_bytes=64))
    made = unickpt.load(tmp_path / "c", rules=rules)
    for i in range(3):
        assert np.array_equal(made[f"layers.{i}.A"], -np.exp(stored["ssm/A"][i].T))
    assert np.array_equal(made["w"], -np.exp(np.concatenate([stored["w/a"].T, stored["w/b"].T])))
    assert np.array_equal(made["uv"], stored["u"].T + stored["v"])
    part = unickpt.types.LocalFragments((12, 4), [(Box((5, 1), (9, 3)), np.empty((4, 2)))])
    unickpt.load(tmp_path / "c", {"w": part}, rules=rules, strict=False)
    assert np.array_equal(part.fragments[0][1], made["w"][5:9, 1:3])

    one_way = Rules.parse(text.replace("add", "negexp").replace("u [i o], ", ""),
                          functions={"negexp": negexp})  # fmt: skip
    unickpt.save(tmp_path / "d", unickpt.load(tmp_path / "c", rules=one_way, strict=False))
    back = flat_names(unickpt.load(tmp_path / "d", rules=one_way.inverse))
    assert all(np.allclose(back[name], stored[name]) for name in back)
    with pytest.raises(RuleError, match="element by element, so all of its arrays need the"):
        Rules.parse("a [i o] <-> b [i] via log", functions={"log": log})
    regions = Function(log.apply, region=lambda box, shape: [box], inverse=log)
    with pytest.raises(RuleError, match="makes one array, so names cannot contain axes"):
        Rules.parse("a [l i] <-> b.{l} [i] via f", functions={"f": regions})
    with pytest.raises(RuleError, match="must both have region=, or neither"):
        _ = Rules.parse("a <-> b via f", functions={"f": regions}).inverse


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("a [i o] <-> b [o i] via f", r"makes 'b' of shape \[2, 3\]: o has 2 elements here, but 3"),
        (
            "a [i o] <-> b [(i o)] via f",
            r"'b' of shape \[2, 3\], but the rule gives it the axes \[\(i o\)\]",
        ),
        (
            "a [i o q] <-> b [q] via f",
            r"'a' is float64\[2, 3\], but the rule gives it the axes \[i o q\]",
        ),
    ],
)
def test_what_a_function_makes_has_the_axes_that_the_rule_says(
    rule: str, message: str, tmp_path: Path
) -> None:
    from unickpt import Function

    unickpt.save(tmp_path / "c", {"a": np.ones((2, 3))})
    f = Function(lambda box, x: x, region=lambda box, shape: [box])
    with pytest.raises(RuleError, match=message):
        unickpt.load(tmp_path / "c", rules=Rules.parse(rule, functions={"f": f}))
    assert unickpt.load(tmp_path / "c", rules=Rules.parse("a <-> b via f", functions={"f": f}))


def test_a_function_makes_the_dtype_that_is_due(tmp_path: Path) -> None:
    from unickpt import Function

    big = np.arange(4, dtype=np.int64) << 40
    unickpt.save(tmp_path / "c", {"n": big})

    def load(like: Any = None, suffix: str = "", odd: int = 0, **options: Any) -> Any:
        halve = Function(lambda box, x: (x + odd) / 2 if suffix != "same" else x)
        text = f"n [k] <-> n [k] {suffix if suffix != 'same' else ''} via halve"
        rules = Rules.parse(text, functions={"halve": halve})
        return unickpt.load(tmp_path / "c", like, rules=rules, **options)["n"]

    with pytest.raises(LoadMismatch, match="'n': the function made float64, which int64 does not"):
        load(odd=1)
    assert np.array_equal(load(), big // 2)  # every value came through
    assert load().dtype == np.int64
    assert np.array_equal(load(suffix="as float64", odd=1), big / 2 + 0.5)
    with pytest.raises(LoadMismatch, match="'n': made as int64, requested as int32, which does"):
        load({"n": np.zeros(4, np.int32)}, "same", cast=True)


def test_what_a_function_reads_is_verified_as_the_rest(tmp_path: Path) -> None:
    from unickpt import CheckpointCorrupt, Function, LoadOptions

    x = np.arange(1 << 12, dtype=np.float32)
    unickpt.save(tmp_path / "c", {"x": x})
    data = next(
        f for f in (tmp_path / "c").rglob("*") if f.is_file() and x.tobytes() in f.read_bytes()
    )
    data.write_bytes(data.read_bytes().replace(x[100:110].tobytes(), x[200:210].tobytes()))
    rules = Rules.parse("x [k] <-> y [k] via f", functions={"f": Function(lambda box, x: x)})
    with pytest.raises(CheckpointCorrupt, match="array 'x'"):
        unickpt.load(tmp_path / "c", rules=rules)
    found = unickpt.load(tmp_path / "c", rules=rules, options=LoadOptions(verify=False))
    assert found["y"][100] == 200


@pytest.mark.parametrize(
    ("constant", "dtype"), [("0.5", "int64"), ("300", "int8"), ("2", "bool"), ("1e9", "float16")]
)
def test_a_constant_must_be_of_the_dtype(constant: str, dtype: str, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"a": np.ones(2), "b": np.zeros(3, dtype)})
    made = Rules.parse(f"a <-> a\nb <-> drop\n{constant} <-> c [k] as {dtype}  k=3")
    with pytest.raises(RuleError, match=rf"'c' is {dtype}\[3\], and {dtype} cannot hold"):
        unickpt.load(tmp_path / "c", rules=made)
    read = Rules.parse(f"a <-> a\nb <-> {constant}")
    with pytest.raises(RuleError, match=rf"'b' is {dtype}\[3\], and {dtype} cannot hold"):
        unickpt.load(tmp_path / "c", rules=read)


def test_constants_for_plain_values(tmp_path: Path) -> None:
    unickpt.save(
        tmp_path / "c", {"a": np.ones(2), "step": 7, "on": True, "rng": unickpt.PerProcess(1)}
    )
    base = "a <-> a\nrng <-> drop\n"
    like = {"a": np.zeros(2), "count": 3, "rate": 0.5, "off": True}
    rules = Rules.parse(base + "step <-> 7\non <-> 1\n7 <-> count\n0.25 <-> rate\n0 <-> off")
    found = unickpt.load(tmp_path / "c", like, rules=rules)
    assert (found["count"], found["rate"], found["off"]) == (7, 0.25, False)
    with pytest.raises(LoadMismatch, match="'step' is not 8 everywhere, so leaving it out would"):
        unickpt.load(tmp_path / "c", rules=Rules.parse(base + "step <-> 8\non <-> drop"))
    with pytest.raises(RuleError, match="'rng' is a PerProcess, which a constant cannot"):
        unickpt.load(tmp_path / "c", rules=Rules.parse("a<->a\nstep<->step\non<->on\nrng <-> 1"))


def test_zero_size_and_0d_arrays(tmp_path: Path) -> None:
    stored = {"none": np.zeros((0, 3)), "one": np.float32(2), "l": np.zeros((0, 3))}
    unickpt.save(tmp_path / "c", stored)
    rules = Rules.parse("none [i o] <-> none [o i]\none [] * 2 <-> one [1]\nl [l e] <-> l.{l} [e]")
    found = unickpt.load(tmp_path / "c", rules=rules)
    assert found["none"].shape == (3, 0)
    assert found["one"].tolist() == [4]
    assert found.keys() == {"none", "one"}


@pytest.mark.parametrize(
    ("name", "text"),
    [("w", "b.{2-l} [o] <-> w [l o]"), ("c.5", "b.{2-l} [o i] <-> c.{l} [o i]")],
)
def test_no_name_gets_a_number_below_zero(name: str, text: str, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "x", {name: np.ones((5, 2))})
    rules = Rules.parse(text)
    with pytest.raises(RuleError, match=r"l is [45], and a number in b\.\{2-l\} below 0"):
        unickpt.load(tmp_path / "x", rules=rules.inverse)


def test_one_of_a_pair_is_missing(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "x", {"a.w1": np.ones((2, 3))})
    like = {"a.gate": np.zeros((2, 3)), "a.down": np.zeros((3, 2))}
    rules = Rules.parse("a.{w1|w2} [o i] <-> a.{gate|down} [o i]")
    with pytest.raises(RuleError, match=r"it needs 'a\.w2', which is not stored") as raised:
        unickpt.load(tmp_path / "x", like, rules=rules)
    assert "all of its names together" not in str(raised.value)
