"""The same for many nodes, by a discrete-event simulation; `nodes.py --simulate 64` runs it.

The decisions are the plug-in's own code, on the simulated storage of `tests/support/node_world.py`:
who uploads which files, with how many requests in flight, and the manifest last. A request takes a
latency, and its bytes the time of one connection; all else takes none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support import node_world
from support.node_world import Done, Folder, Job, Node, Process, Store, World, folder

from unickpt.features import SaveCall
from unickpt.plugins.nodes import tier, uploads
from unickpt.runs.background_removal import Cleaning
from unickpt.runs.current_steps import Steps
from unickpt.runs.retention import Retention
from unickpt.runs.step_folder import StepFolder
from unickpt.runs.step_save import StepSave
from unickpt.storage.ocdbt import MANIFEST
from unickpt.tools import copying

_ENTRY_BYTES = 64  # of a chunk in the merged B-tree


class Chunk(bytes):
    """A file of 1 MiB, of which only the size matters."""

    def __len__(self) -> int:
        return 1 << 20


class Network(World):
    """A storage across a network.

    Arguments:
        latency_s: of each request.
        bytes_per_s: of each connection.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(0)
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.began = self.ended = 0.0

    def operate(self) -> None:
        pass

    def reach(self) -> bool:
        self.sleep(self.latency_s)
        return True


class RemoteStore(Store):
    """A store whose writes are in flight until someone waits for them."""

    def write(self, name: str, value: bytes | None) -> Any:
        network: Any = node_world.world()
        nbytes = 0 if value is None else len(value)
        end = network.now + network.latency_s + nbytes / network.bytes_per_s

        def result() -> None:
            network.sleep(max(0.0, end - network.now))
            self._write(name, value)

        return SimpleNamespace(result=result)


def seconds(nodes: int, mib: int, latency_s: float, bytes_per_s: float) -> dict[str, float]:
    """The simulated time of each way, from the commit on the nodes to that in the root."""
    patches = [
        mock.patch.object(node_world, "Store", RemoteStore),
        mock.patch.object(uploads, "copy_files", copying.copy_files),
        # The chunks have no content to compare; the real benchmark compares digests.
        mock.patch.object(node_world.PartCheck, "damage", return_value=""),
    ]
    with node_world.simulated(), patches[0], patches[1], patches[2]:
        times = {}
        for way, run in {"one process": _run_one, "every node": _run_every}.items():
            network = Network(latency_s, bytes_per_s)
            with mock.patch.object(node_world, "check_whole", _Check(network, nodes * mib)):
                run(network, nodes, mib)
            assert not network.failures, network.failures
            times[way] = network.ended - network.began
    return times


class _Check:
    """Called when the manifest is in the root: all files must be there."""

    def __init__(self, network: Network, files: int) -> None:
        self._network, self._files = network, files

    def __call__(self, step: str, manifest: bytes) -> None:
        self._network.ended = self._network.now
        found = sum(isinstance(data, Chunk) for data in self._network.objects["root"].values())
        assert found == self._files, f"{found} of {self._files} files are there"


def _run_one(network: Network, nodes: int, mib: int) -> None:
    """Process 0 copies the files of all from a folder that they share."""
    names = [f"{n:05d}/d/{number}" for n in range(nodes) for number in range(mib)]
    near = SimpleNamespace(
        list=lambda: Done([name.encode() for name in names]),
        read=lambda name: Done(SimpleNamespace(state="value", value=Chunk())),
    )
    origin: Any = SimpleNamespace(child=lambda name: origin, store=lambda context: near)

    def run() -> None:
        destination = folder("step_0/", "root")
        copying.copy_files(origin, destination, "a", 1 << 30)
        root = node_world.Root(destination)
        root.replace(root.read(), b"a", 60.0)

    (process,) = Job([Node("n0", "n0")]).processes
    network.start(process, run)
    network.run()


def _run_every(network: Network, nodes: int, mib: int) -> None:
    """Each process uploads its own."""
    network.nodes = {f"n{n}": Node(f"n{n}", f"n{n}") for n in range(nodes)}
    for process in (job := Job([*network.nodes.values()])).processes:
        network.start(process, lambda process=process: _Program(network, process, mib).run())
    network.run()
    if job.error is not None:
        raise job.error


class _Program:
    """A process that saves a step, which is committed at one moment, and waits for its upload."""

    def __init__(self, network: Network, process: Process, mib: int) -> None:
        self._network, self._process, self._mib = network, process, mib

    def run(self) -> None:
        process = self._process
        options: Any = SimpleNamespace(
            group=process, timeout_s=600.0, all_features=[], fsync=False, reuse=False,
            working_bytes=1 << 30, base=None, changed=None,
        )  # fmt: skip
        root = StepFolder(folder("", "root"))
        made = tier.join(root, f"/nodes/{process.node.name}/", {}, options)
        steps = Steps(root, Retention(), made.folder)
        errors = SimpleNamespace(add=self._failed)
        copies: Any = made.copying(steps, cleaning := Cleaning(steps), errors, options)
        call = SaveCall(0, None, {}, process.index == 0)
        calls = StepSave(steps, cleaning, copies, call, False, []).callbacks()
        attempt = process.next_attempt()
        calls.begin()
        calls.prepare(attempt)
        below = f"processes/{attempt}/"
        files = process.node.make(f"step_0/{below}{process.index:05d}")
        files.update({f"d/{number}": Chunk() for number in range(self._mib)})
        process.agree(0)
        if process.index == 0:
            calls.check()
            self._commit(steps.first.location_of(0), attempt)
        process.agree(0)
        self._network.began = self._network.now
        calls.committed()
        copies.wait()

    def _commit(self, location: Folder, attempt: str) -> None:
        objects, chunks = self._network.objects["control"], self._process.count * self._mib
        below = f"{location.path}processes/{attempt}/root/"
        objects[f"{below}d/tree"] = bytes(_ENTRY_BYTES * chunks)
        objects[location.path + MANIFEST] = attempt.encode()

    def _failed(self, what: str, error: BaseException) -> None:
        self._network.failures.append(f"{what}: {error}")
