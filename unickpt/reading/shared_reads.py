"""The interface for processes that load together and share what they read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from unickpt.format.reader_protocol import Reader
    from unickpt.frameworks.process_group import Group
    from unickpt.reading.array_reader import Filled, Job, LoadCounts, ReadArrays
    from unickpt.reading.load_options import LoadOptions


class SharedReads(Protocol):
    """How processes that load together share what they read; a module, behind the door `exchange`
    of the group `unickpt.reads`. Without it, `exchange=True` is an error, and processes of a node
    read alone."""

    def in_job(
        self, group: Group, options: LoadOptions, counts: LoadCounts
    ) -> AbstractContextManager[ReadArrays]:
        """The function that reads arrays for all processes of a job together.

        If one process fails before it is called, the others learn of it.

        Arguments:
            group: the job, of several processes.
            options: of the load.
            counts: of the load.
        """

    def on_node(
        self, stored: Reader, jobs: Sequence[Job], options: LoadOptions, filled: Filled
    ) -> dict[str, Any]:
        """As `read_arrays`, together with the other processes of this node where that reads
        less."""
