"""How commits, openings and schedules of loads grow with processes, devices, arrays and chunks.

One process plays a whole job: it writes the records and the databases that the others would have
written, with tiny chunks, and is then the coordinator that commits them (`Coordinator`), and a
reader that opens the checkpoint. Arrays are split by rows over all devices (FSDP), so the keys of
all processes are mixed: the worst case for merging. On a RAM disk, so that it is the work of the
processor that is measured; of shared machines,
seconds of the processor (on all threads) say more than those of the clock, which are in brackets.

    python benchmarks/scale.py                     # each of the four numbers doubled in turn
    python benchmarks/scale.py --job 16384 1 201 1 # one job: processes, devices of each, arrays,
                                                   # chunks of each device's rows
    python benchmarks/scale.py --loads 16384 200   # processes, arrays

With `--loads`, one process computes what it reads, sends and receives in a load by all of them
with `exchange=True`, from any layout into any other (`JobPlan`). Nothing is read.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import unickpt
from unickpt.arrays.layout import Layout, Mesh
from unickpt.commit.attempt import Attempt
from unickpt.commit.coordinator import Coordinator
from unickpt.commit.merge import MergePolicies
from unickpt.commit.messages import CHUNK_DTYPE, Record
from unickpt.format import chunk_encoding, chunk_grid, index_json
from unickpt.format.index import ArrayEntry, Index
from unickpt.frameworks.process_group import ProcessGroup
from unickpt.plugins.exchange.layout_schedule import Demand, JobPlan, LayoutPlan
from unickpt.reading.recipes import Unchanged
from unickpt.storage import paths

_COLUMNS = 32
ROW = np.arange(_COLUMNS, dtype=np.float32)
"""What every chunk holds; longer than what a B-tree keeps in its nodes."""


@dataclass(frozen=True)
class Job:
    """What is simulated.

    Arguments:
        processes: number of them.
        devices: of each process.
        arrays: of the tree.
        rows: chunks of each array that a device has.
    """

    processes: int
    devices: int
    arrays: int
    rows: int

    @property
    def chunks(self) -> int:
        return self.processes * self.devices * self.arrays * self.rows

    def index(self) -> Index:
        """What every process describes."""
        devices = self.processes * self.devices
        owners = np.repeat(np.arange(self.processes), self.devices)
        layout = Layout(Mesh(("fsdp",), (devices,), tuple(owners.tolist())), (("fsdp",), ()))
        names = [f"layers/{n // 8:04d}/w{n % 8}" for n in range(self.arrays)]
        shape = devices * self.rows, _COLUMNS
        arrays = {name: ArrayEntry(name, shape, "float32", (1, _COLUMNS), layout) for name in names}
        nested: dict[str, list[str]] = {}
        for name in names:
            _, layer, leaf = name.split("/")
            nested.setdefault(layer, []).append(leaf)
        layers = [[layer, {"dict": [[leaf, "*"] for leaf in of]}] for layer, of in nested.items()]
        return Index({"dict": [["layers", {"dict": layers}]]}, arrays, processes=self.processes)


SMALL = Job(256, 1, 50, 1)
"""What the others are multiples of."""


def write_parts(job: Job, index: Index, folder: Path) -> int:
    """Writes what all processes write before a commit; returns the digest of the description."""
    encoded = index_json.encode(index)
    digest = xxhash.xxh3_64_intdigest(encoded)
    per_process = job.devices * job.rows
    chunks = np.zeros(job.arrays * per_process, CHUNK_DTYPE)
    chunks["array"] = np.repeat(np.arange(job.arrays), per_process)
    chunks["digest"] = chunk_encoding.digest(ROW)
    chunks["length"] = ROW.nbytes
    (folder / "records").mkdir(parents=True)
    for process in range(job.processes):
        own = folder / f"{process:05d}"
        (own / "d").mkdir(parents=True)
        data = f"d/{secrets.token_hex(16)}"
        numbers = range(process * per_process, (process + 1) * per_process)
        (own / data).write_bytes(ROW.tobytes() + (encoded if process == 0 else b""))
        chunks["chunk"] = np.tile(numbers, job.arrays)
        record = Record(digest, chunks, (data,), described=(0, ROW.nbytes, len(encoded)))
        (folder / "records" / f"{process:05d}.ok").write_bytes(record.encode())
    return digest


@dataclass(frozen=True)
class Took:
    """What a job took; seconds, of the processor if nothing else is said."""

    commit_s: float
    """Of the clock."""
    commit: float
    memory: float
    """MiB more than before the commit, at most."""
    tree: float
    """MiB of the root's B-tree, with digests and index."""
    open: float
    read: float
    """To read what one process wrote, from a checkpoint that was just opened."""


def run(job: Job, parent: Path) -> Took:
    """Simulates a job."""
    folder = parent / "ckpt"
    index = job.index()
    digest = write_parts(job, index, folder / "processes" / "job-000000")
    own = Record.decode((folder / "processes/job-000000/records/00000.ok").read_bytes())
    attempt = Attempt(
        paths.resolve(folder),
        ProcessGroup(0, job.processes, "job"),
        "job-000000",
        paths.context(fsync=False),
        60.0,
    )
    attempt.check_destination(False)
    numbers = range(job.devices * job.rows)
    attempt.publish(own)
    before, started = _peak(), time.perf_counter()
    coordinator = Coordinator(attempt, lambda wanted: own, MergePolicies())
    commit, _ = timed(lambda: coordinator.commit(index, digest, lambda merged: None))
    commit_s, memory = time.perf_counter() - started, _peak() - before
    root = folder / "processes/job-000000/root"
    size = sum(file.stat().st_size for file in root.iterdir()) / 2**20
    opening, opened = timed(lambda: unickpt.open(folder))
    read, rows = timed(lambda: [opened[name][: len(numbers)] for name in index.arrays])
    if any(row.tobytes() != ROW.tobytes() * len(numbers) for row in rows):
        raise SystemExit(f"{job}: the checkpoint is wrong")
    shutil.rmtree(folder)
    return Took(commit_s, commit, memory, size, opening, read)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds of the processor that something takes, on all threads, and its result."""
    started = time.process_time()
    found = work()
    return time.process_time() - started, found


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_alone(job: Job, folder: Path) -> Took:
    """Simulates a job in a process of its own, whose memory nothing else has grown."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="unickpt-scale-") as parent:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            return pool.apply(run, (job, Path(parent)))


# --- loads ----------------------------------------------------------------------------------------

_ROUND_BYTES = 64 << 20  # as with 256 MiB of memory
_OF_NODE = 8  # processes
_CHUNK_BYTES = 8 << 20


def pairs_of_layouts(processes: int) -> dict[str, tuple[Layout, Layout]]:
    """How arrays are saved and loaded."""
    line = Mesh(("fsdp",), (processes,), tuple(range(processes)))
    plane = Mesh(("fsdp", "tp"), (processes // 8, 8), tuple(range(processes)))
    fewer = Mesh(("fsdp",), (processes * 3 // 4,), tuple(range(processes * 3 // 4)))
    rows, columns = Layout(line, (("fsdp",), ())), Layout(line, ((), ("fsdp",)))
    both = Layout(plane, (("fsdp",), ("tp",)))
    return {
        "rows to rows": (rows, rows),
        "rows to rows of 3/4 of the processes": (rows, Layout(fewer, (("fsdp",), ()))),
        "rows to columns": (rows, columns),
        "columns to rows": (columns, rows),
        "FSDP and TP (8) to rows": (both, rows),
        "rows to FSDP and TP (8)": (rows, both),
        "rows to 8 replicas of rows": (rows, Layout(plane, (("fsdp",), ()))),
        "rows to replicas": (rows, Layout(line, ((), ()))),
    }


@dataclass(frozen=True)
class Scheduled:
    """The schedule of one process.

    Arguments:
        seconds: of the processor, to compute it.
        memory: MiB more than before, at most.
        rounds: if all processes were like it.
        chunks: that it needs.
        read: of these, those that it reads itself.
        sent: boxes of these that it sends; to a node those that several need only once.
    """

    seconds: float
    memory: float
    rounds: int
    chunks: int
    read: int
    sent: int


def _memory(field: str) -> float:
    """MiB, as Linux says of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))


def run_schedule(entries: Sequence[ArrayEntry], layout: Layout, process: int) -> Scheduled:
    """Computes the schedule of a process that loads arrays in a layout."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before, started = _memory("VmRSS"), time.process_time()
    demands = {e.name: [Demand.from_source(Unchanged(e), layout, e.shape)] for e in entries}
    nodes = np.arange(max(layout.mesh.processes) + 1) // _OF_NODE
    plan = JobPlan(
        entries, lambda e, seed: LayoutPlan(e, demands[e.name], process, seed, nodes), _ROUND_BYTES
    )
    start = rounds = read = sent = 0
    while start < plan.end:
        stop = plan.round_end(start)
        for array, positions in plan.parts(start, stop):
            own = np.flatnonzero(array.readers[positions.start : positions.stop] == process)
            read += len(own)
            for n in own.tolist():
                receivers = array.receivers(positions[n])
                sent += len(array.first_receivers(positions[n], receivers))
        start, rounds = stop, rounds + 1
    seconds, memory = time.process_time() - started, _memory("VmHWM") - before
    return Scheduled(seconds, memory, rounds, sum(plan.counts.values()), read, sent)


def print_loads(processes: int, arrays: int) -> None:
    """Prints the table of `--loads`: for each pair of layouts the process that takes longest."""
    print("| from, to | seconds | memory | chunks needed | read | boxes sent | rounds |")
    print("|---|---|---|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    for name, (saved, loaded) in pairs_of_layouts(processes).items():
        entries = list[ArrayEntry]()
        for number in range(arrays):  # sizes that no number of processes divides
            shape = 2 * processes - number % 8, 2 * processes - 3 * (number % 8)
            chunk, cut = chunk_grid.chunk_grid(shape, 4, saved, _CHUNK_BYTES)
            entries.append(ArrayEntry(f"w{number}", shape, "float32", chunk, saved, cut))
        runs = list[Scheduled]()
        for process in (0, processes // 3, processes - 1):
            with context.Pool(1) as pool:
                runs.append(pool.apply(run_schedule, (entries, loaded, process)))
        most = max(runs, key=lambda run: run.seconds)
        cells = [name, f"{most.seconds:.2f}", f"{max(run.memory for run in runs):.0f} MiB"]
        cells += [f"{n:,}" for n in (most.chunks, most.read, most.sent, most.rounds)]
        print(f"| {' | '.join(cells)} |", flush=True)


# --- table and plot -------------------------------------------------------------------------------

_HEAD = """\
| processes | devices of each | arrays | rows | chunks | commit | us per chunk | memory | B-tree | open | read |
|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def row(job: Job, took: Took) -> str:
    """A row of the table."""
    cells = [
        f"{job.processes:,}",
        f"{job.devices}",
        f"{job.arrays}",
        f"{job.rows}",
        f"{job.chunks:,}",
        f"{took.commit:.2f} s ({took.commit_s:.2f} s)",
        f"{1e6 * took.commit / job.chunks:.2f}",
        f"{took.memory:.0f} MiB",
        f"{took.tree:.1f} MiB",
        f"{1e3 * took.open:.1f} ms",
        f"{took.read:.2f} s",
    ]
    return f"| {' | '.join(cells)} |"


def plot(lines: Mapping[str, Sequence[tuple[int, float]]], to: Path) -> None:
    """Draws the seconds of commits by the factor by which each number grew."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    to.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, line in lines.items():
        axis.plot(*zip(*line, strict=True), marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel(f"factor, of {SMALL}")
    axis.set_ylabel("seconds of the processor")
    axis.legend()
    with rc_context({"svg.hashsalt": "unickpt"}):  # the same file for the same figures
        figure.savefig(to, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=int, nargs=4, action="append", default=[])
    parser.add_argument("--most", type=int, default=16, help="the largest factor")
    parser.add_argument("--plot", type=Path, help="where to write a plot, as SVG (bench extra)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--loads", type=int, nargs=2, metavar=("PROCESSES", "ARRAYS"))
    asked = parser.parse_args()
    if asked.loads:
        print_loads(*asked.loads)
        return
    print(_HEAD, flush=True)
    for each in asked.job:
        print(row(Job(*each), run_alone(Job(*each), asked.folder)), flush=True)
    if asked.job:
        return
    lines: dict[str, list[tuple[int, float]]] = {}
    for field in ("processes", "devices", "arrays", "rows"):
        for power in range(asked.most.bit_length()):
            job = replace(SMALL, **{field: 2**power * getattr(SMALL, field)})
            took = run_alone(job, asked.folder)
            print(row(job, took), flush=True)
            lines.setdefault(field, []).append((2**power, took.commit))
    if asked.plot is not None:
        plot(lines, asked.plot)


if __name__ == "__main__":
    main()
