"""What notebooks show: well-formed, escaped, of bounded size, and true."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import Rules, SaveOptions, quoting
from unickpt.display import fragment_grid, html
from unickpt.format.index import ArrayEntry
from unickpt.reading.stored_array import StoredArray
from unickpt.tools.difference import ArrayDifference, DiffReport
from unickpt.types import Box, Layout, LoadReport, Mesh, SaveReport

EVIL = "<script>alert('\"&\u202e\x1b[31m')</script>"
MOST = 120_000  # characters
TAGS = {"div", "b", "code", "table", "thead", "tbody", "tr", "th", "td", "br"}


class Checked(HTMLParser):
    """Parses HTML that must be well-formed; keeps its text, and the texts of its cells."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text, self.open = "", list[str]()
        self.cells: list[str] = []
        self.spans: list[tuple[int, int]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert {name for name, _ in attrs} <= {"style", "rowspan", "colspan"}
        if tag == "td":
            given = dict(attrs)
            self.cells.append("")
            self.spans.append((int(given.get("rowspan") or 1), int(given.get("colspan") or 1)))
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "td" in self.open:
            self.cells[-1] += data

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(data)


def shown(thing: Any) -> Checked:
    source: str = thing._repr_html_()
    assert len(source) < MOST
    assert all(c.isprintable() or c == "\N{NO-BREAK SPACE}" for c in source)
    return Checked(source)


@pytest.fixture(scope="module")
def path() -> str:
    state = {"layers": {str(n): {"w": np.ones((4, 3), np.float32)} for n in range(50)}, "step": 7}
    unickpt.save("memory://html/a", {**state, EVIL: np.ones(2)}, options=SaveOptions(fsync=False))
    return "memory://html/a"


def evil_name(checkpoint: unickpt.Checkpoint) -> str:
    """The array named `EVIL`, as it is stored."""
    (name,) = [name for name in checkpoint if "script" in name]
    return name


def array_of(shape: tuple[int, ...], layout: Layout | None = None, **more: Any) -> StoredArray:
    entry = ArrayEntry("w", shape, "float32", shape, layout, **more)
    return StoredArray({}, None, "w", entry)  # type: ignore[arg-type]


def test_a_checkpoint_shows_its_tree_with_layers_folded(path: str) -> None:
    found = shown(unickpt.open(path))
    assert "51 arrays" in found.text
    assert "{0..49}/w" in found.text
    assert "4 × 3" in found.cells
    assert "step = 7" in found.cells
    assert "2.4 kB" in found.cells  # of all layers


def test_a_checkpoint_with_a_hundred_thousand_arrays_stays_small() -> None:
    names = [f"{chr(97 + n % 26)}{'x' * (n % 37)}{n}z{n * n % 7}" for n in range(100_000)]
    entries = {n: ArrayEntry(n, (k % 50,), "float32", (1,)) for k, n in enumerate(names)}
    rows = [(name, 3, entry.nbytes) for name, entry in entries.items()]
    source = html.table(("name", "n", "bytes"), rows, len(rows))
    assert len(source) < MOST
    assert f"... and {100_000 - html.MOST_ROWS:,} more" in Checked(source).text


def test_names_from_storage_are_escaped(path: str) -> None:
    checkpoint = unickpt.open(path)
    report = LoadReport(EVIL, kept=(EVIL,), cast=((EVIL, EVIL, EVIL),))
    difference = ArrayDifference(EVIL, "value", EVIL, EVIL, 1, 2.0, 0.5)
    save = SaveReport(EVIL, 1, 8, 8, 1, 1, 0.5, {EVIL: 1.0}, replicas_differ=(EVIL,))
    for thing in (
        checkpoint,
        checkpoint[evil_name(checkpoint)],
        report,
        DiffReport((difference,), 1, 8, 0.1),
        save,
    ):
        assert "<script>alert(" in shown(thing).text  # as text, in no tag: see Checked
    assert "&lt;script&gt;" in checkpoint._repr_html_()


def test_long_names_are_shortened() -> None:
    report = LoadReport("x" * 10**6, kept=("y" * 10**6,))
    assert len(report._repr_html_()) < 5000
    shown(report)


# --- fragment maps --------------------------------------------------------------------------------


def test_an_array_shows_which_process_held_what() -> None:
    layout = Layout(Mesh(("x", "y"), (2, 3), tuple(range(6))), (("x",), ("y",)))
    found = shown(array_of((4, 9), layout))
    assert [cell for cell in found.cells if cell.startswith("p")] == [f"p{n}" for n in range(6)]
    for head in ("0:2", "2:4", "0:3", "3:6", "6:9"):
        assert head in found.cells
    assert "dimension 0 runs down" in found.text


def test_devices_are_shown_where_processes_have_several() -> None:
    layout = Layout(Mesh(("x",), (4,), (0, 0, 1, 1)), (("x",),))
    assert "p1d2" in shown(array_of((8,), layout)).cells


def test_a_fragment_over_several_cells_is_one_cell() -> None:
    boxes = (
        (Box((0, 0), (2, 2)), (0,)),
        (Box((2, 0), (3, 2)), (1,)),
        (Box((0, 2), (3, 3)), (2,)),
    )
    found = shown(array_of((3, 3), boxes=boxes))
    spans = dict(zip(found.cells, found.spans, strict=True))
    assert spans["p2"] == (2, 1)
    assert spans["p0"] == spans["p1"] == (1, 1)


def test_a_fragment_on_both_sides_of_what_is_left_out_is_drawn_on_both() -> None:
    boxes = [(Box((0, n), (1, n + 1)), (n,)) for n in range(40)]
    boxes.append((Box((1, 0), (2, 40)), (40,)))
    found = shown(array_of((2, 40), boxes=tuple(boxes)))
    assert [span for cell, span in zip(found.cells, found.spans, strict=True) if cell == "p40"] == [
        (1, 14),
        (1, 1),
    ]
    (grid,) = [next(fragment_grid.grids((2, 40), boxes))]
    width = 1 + len(grid.columns)
    assert sum(wide * high for high, wide in found.spans) == 1 + width * 3 - 1


@pytest.mark.parametrize(
    "shape", [(), (0, 3), (5,), (2, 3, 4), (1,) * 30], ids=lambda shape: str(len(shape))
)
def test_any_shape_can_be_shown(shape: tuple[int, ...]) -> None:
    found = shown(array_of(shape, Layout.replicated(len(shape), 1)))
    assert ("no fragments" in found.text) == (0 in shape)


def test_a_large_mesh_is_summarised() -> None:
    mesh = Mesh(("x", "y"), (256, 256), tuple(range(65536)))
    found = shown(array_of((512, 512), Layout(mesh, (("x",), ("y",)))))
    assert "65,536 fragments: too many for a map" in found.text
    many = Layout(Mesh(("x",), (4096,), tuple(range(4096))), (("x",),))
    assert "p4095" in shown(array_of((8192,), many)).text


def test_a_saved_array_shows_its_map(path: str) -> None:
    assert "p0" in shown(unickpt.open(path)["layers/3/w"]).cells


# --- reports --------------------------------------------------------------------------------------


def test_a_report_of_a_save_shows_the_slowest_processes() -> None:
    writers = tuple({"seconds": n % 1000, "bytes": n * 1000, "chunks": 1} for n in range(5000))
    report = SaveReport(
        "s3://b/run/step_3", 12, 10**12, 10**9, 8, 5000, 31.5, {"write": 30.0}, writers=writers
    )
    found = shown(report)
    assert "1.0 TB" in found.text
    assert "31.5 s (31.7 GB/s)" in found.text
    assert found.cells[-30:-27] == ["999", "999 s", "999.0 kB"]
    assert repr(report) == "SaveReport('s3://b/run/step_3', 12 arrays, 1.0 TB in 31.5 s)"


def test_a_report_of_a_load_shows_what_was_kept() -> None:
    report = LoadReport(
        "memory://a",
        tuple(f"l.{n}.w" for n in range(10**5)),
        kept=tuple(f"l.{n}.b" for n in range(10**5)),
    )
    found = shown(report)
    assert "l.{0..99999}.b" in found.cells
    assert repr(report) == "LoadReport('memory://a', loaded 100000 leaves, kept 100000)"
    assert str(report).startswith("memory://a: loaded 100000 leaves, kept 100000\n")


def test_a_report_of_a_comparison_folds_what_is_alike() -> None:
    same = DiffReport((), 3, 0, 0.1)
    assert repr(same) == "DiffReport(the same: 3 arrays compared)"
    shown(same)
    alike = [ArrayDifference(f"l.{n}.w", "shape", "(2,)", "(3,)") for n in range(1000)]
    rows = (*alike, ArrayDifference("b", "value", "", "", 3, 0.125, 0.5))
    report = DiffReport(rows, 1001, 8, 0.1)
    found = shown(report)
    assert "l.{0..999}.w" in found.cells
    assert {"3", "0.125", "0.5"} <= set(found.cells)
    summary = "different: 1001 arrays compared, 1000 shape, 1 value"
    assert repr(report) == f"DiffReport({summary})"
    assert [line.split() for line in str(report).splitlines()[1:]] == [
        ["name", "differs", "in", "first", "second", "unequal", "max", "abs", "max", "rel"],
        ["l.{0..999}.w", "shape", "(2,)", "(3,)"],
        ["b", "value", "3", "0.125", "0.5"],
    ]
    assert str(report).startswith(f"{summary}\n")
    assert str(same) == "the same: 3 arrays compared"


def test_rules_show_as_they_are_written() -> None:
    rules = Rules.preset(Rules.presets()[0])
    found = shown(rules)
    first = str(rules).splitlines()[0]
    assert any(cell == first for cell in found.cells)
    assert repr(rules) == f"Rules('preset {Rules.presets()[0]}': {len(rules.rules)} rules)"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB")],
)
def test_sizes_have_a_unit(nbytes: int, text: str) -> None:
    assert quoting.size_text(nbytes) == text


# --- in notebooks ---------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_ipython_takes_the_html(path: str) -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    checkpoint = unickpt.open(path)
    for thing in (
        checkpoint,
        checkpoint[evil_name(checkpoint)],
        LoadReport("a"),
        DiffReport((), 1, 0, 0.0),
    ):
        data, _ = formatters.DisplayFormatter().format(thing)
        assert data["text/html"] == thing._repr_html_()


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_shows_a_checkpoint_and_its_progress(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [
        "import numpy as np, unickpt\n"
        "options = unickpt.SaveOptions(fsync=False, progress=True)\n"
        "unickpt.save('c', {'w': np.ones((100, 100))}, options=options)",
        "unickpt.open('c')",
        "unickpt.open('c')['w']",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources=resources
    ).execute()

    def html_of(cell: Any) -> str:
        (found,) = [out for out in cell.outputs if out.output_type == "execute_result"]
        return str(found["data"]["text/html"])

    for cell, text in zip(notebook.cells, ["80.0 kB", "100 × 100", "p0"], strict=True):
        assert text in Checked(html_of(cell)).text
    others = [out for out in notebook.cells[0].outputs if out.output_type != "execute_result"]
    assert "80.0k" in str(others)  # the bar
