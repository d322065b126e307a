"""Flax NNX needs no functions of its own; this one notices shardings that were lost.

`unickpt.save` and `unickpt.load` take modules, optimizers and states of NNX as they are. Loaded
arrays get the shardings of the abstract state, and `nnx.eval_shape` does not always know them
(flax#5110): without a mesh, and where variables are not sharded when they are made.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from unickpt.extend import first_few

__all__ = ["check_shardings"]

_NAMES = ("out_sharding", "sharding_names", "sharding")  # of the axes; later and earlier versions


def check_shardings(model: Any) -> None:
    """Checks that an abstract model or state has all shardings that its variables ask for.

    Arguments:
        model: the result of `nnx.eval_shape`, or a state of it.

    Raises:
        ValueError: variables with axis names have no sharding, so that each would be loaded whole
            onto one device; names all.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> check_shardings(nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    """
    state = model if isinstance(model, nnx.State) else nnx.state(model)
    pairs, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_variable)
    lost = [_name(path) for path, leaf in pairs if _is_variable(leaf) and _has_lost_it(leaf)]
    if lost:
        raise ValueError(
            f"{len(lost)} variables have axis names and no sharding, so that each would be loaded "
            f"whole onto one device: {first_few(lost)}. Call nnx.eval_shape under "
            "jax.set_mesh(mesh), or take the state of nnx.get_abstract_model(make, mesh)"
        )


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _has_lost_it(variable: Any) -> bool:
    value = variable.get_value()
    if not isinstance(value, jax.ShapeDtypeStruct) or value.sharding is not None:
        return False
    metadata = variable.get_metadata()
    return any(any(metadata.get(name) or ()) for name in _NAMES)


def _name(path: Any) -> str:
    return "/".join(str(getattr(key, "key", key)) for key in path)
