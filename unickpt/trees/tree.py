"""Nested containers <-> named leaves, exactly: keeps key types, tuples and empty containers.

A leaf's name is its path, joined by `/`. Components are escaped so that no two paths share a name.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import keyword
import re
import unicodedata
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any
from urllib.parse import unquote

from unickpt.errors import UnsupportedLeaf
from unickpt.quoting import quoted
from unickpt.trees import plain_values

Key = str | int
Rebuild = Callable[[list[Any]], Any]
Check = Callable[["Node", Callable[[str], Any]], None]
MAX_DEPTH = 200


@dataclass(slots=True, unsafe_hash=True)  # not frozen: there is one for each array, see `protocol`
class Leaf:
    """A named leaf of a tree; never modified."""

    name: str
    value: Any


@dataclass(frozen=True)
class Node:
    """A container: its kind, its keys, and how to rebuild it from new children.

    `kind` is one of dict, ordereddict, list, tuple, namedtuple, object (any other container with
    named children) and wrapper (one child, which adds no component to the name). `original` is the
    container that was flattened, if there was one. `check` raises if `rebuild` would, as far as
    that can be told before arrays are read: it takes the node, and a function from the name of a
    leaf to a plain value, or to what stands for an array (the same object for the same array).
    """

    kind: str
    keys: tuple[Key, ...]
    children: tuple[Node | Leaf, ...]
    rebuild: Rebuild
    type_name: str = ""
    original: Any = None
    check: Check | None = None


@dataclass(frozen=True)
class Expansion:
    """One level of a container, as `Node`, whose children are not expanded yet."""

    kind: str
    keys: tuple[Key, ...]
    children: tuple[Any, ...]
    rebuild: Rebuild
    type_name: str = ""
    check: Check | None = None


IsLeaf = Callable[[Any], bool]
Expand = Callable[[Any, str], Expansion | None]


def component(key: Key, numbers: Set[str] = frozenset()) -> str:
    """One component of a name, escaped so that different keys of a container stay different.

    Arguments:
        key: of a child.
        numbers: the decimal forms of the container's integer keys.

    Example:
        >>> component("a/b"), component(3), component("3", {"3"})
        ('a%2Fb', '3', '%33')
    """
    if isinstance(key, int):
        return str(key)
    if key not in numbers and _is_plain(key):
        return key
    if not key:
        return "%"
    text = key.replace("%", "%25").replace("/", "%2F")
    if not text.strip("."):
        return text.replace(".", "%2E")
    if key in numbers or text.startswith("__"):  # zarr v3 reserves names that start with "__"
        return f"%{ord(text[0]):02X}{text[1:]}"
    return text


# What needs no escapes, as nearly all keys.
_is_plain = re.compile(r"(?!__)\.*+[^%/.][^%/]*+").fullmatch


def join(prefix: str, part: str) -> str:
    return f"{prefix}/{part}" if prefix else part


def flatten(
    tree: Any, is_leaf: IsLeaf, expand: Expand, what: str = "the tree cannot be stored"
) -> Node | Leaf:
    """Splits a tree into its structure and leaves.

    Arguments:
        tree: any nesting of containers.
        is_leaf: whether an object is a leaf.
        expand: expands the frameworks' own containers; called before dataclasses are expanded.
        what: what is impossible with a tree that is refused, for the error.

    Raises:
        UnsupportedLeaf: names every object that is neither a leaf nor a container, every bad key,
            and containers that contain themselves.
    """
    bad: list[str] = []
    root = _flatten(tree, "", is_leaf, expand, bad, ())
    if bad:
        raise UnsupportedLeaf(f"{what}:\n" + "\n".join(f"  {line}" for line in bad))
    return root


def _flatten(
    obj: Any, name: str, is_leaf: IsLeaf, expand: Expand, bad: list[str], stack: tuple[int, ...]
) -> Node | Leaf:
    if is_leaf(obj):
        leaf = Leaf(name, obj)
        if isinstance(obj, plain_values.Opaque) and len(stack) == MAX_DEPTH:
            bad.append(f"{quoted(name)}: nested deeper than {MAX_DEPTH} levels")
        if not isinstance(obj, enum.Enum) or len(stack) == MAX_DEPTH:
            return leaf
        # Only for people: the name of its type, which is stored with wrappers.
        return Node("wrapper", ("value",), (leaf,), itemgetter(0), type(obj).__name__)
    level = None
    if id(obj) in stack:
        problem: str | None = f"the {type(obj).__name__} contains itself"
    elif len(stack) >= MAX_DEPTH:
        problem = f"nested deeper than {MAX_DEPTH} levels"
    else:
        level = level_of(obj, name, expand)
        problem = _level_problem(level) if level is not None else _leaf_problem(obj)
    if level is None or problem:
        bad.append(f"{quoted(name) if name else 'the root'}: {problem}")
        return Leaf(name, obj)
    names, within = child_names(level.kind, level.keys, name), (*stack, id(obj))
    children = tuple(
        _flatten(child, child_name, is_leaf, expand, bad, within)
        for child, child_name in zip(level.children, names, strict=True)
    )
    return Node(level.kind, level.keys, children, level.rebuild, level.type_name, obj, level.check)


def level_of(obj: Any, name: str, expand: Expand) -> Expansion | None:
    """One level of any container; None if it is none. `expand` is as for `flatten`."""
    return _expand_builtin(obj) or expand(obj, name) or _expand_dataclass(obj)


def _leaf_problem(obj: Any) -> str:
    if isinstance(obj, type):
        return (
            f"the class {obj.__module__}.{obj.__qualname__}, not an instance of it; pass an "
            "instance, or leave it out"
        )
    return (
        f"{type(obj).__module__}.{type(obj).__qualname__} is neither an array, a "
        "plain value (int, float, bool, str, bytes, None) nor a container; "
        f"{plain_values.hint(obj)}"
    )


def _level_problem(level: Expansion) -> str | None:
    problem = _key_problem(level.keys)
    if level.kind == "namedtuple" and not problem:
        problem = _namedtuple_problem(level.keys, level.type_name)
    return problem


def _key_problem(keys: tuple[Any, ...]) -> str | None:
    for key in keys:
        if isinstance(key, bool) or not isinstance(key, str | int):
            return f"key {quoted(key)} is a {type(key).__name__}; keys must be str or int"
        if isinstance(key, str):
            try:
                key.encode()
            except UnicodeEncodeError:
                return f"key {quoted(key)} is not valid Unicode text"
    return "a key occurs twice" if len(set(keys)) != len(keys) else None


def child_names(kind: str, keys: tuple[Key, ...], name: str) -> list[str]:
    """Names of a container's children."""
    if kind == "wrapper":
        return [name]
    numbers = {str(key) for key in keys if isinstance(key, int)}
    return [join(name, component(key, numbers)) for key in keys]


def _expand_builtin(obj: Any) -> Expansion | None:
    if isinstance(obj, dict):
        keys = tuple(obj)
        kind = "ordereddict" if isinstance(obj, OrderedDict) else "dict"
        return Expansion(kind, keys, tuple(obj.values()), lambda xs: _refill(obj, keys, xs))
    if isinstance(obj, list):
        return Expansion("list", tuple(range(len(obj))), tuple(obj), list)
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        make = type(obj)
        fields = tuple(obj._fields)
        return Expansion("namedtuple", fields, tuple(obj), lambda xs: make(*xs), make.__name__)
    if isinstance(obj, tuple):
        return Expansion("tuple", tuple(range(len(obj))), tuple(obj), tuple)
    return None


def _refill(template: dict[Any, Any], keys: tuple[Any, ...], values: list[Any]) -> Any:
    if type(template) is dict:
        return dict(zip(keys, values, strict=True))
    filled = copy.copy(template)  # keeps the subclass, its attributes and the order of the keys
    for key, value in zip(keys, values, strict=True):
        filled[key] = value
    return filled


def _expand_dataclass(obj: Any) -> Expansion | None:
    if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
        return None
    fields = tuple(f.name for f in dataclasses.fields(obj))

    def rebuild(values: list[Any]) -> Any:
        new = copy.copy(obj)
        for field, value in zip(fields, values, strict=True):
            object.__setattr__(new, field, value)  # frozen dataclasses too
        return new

    children = tuple(getattr(obj, field) for field in fields)
    return Expansion("object", fields, children, rebuild, type(obj).__name__)


def leaves(node: Node | Leaf) -> Iterator[Leaf]:
    """All leaves, in the order of the containers."""
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children:
            if isinstance(child, Leaf):  # as nearly all: a generator for each would take longer
                yield child
            else:
                yield from leaves(child)


def checks(node: Node | Leaf) -> Iterator[tuple[Node, Check]]:
    """All containers that have a `check`, with it."""
    if isinstance(node, Node):
        if node.check is not None:
            yield node, node.check
        for child in node.children:
            if isinstance(child, Node):
                yield from checks(child)


def empty_containers(node: Node | Leaf, name: str = "") -> Iterator[str]:
    """The names of all containers without children.

    Example:
        >>> list(empty_containers(from_json({"dict": [["a", {"list": []}], ["b", "*"]]})))
        ['a']
    """
    if isinstance(node, Node):
        if not node.children:
            yield name
        names = child_names(node.kind, node.keys, name)
        for child, child_name in zip(node.children, names, strict=True):
            yield from empty_containers(child, child_name)


def keys_of(
    node: Node | Leaf, above: tuple[Key, ...] = ()
) -> Iterator[tuple[str, tuple[Key, ...]]]:
    """The name of each leaf, with the keys that lead to it, in the order of the containers.

    Example:
        >>> list(keys_of(from_names(["a%2Fb/c"])))
        [('a%2Fb/c', ('a/b', 'c'))]
    """
    if isinstance(node, Leaf):
        yield node.name, above
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from keys_of(child, above if node.kind == "wrapper" else (*above, key))


def rebuild(
    node: Node | Leaf, value: Callable[[str], Any], left_alone: Set[str] = frozenset()
) -> Any:
    """Rebuilds a tree, with `value(name)` for each leaf.

    Arguments:
        node: the structure.
        value: returns a leaf.
        left_alone: names of leaves; a container of none but these is the original itself, so that
            no object loads what it holds already.
    """
    if isinstance(node, Leaf):
        return value(node.name)
    if left_alone and all(leaf.name in left_alone for leaf in leaves(node)):
        return node.original
    return node.rebuild(
        [
            value(child.name) if isinstance(child, Leaf) else rebuild(child, value, left_alone)
            for child in node.children
        ]
    )


def without(node: Node | Leaf, left_out: Set[str]) -> Node | Leaf | None:
    """A structure without some leaves, and without the containers that have no others.

    A container of which members are left out becomes a dict with the keys of the others: the
    positions in a list stay what they were.

    Arguments:
        node: as it is stored.
        left_out: names of leaves.

    Returns:
        The rest; None if there is none.
    """
    if isinstance(node, Leaf):
        return None if node.name in left_out else node
    if all(leaf.name not in left_out for leaf in leaves(node)):
        return node
    both = (
        (key, without(child, left_out)) for key, child in zip(node.keys, node.children, strict=True)
    )
    rest = [(key, child) for key, child in both if child is not None]
    if not rest:
        return None
    keys, members = tuple(key for key, _ in rest), tuple(child for _, child in rest)
    if len(rest) == len(node.children):
        return replace(node, children=members)
    return Node("dict", keys, members, lambda xs: dict(zip(keys, xs, strict=True)))


def with_values(node: Node | Leaf, value: Callable[[str], Any]) -> Node | Leaf:
    """The same structure with other leaves."""
    if isinstance(node, Leaf):
        return Leaf(node.name, value(node.name))
    return replace(node, children=tuple(with_values(child, value) for child in node.children))


# --- the structure as JSON -------------------------------------------------------------------

LEAF = "*"
_PICKLE = "pickle:"  # before the name of the class of an opaque leaf


def to_json(node: Node | Leaf) -> Any:
    """The structure, without leaf values, as JSON types (see docs/format.md)."""
    if isinstance(node, Leaf):
        if isinstance(node.value, plain_values.Opaque):
            return {"wrapper": LEAF, "type": _PICKLE + node.value.class_name}
        return LEAF
    children = [to_json(child) for child in node.children]
    if node.kind in ("list", "tuple"):
        return {node.kind: children}
    if node.kind == "wrapper":
        return {"wrapper": children[0], "type": node.type_name}
    pairs = [[key, child] for key, child in zip(node.keys, children, strict=True)]
    if node.kind in ("namedtuple", "object"):
        return {node.kind: pairs, "type": node.type_name}
    return {node.kind: pairs}


def with_opaque(structure: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a tree, in which those that are opaque are `Opaque`s.

    Arguments:
        structure: as `to_json` returns it.
        values: by name; of what is opaque, its pickle.

    Raises:
        BadTree: the structure is invalid.
    """
    found = dict(values)
    for leaf in leaves(from_json(structure)):
        if isinstance(leaf.value, plain_values.Opaque):
            pickle = found.get(leaf.name)
            if type(pickle) is bytes:
                found[leaf.name] = plain_values.Opaque(leaf.value.class_name, pickle)
    return found


def has_opaque(data: bytes) -> bool:
    """Whether the JSON of a tree could contain leaves that are opaque."""
    return f'"{_PICKLE}'.encode() in data


class BadTree(ValueError):
    """The stored tree is invalid; says why."""


def from_json(structure: Any) -> Node | Leaf:
    """The inverse of `to_json`, with Python's built-in containers.

    Namedtuples keep their name and fields; objects (dataclasses, registered pytrees) become dicts,
    and wrappers what they wrap. No class is ever looked up by name. A leaf that is opaque has as
    its value an `Opaque` without its pickle, others have none.

    Raises:
        BadTree: says what is wrong with the structure.
    """
    return _from_json(structure, "", 0)


def from_names(names: Iterable[str]) -> Node | Leaf:
    """The nested dicts that names describe.

    Raises:
        ValueError: a name is both a leaf and a container.
    """
    root: dict[str, Any] = {}
    for name in names:
        *parents, last = ["" if part == "%" else unquote(part) for part in name.split("/")]
        level = root
        for parent in parents:
            level = level.setdefault(parent, {})
            if not isinstance(level, dict):
                raise ValueError(f"{quoted(name)} lies below a name that is itself a leaf")
        if last in level:
            raise ValueError(f"{quoted(name)} is a leaf, but other names lie below it")
        level[last] = Leaf(name, None)
    return _nested(root)


def _nested(level: Any) -> Node | Leaf:
    if isinstance(level, Leaf):
        return level
    keys = tuple(level)
    children = tuple(map(_nested, level.values()))
    return Node("dict", keys, children, lambda xs: dict(zip(keys, xs, strict=True)))


def _from_json(structure: Any, name: str, depth: int) -> Node | Leaf:
    if structure == LEAF:
        return Leaf(name, None)
    if depth >= MAX_DEPTH:
        raise BadTree(f"tree is nested deeper than {MAX_DEPTH} levels at {quoted(name)}")
    if not isinstance(structure, dict):
        raise BadTree(f"tree node {quoted(name)} is {quoted(structure)}")
    type_name = structure.get("type", "")
    kinds = [k for k in structure if k != "type"]
    if len(kinds) != 1 or not isinstance(type_name, str):
        raise BadTree(f"tree node {quoted(name)} has the fields {quoted(list(structure))}")
    kind, body = kinds[0], structure[kinds[0]]
    if kind == "wrapper" and body == LEAF and type_name.startswith(_PICKLE):
        return Leaf(name, plain_values.Opaque(type_name.removeprefix(_PICKLE), b""))
    if kind == "wrapper":
        child = _from_json(body, name, depth + 1)
        return Node(kind, (0,), (child,), lambda xs: xs[0], type_name)
    keys, items = _children(kind, body, name)
    names = child_names(kind, keys, name)
    children = tuple(
        _from_json(item, child, depth + 1) for item, child in zip(items, names, strict=True)
    )
    return Node(kind, keys, children, _python_container(kind, keys, type_name, name), type_name)


def _children(kind: str, body: Any, name: str) -> tuple[tuple[Key, ...], list[Any]]:
    """The keys of a container, and what it has under these.

    Raises:
        BadTree: they are not as `to_json` writes them.
    """
    if not isinstance(body, list):
        raise BadTree(f"tree node {quoted(name)}: {quoted(kind)} does not contain a list")
    if kind in ("list", "tuple"):
        return tuple(range(len(body))), body
    for pair in body:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise BadTree(
                f"tree node {quoted(name)}: {quoted(kind)} contains {quoted(pair)}, not a pair"
            )
    keys = tuple(key for key, _ in body)
    problem = _key_problem(keys)
    if problem:
        raise BadTree(f"tree node {quoted(name)}: {problem}")
    return keys, [item for _, item in body]


def _python_container(kind: str, keys: tuple[Key, ...], type_name: str, name: str) -> Rebuild:
    if kind == "list":
        return list
    if kind == "tuple":
        return tuple
    if kind == "ordereddict":
        return lambda xs: OrderedDict(zip(keys, xs, strict=True))
    if kind in ("dict", "object"):
        return lambda xs: dict(zip(keys, xs, strict=True))
    if kind == "namedtuple":
        problem = _namedtuple_problem(keys, type_name)
        if problem:
            raise BadTree(f"tree node {quoted(name)}: {problem}")
        make = _namedtuple(type_name, keys)
        return lambda xs: make(*xs)
    raise BadTree(f"tree node {quoted(name)}: unknown container {quoted(kind)}")


@lru_cache(maxsize=256)
def _namedtuple(type_name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple(type_name, fields)


def _namedtuple_problem(fields: tuple[Any, ...], type_name: str) -> str | None:
    """Why Python cannot create a namedtuple with these fields, or only a different one.

    Python treats two spellings of an identifier as equal if they have the same NFKC form, such as
    "fi" with and without a ligature.
    """
    if not _is_name(type_name):
        return f"namedtuple {quoted(type_name)} has fields {quoted(fields)} and an invalid name"
    forms = [unicodedata.normalize("NFKC", f) for f in fields if isinstance(f, str) and _is_name(f)]
    if len(forms) != len(fields) or any(form.startswith("_") for form in forms):
        return (
            f"namedtuple {quoted(type_name)} has fields {quoted(fields)}, not all of which are "
            "Python identifiers without a leading '_'"
        )
    if len(set(forms)) != len(forms):
        return f"namedtuple: Python treats two of its fields {quoted(fields)} as one identifier"
    return None


def _is_name(text: str) -> bool:
    """Whether a text is a Python identifier, both as it is and normalized."""
    form = unicodedata.normalize("NFKC", text)
    return all(t.isidentifier() and not keyword.iskeyword(t) for t in (text, form))


def merge(ours: Any, theirs: Any, name: str = "") -> Any:
    """Merges the structures of two processes: dicts unite their keys, also in wrappers of one type;
    everything else must be equal.

    Raises:
        ValueError: names the place where they differ.
    """
    if ours == theirs:
        return ours
    for kind in ("dict", "ordereddict"):
        if isinstance(ours, dict) and isinstance(theirs, dict) and kind in ours and kind in theirs:
            mine = {(type(k), k): child for k, child in ours[kind]}
            for key, child in theirs[kind]:
                at = (type(key), key)
                inner = join(name, component(key))
                mine[at] = merge(mine[at], child, inner) if at in mine else child
            return {kind: [[key, child] for (_, key), child in mine.items()]}
    if isinstance(ours, dict) and isinstance(theirs, dict) and "wrapper" in ours:
        pair = ours["wrapper"], theirs.get("wrapper")
        if ours.get("type") == theirs.get("type") and all(isinstance(x, dict) for x in pair):
            return {**ours, "wrapper": merge(*pair, name)}
    raise ValueError(f"the trees differ at {quoted(name)}")
