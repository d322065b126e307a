"""What goes wrong in docs/troubleshooting.md, where making it happen takes a program."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import unickpt
from unickpt.saving import snapshot

LITTLE_MEMORY = """
import resource, unickpt
checkpoint = unickpt.open("ckpt/large")
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (100 << 20),) * 2)
try:
    checkpoint["w"][...]
except unickpt.errors.OutOfMemory as error:
    print(f"{type(error).__name__}: {error}")
"""
FORK = """
import os, numpy, unickpt
unickpt.save("memory://x", {"w": numpy.ones(3)})
if os.fork() == 0:
    try:
        unickpt.load("memory://x")
    except unickpt.errors.ForkedProcess as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
os.wait()
"""


def change_before_it_is_staged() -> None:
    """A loop changes a tensor while a lazy save waits to copy it."""
    import torch

    weight, stage, changed = torch.zeros(500_000), snapshot.stage, threading.Event()

    def stage_late(*arguments: Any, **named: Any) -> Any:
        changed.wait(30)
        return stage(*arguments, **named)

    snapshot.stage = stage_late  # type: ignore[assignment]
    try:
        options, optimizers = unickpt.SaveOptions(staging="lazy"), [torch.optim.SGD([weight])]
        run = unickpt.Checkpointer("ckpt/lazy", options=options, optimizers=optimizers)
        pending = run.save(1, {"w": weight})
        weight += 1
        changed.set()
        pending.result()
    finally:
        snapshot.stage = stage


def read_with_little_memory() -> None:
    unickpt.save("ckpt/large", {"w": np.zeros((400, 1 << 19), np.uint8)})
    print(_printed_by(LITTLE_MEMORY))


def load_in_a_fork() -> None:
    print(_printed_by(FORK))


def without(package: str, call: Callable[[], object]) -> None:
    """Calls something as if a package was not installed."""
    hidden = {name for name in sys.modules if name.split(".")[0] == package}
    modules = {name: sys.modules[name] for name in hidden}
    sys.modules.update(dict.fromkeys({*hidden, package, f"{package}.auto"}))  # type: ignore[arg-type]
    try:
        call()
    finally:
        for name in {*hidden, package, f"{package}.auto"}:
            sys.modules.pop(name)
        sys.modules.update(modules)


def _printed_by(program: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
