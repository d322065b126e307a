"""Rules as an enemy would write them: bounded in time and memory, and errors of ours."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unickpt
from unickpt import Rules
from unickpt.arrays.names import matches
from unickpt.backends.deepspeed.patterns import BadPattern, PatternTable
from unickpt.errors import RuleError, RuleSyntaxError
from unickpt.rules.ast import Enumeration, Linear, Name, SourcePosition, Text
from unickpt.rules.name_patterns import Pattern


def _planned(path: Path, text: str, name: str) -> None:
    unickpt.save(path, {name: np.zeros((2, 2), "f4")})
    unickpt.load(path, rules=Rules.parse(text))


_CAPTURES = st.one_of(
    st.just(Linear((("l", 1),))),
    st.sampled_from([("a", "aa"), ("aa", "a", "1"), ("a.a", "a")]).map(
        lambda options: Enumeration("x", options, True)
    ),
    st.sampled_from([("a", "aa"), ()]).map(lambda options: Text("t", False, options)),
    st.just(Text("m", True)),
)
_LITERALS = st.text("a1/.", min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(_LITERALS, _CAPTURES), min_size=1, max_size=7),
    st.text("aa1110/.", max_size=12),
)
def test_a_name_is_divided_as_the_regular_expression_divides_it(
    items: list[object], name: str
) -> None:
    pattern = Pattern(Name(tuple(items), SourcePosition("", 1, 1, "")))  # type: ignore[arg-type]
    found = pattern._regex.fullmatch(name)
    assert pattern._divided(name) == (None if found is None else list(found.groups()))


_MANY = "a".join(f"{{x{i}:a|aa}}" for i in range(24))
_DIGITS = "1".join(f"{{{c}}}" for c in "abcdefghijklmn")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"w{_MANY} [i o] <-> v{_MANY} [i o]", "w" + "a" * 60 + "!"),
        (f"w{_DIGITS} [i p] <-> v [i p {' '.join('abcdefghjklmn')} i0]", "w" + "1" * 56 + "!"),
        (f"w [{' '.join(f'(a{i} + b{i})' for i in range(24))}] <-> v [x]", "w"),
        ("w [i o] <-> w [i o]\n0 <-> bias{l} [o]   o=1, l=100000000", "w"),
        ("w [e i] * 9**99999999 <-> w [e i]", "w"),
        ("w [e i] * e**1e308 <-> w [e i]", "w"),
        ("w [e i] / e**-1e308 <-> w [e i]", "w"),
        ("w [l o] <-> v [l o]   l=" + "9" * 5000, "w"),
        ("w [l o] <-> v{" + "9" * 5000 + "*l} [o]", "w"),
        ("w [" + "(" * 20000 + "a" + ")" * 20000 + " b] <-> w [a b]", "w"),
        ("w [" + "- " * 20000 + "a b] <-> w [a b]", "w"),
        ("w [" + " ".join(f"a{i}" for i in range(20000)) + "] <-> w [a b]", "w"),
    ],
    ids=lambda text: text[:20],
)
def test_rules_that_would_take_long_are_refused(tmp_path: Path, text: str, name: str) -> None:
    with pytest.raises(RuleError, match=r"line 1|line 2|rules"):
        _planned(tmp_path / "c", text, name)


def _load(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.rules").write_text(text)
    Rules.load(folder / "a.rules")


def test_files_that_include_ever_more_are_refused(tmp_path: Path) -> None:
    files = {f"d{i}": f"include d{i + 1}.rules\ninclude d{i + 1}.rules\n" for i in range(28)}
    with pytest.raises(RuleSyntaxError, match="again and again"):
        _load(tmp_path, a="include d0.rules", **files, d28="a [i] <-> a [i]")


def test_files_that_include_each_other_too_deep_are_refused(tmp_path: Path) -> None:
    files = {f"c{i}": f"include c{i + 1}.rules" for i in range(50)}
    with pytest.raises(RuleSyntaxError, match="more than 30 deep"):
        _load(tmp_path, a="include c0.rules", **files, c50="a [i] <-> a [i]")


def test_only_regular_files_relative_to_the_file_are_included(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.rules")
    with pytest.raises(RuleSyntaxError, match="not a regular file"):
        _load(tmp_path, a="include pipe.rules")
    with pytest.raises(RuleSyntaxError, match="is absolute"):
        _load(tmp_path, a="include /dev/zero")
    (tmp_path / "zero.rules").symlink_to("/dev/zero")
    with pytest.raises(RuleSyntaxError, match="not a regular file"):
        _load(tmp_path, a="include zero.rules")
    with pytest.raises(RuleSyntaxError, match="NUL"):
        _load(tmp_path, a='include "a\0b.rules"')


def test_what_is_in_an_included_file_of_another_kind_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root:secret:0:0\n")
    with pytest.raises(RuleSyntaxError, match="line 1 is wrong") as raised:
        _load(tmp_path, a="include passwd")
    assert "secret" not in str(raised.value)


def test_a_pattern_of_names_with_many_wildcards_takes_no_longer() -> None:
    assert not matches("/".join(["**", "a"] * 12) + "/b", "/".join(["a"] * 40))
    assert not matches("*a" * 14 + "b", "a" * 200)
    assert matches("a*b*/**/c*", "axbby/d/e/cc")
    assert matches("*ab*b", "xabab")
    assert not matches("ab*b", "ab")


@pytest.mark.parametrize("pattern", [r"(a+|\\)+$", r"(?x)(a+) +$", r"(a+(?#))\)+)+$"])
def test_repeats_within_repeats_are_found_behind_escapes_and_comments(pattern: str) -> None:
    with pytest.raises(BadPattern, match="too long"):
        PatternTable({pattern: None})
