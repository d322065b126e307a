"""Writes steps of Keras' callback OrbaxCheckpoint, of checkpoints that
unickpt.integrations.keras saved.

Sources: keras/src/callbacks/orbax_checkpoint.py, src/saving/saving_api.py, `Model.get_state_tree`
and `set_state_tree`, which silently skips variables that it does not find: a variable must be in
the group, trained or not trained, where the model has it. As unickpt.integrations.keras stores the
state, all variables are one group, so that it does not matter at a load which layers are frozen;
which ones were trained is noted in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from unickpt.backends.orbax import step_writer
from unickpt.backends.orbax.tree_writer import TreeFiles, tree_files
from unickpt.errors import UnsupportedLeaf
from unickpt.extend import (
    Index,
    Leaf,
    Node,
    Plan,
    children_by_key,
    dict_node,
    keys_of_leaves,
    quoted,
    tree_from_json,
    tree_without,
)

CONFIG = "keras"
"""The configuration of the model, in the metadata."""
VARIABLES = "keras_variables"
"""The paths of the model's variables, by Keras' two groups and in its order, in the metadata."""
MODEL = "model"
"""The group with all variables of the model."""
TRAINED, OTHERS = "trainable_variables", "non_trainable_variables"
"""The two groups that Keras makes of it."""
FURTHER = {"optimizer": "optimizer_variables", "metrics": "metrics_variables"}
"""Keras' names of the other groups."""
POSITION = "fit"
"""The group with the progress of a `fit`, which Keras does not know."""
_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_STATE, _MODEL_CONFIG, _TEXT = "pytree", "model_config", "config"
_HELP = "`--to orbax` writes any checkpoint"


@dataclass(frozen=True)
class KerasWriter:
    """A step of `keras.callbacks.OrbaxCheckpoint`, from whose directory
    `keras.saving.load_model` and `Model.load_weights` load."""

    suffixes: ClassVar[Sequence[str]] = ()

    def left_out(self, index: Index) -> Collection[str]:
        """How far a `fit` has come, and the states of random generators outside of the model."""
        return [name for name in index.names if name.partition("/")[0] == POSITION]

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        chunk_bytes = min(step_writer.CHUNK_BYTES, most_bytes)
        items = {_STATE: tree_files(index, _state(index), chunk_bytes)}
        config = index.metadata.get(CONFIG)
        if config is not None:
            items[_MODEL_CONFIG] = _config_files(config, chunk_bytes)
        files = [file for name, item in items.items() for file in item.within(name, name).files]
        files += step_writer.about(index, dict.fromkeys(items, _HANDLER))
        above = _STATE if len(items) > 1 else ""  # a single one is the checkpoint itself
        state = items[_STATE].within(_STATE, above)
        has_others = state.others or _MODEL_CONFIG in items
        return Plan(tuple(files), state.arrays, state.values, others=has_others)


def _state(index: Index) -> Node:
    """The result of `Model.get_state_tree`; the leaves have the names of the index.

    Raises:
        UnsupportedLeaf: it is not a checkpoint of a Keras model, or rules renamed its variables.
    """
    root = tree_from_json(index.tree)
    children = children_by_key(root)
    model = children.get(MODEL)
    unknown = [key for key in children if key not in (MODEL, POSITION, *FURTHER)]
    if unknown or not isinstance(model, Node):
        what = f"it holds {quoted(unknown[0])}" if unknown else f"it holds no {MODEL!r}"
        raise UnsupportedLeaf(
            f"it is not a checkpoint of unickpt.integrations.keras: {what}; {_HELP}"
        )
    untrained = _others(index, model)
    trained = {name for name, _ in keys_of_leaves(model)} - untrained
    state = {TRAINED: _part(model, untrained), OTHERS: _part(model, trained)}
    state |= {FURTHER[key]: node for key, node in children.items() if key in FURTHER}
    return dict_node(state)


def _others(index: Index, model: Node) -> set[str]:
    """The names of the variables of a model that are not trained."""
    names = {"/".join(map(str, keys)): name for name, keys in keys_of_leaves(model)}
    noted = index.metadata.get(VARIABLES)
    groups: list[Any] = (
        [noted.get(group) for group in (TRAINED, OTHERS)] if isinstance(noted, dict) else []
    )
    if not groups or not all(isinstance(group, list) for group in groups):
        raise UnsupportedLeaf(
            "its metadata do not say which variables of the model are trained, as Keras' format "
            "must; unickpt.integrations.keras notes it when it saves: load the checkpoint with it, "
            f"and save it again; or {_HELP}"
        )
    trained, untrained = set(groups[0]), set(groups[1])
    unknown = sorted(names.keys() - trained - untrained)
    if unknown:
        raise UnsupportedLeaf(
            f"{quoted(names[unknown[0]])}: the metadata do not say whether it is trained, because "
            "rules gave it another name; export the checkpoint with the names that it has"
        )
    return {name for path, name in names.items() if path in untrained}


def _part(model: Node, left_out: set[str]) -> Node | Leaf:
    """The variables of a model without some, and without containers that became empty."""
    return tree_without(model, left_out) or dict_node({})


def _config_files(config: Any, chunk_bytes: int) -> TreeFiles:
    """The files of the model's configuration, a text."""
    text = Leaf(_TEXT, None)
    index = Index(None, {}, values={_TEXT: json.dumps(config)})
    return tree_files(index, dict_node({_TEXT: text}), chunk_bytes)
