"""Loading by every process alone, and together, on 4 gloo ranks of one machine.

    python benchmarks/exchange.py --dir /tmp/exchange-bench

Matrices that JAX keeps as [in, out] go into [out, in] DTensors, sharded along `out` as FSDP2 does,
or replicated. From a local disk, and from an S3 server on loopback (moto, one process of Python:
a storage that is slower than the network between the ranks). *Alone* is `LoadOptions(exchange=
False)`, *by itself* the default, by which the processes of a node share what they read (from a
disk, what they would read at least three times), and *together* `exchange=True`. The ways take
turns; medians.
Bytes read are those of all ranks, as a multiple of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.request import Request, urlopen

import numpy as np
from peers import fresh_directory, machine_facts, print_facts
from rich.console import Console
from rich.table import Table

import unickpt

RANKS = 4
RULES = "layers/{l}/kernel [i o] <-> layers.{l}.weight [o i]"
LAYOUTS = ("sharded", "replicated")
WAYS = {"alone": False, "by itself": None, "together": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", required=True, help="An existing folder on the disk to measure.")
    parser.add_argument("--mib", type=int, default=512, help="Of the checkpoint on the disk.")
    parser.add_argument("--s3-mib", type=int, default=128, help="Of that on S3.")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"{RANKS} ranks", title_justify="left")
    for column in ("storage", "DTensors", "way", "seconds", "bytes read"):
        table.add_column(column, justify="left" if len(table.columns) < 3 else "right")
    with fresh_directory(arguments.dir) as folder:
        facts = {"torch": version("torch"), "moto": version("moto")}
        print_facts(console, machine_facts(folder) | facts)
        rows = [("disk", arguments.mib, str(folder / "c"))]
        with s3() as environment:
            os.environ |= environment
            rows.append(("S3", arguments.s3_mib, "s3://bucket/c"))
            for storage, mib, url in rows:
                save(url, mib)
                told = load(url, arguments.rounds)
                for layout in LAYOUTS:
                    for way in WAYS:
                        seconds, read = told[f"{layout} {way}"]
                        factor = f"{read / (mib << 20):.2f} x"
                        table.add_row(storage, layout, way, f"{seconds:.2f}", factor)
    console.print(table)


def version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def save(url: str, mib: int) -> None:
    extent = 2048  # 16 MiB each, in two chunks
    rng = np.random.default_rng(0)
    layers = {
        str(i): {"kernel": rng.standard_normal((extent, extent), np.float32)}
        for i in range(mib >> 4)
    }
    unickpt.save(url, {"layers": layers})


@contextmanager
def s3() -> Iterator[dict[str, str]]:
    """A server with a bucket, and the variables by which it is found."""
    port = 5791
    endpoint = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            try:
                urlopen(Request(f"{endpoint}/bucket", method="PUT"), timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "anyone",
            "AWS_SECRET_ACCESS_KEY": "anything",
        }
    finally:
        server.kill()
        server.wait()


def load(url: str, rounds: int) -> dict[str, tuple[float, int]]:
    """Median seconds and bytes read of each layout and way."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", __file__, "--rank", url, str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, tuple[float, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def rank(url: str, rounds: int) -> None:
    """What each rank does."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, empty

    from unickpt.format.ocdbt_reader import OcdbtReader

    dist.init_process_group("gloo")
    read = 0
    read_requests = OcdbtReader.read

    def counted(self: OcdbtReader, requests: Sequence[Request]) -> Sequence[int]:
        nonlocal read
        read += sum(request.out.nbytes for request in requests)
        return read_requests(self, requests)

    OcdbtReader.read = counted  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (RANKS,))
    rules = unickpt.Rules.parse(RULES)
    stored = unickpt.open(url)
    seconds: dict[str, list[float]] = {}
    bytes_read: dict[str, int] = {}
    for layout, placement in zip(LAYOUTS, (Shard(0), Replicate()), strict=True):
        like = {
            f"layers.{i}.weight": empty(*array.shape, device_mesh=mesh, placements=[placement])
            for i, array in enumerate(stored.values())
        }
        for _ in range(rounds + 1):  # the first one warms up
            for way, exchange in WAYS.items():
                options = unickpt.LoadOptions(exchange=exchange)
                read = 0
                dist.barrier()
                begun = time.perf_counter()
                unickpt.load(url, like, rules=rules, options=options)
                dist.barrier()
                seconds.setdefault(f"{layout} {way}", []).append(time.perf_counter() - begun)
                total = torch.tensor(read)
                dist.all_reduce(total)
                bytes_read[f"{layout} {way}"] = int(total)
    if dist.get_rank() == 0:
        medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        print(json.dumps({name: (medians[name], bytes_read[name]) for name in medians}))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], int(sys.argv[3]))
    else:
        main()
