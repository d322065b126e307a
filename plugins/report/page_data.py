"""The data of the page about a run or a checkpoint, as one JSON object of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unickpt import Checkpoint
from unickpt.errors import UnickptError
from unickpt.extend import (
    SAVE_PHASES,
    Orphan,
    OrphanSearch,
    PathLike,
    Timing,
    counted,
    finite_or_text,
    meshes_of,
    natural_key,
    reading_checkpoint,
    resolve_path,
    shown_text,
    unickpt_version,
)
from unickpt.plugins.report.array_facts import MOST_BYTES, describe_arrays, mesh_facts
from unickpt.plugins.report.headline import headline, share_text
from unickpt.plugins.report.load_groups import failure_rows, load_rows
from unickpt.plugins.report.loop_cost import (
    LoopCost,
    ReportedSave,
    call_told,
    calls_of,
    loop_cost,
    waited_for,
)
from unickpt.plugins.report.lost_time import LostTime, lost_time
from unickpt.plugins.report.metric_lines import Lines, SavedLine
from unickpt.plugins.report.metric_series import Series, series_of
from unickpt.plugins.report.run_facts import MOST_STEPS, RunFacts, StepFacts

_MOST_NUMBERS = 200_000
"""Of the processes of all steps together: some 2 MB. The newest step is always there."""
_MOST_PROCESSES = 1 << 16
_MOST_REMNANTS = 200
_MOST_INTERRUPTIONS = 1000
_MOST_PATH, _MOST_ERROR = 400, 400
_NAMED = 3  # folders in a note


def collect_page_data(run: RunFacts, lines: Lines, path: PathLike) -> dict[str, Any]:
    """Everything that the page shows; all texts are plain (`html.plain`).

    Arguments:
        run: the facts from the storage.
        lines: of the processes.
        path: as the user gave it.
    """
    saves, own_lines, notes = _of_this(run, lines)
    loads, older_loads = load_rows(own_lines.loads)
    if older_loads:
        notes.append(f"{counted(older_loads, 'older load is', 'older loads are')} left out")
    cost = _cost(run, saves)
    rows, (series, more) = _rows(run, saves)
    first = headline(run, [row["name"] for row in rows], series, cost)
    details, arrays = _details(run, path)
    return {
        "title": shown_text(run.url.rstrip("/").rpartition("/")[2] or run.url),
        "url": shown_text(run.url, _MOST_PATH),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "library": f"unickpt {unickpt_version}",
        "is_run": run.is_run,
        "has_lines": bool(lines.saves),
        "headline": {"level": first.level, "text": shown_text(first.text, _MOST_PATH)},
        "on_disk": run.on_disk,
        "cost": cost and {**asdict(cost), "share": share_text(cost.share)},
        "steps": rows,
        "metrics": [_series(metric) for metric in series],
        "more_metrics": more,
        "details": details,
        "arrays": arrays,
        "left": _left(run.left),
        "holder": run.left and run.left.holder and shown_text(run.left.holder),
        "loads": loads,
        "failures": failure_rows(own_lines.events),
        "lost": _lost(lost_time(own_lines)) if run.is_run else None,
        "notes": [shown_text(note, _MOST_PATH) for note in notes],
    }


def _rows(
    run: RunFacts, saves: Mapping[str, Sequence[SavedLine]]
) -> tuple[list[dict[str, Any]], tuple[list[Series], int]]:
    """The rows of all steps in natural order, also of those that are removed; and their metrics."""
    existing_names = {step.name for step in run.steps} | run.others
    gone = [name for name in saves if name not in existing_names][-MOST_STEPS:]
    rows = [
        ({"id": number, **_stored(step, saves.get(step.name, ()))}, step.metrics)
        for number, step in enumerate(run.steps)
    ]
    rows += [({"id": None, **_gone(n, saves[n])}, saves[n][-1].metrics) for n in gone]
    rows.sort(key=lambda row: natural_key(row[0]["name"]))
    return [row for row, _ in rows], series_of([metrics for _, metrics in rows])


def _cost(run: RunFacts, saves: Mapping[str, Sequence[SavedLine]]) -> LoopCost | None:
    """The cost of a run's saves for its loop."""
    if not run.is_run:
        return None
    line_by_step = {step.name: _line_of_save(step, saves.get(step.name, ())) for step in run.steps}
    calls = list[ReportedSave]()
    for step in run.steps:
        calls += calls_of(step, line_by_step[step.name], _time(step.created))
    calls += [
        call_told(line)
        for name, step_lines in saves.items()
        for line in step_lines
        if line is not line_by_step.get(name)  # of a step that is removed, or was saved again
    ]
    return loop_cost(calls, is_least=bool(run.others) or None in line_by_step.values())


def _series(metric: Series) -> dict[str, Any]:
    """A metric for the page, with as many digits as it shows; JSON has no NaN."""
    rounded = [v if v is None else finite_or_text(float(f"{v:.6g}")) for v in metric.values]
    return {
        "name": shown_text(metric.name),
        "values": rounded,
        "lowest": metric.lowest,
        "highest": metric.highest,
        "better": metric.better,
    }


def _of_this(run: RunFacts, lines: Lines) -> tuple[dict[str, list[SavedLine]], Lines, list[str]]:
    """The lines about checkpoints of this run: saves by the name of the folder, and all."""
    saves, folders = dict[str, list[SavedLine]](), Counter[str]()
    for line in lines.saves:
        name = _name_in(run, line.url)
        if name is None:
            folders[line.url.rstrip("/").rpartition("/")[0]] += 1
        else:
            saves.setdefault(name, []).append(line)
    is_of_run = cache(lambda url: _name_in(run, url) is not None or _is_run(run, url))
    loads = [line for line in lines.loads if is_of_run(line.url)]
    events = [line for line in lines.events if is_of_run(line.url)]
    named = ", ".join(list(folders)[:_NAMED]) + (", ..." if len(folders) > _NAMED else "")
    elsewhere = len(lines.loads) - len(loads)
    counts = [
        (len(run.others), "earlier checkpoint is", "earlier checkpoints are", "not shown"),
        (folders.total(), "line is", "lines are", f"of saves elsewhere, and not shown: {named}"),
        (elsewhere, "load is", "loads are", "of other checkpoints, and not shown"),
        (lines.left_out, "older line of loads is", "older lines of loads are", "left out"),
        (lines.unread, "line", "lines", "of the files of metrics could not be understood"),
    ]
    notes = [f"{counted(n, singular, many)} {what}" for n, singular, many, what in counts if n]
    own_saves = [line for step_lines in saves.values() for line in step_lines]
    return saves, replace(lines, saves=own_saves, loads=loads, events=events), notes


def _is_run(run: RunFacts, url: str) -> bool:
    try:
        return resolve_path(url).url.rstrip("/") == run.url.rstrip("/")
    except UnickptError:
        return False


def _lost(lost: LostTime | None) -> dict[str, Any] | None:
    """Where the time of the run went, for the page."""
    if lost is None:
        return None
    newest = lost.interruptions[-_MOST_INTERRUPTIONS:]
    rows = [{**asdict(row), "error": shown_text(row.error, _MOST_ERROR)} for row in newest]
    for row in rows:
        moment = datetime.fromtimestamp(row["last_sign"], UTC)
        row["time"] = moment.isoformat(timespec="seconds")
    return {
        "wall": lost.wall_s,
        "effective": lost.effective_s,
        "share": share_text(lost.ratio),
        "count": len(lost.interruptions),
        "steps": sum(row.lost_steps or 0 for row in lost.interruptions),
        "skipped": lost.skipped,
        "rows": rows,
    }


def _name_in(run: RunFacts, url: str) -> str | None:
    """The name of a checkpoint in this run; None if it is elsewhere."""
    try:
        # Loads tell the path that they were given.
        checkpoint_url = resolve_path(url).url.rstrip("/")
    except UnickptError:
        return None
    run_url = run.url.rstrip("/")
    if not run.is_run:
        return "." if checkpoint_url == run_url else None
    folder, _, name = checkpoint_url.rpartition("/")
    return name if folder == run_url and name else None


def _stored(step: StepFacts, lines: Sequence[SavedLine]) -> dict[str, Any]:
    """The row of a checkpoint that exists, with the line of its save, not of earlier ones."""
    line, durations = _line_of_save(step, lines), step.durations
    rate = step.new_bytes / durations.done if durations is not None and durations.done > 0 else 0
    return {
        "name": shown_text(step.name),
        "state": "unreadable" if step.error and not step.created else "stored",
        "created": shown_text(step.created, 40),
        "bytes": min(step.nbytes, MOST_BYTES),
        "new": min(step.new_bytes, MOST_BYTES),
        "arrays": step.arrays,
        "processes": step.processes,
        "bases": [shown_text(name) for name in step.bases],
        "after": step.after,
        "durations": None if durations is None else asdict(durations),
        "rate": min(rate, MOST_BYTES) or None,
        "waited": waited_for(step, line),
        "committed": None if line is None else line.seconds,
        "saved_times": max(1, len(lines)),
        "error": shown_text(step.error, _MOST_ERROR),
    }


def _line_of_save(step: StepFacts, lines: Sequence[SavedLine]) -> SavedLine | None:
    """The line about the save of a checkpoint that exists, not about an earlier one."""
    created = _time(step.created)
    matches = [
        line
        for line in lines
        if created is not None
        and line.time >= created  # whole seconds, so the saved content is compared, too
        and (line.nbytes, line.processes) == (step.nbytes, step.processes)
    ]
    return matches[-1] if matches else None


def _time(created: str) -> datetime | None:
    """When a checkpoint was committed, by its index, which is untrusted."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment


def _gone(name: str, lines: Sequence[SavedLine]) -> dict[str, Any]:
    """The row of a checkpoint that was saved, and no longer exists."""
    last = lines[-1]
    unknown = dict.fromkeys(("new", "arrays", "after", "durations", "rate"))
    return {
        **unknown,
        "name": shown_text(name),
        "state": "removed",
        "created": last.time.isoformat(timespec="seconds"),
        "bytes": last.nbytes,
        "processes": last.processes,
        "bases": [],
        "waited": last.blocked_s,
        "committed": last.seconds,
        "saved_times": len(lines),
        "error": "",
    }


def _details(run: RunFacts, path: PathLike) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The timings of the newest steps, newest first; and the arrays of the newest of all."""
    details, left = list[dict[str, Any]](), _MOST_NUMBERS
    arrays: dict[str, Any] | None = None
    for number, step in reversed(list(enumerate(run.steps))):
        source = step.path if run.is_run else path
        is_first = arrays is None
        if not is_first and (step.durations is None or left < step.processes):
            continue
        try:
            read = partial(_timing_and_arrays, attempt=step.attempt, with_arrays=is_first)
            detail, array_facts = reading_checkpoint(source, read)
        except UnickptError:
            continue  # its row says why, or it was removed meanwhile
        name = shown_text(step.name)
        if array_facts is not None:
            arrays = {"of": name, **array_facts}
        if detail is None:
            continue
        timing, meshes = detail
        used = timing.processes * (len(SAVE_PHASES) + 4)  # about how many numbers its columns have
        if details and used > left:
            break
        left -= used
        details.append({"id": number, "name": name, **_timing_columns(timing), "meshes": meshes})
    return details, arrays


def _timing_and_arrays(checkpoint: Checkpoint, *, attempt: str, with_arrays: bool) -> Any:
    """The timing and the meshes of a checkpoint, if it has them; and its arrays, if requested.

    Nothing if another checkpoint has replaced that of its row.
    """
    if checkpoint.index.attempt != attempt:
        return None, None
    arrays = describe_arrays(checkpoint) if with_arrays else None
    if checkpoint.index.processes > _MOST_PROCESSES:
        return None, arrays
    try:
        timing = checkpoint.timing
    except UnickptError:
        timing = None
    if timing is None:
        return None, arrays
    meshes = mesh_facts(meshes_of(checkpoint.index), timing.processes)
    return (timing, meshes), arrays


def _left(search: OrphanSearch | None) -> list[dict[str, Any]]:
    """The remains of failed saves, and saves under way."""
    if search is None:
        return []
    kinds: Mapping[str, Sequence[Orphan]] = {
        "left by a failed save": search.orphans,
        "may be under way": search.under_way,
        "of unknown age": search.unknown,
    }
    rows = [(what, orphan) for what, orphans in kinds.items() for orphan in orphans]
    return [
        {"name": shown_text(x.name), "what": what}
        | {"kind": x.kind, "files": x.files, "bytes": x.nbytes}
        for what, x in rows[:_MOST_REMNANTS]
    ]


# --- the timing of a save as columns of whole numbers ---------------------------------------------


_SIZES = ("written", "stored", "reused", "staged", "chunks")
_FINE, _COARSE = 100_000, 1000
_LONG_S = 100.0


def _timing_columns(timing: Timing) -> dict[str, Any]:
    """A timing for the page.

    Returns:
        `unit`, how many of its units of time a second has; `processes`, `collected` and `merged`;
        and by the names of the format (`began`, `write_at`, `write_s`, `written`, ...) a list with
        a number for each process, without those that are 0 throughout.

    Example:
        >>> from unickpt.format.timing import from_columns
        >>> columns = _timing_columns(from_columns(1.5, 2, {"write_s": np.array([1.25, 0.5])}, 2))
        >>> columns["unit"], columns["write_s"], columns["merged"]
        (100000, [125000, 50000], 200000)
    """
    unit = _COARSE if max(float(timing.done.max()), timing.merged) > _LONG_S else _FINE
    every: dict[str, NDArray[Any]] = {
        "began": timing.began,
        "blocked": timing.blocked,
        **{f"{phase}_at": timing.at[phase] for phase in SAVE_PHASES},
        **{f"{phase}_s": timing.seconds[phase] for phase in SAVE_PHASES},
    }
    scaled = {name: np.rint(column.astype(float) * unit) for name, column in every.items()}
    sizes = {name: getattr(timing, name) for name in _SIZES}
    columns = {name: column.astype(int) for name, column in scaled.items()} | sizes
    return {
        "unit": unit,
        "processes": timing.processes,
        "collected": round(timing.collected * unit),
        "merged": round(timing.merged * unit),
        **{name: column.tolist() for name, column in columns.items() if column.any()},
    }
