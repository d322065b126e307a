"""128-bit digests of tensors, computed on the device that holds them.

No kernel has to report its writes: the digest is of the elements. All digests of a call come to the
host in one transfer per device. Integer arithmetic of 64 bits wraps around in torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch

_BLOCK_BYTES = 16 << 20
"""A digest needs memory for about four blocks."""
_WORD = 8  # bytes


def tokens(tensors: Sequence[torch.Tensor | None]) -> list[Hashable]:
    """A token of the content of each tensor on an accelerator; None for the others.

    Arguments:
        tensors: the parts that this process holds; None for a part that cannot be hashed.
    """
    rows: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None and _is_hashed(tensor):
            rows.setdefault(tensor.device, []).append((number, digest(tensor)))
    results: list[Hashable] = [None] * len(tensors)
    for pairs in rows.values():
        numbers, digests = zip(*pairs, strict=True)
        values = torch.stack(digests).cpu().tolist()  # waits for the device once
        for number, (first, second) in zip(numbers, values, strict=True):
            tensor = tensors[number]
            assert tensor is not None
            results[number] = first, second, tensor.dtype, tuple(tensor.shape), tensor.stride()
    return results


def _is_hashed(tensor: torch.Tensor) -> bool:
    """Whether to hash a tensor on its device costs less than to bring it to the host."""
    return not (tensor.is_cpu or tensor.is_meta)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of the elements of a tensor, in their order: two words on its device."""
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    first = 0
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        for block in _blocks(plain, max(1, _BLOCK_BYTES // plain.element_size())):
            words = _words(block)
            total += _mixed(words, first)
            first += words.numel()
    return total


def _blocks(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """The elements in their order, at most so many at once, each block flat and contiguous."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.reshape(-1), most)
        return
    inner = tensor[0].numel()
    if inner > most:
        for row in tensor.unbind(0):
            yield from _blocks(row, most)
        return
    for rows in torch.split(tensor, max(1, most // inner)):
        yield rows.contiguous().reshape(-1)


def _words(block: torch.Tensor) -> torch.Tensor:
    """The bytes of a block as words, the last one padded with zeros."""
    data = block.view(torch.uint8)
    size = -(-data.numel() // _WORD) * _WORD
    if data.numel() != size or data.storage_offset() % _WORD or data.data_ptr() % _WORD:
        padded = torch.zeros(size, dtype=torch.uint8, device=data.device)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int64)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


# Two sums of different mixes; the multipliers are those of MurmurHash3 and of SplitMix64, all odd.
_MIXES = [
    tuple(map(_signed, multipliers))
    for multipliers in (
        (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53),
        (0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
    )
]


def _mixed(words: torch.Tensor, first: int) -> torch.Tensor:
    """The sums of words, each mixed with its position.

    For each position a mix is a bijection of the word, so that every change of a single word
    changes both sums.
    """
    positions = torch.arange(first + 1, first + 1 + words.numel(), device=words.device)
    sums = []
    for spread, *factors in _MIXES:
        mix = (positions * spread).bitwise_xor_(words)
        for factor in factors:
            _fold(mix)
            mix.mul_(factor)
        sums.append(_fold(mix).sum())
    return torch.stack(sums)


def _fold(mix: torch.Tensor) -> torch.Tensor:
    """x ^= x >> 33, without the sign that torch shifts in."""
    return mix.bitwise_xor_((mix >> 33).bitwise_and_((1 << 31) - 1))
