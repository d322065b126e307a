"""How Megatron's queue of asynchronous saves learns that one of ours has ended.

The queue watches a process: one that it forks, or a persistent worker. Here this process only waits
for a message; the save itself runs on threads of the training process, which own its memory.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

from unickpt.saving.background import PendingSave

_LOOKS_S = 1.0
_PROGRAM = """
import os, select, sys
ended, trainer = map(int, sys.argv[1:])
while not select.select([ended], [], [], 1)[0] and os.getppid() == trainer:
    pass
"""


def watched(pending: PendingSave) -> tuple[Connection, int]:
    """What `wait` takes to return when a save has ended."""
    receiver, sender = Pipe(duplex=False)

    def tell() -> None:
        with suppress(OSError), sender:  # nobody may be there who listens
            sender.send_bytes(b"ended")

    pending.add_done_callback(tell)
    return receiver, os.getpid()


def wait(ended: Connection, trainer: int) -> None:
    """Returns when the save has ended, or the process that saves.

    Arguments:
        ended: where its message comes.
        trainer: the number of the process that saves.
    """
    if os.getpid() != trainer and isinstance(current_process(), ForkProcess):
        # As long as it shares the trainer's memory, the trainer's steps copy each page they write.
        os.set_inheritable(ended.fileno(), True)
        arguments = [str(ended.fileno()), str(trainer)]
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments])
    while not ended.poll(_LOOKS_S):
        if trainer not in (os.getpid(), os.getppid()):
            return
