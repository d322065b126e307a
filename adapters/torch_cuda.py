"""CUDA memory: page-locked buffers, and copies on a stream apart from the training's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from unickpt.adapters.torch_distributed import group as group
from unickpt.arrays.dtypes import Array


def pinned(nbytes: int) -> Array:
    memory: Array = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def stream_after_training(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context that uses a CUDA stream apart from the training's, but after all work that the
    training has queued until now."""
    if device.type != "cuda":
        return nullcontext
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))

    @contextmanager
    def after() -> Iterator[None]:
        stream = _stream(device)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    return after
