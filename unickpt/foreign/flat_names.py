"""Names of arrays in formats whose names are single texts, without containers."""

from __future__ import annotations

from collections.abc import Iterable

from unickpt.errors import UnsupportedLeaf
from unickpt.format.index import Index
from unickpt.quoting import quoted, shortened
from unickpt.trees import tree

_DROP = (
    "drop plain values by rules, such as `step <-> drop`; the rule `default {leaf...} <-> "
    "{leaf...}` keeps all others"
)


def flat_names(index: Index) -> dict[str, str]:
    """A text for each leaf: its keys, joined by "/".

    Raises:
        UnsupportedLeaf: two leaves would have the same one.

    Example:
        >>> node = tree.from_names(["model.w", "optim/0"])
        >>> flat_names(Index(tree.to_json(node), {}))
        {'model.w': 'model.w', 'optim/0': 'optim/0'}
    """
    found: dict[str, str] = {}
    known: dict[str, str] = {}
    for name, keys in tree.keys_of(tree.from_json(index.tree)):
        text = "/".join(map(str, keys))
        other = known.setdefault(text, name)
        if other != name:
            raise UnsupportedLeaf(
                f"{quoted(other)} and {quoted(name)} would both be called {quoted(text)} in this "
                "format, which has no containers; rename one of them by a rule"
            )
        found[name] = text
    return found


def refuse_values(index: Index, format: str, others: Iterable[str] = ()) -> None:
    """Refuses leaves that are no arrays, and what else a format cannot hold.

    Arguments:
        index: what is going to be written.
        format: for the message.
        others: what is wrong with arrays, a line each.

    Raises:
        UnsupportedLeaf: names all of them.
    """
    lines = [f"  {quoted(n)}: a plain {type(v).__name__}" for n, v in index.values.items()]
    lines += [f"  {line}" for line in others]
    if lines:
        raise cannot_hold(format, lines, _DROP)


def cannot_hold(format: str, lines: list[str], hint: str) -> UnsupportedLeaf:
    """The error for leaves that a format cannot hold.

    Arguments:
        format: its name.
        lines: each names a leaf and says what is wrong.
        hint: what to do.
    """
    more = [f"  and {len(lines) - 10} more"] if len(lines) > 10 else []
    told = "\n".join([*(shortened(line, 300) for line in lines[:10]), *more])
    return UnsupportedLeaf(f"the format {format!r} cannot hold:\n{told}\n{hint}")
