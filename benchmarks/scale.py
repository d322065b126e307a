"""How a commit and an opening grow with processes, devices, arrays and chunks.

One process plays a whole job: it writes the records and the databases that the others would have
written, with tiny chunks, and is then the coordinator that commits them (`Attempt.commit`), and a
reader that opens the checkpoint. Arrays are split by rows over all devices (FSDP), so the keys of
all processes are mixed: the worst case for merging. On a RAM disk, so that it is the work of the
processor that is measured.

    python benchmarks/scale.py                     # each of the four doubled in turn
    python benchmarks/scale.py --job 16384 1 201 1 # one job: processes, devices of each, arrays,
                                                   # chunks of each device's rows
"""

from __future__ import annotations

import argparse
import resource
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

import unickpt
from unickpt.arrays.layout import Layout, Mesh
from unickpt.commit.attempt import Attempt
from unickpt.commit.places import Places
from unickpt.commit.record import CHUNK_DTYPE, Record
from unickpt.format import chunk_store, index_json
from unickpt.format.index import INDEX_KEY, ArrayEntry, Index
from unickpt.frameworks.process_group import ProcessGroup
from unickpt.storage import contexts, paths
from unickpt.storage.btree import builder
from unickpt.storage.btree.builder import PLACE_DTYPE
from unickpt.storage.btree.nodes import DataReference

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


def write_parts(job: Job, index: Index, folder: Path) -> int:
    """Writes what all processes write before a commit; returns the digest of the description."""
    encoded = index_json.encode(index)
    digest = xxhash.xxh3_64_intdigest(encoded)
    per_process = job.devices * job.rows
    chunks = np.zeros(job.arrays * per_process, CHUNK_DTYPE)
    chunks["array"] = np.repeat(np.arange(job.arrays), per_process)
    chunks["digest"] = chunk_store.digest(ROW)
    places = np.zeros(len(chunks), PLACE_DTYPE)
    places["length"] = ROW.nbytes
    (folder / "records").mkdir(parents=True)
    for process in range(job.processes):
        own = folder / f"{process:05d}"
        (own / "d").mkdir(parents=True)
        data = f"d/{secrets.token_hex(16)}"
        at = DataReference(data, 0, ROW.nbytes)
        description = DataReference(data, ROW.nbytes, len(encoded))
        numbers = range(process * per_process, (process + 1) * per_process)
        keys = [f"{name}/c/{number}/0".encode() for name in index.arrays for number in numbers]
        values = [(INDEX_KEY.encode(), description), *((key, at) for key in keys)]
        manifest, nodes = builder.build(values, "d/nodes")
        (own / "d" / "nodes").write_bytes(nodes)
        (own / "manifest.ocdbt").write_bytes(manifest)
        (own / data).write_bytes(ROW.tobytes() + (encoded if process == 0 else b""))
        chunks["chunk"] = np.tile(numbers, job.arrays)
        record = Record(digest, chunks, places=Places((data,), places))
        (folder / "records" / f"{process:05d}.ok").write_bytes(record.encode())
    return digest


@dataclass(frozen=True)
class Took:
    """Seconds, and MiB of memory more than before."""

    commit: float
    processor: float
    """Of the commit."""
    memory: float
    open: float
    read_one: float
    tree: float
    """MiB of the root's B-tree, with digests and index."""


def run(job: Job, parent: Path) -> Took:
    """Simulates a job."""
    folder = parent / "ckpt"
    index = job.index()
    digest = write_parts(job, index, folder / "processes" / "job-000000")
    before = _peak()
    context = contexts.context(fsync=False)
    group = ProcessGroup(0, job.processes, "job")
    attempt = Attempt(paths.resolve(folder), group, "job-000000", context, 60.0)
    attempt.check_destination(False)
    record = Record.decode((folder / "processes/job-000000/records/00000.ok").read_bytes())
    attempt.publish(record)
    started, worked = time.perf_counter(), time.process_time()
    attempt.commit(index, digest, lambda wanted: record)
    committed, worked = time.perf_counter() - started, time.process_time() - worked
    memory = _peak() - before
    del attempt, context
    size = sum(file.stat().st_size for file in (folder / "processes/job-000000/root").rglob("*"))
    started = time.perf_counter()
    opened = unickpt.open(folder)
    took = time.perf_counter() - started
    name = next(iter(opened.index.arrays))
    started = time.perf_counter()
    found = opened[name][-1:]
    read = time.perf_counter() - started
    if found.tobytes() != ROW.tobytes() or len(opened) != job.arrays:
        raise SystemExit(f"{job}: the checkpoint is wrong")
    shutil.rmtree(folder)
    return Took(committed, worked, memory, took, read, size / 2**20)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=int, nargs=4, action="append")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    asked = parser.parse_args()
    jobs = [Job(*each) for each in asked.job]
    for job in jobs:
        with tempfile.TemporaryDirectory(dir=asked.folder, prefix="unickpt-scale-") as parent:
            print(job, job.chunks, run(job, Path(parent)), flush=True)


if __name__ == "__main__":
    main()
