"""Uploading a step from every node, beside process 0 alone, where the storage limits each stream.

    python benchmarks/nodes.py --dir /tmp/nodes-bench --nodes 8

Each process is a node with a folder of its own, and saves its part of an array. *One process* is
`Checkpointer(local=)`: all share the folder, and process 0 copies the step. *Every node* is
`node_local=`. Both upload to an S3 server on loopback (moto) through a relay that passes a fixed
number of bytes a second per connection, as object storage does. Both keep up to four requests in
flight. Seconds from the commit on the node to that in the bucket; the ways take turns; medians.

    python benchmarks/nodes.py --simulate 64 --mib 32

With `--simulate`, nothing is saved: see `nodes_simulated.py`.

    python benchmarks/nodes.py --dir /dev/shm --nodes 4 --mib 128 --parity

Saves steps without and with sums of the nodes' files on other nodes: how long the call blocks, when
the step is committed on the nodes, and when other nodes protect it. Uploads nothing meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from exchange import s3, version
from peers import fresh_directory, machine_facts, print_facts
from rich.console import Console
from rich.table import Table

import unickpt
from unickpt.types import Box, LocalFragments

WAYS = {"one process": "local", "every node": "node_local"}
_PIECE = 16 << 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", help="An existing folder for the nodes' folders.")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--mib", type=int, default=4, help="Of each process.")
    parser.add_argument("--stream-kib-s", type=int, default=256, help="Of one connection.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulate", type=int, help="So many nodes, without saving anything.")
    parser.add_argument("--latency-s", type=float, default=0.03, help="Of a simulated request.")
    parser.add_argument("--parity", action="store_true", help="Measure parity, not uploads.")
    parser.add_argument("--rank", type=int, help="Used by the benchmark itself.")
    parser.add_argument("--way", help="Used by the benchmark itself.")
    parser.add_argument("--url", help="Used by the benchmark itself.")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        (save_steps if arguments.parity else run_process)(arguments)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    if arguments.simulate:
        import nodes_simulated

        facts = arguments.mib, arguments.latency_s, float(arguments.stream_kib_s << 10)
        simulated = nodes_simulated.seconds(arguments.simulate, *facts)
        seconds = {way: [time] for way, time in simulated.items()}
        print_seconds(console, arguments, arguments.simulate, seconds)
        return
    if arguments.dir is None:
        parser.error("--dir is needed, except with --simulate")
    if arguments.parity:
        compare_parity(arguments)
        return
    seconds = {way: [] for way in WAYS}
    with fresh_directory(arguments.dir) as folder, s3() as environment:
        print_facts(console, machine_facts(folder) | {"moto": version("moto")})
        with relay(environment["AWS_ENDPOINT_URL"], arguments.stream_kib_s << 10) as port:
            os.environ |= environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
            for number in range(arguments.rounds):
                for way in WAYS:
                    url = f"s3://bucket/{way.replace(' ', '-')}-{number}"
                    seconds[way].append(run_job(arguments, folder / url[5:], way, url))
    print_seconds(console, arguments, arguments.nodes, seconds)


def print_seconds(
    console: Console, arguments: argparse.Namespace, nodes: int, seconds: dict[str, list[float]]
) -> None:
    """Prints a table of the ways."""
    total = nodes * arguments.mib
    title = f"{nodes} nodes, {total} MiB, {arguments.stream_kib_s} KiB/s per connection"
    table = Table("way", "seconds", "MiB/s", "ratio", title=title, title_justify="left")
    base = statistics.median(seconds["one process"])
    for way, measured in seconds.items():
        median = statistics.median(measured)
        table.add_row(way, f"{median:.2f}", f"{total / median:.2f}", f"{base / median:.1f}x")
    console.print(table)


def run_job(arguments: argparse.Namespace, folder: Path, way: str, url: str) -> float:
    """Saves and uploads one step with all processes; the longest upload of any, in seconds."""
    folder.mkdir(parents=True)
    facts = "--dir", str(folder), "--nodes", str(arguments.nodes), "--mib", str(arguments.mib)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *facts, "--rank", str(rank), "--way", way, "--url", url],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(arguments.nodes)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a process failed")
    return max(float(json.loads(output.splitlines()[-1])["seconds"]) for output in outputs)


def compare_parity(arguments: argparse.Namespace) -> None:
    """Prints what parity across nodes costs: of each step the slowest process, then medians."""
    with fresh_directory(arguments.dir) as folder:
        print_facts(Console(width=120), machine_facts(folder))
        for way in ("without", "(8, 1)"):
            target = folder / way.strip("()").replace(", ", "-")
            target.mkdir()
            facts = "--dir", str(target), "--nodes", str(arguments.nodes), "--parity", "--way", way
            sizes = "--mib", str(arguments.mib), "--rounds", str(arguments.rounds)
            processes = [
                subprocess.Popen(
                    [sys.executable, __file__, *facts, *sizes, "--rank", str(rank)],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(arguments.nodes)
            ]
            outputs = [
                json.loads(process.communicate()[0].splitlines()[-1]) for process in processes
            ]
            steps = [
                [max(times) for times in zip(*step, strict=True)]
                for step in zip(*outputs, strict=True)
            ]
            names = "blocked", "committed", "protected"
            medians = [statistics.median(times) for times in zip(*steps, strict=True)]
            texts = [f"{name} {s:.3f} s" for name, s in zip(names, medians, strict=True)]
            print(f"{way:<8}", ", ".join(texts if way != "without" else texts[:2]))


def begin(
    arguments: argparse.Namespace,
) -> tuple[Path, Agreement, unickpt.ProcessGroup, dict[str, LocalFragments]]:
    """The folder of all nodes, how they agree, their group, and this one's rows of an array."""
    rank, count, folder = arguments.rank, arguments.nodes, Path(arguments.dir)
    rows, agree = arguments.mib << 8, Agreement(folder, rank, count)
    data = np.random.default_rng(rank).integers(0, 256, (rows, 4096), np.uint8)
    box = Box((rank * rows, 0), ((rank + 1) * rows, 4096))
    group = unickpt.ProcessGroup(rank, count, "bench", agree=agree)
    return folder, agree, group, {"w": LocalFragments((rows * count, 4096), [(box, data)])}


def save_steps(arguments: argparse.Namespace) -> None:
    """One node: saves its rows of an array in each step, and waits until the step is protected."""
    folder, agree, group, state = begin(arguments)
    parity = None if arguments.way == "without" else (8, 1)
    options = unickpt.SaveOptions(group=group, fsync=False, parity=parity)
    node, steps = folder / f"node{arguments.rank}", list[list[float]]()
    every = arguments.rounds + 9  # so that nothing is uploaded
    url = folder / "root"
    run = unickpt.Checkpointer(url, options=options, node_local=node, upload_every=every)
    for step in range(1, arguments.rounds + 2):
        agree(0)
        started = time.perf_counter()
        pending = run.save(step, state)
        blocked = time.perf_counter() - started
        pending.result()
        committed = time.perf_counter() - started
        while parity is not None and "node" not in run.survives()[step]:
            time.sleep(0.01)
        steps.append([blocked, committed, time.perf_counter() - started])
    print(json.dumps(steps[1:]), flush=True)  # the first is to warm up
    agree(0)
    os._exit(0)  # without the upload of the last step


def run_process(arguments: argparse.Namespace) -> None:
    """One node: saves its rows of an array, and waits for the upload."""
    folder, agree, group, state = begin(arguments)
    options = unickpt.SaveOptions(group=group, fsync=False, chunk_bytes=1 << 20)
    is_apart = WAYS[arguments.way] == "node_local"
    node = folder / (f"node{arguments.rank}" if is_apart else "shared")
    run = unickpt.Checkpointer(arguments.url, options=options, **{WAYS[arguments.way]: node})
    run.save(1, state).result()
    started = time.perf_counter()
    run.wait()
    print(json.dumps({"seconds": time.perf_counter() - started}))
    agree(0)
    run.close()


class Agreement:
    """The maximum of the values of all processes, by small files."""

    def __init__(self, folder: Path, rank: int, count: int) -> None:
        self._folder, self._rank, self._count, self._calls = folder, rank, count, 0

    def __call__(self, value: int) -> int:
        self._calls += 1
        draft = self._folder / f".draft-{self._rank}"
        draft.write_text(str(value))
        draft.rename(self._folder / f"agree-{self._calls}-{self._rank}")
        paths = [self._folder / f"agree-{self._calls}-{rank}" for rank in range(self._count)]
        while not all(path.exists() for path in paths):
            time.sleep(0.01)
        return max(int(path.read_text()) for path in paths)


@contextmanager
def relay(endpoint: str, bytes_per_s: int) -> Iterator[int]:
    """A relay to a server that limits what each connection sends; its port."""
    host, _, port = endpoint.partition("//")[2].rpartition(":")

    async def passes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: int) -> None:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(len(piece) / rate if rate else 0)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        ways = passes(reader, to_writer, bytes_per_s), passes(to_reader, writer, 0)
        await asyncio.gather(*ways, return_exceptions=True)

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


if __name__ == "__main__":
    main()
