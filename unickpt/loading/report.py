"""The report of a load: what was loaded, kept, skipped and cast; and what prevents one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from unickpt.trees.tree import Leaf, Node, child_names

_MOST_ROWS = 20
_WITHOUT_CLASS = {
    "object": "a dict",
    "namedtuple": "a namedtuple with its fields",
    "wrapper": "only what it holds",
}
"""What containers of a class of their own become without `like`: no class is looked up by name."""


class Difference(NamedTuple):
    """One row: the leaf, what differs, what is stored and what was requested."""

    name: str
    problem: str
    stored: str
    requested: str


@dataclass(frozen=True, repr=False)
class LoadReport:
    """What a load did; `str(report)` is a short table with one row for repeated layers.

    Arguments:
        url: the checkpoint.
        loaded: the names of loaded leaves, in terms of `like` and in its order, if given.
        kept: leaves of `like` that are not stored; they keep what `like` held.
        skipped: stored leaves that were not requested: by `like`, or by `only=` and `skip=`.
        mismatched: leaves whose shape differs from the stored one and that keep what `like` held
            (`mismatched="keep"`): name, stored shape, requested shape.
        cast: arrays whose dtype was converted: name, stored dtype, requested dtype.
        renamed: leaves that are stored under another name because a module wrapper added
            components: stored name, requested name. They are in `loaded` too.
        older_experts: the experts whose state in the checkpoint is of an earlier step than the
            checkpoint (`Checkpointer(experts=)`), loaded or not: its key, number, step.
        left_out: leaves of `like` that `only=` and `skip=` do not select; they keep what `like`
            held, stored or not.
        untyped: without `like`, containers that are not of the class that was saved, because none
            is looked up by its name: name, class, what it is instead. So dataclasses are dicts.
        new_objects: objects of `like` that are not filled, because their framework builds new ones
            (Flax NNX modules, dataclasses): name, class. Use the objects that the load returns.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/partial", {"w": np.ones(2), "old": np.ones(2)})
        >>> like = {"w": np.zeros(2), "new": np.zeros(2)}
        >>> _, report = unickpt.load("memory://run/partial", like, strict=False, return_report=True)
        >>> print(report)
        memory://run/partial: loaded 1 leaf, kept 1, skipped 1
          kept     new  not stored, `like` keeps what it held
          skipped  old  stored, and not requested
    """

    url: str
    loaded: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    cast: tuple[tuple[str, str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    older_experts: tuple[tuple[str, int, int], ...] = ()
    left_out: tuple[str, ...] = ()
    untyped: tuple[tuple[str, str, str], ...] = ()
    new_objects: tuple[tuple[str, str], ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of leaves by what happened to them; all but `loaded` only if there are any."""
        counts = {
            "kept": len(self.kept),
            "left out": len(self.left_out),
            "skipped": len(self.skipped),
            "mismatched": len(self.mismatched),
            "cast": len(self.cast),
            "renamed": len(self.renamed),
            "older experts": len(self.older_experts),
            "untyped": len(self.untyped),
            "new objects": len(self.new_objects),
        }
        return {"loaded": len(self.loaded), **{kind: n for kind, n in counts.items() if n}}

    @property
    def _summary(self) -> str:
        counts = self.counts
        leaves = f"{counts.pop('loaded')} lea{'f' if len(self.loaded) == 1 else 'ves'}"
        return ", ".join([f"loaded {leaves}", *(f"{kind} {n}" for kind, n in counts.items())])

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """The table of `str(report)`: what happened, to which leaves, and why."""
        return [
            *_rows("kept", ((n, "not stored, `like` keeps what it held") for n in self.kept)),
            *_rows("left out", ((n, "not selected, keeps what it held") for n in self.left_out)),
            *_rows("skipped", ((n, "stored, and not requested") for n in self.skipped)),
            *_rows(
                "mismatched",
                (
                    (
                        name,
                        f"stored {list(stored)}, requested {list(requested)}; unchanged in `like`",
                    )
                    for name, stored, requested in self.mismatched
                ),
            ),
            *_rows("cast", ((name, f"from {old} to {new}") for name, old, new in self.cast)),
            *_rows("renamed", ((old, _rest(old, new)) for old, new in self.renamed)),
            *_rows(
                "older", ((_expert(k, n), f"of step {step}") for k, n, step in self.older_experts)
            ),
            *_rows(
                "untyped", ((name, _class_text(saved, now)) for name, saved, now in self.untyped)
            ),
            *_rows("new", ((name or "/", _new_text(kind)) for name, kind in self.new_objects)),
        ]

    def __repr__(self) -> str:
        return f"LoadReport({self.url!r}, {self._summary})"

    def _repr_html_(self) -> str:
        from unickpt.display import html  # here, so that importing unickpt stays fast

        rows = self.rows
        drawn = html.table(("", "name", ""), rows, len(rows))
        return html.page("LoadReport", self.url, [self._summary], drawn)

    def __str__(self) -> str:
        rows = self.rows
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
        lines = [
            "  " + "  ".join([kind.ljust(widths[0]), name.ljust(widths[1]), text]).rstrip()
            for kind, name, text in rows
        ]
        return "\n".join([f"{self.url}: {self._summary}", *lines])


def untyped(node: Node | Leaf, name: str = "") -> Iterator[tuple[str, str, str]]:
    """The containers in a stored tree that are not of their class: name, class, what they are."""
    if isinstance(node, Leaf):
        return
    if node.kind in _WITHOUT_CLASS and node.children:
        yield name, node.type_name, _WITHOUT_CLASS[node.kind]
    names = child_names(node.kind, node.keys, name)
    for child, child_name in zip(node.children, names, strict=True):
        yield from untyped(child, child_name)


def _new_text(kind: str) -> str:
    return f"{kind or 'object'}: the load returned a new one, that of `like` was not filled"


def _class_text(saved: str, now: str) -> str:
    return f"saved as {saved or 'an object'}, without `like` {now}"


def _expert(key: str, number: int) -> str:
    return key.replace("{x}", str(number)) if "{x}" in key else f"{key}[{number}]"


def _rest(stored: str, requested: str) -> str:
    """Which wrapper components a name lost; the same text for all layers, so that they fold."""
    parts = iter(requested.replace("/", ".").split("."))
    next_part = next(parts, None)
    dropped = []
    for part in stored.replace("/", ".").split("."):
        if part == next_part:
            next_part = next(parts, None)
        else:
            dropped.append(part)
    return f"loaded without {'.'.join(dict.fromkeys(dropped))!r} in its name"


def _rows(kind: str, entries: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    from unickpt.trees.name_ranges import fold_all

    by_text: dict[str, list[str]] = {}
    for name, text in entries:
        by_text.setdefault(text, []).append(name)
    rows = [(kind, n or "(root)", text) for text, names in by_text.items() for n in fold_all(names)]
    if len(rows) > _MOST_ROWS:
        more = len(rows) - _MOST_ROWS
        rows = [*rows[:_MOST_ROWS], (kind, f"... and {more} more rows", "")]
    return rows
