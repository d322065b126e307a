"""The report of a load: leaves loaded, kept, skipped and cast, and differences that prevent it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from unickpt.quoting import aligned, size_text
from unickpt.trees.tree import Leaf, Node, containers

if TYPE_CHECKING:
    from unickpt.loading.load_figures import LoadFigures

_MOST_ROWS = 20
_LEAST_S = 0.01
"""Shorter waits are not worth a word."""
_WITHOUT_CLASS = {
    "object": "a dict",
    "namedtuple": "a namedtuple with its fields",
    "wrapper": "only its contents",
}
"""What containers with their own class become without `like`: no class is looked up by name."""

_NEW = "{}: the load returned a new one; the one in `like` was not filled"
_SHORT = {"older experts": "older", "new objects": "new"}  # in rows


class Difference(NamedTuple):
    """One row: the leaf, the kind of difference, and the stored and the requested values."""

    name: str
    problem: str
    stored: str
    requested: str


@dataclass(frozen=True, repr=False)
class LoadReport:
    """What a load did; `str(report)` is a short table with one row for repeated layers, and a line
    of its time and bytes.

    Arguments:
        url: the checkpoint.
        loaded: the names of loaded leaves, in terms of `like` and in its order, if given.
        kept: leaves of `like` that are not stored; they keep their values.
        skipped: stored leaves that were not requested: by `like`, or by `only=` and `skip=`.
        mismatched: leaves whose shape differs from the stored one and that keep their values
            (`mismatched="keep"`): name, stored shape, requested shape.
        cast: arrays whose dtype was converted: name, stored dtype, requested dtype.
        renamed: leaves that are stored under another name because a module wrapper added
            components: stored name, requested name. They are in `loaded` too.
        older_experts: the experts whose state in the checkpoint is of an earlier step than the
            checkpoint (`Checkpointer(experts=)`), loaded or not: its key, number, step.
        left_out: leaves of `like` that `only=` and `skip=` do not select; they keep their values,
            stored or not.
        untyped: without `like`, containers that lost their saved class, because no class is looked
            up by name: name, class, type instead. For example, dataclasses become dicts.
        new_objects: objects of `like` that are not filled, because their framework builds new ones
            (Flax NNX modules, dataclasses): name, class. Use the objects that the load returns.
        seconds: wall time of the call in this process.
        bytes: logical bytes of the arrays, or parts of them, that this process has loaded.
        read_bytes: logical bytes of the chunks that it read from the storage for that. Those from
            which functions of rules make arrays do not count.
        received_bytes: bytes that it got from other processes instead (`LoadOptions.exchange`).
        unchanged_bytes: bytes that `like` held already (`since=`); not in `bytes`.
        waited_s: seconds of waiting for other processes that read together with this one, but for
            the last step.
        waited_for: these seconds by the process that came last, as far as it is known.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/partial", {"w": np.ones(2), "old": np.ones(2)})
        >>> like = {"w": np.zeros(2), "new": np.zeros(2)}
        >>> _, report = unickpt.load("memory://run/partial", like, strict=False, return_report=True)
        >>> print(report)  # doctest: +ELLIPSIS
        memory://run/partial: loaded 1 leaf, kept 1, skipped 1
          kept     new  not stored, `like` keeps its value
          skipped  old  stored, and not requested
          16 B in ... s (... GB/s), read 16 B
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
    seconds: float = field(default=0.0, compare=False)
    bytes: int = field(default=0, compare=False)
    read_bytes: int = field(default=0, compare=False)
    received_bytes: int = field(default=0, compare=False)
    unchanged_bytes: int = field(default=0, compare=False)
    waited_s: float = field(default=0.0, compare=False)
    waited_for: Mapping[int, float] = field(default_factory=dict, compare=False)

    @property
    def gb_per_s(self) -> float:
        """Logical gigabytes (1e9 bytes) that this process has loaded per second."""
        return self.bytes / 1e9 / max(self.seconds, 1e-9)

    def gather(self, group: Any = None) -> tuple[LoadFigures, ...]:
        """The figures of all processes, in their order. All must call it at the same point.

        Arguments:
            group: the processes, as in `LoadOptions.group`; by default, all of the job.

        Raises:
            SaveTimeout: the others did not call it in time.

        Example:
            >>> import numpy as np, unickpt
            >>> _ = unickpt.save("memory://run/gather", {"w": np.ones(2)})
            >>> _, report = unickpt.load("memory://run/gather", return_report=True)
            >>> [figures.read_bytes for figures in report.gather()]
            [16]
        """
        from unickpt.loading import load_figures  # few need it

        own_figures = load_figures.LoadFigures(
            self.seconds,
            self.bytes,
            self.read_bytes,
            self.received_bytes,
            self.waited_s,
            self.waited_for,
        )
        return load_figures.gather(own_figures, group)

    @property
    def speed_text(self) -> str:
        """As "1.2 GB in 2 s (0.6 GB/s), read 300 MB, waited 0.50 s, most for process 3"."""
        text = f"{size_text(self.bytes)} in {self.seconds:.3g} s ({self.gb_per_s:.3g} GB/s), "
        text += f"read {size_text(self.read_bytes)}"
        if self.received_bytes:
            text += f", received {size_text(self.received_bytes)}"
        if self.unchanged_bytes:
            text += f", {size_text(self.unchanged_bytes)} unchanged"
        if self.waited_s >= _LEAST_S:
            text += f", waited {self.waited_s:.2f} s"
            if self.waited_for:
                last = max(self.waited_for, key=self.waited_for.__getitem__)
                text += f", most for process {last}"
        return text

    @property
    def _reasons(self) -> dict[str, list[tuple[str, str]]]:
        """Outcomes, named as in `counts`, each with its leaves and the reason for each."""
        return {
            "kept": [(name, "not stored, `like` keeps its value") for name in self.kept],
            "left out": [(name, "not selected, keeps its value") for name in self.left_out],
            "skipped": [(name, "stored, and not requested") for name in self.skipped],
            "mismatched": [
                (name, f"stored {list(stored)}, requested {list(requested)}; unchanged in `like`")
                for name, stored, requested in self.mismatched
            ],
            "cast": [(name, f"from {old} to {new}") for name, old, new in self.cast],
            "renamed": [(old, _rest(old, new)) for old, new in self.renamed],
            "older experts": [(_expert(k, n), f"of step {s}") for k, n, s in self.older_experts],
            "untyped": [
                (name, f"saved as {saved or 'an object'}, without `like` {now}")
                for name, saved, now in self.untyped
            ],
            "new objects": [
                (name or "/", _NEW.format(kind or "object")) for name, kind in self.new_objects
            ],
        }

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of leaves by outcome; all but `loaded` only if there are any."""
        counts = {kind: len(leaves) for kind, leaves in self._reasons.items() if leaves}
        return {"loaded": len(self.loaded), **counts}

    @property
    def _summary(self) -> str:
        counts = self.counts
        leaves = f"{counts.pop('loaded')} lea{'f' if len(self.loaded) == 1 else 'ves'}"
        return ", ".join([f"loaded {leaves}", *(f"{kind} {n}" for kind, n in counts.items())])

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """The table of `str(report)`: outcome, leaves, and reason."""
        reasons = self._reasons.items()
        return [row for kind, leaves in reasons for row in _rows(_SHORT.get(kind, kind), leaves)]

    def __repr__(self) -> str:
        return f"LoadReport({self.url!r}, {self._summary})"

    def _repr_html_(self) -> str:
        from unickpt.display import html  # here, so that importing unickpt stays fast

        rows = self.rows
        drawn = html.table(("", "name", ""), rows, len(rows))
        return html.page("LoadReport", self.url, [self._summary, self.speed_text], drawn)

    def __str__(self) -> str:
        speed = [f"  {self.speed_text}"] if self.seconds else []
        return "\n".join([f"{self.url}: {self._summary}", *aligned(self.rows), *speed])


def untyped(root: Node | Leaf) -> Iterator[tuple[str, str, str]]:
    """The containers in a stored tree that are not of their class: name, class, what they are."""
    for name, node in containers(root):
        if node.kind in _WITHOUT_CLASS and node.children:
            yield name, node.type_name, _WITHOUT_CLASS[node.kind]


def _expert(key: str, number: int) -> str:
    return key.replace("{x}", str(number)) if "{x}" in key else f"{key}[{number}]"


def _rest(stored: str, requested: str) -> str:
    """The wrapper components that a name lost; one text for all layers, so that they fold."""
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
