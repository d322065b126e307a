"""inspect: a checkpoint's tree, or one array with a map of its fragments."""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from unickpt.arrays.layout import Layout, Mesh
from unickpt.cli import fragment_map, timing_table
from unickpt.cli.nonfinite import Nonfinite, count_nonfinite
from unickpt.display import tree_table
from unickpt.format import ocdbt_reader, unit_steps
from unickpt.format.chunk_encoding import AUTO, common_codec
from unickpt.format.chunk_grid import Part
from unickpt.format.codec_protocol import as_codecs, codec_of
from unickpt.format.index import ArrayEntry, Index
from unickpt.quoting import counted, first_few, quoted, size_text
from unickpt.reading.checkpoint import Checkpoint, opened
from unickpt.reading.stored_array import StoredArray
from unickpt.tools.terminal.command_options import HintOption, Under, source_of
from unickpt.tools.terminal.output import AsJson, Where, clean, console, fail, print_json
from unickpt.tools.terminal.tables import Cell, date_text, print_table, shape_text
from unickpt.trees import tree, tree_json

_MANY_PARTS = 20


def command(
    path: Where,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="An array, value or container in it.")
    ] = None,
    array: Annotated[
        str | None, typer.Option("--array", metavar="NAME", help="The same as NAME.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="One row for every leaf, also for layers that are alike.")
    ] = False,
    sort: Annotated[
        Literal["name", "size"],
        typer.Option("--sort", help="size: the arrays alone, the largest first."),
    ] = "name",
    timing: Annotated[
        bool,
        typer.Option(
            "--timing", help="How long the save took: its phases, and the slowest processes."
        ),
    ] = False,
    nonfinite: Nonfinite = False,
    under: Under = "",
    hint: HintOption = None,
    as_json: AsJson = False,
) -> None:
    """Show a checkpoint's tree, or one array, or how long its save took.

    Reads only the index, so it is fast for a checkpoint of any size. --nonfinite reads all arrays
    of floats.

    \b
    unickpt inspect runs/step_100
    unickpt inspect runs/step_100 opt_state
    unickpt inspect runs/step_100 --sort size
    unickpt inspect runs/step_100 params/layers/0/mlp/up
    unickpt inspect s3://bucket/runs/step_100 --json | jq .totals
    unickpt inspect runs/step_100 --timing
    unickpt inspect runs/step_100 --nonfinite

    For an array, a map shows its fragments at the time of the save: p is the process and d the
    device of the mesh, counted row-major, that held a fragment.

    --json prints one object. Fields are only ever added to it. Shapes are lists, sizes are bytes.

    \b
    url, format, created, library, attempt, processes, metadata
    features    features that a program needs to read or delete it (docs/format.md)
    codecs      names of the codecs of arrays
    beside      files in its folder that look like a part of it, but are none
    meshes      [{axes, shape, processes}]
    arrays      [{name, shape, dtype, bytes, mesh, spec, fragments, chunk, chunks, parts, prng,
                quantized, patched, codecs, block}]
                mesh: place in meshes, or null; spec: the mesh axes that split each dimension;
                quantized: null, or {codes, largest_error, largest_relative_error};
                patched, the number of chunks that are patches; block: null, or {type, shape}
                of an array of GGUF that is stored as blocks, such as Q8_0
    ties        {name: name of the array it is tied to}
    values      {name: plain value}; what JSON lacks is an object as in docs/format.md; an object
                that only its class can read is {opaque: name of the class, size}
    per_process {name: [bytes of each process's value]}
    totals      {arrays, elements, by_dtype: {dtype: {arrays, bytes}}, bytes, chunks, reused_bytes,
                bases: names of the checkpoints next to it that it needs}

    With --timing, --json prints {url, timing}: null if it was not kept, or {processes, collected,
    merged, began, at, seconds, done, waited, blocked, written, stored, reused, staged, chunks},
    with lists that have a number for each process. Times are seconds since process 0 called
    save; at and seconds have a list for each phase, at with seconds since began.

    With NAME of an array, --json prints that array alone, with fragments as
    [{start, stop, processes}] and parts as [{url, start, stop, chunk, grid}].
    """
    if (timing or nonfinite) and (name is not None or array is not None):
        option = "--timing" if timing else "--nonfinite"
        raise typer.BadParameter(f"{option} is about the whole checkpoint, not about NAME")
    if name is not None and array is not None and name != array:
        raise typer.BadParameter("give NAME or --array, not two different names")
    if nonfinite:
        count_nonfinite(path, hint, as_json, under)
        return
    checkpoint = opened(source_of(path, hint, under))
    if timing:
        _inspect_timing(checkpoint, everything, as_json)
        return
    requested_name = (name if name is not None else array) or ""
    if requested_name or (name is not None and "" in checkpoint):
        _inspect_one(checkpoint, requested_name.rstrip("/"), everything, as_json)
    elif as_json:
        print_json(_checkpoint_json(checkpoint))
    else:
        _print_checkpoint(checkpoint, everything, sort == "size")


def _inspect_timing(checkpoint: Checkpoint, everything: bool, as_json: bool) -> None:
    timing, out = checkpoint.timing, console()
    if as_json:
        facts = None if timing is None else timing_table.timing_json(timing)
        print_json({"url": checkpoint.url, "timing": facts})
        return
    out.print(Text(clean(checkpoint.reader.label), "bold"))
    if timing is not None:
        timing_table.print_timing(out, timing, everything)
        return
    why = "that is kept of saves of several processes, and with SaveOptions(timing=True)"
    if checkpoint.reader.format != ocdbt_reader.FORMAT:
        why = f"its format is {clean(_format(checkpoint))}"
    out.print(f"It does not say how long its save took: {why}.")


def _format(checkpoint: Checkpoint) -> str:
    reader = checkpoint.reader
    is_own = reader.format == ocdbt_reader.FORMAT
    return reader.version if is_own else f"{reader.format} {reader.version}".rstrip()


def _compression(index: Index) -> str:
    """The codecs of the arrays, and how many are compressed if each has its own."""
    count = sum(bool(x.encoding) and x.codec is None for x in index.arrays.values())
    names = ", ".join(index.codecs) or common_codec(index.compression) or "none"
    return f"{names} of {counted(count, 'array')}" if count and index.compression == AUTO else names


def _by_dtype(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """The number of arrays of each dtype and their bytes, the most bytes first."""
    counts, nbytes, blocks = Counter[str](), Counter[str](), checkpoint.reader.blocks
    for name, entry in checkpoint.index.arrays.items():
        dtype = blocks[name].name if name in blocks else entry.dtype
        counts[dtype] += 1
        nbytes[dtype] += entry.nbytes
    return {dtype: (counts[dtype], total) for dtype, total in nbytes.most_common()}


def _elements(checkpoint: Checkpoint) -> int:
    """The number of elements of all arrays; of blocks, those that they stand for."""
    blocks = checkpoint.reader.blocks
    shapes = (
        blocks[name].shape if name in blocks else entry.shape
        for name, entry in checkpoint.index.arrays.items()
    )
    return sum(map(math.prod, shapes))


def _print_checkpoint(checkpoint: Checkpoint, everything: bool, by_size: bool) -> None:
    out, index = console(), checkpoint.index
    out.print(Text(clean(checkpoint.reader.label), "bold"))
    facts = [f"format {clean(_format(checkpoint))}"]
    if index.features:
        facts[0] += f" with {', '.join(index.features)}"
    compression = _compression(index)
    if index.created:
        facts.append(f"created {clean(date_text(index.created))} by {clean(index.library)}")
    is_own = checkpoint.reader.format == ocdbt_reader.FORMAT
    if is_own or index.processes > 1:
        facts.append(counted(index.processes, "process", "processes"))
    if is_own or compression != "none":  # how files of others are compressed is not in the index
        facts.append(f"compression {clean(compression)}")
    out.print(", ".join(facts))
    if index.metadata:
        text = json.dumps(index.metadata, ensure_ascii=False)
        out.print(clean(f"metadata {tree_table.shorten(text, 400)}"))
    if checkpoint.reader.beside:
        text = ", ".join(checkpoint.reader.beside)
        out.print(clean(f"next to it, but not part of it: {tree_table.shorten(text, 400)}"))
    meshes = tree_table.meshes_of(index)
    for number, mesh in enumerate(meshes):
        out.print(clean(f"mesh {number if len(meshes) > 1 else ''}".strip() + _mesh(mesh)))
    out.print()
    blocks = checkpoint.reader.blocks
    if by_size:
        rows = tree_table.array_rows(index, blocks)
    else:
        where = str(checkpoint.location)
        rows = tree_table.outline(index, where, unfolded=everything, blocks=blocks)
    _print_rows(out, rows)
    out.print()
    out.print(_totals(checkpoint))
    dtypes = _by_dtype(checkpoint)
    if len(dtypes) > 1:
        texts = [
            f"{size_text(nbytes)} {clean(dtype)} ({counted(count, 'array')})"
            for dtype, (count, nbytes) in dtypes.items()
        ]
        out.print(Text.assemble(("by dtype: ", "bold"), ", ".join(texts)))
    for line in _experts(checkpoint):
        out.print(line)


def _print_rows(out: Console, rows: Sequence[tree_table.OutlineRow]) -> None:
    columns = ["name", "shape", "dtype", "layout", "fragments", "bytes"]
    cells = [_cells(row) for row in rows]
    if all(row.facts is None or _is_whole(row.facts) for row in rows):
        del columns[3:5]
        cells = [[*texts[:3], *texts[5:]] for texts in cells]
    print_table(columns, cells, right=("fragments", "bytes"), out=out)
    if any(row.count > 1 for row in rows):
        note = "xN: one row for N similar leaves, with the bytes of all. --all shows each."
        out.print(Text(note, "dim"))


def _is_whole(facts: tree_table.TreeRowFacts) -> bool:
    """Whether a leaf has no layout to show: one fragment, on one device."""
    return facts.layout in ("", "-") and (facts.kind != "array" or (facts.fragments or 0) <= 1)


def _cells(row: tree_table.OutlineRow) -> list[Cell]:
    label = "  " * row.depth + clean(row.label) + (f"  x{row.count}" if row.count > 1 else "")
    facts = row.facts
    if facts is None:
        nbytes = size_text(row.nbytes) if row.nbytes else ""
        return [(label, "bold"), "", "", "", "", (nbytes, "dim")]
    if facts.kind == "tie":
        return [(label, ""), "", ("tied", "dim")]
    if facts.kind == "value":
        size = size_text(facts.nbytes) if facts.nbytes else ""  # of an opaque leaf
        return [(label, ""), "", (clean(facts.dtype), "dim"), "", "", (size, "dim")]
    if facts.kind == "per process":
        values = counted(facts.fragments or 0, "value")
        return [(label, ""), values, (facts.dtype, "dim"), "", "", size_text(facts.nbytes)]
    shape, count = shape_text(facts.shape or ()), str(facts.fragments)
    return [(label, ""), shape, facts.dtype, facts.layout, count, size_text(facts.nbytes)]


def _mesh(mesh: Mesh) -> str:
    axes = ", ".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.shape, strict=True))
    processes = counted(len(set(mesh.processes)), "process", "processes")
    return f" ({axes}): {counted(len(mesh.processes), 'device')} of {processes}"


def _totals(checkpoint: Checkpoint) -> Text:
    index = checkpoint.index
    elements = _elements(checkpoint)
    chunks = f" in {counted(index.chunks, 'chunk')}" if index.chunks else ""
    pieces = [
        f"{counted(len(index.arrays), 'array')} of {counted(elements, 'element')}, "
        f"{size_text(checkpoint.nbytes)}{chunks}"
    ]
    bases = ", ".join(quoted(base.name) for base in index.bases)
    if index.bases and checkpoint.reader.under:
        pieces.append(f"part of it may be in {bases}")
    elif index.bases:
        pieces.append(f"{size_text(index.reused)} in {bases}, without which it cannot be read")
    elif index.reused:
        pieces.append(f"{size_text(index.reused)} in files of an earlier checkpoint")
    counts = [
        (len(index.aliases), "tie", "ties"),
        (len(index.values), "plain value", "plain values"),
        (len(index.per_process), "per-process leaf", "per-process leaves"),
    ]
    pieces += [counted(n, singular, plural) for n, singular, plural in counts if n]
    return Text.assemble(("total: ", "bold"), "; ".join(pieces))


def _experts(checkpoint: Checkpoint) -> list[Text]:
    """A line for each key of experts that take turns to be saved; and one for the PLT."""
    where, metadata = str(checkpoint.location), checkpoint.index.metadata
    steps_of = unit_steps.stored(metadata, where)
    if steps_of is None:
        return []
    older: dict[str, dict[int, list[int]]] = {}
    for key, number, step in unit_steps.older(metadata, where):
        older.setdefault(key, {}).setdefault(step, []).append(number)
    lines = []
    for key, steps in steps_of.items():
        by_step = sorted(older.get(key, {}).items(), reverse=True)
        shown = "; ".join(f"{first_few(numbers)} of step {step}" for step, numbers in by_step[:8])
        more = "; ..." if len(by_step) > 8 else ""
        text = f"{clean(key)}: {counted(len(steps), 'expert')}, " + (
            f"{sum(len(n) for _, n in by_step)} as of an earlier step: {shown}{more}"
            if by_step
            else "all of this step"
        )
        lines.append(Text.assemble(("experts: ", "bold"), text))
    if (lost := unit_steps.lost(metadata)) is not None:
        text = f"{lost:.3%} of all tokens, if the run restarts from this step (PLT)"
        lines.append(Text.assemble(("lost: ", "bold"), text))
    return lines


_OF_INDEX = ("created", "library", "attempt", "processes", "metadata", "features", "codecs")


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    index = checkpoint.index
    layouts = [entry.layout for entry in index.arrays.values() if entry.layout is not None]
    meshes = {mesh: number for number, mesh in enumerate(dict.fromkeys(x.mesh for x in layouts))}
    return {
        "url": checkpoint.url,
        "format": _format(checkpoint),
        **{name: getattr(index, name) for name in _OF_INDEX},
        "beside": list(checkpoint.reader.beside),
        "meshes": [{"axes": m.axes, "shape": m.shape, "processes": m.processes} for m in meshes],
        "arrays": [
            {
                **_array_json(checkpoint[name], entry),
                "mesh": None if entry.layout is None else meshes[entry.layout.mesh],
                "fragments": tree_table.fragment_count(entry),
                "parts": len(checkpoint[name].parts),
                "block": _block_json(checkpoint, name),
            }
            for name, entry in index.arrays.items()
        ],
        "ties": dict(index.aliases),
        "values": {name: _value_json(value) for name, value in index.values.items()},
        "per_process": {n: [size for size, _ in e.blobs] for n, e in index.per_process.items()},
        "totals": {
            "arrays": len(index.arrays),
            "elements": _elements(checkpoint),
            "by_dtype": {
                dtype: {"arrays": count, "bytes": nbytes}
                for dtype, (count, nbytes) in _by_dtype(checkpoint).items()
            },
            "bytes": checkpoint.nbytes,
            "chunks": index.chunks,
            "reused_bytes": index.reused,
            "bases": [base.name for base in index.bases],
        },
    }


def _block_json(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    block = checkpoint.reader.blocks.get(name)
    return None if block is None else {"type": block.name, "shape": block.shape}


def _value_json(value: tree_json.Plain) -> Any:
    if isinstance(value, tree.Opaque):
        return {"opaque": value.class_name, "size": len(value.pickle)}
    return tree_json.value_to_json(value)


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
        "quantized": None,
        **_codec_facts(entry),
        "patched": entry.composed,
        "codecs": as_codecs(entry.encoding or ()),
    }


# --- inspect: one name --------------------------------------------------------------------------


def _inspect_one(checkpoint: Checkpoint, name: str, everything: bool, as_json: bool) -> None:
    index, out = checkpoint.index, console()
    if name in checkpoint:
        array = checkpoint[name]
        entry = index.arrays[index.aliases.get(name, name)]
        if as_json:
            print_json(_one_array_json(checkpoint, array, entry))
        else:
            _print_array(out, checkpoint, array, entry, everything)
    elif name in index.values:
        value = index.values[name]
        if as_json:
            print_json({"name": name, "value": _value_json(value)})
        else:
            out.print(Text(tree_table.value_text(value, 1 << 20)))
    elif name in index.per_process:
        sizes = [size for size, _ in index.per_process[name].blobs]
        if as_json:
            print_json({"name": name, "per_process": sizes})
        else:
            out.print(Text(clean(name) or "(the root)", "bold"))
            rows = ((str(process), size_text(size)) for process, size in enumerate(sizes))
            print_table(("process", "bytes"), rows, right=("process", "bytes"), out=out)
    elif as_json or name not in tree_table.container_names(index):
        fail(_unknown(checkpoint, name))
    else:
        where, blocks = str(checkpoint.location), checkpoint.reader.blocks
        _print_rows(
            out, tree_table.outline(index, where, below=name, unfolded=everything, blocks=blocks)
        )


def _unknown(checkpoint: Checkpoint, name: str) -> str:
    index = checkpoint.index
    if name in tree_table.container_names(index):
        return f"{checkpoint.location}: {name!r} is a container; --json shows one array or value"
    names = [*checkpoint, *index.values, *index.per_process, *tree_table.container_names(index)]
    close = difflib.get_close_matches(name, names[:20_000], n=3)
    hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
    return f"{checkpoint.location}: nothing is named {name!r}{hint}"


def _print_array(
    out: Console, checkpoint: Checkpoint, array: StoredArray, entry: ArrayEntry, everything: bool
) -> None:
    title = Text(clean(array.name) or "(the root)", "bold")
    if entry.name != array.name:
        title.append(f"  tied to {clean(entry.name)}", "dim")
    out.print(title)
    for label, fact in _facts(checkpoint, array, entry):
        out.print(Text.assemble((f"  {label:<13}", "dim"), clean(fact)))
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
        ("shape", f"{shape_text(entry.shape)}  ({counted(elements, 'element')})"),
        ("dtype", entry.dtype if entry.prng is None else f"{entry.dtype}, a {entry.prng} PRNG key"),
        ("bytes", size_text(entry.nbytes)),
        ("layout", _layout_fact(entry.layout)),
        ("fragments", _fragments_fact(entry, array)),
        ("chunks", f"{sum(part.count for part in parts):,} of up to {shape_text(entry.chunk)}"),
    ]
    block = checkpoint.reader.blocks.get(entry.name)
    if block is not None:
        count = counted(math.prod(block.shape), "element")
        text = f"{block.name}, blocks for {shape_text(block.shape)}  ({count})"
        facts.insert(2, ("stands for", text))
    for name, of_codec in _codec_facts(entry).items():
        shown = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in of_codec.items()}
        facts.insert(2, (name, ", ".join(f"{key}: {value}" for key, value in shown.items())))
    if entry.composed:
        facts.append(("patches", f"{entry.composed:,} of the chunks are stored as patches"))
    if len(parts) == 1 and array.url:
        facts.append(("TensorStore", array.url))
    elif len(parts) > 1:
        facts.append(("parts", str(len(parts))))
    return facts


def _codec_facts(entry: ArrayEntry) -> dict[str, Mapping[str, Any]]:
    """The note of an array's codec about it, by its name, if it is none of Zarr's."""
    codec = codec_of(entry)
    return {} if codec is None else {codec.name: codec.facts(entry)}


def _layout_fact(layout: Layout | None) -> str:
    if layout is None:
        return "none: each process declared its own boxes"
    if len(layout.mesh.processes) == 1:
        return "one device"
    return f"{tree_table.layout_text(layout)} on mesh{_mesh(layout.mesh)}"


def _fragments_fact(entry: ArrayEntry, array: StoredArray) -> str:
    count = tree_table.fragment_count(entry)
    if not count:
        return "none"
    shapes = {box.shape for box, _ in array.fragments}
    largest = shape_text(max(shapes, key=math.prod))
    return f"{count:,} of {'up to ' if len(shapes) > 1 else ''}{largest}"


def _print_parts(
    out: Console, checkpoint: Checkpoint, array: StoredArray, everything: bool
) -> None:
    shown = array.parts if everything else array.parts[:_MANY_PARTS]
    rows = (
        (str(p.box), shape_text(p.chunk), str(p.count), _url(checkpoint, array, p)) for p in shown
    )
    print_table(("box", "chunk", "chunks", "TensorStore"), rows, right=("chunks",), out=out)
    if len(shown) < len(array.parts):
        out.print(Text(f"{len(array.parts) - len(shown)} more parts; --all shows each", "dim"))


def _url(checkpoint: Checkpoint, array: StoredArray, part: Part) -> str:
    """The URL with which TensorStore opens a part; empty if it cannot."""
    return checkpoint.reader.part_url(part) if array.url else ""


def _one_array_json(
    checkpoint: Checkpoint, array: StoredArray, entry: ArrayEntry
) -> dict[str, Any]:
    mesh = None if entry.layout is None else entry.layout.mesh
    return {
        **_array_json(array, entry),
        "tied_to": None if entry.name == array.name else entry.name,
        "block": _block_json(checkpoint, entry.name),
        "mesh": mesh and {"axes": mesh.axes, "shape": mesh.shape, "processes": mesh.processes},
        "fragments": [
            {"start": box.start, "stop": box.stop, "processes": holders}
            for box, holders in array.fragments
        ],
        "parts": [
            {
                "url": _url(checkpoint, array, part),
                "start": part.box.start,
                "stop": part.box.stop,
                "chunk": part.chunk,
                "grid": part.grid,
            }
            for part in array.parts
        ],
    }
