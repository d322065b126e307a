"""What the commands that write checkpoints share: torchrun's processes, and what they print."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unickpt import SaveReport
from unickpt.cli.output import clean, console, counted, print_json, size_text


@contextmanager
def job() -> Iterator[bool]:
    """Joins the other processes of torchrun, where there are any; whether this is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield True
        return
    dist: Any = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank() == 0
        dist.barrier()
    finally:
        dist.destroy_process_group()


def print_written(done: str, report: SaveReport, verified: bool, as_json: bool) -> None:
    """Says what was written.

    Arguments:
        done: what was done.
        report: of it.
        verified: whether what was written was read again.
        as_json: for programs.
    """
    if as_json:
        print_json(written_json(report))
        return
    checked = ", and checked" if verified else ""
    console().print(
        f"{done} {counted(report.arrays, 'array')}, {size_text(report.bytes)} in "
        f"{report.seconds:.2f} s ({report.gb_per_s:.2f} GB/s){checked}: {clean(report.url)}"
    )


def written_json(report: SaveReport) -> dict[str, Any]:
    """What was written, for programs."""
    names = ("url", "arrays", "bytes", "chunks", "processes", "seconds")
    return {name: getattr(report, name) for name in names}
