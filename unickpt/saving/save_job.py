"""One save, step by step: prepared on the calling thread, run there or on another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from unickpt.commit import replicas
from unickpt.commit.attempt import Attempt
from unickpt.commit.record import Record
from unickpt.errors import SaveTimeout
from unickpt.frameworks.process_group import within
from unickpt.frameworks.registry import adapters, current_group
from unickpt.saving import fingerprints
from unickpt.saving.chunk_source import Supply
from unickpt.saving.describe import Description, describe
from unickpt.saving.options import SaveOptions, SaveReport
from unickpt.saving.write_plan import ChunkJob, check_alone, held_chunks, own_share
from unickpt.saving.writer import Writer
from unickpt.storage import contexts, locations

_log = logging.getLogger("unickpt")


class Saving:
    """A save: `describe` what to save, `plan` which process writes what, `run` it.

    Arguments:
        path, overwrite, options: as for `save`.

    Raises:
        InvalidPath, SaveTimeout: see `save`.
    """

    description: Description

    def __init__(self, path: locations.Path, overwrite: bool, options: SaveOptions) -> None:
        self._started = time.perf_counter()
        self._overwrite, self.options = overwrite, options
        self.location = locations.resolve(path)
        self.group = within(options.group or current_group(adapters()), options.timeout_s)
        try:
            self.attempt = self.group.next_attempt()
        except SaveTimeout as error:
            raise SaveTimeout(f"{self.location}: {error}. Nothing was written.") from None
        self._writer: Writer | None = None
        self.blocked_s, self.staged_bytes = 0.0, 0
        self.phases: dict[str, float] = {}
        self._samples: dict[int, Callable[[], int]] = {}
        self.held: Sequence[ChunkJob] = []
        self.share: Sequence[ChunkJob] = []

    def describe(self, tree: Any, metadata: Mapping[str, Any] | None) -> None:
        """Describes every leaf; writes nothing.

        Raises:
            UnsupportedLeaf, CoverageError: see `save`.
        """
        with self.failing():
            self.description = describe(tree, metadata, self.group, self.options, adapters())
            if self.group.count == 1:
                check_alone(self.description)
            if not self.options.check_replicas:
                self._samples = {
                    number: fingerprints.keep_sample(source)
                    for number, source in enumerate(self.description.sources.values())
                    if source.assumed and source.fragments
                }
        self.phases["describe"] = self.elapsed

    @cached_property
    def _attempt(self) -> Attempt:  # created on first use, rarely while the caller waits
        context = contexts.context(fsync=self.options.fsync)
        timeout_s = self.options.timeout_s
        return Attempt(self.location, self.group, self.attempt, context, timeout_s)

    def plan(self) -> None:
        """Determines which chunks this process holds (`held`) and which it writes (`share`)."""
        self.held = list(held_chunks(self.description))
        self.share = own_share(self.held, self.group.index)

    def check_destination(self) -> None:
        """Raises an error if the destination cannot be used; see `save`."""
        self._attempt.check_new()
        self._attempt.check_destination(self._overwrite)

    @property
    def elapsed(self) -> float:
        """Seconds since the save was requested."""
        return time.perf_counter() - self._started

    @contextmanager
    def failing(self, *, refused: bool = False) -> Iterator[None]:
        """An error here fails the save: notifies the other processes and removes its files."""
        try:
            yield
        except BaseException as raised:
            error = raised
            if isinstance(raised, Exception):
                error = self._attempt.explained(raised)
            self._attempt.publish_error(error, refused=refused)
            if self._writer is not None:
                self._writer.settle()
            if self._writer is not None or self.group.count > 1:
                self._attempt.discard()
            if error is raised:
                raise
            raise error from raised

    def run(
        self,
        supply: Supply,
        written: Callable[[], None] = lambda: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> SaveReport:
        """Writes this process's planned share, then commits or waits for the commit.

        Arguments:
            supply: provides the chunks.
            written: called when this process has written its share; an error fails the save.
            before_commit: called by the coordinator right before the commit; likewise.
        """
        began, attempt = self.elapsed, self._attempt
        with self.failing():
            self.check_destination()
            attempt.make_folder()
            self._writer = writer = Writer(attempt, self.description, self.options, supply)
            record = self._with_replicas(writer.write_all(self.share), supply)
            written()
            told = {
                "chunks": writer.count,
                "blocked_s": self.blocked_s,
                "staged_bytes": self.staged_bytes,
            }
            attempt.publish(record.with_statistics(told))
            ended = self.elapsed
            serve = partial(_serve, writer, self.held)
            if self.group.index == 0:
                totals = attempt.commit(
                    self.description.index, self.description.digest, serve, before_commit
                )
            else:
                totals = attempt.wait_committed(serve)
        self.phases |= {"write": ended - began, "commit": self.elapsed - ended}
        report = SaveReport(
            url=self.location.url,
            arrays=totals.arrays,
            bytes=totals.nbytes,
            written_bytes=writer.nbytes,
            chunks=writer.count,
            processes=self.group.count,
            seconds=self.elapsed,
            phases=self.phases,
            process=self.group.index,
            blocked_s=self.blocked_s or self.elapsed,
            staged_bytes=self.staged_bytes,
            writers=attempt.writers,
            replicas_differ=tuple(found.name for found in attempt.differences),
        )
        _log.info(
            "saved %s: %.3g GB in %.2f s (%.2f GB/s), blocked the caller for %.3f s",
            *(report.url, report.bytes / 1e9, report.seconds, report.gb_per_s, report.blocked_s),
        )
        if attempt.differences:
            replicas.warn(attempt.differences)
        return report

    def _with_replicas(self, record: Record, supply: Supply) -> Record:
        """A record with fingerprints of this process's assumed replicas."""
        if self.options.check_replicas:
            rows = fingerprints.whole(self.held, record, supply.digest)
        else:
            rows = fingerprints.sampled(self._samples)
        return replace(record, replicas=rows, checked=self.options.check_replicas)


def tell(options: SaveOptions, report: SaveReport) -> None:
    """Calls `SaveOptions.metrics`, after all else of a save: it may save, wait or load."""
    if options.metrics is None:
        return
    try:
        options.metrics(report)
    except Exception:
        _log.exception("SaveOptions.metrics failed; the checkpoint %s is committed", report.url)


def _serve(writer: Writer, held: Sequence[ChunkJob], request: Mapping[str, list[int]]) -> Record:
    """Writes chunks that the coordinator requests, because their planned writer lacks them."""
    wanted = {(name, position) for name, positions in request.items() for position in positions}
    return writer.write_more([job for job in held if (job.entry.name, job.position) in wanted])
