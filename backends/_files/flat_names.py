"""Names of arrays in formats whose names are single texts, without containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unickpt.errors import UnsupportedLeaf
from unickpt.extend import (
    ArrayEntry,
    Index,
    dtype_from_name,
    dtype_kind,
    keys_of_leaves,
    name_component,
    printable,
    quoted,
    shortened,
    tree_from_json,
    tree_from_names,
)

_KEEP = "the rule `default {leaf...} <-> {leaf...}` keeps all others"
# A dtype that all formats have, by the kind of a dtype that one lacks.
_OTHERS = {"float": "float32", "integer": "int8", "complex": "complex64"}


def flat_names(index: Index) -> dict[str, str]:
    """A text for each leaf: its keys, joined by "/".

    Raises:
        UnsupportedLeaf: two leaves would have the same one.

    Example:
        >>> from unickpt.extend import tree_to_json
        >>> node = tree_from_names(["model.w", "optim/0"])
        >>> flat_names(Index(tree_to_json(node), {}))
        {'model.w': 'model.w', 'optim/0': 'optim/0'}
    """
    texts: dict[str, str] = {}
    names_by_text: dict[str, str] = {}
    for name, keys in keys_of_leaves(tree_from_json(index.tree)):
        text = "/".join(map(str, keys))
        other = names_by_text.setdefault(text, name)
        if other != name:
            raise UnsupportedLeaf(
                f"{quoted(other)} and {quoted(name)} would both be called {quoted(text)} in this "
                "format, which has no containers; rename one of them by a rule"
            )
        texts[name] = text
    return texts


SEPARATOR = "unickpt.separator"
"""The key in the metadata of a file whose names are the keys of containers, joined by "/"."""


def nested_name(text: str) -> str:
    """The name of the leaf with these keys, joined by "/".

    Example:
        >>> nested_name("model/__w")
        'model/%5F_w'
    """
    return "/".join(map(name_component, text.split("/")))


def can_nest(texts: Iterable[str]) -> bool:
    """Whether no leaf has the name of a container of other leaves."""
    try:
        tree_from_names(dict.fromkeys(map(nested_name, texts)))
    except (ValueError, RecursionError):
        return False
    return True


def are_nested(names: Mapping[str, str]) -> bool:
    """Whether `nested_name` restores all names from the texts of `flat_names`; some lie in
    containers."""
    return any("/" in name for name in names) and all(
        nested_name(text) == name for name, text in names.items()
    )


def plain_values(index: Index) -> dict[str, str]:
    """One line for each leaf that is not an array, for `refuse`; for formats that hold only
    arrays."""
    return {name: f"a plain {type(value).__name__}" for name, value in index.values.items()}


def refuse(format: str, arrays: Iterable[ArrayEntry], values: Mapping[str, str]) -> None:
    """Refuses leaves that a format cannot hold.

    Arguments:
        format: for the message.
        arrays: those whose dtype it lacks.
        values: the problems of plain values, by name.

    Raises:
        UnsupportedLeaf: names all of them, and rules that help, if there is any.
    """
    lines = [f"  {quoted(name)}: {what}" for name, what in values.items()]
    helps, dropped = list[str](), next(iter(values), "")
    for entry in arrays:
        lines.append(f"  {quoted(entry.name)}: {entry.dtype_and_shape}")
        other = _OTHERS.get(dtype_kind(dtype_from_name(entry.dtype)))
        if other is None:
            dropped = dropped or entry.name
        elif not helps:
            name = printable(entry.name)
            helps = [f"convert arrays by rules, such as `{name} <-> {name} as {other}`"]
    if dropped:
        helps.append(f"drop leaves by rules, such as `{printable(dropped)} <-> drop`")
    if lines:
        raise cannot_hold(format, lines, f"{'; '.join(helps)}; {_KEEP}")


def cannot_hold(format: str, lines: list[str], hint: str) -> UnsupportedLeaf:
    """The error for leaves that a format cannot hold.

    Arguments:
        format: its name.
        lines: each names a leaf and its problem.
        hint: what to do.
    """
    more = [f"  and {len(lines) - 10} more"] if len(lines) > 10 else []
    listing = "\n".join([*(shortened(line, 300) for line in lines[:10]), *more])
    return UnsupportedLeaf(f"the format {format!r} cannot hold:\n{listing}\n{hint}")
