"""A plan as readable rows: the source of each made leaf, and the dropped leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unickpt.reading import checkpoint
from unickpt.rules.lint import questionable_numbers
from unickpt.rules.plan import Constant, Fact, Made
from unickpt.rules.rule_set import Rules
from unickpt.rules.view import RuledView, stored_facts
from unickpt.tools.conversion import convertible
from unickpt.trees.name_ranges import fold, skeleton

_NOT_MADE = "not made: give the names of the other side with `like`"
_DROPPED = "not made: a rule drops it on this side"


@dataclass(frozen=True)
class PreviewRow:
    """One leaf that is made or dropped, on either side, or constants without names.

    Arguments:
        made_of, source: the stored names, and their description.
        made, destination: the new name and its description; empty if it is dropped.
        rule: its place, as "file, line 3".
        notes: the effects of rules on it: "stacked", "padded", "inexact", ...
    """

    made_of: str
    source: str
    made: str
    destination: str
    rule: str
    notes: tuple[str, ...]

    @property
    def is_made(self) -> bool:
        return bool(self.made) and {_NOT_MADE, _DROPPED}.isdisjoint(self.notes)


def folded(rows: Sequence[PreviewRow]) -> list[PreviewRow]:
    """Folds rows whose names differ only in numbers."""
    groups: dict[tuple[Any, ...], list[PreviewRow]] = {}
    for row in rows:
        names = skeleton(row.made), skeleton(row.made_of)
        key = (*names, row.source, row.destination, row.rule, row.notes)
        groups.setdefault(key, []).append(row)
    out: list[PreviewRow] = []
    for same in groups.values():
        made, sources = fold([row.made for row in same]), fold([row.made_of for row in same])
        if len(made) > 1 or len(sources) > 1:
            out += same
        else:
            out.append(replace(same[0], made=made[0], made_of=sources[0]))
    return out


@dataclass(frozen=True)
class Preview:
    """The preview of the result of `convert`.

    Arguments:
        rows: a row for each leaf.
        doubts: possibly unintended effects.
    """

    rows: Sequence[PreviewRow]
    doubts: Sequence[str] = ()


def preview(path: checkpoint.Source, rules: Rules | None, like: Any = None) -> Preview:
    """Previews the result of `convert`; reads only indices. Raises as `convert`.

    Arguments:
        path, rules, like: as for `convert`.
    """
    stored = checkpoint.opened(path).reader
    facts = stored_facts(stored).facts
    view = convertible(stored, rules, like)
    if rules is None or not isinstance(view, RuledView):
        return Preview(
            [PreviewRow(n, str(fact), n, str(fact), "", ()) for n, fact in facts.items()]
        )
    plan = view.plan
    users = Counter(name for made in plan.made.values() for name in _sources(made))
    rows = [_row(made, facts, users) for made in plan.made.values()]
    rules_of = {row.made: row.rule for row in rows}
    rows += [
        PreviewRow(first, "", alias, "", rules_of[first], ("the same array",))
        for alias, first in plan.aliases.items()
    ]
    constants = {check.name: check for check in plan.checks if isinstance(check, Constant)}
    for name, rule in plan.dropped.items():
        check = constants.get(name)
        note = "dropped" if check is None else f"left out if it is {check.value:g} everywhere"
        rows.append(PreviewRow(name, str(facts[name]), "", "", _position(rule), (note,)))
    rows += [
        PreviewRow("-", "", n, "", _position(rule), (_NOT_MADE,))
        for n, rule in plan.nameless.items()
    ]
    for name in sorted(plan.kept_names):
        is_from_like = name in view.index.values
        kind, note = ("a plain value", "taken from `like`") if is_from_like else ("", _DROPPED)
        rows.append(PreviewRow("-", "", name, kind, "", (note,)))
    return Preview(rows, list(questionable_numbers(rules.rules, plan.made)) if like is None else ())


def _sources(made: Made) -> list[str]:
    if made.carried is not None:
        return [made.carried]
    sources = [source for part in (made, *made.inputs) for source in part.sources]
    return list(dict.fromkeys(source.entry.name for source in sources))


def _row(made: Made, facts: Mapping[str, Fact], users: Mapping[str, int]) -> PreviewRow:
    sources = _sources(made)
    made_of = ", ".join(fold(sources) if len({*map(skeleton, sources)}) == 1 else sources) or "-"
    source = ", ".join(dict.fromkeys(str(facts[name]) for name in sources))
    applies: dict[str, object] = {
        f"constant {made.fills[0].value:g}" if made.fills else "constant": not sources,
        "joined": len(sources) > 1,
        "padded": made.fills and sources,
        "padding left out": made.cropped,
        "a part": any(users[name] > 1 for name in sources),
        **dict.fromkeys(_what_is_done(made), True),
        "function": made.function is not None,
        "inexact": not made.exact,
    }
    notes = tuple(note for note, does in applies.items() if does)
    return PreviewRow(made_of, source, made.name, str(made.fact), _position(made.rule), notes)


def _what_is_done(made: Made) -> list[str]:
    done = {(source.scale, source.offset) for source in made.sources}
    notes = [_arithmetic(*pair) for pair in sorted(done - {(1.0, 0.0)})]
    if notes and len(done) > 1:
        notes = [f"{note} in a part of it" for note in notes]
    if not notes and all(source.is_identity for source in made.sources) and made.sources:
        notes.append("as it is")
    padded = made.cropped or made.fills
    if len(made.sources) == 1 and made.sources[0].source != made.sources[0].out and not padded:
        notes.append("axes moved")
    if any(source.entry.dtype != made.fact.dtype for source in made.sources):
        notes.append("cast")
    return notes


def _position(rule: str) -> str:
    """The place of a rule in its file, taken from its text."""
    return rule.partition(": ")[0]


def _arithmetic(scale: float, offset: float) -> str:
    parts = [f"* {scale:g}"] if scale != 1 else []
    if offset:
        parts.append(f"{'-' if offset < 0 else '+'} {abs(offset):g}")
    return " ".join(parts)
