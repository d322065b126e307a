"""The content of a Lightning checkpoint besides arrays: stored without pickle, restored exactly.

Types that the format does not know are stored as their parts; `stored_types` records how.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import OrderedDict
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch

import unickpt
from unickpt import Checkpoint, LoadOptions
from unickpt.errors import CheckpointCorrupt, MissingPackage, UnsupportedFormat, UnsupportedLeaf
from unickpt.extend import (
    PYTHON_TYPES,
    STORED_TYPES,
    Leaf,
    Node,
    SavedOnly,
    StoredType,
    child_names,
    children_by_key,
    has_known_factory,
    is_array,
    is_plain,
    join_names,
    leaves_of_tree,
    name_component,
    parsed_types,
    quoted,
    rebuild_tree,
    storing_hint,
    structure_of,
    unwrapped,
)
from unickpt.integrations.torch_types import OF_TORCH, class_name, dtype_named
from unickpt.types import LocalFragments


def _omegaconf() -> Any:
    try:
        import omegaconf
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "the checkpoint has hyper-parameters of OmegaConf: pip install omegaconf"
        ) from error
    return omegaconf


def _of_config(config: Any) -> Any:
    """The containers of a configuration of OmegaConf, with dataclasses where it has classes."""
    omegaconf = _omegaconf()
    mode = omegaconf.SCMode.INSTANTIATE
    return omegaconf.OmegaConf.to_container(config, resolve=False, structured_config_mode=mode)


def _flagged(config: Any, flag: str) -> Any:
    getattr(_omegaconf().OmegaConf, f"set_{flag}")(config, True)
    return config


def _config_type(name: Any) -> Any:
    if name not in ("DictConfig", "ListConfig"):
        raise ValueError(f"OmegaConf has no configuration {quoted(name)}")
    return getattr(_omegaconf(), name)


_TYPES = (
    *PYTHON_TYPES,
    *OF_TORCH,
    StoredType("omegaconf", (), _of_config, lambda x: _omegaconf().OmegaConf.create(x)),
    StoredType("omegaconf readonly", (), lambda x: x, lambda x: _flagged(x, "readonly")),
    StoredType("omegaconf struct", (), lambda x: x, lambda x: _flagged(x, "struct")),
    StoredType("omegaconf type", (), lambda x: x.__name__, _config_type),
)
_BY_NAME = {kind.name: kind for kind in _TYPES}
_BY_CLASS = {cls: kind for kind in _TYPES for cls in kind.kinds}


def _is_config(kind: Any) -> bool:
    """Whether this is a class of configurations of OmegaConf."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and (kind is omegaconf.DictConfig or kind is omegaconf.ListConfig)


class ToSave(SavedOnly):
    """A Lightning checkpoint to save; taken apart within the save, so that the save fails on all
    ranks if something cannot be stored on one.

    Arguments:
        checkpoint: as Lightning's trainer makes it, or the part that this rank saves.
    """

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint

    def state_dict(self) -> dict[str, Any]:
        return stored_form(self._checkpoint)


def stored_form(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint as it is stored, with the types of values that are stored in another form.

    Raises:
        UnsupportedLeaf: lists all values that cannot be stored, with a way out for each.

    Example:
        >>> from pathlib import Path
        >>> stored_form({"dirpath": Path("/runs"), "step": 3})
        {'dirpath': '/runs', 'step': 3, 'unickpt_types': '{"dirpath": ["path"]}'}
    """
    converter = _TakenApart()
    form = {key: converter.form(x, name_component(key)) for key, x in checkpoint.items()}
    if converter.refused:
        raise UnsupportedLeaf(
            "these values of the Lightning checkpoint cannot be stored without pickle:\n"
            + "\n".join(f"  {line}" for line in converter.refused)
        )
    if STORED_TYPES in checkpoint:
        raise UnsupportedLeaf(
            f"the checkpoint has a key {STORED_TYPES!r} already; give it another name"
        )
    return form | ({STORED_TYPES: json.dumps(converter.types)} if converter.types else {})


class _TakenApart:
    """The types of values that were taken apart, by name and outermost first; and refused
    values."""

    def __init__(self) -> None:
        self.types: dict[str, list[str]] = {}
        self.refused: list[str] = []

    def form(self, value: Any, name: str) -> Any:
        """The stored form of a value."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if is_plain(value) or isinstance(value, LocalFragments):
            return value
        if type(value) in (dict, OrderedDict):
            return self._dict(value, name)
        if type(value) in (list, tuple) or (isinstance(value, tuple) and _is_namedtuple(value)):
            children = [self.form(x, join_names(name, str(n))) for n, x in enumerate(value)]
            return type(value)(*children) if _is_namedtuple(value) else type(value)(children)
        if isinstance(value, np.ndarray):
            return self._typed("numpy", value, name)
        if isinstance(value, np.generic):
            return self._typed("numpy scalar", value, name)
        if _is_config(type(value)):
            return self._config(value, name)
        kind = _BY_NAME["omegaconf type"] if _is_config(value) else _BY_CLASS.get(type(value))
        if kind is None or not has_known_factory(value):
            self.refused.append(f"{name}: {class_name(value)}; {_hint(value, name)}")
            return None
        self.types.setdefault(name, []).append(kind.name)
        return self.form(kind.store(value), name)

    def _tensor(self, value: torch.Tensor, name: str) -> Any:
        # Lightning reads its checkpoints before there is a model whose tensors could be filled.
        if not is_array(value):
            self.refused.append(
                f"{name}: {class_name(value)}; it would come back as a dict of the arrays that it "
                "consists of: store these, or a dense tensor"
            )
        return value

    def _config(self, value: Any, name: str) -> Any:
        for flag in ("readonly", "struct"):
            if value._get_node_flag(flag):
                self._typed(f"omegaconf {flag}", value, name)
        return self.form(self._typed("omegaconf", value, name), name)

    def _typed(self, kind: str, value: Any, name: str) -> Any:
        self.types.setdefault(name, []).append(kind)
        return _BY_NAME[kind].store(value)

    def _dict(self, value: dict[Any, Any], name: str) -> Any:
        if not all(type(key) in (str, int) for key in value):
            return self.form(self._typed("items", value, name), name)
        names = child_names("dict", tuple(value), name)
        pairs = zip(value.items(), names, strict=True)
        return type(value)((key, self.form(x, below)) for (key, x), below in pairs)


def read(
    stored: Checkpoint,
    *,
    device: Any = None,
    skip: Set[str] = frozenset(),
    only: Set[str] | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """A stored Lightning checkpoint, as it was given to be saved.

    Arguments:
        stored: opened.
        device: where its tensors come to lie; by default in host memory.
        skip: keys to leave out.
        only: keys to read; by default all.
        options: how to load.

    Returns:
        A checkpoint for Lightning's trainer: arrays are tensors, except those that were NumPy's.

    Raises:
        CheckpointCorrupt: its values do not fit the types that it names.
        UnickptError: as `unickpt.load`.
    """
    node = unwrapped(structure_of(stored))
    if not isinstance(node, Node) or node.kind not in ("dict", "ordereddict"):
        raise UnsupportedFormat(
            "this is not a checkpoint of Lightning: it is not a dict; load it with unickpt.load"
        )
    index, leaves, where = stored.index, dict[str, Any](), str(stored.location)
    types = parsed_types(index.values.get(STORED_TYPES, "{}"), where, _BY_NAME)
    top = children_by_key(node)
    chosen = (top.keys() if only is None else only) - skip - {STORED_TYPES}
    nodes_by_key = {key: x for key, x in top.items() if key in chosen}
    for leaf in (leaf for below in nodes_by_key.values() for leaf in leaves_of_tree(below)):
        if leaf.name in index.values:
            leaves[leaf.name] = index.values[leaf.name]
        else:
            leaves[leaf.name] = _empty(stored, leaf.name, types.get(leaf.name, []), device)
    like = {key: rebuild_tree(below, leaves.__getitem__) for key, below in nodes_by_key.items()}
    unickpt.load(stored, like, unexpected="skip", options=options)
    restored = _Restored(leaves, types, where)
    return {key: restored.value(below, name_component(key)) for key, below in nodes_by_key.items()}


def _empty(stored: Checkpoint, name: str, types: list[str], device: Any) -> Any:
    """The target to load an array into."""
    entry = stored[name]
    if types[-1:] in (["numpy"], ["numpy scalar"]):
        return np.empty(entry.shape, entry.dtype)
    return torch.empty(tuple(entry.shape), dtype=dtype_named(str(entry.dtype)), device=device)


class _Restored:
    """Puts values together again.

    Arguments:
        leaves: by name.
        types: as stored.
        where: for errors.
    """

    def __init__(
        self, leaves: Mapping[str, Any], types: Mapping[str, list[str]], where: str
    ) -> None:
        self._leaves, self._types, self._where = leaves, types, where

    def value(self, node: Node | Leaf, name: str) -> Any:
        """A value as it was before it was taken apart."""
        if isinstance(node, Leaf):
            result = self._leaves[node.name]
        else:
            names = child_names(node.kind, node.keys, name)
            pairs = zip(node.children, names, strict=True)
            result = node.rebuild([self.value(child, below) for child, below in pairs])
        for kind in reversed(self._types.get(name, [])):
            try:
                result = _BY_NAME[kind].restore(result)
            except MissingPackage:
                raise
            except Exception as error:
                raise CheckpointCorrupt(
                    f"{self._where}: {name!r} is not a {kind}, which it is said to be: {error}"
                ) from None
        return result


def _is_namedtuple(value: Any) -> bool:
    return type(value) is not tuple and hasattr(value, "_fields")


def _hint(value: Any, name: str) -> str:
    """The way out for a value that cannot be stored."""
    top, _, below = name.partition("/")
    if top in ("hyper_parameters", "datamodule_hyper_parameters"):
        argument = below.partition("/")[0]
        return f"leave it out: self.save_hyperparameters(ignore=[{argument!r}])"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "store dataclasses.asdict(x)"
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return "store x.state_dict()"
    hint = storing_hint(value)
    return f"{hint}, in the state_dict() of the callback" if top == "callbacks" else hint
