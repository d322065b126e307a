"""The figures of a load, gathered from all processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from unickpt.frameworks.leaves import adapters
from unickpt.frameworks.process_group import all_gather_bytes, current_group, group_named, within
from unickpt.reading.load_options import LoadOptions


@dataclass(frozen=True)
class LoadFigures:
    """How long the load of one process took, and what it read.

    Arguments:
        seconds, bytes, read_bytes, received_bytes, waited_s, waited_for: see `LoadReport`.
    """

    seconds: float
    bytes: int
    read_bytes: int
    received_bytes: int
    waited_s: float
    waited_for: Mapping[int, float]


def gather(figures: LoadFigures, group: Any) -> tuple[LoadFigures, ...]:
    """The figures of all processes; see `LoadReport.gather`."""
    found_adapters = adapters()
    job = current_group(found_adapters) if group is None else group_named(group, found_adapters)
    every = all_gather_bytes(within(job, LoadOptions.timeout_s), msgspec.json.encode(figures))
    return tuple(msgspec.json.decode(data, type=LoadFigures) for data in every)
