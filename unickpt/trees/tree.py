"""Nested containers <-> named leaves, exactly: keeps key types, tuples and empty containers.

A leaf's name is its path, joined by `/`. Components are escaped so that no two paths share a name.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import io
import keyword
import re
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from unickpt.errors import UnsupportedLeaf
from unickpt.quoting import quoted

T = TypeVar("T")

Key = str | int
Rebuild = Callable[[list[Any]], Any]
Check = Callable[["Node", Callable[[str], Any]], None]
MAX_DEPTH = 200
"""The largest depth of nested containers."""
_MOST_KEY_BITS = 4096  # Python converts no text of more than 4,300 digits to an int


@dataclass(frozen=True)
class Opaque:
    """An object of another system that only its class can read: kept as it was stored, never run.

    `pickle.loads(x.pickle)` restores it where its class can be imported. This runs code that the
    checkpoint names, so do it only with checkpoints that you trust.

    Arguments:
        class_name: of its class, or of the function that makes it, with its module.
        pickle: the object as a pickle.

    Example:
        >>> import fractions, pickle
        >>> value = Opaque("fractions.Fraction", pickle.dumps(fractions.Fraction(1, 3)))
        >>> value.class_name, pickle.loads(value.pickle)
        ('fractions.Fraction', Fraction(1, 3))
    """

    class_name: str
    pickle: bytes

    def __repr__(self) -> str:
        return f"<opaque {quoted(self.class_name)}, {len(self.pickle)} bytes>"


@dataclass(slots=True, unsafe_hash=True)  # not frozen: see `adapter_protocol`
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
    that is known before arrays are read: it takes the node, and a function from the name of a leaf
    to a plain value, or to a stand-in for an array (the same object for the same array).
    """

    kind: str
    keys: tuple[Key, ...]
    children: tuple[Node | Leaf, ...]
    rebuild: Rebuild
    type_name: str = ""
    original: Any = None
    check: Check | None = None


class Expansion(NamedTuple):
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
    if type(key) is not str:
        key = plain_key(key)
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


# Keys that need no escapes, as nearly all.
_is_plain = re.compile(r"(?!__)\.*+[^%/.][^%/]*+").fullmatch


def join(prefix: str, part: str) -> str:
    """A name, from that of a container and one component."""
    return f"{prefix}/{part}" if prefix else part


def flatten(
    tree: Any,
    is_leaf: IsLeaf,
    expand: Expand,
    what: str = "the tree cannot be stored",
    problem_of: Callable[[str, Any], str | None] = lambda name, value: None,
) -> Node | Leaf:
    """Splits a tree into its structure and leaves.

    Arguments:
        tree: any nesting of containers.
        is_leaf: whether an object is a leaf.
        expand: expands the frameworks' own containers; called before dataclasses are expanded.
        what: the operation that is impossible with a refused tree, for the error.
        problem_of: returns why a leaf cannot be stored, with its name; called only for refused
            trees, so that all problems are reported together.

    Raises:
        UnsupportedLeaf: names every object that is neither a leaf nor a container, every bad key,
            and containers that contain themselves.
    """
    bad: list[str] = []
    root = _flatten(tree, "", is_leaf, expand, bad, ())
    if bad:
        problems = [problem_of(x.name, x.value) for x in leaves(root) if is_leaf(x.value)]
        bad += [problem for problem in problems if problem]
        raise UnsupportedLeaf(f"{what}:\n" + "\n".join(f"  {line}" for line in bad))
    return root


def _flatten(
    obj: Any, name: str, is_leaf: IsLeaf, expand: Expand, bad: list[str], stack: tuple[int, ...]
) -> Node | Leaf:
    if is_leaf(obj):
        leaf = Leaf(name, obj)
        if isinstance(obj, Opaque) and len(stack) == MAX_DEPTH:
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
        try:
            level = level_of(obj, name, expand)
            problem = _level_problem(level) if level is not None else _leaf_problem(obj)
        except UnsupportedLeaf as error:
            problem = str(error).removeprefix(f"{name!r}: ")
    if level is None or problem:
        bad.append(f"{quoted(name) if name else 'the root'}: {problem}")
        return Leaf(name, obj)
    keys = plain_keys(level.keys)
    names, within = child_names(level.kind, keys, name), (*stack, id(obj))
    children = [
        _flatten(child, child_name, is_leaf, expand, bad, within)
        for child, child_name in zip(level.children, names, strict=True)
    ]
    return Node(level.kind, keys, tuple(children), level.rebuild, level.type_name, obj, level.check)


def level_of(obj: Any, name: str, expand: Expand) -> Expansion | None:
    """One level of any container; None if it is none. `expand` is as for `flatten`."""
    return _expand_builtin(obj) or expand(obj, name) or _expand_dataclass(obj)


def _leaf_problem(obj: Any) -> str:
    from unickpt.trees import hints

    if isinstance(obj, type):
        return (
            f"the class {obj.__module__}.{obj.__qualname__}, not an instance of it; pass an "
            "instance, or leave it out"
        )
    return (
        f"{type(obj).__module__}.{type(obj).__qualname__} is neither an array, a "
        "plain value (int, float, bool, str, bytes, None) nor a container; "
        f"{hints.hint(obj)}"
    )


def _level_problem(level: Expansion) -> str | None:
    problem = key_problem(level.keys)
    if level.kind == "namedtuple" and not problem:
        problem = namedtuple_problem(level.keys, level.type_name)
    return problem


def plain_key(key: Any) -> Any:
    """A key, a name or a pattern as exactly a str or an int; any other object unchanged.

    A member of `class Part(str, Enum)` equals its text but is formatted differently, and a subclass
    of str or int may compare and hash as it likes. So each key is converted where it enters.

    Example:
        >>> plain_key(enum.Enum("Part", {"MODEL": "model"}, type=str).MODEL)
        'model'
    """
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return int.__int__(key)
    return int(key) if isinstance(key, np.integer) else key


def plain_keys(keys: Iterable[Any]) -> tuple[Any, ...]:
    """Each key as `plain_key` returns it."""
    keys = tuple(keys)
    return keys if _PLAIN_KEYS.issuperset(map(type, keys)) else tuple(map(plain_key, keys))


_PLAIN_KEYS = frozenset((str, int))


def key_problem(keys: tuple[Any, ...]) -> str | None:
    """Why a container with these keys cannot be stored; None if it can."""
    names = plain_keys(keys)
    for key in names:
        if type(key) is not str and type(key) is not int:
            return f"key {quoted(key)} is a {type(key).__name__}; keys must be str or int"
        if type(key) is int and key.bit_length() > _MOST_KEY_BITS:
            return f"a key is an int of {key.bit_length()} bits, more than {_MOST_KEY_BITS}"
        if type(key) is str:
            try:
                key.encode()
            except UnicodeEncodeError:
                return f"key {quoted(key)} is not valid Unicode text"
    if len(set(names)) == len(names):
        return None
    first = dict[Key, Any]()
    for key, original in zip(names, keys, strict=True):
        if key in first:
            break
        first[key] = original
    pair = f"{quoted(first[key])} and {quoted(original)}"
    return f"a key occurs twice: {pair} are both stored as {quoted(key)}"


def child_names(kind: str, keys: tuple[Key, ...], name: str) -> list[str]:
    """Names of a container's children."""
    if kind == "wrapper":
        return [name]
    numbers, prefix = {str(key) for key in keys if isinstance(key, int)}, f"{name}/" if name else ""
    return [f"{prefix}{component(key, numbers)}" for key in keys]


def named_children(node: Node, name: str) -> Iterator[tuple[str, Node | Leaf]]:
    """The children of a container of this name, each with its name."""
    return zip(child_names(node.kind, node.keys, name), node.children, strict=True)


def _expand_builtin(obj: Any) -> Expansion | None:
    if isinstance(obj, dict):
        keys = tuple(obj)
        kind = "ordereddict" if isinstance(obj, OrderedDict) else "dict"
        return Expansion(kind, keys, tuple(obj.values()), lambda xs: _refill(obj, keys, xs))
    if isinstance(obj, list):
        make_list: Rebuild = list if type(obj) is list else lambda xs: _list_like(obj, xs)
        return Expansion("list", tuple(range(len(obj))), tuple(obj), make_list)
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        make = type(obj)
        fields = tuple(obj._fields)
        return Expansion("namedtuple", fields, tuple(obj), lambda xs: make(*xs), make.__name__)
    if isinstance(obj, tuple):
        make_tuple: Rebuild = tuple if type(obj) is tuple else lambda xs: _tuple_like(obj, xs)
        return Expansion("tuple", tuple(range(len(obj))), tuple(obj), make_tuple)
    if isinstance(obj, io.BytesIO):
        return Expansion("wrapper", ("value",), (obj.getvalue(),), _bytes_io, "BytesIO")
    return None


def _list_like(template: list[Any], values: list[Any]) -> list[Any]:
    """A list of the class of another one, with its attributes."""
    new = copy.copy(template)
    list.__setitem__(new, slice(None), values)
    return new


def _tuple_like(template: tuple[Any, ...], values: list[Any]) -> Any:
    """A tuple of the class of another one, with its attributes.

    Raises:
        UnsupportedLeaf: the class takes other arguments than the elements.
    """
    make: Any = type(template)
    try:
        try:
            new = tuple.__new__(make, values)
        except TypeError:  # from a class written in C, such as torch.Size
            new = make(values)
    except Exception as error:
        raise UnsupportedLeaf(
            f"a {make.__name__} of `like` cannot be built from its elements: {error}; pass tuple(x)"
        ) from error
    if hasattr(template, "__dict__"):
        new.__dict__.update(template.__dict__)
    return new


def _bytes_io(children: list[Any]) -> io.BytesIO:
    return io.BytesIO(children[0])


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


def unwrapped(node: Node | Leaf | T) -> Node | Leaf | T:
    """A structure without enclosing wrappers, which are no part of its name."""
    while isinstance(node, Node) and node.kind == "wrapper":
        (node,) = node.children
    return node


def find(node: Node | Leaf | None, name: str) -> Node | Leaf | None:
    """The node of a name in a structure, with enclosing wrappers; None if there is none."""
    path = ""
    while isinstance(node, Node) and path != name:
        both = named_children(node, path)
        inside = ((n, c) for n, c in both if name == n or name.startswith(f"{n}/") or n == path)
        path, node = next(inside, ("", None))
    return node if path == name else None


def by_key(node: Node | Leaf) -> dict[Any, Node | Leaf]:
    """The children of a container without enclosing wrappers, by key; none for a leaf."""
    inner = unwrapped(node)
    return {} if isinstance(inner, Leaf) else dict(zip(inner.keys, inner.children, strict=True))


def dict_of(children: Mapping[Any, Node | Leaf]) -> Node:
    """The structure of a dict.

    Example:
        >>> dict_of({"a": Leaf("a", 1)}).rebuild([2])
        {'a': 2}
    """
    keys = tuple(children)
    members = tuple(children.values())
    return Node("dict", keys, members, lambda xs: dict(zip(keys, xs, strict=True)))


def put(root: dict[Any, Any], keys: Sequence[Any], value: Any) -> bool:
    """Puts a value into nested dicts, which it makes as needed; False if another one is in the way.

    Example:
        >>> root = {}
        >>> put(root, ["a", "b"], 1), put(root, ["a", "b", "c"], 2), root
        (True, False, {'a': {'b': 1}})
    """
    *above, last = keys
    level: Any = root
    for key in above:
        level = level.setdefault(key, {})
        if not isinstance(level, dict):
            return False
    if last in level:
        return False
    level[last] = value
    return True


def leaves(node: Node | Leaf) -> Iterator[Leaf]:
    """All leaves, in the order of the containers."""
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children:
            if isinstance(child, Leaf):  # nearly all are: a generator for each would take longer
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


def containers(node: Node | Leaf, name: str = "") -> Iterator[tuple[str, Node]]:
    """All containers with their names, the outer ones first.

    Example:
        >>> from unickpt.trees.tree_json import from_json
        >>> node = from_json({"dict": [["a", {"list": []}], ["b", "*"]]})
        >>> [(name, container.kind) for name, container in containers(node)]
        [('', 'dict'), ('a', 'list')]
    """
    if isinstance(node, Node):
        yield name, node
        for child_name, child in named_children(node, name):
            yield from containers(child, child_name)


def keys_of(
    node: Node | Leaf, above: tuple[Key, ...] = ()
) -> Iterator[tuple[str, tuple[Key, ...]]]:
    """The name of each leaf, with the keys that lead to it, in the order of the containers.

    Example:
        >>> from unickpt.trees.tree_json import from_names
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
        left_alone: names of leaves; a container of only these stays the original itself, so that no
            object reloads its own values.
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
    """A structure without some leaves, and without containers that have no other leaves.

    A container that loses members becomes a dict with the keys of the others: positions in a list
    stay the same.

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
    members = {key: child for key, child in both if child is not None}
    if not members:
        return None
    if len(members) == len(node.children):
        return replace(node, children=tuple(members.values()))
    return dict_of(members)


def with_values(node: Node | Leaf, value: Callable[[str], Any]) -> Node | Leaf:
    """The same structure with other leaves."""
    if isinstance(node, Leaf):
        return Leaf(node.name, value(node.name))
    return replace(node, children=tuple(with_values(child, value) for child in node.children))


def namedtuple_problem(fields: tuple[Any, ...], type_name: str) -> str | None:
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


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A container's structure; holds neither the container nor its leaves.

    Arguments:
        name: of the container in its tree.
        container_type: its type.
        kind, keys, type_name: as of `Node`.
        children: their structures; None for a leaf.
    """

    name: str
    container_type: type
    kind: str
    keys: tuple[Key, ...]
    type_name: str
    children: tuple[Skeleton | None, ...]

    def is_of(self, kind: str, keys: tuple[Key, ...], type_name: str) -> bool:
        """Whether a container has this structure, except for its children."""
        is_equal = (kind, keys, type_name) == (self.kind, self.keys, self.type_name)
        return is_equal and list(map(type, keys)) == list(map(type, self.keys))  # as 1 == True


def skeleton(root: Node | Leaf) -> Skeleton | None:
    """The structure of a flattened tree; None if it is a leaf, or contains a wrapped leaf."""
    return _skeleton(root, "") if isinstance(root, Node) else None


def _skeleton(node: Node, name: str) -> Skeleton | None:
    if node.original is None:
        return None
    names = child_names(node.kind, node.keys, name)
    children = []
    for child, child_name in zip(node.children, names, strict=True):
        below = _skeleton(child, child_name) if isinstance(child, Node) else None
        if below is None and isinstance(child, Node):
            return None
        children.append(below)
    container_type = type(node.original)
    return Skeleton(name, container_type, node.kind, node.keys, node.type_name, tuple(children))


def leaves_of(root: Any, like: Skeleton, level: Expand) -> list[Any] | None:
    """The values of a tree's leaves, in the order of its containers.

    Arguments:
        root: the tree.
        like: the structure that it may have.
        level: expands one level of a container, as `tree.flatten` does it.

    Returns:
        None if it has another structure.
    """
    values: list[Any] = []
    return values if _collect(root, like, level, values) else None


def _collect(obj: Any, like: Skeleton, level: Expand, values: list[Any]) -> bool:
    children = _children(obj, like, level)
    if children is None:
        return False
    if not any(like.children):
        values.extend(children)
        return True
    for child, below in zip(children, like.children, strict=True):
        if below is None:
            values.append(child)
        elif not _collect(child, below, level, values):
            return False
    return True


def _children(obj: Any, like: Skeleton, level: Expand) -> Any:
    """The children of a container; None if it has another structure."""
    container_type = type(obj)
    if container_type is not like.container_type:
        return None
    if container_type is dict:
        return obj.values() if like.is_of("dict", plain_keys(obj), "") else None
    if container_type is list or container_type is tuple:
        return obj if len(obj) == len(like.children) else None
    expansion = level(obj, like.name)
    if expansion is None or not like.is_of(
        expansion.kind, plain_keys(expansion.keys), expansion.type_name
    ):
        return None
    return expansion.children
