"""The rows of torch parameters that an optimizer updates, for `Checkpointer.save(changed=)`.

The gradients tell them, at each step of the optimizer: lookups would not know of gradients that are
accumulated across a save, that other processes have added, or that come from a tied layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from unickpt.extend import Array, adapter_of, adapters, current_group, quoted

Masks = dict[torch.Tensor, torch.Tensor]
"""By parameter, for each row of this process whether it counts."""


class EndingSave(Protocol):
    """What `Checkpointer.save` and `unickpt.save_async` return."""

    def done(self) -> bool: ...

    def failed(self) -> bool: ...


class UpdatedRows:
    """Records which rows an optimizer updates, by a hook before each of its steps.

    Rows count until a save that was given them has committed: after one that failed, or that was
    never announced to `saved`, they are in `changed` again. A row counts if its gradient is not
    0.0, or is in a sparse gradient; all rows count after a step with a closure.

    Arguments:
        optimizer: leaves rows without a gradient as they are: SparseAdam, or SGD or Adagrad without
            momentum, weight decay and `maximize`. Each save compares a sample
            (`SaveOptions.changed`).
        arrays: for patterns of names in the saved tree, the parameter whose rows tell which rows of
            these arrays change: its own name, and those of its moments. The parameter may be a
            DTensor, of which each process records its shard.
        trust: whether another optimizer is known to do so.

    Raises:
        ValueError: the optimizer may change other rows, too, or does not have a parameter.

    Example:
        >>> embedding = torch.nn.Embedding(4, 2)
        >>> optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        >>> rows = UpdatedRows(optimizer, {"model/weight": embedding.weight})
        >>> embedding(torch.tensor([2])).sum().backward()
        >>> optimizer.step()
        >>> rows.changed()
        {'model/weight': array([False, False,  True, False])}

        `pending = run.save(step, state, changed=rows.changed())` and `rows.saved(pending)` follow.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        arrays: Mapping[str, torch.Tensor],
        *,
        trust: bool = False,
    ) -> None:
        self._optimizer, self._arrays, self._trusts = optimizer, dict(arrays), trust
        self._masks = self._no_masks()
        self._unsaved = self._no_masks()
        """Those of the last `changed`, until its save is announced."""
        self._saves: list[tuple[EndingSave, Masks]] = []
        """The saves that have not committed yet, or failed, with the rows that they were given."""
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for pattern, parameter in self._arrays.items():
            if id(parameter) not in updated:
                raise ValueError(f"the parameter of {pattern!r} is none of the optimizer's")
        self._check()
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def changed(self) -> dict[str, Array]:
        """The rows that were updated since the last committed save, by pattern, for `changed=`;
        waits for the device."""
        ended = [save.done() and not save.failed() for save, _ in self._saves]
        if True in ended:
            del self._saves[: len(ended) - ended[::-1].index(True)]
        every = [self._masks, self._unsaved, *(masks for _, masks in self._saves)]
        rows = dict[torch.Tensor, Array]()
        for parameter in self._masks:
            union = torch.stack([masks[parameter] for masks in every]).any(0)
            self._unsaved[parameter] = union
            rows[parameter] = _global_rows(parameter, union.cpu().numpy())
        self._masks = self._no_masks()
        return {pattern: rows[parameter] for pattern, parameter in self._arrays.items()}

    def saved(self, pending: EndingSave) -> None:
        """Announces the save that got the last result of `changed`.

        Arguments:
            pending: the result of the call that saves.
        """
        self._saves.append((pending, self._unsaved))
        self._unsaved = self._no_masks()

    def remove(self) -> None:
        """Removes the hook."""
        self._hook.remove()

    def _no_masks(self) -> Masks:
        return {parameter: _no_rows(parameter) for parameter in self._arrays.values()}

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        self._check()
        # A closure computes other gradients within the step.
        if any(map(callable, (*arguments, *keywords.values()))):
            for mask in self._masks.values():
                mask.fill_(True)
            return
        with torch.no_grad():
            for parameter, mask in self._masks.items():
                if parameter.grad is not None:
                    _add_rows(mask, parameter, parameter.grad)

    def _check(self) -> None:
        """Checks that only rows with a gradient are updated; a scheduler may change settings.

        Raises:
            ValueError: others may be.
        """
        settings = _ROW_WISE.get(type(self._optimizer))
        if self._trusts:
            return
        for group in self._optimizer.param_groups if settings is not None else ():
            if not any(parameter in self._masks for parameter in group["params"]):
                continue
            wrong = {name: group[name] for name in settings or () if group.get(name)}
            if wrong:
                raise ValueError(
                    f"{type(self._optimizer).__name__} with {quoted(wrong)} changes rows without a "
                    "gradient, too: set these to 0, or save without UpdatedRows"
                )
        if settings is None:
            supported = ", ".join(kind.__name__ for kind in _ROW_WISE)
            raise ValueError(
                f"{type(self._optimizer).__name__} may change rows without a gradient, as Adam "
                f"does by its moments and weight decay; known not to are {supported}. Give "
                "trust=True if it does not: each save compares a sample"
            )


_ROW_WISE: Mapping[type, tuple[str, ...]] = {
    torch.optim.SparseAdam: (),
    torch.optim.SGD: ("momentum", "weight_decay", "maximize"),
    torch.optim.Adagrad: ("weight_decay", "maximize"),
}
"""Optimizers that change only rows with a gradient, if these settings are 0."""


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor if to_local is None else to_local()
    return local


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    local = _local(parameter.detach())
    return torch.zeros(len(local), dtype=torch.bool, device=local.device)


def _add_rows(mask: torch.Tensor, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds the rows of a gradient."""
    if getattr(parameter, "placements", None) != getattr(gradient, "placements", None):
        mask.fill_(True)
        return
    local = _local(gradient)
    if local.is_sparse:
        mask[local._indices()[0]] = True
    elif local.numel():
        # Subtracting -0.0 turns -0.0 into 0.0.
        mask |= (local.ne(0) | local.signbit()).reshape(len(local), -1).any(1)


def _global_rows(parameter: torch.Tensor, local_rows: Array) -> Array:
    """The rows of the global array."""
    rows = np.zeros(parameter.shape[0], np.bool_)
    among = adapters()
    adapter = adapter_of(parameter, among)
    assert adapter is not None, "it is a tensor"
    for fragment in adapter.source(parameter, current_group(among)).fragments:
        rows[fragment.box.start[0] : fragment.box.stop[0]] = local_rows
    return rows
