"""The table of all differences between what is stored and what `like` asks for."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from unickpt.folding import fold, skeleton

_MOST_ROWS = 40
_ADVICE = {
    "missing": "`like` has leaves that the checkpoint lacks: strict=False keeps what they hold; "
    "abstract ones hold nothing, so leave them out or give them memory",
    "unexpected": "the checkpoint has leaves that `like` lacks: strict=False skips them",
    "dtype": "cast=True casts within one kind (float to float, integer to integer)",
    "shape": "a shape is never changed by loading",
    "kind": "an array, a plain value and a PerProcess are loaded only into their like",
    "PRNG key": "a typed key is loaded only into one of the same implementation",
    "tied": "two leaves of `like` share memory; untie them before loading",
}


@dataclass(frozen=True)
class Difference:
    """One row: which leaf, what differs, what is stored and what was asked."""

    name: str
    problem: str
    stored: str
    asked: str


def message(where: str, rows: Sequence[Difference]) -> str:
    """All differences as a text table; names that differ in numbers alone share a row."""
    folded = _fold(rows)
    shown = [("leaf", "problem", "stored", "asked"), *folded[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(4)]
    lines = [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    if len(folded) > _MOST_ROWS:
        lines.append(f"  ... and {len(folded) - _MOST_ROWS} more rows")
    problems = dict.fromkeys(row.problem for row in rows)
    lines += [f"{problem}: {_ADVICE[problem]}" for problem in problems]
    lines += _near_misses(rows)
    head = f"{where} does not fit `like`: {len(rows)} difference{'s' if len(rows) > 1 else ''}"
    return "\n".join([head, *lines])


def _near_misses(rows: Sequence[Difference]) -> list[str]:
    missing = [row.name for row in rows if row.problem == "missing"]
    unexpected = [row.name for row in rows if row.problem == "unexpected"]
    for name in missing[:50]:
        near = difflib.get_close_matches(name, unexpected[:500], n=1, cutoff=0.7)
        if near:
            return [f"did you mean: asked {name!r}, stored {near[0]!r}?"]
    return []


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
