"""The table of all differences between what is stored and what `like` requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unickpt.trees.name_ranges import fold, natural, skeleton

if TYPE_CHECKING:
    from unickpt.loading.suggestions import Cause

_MOST_LINES, _FEWEST_ROWS = 40, 10
_ADVICE = {
    "missing": '`like` has leaves that the checkpoint lacks: missing="keep" keeps what they hold; '
    "abstract ones hold nothing, so leave them out or pass arrays with memory",
    "unexpected": 'the checkpoint has leaves that `like` lacks: unexpected="skip" skips them',
    "dtype": "cast=True casts within one kind (float to float, integer to integer)",
    "shape": 'loading never changes a shape: mismatched="keep" keeps what `like` holds there; '
    "rules transpose, split and join axes",
    "kind": "an array, a plain value and a PerProcess each load only into their own type of leaf; "
    "a plain number (int, float or bool) also loads into a 0-d array of such numbers",
    "value": "the dtype cannot hold the plain int: ask for a wider dtype, or a plain 0",
    "member": "the enumeration in `like` has no member of the stored value: ask for a plain value",
    "PRNG key": "a typed key loads only into a key of the same implementation",
    "tied": "two leaves of `like` share memory; untie them before loading",
}
_TRANSPOSED = (
    "{count} stored transposed, such as {name!r}: {stored} instead of {asked}. Flax has kernels "
    "[in, out], torch weights [out, in]; load with rules such as `{name} [i o] <-> {name} [o i]`"
)

# A slot of torch's optimizers, under the number or the name of its parameter.
_OPTIMIZER_STATE = r"(.*?(?:^|/)state/)[^/]+/(?:step|exp_avg|exp_avg_sq|momentum_buffer|sum)$"
_NO_STATE_ASKED = (
    "the optimizer in `like` has nothing under {name!r}: a state_dict() is empty before the first "
    "step. Put the optimizer itself into `like`, whose state is then made; skipping it would lose "
    "the moments"
)
_NO_STATE_STORED = (
    "nothing is stored under {name!r}, as before an optimizer's first step. Load it into an "
    "optimizer that has not stepped; keeping the state here would mix two runs"
)


@dataclass(frozen=True)
class Difference:
    """One row: the leaf, what differs, what is stored and what was requested."""

    name: str
    problem: str
    stored: str
    asked: str


def message(where: str, rows: Sequence[Difference], lacks: str = "") -> str:
    """The message: likely causes, what to do, and a table of the differences that the causes do not
    explain. Names that differ only in numbers share a row. Every process gets the same text.

    Arguments:
        where: the checkpoint.
        rows: the differences.
        lacks: what the checkpoint lacks by its format; see `Reader`.
    """
    count = f"{len(rows)} difference{'s' if len(rows) > 1 else ''}"
    head = f"{where} does not fit `like`: {count}"
    if lacks and any(row.problem == "missing" for row in rows):
        head += f"\nlikely cause: {lacks}"
    return _text(head, rows, _ADVICE)


def nothing_fits(where: str, rows: Sequence[Difference]) -> str:
    """As `message`, for a load that keeps what is missing, and would load nothing.

    Arguments:
        rows: the missing and unexpected leaves.
    """
    kind = "array" if any("[" in row.asked for row in rows) else "leaf"
    head = f"{where}: no {kind} of `like` is stored, so this would load nothing"
    return _text(head, rows, {})


def _text(head: str, rows: Sequence[Difference], advice: Mapping[str, str]) -> str:
    from unickpt.loading.suggestions import causes  # here, so that importing unickpt stays fast

    rows = sorted(rows, key=lambda row: (natural(row.name), row.problem))
    likely = causes(
        {row.name: row.asked for row in rows if row.problem == "missing"},
        {row.name: row.stored for row in rows if row.problem == "unexpected"},
    )
    lines = [head, *(f"likely cause: {cause.text}" for cause in likely)]
    lines += [*_single_leaf(rows), *_transposed(rows), *_optimizer_states(rows)]
    rows = _unexplained(rows, likely)
    problems = dict.fromkeys(row.problem for row in rows)
    lines += [f"{problem}: {advice[problem]}" for problem in problems if problem in advice]
    return "\n".join([*lines, *_table(rows, len(lines))])


def _single_leaf(rows: Sequence[Difference]) -> list[str]:
    """The likely cause that something other than a tree was passed as `like`, if it applies."""
    if not any(row.name == "" and row.problem == "missing" for row in rows) or len(rows) == 1:
        return []
    asked = next(row.asked for row in rows if row.name == "")
    return [
        f"likely cause: `like` is a single leaf ({asked}), but the stored tree has named leaves: "
        "pass a tree with these names. A step is given by its keyword: Checkpointer.load(step=2)"
    ]


def _transposed(rows: Sequence[Difference]) -> list[str]:
    """The likely cause that kernels have the axis order of another framework, if it applies."""
    turned = [
        row
        for row in rows
        if row.problem == "shape" and _dims(row.stored) == _dims(row.asked)[::-1]
    ]
    if not turned:
        return []
    count = "1 array is" if len(turned) == 1 else f"{len(turned)} arrays are"
    one = turned[0]
    cause = _TRANSPOSED.format(count=count, name=one.name, stored=one.stored, asked=one.asked)
    return [f"likely cause: {cause}"]


def _optimizer_states(rows: Sequence[Difference]) -> list[str]:
    """The likely cause that an optimizer has no state in `like`, or none is stored, if it applies:
    torch makes it in the first step."""
    found: dict[str, set[str]] = {}
    for row in rows:
        state = re.match(_OPTIMIZER_STATE, row.name)
        if state is not None:
            found.setdefault(state[1], set()).add(row.problem)
    causes = {frozenset({"unexpected"}): _NO_STATE_ASKED, frozenset({"missing"}): _NO_STATE_STORED}
    return [
        f"likely cause: {causes[frozenset(problems)].format(name=name)}"
        for name, problems in found.items()
        if frozenset(problems) in causes
    ]


def _dims(shape: str) -> list[str]:
    return shape.strip("[]").split(", ")


def _unexplained(rows: Sequence[Difference], likely: Sequence[Cause]) -> list[Difference]:
    """The rows that no likely rename would fix."""
    of_missing = {row.name: row.asked for row in rows if row.problem == "missing"}
    of_unexpected = {row.name: row.stored for row in rows if row.problem == "unexpected"}
    mended: set[tuple[str, str]] = set()
    for cause in likely:
        for asked, stored in cause.pairs if len(cause.pairs) > 1 else ():
            if of_missing[asked].split()[:2] == of_unexpected[stored].split()[:2]:
                mended |= {("missing", asked), ("unexpected", stored)}
    return [row for row in rows if (row.problem, row.name) not in mended]


def _table(rows: Sequence[Difference], lines_before: int) -> list[str]:
    folded = _fold(rows)
    if not folded:
        return []
    most = max(_FEWEST_ROWS, _MOST_LINES - lines_before - 2)
    shown = [("leaf", "problem", "stored", "asked"), *folded[:most]]
    widths = [max(len(row[column]) for row in shown) for column in range(4)]
    lines = [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    if len(folded) > most:
        lines.append(f"  ... and {len(folded) - most} more rows")
    return lines


def _fold(rows: Sequence[Difference]) -> list[tuple[str, str, str, str]]:
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        key = (skeleton(row.name), row.problem, row.stored, row.asked)
        groups.setdefault(key, []).append(row.name)
    return [
        (name or "(root)", problem, stored, asked)
        for (_, problem, stored, asked), names in groups.items()
        for name in fold(names)
    ]
