"""SIGTERM while several Checkpointers handle it, and after they are closed."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.processes import Processes

from unickpt import Checkpointer
from unickpt.runs.save_triggers import SigtermHandler


@pytest.fixture
def program_calls() -> Iterator[list[int]]:
    """The calls of a handler that the program installed first; restores what was there."""
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_handlers_are_removed_in_any_order(order: Sequence[int], program_calls: list[int]) -> None:
    program = signal.getsignal(signal.SIGTERM)
    calls = dict.fromkeys(range(3), 0)

    def count(number: int) -> None:
        calls[number] += 1

    handlers = [SigtermHandler(lambda number=number: count(number)) for number in range(3)]
    for number in order:
        terminate()
        handlers[number].remove()
    assert signal.getsignal(signal.SIGTERM) == program
    terminate()
    assert len(program_calls) == 4
    assert calls == {number: order.index(number) + 1 for number in range(3)}


@pytest.mark.parametrize("passes_on", [True, False])
def test_a_handler_that_was_installed_in_between_stays(
    passes_on: bool, program_calls: list[int]
) -> None:
    ours, between = list[int](), list[int]()
    first = SigtermHandler(lambda: ours.append(1))
    earlier: Any = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        between.append(1)
        if passes_on:
            earlier(number, frame)

    signal.signal(signal.SIGTERM, handle)
    second = SigtermHandler(lambda: ours.append(2))
    terminate()
    assert (ours, between) == ([2, 1] if passes_on else [2], [1])
    first.remove()
    second.remove()
    assert signal.getsignal(signal.SIGTERM) == handle
    terminate()
    assert (ours, between) == ([2, 1] if passes_on else [2], [1, 1])
    assert len(program_calls) == (2 if passes_on else 0)
    signal.signal(signal.SIGTERM, earlier)  # as the library in between does when it ends
    terminate()
    assert len(program_calls) == (3 if passes_on else 1)


def test_a_handler_is_removed_by_another_thread(program_calls: list[int]) -> None:
    ours = list[int]()
    handler = SigtermHandler(lambda: ours.append(1))
    thread = threading.Thread(target=handler.remove)
    thread.start()
    thread.join()
    terminate()
    assert not ours
    assert len(program_calls) == 1


SOURCE = """
import os, signal, sys, threading
from unickpt import Checkpointer
from unickpt.runs.save_triggers import SigtermHandler

def die():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigtimedwait([], 0.01)

case, handlers = sys.argv[1], [SigtermHandler(lambda: print("ours", flush=True)) for _ in range(2)]
die()
if case == "fork":  # such as a worker of a data loader, which its parent terminates
    child = os.fork()
    if child == 0:
        die()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
for handler in reversed(handlers) if case == "lifo" else handlers:
    if case == "thread":
        thread = threading.Thread(target=handler.remove)
        thread.start()
        thread.join()
    else:
        handler.remove()
die()
print("still alive")
"""


@pytest.mark.parametrize("case", ["fifo", "lifo", "thread", "fork"])
def test_sigterm_ends_the_program_after_all_are_closed(case: str, processes: Processes) -> None:
    process = processes.start(SOURCE, case)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, err
    assert out.split() == ["ours", "ours", *([str(-signal.SIGTERM)] if case == "fork" else [])]


def test_a_checkpointer_that_is_forgotten_handles_no_signal(
    tmp_path: Path, program_calls: list[int]
) -> None:
    program = signal.getsignal(signal.SIGTERM)
    checkpointer = Checkpointer(tmp_path, preemption=True)
    assert signal.getsignal(signal.SIGTERM) != program
    del checkpointer
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == program
    terminate()
    assert len(program_calls) == 1
