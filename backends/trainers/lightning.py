"""Writes files of Lightning's own, as its `TorchCheckpointIO` writes them, of checkpoints that
unickpt.integrations.lightning saved: values of further types are pickled as they were there.

Sources: lightning/fabric/plugins/io/torch_io.py, and `load_checkpoint` of the strategies.
Strategies for sharded models accept optimizer state by names of parameters as well as by numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from unickpt.backends._files import pickles, torch_layout
from unickpt.backends._files.flat_names import refuse
from unickpt.backends._files.pickle_writer import PickledCall, reduced
from unickpt.backends._files.pickles import BadPickle, Global
from unickpt.errors import CheckpointCorrupt, InvalidPath, UnsupportedLeaf
from unickpt.extend import (
    PYTHON_TYPES,
    STORED_TYPES,
    Index,
    Leaf,
    Node,
    Plan,
    StoredType,
    child_names,
    parsed_types,
    quoted,
    tree_from_json,
    unwrapped,
)

_WEIGHTS = "state_dict"
_DTYPE = re.compile(r"(bfloat|float|u?int|complex|qu?int|bits)\d[a-z0-9_]*|bool")
_DEVICE = re.compile(r"([a-z]+)(?::(\d+))?")
_DICTS = ("dict", "ordereddict")
_NUMPY = ("numpy", "numpy scalar")
# Types that unickpt reads from a file of torch's as they are stored.
_SAME = frozenset(("path", "set", "frozenset", "counter", "namespace", "torch.Size", "numpy"))


@dataclass(frozen=True)
class LightningWriter:
    """One file that `Trainer.fit(ckpt_path=)` resumes from without unickpt, and that
    `LightningModule.load_from_checkpoint` reads."""

    suffixes: ClassVar[Sequence[str]] = (".ckpt", ".pt", ".pth")
    _elements: Mapping[str, Any] = field(default_factory=dict)

    def needed(self, index: Index) -> Collection[str]:
        """NumPy's arrays and scalars, which are within the pickle."""
        types = _types(index)
        return [name for name in index.arrays if types.get(name, [""])[-1] in _NUMPY]

    def with_elements(self, elements: Mapping[str, Any]) -> LightningWriter:
        return replace(self, _elements=elements)

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        if file is None:
            raise InvalidPath(
                "a checkpoint of Lightning's is one file: choose a path that ends in .ckpt, where "
                "no folder is"
            )
        root = _checkpoint(index)
        missing = [x for x in torch_layout.missing_dtypes(index) if x.name not in self._elements]
        refuse("lightning", missing, {})
        leaves, storages = torch_layout.leaves_of(index, self._elements.keys())
        leaves |= self._elements
        leaves |= {alias: leaves[name] for alias, name in index.aliases.items()}
        pickled = _Pickled(leaves, _types(index))
        value = pickled.value(root, "", "")
        pickled.check_all_used()
        shown = pickled.shown
        arrays = {name: shown[name] for name in index.entries if name in shown}
        values = {name: shown[name] for name in index.values if name in shown}
        planned = torch_layout.planned_file(file, value, storages)
        return Plan((planned,), arrays, values, others=len(shown) < len(index.names))


def _types(index: Index) -> dict[str, list[str]]:
    return parsed_types(index.values.get(STORED_TYPES, "{}"), "the checkpoint", _TYPED)


def _checkpoint(index: Index) -> Node:
    """The tree of a checkpoint, without the types.

    Raises:
        UnsupportedLeaf: it is not one of Lightning.
    """
    node = unwrapped(tree_from_json(index.tree))
    keys = node.keys if isinstance(node, Node) and node.kind in _DICTS else ()
    if not isinstance(node, Node) or not {_WEIGHTS, STORED_TYPES} & {*keys}:
        raise UnsupportedLeaf(
            f"it is not a checkpoint of Lightning: it contains no dict with {_WEIGHTS!r}; "
            "`--to torch` writes any checkpoint as a file of torch.save"
        )
    pairs = [
        (key, x) for key, x in zip(node.keys, node.children, strict=True) if key != STORED_TYPES
    ]
    return replace(node, keys=tuple(key for key, _ in pairs), children=tuple(x for _, x in pairs))


class _Pickled:
    """Makes the pickled form of a tree.

    Arguments:
        leaves: the pickled form of each leaf, by name.
        types: of values, by name.
    """

    def __init__(self, leaves: Mapping[str, Any], types: Mapping[str, list[str]]) -> None:
        self._leaves, self._types, self._left = leaves, types, {*types}
        self.shown: dict[str, str] = {}
        """The leaves that unickpt reads in the file as they are stored, with their names there."""

    def value(self, node: Node | Leaf, name: str, shown: str | None) -> Any:
        """The pickled form of a value.

        Arguments:
            node: the value.
            name: stored.
            shown: its name in the file, as unickpt reads it; None if it reads something else.

        Raises:
            CheckpointCorrupt: it does not fit its type.
        """
        node = unwrapped(node)
        kinds = self._types.get(name, [])
        self._left.discard(name)
        if isinstance(node, Leaf):
            value = self._leaves[node.name]
            is_time = getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M")
            if shown is not None and _SAME.issuperset(kinds) and not is_time:
                self.shown[node.name] = shown
        else:
            names = child_names(node.kind, node.keys, name)
            below = _shown_below(node, kinds, shown)
            every = zip(node.children, names, below, strict=True)
            value = _container(node, [self.value(*child) for child in every])
        for kind in reversed(kinds):
            try:
                value = _TYPED[kind](value)
            except Exception as error:
                raise CheckpointCorrupt(
                    f"{quoted(name)} is not a {kind}, which it is said to be: {error}"
                ) from None
        return value

    def check_all_used(self) -> None:
        """Raises UnsupportedLeaf if the types name values that are not there: rules that rename
        or drop a value do not know its type."""
        if self._left:
            name = min(self._left)
            raise UnsupportedLeaf(
                f"{quoted(name)} is stored as a {self._types[name][0]}, and rules renamed or "
                "dropped it; leave it as it is, or write all values without their types, by the "
                f"rule `{STORED_TYPES} <-> drop`"
            )


def _shown_below(node: Node, kinds: list[str], shown: str | None) -> Sequence[str | None]:
    """The names of a container's children in the file, as unickpt reads them."""
    nothing = [None] * len(node.children)
    if shown is None or node.kind == "namedtuple":
        return nothing
    if kinds == ["deque"]:
        return [shown, *nothing[1:]]
    if kinds == ["defaultdict"]:
        return [*nothing[1:], shown]
    return child_names(node.kind, node.keys, shown) if _SAME.issuperset(kinds) else nothing


def _container(node: Node, children: Sequence[Any]) -> Any:
    if node.kind != "namedtuple":
        return torch_layout.container(node, children)
    # Its class is not stored, only the names in it.
    kind = PickledCall(Global("collections.namedtuple"), (node.type_name, node.keys))
    return PickledCall(Global("copyreg.__newobj__"), (kind, *children))


# --- types ------------------------------------------------------------------------------------


def _of_python(kind: StoredType) -> Callable[[Any], Any]:
    return lambda value: reduced(kind.restore(value))


def _call(name: str) -> Callable[[Any], Any]:
    """A class that is called with a list; of a set, in the same order in every process."""
    return lambda value: PickledCall(Global(name), (list(value),))


def _items(pairs: Any) -> Any:
    """A dict with keys of any type; made by its class if unickpt would refuse them in a pickle."""
    entries: dict[Any, Any] = dict(pairs)
    try:
        for key in entries:
            pickles.key(key)
    except BadPickle:
        return PickledCall(Global("builtins.dict"), (list(entries.items()),))
    return entries


def _device(text: str) -> Any:
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise ValueError(f"torch has no device {quoted(text)}")
    kind, number = match.groups()
    return PickledCall(Global("torch.device"), (kind, *([] if number is None else [int(number)])))


def _dtype(text: str) -> Any:
    if _DTYPE.fullmatch(text) is None:
        raise ValueError(f"torch has no dtype {quoted(text)}")
    return Global(f"torch.{text}")


def _config(content: Any) -> Any:
    """A configuration of OmegaConf, made by its class, because its own pickles depend on the
    version."""
    if not isinstance(content, dict | list):
        raise ValueError("it is neither a dict nor a list")
    return PickledCall(
        _config_class("DictConfig" if type(content) is dict else "ListConfig"), (content,)
    )


def _config_class(name: str) -> Global:
    return Global(f"omegaconf.{_CONFIGS[name]}.{name}")


def _flagged(config: Any, flag: str) -> Any:
    """A configuration with one more flag, the last argument of its class."""
    content, *arguments = config.args
    flags = {**(arguments[-1] if arguments else {}), flag: True}
    is_dict = config.name.endswith("DictConfig")
    between = (_ANY, _ANY, _ANY, True) if is_dict else (_ANY, True, _ANY)
    return PickledCall(config.function, (content, None, None, *between, flags))


_ANY = Global("typing.Any")
_CONFIGS = {"DictConfig": "dictconfig", "ListConfig": "listconfig"}
_TYPED: Mapping[str, Callable[[Any], Any]] = {
    **{kind.name: _of_python(kind) for kind in PYTHON_TYPES},
    "items": _items,
    "set": _call("builtins.set"),
    "frozenset": _call("builtins.frozenset"),
    "torch.Size": lambda x: PickledCall(Global("torch.Size"), (tuple(x),)),
    "torch.device": _device,
    "torch.dtype": _dtype,
    "omegaconf": _config,
    **{f"omegaconf {flag}": partial(_flagged, flag=flag) for flag in ("readonly", "struct")},
    "omegaconf type": _config_class,
}
"""The pickled form of a value of each type, from its parts."""
