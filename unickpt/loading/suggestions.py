"""Likely causes: why requested names and stored names do not match."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unickpt.arrays.names import natural
from unickpt.trees.wrapper_names import bare

_SEPARATORS = r"%2F|[/.]"
_SHAPE = r"\[(.*)\]"
_MOST_CAUSES = 5
_MOST_NAME = 500  # characters; longer names, which may be hostile, are not compared
_MOST_ALIKE = 8  # stored names with the same ending that are compared with a requested one
# difflib's ratios: a single pair of names is reported only if it looks like a typo, both as a whole
# and in the part that differs. That two names are in the same folder makes them no more alike.
_SIMILAR, _SIMILAR_PARTS = 0.7, 0.5

Tokens = tuple[str, ...]
Change = tuple[Tokens, Tokens]
"""A part of the requested names, and the part of the stored names in its place."""


@dataclass(frozen=True)
class Cause:
    """One change of names, and the leaves that it would fix.

    Arguments:
        text: one line.
        pairs: the requested and the stored name of each leaf.
        under: the intended part of the checkpoint, if all of `like` lies in one.
        moves_axes: whether the suggested fix also makes the shapes equal.
    """

    text: str
    pairs: tuple[tuple[str, str], ...]
    under: str = ""
    moves_axes: bool = False


def causes(
    missing: Mapping[str, str], unexpected: Mapping[str, str], requested_count: int = 0
) -> list[Cause]:
    """The likeliest reasons why leaves are not found; the one with most leaves first.

    Arguments:
        missing: leaves that are requested but not stored: dtype and shape as text, by name.
        unexpected: leaves that are stored but not requested, likewise.
        requested_count: number of all leaves that are requested.
    """
    left, stored_leaves = (
        {n: x for n, x in leaves.items() if len(n) <= _MOST_NAME}
        for leaves in (missing, unexpected)
    )
    likely_causes = list(_flax_and_torch(left, stored_leaves))
    part = _part(left, stored_leaves, max(requested_count, len(missing)))
    if part is not None:
        return [part]
    likely_causes += _in_parts(left, stored_leaves)
    for reduced, text_of in (
        (str, _rules_text),
        (_tokens, _separators_text),
        (bare, _wrappers_text),
    ):
        pairs = tuple(_same_when(reduced, left, stored_leaves))
        if pairs:
            likely_causes.append(Cause(text_of(pairs), pairs))
            _without(left, stored_leaves, pairs)
    while left and stored_leaves and len(likely_causes) < _MOST_CAUSES:
        best = _best_change(left, stored_leaves)
        if best is None:
            break
        likely_causes.append(best)
        _without(left, stored_leaves, best.pairs)
    return likely_causes


_FLAX_NAME = re.compile(r"(|.*/)params/((?:[^/]+/)*)(kernel|embedding|scale|bias)")
_TORCH_NAME = re.compile(r"(|.*/)((?:[^/.]+\.)*)(weight|bias)")
_PREFIX = re.compile(r"[\w./-]*")


def _flax_and_torch(left: dict[str, str], stored_leaves: dict[str, str]) -> Iterator[Cause]:
    """The cause that one side has the names and axes of Flax, the other those of torch; removes
    these leaves from the remaining ones."""
    for flax, torch, inverse in ((stored_leaves, left, ""), (left, stored_leaves, ".inverse")):
        by_module: dict[tuple[str, bool], list[tuple[str, str]]] = {}
        for match in filter(None, map(_FLAX_NAME.fullmatch, flax)):
            key = (match[2].replace("/", "."), match[3] == "bias")
            by_module.setdefault(key, []).append((match[1], match[0]))
        by_prefixes: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for match in filter(None, map(_TORCH_NAME.fullmatch, torch)):
            for under, name in by_module.get((match[2], match[3] == "bias"), [])[:_MOST_ALIKE]:
                if _may_be_one(flax[name], torch[match[0]]):
                    pair = (name, match[0]) if inverse else (match[0], name)
                    by_prefixes.setdefault((under, match[1]), []).append(pair)
        by_prefixes = {
            prefixes: pairs
            for prefixes, pairs in by_prefixes.items()
            if all(map(_PREFIX.fullmatch, prefixes))
            and any(not requested.endswith("bias") for requested, _ in pairs)
        }
        if by_prefixes:
            prefixes = min(
                by_prefixes, key=lambda x: (-len(by_prefixes[x]), len(x[0]), natural(x[0]))
            )
            pairs = sorted(by_prefixes[prefixes], key=lambda pair: pair[0].endswith("bias"))
            has_convolutions = any(left[requested].count(",") > 1 for requested, _ in pairs)
            rules = f"{_flax_rules(*prefixes, has_convolutions)}{inverse}"
            stored_by, requested_by = ("torch", "Flax") if inverse else ("Flax", "torch")
            text = (
                f"stored with the names and axes of {stored_by}, requested with those of "
                f"{requested_by}{_such_as(pairs)}. Load with rules={rules}"
            )
            yield Cause(text, tuple(pairs), moves_axes=True)
            _without(left, stored_leaves, pairs)


def _flax_rules(under: str, torch_under: str, has_convolutions: bool) -> str:
    """The rules between Flax and torch, as Python code."""
    presets = ["flax", "flax-conv"] if has_convolutions else ["flax"]
    if not under and not torch_under and not has_convolutions:
        return 'unickpt.Rules.preset("flax")'
    prefixes = ["under", under, "<->", torch_under] if under or torch_under else []
    lines = [" ".join(filter(None, ["include", preset, *prefixes])) for preset in presets]
    text = "\\n".join(lines)
    return f'unickpt.Rules.parse("{text}")'


_STORED_IN_PARTS = (
    "{name!r} is stored as the arrays that a quantised or sparse tensor consists of: load them "
    "into a tensor of that kind, or make a plain array of them by a rule (Function.dequantised)"
)
_ASKED_IN_PARTS = (
    "{name!r} is stored as a plain array, but the tensor in `like` consists of several: load into "
    "a plain tensor, and quantise that"
)


def _in_parts(left: dict[str, str], stored_leaves: dict[str, str]) -> Iterator[Cause]:
    """The causes that a tensor is stored in parts and requested whole, or the reverse; removes
    these from the remaining ones."""
    for whole, parts, text in (
        (left, stored_leaves, _STORED_IN_PARTS),
        (stored_leaves, left, _ASKED_IN_PARTS),
    ):
        names = [
            name
            for name in whole
            if f"{name}/context/class" in parts or f"{name}/context/layout" in parts
        ]
        if names:
            yield Cause(text.format(name=names[0]), ())
        for name in names:
            del whole[name]
            for part in [part for part in parts if part.startswith(f"{name}/")]:
                del parts[part]


def _without(
    left: dict[str, str], stored_leaves: dict[str, str], pairs: Sequence[tuple[str, str]]
) -> None:
    for requested, stored in pairs:
        left.pop(requested, None)
        stored_leaves.pop(stored, None)


def _part(
    left: Mapping[str, str], stored_leaves: Mapping[str, str], requested_count: int
) -> Cause | None:
    """The cause that `like` is a part of the checkpoint, if most of it lies under one name."""
    lengths = {len(name) for name in left}
    by_container: dict[str, list[tuple[str, str]]] = {}
    for stored in stored_leaves:
        for length in lengths:
            under, name = stored[: len(stored) - length], stored[len(stored) - length :]
            if under.endswith((".", "/")) and name in left:
                by_container.setdefault(under, []).append((name, stored))
    most = max(map(len, by_container.values()), default=0)
    if 2 * most < max(requested_count, 1):
        return None
    likely = [under for under, pairs in by_container.items() if len(pairs) == most]
    best, *other_containers = sorted(
        likely, key=lambda under: (len(_tokens(under)), natural(under))
    )
    also = (
        f", and also under {', '.join(map(repr, other_containers[:_MOST_CAUSES]))}"
        if other_containers
        else ""
    )
    text = (
        f"`like` is stored under {best!r}{also}: pass under={best!r}"
        f"{' if that is meant' if other_containers else ''} to load this part alone"
    )
    return Cause(text, tuple(by_container[best]), best)


def _tokens(name: str) -> Tokens:
    return tuple(re.split(_SEPARATORS, name))


def _same_when(
    reduced: Callable[[str], object], left: Mapping[str, str], stored_leaves: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Pairs of a requested and a stored name that are equal after both are reduced."""
    stored = {reduced(name): name for name in stored_leaves}
    for name in left:
        if reduced(name) in stored:
            yield name, stored[reduced(name)]


def _rules_text(pairs: Sequence[tuple[str, str]]) -> str:
    name = pairs[0][0]
    return (
        f"no rule maps what both sides have{_such_as(pairs)}. Add rules such as `{name} <-> {name}`"
    )


def _separators_text(pairs: Sequence[tuple[str, str]]) -> str:
    return (
        f"names differ only in dots and slashes{_such_as(pairs)}. A slash separates the keys of "
        "nested containers, a dot is part of a key (as in state_dict()), %2F is a slash within a "
        "key: nest `like` like the stored tree, or map the names with rules"
    )


def _wrappers_text(pairs: Sequence[tuple[str, str]]) -> str:
    if all(stored == f"{requested}/value" for requested, stored in pairs):
        return (
            f"Orbax saved the variables of a Flax NNX module{_such_as(pairs)}. Loads without rules "
            "find them; with rules, add `default {m...}/value <-> {m...}`"
        )
    return (
        f"names differ only in the parts that a wrapper (DDP, torch.compile) adds"
        f"{_such_as(pairs)}. Put the module itself into `like`, not its state_dict(): the "
        "wrappers' names are then removed"
    )


def _such_as(pairs: Sequence[tuple[str, str]]) -> str:
    count = f" ({len(pairs)} leaves)" if len(pairs) > 1 else ""
    return f"{count}: requested {pairs[0][0]!r}, stored {pairs[0][1]!r}"


# --- one component, or the beginning of the names, differs -------------------------------------


def _best_change(left: Mapping[str, str], stored_leaves: Mapping[str, str]) -> Cause | None:
    votes: dict[Change, list[tuple[str, str]]] = {}
    for requested, stored, change in _changes(left, stored_leaves):
        votes.setdefault(change, []).append((requested, stored))
    ranked = sorted(votes.items(), key=lambda vote: (-len(vote[1]), natural(vote[1][0][0])))
    for change, pairs in ranked:
        if len(pairs) > 1:
            advice = _rename_advice(pairs, left, stored_leaves)
            return Cause(_change_text(change, pairs) + advice, tuple(pairs))
    near = [(_ratio(*pairs[0]), pairs[0]) for change, pairs in ranked[:200] if _is_near(change)]
    likeliest = max(near, key=lambda pair: pair[0], default=(0.0, ("", "")))
    if likeliest[0] < _SIMILAR:
        return None
    requested, stored = likeliest[1]
    return Cause(f"did you mean: requested {requested!r}, stored {stored!r}?", (likeliest[1],))


def _is_near(change: Change) -> bool:
    requested, stored = ("/".join(part) for part in change)
    return not requested or not stored or _ratio(requested, stored) >= _SIMILAR_PARTS


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _changes(
    left: Mapping[str, str], stored_leaves: Mapping[str, str]
) -> Iterator[tuple[str, str, Change]]:
    """All pairs of names that differ in one component, or at the beginning."""
    by_ending: dict[Tokens, list[tuple[str, Tokens]]] = {}
    by_others: dict[tuple[Tokens, Tokens], list[tuple[str, Tokens]]] = {}
    for name in stored_leaves:
        tokens = _tokens(name)
        for index in range(len(tokens)):
            by_ending.setdefault(tokens[index:], []).append((name, tokens))
            by_others.setdefault((tokens[:index], tokens[index + 1 :]), []).append((name, tokens))
    for name in left:
        tokens = _tokens(name)
        near: dict[str, Tokens] = {}
        for index in range(len(tokens)):
            near |= by_others.get((tokens[:index], tokens[index + 1 :]), [])[:_MOST_ALIKE]
        ending = next(
            (tokens[index:] for index in range(len(tokens)) if tokens[index:] in by_ending), None
        )
        if ending is not None:
            near |= by_ending[ending][:_MOST_ALIKE]
        changes = set()
        for stored, other in near.items():
            change = _difference(tokens, other)
            if (
                change not in changes
                and _may_be_one(left[name], stored_leaves[stored])
                and _says(change)
            ):
                changes.add(change)
                yield name, stored, change


def _difference(requested: Tokens, stored: Tokens) -> Change:
    """The rest of two names without their common first and last components."""
    head = 0
    while head < min(len(requested), len(stored)) and requested[head] == stored[head]:
        head += 1
    a, b = requested[head:], stored[head:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return a, b


def _says(change: Change) -> bool:
    """Whether a change is more than a different number, which missing layers explain."""
    return not all(part.isdecimal() for part in (*change[0], *change[1]))


def _may_be_one(requested: str, stored: str) -> bool:
    """Whether a requested and a stored leaf could be the same: arrays with the same extents in any
    order."""
    return sorted(_extents(requested)) == sorted(_extents(stored))


def _extents(text: str) -> list[str]:
    """The extents of a leaf's shape as text; none for a leaf without shape."""
    shape = re.search(_SHAPE, text)
    return [] if shape is None else shape[1].split(", ")


def _change_text(change: Change, pairs: Sequence[tuple[str, str]]) -> str:
    requested, stored = (_shown(part, name) for part, name in zip(change, pairs[0], strict=True))
    if not change[0]:
        what = f"stored under {stored!r}, but requested without it"
    elif not change[1]:
        what = f"requested under {requested!r}, but stored without it"
    else:
        what = f"requested {requested!r}, stored {stored!r}?"
    return f"{what}{_such_as(pairs)}"


def _rename_advice(
    pairs: Sequence[tuple[str, str]], left: Mapping[str, str], stored_leaves: Mapping[str, str]
) -> str:
    """The fix for names that differ; with the rule that transposes, if matrices are transposed."""
    for requested, stored in pairs:
        extents = _extents(left[requested]), _extents(stored_leaves[stored])
        is_transposed = extents[0] != extents[1] and extents[0] == extents[1][::-1]
        if is_transposed and len(extents[0]) == 2 and _PREFIX.fullmatch(requested + stored):
            rule = f"{stored} [i o] <-> {requested} [o i]"
            return f". The axes are in another order: load with rules such as `{rule}`"
    return ". Rename it in `like`, or map the names with rules"


def _shown(part: Tokens, name: str) -> str:
    """Components as written in a name, with its separators."""
    text = r"(?:%2F|[/.])".join(map(re.escape, part))
    match = re.search(rf"(?:^|(?<=[/.])|(?<=%2F)){text}(?:$|%2F|[/.])", name)
    return match[0] if match is not None else "/".join(part)
