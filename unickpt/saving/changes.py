"""Notices that a chunk changed after the call and before it was copied."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from unickpt.arrays.dtypes import Array
from unickpt.errors import StateChanged
from unickpt.format import codec
from unickpt.frameworks.protocol import Fragment
from unickpt.saving.write_plan import DirectSource, WriteItem, naming

_THREADS = 4  # at most
_ALONE_BYTES = 16 << 20  # below this, starting threads costs more than it gains

PlaceT = TypeVar("PlaceT")


def copy_in_order(
    items: Sequence[WriteItem],
    reserve: Callable[[WriteItem], PlaceT],
    keep: Callable[[WriteItem, PlaceT], None],
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


class Changes:
    """What one save copies in the background, and may not change before.

    Arguments:
        direct: reads chunks where they are.
    """

    def __init__(self, direct: DirectSource) -> None:
        self._direct, self._settling = direct, threading.Lock()
        self._watched: dict[Fragment, WriteItem] = {}
        self._digests: dict[WriteItem, int] = {}

    def watch(self, items: Sequence[WriteItem]) -> None:
        """From here on, these chunks must stay as they are until they are copied."""
        self._watched = {i.fragment: i for i in items if i.fragment.memory.mutable}

    def remember(self, items: Sequence[WriteItem]) -> None:
        """Hashes chunks whose copies are put off, so that every change of them is noticed.

        Who asks for lazy copies knows what must not change. Here nobody has asked for them.
        """

        def hash_one(item: WriteItem, _: None) -> None:
            staged = self._direct.fetch(item)
            self._digests[item] = codec.digest(staged.data)
            staged.release()

        copy_in_order(items, lambda item: None, hash_one, lambda: False)

    @contextmanager
    def noticed(self, item: WriteItem) -> Iterator[Callable[[Array], None]]:
        """Checks that a chunk is the same before and after it is copied.

        Yields:
            A function to call with the copy.

        Raises:
            StateChanged: names the array.
        """
        lazy = item.fragment in self._watched
        try:
            if lazy:
                self.check(item)
            try:
                yield lambda copied: self._compare(item, copied)
            except _Differs:
                raise self._error(item) from None
            except StateChanged as error:
                raise naming(error, item) from None
            if lazy:  # it may have changed temporarily, as for evaluating averaged weights
                self.check(item)
        except BaseException as error:
            self.check(item)  # a clearer error than that of reading a deleted array
            error.add_note(f"unickpt: while array {item.entry.name!r} was being staged")
            raise

    def settle(self) -> None:
        """Checks all of them once more; later changes are allowed.

        Raises:
            StateChanged: names the array.
        """
        with self._settling:
            for item in self._watched.values():
                self.check(item)
            self._watched = {}

    def check(self, item: WriteItem) -> None:
        """Checks one, as far as its framework knows, and by a sample.

        Raises:
            StateChanged: it was changed.
        """
        memory = item.fragment.memory
        if memory.changed is not None and memory.changed():
            raise self._error(item)

    def forget(self) -> None:
        """The save has ended."""
        self._watched, self._digests = {}, {}

    def _compare(self, item: WriteItem, copied: Array) -> None:
        if item in self._digests and self._digests[item] != codec.digest(copied):
            raise _Differs

    def _error(self, item: WriteItem) -> StateChanged:
        why = ""
        if item in self._digests:
            why = (
                " Its copy was put off, because it did not fit into SaveOptions.budget_bytes: "
                "allow more, or use SaveOptions.spill."
            )
        return StateChanged(
            f"array {item.entry.name!r} was changed in place, donated or deleted after the "
            "save was requested and before it was staged. Call PendingSave.wait_staged() "
            "before the update (Checkpointer(optimizers=[...]) does that automatically), or "
            f'save with SaveOptions(staging="copy"). The checkpoint was not saved.{why}'
        )


class _Differs(Exception):
    """A copy differs from what was there at the call."""
