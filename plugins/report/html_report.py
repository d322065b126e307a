"""report: a run or a checkpoint as one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from unickpt.errors import InvalidPath, StorageError
from unickpt.extend import PathLike
from unickpt.plugins.report import metric_lines, run_facts, trace_events
from unickpt.plugins.report.metric_lines import FilePath
from unickpt.plugins.report.page_data import collect_page_data

SCRIPTS = (
    "core", "picture", "table", "metrics", "run", "timeline", "heatmap", "balance", "treemap",
    "arrays", "loads", "lost", "main",
)  # fmt: skip
"""The parts of the page's script, in `page/`."""


def report(
    path: PathLike,
    out: FilePath = "report.html",
    *,
    metrics: FilePath | Iterable[FilePath] = (),
    trace: FilePath | None = None,
) -> Path:
    """Writes a page about a run, or about one checkpoint.

    The page is one file that needs no network. It shows the steps of a run, their shared bytes and
    durations. Of the newest steps it shows the phases of each process, and which were slow; of the
    newest one the arrays with their layouts. It reads no arrays.

    Arguments:
        path: of a checkpoint, or of a folder of checkpoints.
        out: the file to write, on a local disk; it is replaced if it exists.
        metrics: files that `unickpt.integrations.metrics.JsonLines` wrote. They record removed
            steps, the time to the commit, loads, failures and lost time.
        trace: another file to write: the phases of each process, as trace events, which Perfetto
            and chrome://tracing open.

    Returns:
        The path of the file.

    Raises:
        CheckpointNotFound: nothing was committed there.
        CheckpointCorrupt, UnsupportedFormat: it is a checkpoint, and cannot be opened.
        InvalidPath: `out` is a URL or a folder.
        StorageError: the storage failed, or `out` cannot be written.
        UnickptError: a file of metrics cannot be read.

    Example:
        >>> import numpy as np, tempfile, unickpt
        >>> _ = unickpt.save("memory://report/step_1", {"w": np.ones(3)})
        >>> file = unickpt.report("memory://report", tempfile.mkdtemp() + "/report.html")
        >>> file.read_text().startswith("<!doctype html>")
        True
    """
    target, traced = _target(out), None if trace is None else _target(trace)
    files = [metrics] if isinstance(metrics, str | os.PathLike) else list(metrics)
    lines = metric_lines.read(files)
    data = collect_page_data(run_facts.look(path), lines, path)
    _replace(target, page(data))
    if traced is not None:
        _replace(traced, json.dumps(trace_events.trace(data), separators=(",", ":")))
    return target


def page(data: dict[str, Any]) -> str:
    """The page of the data of `collect_page_data`.

    Nothing in the data can become markup or script: it is JSON without `<`, which the script puts
    into the page as text. The page's policy allows this script and these styles alone.
    """
    folder = resources.files("unickpt.plugins.report") / "page"
    parts = [(folder / f"{name}.js").read_text("utf-8") for name in SCRIPTS]
    script = f'"use strict";\n(() => {{\n{"".join(parts)}}})();\n'
    style = (folder / "page.css").read_text("utf-8")
    hashes = {"script_hash": _hash(script), "style_hash": _hash(style)}
    return Template((folder / "page.html").read_text("utf-8")).substitute(
        hashes, title=escape(data["title"]), data=embedded(data), script=script, style=style
    )


def embedded(data: Any) -> str:
    """Data as JSON in ASCII that can stand in a script element: nothing in it ends the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _target(out: FilePath) -> Path:
    text = os.fspath(out)
    if "://" in text:
        raise InvalidPath(f"{text!r}: a report is written to a local file; give a path")
    target = Path(text)
    if not target.parent.is_dir():
        folder = str(target.parent)
        raise StorageError(f"the report cannot be written: there is no folder {folder!r}")
    if target.is_dir():
        raise InvalidPath(f"{text!r} is a folder; give the path of a file, such as report.html")
    if target.exists() and not target.is_file():  # it would be replaced, not written to
        raise InvalidPath(f"{text!r} is a device, pipe or socket; give the path of a file")
    return target


def _replace(target: Path, text: str) -> None:
    """Writes a file, or the target of a link, atomically."""
    final = Path(os.path.realpath(target))
    name = final.parent / f".{final.name}-{secrets.token_hex(4)}"
    try:
        name.write_text(text, encoding="utf-8")
        os.replace(name, final)
    except OSError as error:
        raise StorageError(f"{target}: the report cannot be written: {error}") from error
    finally:
        name.unlink(missing_ok=True)
