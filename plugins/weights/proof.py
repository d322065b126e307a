"""Proof: the sha256 of the arrays of a version, from the storage, and of those that are live."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt import LoadOptions, Rules
from unickpt.extend import (
    Array,
    HostBuffers,
    LoadRequest,
    Source,
    View,
    opened_checkpoint,
    plan_load,
    read_boxes,
)
from unickpt.plugins.weights.live_arrays import live_leaves
from unickpt.plugins.weights.publisher import plain_state

_BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class WeightsCheck:
    """The result of `Follower.check`; `ok` is True if every array is the version's, bit for bit.

    Arguments:
        version: that the live arrays were compared with.
        expected: the sha256 of each array, from the storage.
        live: the sha256 of each array in memory.
    """

    version: int
    expected: Mapping[str, str]
    live: Mapping[str, str]

    @property
    def ok(self) -> bool:
        return self.expected == self.live

    @property
    def differing(self) -> tuple[str, ...]:
        """The names of the arrays that differ."""
        return tuple(name for name, text in self.expected.items() if self.live.get(name) != text)


def array_sha256(path: Source, like: Any, rules: Rules | None = None) -> dict[str, str]:
    """The sha256 of every array of `like`, as a load into it would fill it; fills nothing.

    The digest is of the bytes of this process's part, row-major and little-endian, so an engine can
    compute it: `hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy())`.

    Arguments:
        path: a version, such as "weights/step_7"; or any checkpoint.
        like, rules: as for `unickpt.load`.

    Returns:
        By the names of `like`; arrays that share memory are there once.

    Raises:
        UnickptError: as `unickpt.load`.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://docs/proof", {"w": np.zeros(3, np.uint8)})
        >>> array_sha256("memory://docs/proof", {"w": np.zeros(3, np.uint8)})["w"][:16]
        '709e80c88487a241'
    """
    view, request = plan_load(opened_checkpoint(path), plain_state(like), rules)
    return stored_sha256(view, request)


def stored_sha256(view: View, request: LoadRequest) -> dict[str, str]:
    """As `array_sha256`, of a view and a request."""
    buffers, options = HostBuffers(_BATCH_BYTES), LoadOptions(verify=True)
    digests = dict[str, str]()
    for name, leaf in live_leaves(request).items():
        entry, digest = view.index.entry(name), hashlib.sha256()
        for box in leaf.boxes if entry.nbytes else ():
            ((data, memory),) = read_boxes(view, [(entry, box)], options, buffers)
            _update(digest, data)
            buffers.give(memory)
        digests[name] = digest.hexdigest()
    return digests


def live_sha256(request: LoadRequest) -> dict[str, str]:
    """The sha256 of live arrays."""
    digests = dict[str, str]()
    for name, leaf in live_leaves(request).items():
        digest = hashlib.sha256()
        for array in leaf.memory:
            _update(digest, array)
        digests[name] = digest.hexdigest()
    return digests


def _update(digest: Any, array: Array) -> None:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    digest.update(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)
