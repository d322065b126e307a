"""The state of a Keras model as a tree: variables by their paths, and the random generators.

Paths are those of `Model.get_state_tree`. Variables are one group whether they are trained or not,
so that a checkpoint loads into a model whose layers are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from unickpt.errors import UnsupportedLeaf
from unickpt.extend import dtype_from_name, put_nested
from unickpt.integrations import rng

SUPPORTED = ("jax", "torch")
_SEED = "seed_generator_state"


@dataclass(frozen=True)
class KerasState:
    """The variables of a model: "model", "optimizer" and "metrics", each by path.

    Arguments:
        model: a built model, whose optimizer is built, too.
        weights_only: leave out the optimizer and the metrics.

    Raises:
        ValueError: the backend is not supported, or the model is not built.
        UnsupportedLeaf: a layer has state that is no variable, or two variables have one path.
    """

    model: Any
    weights_only: bool = False

    def __post_init__(self) -> None:
        if keras.backend.backend() not in SUPPORTED:
            raise ValueError(
                f"KERAS_BACKEND={keras.backend.backend()} is not supported; use one of {SUPPORTED}"
            )
        if not self.model.built:
            raise ValueError(
                f"the model {self.model.name!r} is not built, so it has no variables yet: call it "
                "on a batch, or model.build(shape), first"
            )
        for layer in self.model._flatten_layers():
            _check_layer(layer)

    def tree(self) -> dict[str, Any]:
        """The tree to save."""
        return {
            group: _nested({path: _stored(variable) for path, variable in variables.items()})
            for group, variables in self._groups().items()
        }

    def like(self) -> dict[str, Any]:
        """The tree to load into: torch tensors in place, all others new."""
        return {
            group: _nested({path: _target(variable, group) for path, variable in variables.items()})
            for group, variables in self._groups().items()
        }

    def assign(self, tree: Mapping[str, Any]) -> None:
        """Sets the variables to the loaded values; variables of missing groups keep theirs."""
        for group, variables in self._groups().items():
            for path, variable in variables.items() if group in tree else ():
                value = tree[group]
                for part in path.split("/"):
                    value = value[part]
                _assign(variable, value)
        for layer in self.model._flatten_layers():
            if hasattr(layer, "finalize_state"):  # of Normalization: computed from variables
                layer.finalize_state()

    def names(self, group: str) -> set[str]:
        """The names that a checkpoint has for the variables of a group."""
        return {f"{group}/{path}" for path in self._groups().get(group, {})}

    def _groups(self) -> dict[str, dict[str, Any]]:
        groups = {"model": _by_path(self.model.variables)}
        if self.weights_only:
            return groups
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            groups["optimizer"] = _by_path(optimizer.variables)
        groups["metrics"] = _by_path(self.model.metrics_variables)
        return groups


def _by_path(variables: Iterable[Any]) -> dict[str, Any]:
    variables_by_path: dict[str, Any] = {}
    for variable in variables:
        if variables_by_path.setdefault(variable.path, variable) is not variable:
            raise UnsupportedLeaf(
                f"two variables of the model have the path {variable.path!r}; give their layers "
                "different names"
            )
    return variables_by_path


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dicts within dicts, from values by path."""
    whole: dict[str, Any] = {}
    for path, value in values.items():
        if not put_nested(whole, path.split("/"), value):
            raise UnsupportedLeaf(f"the path {path!r} goes through another variable")
    return whole


def _check_layer(layer: Any) -> None:
    """Refuses a layer that has state besides its variables."""
    if hasattr(layer, "save_assets") and not layer.get_config().get("vocabulary"):
        raise UnsupportedLeaf(
            f"layer {layer.name!r} ({type(layer).__name__}) has a vocabulary that is no variable; "
            "give it vocabulary=, or move it into the data pipeline"
        )
    if isinstance(layer, keras.layers.TorchModuleWrapper):
        module = layer.module
        buffers = set(module.state_dict()) - {name for name, _ in module.named_parameters()}
        if buffers:
            raise UnsupportedLeaf(
                f"layer {layer.name!r}: Keras does not know the buffers of a wrapped torch module "
                f"({', '.join(sorted(buffers))}); save the module itself next to the model"
            )


def _is_seed(variable: Any) -> bool:
    return bool(variable.name == _SEED)


def _stored(variable: Any) -> Any:
    """A variable's array, in the same form on all backends.

    Seeds are unsigned; torch, which has no such arithmetic, gives Keras their bits as int32.
    """
    value = variable.value
    if keras.backend.backend() == "jax":
        return value
    value = value.detach()
    return value.cpu().numpy().view(np.uint32) if _is_seed(variable) else value


def _target(variable: Any, group: str) -> Any:
    if _is_seed(variable):
        return np.empty(variable.shape, np.uint32)
    if group == "metrics":  # assigned later: an epoch begins with a reset
        return np.empty(variable.shape, dtype_from_name(variable.dtype))
    value = variable.value
    if keras.backend.backend() == "torch":
        return value.detach()
    import jax

    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        value.shape, value.dtype, sharding=value.sharding
    )


def _assign(variable: Any, value: Any) -> None:
    if keras.backend.backend() == "torch":
        if not isinstance(value, np.ndarray):
            return  # was filled in place
        if _is_seed(variable):
            value = value.view(np.int32)
    variable.assign(value)


# --- the random generators of a process -----------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's (if imported) and Keras's own global generators:
    with these, `fit` shuffles."""
    seeds = _global_seeds()
    keras_state = None if seeds is None else np.array(_stored(seeds.state))
    return {**rng.states().value, "keras": keras_state}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores the result of `random_state`, as far as this process has such generators."""
    rng.restore(state)
    if state["keras"] is not None:
        _assign(seed_generator.global_seed_generator().state, np.array(state["keras"]))


def _global_seeds() -> Any:
    """Keras's own generator, if it has been used; it would draw its seed from Python's."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
