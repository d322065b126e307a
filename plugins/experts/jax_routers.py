"""Routers of mixtures of experts in Flax: how many tokens each expert has seen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unickpt.plugins.experts.routers import SeenBefore, is_router, layer_beside


class RouterTokens(SeenBefore):
    """Counts how many tokens go to each expert, from values that modules sow, for
    `Checkpointer.save(tokens=)`.

    A module sows the numbers of the experts that it chose, `self.sow("intermediates", "chosen",
    numbers)`, or how many tokens each got. Nothing waits for the device before `tokens` is called.

    Arguments:
        sown: a pattern of the names under which they are sown, such as `**/chosen`: `*` is one
            component, `**` any number of them.
        count: how many experts there are.
        experts: the name of the experts next to the sown values: `experts` for
            `layers_0/moe/experts/3/w1` next to `layers_0/moe/chosen`, `up` for a stacked array.
        counted: whether the sown values are token counts of the experts, not experts' numbers.

    Example:
        >>> counter = RouterTokens("**/chosen", 3)
        >>> counter.add({"layers_0": {"moe": {"chosen": (jnp.array([[0, 2], [2, 1]]),)}}})
        >>> counter.tokens()
        {'layers_0/moe/experts': [1.0, 1.0, 2.0]}
    """

    def __init__(
        self, sown: str, count: int, *, experts: str = "experts", counted: bool = False
    ) -> None:
        super().__init__()
        self._sown, self._count, self._experts, self._counted = sown, count, experts, counted
        self._counts: dict[str, Any] = {}

    def add(self, intermediates: Any) -> None:
        """Adds the sown values of one step.

        Arguments:
            intermediates: `variables["intermediates"]` of Flax Linen, returned by `apply(...,
                mutable="intermediates")`; or the second result of a function in
                `nnx.capture(nnx.Intermediate)`.

        Raises:
            ValueError: nothing matches, or a match has the wrong type or shape.
        """
        has_match = False
        for path, leaf in jax.tree_util.tree_leaves_with_path(intermediates):
            name = _name(path)
            if not is_router(self._sown, name):
                continue
            has_match = True
            layer = layer_beside(name, self._experts, "/")
            counts = leaf if self._counted else self._of(name, leaf)
            if counts.shape != (self._count,):
                raise ValueError(
                    f"{name!r} has the shape {list(counts.shape)}, but there are {self._count} "
                    "experts, each with the number of its tokens"
                )
            before = self._counts.get(layer)
            self._counts[layer] = counts if before is None else before + counts
        if not has_match:
            raise ValueError(f"nothing that was sown matches {self._sown!r}")

    def _of(self, name: str, numbers: Any) -> Any:
        if not jnp.issubdtype(numbers.dtype, jnp.integer):
            raise ValueError(
                f"{name!r} is of {numbers.dtype}, but the numbers of experts are integers; sow "
                "those, or give counted=True"
            )
        return jnp.bincount(numbers.reshape(-1), length=self._count)

    def tokens(self) -> dict[str, list[float]]:
        """How many tokens each expert has seen, by layer; waits for the device."""
        got = jax.device_get(self._counts)
        return {layer: self.added(layer, np.asarray(c).tolist()) for layer, c in got.items()}


def _name(path: Any) -> str:
    """The name of a leaf, without positions in the tuples that `sow` makes."""
    parts = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    names = [str(part) for part in parts if part is not None]
    return "/".join(names[:-1] if len(names) > 1 and names[-1] == "value" else names)
