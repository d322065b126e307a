"""Watching: which checkpoints of a run are committed, and the progress of the others; from the
storage alone, where the processes of a save write their progress (`progress_reports`)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorstore as ts

from unickpt import CheckpointNotFound, UnickptError
from unickpt.extend import (
    ATTEMPTS_FOLDER,
    Listed,
    Location,
    PathLike,
    checkpoints_below,
    folders_below,
    natural_key,
    opened_checkpoint,
    progress_reports,
    reading,
    resolve_path,
    storage_context,
    version_at,
)

DONE, NOT_BEGUN = progress_reports.DONE, progress_reports.NOT_BEGUN
WORDS, WRITE = progress_reports.WORDS, progress_reports.WRITE
_MOST_READ = 1024
_MOST_PROCESSES = 1 << 20
_OF_PROCESS = re.compile(r"(\d{5,9})/.")
_RECORD = re.compile(r"records/(\d{5,9})\.ok")
_REPORT = re.compile(r"records/(\d{5,9})\.at")
_ERROR = re.compile(r"notes/error-(\d{5,9})")
FAILED = "failed"


@dataclass(frozen=True)
class CommittedStep:
    """A checkpoint that exists.

    Arguments:
        name: of its folder; "." for the folder that is watched.
        created: when it was committed, as in its index.
        nbytes, new_bytes: of its arrays, and those that were written.
        processes: how many saved it.
        seconds: until all had written their part; None if not recorded.
        error: why it cannot be opened; else empty.
    """

    name: str
    created: str = ""
    nbytes: int = 0
    new_bytes: int = 0
    processes: int = 0
    seconds: float | None = None
    error: str = ""


@dataclass(frozen=True)
class UnderWay:
    """An attempt to save a checkpoint that is not committed. It may have failed since.

    Arguments:
        name: of the checkpoint's folder; "." for the folder that is watched.
        attempt: its name.
        processes: how many save, as far as it is known.
        phases: the processes by phase; those that are `DONE` have written their part.
        nbytes, total: bytes written, and to be written, of the processes that have reported.
        seconds: since the first call of save on one of these.
        quiet_s: for how long nothing of this has changed while it was watched.
    """

    name: str
    attempt: str
    processes: int
    phases: Mapping[str, Sequence[int]]
    nbytes: int = 0
    total: int = 0
    seconds: float = 0.0
    quiet_s: float = 0.0


@dataclass(frozen=True)
class Look:
    """The result of one look at a run; the newest checkpoints, in natural order."""

    committed: Sequence[CommittedStep]
    under_way: Sequence[UnderWay]


@dataclass
class Watch:
    """Reads a run repeatedly; remembers facts that cannot change.

    Arguments:
        root: a path or URL of a folder of checkpoints, or of one.
        most: how many committed checkpoints to show.
        clock: seconds; for tests.

    Raises:
        InvalidPath: the root is not a storage location.
    """

    root: PathLike
    most: int = 8
    clock: Callable[[], float] = time.monotonic
    _location: Location = field(init=False)
    _opened: dict[str, tuple[str, CommittedStep]] = field(default_factory=dict)
    _signs: dict[tuple[str, str], tuple[UnderWay, float]] = field(default_factory=dict)
    """The last state of each attempt, and the time of its last change."""

    def __post_init__(self) -> None:
        self._location = resolve_path(self.root, whole=True)

    def look(self) -> Look:
        """The current state.

        Raises:
            StorageError: the storage failed.
        """
        location, context = self._location, storage_context()
        with reading(location):
            # In this order: a checkpoint that is committed meanwhile is in both lists, and counts
            # as committed.
            attempts = _attempts(location, context)
            listed = self._listed()
            under_way = [
                save
                for name, names in attempts.items()
                for save in self._under_way(name, names, name in listed, context)
            ]
            newest = list(listed.values())[-self.most :] if self.most else []
            committed = [self._committed(entry) for entry in newest]
        now = {(save.name, save.attempt) for save in under_way}
        self._signs = {key: signs for key, signs in self._signs.items() if key in now}
        return Look(committed, sorted(under_way, key=lambda save: natural_key(save.name)))

    def _listed(self) -> dict[str, Listed]:
        try:
            return {listed.name: listed for listed in checkpoints_below(self._location)}
        except CheckpointNotFound:
            return {}  # the first save will make it

    def _committed(self, listed: Listed) -> CommittedStep:
        """The facts of a checkpoint; read again only if it was replaced."""
        version = version_at(resolve_path(listed.path))
        cached_entry = self._opened.get(listed.name)
        if cached_entry is not None and version is not None and cached_entry[0] == version.digest:
            return cached_entry[1]
        try:
            facts = _opened(listed)
        except UnickptError as error:
            return CommittedStep(listed.name, error=str(error))
        if version is not None:
            self._opened[listed.name] = version.digest, facts
        return facts

    def _under_way(
        self, name: str, attempts: Iterable[str], is_committed: bool, context: ts.Context
    ) -> Iterable[UnderWay]:
        folder = self._location if name == "." else self._location.child(name)
        names = set(attempts)
        if is_committed and names:
            version = version_at(folder)
            names.discard("" if version is None else version.attempt)
        for attempt in sorted(names):
            seen = _attempt(folder.child(f"{ATTEMPTS_FOLDER}/{attempt}"), name, attempt, context)
            if seen is not None:
                yield self._with_quiet(seen)

    def _with_quiet(self, save: UnderWay) -> UnderWay:
        key, now = (save.name, save.attempt), self.clock()
        previous, since = self._signs.get(key, (None, now))
        if previous != save:
            since = now
        self._signs[key] = save, since
        return replace(save, quiet_s=now - since)


def _attempts(location: Location, context: ts.Context) -> dict[str, set[str]]:
    """The attempts in the folder of each checkpoint, committed or not."""
    folders = folders_below(location, ATTEMPTS_FOLDER, context)
    folders["."] = set(location.child(ATTEMPTS_FOLDER).folders(context))
    folders.pop(ATTEMPTS_FOLDER, None)
    return {name: attempts for name, attempts in folders.items() if attempts}


def _opened(listed: Listed) -> CommittedStep:
    checkpoint = opened_checkpoint(listed.path)
    timing = checkpoint.timing
    return CommittedStep(
        listed.name,
        checkpoint.index.created,
        checkpoint.nbytes,
        max(0, checkpoint.nbytes - checkpoint.index.reused),
        checkpoint.index.processes,
        None if timing is None else timing.collected,
    )


def _attempt(folder: Location, name: str, attempt: str, context: ts.Context) -> UnderWay | None:
    """The progress of an attempt; None if nothing of it is left."""
    keys = [key.decode(errors="replace") for key in folder.store(context).list().result()]
    if not keys:
        return None
    done, failed = _matching(_RECORD, keys), _matching(_ERROR, keys)
    begun, reporters = _matching(_OF_PROCESS, keys), _matching(_REPORT, keys)
    # First of those that are not done, if there are too many.
    first = sorted(reporters, key=lambda process: (process in done, process))[:_MOST_READ]
    reports = progress_reports.read(folder.child("records").store(context), first)
    counts = [report.processes for report in reports.values()]
    last = max([*counts, *(p + 1 for p in done | failed | begun | reporters)], default=0)
    processes = min(last, _MOST_PROCESSES)
    states = progress_reports.seen(reports)
    phases: dict[str, list[int]] = {}
    begun |= reporters
    for process in range(processes):
        report = reports.get(process)
        if process in failed:
            phase = FAILED
        elif process in done and (report is None or report.phase == WRITE or process):
            phase = DONE
        elif report is not None:
            state = states.get(process, "")
            phase = state if state in progress_reports.CAUSES else report.words
        else:
            phase = WORDS[WRITE] if process in begun else NOT_BEGUN
        phases.setdefault(phase, []).append(process)
    return UnderWay(
        name,
        attempt,
        processes,
        phases,
        sum(report.nbytes for report in reports.values()),
        sum(report.total for report in reports.values()),
        max((report.seconds for report in reports.values()), default=0.0),
    )


def _matching(pattern: re.Pattern[str], keys: Iterable[str]) -> set[int]:
    """The processes whose files match."""
    matches = (pattern.match(key) for key in keys)
    processes = {int(match[1]) for match in matches if match}
    return {process for process in processes if process < _MOST_PROCESSES}
