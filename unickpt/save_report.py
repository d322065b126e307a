"""What a save reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unickpt.quoting import counted, size_text

_SLOWEST = 10  # processes that a report shows


@dataclass(frozen=True, repr=False)
class SaveReport:
    """What a save did.

    Arguments:
        url: where the checkpoint is.
        arrays: number of arrays.
        bytes: logical bytes of all arrays.
        written_bytes: logical bytes of the chunks that this process wrote, and the bytes of its
            patches.
        chunks: number of chunks that this process wrote, except patches.
        reused_bytes: logical bytes of the chunks that this process did not write, because
            `SaveOptions.base` has them; of those that it wrote as patches, all but the patch.
        processes: number of processes that took part.
        seconds: wall time in this process, from the call to the commit.
        phases: seconds per phase: `describe`, `plan`, `stage` (in the call), `queue` (waiting for
            earlier saves), `write` and `commit`, which includes waiting for the other processes.
        process: index of this process, in `SaveOptions.group` if that is given.
        blocked_s: seconds for which the call blocked the caller.
        staged_bytes: bytes that were copied to host memory, in the call or in the background.
        drained_bytes: bytes that did not fit into `SaveOptions.budget_bytes` when it was their
            turn, and were copied in the background as memory became free.
        budget_wait_s: seconds of the call for which it waited because of `budget_bytes`.
        writers: on the coordinator only, the statistics of each process: `bytes` and `chunks`
            written, `reused_bytes`, `stored_bytes`, `seconds` that took, `blocked_s`,
            `staged_bytes`, `drained_bytes`, `budget_wait_s`; and the source of
            `unickpt.open(path).timing`: when each of its phases began and how long it took, and
            its host's time when `save` was called.
        bases: on the coordinator only, the names of the checkpoints in the same folder that have
            chunks of this one, where storage has no hard links: it cannot be read without them, so
            they must not be removed, replaced or left behind when it is moved. Empty for a
            self-contained checkpoint (docs/reuse.md).
        patched_chunks: number of chunks that this process wrote as patches (`SaveOptions.reuse`).
        stored_bytes: of the chunks that this process wrote, before compression: as
            `written_bytes`, but for quantised arrays the bytes that are stored.
        saved_bytes: by how much `SaveOptions(compression="auto")` made what this process wrote
            smaller than `stored_bytes`.
        replicas_differ: on the coordinator only, names of plain arrays that differ between
            processes, and are stored as one of them held them; see `ReplicasDiffer`.
        metadata: as this process gave it; that of process 0 is stored.
        extra: on the coordinator only, what codecs say about arrays, by codec and array.
        left_out: names of leaves that an export left out, because its format has no place for
            them (docs/formats/writing.md).
        survives: of a step of a `Checkpointer`, the losses that it survives at its commit; later,
            `Checkpointer.survives` may say more.
    """

    url: str
    arrays: int
    bytes: int
    written_bytes: int
    chunks: int
    processes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    process: int = 0
    blocked_s: float = 0.0
    staged_bytes: int = 0
    writers: tuple[Mapping[str, float], ...] = ()
    replicas_differ: tuple[str, ...] = ()
    reused_bytes: int = 0
    patched_chunks: int = 0
    stored_bytes: int = 0
    drained_bytes: int = 0
    budget_wait_s: float = 0.0
    bases: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    saved_bytes: int = 0
    extra: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    survives: str = ""

    @property
    def quantized(self) -> dict[str, tuple[float, float]]:
        """On the coordinator, for each array that `SaveOptions.quantize` matches, the largest
        absolute error of an element, and the largest in relation to the largest magnitude in its
        block."""
        notes = self.extra.get("quantized", {}).items()
        return {name: (note["errors"][0], note["errors"][1]) for name, note in notes}

    @property
    def metrics(self) -> dict[str, float]:
        """On process 0, the numbers that were given to `Checkpointer.save`."""
        from unickpt.format.step_metrics import step_metrics  # here: few receivers read it

        return step_metrics(self.metadata)

    @property
    def busiest_bytes(self) -> int:
        """On the coordinator, the largest `written_bytes` of a process; else 0.

        Compared to `mean_bytes` it shows how evenly the processes shared the work: each replica of
        an array writes a part of it.
        """
        return int(max((writer["bytes"] for writer in self.writers), default=0))

    @property
    def mean_bytes(self) -> float:
        """On the coordinator, the mean `written_bytes` of a process; else 0."""
        return sum(writer["bytes"] for writer in self.writers) / max(1, len(self.writers))

    @property
    def gb_per_s(self) -> float:
        """Logical gigabytes (1e9 bytes) of the checkpoint per second."""
        return self.bytes / 1e9 / max(self.seconds, 1e-9)

    def __repr__(self) -> str:
        size = size_text(self.bytes)
        arrays = counted(self.arrays, "array")
        return f"SaveReport({self.url!r}, {arrays}, {size} in {self.seconds:.3g} s)"

    def _repr_html_(self) -> str:
        """The figures, the phases, and the processes that took the longest, for notebooks."""
        from unickpt.display import html  # here, so that importing unickpt stays fast

        facts = [
            counted(self.arrays, "array"),
            size_text(self.bytes),
            counted(self.processes, "process", "processes"),
            f"{html.seconds_text(self.seconds)} ({self.gb_per_s:.3g} GB/s)",
            f"blocked the caller for {html.seconds_text(self.blocked_s)}",
            *([f"survives {self.survives}"] if self.survives else []),
        ]
        figures = {
            "written": size_text(self.written_bytes),
            "taken from the base": size_text(self.reused_bytes),
            "staged": size_text(self.staged_bytes),
            **{name: html.seconds_text(seconds) for name, seconds in self.phases.items()},
        }
        needs = {"cannot be read without": ", ".join(self.bases)}
        from unickpt.trees import name_ranges

        differ = {"differ between processes": name_ranges.listed(self.replicas_differ)}
        slowest = sorted(enumerate(self.writers), key=lambda pair: -pair[1].get("seconds", 0.0))
        rows = [
            (
                process,
                html.seconds_text(writer.get("seconds", 0.0)),
                size_text(int(writer["bytes"])),
            )
            for process, writer in slowest[:_SLOWEST]
        ]
        return html.page(
            "SaveReport",
            self.url,
            facts,
            html.facts_table({"process": self.process, **figures}),
            html.facts_table(needs) if self.bases else "",
            html.facts_table(differ) if self.replicas_differ else "",
            html.table(("slowest process", "wrote for", "bytes"), rows, len(rows))
            if len(self.writers) > 1
            else "",
        )
