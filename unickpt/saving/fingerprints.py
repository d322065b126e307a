"""Fingerprints of replicas that are only assumed to be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import gcd, prod

import numpy as np
import xxhash

from unickpt.arrays import dtypes
from unickpt.arrays.dtypes import Array
from unickpt.commit.messages import REPLICA_DTYPE, Record
from unickpt.format import chunk_encoding
from unickpt.frameworks.adapter_protocol import ArraySource, Fragment
from unickpt.references.value_places import WriteItem

_WHOLE_BYTES = 4 << 10  # up to this size all elements are compared
_SAMPLES = 512


# --- fingerprints -------------------------------------------------------------------------------


def keep_sample(source: ArraySource) -> Callable[[], int]:
    """Keeps some elements of an assumed replica as they are now.

    They are spread over the whole array; a small array is kept whole. Does not wait for a device.

    Returns:
        A function that returns their fingerprint, which is equal for equal arrays.
    """
    (fragment,) = source.fragments
    indices = sample_indices(source.shape, source.dtype.itemsize)
    read_sample = (
        _sample(fragment, source.dtype, indices)
        if fragment.sample is None
        else fragment.sample(indices)
    )
    return lambda: _fingerprint(read_sample(), source)


@lru_cache(maxsize=256)
def sample_indices(shape: tuple[int, ...], itemsize: int) -> tuple[Array, ...]:
    """The indices of the sampled elements, an array per dimension; one index for a scalar."""
    count = prod(shape)
    step = 1
    if count * itemsize > _WHOLE_BYTES:
        step = max(1, count // _SAMPLES)
        while gcd(step, shape[-1]) > 1:  # else all lie in few columns
            step += 1
    return np.unravel_index(np.arange(0, count, step), shape or (1,))


def _sample(
    fragment: Fragment, dtype: dtypes.DType, indices: tuple[Array, ...]
) -> Callable[[], Array]:
    view = fragment.read(fragment.box, lambda: np.empty(fragment.box.shape, dtype))
    elements: Array = np.atleast_1d(view)[indices]  # a copy
    return lambda: elements


def _fingerprint(elements: Array, source: ArraySource) -> int:
    native = source.dtype.newbyteorder("=")
    if native == np.bool_:  # a bool may be any byte in memory
        elements = np.not_equal(np.ascontiguousarray(elements).view(np.uint8), 0)
    digest = chunk_encoding.digest(elements.astype(native))
    what = f"{dtypes.name_of(native)} {source.shape} {digest:x}"
    return xxhash.xxh3_64_intdigest(what.encode())


def sampled(samples: Mapping[int, Callable[[], int]]) -> Array:
    """The rows of a record for samples: fingerprints by the number of the array."""
    return _rows((number, fingerprint()) for number, fingerprint in samples.items())


def whole(
    write_items: Sequence[WriteItem], record: Record, digest: Callable[[WriteItem], int]
) -> Array:
    """The rows of a record for every byte of the assumed replicas.

    Arguments:
        write_items: all chunks that this process holds.
        record: lists those that it wrote.
        digest: returns the digest of another chunk.
    """
    written = record.chunks
    written_digests = dict(
        zip(
            zip(written["array"].tolist(), written["chunk"].tolist(), strict=True),
            written["digest"].tolist(),
            strict=True,
        )
    )

    def rows() -> Iterator[tuple[int, int]]:
        assumed = (chunk for item in write_items if item.assumed for chunk in item.chunks())
        for number, items in groupby(assumed, lambda item: item.array):
            hashed = xxhash.xxh3_64()
            for item in items:
                written_digest = written_digests.get((item.array, item.position))
                chunk_digest = digest(item) if written_digest is None else written_digest
                hashed.update(chunk_digest.to_bytes(8, "little"))
            yield number, hashed.intdigest()

    return _rows(rows())


def _rows(rows: Iterable[tuple[int, int]]) -> Array:
    return np.array(list(rows), REPLICA_DTYPE)
