"""How long the coordinator takes to read the records of all processes from S3.

    python benchmarks/s3_records.py 16384 30    # processes, milliseconds of each answer

A server in another process answers every request after the delay, with one record. The coordinator
reads as in a commit (`Notes.records`), by turns with TensorStore's own number of requests at the
same time, which is 32. Medians, and ratios within rounds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np

from unickpt.commit.messages import CHUNK_DTYPE, OK, Notes, Record
from unickpt.frameworks.process_group import ProcessGroup
from unickpt.storage import paths

_ROUNDS = 5
_ARRAYS = 20
_END = b"\r\n\r\n"
_HEADERS = "HTTP/1.1 200 OK\r\nETag: x\r\nLast-Modified: Wed, 25 Nov 2026 00:00:00 GMT\r\n"


class Connected(asyncio.Protocol):
    """One connection to the server.

    Arguments:
        answer: to every request.
        delay_s: how late it is.
    """

    def __init__(self, answer: bytes, delay_s: float) -> None:
        self._answer, self._delay_s, self._received = answer, delay_s, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *requests, self._received = (self._received + data).split(_END)
        for _ in requests:
            asyncio.get_running_loop().call_later(
                self._delay_s, self._transport.write, self._answer
            )


def serve(delay_s: float, address: Connection) -> None:
    """Answers until the process ends."""
    chunks = np.zeros(_ARRAYS, CHUNK_DTYPE)
    chunks["array"] = np.arange(_ARRAYS)
    body = Record(0, chunks, ("d/0",)).encode()
    answer = f"{_HEADERS}Content-Length: {len(body)}{_END.decode()}".encode() + body

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connected(answer, delay_s), "127.0.0.1", 0, backlog=1024
        )
        address.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def read_s(processes: int) -> float:
    """Seconds to read all records."""
    location = paths.resolve("s3://bucket/run/1/processes/attempt")
    notes = Notes(location, ProcessGroup(0, processes, "session"), paths.context(), 60)
    notes.records([0], OK)  # credentials, and a connection
    started = time.perf_counter()
    records = notes.records(range(processes), OK)
    seconds = time.perf_counter() - started
    assert len(records) == processes
    return seconds


def main() -> None:
    processes, delay_s = int(sys.argv[1]), float(sys.argv[2]) / 1000
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=serve, args=(delay_s, theirs), daemon=True).start()
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{ours.recv()}"
    os.environ |= {"AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": "anything"}
    os.environ["AWS_REGION"] = "us-east-1"
    pairs = list[tuple[float, float]]()
    for _ in range(_ROUNDS):
        with mock.patch.object(paths, "for_small_objects", lambda context: context):
            few_s = read_s(processes)
        pairs.append((few_s, read_s(processes)))
    few_s, many_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(few / more for few, more in pairs)
    print(f"{processes:,} records, {1000 * delay_s:g} ms, {os.cpu_count()} cores")
    print(f"32 at the same time: {few_s:.2f} s; unickpt's: {many_s:.2f} s; ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
