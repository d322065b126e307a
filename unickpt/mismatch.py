"""The table of all differences between what is stored and what `like` asks for."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

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
    groups: dict[tuple[object, ...], list[Difference]] = {}
    for row in rows:
        parts = row.name.split("/")
        pattern = tuple(None if p.isdigit() else p for p in parts)
        groups.setdefault((pattern, row.problem, row.stored, row.asked), []).append(row)
    out: list[tuple[str, str, str, str]] = []
    for same in groups.values():
        name = _folded_name([row.name for row in same])
        names = [row.name for row in same] if name is None else [name]
        out += [(n or "(root)", same[0].problem, same[0].stored, same[0].asked) for n in names]
    return out


def _folded_name(names: Sequence[str]) -> str | None:
    """One name such as `layers/{0..31}/w`, where the names are exactly its product."""
    columns = list(zip(*(name.split("/") for name in names), strict=True))
    values = [sorted(set(column), key=lambda p: (len(p), p)) for column in columns]
    if len(set(names)) != len(list(itertools.product(*values))):
        return None
    return "/".join(_range(v) for v in values)


def _range(values: Sequence[str]) -> str:
    if len(values) == 1:
        return values[0]
    numbers = [int(v) for v in values]
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return "{" + ",".join(values) + "}"
