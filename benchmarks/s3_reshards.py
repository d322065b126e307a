"""Loading onto another layout from S3 behind a slow link, beside DCP, on gloo ranks of one machine.

    pip install --target /tmp/s3fs s3fs
    python benchmarks/s3_reshards.py --dir /tmp --s3fs /tmp/s3fs

The ranks save matrices split by rows; each loads its columns, and then its replica, with either
library by turns. The server is moto, and between it and the ranks is a link that they share: what
the server sends arrives late, and only so many bytes in each second. DCP goes through fsspec and
s3fs, unickpt by its defaults. Every value is compared. Medians, ratios within rounds, and the bytes
that went over the link, over the size of the checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from exchange import s3
from peers import fresh_directory, machine_facts, print_facts
from rich.console import Console
from rich.table import Table

LAYOUTS, LIBRARIES = ("columns", "replicas"), ("DCP", "unickpt")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", required=True, help="an existing folder")
    parser.add_argument("--s3fs", required=True, help="a folder with the package s3fs")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--matrices", type=int, default=64)
    parser.add_argument("--extent", type=int, default=512, help="rows of each matrix")
    parser.add_argument("--ms", type=float, default=50, help="delay of the link")
    parser.add_argument("--mib-per-s", type=float, default=32, help="of the link")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with fresh_directory(options.dir) as folder, s3() as environment:
        link = Link(environment["AWS_ENDPOINT_URL"], options.ms / 1000, options.mib_per_s * 2**20)
        print_facts(console, machine_facts(folder) | versions(options.s3fs))
        with link.open() as endpoint:
            environment["AWS_ENDPOINT_URL"] = endpoint
            samples = run_ranks(environment, link.counter_port, options)
    nbytes = options.matrices * options.extent**2 * 4
    title = (
        f"{options.ranks} ranks, {options.matrices} matrices, {nbytes >> 20} MiB, saved by rows; "
        f"{options.ms:g} ms, {options.mib_per_s:g} MiB/s"
    )
    table = Table("loaded as", "library", "seconds", "over the link", "DCP's time", title=title)
    for layout in LAYOUTS:
        for library in LIBRARIES:
            seconds, received = zip(*samples[f"{layout} {library}"][1:], strict=True)
            theirs = [sample[0] for sample in samples[f"{layout} DCP"][1:]]
            ratio = statistics.median(a / b for a, b in zip(theirs, seconds, strict=True))
            table.add_row(
                layout,
                library,
                f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
                f"{statistics.median(received) / nbytes:.2f} x",
                f"{ratio:.1f} x",
            )
    console.print(table)


class Link:
    """A link to a server, which all connections share: what it sends is delayed, and only so many
    bytes go over it in each second.

    Arguments:
        endpoint: the address of the server.
        delay_s: how late the first byte is.
        bytes_per_s: of all connections together.
    """

    def __init__(self, endpoint: str, delay_s: float, bytes_per_s: float) -> None:
        self._host, port = endpoint.removeprefix("http://").split(":")
        self._port, self._delay_s, self._bytes_per_s = int(port), delay_s, bytes_per_s
        self._free_at, self._received, self.counter_port = 0.0, 0, 0

    @contextmanager
    def open(self) -> Iterator[str]:
        """The address of its other end; a connection to `counter_port` gets the bytes so far."""
        loop, addresses = asyncio.new_event_loop(), []

        async def start() -> None:
            for serve in (self._connect, self._count):
                server = await asyncio.start_server(serve, "127.0.0.1", 0)
                addresses.append(server.sockets[0].getsockname()[1])

        loop.run_until_complete(start())
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        port, self.counter_port = addresses
        yield f"http://127.0.0.1:{port}"
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    async def _count(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(str(self._received).encode())
        writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(self._forward(reader, requests), self._send(answers, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Sends answers when the link has room for them."""
        arrivals: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def receive() -> None:
            while data := await reader.read(1 << 16):
                self._free_at = max(time.monotonic(), self._free_at)
                self._free_at += len(data) / self._bytes_per_s
                self._received += len(data)
                await arrivals.put((self._free_at + self._delay_s, data))
            await arrivals.put((0, b""))

        receiving = asyncio.ensure_future(receive())
        try:
            while (arrival := await arrivals.get())[1]:
                await asyncio.sleep(max(0.0, arrival[0] - time.monotonic()))
                writer.write(arrival[1])
                await writer.drain()
        except OSError:
            receiving.cancel()
        writer.close()


def versions(s3fs: str) -> dict[str, str]:
    from importlib.metadata import distributions, version

    packages = {d.name: d.version for d in distributions(path=[s3fs])}
    return {"torch": version("torch"), "moto": version("moto"), "s3fs": packages["s3fs"]}


def run_ranks(
    environment: dict[str, str], counter_port: int, options: argparse.Namespace
) -> dict[str, list[tuple[float, int]]]:
    """Seconds and bytes over the link of each load, by layout and library; the first warms up."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.ranks}", __file__, "--rank"]
    command += map(str, (options.matrices, options.extent, options.rounds, counter_port))
    path = os.pathsep.join([options.s3fs, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    samples: dict[str, list[tuple[float, int]]] = json.loads(done.stdout.splitlines()[-1])
    return samples


def rank(matrices: int, extent: int, rounds: int, counter_port: int) -> None:
    """What each rank does."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import load, save
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, empty

    import unickpt

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = {f"w{number}": torch.randn(extent, extent) for number in range(matrices)}
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    save(state, storage_writer=FsspecWriter("s3://bucket/dcp"))
    unickpt.save("s3://bucket/unickpt", state)
    placements = dict(zip(LAYOUTS, (Shard(1), Replicate()), strict=True))
    samples: dict[str, list[tuple[float, int]]] = {}

    def received() -> int:
        with socket.create_connection(("127.0.0.1", counter_port)) as connection:
            return int(connection.makefile().read())

    for number in range(rounds + 1):
        for layout, placement in placements.items():
            for library in LIBRARIES[:: 1 if number % 2 else -1]:
                like: dict[str, Any] = {
                    name: empty(extent, extent, device_mesh=mesh, placements=[placement])
                    for name in whole
                }
                dist.barrier()
                before, started = received(), time.perf_counter()
                if library == "DCP":
                    load(like, storage_reader=FsspecReader("s3://bucket/dcp"))
                else:
                    unickpt.load("s3://bucket/unickpt", like)
                dist.barrier()
                seconds = time.perf_counter() - started
                sample = seconds, received() - before
                samples.setdefault(f"{layout} {library}", []).append(sample)
                for name, tensor in whole.items():
                    expected = distribute_tensor(tensor, mesh, [placement])
                    assert torch.equal(like[name].to_local(), expected.to_local())
                dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(samples))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(*map(int, sys.argv[2:]))
    else:
        main()
