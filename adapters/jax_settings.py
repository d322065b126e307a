"""JAX: settings that check computations, which a save or a load is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import jax

_WAYS = ("host_to_device", "device_to_device", "device_to_host")
_GUARDS = tuple(f"jax_transfer_guard_{way}" for way in _WAYS)
_SETTINGS = ("jax_debug_nans", "jax_debug_infs", *_GUARDS)


def unchecked() -> AbstractContextManager[None]:
    """In this thread, JAX neither looks for NaNs and infinities nor refuses transfers.

    `jax_debug_nans`, `jax_debug_infs` and `jax_transfer_guard` find mistakes in a training step.
    Stored arrays may hold NaNs, and saves and loads have to transfer arrays.
    """
    # To enter three contexts takes a third as long as to make a small array.
    if any(getattr(jax.config, name) not in (False, None, "allow") for name in _SETTINGS):
        return _unchecked()
    return nullcontext()


@contextmanager
def _unchecked() -> Iterator[None]:
    with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"):
        yield
