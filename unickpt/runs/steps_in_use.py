"""Which steps are being saved, copied and removed, so that none is two of these at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class StepsInUse:
    """Steps that are being saved or copied are not removed; those being removed are neither."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saves: dict[object, int] = {}  # the step of each save
        self._copied = Counter[int]()  # or waiting to be copied, or needed for that
        self._removed: set[int] = set()

    @property
    def saved(self) -> list[int]:
        """The steps whose saves have begun and have not ended."""
        with self._changed:
            return list(self._saves.values())

    def begin(self, save: object, step: int) -> None:
        """Records that a save of a step begins."""
        with self._changed:
            self._saves[save] = step

    def end(self, save: object) -> None:
        """Records that a save ended."""
        with self._changed:
            self._saves.pop(save, None)

    def wait_for_removal(self, step: int) -> None:
        """Waits until a step is no longer being removed."""
        with self._changed:
            self._changed.wait_for(lambda: step not in self._removed)

    @contextmanager
    def copying(self, steps: Sequence[int]) -> Iterator[None]:
        """Prevents removal of steps, after waiting until none of them is being removed."""
        with self._changed:
            # Not skipped instead: a step also counts as being removed while it is decided whether.
            self._changed.wait_for(lambda: self._removed.isdisjoint(steps))
            self._copied.update(steps)
        try:
            yield
        finally:
            with self._changed:
                self._copied.subtract(steps)

    @contextmanager
    def removing(self, step: int) -> Iterator[bool]:
        """Blocks saves and copies of a step during its removal; yields False if one is in
        progress."""
        with self._changed:
            is_free = not self._copied[step] and step not in self._saves.values()
            if is_free:
                self._removed.add(step)
        try:
            yield is_free
        finally:
            with self._changed:
                if is_free:
                    self._removed.discard(step)
                    self._changed.notify_all()
