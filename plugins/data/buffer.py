"""`Buffer`: samples that were read but not used yet; divided again if the ranks change."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from unickpt.extend import JoinedParts
from unickpt.plugins.data.ranks import Ranks
from unickpt.plugins.data.resuming import Resumable, Saved

_MOST_BLOCKS = 64
"""Per rank, so that another number of ranks have equal shares within a hundredth."""


class Buffer(Resumable):
    """Samples that were read and not used yet, such as the token buffer of a packing loader.

    A queue. Saved in blocks of samples; another number of ranks takes turns on the blocks of all,
    and each reads only its own.

    Arguments:
        samples: its initial content: tokens (NumPy arrays, torch tensors on the host, or lists
            of ints), or any nesting of containers, plain values and such arrays.
        ranks: which data-parallel rank this process is; by default each process is one.

    Example:
        >>> import unickpt
        >>> buffer = Buffer()
        >>> buffer.append(np.arange(700, dtype=np.int32))
        >>> _ = unickpt.save("memory://docs/buffer", {"buffer": buffer}, overwrite=True)
    """

    kind = "Buffer"

    def __init__(self, samples: Iterable[Any] = (), ranks: Ranks | None = None) -> None:
        super().__init__(ranks)
        self._samples = deque(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)

    def append(self, sample: Any) -> None:
        """Adds a sample behind the others."""
        with self._changing():
            self._samples.append(sample)

    def extend(self, samples: Iterable[Any]) -> None:
        """Adds samples behind the others."""
        with self._changing():
            self._samples.extend(samples)

    def popleft(self) -> Any:
        """Takes the first sample out.

        Raises:
            IndexError: the buffer is empty.
        """
        with self._changing():
            return self._samples.popleft()

    def appendleft(self, sample: Any) -> None:
        """Puts a sample before the others, such as the rest of one that was cut."""
        with self._changing():
            self._samples.appendleft(sample)

    def collect(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        samples = list(self._samples)
        count = min(_MOST_BLOCKS, len(samples))
        ends = [len(samples) * i // count for i in range(count + 1)] if count else [0]
        blocks = {str(i): _pack(samples[ends[i] : ends[i + 1]]) for i in range(count)}
        return {"blocks": count}, blocks

    def choose(self, saved: Saved) -> list[Any]:
        rank, count = self.ranks.rank, self.ranks.count
        if saved.count == count:
            blocks = [saved.rank(rank).values[str(i)] for i in range(_blocks(saved, rank))]
        else:
            every = [(r, i) for r in range(saved.count) for i in range(_blocks(saved, r))]
            blocks = [saved.rank(r).values[str(i)] for r, i in every[rank::count]]
        return [sample for block in blocks for sample in _unpack(block)]

    def resume(self, chosen: list[Any]) -> None:
        self._samples = deque(chosen)


def _blocks(saved: Saved, rank: int) -> int:
    return int(saved.rank(rank).facts["blocks"])


def _pack(samples: Sequence[Any]) -> dict[str, Any]:
    """A block: tokens of one type as one array with the lengths, anything else unchanged."""
    kinds = {_kind(sample) for sample in samples}
    if len(kinds) > 1 or None in kinds:
        return {"samples": list(samples)}
    ((kind, _),) = kinds  # type: ignore[misc]  # None is not among them
    tokens = [np.asarray(sample) for sample in samples]
    return {
        "kind": kind,
        "lengths": np.array([len(array) for array in tokens], np.int64),
        "tokens": JoinedParts(tokens),
    }


def _kind(sample: Any) -> tuple[str, str] | None:
    """The container type of a sample of tokens, and its dtype; None for any other."""
    torch = sys.modules.get("torch")
    if type(sample) is np.ndarray and sample.ndim == 1 and sample.dtype.kind in "iuf":
        return "numpy", sample.dtype.str
    if type(sample) is list and set(map(type, sample)) == {int}:
        return ("list", "int") if min(sample) >= -(1 << 63) and max(sample) < 1 << 63 else None
    if torch is not None and type(sample) is torch.Tensor and sample.dim() == 1:
        whole = sample.device.type == "cpu" and not sample.is_floating_point()
        return ("torch", str(sample.dtype)) if whole else None
    return None


def _unpack(block: Mapping[str, Any]) -> list[Any]:
    if "samples" in block:
        return list(block["samples"])
    tokens = np.split(block["tokens"], np.cumsum(block["lengths"])[:-1])
    match block["kind"]:
        case "list":
            return [array.tolist() for array in tokens]
        case "torch":
            import torch  # which made them

            return [torch.from_numpy(array) for array in tokens]
    return tokens
