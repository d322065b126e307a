"""Rule files that are wrong whatever is stored: each error shows the line, and where in it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt import Function, Rules
from unickpt.errors import RuleError, RuleSyntaxError, RuleWarning

# The text of a rule, where the caret stands (as the text from there on), and the message.
WRONG = [
    ("a [i o] <-> b [o x]", "a [i o]", "on this side only: i, on the other side only: x"),
    ("a [i i] <-> b [i]", "i] <->", "axis 'i' is used twice"),
    ("a/{l} [l e] <-> b [l e]", "l e] <->", "axis 'l' is used in the name and in the axes"),
    ("a [i o <-> b [i o]", "<->", "expected an axis"),
    ("a [i o <-> b [o i]", "<->", "expected an axis, or `]` at the end of the axes"),
    ("a i o] <-> b", "i o]", "expected `<->` between the two sides; write axes in brackets"),
    ("a [i o] -> b", "-> b", "expected `<->` between the two sides: write it in place of `->`"),
    ("a [i o] => b", "=> b", "write it in place of `=>`"),
    ("a [i o] ↔ b", "↔ b", "write it in place of `↔`"),
    ("a: b", "b", "write it in place of `:`"),
    ("a = b", "", "`=` joins several names of one array"),
    ("mine.rules", "", "Rules.load(file) reads a file of rules"),
    ("a/(.*)/w <-> b", "(.*)", "regular expressions are not supported"),
    ("a/<l>/w <-> b", "<l>", "write a capture in braces, such as {l}"),
    ("a <-> b; c <-> d", "c <->", "write each rule on a line of its own"),
    ("a [i o] <-> b [o i] // why", "// why", "a comment begins with `#`"),
    ("a [i, o] <-> b [o i]", ", o]", "axes are separated by spaces"),
    ("a [d-out i] <-> b [i d]", "-out", "put a space before `-`"),
    ("*/w [i] <-> b [i]", "*/w", "`*` has no meaning in a name"),
    ("a/[x] [l] <-> b [l]", "[l] <->", "put a name with brackets in quotes"),
    ("{m...}_norm <-> {m...}.norm", "{m...}_", "{m...} matches whole components"),
    ("a_{m...}/w <-> {m...}.w", "a_{m", "write {m...}/{n}"),
    ("{x...}/w <-> a.{x}.w", "a.{x}", "'x' matches one component in one name, and any"),
    ("a [_x i] <-> b [i]", "_x i", "the name of an axis begins with a letter"),
    ("include flax under a/{l}/ <-> b.", "{l}", "a prefix cannot contain captures"),
    ("{m=a|b}/w <-> {n}.w", "{m=", "{n} is in another name"),
    ("{m:a|b}/w [i] <-> {m}.w [i]", "{m:", "'m' is an enumeration, which numbers arrays"),
    ("{m=a|b}/w <-> {m=b|a}.w", "{m=b", "'m' has other options elsewhere"),
    ("{m=a|a}/w <-> {m}.w", "a|a}", "a name occurs twice in the enumeration"),
    ("a <->", "", "expected a name"),
    ("<-> a", "<->", "a line before this one may lack its second side"),
    ("a [q + k] <-> b [q], c [k]", "+ k]", "write concatenated pieces in parentheses: `(q + k)`"),
    ("a [(q + k)] <-> b [q], c [q]", "c [q]", "two pieces have the axes q"),
    ("a [(q + )] <-> b [q]", "(q", "a piece of the sum is empty"),
    ("a [(q] <-> b [q]", "(q", "this parenthesis is not closed"),
    ("a/{m}/w [e] <-> b [e]", "b [e]", "{m} is in another name of the rule"),
    ("a [e] <-> b", "b", "this name has no axes"),
    ("a + 1 <-> b", "+ 1", "arithmetic needs axes: write `a [...] + ...`"),
    ("a [e] * 0 <-> b [e]", "a [e]", "multiplication by 0 cannot be undone"),
    ("a [e] / 0**-1 <-> b [e]", "0**", "this divides by zero"),
    ("a [e] <-> b [e] as floaty", "floaty", "unknown dtype 'floaty'"),
    ("a [l e] <-> b.{l}.c.{l} [e]", "b.{l}", "capture 'l' occurs twice in one name"),
    ("{a}{b} <-> {a}.{b}", "{b}", "two captures need text between them"),
    ("{a}_{b} <-> {a}.{b}", "{b} <->", "{a} and {b} are in one component"),
    ("{a...}/{b...} <-> {a...}/{b...}", "{b...} <->", "{a...} and {b...} both match any number"),
    ("a [(... e)] <-> b [... e]", "(...", "`...` cannot be in parentheses"),
    ("a [3 e] <-> b [e]", "3 e]", "the only number that can be an axis is 1"),
    ("a [-(x y)] <-> b [x y]", "-(x", "only an axis can be reversed"),
    ("a/{6*b-j} [e] <-> c [b j e]", "6*b-j}", "adds multiples of axes"),
    ("a {l <-> b", "{l", "expected `<->`"),
    ("a{l <-> b", "{l", "this capture has no closing `}`"),
    ("{a|a} [e] <-> b [e]", "a|a", "a name occurs twice in the enumeration"),
    ("{x:a|b} [e] <-> b [x e]  x=3", "{x:", "axis 'x' has 2 names, not 3"),
    ('"a <-> b', '"a', "this quoted name has no closing quote"),
    ("a [e] <-> b [e] f=2", "a [e]", "the rule has no axis 'f'"),
    ("a [e] <-> b [e] e=2 e=3", "e=3", "the size of 'e' is given twice"),
    ("a [e] <-> b [e] x", "x", "this is not expected here"),
    ("a [e] <-> b [e] via f", "a [e]", "no function 'f': give it"),
    ("a [e] = b [e f] <-> c [e]", "b [e f]", "names joined by `=` must have the same axes"),
    ("a [(e + _)] = b [(_ + e)] <-> c [e]", "b [", "must have the same padding"),
    ("0 <-> a [(e + _)]", "a [", "padding (`_`) needs an array on the other side"),
    ("drop <-> drop 0", "drop <->", "neither side names an array"),
    ("lift a <-> b", "lift", "a lift has one capture for the parameter's name"),
    ("lift a/{p} [e] <-> b/{p}", "a/{p}", "a lifted name has no axes of its own"),
    ("lift a/{p} <-> b/{p} law=square2", "square2", "a law is one of value, gradient, square"),
    ("lift a/{p} <-> b/{p} for x <-> y/{p}", "x <->", "this name needs the capture {p}"),
    ("where z=3", "where", "no rule has an axis 'z'"),
    ("include flax z=3", "include", "no rule has an axis 'z'"),
    ("where x", "", "and the size of the axis"),
    ("where x=many", "many", "a size must be an integer"),
    ("include transformers-lama", "include", "Did you mean 'transformers-llama'?"),
    ("include nothing", "include", "neither a preset nor a file"),
    ("convention rope interleaved <-> half", "interleaved", "expected `:`"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "at", "message"), WRONG, ids=[text for text, _, _ in WRONG])
def test_wrong(text: str, at: str, message: str) -> None:
    with pytest.raises(RuleSyntaxError) as raised:
        Rules.parse(f"""
            x [e] <-> y [e]     # a rule before it
            {text}
        """)
    said, line, caret = str(raised.value).rsplit("\n", 2)
    assert message in said
    assert said.startswith("rules, line 3: ")
    assert line == f"  {text}"
    column = len(caret) - 3
    assert text[column:].startswith(at), (text[column:], at)
    assert at or column == len(text)
    assert isinstance(raised.value, RuleError | ValueError)


@pytest.mark.parametrize(
    "text",
    [
        "a/{m}_{n}/w [i o] <-> {m}.{n}.w [o i]",
        "{a...}/x/{b...} <-> {a...}.{b...}",
        '"the {m} {n=up|down}" <-> "{m}/{n}"',
    ],
)
def test_ambiguous_captures_come_with_a_rewrite_that_parses(text: str) -> None:
    with pytest.raises(RuleSyntaxError) as raised:
        Rules.parse(text)
    said, rewritten, *_ = str(raised.value).split("\n")
    assert said.endswith((", as in", ", write"))
    assert rewritten.startswith("    ")
    Rules.parse(rewritten)
    *_, line, caret = str(raised.value).split("\n")
    assert line == f"  {text}"
    assert line[len(caret) - 1 :].startswith(("{n}", "{b...}", "{n=up|down}"))


def test_a_dict_of_renames() -> None:
    renames = {"params/{m...}/kernel [i o]": "{m...}.weight [o i]", "step": "step", "old": "drop"}
    rules = Rules.parse(renames)
    assert rules == Rules.parse("\n".join(f"{a} <-> {b}" for a, b in renames.items()))
    with pytest.raises(RuleSyntaxError, match="line 2: expected an axis") as raised:
        Rules.parse({"a": "b", "c [": "d"})
    assert "c [ <-> d" in str(raised.value)
    with pytest.raises(RuleError, match=r"\{'a': None\}: a rename .* give 'drop'"):
        Rules.parse({"a": None})  # type: ignore[dict-item]
    with pytest.raises(RuleError, match="takes a string or a dict of renames, not list"):
        Rules.parse(["a <-> b"])  # type: ignore[arg-type]


def test_statements_go_on_in_the_next_line() -> None:
    rules = Rules.parse("""
        qkv [e (q + k
                + v)]
          <-> wq [q e],
              wk [k e]   # and the last one
            , wv [v e]
        a   # "quoted # no comment" here
          <-> "b # no comment" = c
    """)
    assert [str(v.pattern.name) for rule in rules.rules for v in rule.exprs] == [
        "qkv", "wq", "wk", "wv", "a", "b # no comment", "c",
    ]  # fmt: skip
    with pytest.raises(RuleSyntaxError) as raised:
        Rules.parse("a [e\n   f g]\n  <-> b [f\n     g h]")
    assert str(raised.value) == (
        "rules, line 1: every axis must be on both sides under one name (on this side "
        "only: e, on the other side only: h); write it in brackets, or in braces "
        "within names if it numbers arrays\n  a [e\n  ^"
    )


def test_words_of_the_notation_are_names_where_they_stand_as_such() -> None:
    rules = Rules.parse("""
        optional <-> lift
        where [e] <-> include [e]
        drop.me/w <-> drop/w
        0/kernel [i o] <-> 0.weight [o i]
    """)
    names = [str(view.pattern.name) for rule in rules.rules for view in rule.exprs]
    assert names == [
        "optional", "lift", "where", "include", "drop.me/w", "drop/w", "0/kernel", "0.weight",
    ]  # fmt: skip


def test_rules_are_written_as_they_were_read() -> None:
    text = "\n".join(
        [
            "a/{m...}/w [(h d) -x (e + _)] + 1 <-> b.{m...} [h d x e] / d**0.5 as bfloat16  h=2",
            "c/{q|k} [i o] <-> c.{x|y} [o i] = d.{x|y} [o i]",
            "k/{q|v} [i o] <-> kv [o {q|v} i]",
            "e/{6*b+j-1} [...] <-> e [b j ...]",
            "f [e] <-> drop",
            "drop 0 <-> g [e]",
            "default i/{n=a|b}/{m...} [...] <-> {m...}.{n=a|b} [...]",
            "1.5 <-> h []",
        ]
    )
    rules = Rules.parse(text)
    assert Rules.parse(str(rules)).rules == rules.rules
    assert str(Rules.parse(str(rules.inverse)).inverse) == str(rules)
    assert rules.inverse.inverse == rules


def test_files_include_files(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "outer.rules").write_text('include "inner/one.rules" under params/ <-> model.\n')
    (tmp_path / "inner" / "one.rules").write_text('include "two.rules" under a/ <-> a.\nw <-> w\n')
    (tmp_path / "inner" / "two.rules").write_text("x [i o] <-> y [o i]\nlift m/{p} <-> v/{p}\n")
    rules = Rules.load(tmp_path / "outer.rules")
    assert str(rules).splitlines() == [
        "params/a/x [i o] <-> model.a.y [o i]",
        "params/w [...] <-> model.w [...]",
        "# not shown: 1 rule of optimizer slots, from `lift` lines",
    ]
    lifted = [str(v.pattern.name) for rule in rules.rules if rule.lifted for v in rule.exprs]
    assert lifted == ["params/a/m/x", "model.a.v/y"]

    (tmp_path / "loop.rules").write_text('a <-> b\ninclude "loop.rules"\n')
    with pytest.raises(RuleSyntaxError, match=r"line 2: 'loop.rules' includes itself"):
        Rules.load(tmp_path / "loop.rules")
    (tmp_path / "binary.rules").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RuleError, match=r"binary\.rules is not UTF-8 text"):
        Rules.load(tmp_path / "binary.rules")
    with pytest.raises(FileNotFoundError):
        Rules.load(tmp_path / "none.rules")


def test_presets_by_name() -> None:
    with pytest.raises(RuleError, match="no preset 'other'; presets are"):
        Rules.preset("other")
    with pytest.raises(RuleError, match="did you mean 'litgpt-llama' or 'maxtext-llama' or"):
        Rules.preset("lama")
    with pytest.raises(RuleError, match="did you mean 'litgpt-qwen3' or 'maxtext-qwen3' or"):
        Rules.preset("transformers-qwen3")  # of another source
    with pytest.raises(RuleError, match=r"no preset '\.\./x'"):
        Rules.preset("../x")


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (
            "{m...}/q/w <-> {m...}.k.weight\n{m...}/k/w <-> {m...}.q.weight",
            1,
        ),
        ("x.{l}.q [e] <-> y/k [l e]\nx.{l}.k [e] <-> y/q [l e]", 1),
        ("a/{q|k} [e] <-> b/{k|q} [e]", 1),
        ("a/{q|k} [e] <-> b/{q|k} [e]", 0),
        ("a/{q|k|v} [e] <-> b/{x|y|z} [e]", 0),
        ("a/q/w <-> b/k/w\nc/k/w <-> d/q/w", 0),  # of different modules
        ("0/q <-> 1/q\n1/q <-> 0/q", 0),
        ("up/kernel <-> down.weight\nout/kernel <-> up.weight", 0),
    ],
)
def test_rules_that_exchange_names_are_asked_about(text: str, asked: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Rules.parse(text)
    assert [w.category for w in caught] == [RuleWarning] * asked
    assert all(Path(w.filename) == Path(__file__) for w in caught)


def test_a_function_without_inverse() -> None:
    one_way = Function(lambda box, x: x)
    rules = Rules.parse("a [e] <-> b [e] via f", functions={"f": one_way})
    with pytest.raises(RuleError, match=r"line 1: a \[e\] <-> b \[e\] via f\n.*'f' has none"):
        _ = rules.inverse
    both = Function(lambda box, x: -x, inverse=one_way)
    rules = Rules.parse("a [e] <-> b [e] via f", functions={"f": both})
    assert rules.inverse.functions["f"].apply is one_way.apply
    assert rules.inverse.inverse.functions["f"].apply is both.apply


WORDS = """a b/c {l} {m...} {2*b+j} {q|k} {x:q|k} {x=q|k} [ ] ( ) <-> , + - * / ** = 1 0 2.5 _ ...
    ? " { } e h=2 as float32 drop optional default lift for law= where include under via convention
    : # \\ é |"""
PIECES = st.sampled_from([*WORDS.split(), " ", "\n", "\t"])


def problem_of(text: str) -> str | None:
    try:
        rules = Rules.parse(text)
    except RuleError as error:
        return str(error)
    assert str(Rules.parse(str(rules))) == str(rules)
    return None


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES, max_size=14))
def test_any_text_is_rules_or_an_error_that_points(pieces: list[str]) -> None:
    problem = problem_of(" ".join(pieces))
    assert problem is None or (problem.startswith("rules, line ") and problem.endswith("^"))


# --- the inverse of an included file --------------------------------------------------------------

OUTER = """
include "inner.rules" inverse under a/ <-> b.
"""
INNER = """
w [o i] + 1 <-> kernel [i o]   i=3
lift opt/mu/{p} <-> state/{p}/avg law=gradient
lift opt/count <-> state/{p}/step
convention rope: half <-> interleaved
include "deep.rules" under x. <-> y/
"""


def test_files_include_the_inverse_of_files(tmp_path: Path) -> None:
    (tmp_path / "outer.rules").write_text(OUTER)
    (tmp_path / "inner.rules").write_text(INNER)
    (tmp_path / "deep.rules").write_text("d <-> e\n")
    (tmp_path / "twice.rules").write_text('include "outer.rules" inverse\n')
    rules = Rules.load(tmp_path / "outer.rules")
    *written, rest = str(rules).splitlines()
    assert written == ["a/kernel [i o] <-> b.w [o i] + 1  i=3", "a/y/e [...] <-> b.x.d [...]"]
    assert rest.startswith("# not shown: ")
    assert rest.endswith(" of optimizer slots, from `lift` lines")
    (convention,) = rules.conventions
    assert (convention.left, convention.right) == ("interleaved", "half")
    slots = [rule for rule in rules.rules if rule.lifted]
    assert any("a/state/kernel/avg" in str(slot.left[0][0].pattern.name) for slot in slots)  # type: ignore[index]
    (shared,) = rules.shared
    assert (shared.left.name, shared.right.single) != (shared.right.name, shared.left.single)
    assert shared.right.single == "b.opt/count"
    twice = Rules.load(tmp_path / "twice.rules")
    assert str(twice) == str(rules.inverse)


def test_a_preset_is_included_as_its_inverse() -> None:
    once = Rules.parse("include transformers-llama inverse under model. <-> params/")
    other = Rules.parse("include transformers-llama under params/ <-> model.")
    assert str(once) == str(other.inverse)
    adam = "include optax-adam {} under {} for {}\nmodel/w <-> params/w\n"
    inverse = adam.format("inverse", "optim/ <-> opt_state/", "model/{p} <-> params/{p}")
    assert len([rule for rule in Rules.parse(inverse).rules if rule.lifted]) == 2


def test_functions_are_not_included_as_their_inverse(tmp_path: Path) -> None:
    (tmp_path / "f.rules").write_text("a [n] <-> b [n] via f\n")
    (tmp_path / "outer.rules").write_text('include "f.rules" inverse\n')
    with pytest.raises(RuleSyntaxError, match=r"cannot be included as its inverse.*calls 'f'"):
        Rules.load(tmp_path / "outer.rules")
