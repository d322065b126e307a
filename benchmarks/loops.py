"""The training loops of `stall.py`, and how each library saves in them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from stallers import (
    DcpAsync,
    DcpAsyncStaging,
    DcpKeptStaging,
    OrbaxAsync,
    Staller,
    TorchCheckpointing,
    TorchSaved,
    UnickptJaxCopy,
    UnickptJaxDevice,
    UnickptJaxReference,
    UnickptTorchCopy,
    UnickptTorchDevice,
    UnickptTorchLazy,
    save_options,
)

DEPTH = 16
"""Layers of the model that is trained; their width follows from the size of the state."""


class Training(ABC):
    """A model and its optimizer, whose state together has about a size that was asked for."""

    nbytes: int
    """What it is."""

    @abstractmethod
    def step(self, before_update: Callable[[], None]) -> None:
        """Forward, backward, update."""


def width(nbytes: int) -> int:
    """Of a layer: a weight and two moments of it are three arrays of float32."""
    return max(64, round((nbytes / (3 * 4 * DEPTH)) ** 0.5 / 64) * 64)


class TorchTraining(Training):
    """Residual linear layers with AdamW."""

    def __init__(self, nbytes: int, batch: int, device: str) -> None:
        import torch

        torch.manual_seed(0)
        n = width(nbytes)
        layers = (torch.nn.Linear(n, n, bias=False, device=device) for _ in range(DEPTH))
        self.model = torch.nn.ModuleList(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x, self.y = (torch.randn(batch, n, device=device) for _ in "xy")
        self.wait = torch.cuda.current_stream().synchronize if device == "cuda" else lambda: None
        self.step(lambda: None)  # the optimizer makes its state
        slots = [v for state in self.optimizer.state.values() for v in state.values()]
        self.nbytes = sum(t.nbytes for t in [*self.model.parameters(), *slots])

    def step(self, before_update: Callable[[], None]) -> None:
        x = self.x
        for layer in self.model:
            x = x + layer(x).relu()
        self.optimizer.zero_grad()
        ((x - self.y) ** 2).mean().backward()
        before_update()
        self.optimizer.step()
        self.wait()  # as a loop that logs its loss; not for copies on other streams


class JaxTraining(Training):
    """The same in JAX with optax; the state is donated."""

    def __init__(self, nbytes: int, batch: int, device: str) -> None:
        import jax
        import optax

        assert jax.default_backend() == {"cpu": "cpu", "cuda": "gpu"}[device]
        n, rng = width(nbytes), np.random.default_rng(0)
        optimizer = optax.adamw(1e-4)

        def normal(*shape: int, scale: float = 1) -> Any:
            return jax.numpy.array(rng.standard_normal(shape, np.float32) * np.float32(scale))

        def loss(params: Any, x: Any, y: Any) -> Any:
            for weight in params.values():
                x = x + jax.nn.relu(x @ weight)
            return ((x - y) ** 2).mean()

        def train(state: Any, x: Any, y: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(state["params"], x, y)
            updates, opt = optimizer.update(gradients, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

        params = {f"layer_{i:02d}": normal(n, n, scale=(3 * n) ** -0.5) for i in range(DEPTH)}
        self.state = {"params": params, "opt": optimizer.init(params)}
        self.x, self.y = normal(batch, n), normal(batch, n)
        self.train = jax.jit(train, donate_argnums=0)
        self.nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def step(self, before_update: Callable[[], None]) -> None:
        before_update()
        self.state, loss = self.train(self.state, self.x, self.y)
        loss.block_until_ready()  # as a loop that logs it


class LoopSaver:
    """How a training loop saves; this one does not."""

    def save(self, step: int) -> None:
        """Begins to save the state of this step."""

    def before_update(self) -> None:
        """Called before the state changes."""

    def wait(self) -> None:
        """Waits until all saves are committed."""

    def tidy(self) -> None:
        """After a turn, outside of the timing."""

    def close(self) -> None:
        """Ends what is under way."""


class RawProcess(LoopSaver):
    """A process that hashes as many bytes of its own, writes and fsyncs them, and keeps one file:
    what it costs the loop that the machine saves, where no lock of Python is shared."""

    def __init__(self, root: Path, nbytes: int) -> None:
        root.mkdir()
        command = [sys.executable, "-c", RAW_WRITER, str(nbytes), str(root)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._writes = False
        assert self._process.stdout is not None
        self._process.stdout.readline()  # its memory is touched

    def save(self, step: int) -> None:
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % step)
        self._writes = True

    def wait(self) -> None:
        if self._writes:
            assert self._process.stdout is not None
            self._process.stdout.readline()
            self._writes = False

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


RAW_WRITER = """
import os, sys
import numpy as np, xxhash
nbytes, root = int(sys.argv[1]), sys.argv[2]
data, piece, last = memoryview(np.ones(nbytes, np.uint8)), 512 << 10, None
print(flush=True)
for line in sys.stdin:
    path = f"{root}/{line.strip()}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    for first in range(0, nbytes, piece):
        part = data[first : first + piece]
        xxhash.xxh3_64_intdigest(part)
        os.pwrite(file, part, first)
    os.fsync(file)
    os.close(file)
    if last is not None:
        os.remove(last)
    last = path
    print(flush=True)
"""


class UnickptLoop(LoopSaver):
    """A Checkpointer that keeps one step."""

    def __init__(
        self, root: Path, training: Any, tree: Callable[[], Any], staging: str, guarded: bool
    ) -> None:
        import unickpt

        self.tree = tree
        self.checkpointer = unickpt.Checkpointer(
            root,
            keep_last=1,
            optimizers=[training.optimizer] if guarded else [],
            options=save_options(training.nbytes, staging),
        )

    def save(self, step: int) -> None:
        self.checkpointer.save(step, self.tree())

    def wait(self) -> None:
        self.checkpointer.wait()

    def close(self) -> None:
        self.checkpointer.close()


class StallerLoop(LoopSaver):
    """Saves after the save before has ended; nothing is removed before the loop's end."""

    def __init__(self, root: Path, tree: Callable[[], Any], saver: Staller) -> None:
        root.mkdir(exist_ok=True)
        self.root, self.tree, self.saver = root, tree, saver
        self.before_update, self.wait = saver.wait_staged, saver.wait_committed
        self.close = saver.close

    def save(self, step: int) -> None:
        self.saver.wait_committed()
        self.saver.begin(self.root / f"step_{step}", self.tree())

    def tidy(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()


class OrbaxLoop(LoopSaver):
    """A CheckpointManager that keeps one step; it saves asynchronously by default."""

    def __init__(self, root: Path, training: Any, tree: Callable[[], Any]) -> None:
        import orbax.checkpoint as ocp

        self.tree, self.pack = tree, ocp.args.StandardSave
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        self.manager = ocp.CheckpointManager(root, options=options)
        self.wait, self.close = self.manager.wait_until_finished, self.manager.close

    def save(self, step: int) -> None:
        self.manager.save(step, args=self.pack(self.tree()))


def torch_savers(names: Iterable[str], training: Any, root: Path) -> dict[str, LoopSaver]:
    """The contenders of the loop in torch."""
    model, optimizer = training.model, training.optimizer

    def objects() -> Any:
        return {"model": model, "optim": optimizer}

    def states() -> Any:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    made: dict[str, Callable[[Path], LoopSaver]] = {
        UnickptTorchCopy.name: lambda at: UnickptLoop(at, training, objects, "copy", False),
        UnickptTorchLazy.name: lambda at: UnickptLoop(at, training, objects, "lazy", True),
        UnickptTorchDevice.name: lambda at: UnickptLoop(at, training, objects, "device", False),
    }
    for kind in (DcpAsync, DcpKeptStaging, DcpAsyncStaging, TorchSaved, TorchCheckpointing):
        made[kind.name] = lambda at, kind=kind: StallerLoop(at, states, kind())  # type: ignore[misc]
    return {name: make(root / name) for name, make in made.items() if name in names}


def jax_savers(names: Iterable[str], training: Any, root: Path) -> dict[str, LoopSaver]:
    """The contenders of the loop in JAX."""

    def state() -> Any:
        return training.state

    made: dict[str, Callable[[Path], LoopSaver]] = {
        UnickptJaxReference.name: lambda at: UnickptLoop(at, training, state, "auto", False),
        UnickptJaxCopy.name: lambda at: UnickptLoop(at, training, state, "copy", False),
        UnickptJaxDevice.name: lambda at: UnickptLoop(at, training, state, "device", False),
        OrbaxAsync.name: lambda at: OrbaxLoop(at, training, state),
    }
    return {name: make(root / name) for name, make in made.items() if name in names}
