"""Collective reading: the processes of a job read each chunk once, and exchange it.

Which process reads and sends what follows from the layouts (`layout_schedule`), if all processes
describe an array alike (`demands`); of other arrays they first send each other the boxes that they
need. Then they exchange, in rounds, boxes of the chunks that they have read (`shared_read`).
Where several processes of a node need the same box, one of them gets it from another node, and
passes it on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from unickpt import LoadOptions
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointReplaced,
    ProcessFailed,
    SaveTimeout,
)
from unickpt.extend import (
    Array,
    ArrayEntry,
    Filled,
    Job,
    LoadCounts,
    ReadArrays,
    Reader,
    all_gather_bytes,
    dtype_from_name,
    members_of,
    node_name,
    process_names,
    reporting,
)
from unickpt.plugins.exchange.demands import DemandDescription, Demands
from unickpt.plugins.exchange.layout_schedule import ArrayPlan, JobPlan, LayoutPlan, WantedPlan
from unickpt.plugins.exchange.shared_read import (
    Exchange,
    Hop,
    SharedChunk,
    SharedRead,
    Waiting,
    Wants,
    assign,
    wants_of,
)
from unickpt.types import Box, Group

_LOADING = "loading"
_ALIGN = 16  # bytes
# A message starts with four words: the status, the seconds of the step before, the end of a later
# round, and whether this one has relayed boxes.
_HEADER = 32  # bytes
_HEADER_BYTES = np.arange(_HEADER)
_NAMED = 4  # checkpoints, in a message
_IN_FLIGHT = 4  # buffers in the budget: for two rounds, what is sent and what is received

# A failure; what a process reports; how long the step before took it.
_MESSAGE = msgspec.json.Decoder(tuple[tuple[str, str] | None, msgspec.Raw, float])
# The identity of the checkpoint, its path for messages, the needs, and the node.
_OPENED = msgspec.json.Decoder(tuple[str, str, DemandDescription, str])
_WANTS = msgspec.json.Decoder(Wants)

# A caller may recover from these with a newer or older checkpoint or a copy; then all must.
_SAME: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointCorrupt, CheckpointNotFound, CheckpointReplaced)
}


@contextmanager
def in_job(group: Group, options: LoadOptions, counts: LoadCounts) -> Iterator[ReadArrays]:
    """The function that reads arrays for all processes of a job together.

    If one process fails before it is called, the others learn of it.

    Arguments:
        group: the job.
        options: see `LoadOptions`.
        counts: of the load.
    """
    job = _JobRead(group, options, counts)
    try:
        with reporting(options.progress, _LOADING, group.index) as progress:
            job.progress = progress
            yield job.read
    except Exception as error:
        with suppress(_Unreachable):  # then this error says more
            job.fail(error)  # raises if the others do not know yet
        raise


class _Unreachable(ProcessFailed):
    """The processes can no longer exchange anything."""


class _Messages:
    """The messages to or from each process in a round: a header, if there is one, then boxes."""

    def __init__(self, count: int, header: int = _HEADER) -> None:
        self.sizes = [header] * count
        self._boxes: dict[tuple[str, int], list[tuple[Box, int, int]]] = {}

    def add(self, chunk: SharedChunk, box: Box, process: int) -> None:
        """Adds a box of a chunk to the message of a process."""
        of_chunk = self._boxes.setdefault(chunk.key, [])
        of_chunk.append((box, process, self.sizes[process]))
        self.sizes[process] += -(-box.size * chunk.entry.itemsize // _ALIGN) * _ALIGN

    @cached_property
    def starts(self) -> list[int]:
        """The start of each message, after everything was added."""
        return [0, *accumulate(self.sizes)][:-1]

    def views(self, data: Array, chunk: SharedChunk) -> list[tuple[Box, Array]]:
        """The boxes of a chunk in the bytes of all messages."""
        dtype, boxes = dtype_from_name(chunk.entry.dtype), []
        for box, process, offset in self._boxes.get(chunk.key, ()):
            begin = self.starts[process] + offset
            bits = data[begin : begin + box.size * dtype.itemsize]
            boxes.append((box, bits.view(dtype).reshape(box.shape)))
        return boxes


class _RoundOfMessages:
    """A round in which chunks are sent: to each process the boxes that it needs. If boxes are
    relayed, a second exchange follows within the nodes."""

    def __init__(self, job: _JobRead, chunks: Sequence[SharedChunk]) -> None:
        self._job, self._chunks, count = job, chunks, job.group.count
        self._sent, self._received = _Messages(count), _Messages(count)
        self._passed, self._gained = _Messages(count, 0), _Messages(count, 0)
        for chunk in chunks:
            for hop in _direct_hops(chunk) if chunk.hops is None else chunk.hops:
                sent, received = self._sent, self._received
                if hop.is_relayed:
                    sent, received = self._passed, self._gained
                if hop.sender == job.index:
                    sent.add(chunk, hop.box, hop.receiver)
                elif hop.receiver == job.index:
                    received.add(chunk, hop.box, hop.sender)
        self._outbox = np.empty(sum(self._sent.sizes), np.uint8)
        self._relayed = np.empty(sum(self._passed.sizes), np.uint8)
        self._gains: Array | None = None

    def to_fill(self, chunk: SharedChunk) -> Sequence[tuple[Box, Array]]:
        return self._sent.views(self._outbox, chunk)

    def is_received(self, chunk: SharedChunk) -> bool:
        return chunk.owner != self._job.index

    def exchange(self, error: Exception | None) -> None:
        job, sent, received, waiting = self._job, self._sent, self._received, self._job.waiting
        relays = any(self._passed.sizes) or any(self._gained.sizes)
        header = np.array([error is not None, 0, job.propose_end(), relays], np.int64)
        header[1:2].view(np.float64)[:] = waiting.last_s
        self._outbox[np.add.outer(sent.starts, _HEADER_BYTES)] = header.view(np.uint8)
        with _reaching(), waiting.step():
            self._inbox = job.group.exchange(self._outbox, sent.sizes, received.sizes)
        headers = self._inbox[np.add.outer(received.starts, _HEADER_BYTES)].view(np.int64)
        failed, seconds, ends, relayed = headers.T
        waiting.learn(seconds.copy().view(np.float64).tolist())
        if error is not None or failed.any():
            job.gather_reports(error)
        job.end_round(int(ends.min()))
        if relayed.any():
            self._relay()

    def _relay(self) -> None:
        """Passes boxes on to the others of this node, if any process has some."""
        for chunk in self._chunks:
            memories = self._passed.views(self._relayed, chunk)
            boxes = dict(self._received.views(self._inbox, chunk)) if memories else {}
            for box, memory in memories:
                memory[...] = boxes[box]
        with _reaching():
            self._gains = self._job.group.exchange(
                self._relayed, self._passed.sizes, self._gained.sizes
            )

    def received(self, chunk: SharedChunk) -> Sequence[tuple[Box, Array]]:
        boxes = self._received.views(self._inbox, chunk)
        return boxes if self._gains is None else [*boxes, *self._gained.views(self._gains, chunk)]


def _direct_hops(chunk: SharedChunk) -> Iterator[Hop]:
    """From the reader of a chunk to all others that need it."""
    for process, boxes in chunk.wanted_boxes.items():
        for box in boxes if process != chunk.owner else ():
            yield Hop(box, chunk.owner, process)


class _JobRead:
    """One load by all processes of a group, and its `Transport`: messages.

    The error of the first failed process decides for all, so that all continue in the same way.
    """

    def __init__(self, group: Group, options: LoadOptions, counts: LoadCounts) -> None:
        self.group, self.index, self._options = group, group.index, options
        self._counts, self.waiting = counts, Waiting(counts, group.index)
        self._has_reported = False
        self.progress: Callable[[int, int], None] | None = None
        self._ends = deque[int]()  # of rounds that have not begun
        self._last_end = 0

    def fail(self, error: Exception) -> None:
        """Notifies the others of an error, if they still wait for this process's needs."""
        if not self._has_reported:
            self.gather_reports(error)

    def read(self, stored: Reader, jobs: Sequence[Job]) -> dict[str, Any]:
        """As `read_arrays`, by all processes together.

        Raises:
            ProcessFailed: another process failed; has that process's message.
            CheckpointReplaced: in all processes, if they opened different checkpoints.
        """
        done: dict[str, Any] = {}
        work = SharedRead(stored, jobs, self._options, Filled(jobs, self.progress, self._counts))
        entries = stored.index.arrays
        demands = Demands(jobs, self.group)
        # Who does not compare digests must not read for one who does.
        opened = f"{stored.identity} {self._options.verify}", stored.label
        description = demands.description()
        self._has_reported = True
        report = *opened, description, node_name()
        reports = list(map(_OPENED.decode, self.gather_reports(None, report)))
        identities, paths, descriptions, names_of_nodes = zip(*reports, strict=True)
        self._check_same(identities, paths)
        nodes: Array | None = np.unique(names_of_nodes, return_inverse=True)[1]
        if len({*names_of_nodes}) in (1, len(names_of_nodes)):
            nodes = None  # no node gets from another what several of its processes need
        chunks_by_array: dict[str, list[SharedChunk]] = {}
        if demands.settle(descriptions):
            wants = {n: boxes for n, boxes in wants_of(jobs).items() if not demands.demands_for(n)}
            all_wants = list(map(_WANTS.decode, self.gather_reports(None, wants)))
            names = set[str]().union(*all_wants)
            used = [entry for name, entry in entries.items() if name in names]
            for chunk in assign(used, all_wants):
                if self.index in chunk.wanted_boxes:
                    chunks_by_array.setdefault(chunk.entry.name, []).append(chunk)

        def plan(entry: ArrayEntry, first: int) -> ArrayPlan | None:
            of_layouts = demands.demands_for(entry.name)
            if of_layouts is not None:
                return LayoutPlan(entry, of_layouts, self.index, first, nodes)
            chunks = chunks_by_array.get(entry.name)
            return None if chunks is None else WantedPlan(chunks, self.index)

        budget = max(1, self._options.working_bytes // _IN_FLIGHT)
        self._plan = JobPlan(entries.values(), plan, budget)
        work.read(self._rounds(), self._plan.counts, self, done)
        return done

    def _check_same(self, identities: Sequence[str], paths: Sequence[str]) -> None:
        """Checks that all processes opened the same checkpoint.

        Arguments:
            identities, paths: of the checkpoints that they opened.

        Raises:
            CheckpointReplaced: they did not; names one process for each of them.
        """
        firsts = [identities.index(identity) for identity in dict.fromkeys(identities)]
        if len(firsts) == 1:
            return
        members = members_of(self.group)
        opened = [f"{process_names(members, [n])} opened {paths[n]}" for n in firsts[:_NAMED]]
        more = ", ..." if len(firsts) > _NAMED else ""
        raise CheckpointReplaced(
            f"the processes opened different checkpoints: {', '.join(opened)}{more}. A save "
            "replaced the one at this path: load again; or paths, parts (`under`) or verify= "
            "differ: with exchange=True, all must load the same in the same way"
        )

    def _rounds(self) -> Iterator[Sequence[SharedChunk]]:
        """The chunks of this process in each round. When a round begins, its end is known from the
        exchange two rounds before it; of the first two, from exchanges of headers alone."""
        start = 0
        while start < self._plan.end:
            if not self._ends:
                _RoundOfMessages(self, ()).exchange(None)
            stop = self._ends.popleft()
            yield self._plan.chunks(start, stop)
            start = stop

    def propose_end(self) -> int:
        """Where the next round can end whose end is not known yet, by the memory of this
        process."""
        return self._plan.round_end(self._last_end)

    def end_round(self, end: int) -> None:
        """Takes the end of the next round that all processes agree on."""
        if self._last_end < self._plan.end:
            self._ends.append(end)
            self._last_end = end

    def begin(self, number: int, chunks: Sequence[SharedChunk]) -> Exchange:
        return _RoundOfMessages(self, chunks)

    def end(self, error: Exception | None) -> None:
        self.gather_reports(error)

    def gather_reports(self, error: Exception | None, report: Any = None) -> list[msgspec.Raw]:
        """The reports of all processes; if any failed, raises the error of the first one.

        Called by all processes at the same point.
        """
        text = str(error).encode(errors="backslashreplace").decode()  # paths may be any bytes
        failed = None if error is None else (type(error).__name__, text)
        own_report = msgspec.json.encode((failed, report, self.waiting.last_s))
        with _reaching(), self.waiting.step():
            messages = all_gather_bytes(self.group, own_report)
        every = list(map(_MESSAGE.decode, messages))
        self.waiting.learn([seconds for _, _, seconds in every])
        for process, (failure, _, _) in enumerate(every):
            if failure is None:
                continue
            if error is not None and process == self.index:
                raise error
            kind, text = failure
            made = _SAME.get(kind, ProcessFailed)
            who = process_names(members_of(self.group), [process])
            raise made(f"{who} failed: {kind}: {text}") from error
        return [theirs for _, theirs, _ in every]


@contextmanager
def _reaching() -> Iterator[None]:
    """Turns a communication error into `_Unreachable`."""
    try:
        yield
    except SaveTimeout as error:
        raise _Unreachable(str(error)) from error
    except RuntimeError as error:
        raise _Unreachable(
            "the processes could not exchange the chunks that they read; one of them may have "
            f"ended: {error}"
        ) from error
