"""How a load reads: each process alone, those of a node together, or all of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from unickpt.frameworks.process_group import launched_on_node, within
from unickpt.frameworks.protocol import Adapter
from unickpt.frameworks.registry import current_group
from unickpt.progress import ProgressFunction, reporting
from unickpt.reading.chunk_reader import Filled, ReadArrays, read_arrays
from unickpt.reading.options import LoadOptions


@contextmanager
def reading(options: LoadOptions, among: Sequence[Adapter]) -> Iterator[ReadArrays]:
    """The function that reads arrays: for the processes of a node where that reads less, or, as
    `exchange` says, for each process alone or for all together.

    If one process fails before it is called, the others learn of it.
    """
    if options.exchange:
        group = within(options.group or current_group(among), options.timeout_s)
        if group.count > 1:
            from unickpt.reading.collective_read import exchanging  # only where it is asked for

            with exchanging(group, options) as read:
                yield read
            return
    alone: Callable[..., dict[str, Any]] = read_arrays
    if options.exchange is None and (launched_on_node() or 1) > 1:
        from unickpt.reading.node_read import read_on_node  # only if there are others

        alone = read_on_node
    with _telling(options, among) as told:
        yield lambda stored, jobs: alone(stored, jobs, options, filled=Filled(jobs, told))


def _telling(
    options: LoadOptions, among: Sequence[Adapter]
) -> AbstractContextManager[ProgressFunction | None]:
    """Reports the progress of a process that reads alone, which may still be one of a job."""
    if not options.progress:
        return nullcontext()
    is_bar = options.progress is True
    process = (options.group or current_group(among)).index if is_bar else 0
    return reporting(options.progress, "loading", process)
