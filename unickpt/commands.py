"""The commands of `unickpt`: inspect, ls and verify. Nothing here imports a framework."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

import unickpt
from unickpt import fragment_map, outline, values
from unickpt.checkpoint import Checkpoint, StoredArray
from unickpt.errors import UnickptError
from unickpt.index import INDEX_KEY, ArrayEntry
from unickpt.layout import Layout, Mesh
from unickpt.listing import Listed, checkpoints_below
from unickpt.options import VerifyReport

DAMAGED, FAILED = 1, 2
_UNBOUNDED = 1 << 16  # columns of output that goes to no terminal, so that nothing wraps
_MANY_PARTS = 20
_OPEN_AT_ONCE = 8


class _Group(TyperGroup):
    """Prints the library's errors as messages, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UnickptError as error:
            _fail(str(error))


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Where = Annotated[str, typer.Argument(help="A directory, or a URL: file, s3, gs or memory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"unickpt {unickpt.__version__}")
        raise typer.Exit


@app.callback()
def unickpt_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look at checkpoints of sharded arrays, wherever they are stored.

    \b
    unickpt ls runs/llama                    which checkpoints are there
    unickpt inspect runs/llama/step_100      what is in one
    unickpt verify s3://bucket/llama/100     whether every byte of it is sound

    Exit codes: 0 for success, 1 where verify finds damage, 2 for every other error.
    """


@app.command()
def inspect(
    path: Where,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="An array, value or container in it.")
    ] = None,
    array: Annotated[
        str | None, typer.Option("--array", metavar="NAME", help="The same as NAME.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="One row for every leaf: fold no layers that are alike.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a checkpoint's tree, or one array.

    Only the index is read, so this is fast for a checkpoint of any size.

    \b
    unickpt inspect runs/step_100
    unickpt inspect runs/step_100 opt_state
    unickpt inspect runs/step_100 params/layers/0/mlp/up
    unickpt inspect s3://bucket/runs/step_100 --json | jq .totals

    Of an array, a map shows its fragments as they were when it was saved: p is the process and d
    the device of the mesh, counted row-major, that held one.

    --json prints one object. Fields are only ever added to it. Shapes are lists, sizes are bytes.

    \b
    url, format, created, library, attempt, processes, metadata, codecs
    meshes      [{axes, shape, processes}]
    arrays      [{name, shape, dtype, bytes, mesh, spec, fragments, chunk, chunks, parts, prng}]
                mesh: place in meshes, or null; spec: the mesh axes that split each dimension
    ties        {name: name of the array it is tied to}
    values      {name: plain value}; what JSON lacks is an object as in docs/format.md
    per_process {name: [bytes of each process's value]}
    totals      {arrays, elements, bytes, chunks}

    With NAME of an array, --json prints that array alone, with fragments as
    [{start, stop, processes}] and parts as [{url, start, stop, chunk, grid}].
    """
    if name is not None and array is not None and name != array:
        raise typer.BadParameter("give NAME or --array, not two different names")
    checkpoint = unickpt.open(path)
    wanted = (name if name is not None else array) or ""
    if wanted or (name is not None and "" in checkpoint):
        _inspect_one(checkpoint, wanted.rstrip("/"), everything, as_json)
    elif as_json:
        _print_json(_checkpoint_json(checkpoint))
    else:
        _print_checkpoint(checkpoint, everything)


@app.command("ls")
def list_(
    root: Annotated[str, typer.Argument(help="A directory, or a URL: file, s3, gs or memory.")],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a folder.

    What a crashed or running save has left behind is no checkpoint, and is not listed. One whose
    index cannot be read is listed with the reason.

    \b
    unickpt ls runs/llama
    unickpt ls s3://bucket/runs/llama --json

    --json prints {root, checkpoints: [{name, path, created, arrays, bytes, processes, error}]}.
    Fields are only ever added. Where error is not null, the facts before it are null.
    """
    with ThreadPoolExecutor(_OPEN_AT_ONCE) as pool:
        found = list(pool.map(_listed_json, checkpoints_below(root)))
    if as_json:
        _print_json({"root": root, "checkpoints": found})
        return
    if not found:
        print(f"no checkpoints in {_clean(root)}")
        return
    _out().print(_listing_table(found))


@app.command()
def verify(path: Where, as_json: AsJson = False) -> None:
    """Read a whole checkpoint and hold every byte against its digest.

    Exits with 1 where anything is damaged, missing, or does not belong there.

    \b
    unickpt verify runs/step_100
    unickpt verify s3://bucket/runs/step_100 --json

    --json prints {url, ok, arrays, chunks, bytes, seconds, damage}, damage being a list of
    {array, box, process, reason}. Fields are only ever added. array and box are empty, and
    process is null, where the damage is not in a chunk.
    """
    report = _verify_with_progress(path)
    if as_json:
        _print_json(_report_json(report))
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(DAMAGED)


# --- output -------------------------------------------------------------------------------------


def _out(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def _print_json(body: Any) -> None:
    print(json.dumps(body, indent=2))


def _fail(message: str) -> NoReturn:
    _out(stderr=True).print(Text.assemble(("unickpt: ", "bold red"), _clean(message, "\n")))
    raise typer.Exit(FAILED)


def _clean(text: str, keep: str = "") -> str:
    """Text from a checkpoint without the control characters that would steer a terminal."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        if column in right:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def _count(n: int, noun: str, plural: str = "") -> str:
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


# --- inspect: a checkpoint ----------------------------------------------------------------------


def _format_version(checkpoint: Checkpoint) -> str:
    return str(json.loads(checkpoint.read_key(INDEX_KEY))["format"])


def _print_checkpoint(checkpoint: Checkpoint, everything: bool) -> None:
    out, index = _out(), checkpoint.index
    out.print(Text(_clean(str(checkpoint.location)), "bold"))
    compression = ", ".join(str(c["name"]) for c in index.codecs) or "none"
    out.print(
        f"format {_format_version(checkpoint)}, created {_clean(_when(index.created))} by "
        f"{_clean(index.library)}, {_count(index.processes, 'process', 'processes')}, "
        f"compression {_clean(compression)}"
    )
    if index.metadata:
        text = json.dumps(index.metadata, ensure_ascii=False)
        out.print(_clean(f"metadata {outline.shorten(text, 400)}"))
    meshes = outline.meshes_of(index)
    for number, mesh in enumerate(meshes):
        out.print(_clean(f"mesh {number if len(meshes) > 1 else ''}".strip() + _mesh(mesh)))
    out.print()
    _print_rows(out, outline.outline(index, str(checkpoint.location), unfolded=everything))
    out.print()
    out.print(_totals(checkpoint))


def _print_rows(out: Console, rows: Sequence[outline.Row]) -> None:
    table = _table(
        "name", "shape", "dtype", "layout", "fragments", "bytes", right=("fragments", "bytes")
    )
    for row in rows:
        label = Text("  " * row.depth + _clean(row.label), "" if row.facts else "bold")
        if row.count > 1:
            label.append(f"  x{row.count}", "cyan")
        table.add_row(label, *_cells(row))
    out.print(table)
    if any(row.count > 1 for row in rows):
        note = "xN: N that are alike, in one row; its bytes are those of all. --all shows each."
        out.print(Text(note, "dim"))


def _cells(row: outline.Row) -> list[Text]:
    facts = row.facts
    if facts is None:
        return [Text()] * 4 + [Text(_bytes(row.nbytes) if row.nbytes else "", "dim")]
    if facts.kind == "tie":
        return [Text(), Text("tied", "dim")]
    if facts.kind == "value":
        return [Text(), Text(facts.dtype, "dim")]
    if facts.kind == "per process":
        held = _count(facts.fragments or 0, "value")
        return [Text(held), Text(facts.dtype, "dim"), Text(), Text(), Text(_bytes(facts.nbytes))]
    return [
        Text(_shape(facts.shape or ())),
        Text(_clean(facts.dtype)),
        Text(_clean(facts.layout)),
        Text(str(facts.fragments)),
        Text(_bytes(facts.nbytes)),
    ]


def _bytes(n: int) -> str:
    return decimal(n).replace("bytes", "B").replace("byte", "B")


def _when(created: str) -> str:
    return created.replace("T", " ").replace("+00:00", " UTC")


def _mesh(mesh: Mesh) -> str:
    axes = ", ".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.shape, strict=True))
    processes = _count(len(set(mesh.processes)), "process", "processes")
    return f" ({axes}): {_count(len(mesh.processes), 'device')} of {processes}"


def _totals(checkpoint: Checkpoint) -> Text:
    index = checkpoint.index
    elements = sum(math.prod(entry.shape) for entry in index.arrays.values())
    pieces = [
        f"{_count(len(index.arrays), 'array')} of {_count(elements, 'element')}, "
        f"{_bytes(checkpoint.nbytes)} in {_count(index.chunks, 'chunk')}"
    ]
    others = [
        (len(index.aliases), "tie", "ties"),
        (len(index.values), "plain value", "plain values"),
        (len(index.per_process), "per-process leaf", "per-process leaves"),
    ]
    pieces += [_count(n, one, many) for n, one, many in others if n]
    return Text.assemble(("total: ", "bold"), "; ".join(pieces))


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    index = checkpoint.index
    layouts = [entry.layout for entry in index.arrays.values() if entry.layout is not None]
    meshes = {mesh: number for number, mesh in enumerate(dict.fromkeys(x.mesh for x in layouts))}
    return {
        "url": checkpoint.url,
        "format": _format_version(checkpoint),
        "created": index.created,
        "library": index.library,
        "attempt": index.attempt,
        "processes": index.processes,
        "metadata": index.metadata,
        "codecs": list(index.codecs),
        "meshes": [{"axes": m.axes, "shape": m.shape, "processes": m.processes} for m in meshes],
        "arrays": [
            {
                **_array_json(checkpoint[name], entry),
                "mesh": None if entry.layout is None else meshes[entry.layout.mesh],
                "fragments": outline.fragment_count(entry),
                "parts": len(checkpoint[name].parts),
            }
            for name, entry in index.arrays.items()
        ],
        "ties": dict(index.aliases),
        "values": {name: values.to_json(value) for name, value in index.values.items()},
        "per_process": {n: [size for size, _ in e.blobs] for n, e in index.per_process.items()},
        "totals": {
            "arrays": len(index.arrays),
            "elements": sum(math.prod(entry.shape) for entry in index.arrays.values()),
            "bytes": checkpoint.nbytes,
            "chunks": index.chunks,
        },
    }


def _array_json(array: StoredArray, entry: ArrayEntry) -> dict[str, Any]:
    return {
        "name": array.name,
        "shape": entry.shape,
        "dtype": entry.dtype,
        "bytes": entry.nbytes,
        "spec": None if entry.layout is None else entry.layout.dims,
        "chunk": entry.chunk,
        "chunks": sum(part.count for part in array.parts),
        "prng": entry.prng,
    }


# --- inspect: one name --------------------------------------------------------------------------


def _inspect_one(checkpoint: Checkpoint, name: str, everything: bool, as_json: bool) -> None:
    index, out = checkpoint.index, _out()
    if name in checkpoint:
        array = checkpoint[name]
        entry = index.arrays[index.aliases.get(name, name)]
        if as_json:
            _print_json(_one_array_json(checkpoint, array, entry))
        else:
            _print_array(out, checkpoint, array, entry, everything)
    elif name in index.values:
        value = index.values[name]
        if as_json:
            _print_json({"name": name, "value": values.to_json(value)})
        else:
            out.print(Text(outline.value_text(value, 1 << 20)))
    elif name in index.per_process:
        sizes = [size for size, _ in index.per_process[name].blobs]
        if as_json:
            _print_json({"name": name, "per_process": sizes})
        else:
            _print_per_process(out, name, sizes)
    elif as_json or name not in outline.container_names(index):
        _fail(_unknown(checkpoint, name))
    else:
        where = str(checkpoint.location)
        _print_rows(out, outline.outline(index, where, below=name, unfolded=everything))


def _unknown(checkpoint: Checkpoint, name: str) -> str:
    index = checkpoint.index
    known = [*checkpoint, *index.values, *index.per_process, *outline.container_names(index)]
    close = difflib.get_close_matches(name, known[:20_000], n=3)
    hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
    kind = " array or value" if name in known else "thing"
    return f"{checkpoint.location}: holds no{kind} named {name!r}{hint}"


def _print_per_process(out: Console, name: str, sizes: Sequence[int]) -> None:
    out.print(Text(_clean(name) or "(the root)", "bold"))
    table = _table("process", "bytes", right=("process", "bytes"))
    for process, size in enumerate(sizes):
        table.add_row(str(process), _bytes(size))
    out.print(table)


def _print_array(
    out: Console, checkpoint: Checkpoint, array: StoredArray, entry: ArrayEntry, everything: bool
) -> None:
    title = Text(_clean(array.name) or "(the root)", "bold")
    if entry.name != array.name:
        title.append(f"  tied to {_clean(entry.name)}", "dim")
    out.print(title)
    for label, fact in _facts(checkpoint, array, entry):
        out.print(Text.assemble((f"  {label:<13}", "dim"), _clean(fact)))
    if len(array.parts) > 1:
        _print_parts(out, checkpoint, array, everything)
    out.print()
    width = out.width if out.is_terminal else 100
    drawn = fragment_map.draw(array.shape, array.fragments, entry.layout, width)
    plain = not (out.encoding or "").lower().startswith("utf")
    for line in drawn.lines:
        out.print(Text(line.translate(fragment_map.ASCII) if plain else line), soft_wrap=True)
    if drawn.remark:
        out.print(Text(drawn.remark, "dim"))


def _facts(checkpoint: Checkpoint, array: StoredArray, entry: ArrayEntry) -> list[tuple[str, str]]:
    parts = array.parts
    elements = math.prod(entry.shape)
    facts = [
        ("shape", f"{_shape(entry.shape)}  ({_count(elements, 'element')})"),
        ("dtype", entry.dtype if entry.prng is None else f"{entry.dtype}, a {entry.prng} PRNG key"),
        ("bytes", _bytes(entry.nbytes)),
        ("layout", _layout_fact(entry.layout)),
        ("fragments", _fragments_fact(entry, array)),
        ("chunks", f"{sum(part.count for part in parts):,} of up to {_shape(entry.chunk)}"),
    ]
    if len(parts) == 1:
        facts.append(("TensorStore", _part_url(checkpoint, parts[0].key)))
    elif parts:
        facts.append(("parts", str(len(parts))))
    return facts


def _layout_fact(layout: Layout | None) -> str:
    if layout is None:
        return "none: each process told its own boxes"
    if len(layout.mesh.processes) == 1:
        return "one device"
    return f"{outline.layout_text(layout)} on mesh{_mesh(layout.mesh)}"


def _fragments_fact(entry: ArrayEntry, array: StoredArray) -> str:
    count = outline.fragment_count(entry)
    if not count:
        return "none"
    shapes = {box.shape for box, _ in array.fragments}
    largest = _shape(max(shapes, key=math.prod))
    return f"{count:,} of {'up to ' if len(shapes) > 1 else ''}{largest}"


def _part_url(checkpoint: Checkpoint, key: str) -> str:
    return f"{checkpoint.url}|ocdbt:{quote(key)}/" if key else f"{checkpoint.url}|ocdbt:"


def _print_parts(
    out: Console, checkpoint: Checkpoint, array: StoredArray, everything: bool
) -> None:
    shown = array.parts if everything else array.parts[:_MANY_PARTS]
    table = _table("box", "chunk", "chunks", "TensorStore", right=("chunks",))
    for part in shown:
        row = (str(part.box), _shape(part.chunk), str(part.count), _part_url(checkpoint, part.key))
        table.add_row(*(Text(_clean(cell)) for cell in row))
    out.print(table)
    if len(shown) < len(array.parts):
        out.print(Text(f"{len(array.parts) - len(shown)} more parts; --all shows each", "dim"))


def _one_array_json(
    checkpoint: Checkpoint, array: StoredArray, entry: ArrayEntry
) -> dict[str, Any]:
    mesh = None if entry.layout is None else entry.layout.mesh
    return {
        **_array_json(array, entry),
        "tied_to": None if entry.name == array.name else entry.name,
        "mesh": mesh and {"axes": mesh.axes, "shape": mesh.shape, "processes": mesh.processes},
        "fragments": [
            {"start": box.start, "stop": box.stop, "processes": holders}
            for box, holders in array.fragments
        ],
        "parts": [
            {
                "url": _part_url(checkpoint, part.key),
                "start": part.box.start,
                "stop": part.box.stop,
                "chunk": part.chunk,
                "grid": part.grid,
            }
            for part in array.parts
        ],
    }


# --- ls -----------------------------------------------------------------------------------------


def _listed_json(listed: Listed) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": listed.name, "path": listed.path}
    try:
        checkpoint = unickpt.open(listed.path)
    except UnickptError as error:
        unknown = dict.fromkeys(("created", "arrays", "bytes", "processes"))
        return {**facts, **unknown, "error": str(error)}
    index = checkpoint.index
    return {
        **facts,
        "created": index.created,
        "arrays": len(index.arrays),
        "bytes": checkpoint.nbytes,
        "processes": index.processes,
        "error": None,
    }


def _listing_table(found: Sequence[dict[str, Any]]) -> Table:
    numeric = ("arrays", "bytes", "processes")
    table = _table("name", "created", *numeric, right=numeric)
    for facts in found:
        name = Text(_clean(facts["name"]))
        if facts["error"] is not None:
            name.append(f"  {_clean(facts['error'])}", "red")
            table.add_row(name)
            continue
        table.add_row(
            name,
            Text(_clean(_when(facts["created"])), no_wrap=True),
            f"{facts['arrays']:,}",
            _bytes(facts["bytes"]),
            str(facts["processes"]),
        )
    return table


# --- verify -------------------------------------------------------------------------------------


def _verify_with_progress(path: str) -> VerifyReport:
    out = _out(stderr=True)
    columns = (
        TaskProgressColumn(),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task(escape(path), total=None)
        return unickpt.verify(
            path, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )


def _print_report(report: VerifyReport) -> None:
    out = _out()
    checked = (
        f"{_count(report.arrays, 'array')}, {_count(report.chunks, 'chunk')}, "
        f"{_bytes(report.bytes)} checked in {report.seconds:.2f} s ({report.gb_per_s:.2f} GB/s)"
    )
    if report.ok:
        out.print(Text.assemble(("sound: ", "bold green"), checked))
        return
    table = _table("array", "box", "process", "reason", right=("process",))
    for found in report.damage:
        process = "" if found.process is None else str(found.process)
        cells = (found.array, found.box, process, found.reason)
        table.add_row(*(Text(_clean(cell)) for cell in cells))
    out.print(table)
    places = _count(len(report.damage), "place")
    out.print(Text.assemble(("damaged: ", "bold red"), f"{places} in {checked}"))


def _report_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "url": report.url,
        "ok": report.ok,
        "arrays": report.arrays,
        "chunks": report.chunks,
        "bytes": report.bytes,
        "seconds": report.seconds,
        "damage": [
            {"array": d.array, "box": d.box, "process": d.process, "reason": d.reason}
            for d in report.damage
        ],
    }
