"""The keywords of `Checkpointer` next to `node_local`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class NodeOptions:
    """The keywords of `Checkpointer` next to `node_local`.

    Arguments:
        upload_every: upload every n-th step to the root; the last one also when the run is closed.
        upload_bytes_per_s: the most bytes that a node uploads in a second; None for no limit.
        replicas: how many other nodes keep a copy of each node's files: 0 or 1.
        unit: what fails together, such as a rack: the name of an environment variable, or a
            function that returns it; by default each node for itself.

    Raises:
        ValueError: one is out of range.
    """

    upload_every: int = 1
    upload_bytes_per_s: float | None = None
    replicas: int = 0
    unit: str | Callable[[], str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.upload_every, Integral) or self.upload_every < 1:
            raise ValueError(f"upload_every={self.upload_every!r} must be an integer, at least 1")
        rate = self.upload_bytes_per_s
        if rate is not None and not (isinstance(rate, Real) and rate > 0):
            raise ValueError(f"upload_bytes_per_s={rate!r} must be a positive number, or None")
        if self.replicas not in (0, 1):
            raise ValueError(f"replicas={self.replicas!r} must be 0 or 1")

    @classmethod
    def take(cls, arguments: dict[str, Any]) -> NodeOptions:
        """These options, removed from the arguments of a Checkpointer."""
        names = cls.__dataclass_fields__.keys() & arguments.keys()
        return cls(**{name: arguments.pop(name) for name in names})

    def unit_of(self, node: str) -> str:
        """The name of what fails together with this node."""
        if self.unit is None:
            return node
        return os.environ.get(self.unit, node) if isinstance(self.unit, str) else self.unit()
