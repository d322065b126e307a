"""Routers of mixtures of experts in torch: how many tokens each expert has seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from unickpt.plugins.experts.routers import SeenBefore, is_router, layer_beside


class RouterTokens(SeenBefore):
    """Counts how many tokens the routers of a model give to each expert, by forward hooks, for
    `Checkpointer.save(tokens=)`.

    Only modules that are in training mode are counted, and recomputation in the backward pass
    (activation checkpointing) is not counted twice. The counts stay on the device of the router,
    and nothing waits for it before `tokens` is called.

    Arguments:
        model: with the routers.
        routers: a pattern of the names of their modules, such as `**.gate`: `*` is one component,
            `**` any number of them.
        experts: the name of the experts next to a router: `experts` for `layers.0.moe.experts.3.w1`
            next to `layers.0.moe.gate`, `experts.w1` for a stacked array.
        top_k: how many experts each token goes to, by the largest outputs of the router. Not needed
            if the router returns the numbers of experts.
        count: how many experts there are; by default as many as the router's `weight` has rows.
        chosen: returns the numbers of the experts, in a tensor of integers, given the router's
            result. By default the only tensor of integers in it, or the positions of the `top_k`
            largest in the only tensor of floats.

    Raises:
        ValueError: no module matches, or the number of its experts is not known.

    Example:
        >>> model = torch.nn.ModuleDict({"gate": torch.nn.Linear(4, 3)})
        >>> counter = RouterTokens(model, "gate", top_k=1)
        >>> _ = model["gate"](torch.ones(5, 4))
        >>> sum(counter.tokens()["experts"])
        5.0
    """

    def __init__(
        self,
        model: torch.nn.Module,
        routers: str,
        *,
        experts: str = "experts",
        top_k: int | None = None,
        count: int | None = None,
        chosen: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._top_k, self._chosen = top_k, chosen
        self._counts: dict[str, torch.Tensor] = {}
        self._hooks = []
        for name, module in model.named_modules():
            if not is_router(routers, name):
                continue
            weight = getattr(module, "weight", None)
            rows = count if count is not None or weight is None else len(weight)
            if rows is None:
                raise ValueError(
                    f"the router {name!r} has no `weight` by whose rows the experts are known; "
                    "give count="
                )
            layer = layer_beside(name, experts, ".")
            self._counts[layer] = torch.zeros(rows, dtype=torch.int64)
            hook = partial(self._count, name, layer)
            self._hooks.append(module.register_forward_hook(hook))
        if not self._hooks:
            names = ", ".join(name for name, _ in model.named_modules() if name)
            raise ValueError(f"no module matches {routers!r}; there are {names[:500]}")

    def _count(self, name: str, layer: str, module: torch.nn.Module, _: Any, output: Any) -> None:
        if not module.training or _is_backward():
            return
        with torch.no_grad():
            numbers = self._numbers(name, output).detach().reshape(-1).long()
            counts = self._counts[layer]
            if counts.device != numbers.device:
                counts = self._counts[layer] = counts.to(numbers.device)
            counts.scatter_add_(0, numbers, torch.ones_like(numbers))

    def _numbers(self, name: str, output: Any) -> torch.Tensor:
        if self._chosen is not None:
            return self._chosen(output)
        parts = list(output) if isinstance(output, tuple | list) else [output]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        integers = [t for t in tensors if not t.is_floating_point() and t.dtype != torch.bool]
        if len(integers) == 1:
            return integers[0]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not integers and len(floats) == 1 and self._top_k is not None:
            return floats[0].topk(self._top_k, dim=-1).indices
        raise ValueError(
            f"the router {name!r} returns {len(integers)} tensors of integers and {len(floats)} of "
            "floats: give RouterTokens top_k= if it is the only one of floats, or chosen=, a "
            "function that finds the numbers of the experts"
        )

    def tokens(self, group: Any = None) -> dict[str, list[float]]:
        """How many tokens each expert has seen, by layer; waits for the device.

        Arguments:
            group: sums over the ranks of a process group, which all call this: those that train on
                other tokens. None for this rank's.
        """
        layers = list(self._counts)
        joined = torch.cat([self._counts[layer] for layer in layers])
        if group is not None:
            torch.distributed.all_reduce(joined, group=group)
        totals, offset = {}, 0
        counts = joined.tolist()
        for layer in layers:
            end = offset + len(self._counts[layer])
            totals[layer], offset = self.added(layer, counts[offset:end]), end
        return totals

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()


def _is_backward() -> bool:
    """Whether this is called by autograd."""
    return bool(torch._C._current_graph_task_id() != -1)
