"""How Megatron's queue of asynchronous saves learns that one of ours has ended.

The save runs on threads of the training process, which own its memory. Our queue polls it.
Megatron's queue watches a process, a fork or a persistent worker, which waits for a message.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe, current_process
from multiprocessing.context import ForkProcess
from typing import Any

from megatron.core.dist_checkpointing.strategies import async_utils

from unickpt.types import PendingSave

_LOOKS_S = 1.0
_PROGRAM = """
import os, select, sys
ended, trainer = map(int, sys.argv[1:])
while not select.select([ended], [], [], 1)[0] and os.getppid() == trainer:
    pass
"""


class Wait:
    """The function of a request to a queue: returns when a save has ended, or its process.

    Arguments:
        pending: the save. Only the process that saves has it.
    """

    def __init__(self, pending: PendingSave) -> None:
        self.pending: PendingSave | None = pending
        self._trainer = os.getpid()
        self._ended, sender = Pipe(duplex=False)

        def tell() -> None:
            with suppress(OSError), sender:  # there may be no receiver
                sender.send_bytes(b"ended")

        pending.add_done_callback(tell)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": None}

    def __call__(self) -> None:
        if os.getpid() != self._trainer and isinstance(current_process(), ForkProcess):
            # While it shares the trainer's memory, the trainer's steps copy each page they write.
            os.set_inheritable(self._ended.fileno(), True)
            arguments = [str(self._ended.fileno()), str(self._trainer)]
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments])
        while not self._ended.poll(_LOOKS_S):
            if self._trainer not in (os.getpid(), os.getppid()):
                return


class AsyncCallsQueue(async_utils.AsyncCallsQueue):
    """Megatron's queue of asynchronous saves, without a process for those of `SaveStrategy`.

    Megatron's own queue forks the trainer for each save of any strategy; the steps after it then
    copy each page of memory that they write. Requests of other strategies are handled as usual.

    Arguments:
        persistent: see Megatron's.

    Example:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(
            dist_checkpointing.save(state, folder, save, async_sharded_save=True)
        )
        queue.maybe_finalize_async_calls()  # after each step
    """

    _request: Any = None

    def schedule_async_request(self, async_request: Any) -> int:
        """As Megatron's."""
        self._request = async_request
        try:
            number: int = super().schedule_async_request(async_request)
        finally:
            self._request = None
        return number

    def _get_async_caller(self) -> Any:
        function = getattr(self._request, "async_fn", None)
        return _Caller() if isinstance(function, Wait) else super()._get_async_caller()


class _Caller(async_utils.TemporalAsyncCaller):
    """Watches a save of this process where Megatron's watches a process."""

    def schedule_async_call(self, async_req: Any) -> None:
        self.start_time = time.time()
        self.process = _Saving(async_req.async_fn.pending)


class _Saving:
    """A save, with the methods that the queue calls on a process."""

    def __init__(self, pending: PendingSave) -> None:
        self._pending = pending

    def is_alive(self) -> bool:
        return not self._pending.done()

    def join(self) -> None:
        self._pending.wait_ended()  # an error is raised when the save is finalised

    def kill(self) -> None:
        """Nothing: a save that has begun ends by itself."""
