"""What the processes of a job read, over the size of the checkpoint, when the layout changes.

    python benchmarks/reshards.py --dir /tmp/reshards
    python benchmarks/reshards.py --dir /tmp/reshards --without-orbax

Four matrices are saved by one process or by four, in one layout, and loaded in another by four
processes of one node: with DCP by ranks of gloo, with Orbax by processes of jax.distributed.
Counted, not timed: of DCP and Orbax what the processes read from files and sockets (`rchar` of
/proc/self/io), and of unickpt the bytes of the chunks that they read: alone (`exchange=False`); by
themselves, as from object storage (which this benchmark pretends the disk to be; from a disk they
read together only what they would read three times); and with `exchange=True`. Every value is
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peers import fresh_directory, machine_facts, print_facts
from rich.console import Console
from rich.table import Table

RANKS, EXTENT, MATRICES = 4, 2048, 4
NBYTES = MATRICES * EXTENT * EXTENT * 4
CASES = (
    ("rows", "rows"),
    ("rows", "columns"),
    ("columns", "rows"),
    ("2 x 2", "rows"),
    ("rows", "2 x 2"),
    ("rows", "replicas"),
    ("one process", "rows"),
    ("one process", "columns"),
    ("one process", "replicas"),
)
WAYS = ("unickpt, alone", "unickpt, by itself", "unickpt, exchange=True", "DCP", "Orbax")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", required=True, help="An existing folder.")
    parser.add_argument("--without-orbax", action="store_true")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with fresh_directory(arguments.dir) as folder:
        print_facts(console, machine_facts(folder))
        found = measured("torch", folder)
        if not arguments.without_orbax:
            found |= measured("jax", folder)
    table = Table(title=f"Bytes read by {RANKS} processes / checkpoint", title_justify="left")
    table.add_column("saved as")
    table.add_column("loaded as")
    ways = [way for way in WAYS if f"{way}: {CASES[0]}" in found]
    for way in ways:
        table.add_column(way, justify="right")
    for case in CASES:
        table.add_row(*case, *(f"{found[f'{way}: {case}'] / NBYTES:.2f}" for way in ways))
    console.print(table)


def measured(kind: str, folder: Path) -> dict[str, int]:
    """Bytes read by all processes, by way and case."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--rank", kind, str(folder)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "OMP_NUM_THREADS": "1",
                "JAX_PLATFORMS": "cpu",
                "NPROC": "32",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    total: dict[str, int] = {}
    for process in processes:
        out, _ = process.communicate()
        if process.returncode:
            sys.exit(f"a process of {kind} failed")
        for name, nbytes in json.loads(out.splitlines()[-1]).items():
            total[name] = total.get(name, 0) + nbytes
    return total


def values() -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.random((EXTENT, EXTENT), np.float32) for _ in range(MATRICES)]


def read_by_process(work: Callable[[], object]) -> int:
    """Bytes that this process reads from files meanwhile."""
    before = _rchar()
    work()
    return _rchar() - before


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def torch_rank(folder: Path) -> dict[str, int]:
    """What a rank reads with unickpt and with DCP."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import unickpt
    from unickpt.format.ocdbt_reader import OcdbtReader
    from unickpt.format.reader_protocol import Request
    from unickpt.plugins.exchange import node_read

    store = f"file://{folder / 'torch-store'}"
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store, rank=rank, world_size=RANKS)
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts = {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "2 x 2": (square, [Shard(0), Shard(1)]),
        "replicas": (flat, [Replicate()]),
    }
    read = 0
    read_requests = OcdbtReader.read

    def counted(self: OcdbtReader, requests: Sequence[Request]) -> Sequence[int]:
        nonlocal read
        read += sum(request.out.nbytes for request in requests)
        return read_requests(self, requests)

    OcdbtReader.read = counted  # type: ignore[method-assign]
    node_read._LEAST_BYTES = 1 << 20

    def tree(layout: str, filled: bool) -> dict[str, Any]:
        mesh, placements = layouts[layout]
        every = values() if filled else [np.zeros((EXTENT, EXTENT), np.float32)] * MATRICES
        return {
            str(i): distribute_tensor(torch.from_numpy(x.copy()), mesh, placements)
            for i, x in enumerate(every)
        }

    found: dict[str, int] = {}
    for saved in dict(CASES):
        if saved == "one process":
            if rank == 0:
                state = {str(i): torch.from_numpy(x) for i, x in enumerate(values())}
                alone = unickpt.SaveOptions(group=unickpt.ProcessGroup(0, 1, f"alone-{saved[0]}"))
                unickpt.save(folder / saved, state, options=alone)
                dcp.save(state, checkpoint_id=folder / f"{saved} dcp", no_dist=True)
            dist.barrier()
        else:
            unickpt.save(folder / saved, tree(saved, True))
            dcp.save(tree(saved, True), checkpoint_id=folder / f"{saved} dcp")
    expected = values()
    for case in CASES:
        saved, loaded = case
        for way, exchange in (("alone", False), ("by itself", None), ("exchange=True", True)):
            like, read = tree(loaded, False), 0
            node_read._is_slow = lambda stored: True
            dist.barrier()
            unickpt.load(folder / saved, like, options=unickpt.LoadOptions(exchange=exchange))
            found[f"unickpt, {way}: {case}"] = read
            check(like, expected)
        like = tree(loaded, False)
        dist.barrier()
        nbytes = read_by_process(
            lambda at=folder / f"{saved} dcp", to=like: dcp.load(to, checkpoint_id=at)
        )
        found[f"DCP: {case}"] = nbytes
        check(like, expected)
    dist.barrier()
    dist.destroy_process_group()
    return found


def check(like: dict[str, Any], expected: list[Any]) -> None:
    for i, x in enumerate(expected):
        if not np.array_equal(like[str(i)].full_tensor().numpy(), x):
            raise SystemExit("loaded other values than were saved")


def jax_process(folder: Path) -> dict[str, int]:
    """What a process reads with Orbax."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rank = int(os.environ["RANK"])
    jax.distributed.initialize("127.0.0.1:29871", RANKS, rank)
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(sorted(jax.devices(), key=lambda d: d.process_index))
    flat, square = Mesh(devices, ("a",)), Mesh(devices.reshape(2, 2), ("a", "b"))
    layouts = {
        "rows": NamedSharding(flat, PartitionSpec("a")),
        "columns": NamedSharding(flat, PartitionSpec(None, "a")),
        "2 x 2": NamedSharding(square, PartitionSpec("a", "b")),
        "replicas": NamedSharding(flat, PartitionSpec()),
        "one process": NamedSharding(flat, PartitionSpec()),
    }
    found: dict[str, int] = {}
    expected = values()
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=False)
    with ocp.Checkpointer(handler) as checkpointer:
        for saved in dict(CASES):
            tree = {
                str(i): jax.make_array_from_callback(x.shape, layouts[saved], lambda at, x=x: x[at])
                for i, x in enumerate(expected)
            }
            checkpointer.save(folder / f"{saved} orbax", args=ocp.args.PyTreeSave(tree))
        for case in CASES:
            saved, loaded = case
            like = {
                str(i): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layouts[loaded])
                for i, x in enumerate(expected)
            }
            arguments = ocp.args.PyTreeRestore(
                like, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
            )
            got: list[Any] = []
            found[f"Orbax: {case}"] = read_by_process(
                lambda at=folder / f"{saved} orbax", a=arguments, got=got: got.append(
                    checkpointer.restore(at, args=a)
                )
            )
            for i, x in enumerate(expected):
                for shard in got[0][str(i)].addressable_shards:
                    if not np.array_equal(shard.data, x[shard.index]):
                        raise SystemExit("Orbax loaded other values than were saved")
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work = {"torch": torch_rank, "jax": jax_process}[sys.argv[2]]
        print(json.dumps(work(Path(sys.argv[3]))), flush=True)
    else:
        main()
