"""Simulated accelerators: host memory that the adapters take for a device's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from unickpt.adapters import jax as jax_adapter
from unickpt.adapters import torch as torch_adapter
from unickpt.adapters import torch_cuda


def simulate_jax(patch: pytest.MonkeyPatch) -> None:
    """JAX's CPU devices are accelerators."""
    patch.setattr(jax_adapter, "_on_cpu", lambda sharding: False)


class _Stream:
    """A stream whose copies are made when something waits for one of them."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.copies = self.ended = 0
        self._running = threading.RLock()

    def run(self, until: int | None = None) -> None:
        """Makes all copies, or so many of all that there ever were."""
        with self._running:  # who waits for a copy that another thread makes, waits for its end
            while self.queue and (until is None or self.ended < until):
                self.queue.pop(0)()
                self.ended += 1

    def queued(self) -> int:
        """How many copies there ever were."""
        with self._running:
            return self.ended + len(self.queue)

    def wait_event(self, event: _Event) -> None:
        event.synchronize()


class _Event:
    def __init__(self, **_: Any) -> None:
        self._stream: _Stream | None = None

    def record(self, stream: _Stream) -> None:
        self._stream, self._until = stream, stream.queued()

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.run(self._until)


def simulate_torch(patch: pytest.MonkeyPatch) -> _Stream:
    """Tensors on the host are on a GPU; returns the stream of the copies to the host and back."""
    stream, copy = _Stream(), torch.Tensor.copy_

    def copied(out: torch.Tensor, part: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            stream.run()
            return copy(out, part)
        stream.copies += 1
        stream.queue.append(partial(copy_now, torch.is_inference_mode_enabled(), out, part))
        return out

    def copied_on_device(outs: list[torch.Tensor], parts: list[torch.Tensor]) -> None:
        mode = torch.is_inference_mode_enabled()
        stream.queue += [partial(copy_now, mode, *pair) for pair in zip(outs, parts, strict=True)]

    def copy_now(mode: bool, out: torch.Tensor, part: torch.Tensor) -> None:
        with torch.no_grad(), torch.inference_mode(mode):
            copy(out, part)

    def pinned(nbytes: int) -> Any:
        return np.full(nbytes, 77, np.uint8)

    patch.setattr(torch.Tensor, "copy_", copied)
    patch.setattr(torch, "_foreach_copy_", copied_on_device)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    patch.setattr(torch.cuda, "Event", _Event)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    for module in (torch_adapter, torch_cuda):
        patch.setattr(module, "pinned", pinned)
    patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    patch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: False))
    return stream
