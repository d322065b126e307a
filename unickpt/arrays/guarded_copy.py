"""Copies memory that may be freed at any moment, with an error instead of a segmentation fault.

A background thread copies memory of the training loop, which should not free it during the copy,
but may. The kernel copies it (`process_vm_readv`), and returns an error if the memory is gone.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

import numpy as np

from unickpt.arrays.dtypes import Array

# Limits of one call of the kernel: this many runs, and somewhat less than 2 GiB.
_RUNS, _BYTES = 1024, 1 << 30
_Run = ctypes.c_size_t * 2
"""Where some bytes start, and how many they are."""
_IOVEC = np.dtype([("base", np.uintp), ("length", np.uintp)])


class Freed(Exception):
    """The memory to copy no longer exists."""


@cache
def is_possible() -> bool:
    """Whether this system lets a process copy its own memory in this way."""
    if _function() is None:
        return False
    probe, out = np.arange(8), np.empty(8, np.int64)
    try:
        copy(probe, out)
    except OSError:  # a sandbox may forbid it
        return False
    return bool(np.array_equal(probe, out))


def copy(source: Array, out: Array) -> None:
    """Copies an array whose memory may be freed.

    Arguments:
        source: of any strides; only the kernel reads its data.
        out: contiguous, of the same shape and dtype.

    Raises:
        Freed: memory of `source` was freed.
        OSError: the system forbids this; see `is_possible`.
    """
    assert out.flags.c_contiguous, f"strides {out.strides}"
    address = out.ctypes.data
    if source.flags.c_contiguous and source.nbytes <= _BYTES:  # as most are
        nbytes = source.nbytes
        _read(_Run(address, nbytes), _Run(source.ctypes.data, nbytes), 1, nbytes)
        return
    starts, lengths = _runs(source)
    together = max(1, min(_RUNS, _BYTES // max(1, int(lengths[0])))) if len(starts) else 1
    for first in range(0, len(starts), together):
        remote = np.empty(len(starts[first : first + together]), _IOVEC)
        remote["base"] = starts[first : first + together]
        remote["length"] = lengths[first : first + together]
        nbytes = int(remote["length"].sum())
        _read(_Run(address, nbytes), remote.ctypes.data, len(remote), nbytes)
        address += nbytes


def _read(local: Any, remote: Any, count: int, nbytes: int) -> None:
    """Copies so many runs of bytes of this process to one."""
    read = _function()
    assert read is not None, "the caller checked `is_possible`"
    done = read(os.getpid(), local, 1, remote, count, 0)
    if done < 0 and ctypes.get_errno() != errno.EFAULT:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if done != nbytes:
        raise Freed


def _runs(array: Array) -> tuple[Array, Array]:
    """Start addresses and lengths of the contiguous runs of bytes that make up an array."""
    length, outer = array.itemsize, array.ndim
    while outer and (array.strides[outer - 1] == length or array.shape[outer - 1] == 1):
        outer -= 1
        length *= array.shape[outer]
    starts = np.array([array.ctypes.data], np.intp)
    for extent, stride in zip(array.shape[:outer], array.strides[:outer], strict=True):
        starts = np.add.outer(starts, np.arange(extent) * stride).reshape(-1)
    pieces = np.arange(0, length, _BYTES)
    lengths = np.tile(np.minimum(length - pieces, _BYTES), len(starts))
    return np.add.outer(starts, pieces).reshape(-1), lengths


@cache
def _function() -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        runs = [ctypes.c_void_p, ctypes.c_ulong]
        function.argtypes = [ctypes.c_int, *runs, *runs, ctypes.c_ulong]
    return function
