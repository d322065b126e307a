"""Groups of threads of this process, which exchange through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from unickpt import LoadOptions, ProcessGroup


class Threads:
    """Groups of threads of this process, which exchange through memory."""

    def __init__(self, count: int) -> None:
        self.count, self._data = count, [(np.empty(0, np.uint8), [0])] * count
        self._all = threading.Barrier(count, timeout=60)

    def group(self, index: int) -> ProcessGroup:
        def exchange(data: Any, sent: Sequence[int], received: Sequence[int]) -> Any:
            self._data[index] = (data, list(sent))
            self._all.wait()
            parts = []
            for process in range(self.count):
                theirs, sizes = self._data[process]
                start = sum(sizes[:index])
                parts.append(theirs[start : start + sizes[index]].copy())
                assert len(parts[-1]) == received[process]
            self._all.wait()
            return np.concatenate(parts)

        def agree(value: int) -> int:
            mine = np.frombuffer(value.to_bytes(8, "big") * self.count, np.uint8)
            every = exchange(mine, [8] * self.count, [8] * self.count)
            return max(
                int.from_bytes(every[i : i + 8].tobytes(), "big") for i in range(0, len(every), 8)
            )

        return ProcessGroup(index, self.count, "threads", agree, exchange)

    def run(self, work: Callable[[int, LoadOptions], Any], **options: Any) -> list[Any]:
        """The result or the error of each thread."""

        def run_thread(index: int) -> Any:
            try:
                group = self.group(index)
                return work(index, LoadOptions(exchange=True, group=group, **options))
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(run_thread, range(self.count)))
