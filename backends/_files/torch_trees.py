"""The content of torch's pickles, as trees of containers, plain values and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.backends._files import known_objects
from unickpt.backends._files.pickles import (
    BadPickle,
    FileBytes,
    Global,
    PickledObject,
    attributes,
    unread,
)
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.torch_tensors import Tensor, TorchStorage, holds_tensors
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.extend import MAX_DEPTH, Expansion, Plain, is_plain, plain_length, quoted, shortened

_MOST_TEXT = 1000
# A container that occurs several times in a pickle is several containers of the tree: their number
# can double with each level. So many nodes are always allowed, and one more for each byte.
_LEAST_NODES = 1000
# All their names together, for each byte.
_NAMES = 64
# All objects of unknown classes together, which can share what they hold, for each byte; and all
# texts, bytes and integers, each of which can be recalled with two bytes.
_OPAQUE = _VALUES = 64


@dataclass(frozen=True)
class _ObjectNode:
    """An object of an unknown class that holds tensors: a container of its attributes."""

    class_name: str
    children: Mapping[str | int, Any]


def expand(node: Any, name: str) -> Expansion | None:
    """An object that holds tensors as a container, for `flatten_tree`."""
    if not isinstance(node, _ObjectNode):
        return None
    keys = tuple(node.children)
    return Expansion(
        "object",
        keys,
        tuple(node.children.values()),
        lambda values: dict(zip(keys, values, strict=True)),
        node.class_name,
    )


class PlainTree:
    """Makes a tree of dicts, lists, tuples, objects, plain values and tensors.

    Arguments:
        file: holds it.
        where: the file, for errors.
    """

    def __init__(self, file: TorchFile, where: str) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.file, self._where = file, where
        self._nodes = _LEAST_NODES + file.pickle_size
        self._letters = _NAMES * self._nodes
        self._opaque = _OPAQUE * self._nodes
        self._values = _VALUES * self._nodes
        self._without: set[int] = set()  # objects that hold no tensor, by identity

    def tree(self, value: Any, depth: int, letters: int) -> Any:
        """The tree of a value.

        Arguments:
            value: the content of a pickle.
            depth: containers above it.
            letters: length of its name.
        """
        self._spend(1)
        self._letters -= letters
        if self._letters < 0:
            raise self._too_many()
        if depth > MAX_DEPTH:
            raise UnsupportedFormat(f"{self._where} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, PickledObject):
            made = self._decoded(known_objects.decoded, value)
            if isinstance(made, PickledObject) and made is not value:  # its holder is left out
                return self.tree(made, depth + 1, letters)
            value = made
        if isinstance(value, dict):
            return self.a_dict(value, depth, letters)
        if isinstance(value, list | tuple | set | frozenset):
            children = (self.tree(child, depth + 1, letters + 2) for child in value)
            return tuple(children) if isinstance(value, tuple) else list(children)
        if isinstance(value, TorchStorage):
            value = Tensor(value, value.dtype or "uint8", 0, (value.count,), (1,))
        if isinstance(value, Tensor):
            return self.leaf(value)
        if isinstance(value, FileBytes):
            return self._counted(value.read())
        if isinstance(value, PickledObject) and holds_tensors(value, self._without, self._spend):
            return _ObjectNode(value.name, self._children(attributes(value), depth, letters))
        if isinstance(value, PickledObject | Global):
            made = self.file.opaque(value, self._opaque)
            self._opaque -= len(made.pickle)
            return made
        return self._counted(value) if is_plain(value) else _text(value)

    def _counted(self, value: Plain) -> Plain:
        """A plain value, whose length counts: writing it writes all of it."""
        self._values -= plain_length(value)
        if self._values < 0:
            raise CheckpointCorrupt(f"{self._where}: its values are too long for its size")
        return value

    def _decoded(self, decode: Callable[[Any], Any], value: Any) -> Any:
        try:
            return decode(value)
        except BadPickle as error:
            raise unread(error, self._where, "a value") from error

    def _spend(self, nodes: int) -> None:
        self._nodes -= nodes
        if self._nodes < 0:
            raise self._too_many()

    def _too_many(self) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"{self._where} has too many leaves for its size: its containers refer to each other "
            "too often"
        )

    def leaf(self, tensor: Tensor) -> Any:
        """The node of a tensor in the tree."""
        self.tensors[id(tensor)] = tensor
        return tensor

    def a_dict(self, entries: Mapping[Any, Any], depth: int, letters: int) -> Any:
        """The node of a dict in the tree."""
        return self._children(entries.items(), depth, letters)

    def _children(
        self, entries: Iterable[tuple[Any, Any]], depth: int, letters: int
    ) -> dict[str | int, Any]:
        children: dict[str | int, Any] = {}
        for key, value in entries:
            name = _name(self._decoded(known_objects.key_of, key))
            if name in children:
                raise UnsupportedFormat(f"{self._where}: two keys are both called {quoted(name)}")
            length = letters + 1 + (len(name) if isinstance(name, str) else 20)
            children[name] = self.tree(value, depth + 1, length)
        return children


def _name(key: Any) -> str | int:
    """A key of a dict as a name."""
    if type(key) is int:
        return key
    text = key if isinstance(key, str) else _text(key)
    return text.encode(errors="backslashreplace").decode()


def _text(value: Any) -> str:
    """A value that is neither an array nor a plain value, as a text for people."""
    if isinstance(value, PickledObject | Global):  # as a key
        return f"<{shortened(value.name, _MOST_TEXT)}>"
    if is_plain(value) or isinstance(value, tuple):  # of a key, which is short
        return quoted(value, _MOST_TEXT)
    return f"<{type(value).__name__}>"
