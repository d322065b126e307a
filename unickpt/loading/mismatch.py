"""The table of all differences between the checkpoint and the request, `like`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from unickpt.arrays.names import natural
from unickpt.loading import optimizers
from unickpt.loading.report import Difference
from unickpt.quoting import aligned
from unickpt.trees.name_ranges import fold, skeleton

if TYPE_CHECKING:
    from unickpt.loading.suggestions import Cause

_MOST_LINES, _FEWEST_ROWS = 40, 10
_ADVICE = {
    "missing": '`like` has leaves that the checkpoint lacks: missing="keep" keeps their values; '
    "a ShapeDtypeStruct or a meta tensor has none, so leave it out or pass an array",
    "unexpected": 'the checkpoint has leaves that `like` lacks: unexpected="skip" skips them',
    "dtype": "cast=True casts within one kind (float to float, integer to integer); between kinds, "
    "use rules with `as`",
    "shape": 'loading never changes a shape: mismatched="keep" keeps the value in `like`; '
    "rules transpose, split and join axes",
    "kind": "an array, a plain value and a PerProcess each load only into their own type of leaf; "
    "a plain number (int, float or bool) also loads into a 0-d array of such numbers",
    "value": "the dtype cannot hold the plain int: request a wider dtype, or a plain 0",
    "member": "the enumeration in `like` has no member of the stored value: request a plain value",
    "PRNG key": "a typed key loads only into a key of the same implementation",
    "overlap": "two leaves of `like` share a part of their memory, for which different values are "
    "stored; copy one of them before loading",
    "tied": "two leaves of `like` share memory; untie them before loading",
}
_TRANSPOSED = (
    "{count} stored transposed, such as {0.name!r}: {0.stored} instead of {0.requested}. Flax has "
    "kernels [in, out], torch weights [out, in]; load with rules such as "
    "`{0.name} [i o] <-> {0.name} [o i]`"
)

_TIED = (
    "{0!r} is the memory of {1!r}, which is stored, as in Hugging Face's files, which hold tied "
    'weights once: missing="keep" loads both'
)

_SHAPE_OF = re.compile(r"(?=\[)")
# From this number of leaves next to the containers of `like`, a part of the checkpoint is meant.
_FEWEST_BESIDE = 4


def message(
    where: str,
    rows: Sequence[Difference],
    lacks: str = "",
    requested: Collection[str] = (),
    skipped: Sequence[Difference] = (),
    ties: Sequence[tuple[str, str]] = (),
) -> str:
    """The message: likely causes, what to do, and a table of the differences that the causes do not
    explain. Names that differ only in numbers share a row. Every process gets the same text.

    Arguments:
        where: the checkpoint.
        rows: the differences.
        lacks: state that the checkpoint's format lacks; see `Reader`.
        requested: the names of all leaves of `like`.
        skipped: rows of stored leaves that are not requested, and are no error.
        ties: missing leaves that share the memory of stored ones; these too.
    """
    count = f"{len(rows)} difference{'s' if len(rows) > 1 else ''}"
    head = f"{where} does not fit `like`: {count}"
    if lacks and any(row.problem == "missing" for row in rows):
        head += f"\nlikely cause: {lacks}"
    if ties:
        head += "\nlikely cause: " + _TIED.format(*ties[0])
    return _text(head, rows, _ADVICE, requested, skipped)


def nothing_fits(where: str, rows: Sequence[Difference]) -> str:
    """As `message`, for a load that keeps missing leaves, and would load nothing.

    Arguments:
        rows: the missing and unexpected leaves.
    """
    kind = "array" if any("[" in row.requested for row in rows) else "leaf"
    head = f"{where}: no {kind} of `like` is stored, so this would load nothing"
    return _text(head, rows, {})


def _text(
    head: str,
    rows: Sequence[Difference],
    advice: Mapping[str, str],
    requested: Collection[str] = (),
    skipped: Sequence[Difference] = (),
) -> str:
    from unickpt.loading.suggestions import causes  # here, so that importing unickpt stays fast

    rows = sorted(rows, key=lambda row: (natural(row.name), row.problem))
    other_optimizers = optimizers.other_optimizers(rows)
    comparable = [
        row for row in (*rows, *skipped) if not row.name.startswith(tuple(other_optimizers))
    ]
    likely = causes(
        {row.name: row.requested for row in comparable if row.problem == "missing"},
        {row.name: row.stored for row in comparable if row.problem == "unexpected"},
        len(requested),
    )
    lines = [head, *(f"likely cause: {text}" for text in other_optimizers.values())]
    lines += [f"likely cause: {cause.text}" for cause in likely]
    part = next((cause for cause in likely if cause.under), None)
    if part is not None:
        rows = _within(part, [*rows, *skipped])
        lines += ["that part would still differ:"] * bool(rows)
    lines += [*_single_leaf(rows), *_transposed(rows)]
    if part is None:
        rows, more = _beside(_unexplained(rows, skipped, likely), requested)
        lines += more
    same = [row for row in rows if not row.name.startswith(tuple(other_optimizers))]
    lines += [f"likely cause: {text}" for text in optimizers.likely_causes(same, requested)]
    problems = dict.fromkeys(row.problem for row in rows)
    lines += [f"{problem}: {advice[problem]}" for problem in problems if problem in advice]
    stored = {row.stored for row in rows if row.problem == "unexpected"}
    if not likely and any(r.requested in stored for r in rows if r.problem == "missing"):
        lines.append("renamed: rules= maps stored names to those of `like` (docs/rules.md)")
    return "\n".join([*lines, *_table(rows, len(lines))])


def _within(part: Cause, rows: Sequence[Difference]) -> list[Difference]:
    """The rows that remain if the intended part of the checkpoint is loaded, with names relative to
    it."""
    stored = {row.name: row.stored for row in rows if row.problem == "unexpected"}
    pairs, served = dict(part.pairs), {stored for _, stored in part.pairs}
    differences = []
    for row in rows:
        if row.name in pairs and row.problem == "missing":
            problem, have = "", stored[pairs[row.name]]
            stored_parts, requested_parts = (
                _SHAPE_OF.split(text, 1) for text in (have, row.requested)
            )
            if stored_parts[:1] != requested_parts[:1]:
                problem = "dtype" if "[" in have and "[" in row.requested else "kind"
            elif stored_parts != requested_parts:
                problem = "shape"
            if problem:
                differences.append(Difference(row.name, problem, have, row.requested))
        elif row.problem == "missing":
            differences.append(row)
        elif row.name.startswith(part.under) and row.name not in served:
            name = row.name.removeprefix(part.under)
            differences.append(Difference(name, row.problem, row.stored, row.requested))
    return differences


def _beside(
    rows: Sequence[Difference], requested: Collection[str]
) -> tuple[list[Difference], list[str]]:
    """Adds how to load a part, if the checkpoint has whole containers next to those of `like`; each
    of these is one row.

    Returns:
        The rows, and lines of text.
    """
    containers = {name.partition("/")[0] for name in requested if "/" in name}
    top = [(row, row.name.partition("/")[0]) for row in rows]
    beside = Counter(x for row, x in top if row.problem == "unexpected" and x not in containers)
    if not containers or sum(beside.values()) < _FEWEST_BESIDE:
        return list(rows), []
    folded = []
    for row, container in top:
        if container not in beside or row.problem != "unexpected" or beside[container] == 1:
            folded.append(row)
        elif beside[container]:
            have = f"{beside[container]} leaves"
            folded.append(Difference(f"{container}/**", row.problem, have, "-"))
            beside[container] = 0
    patterns = [f"{container}/**" for container in sorted(containers)]
    names = repr(patterns[0]) if len(patterns) == 1 else repr(patterns)
    text = (
        f"the checkpoint has more than `like` requests: only={names} loads this part alone, and "
        'unexpected="skip" skips the rest'
    )
    return folded, [f"likely cause: {text}"]


def _single_leaf(rows: Sequence[Difference]) -> list[str]:
    """The likely cause that something other than a tree was passed as `like`, if it applies."""
    if not any(row.name == "" and row.problem == "missing" for row in rows) or len(rows) == 1:
        return []
    requested = next(row.requested for row in rows if row.name == "")
    return [
        f"likely cause: `like` is a single leaf ({requested}), but the stored tree has named "
        "leaves: pass a tree with these names. A step is given by its keyword: "
        "Checkpointer.load(step=2)"
    ]


def _transposed(rows: Sequence[Difference]) -> list[str]:
    """The likely cause that kernels have the axis order of another framework, if it applies."""
    misshapen = [row for row in rows if row.problem == "shape"]
    turned = [row for row in misshapen if _dims(row.stored) == _dims(row.requested)[::-1]]
    if not turned:
        return []
    count = "1 array is" if len(turned) == 1 else f"{len(turned)} arrays are"
    return [f"likely cause: {_TRANSPOSED.format(turned[0], count=count)}"]


def _dims(shape: str) -> list[str]:
    return shape.strip("[]").split(", ")


def _unexplained(
    rows: Sequence[Difference], skipped: Sequence[Difference], likely: Sequence[Cause]
) -> list[Difference]:
    """The rows that no likely rename would fix."""
    of_missing = {row.name: row.requested for row in rows if row.problem == "missing"}
    all_rows = (*rows, *skipped)
    of_unexpected = {row.name: row.stored for row in all_rows if row.problem == "unexpected"}
    mended: set[tuple[str, str]] = set()
    for cause in likely:
        for requested, stored in cause.pairs if len(cause.pairs) > 1 else ():
            same = of_missing[requested].split()[:2] == of_unexpected[stored].split()[:2]
            if same or cause.moves_axes:
                mended |= {("missing", requested), ("unexpected", stored)}
    return [row for row in rows if (row.problem, row.name) not in mended]


def _table(rows: Sequence[Difference], lines_before: int) -> list[str]:
    folded = _fold(rows)
    if not folded:
        return []
    most = max(_FEWEST_ROWS, _MOST_LINES - lines_before - 2)
    shown = [("leaf", "problem", "stored", "requested"), *folded[:most]]
    lines = aligned(shown)
    if len(folded) > most:
        lines.append(f"  ... and {len(folded) - most} more rows")
    return lines


def _fold(rows: Sequence[Difference]) -> list[tuple[str, str, str, str]]:
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        key = (skeleton(row.name), row.problem, row.stored, row.requested)
        groups.setdefault(key, []).append(row.name)
    return [
        (name or "(root)", problem, stored, requested)
        for (_, problem, stored, requested), names in groups.items()
        for name in fold(names)
    ]
