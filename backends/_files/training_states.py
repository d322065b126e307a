"""The files of Hugging Face's Trainer and accelerate besides weights: torch's
optimizers by numbers, generators, and values that are known.

Sources: torch/optim/optimizer.py (`state_dict`), NumPy's `ndarray.__reduce__`, Python's
`random.getstate`; integrations/rng.py describes the stored form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unickpt.backends._files import torch_layout
from unickpt.backends._files.pickle_writer import PickledCall
from unickpt.backends._files.pickles import Global
from unickpt.errors import UnsupportedLeaf
from unickpt.extend import (
    ArrayEntry,
    Box,
    Index,
    Layout,
    Leaf,
    Node,
    PlannedFile,
    children_by_key,
    dict_node,
    dtype_name,
    leaves_of_tree,
    quoted,
    tree_from_json,
    unwrapped,
)

Tree = Node | Leaf
_RECONSTRUCT = Global("numpy._core.multiarray._reconstruct")
_NDARRAY, _DTYPE = Global("numpy.ndarray"), Global("numpy.dtype")
TENSOR, DTYPE = "torch.Tensor", "dtype"
"""A tensor as integrations.packing stores it: a dict with these keys."""


def root_of(index: Index) -> dict[Any, Tree]:
    """The container at the top of a checkpoint."""
    return children_by_key(tree_from_json(index.tree))


def is_optimizer(node: Tree) -> bool:
    """Whether a node is the state of an optimizer of torch."""
    return children_by_key(node).keys() == {"state", "param_groups"}


def numbered(index: Index, node: Tree, name: str) -> Node:
    """The state of an optimizer by the numbers of its parameters, in the order of its groups.

    Arguments:
        index: has the names of the parameters.
        node: the state by names; or by numbers, as it is.
        name: of the optimizer, for messages.

    Raises:
        UnsupportedLeaf: it is something else.
    """
    fields = children_by_key(node)
    groups = unwrapped(fields["param_groups"]) if is_optimizer(node) else None
    state = unwrapped(fields["state"]) if groups is not None else None
    if not isinstance(groups, Node) or groups.kind != "list" or isinstance(state, Leaf):
        raise UnsupportedLeaf(
            f"{name!r} is not the state of an optimizer as torch has it, with 'state' and a list "
            "'param_groups': only a step that the integration saved is a whole checkpoint"
        )
    numbers: dict[Any, int] = {}
    new_groups = []
    for group in groups.children:
        in_group = children_by_key(group)
        params = in_group.get("params")
        param_names = [
            index.values.get(leaf.name) for leaf in (leaves_of_tree(params) if params else ())
        ]
        numbers |= {param: len(numbers) + position for position, param in enumerate(param_names)}
        made = _list([Leaf("", numbers[param]) for param in param_names])
        new_groups.append(dict_node({**in_group, "params": made}))
    assert isinstance(state, Node)
    unknown = [key for key in state.keys if key not in numbers]
    if unknown:
        raise UnsupportedLeaf(
            f"{name!r}: 'state' has an entry for the parameter {quoted(unknown[0])}, but no group "
            "in 'param_groups' has that parameter"
        )
    slots = {numbers[key]: child for key, child in children_by_key(state).items()}
    return dict_node({"state": dict_node(slots), "param_groups": _list(new_groups)})


def _list(children: Sequence[Tree]) -> Node:
    return Node("list", tuple(range(len(children))), tuple(children), list)


# --- files of torch.save --------------------------------------------------------------------------


class KnownTorchFile:
    """A file of torch.save with values and arrays that are in memory; others can be stored ones."""

    def __init__(self) -> None:
        self._storages: dict[str, tuple[str, Box, int] | bytes] = {}
        self._stored: dict[str, PickledCall] = {}

    def planned(self, name: str, value: Any) -> PlannedFile:
        """The file.

        Arguments:
            name: of the file.
            value: its content, for `pickle_writer.dumps`.
        """
        return torch_layout.planned_file(name, value, self._storages, last=False)

    def tensor(self, array: Any) -> PickledCall:
        """A tensor with the elements of a NumPy array."""
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        key, dtype = str(len(self._storages)), dtype_name(array.dtype)
        self._storages[key] = array.astype(array.dtype.newbyteorder("<")).tobytes()
        layout = Layout.replicated(array.ndim, 1)
        entry = ArrayEntry("", array.shape, dtype, array.shape, layout)
        return torch_layout.tensor(entry, array.shape, key)

    def stored(self, entry: ArrayEntry) -> PickledCall:
        """A tensor with the elements of a stored array; the same tensor each time."""
        if entry.name not in self._stored:
            key = str(len(self._storages))
            self._storages[key] = (entry.name, Box.whole(entry.shape), entry.nbytes)
            self._stored[entry.name] = torch_layout.tensor(entry, entry.shape, key)
        return self._stored[entry.name]

    def plain(self, value: Any) -> Any:
        """A value in which arrays are tensors, without the marks of packed tensors."""
        if isinstance(value, np.ndarray | np.generic):
            return self.tensor(value)
        if isinstance(value, dict) and value.keys() == {TENSOR, DTYPE}:
            return self.plain(value[TENSOR])
        if isinstance(value, dict):
            return {key: self.plain(child) for key, child in value.items()}
        return type(value)(map(self.plain, value)) if type(value) in (list, tuple) else value


def numpy_array(array: Any) -> PickledCall:
    """A NumPy array of integers as NumPy pickles it."""
    array = np.asarray(array)
    array = array.astype(array.dtype.newbyteorder("<"))
    kind = PickledCall(_DTYPE, (f"{array.dtype.kind}{array.dtype.itemsize}", False, True))
    kind.state = (3, "<", None, None, None, -1, -1, 0)
    made = PickledCall(_RECONSTRUCT, (_NDARRAY, (0,), b"b"))
    made.state = (1, array.shape, kind, False, array.tobytes())
    return made


def generators(file: KnownTorchFile, rng_states: Any, name: str) -> dict[str, Any]:
    """The states of a process's generators, as they are pickled: `python`, `numpy`, `torch`, and
    the list of each kind of accelerators by its name.

    Arguments:
        file: takes the tensors.
        rng_states: as `unickpt.integrations.rng` saved them.
        name: of the leaf, for messages.

    Raises:
        UnsupportedLeaf: it is something else.
    """
    try:
        python, numpy = rng_states["python"], rng_states["numpy"]
        words = tuple(int(word) for word in python["words"])
        made = {
            "python": (python["version"], words, python["gauss"]),
            "numpy": (
                *(numpy["kind"], numpy_array(numpy["keys"])),
                *(numpy["position"], numpy["has_gauss"], numpy["cached"]),
            ),
            "torch": file.tensor(rng_states["torch"]),
        }
        of_kind = rng_states["accelerators"].items()
        return made | {kind: [file.tensor(state) for state in states] for kind, states in of_kind}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UnsupportedLeaf(
            f"{name!r} is not what unickpt.integrations saves of random number generators "
            f"({error!r}); drop it by a rule: {name} <-> drop"
        ) from error
