"""Copies chunks on several threads; memory goes to them in order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from unickpt.saving.write_plan import WriteItem

_THREADS = 4  # at most
_ALONE_BYTES = 16 << 20  # below this, starting threads costs more than it gains

Place = TypeVar("Place")


def copy_in_order(
    items: Sequence[WriteItem],
    reserve: Callable[[WriteItem], Place],
    keep: Callable[[WriteItem, Place], None],
    stopped: Callable[[], bool],
    threads: int | None = None,
) -> None:
    """Copies chunks.

    Arguments:
        items: the chunks, in the order in which they are written. The writer waits for the first
            ones: if later ones took the memory, it would wait forever.
        reserve: finds a place for a chunk, perhaps after a while; called for one at a time.
        keep: copies a chunk to its place.
        stopped: whether the rest is not needed.
        threads: how many, at most; this one is among them.

    Raises: the first error of `reserve` or `keep`; the rest is not copied then.
    """
    if sum(item.nbytes for item in items) < _ALONE_BYTES:
        threads = 1
    helping = min(threads or _THREADS, os.cpu_count() or 1) - 1
    rest, order, errors = iter(items), threading.Lock(), list[BaseException]()

    def copy_some() -> None:
        try:
            while not errors and not stopped():
                with order:
                    item = next(rest, None)
                    if item is None:
                        return
                    place = reserve(item)
                keep(item, place)
        except BaseException as error:
            errors.append(error)

    helpers = [threading.Thread(target=copy_some) for _ in range(helping)]
    for helper in helpers:
        helper.start()
    copy_some()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
