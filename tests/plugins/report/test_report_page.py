"""The page of `unickpt report` in headless Chromium: it draws, sorts and filters, in both themes,
on any width, and what a checkpoint says stays text."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.browser import Browser, browser
from support.report_cases import EVIL, forge_evil, forge_step, large_timing
from support.saving import save_in_job

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.integrations.metrics import JsonLines
from unickpt.types import Mesh

pytestmark = pytest.mark.integration

PROCESSES, SLOW = 4096, range(296, 304)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(chromium: Browser) -> Iterator[Browser]:
    """A window in its usual state; whatever a test does, nothing is logged as an error."""
    chromium.width(1200)
    chromium.prefers("light")
    chromium.console()
    yield chromium
    assert chromium.console() == []


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run of one process, with removed steps and a load."""
    folder = tmp_path_factory.mktemp("small")
    lines = JsonLines(folder / "saves.jsonl")
    state = {"layers": {str(n): np.arange(9000.0) * n for n in range(12)}, "w": np.arange(4000.0)}
    options = SaveOptions(metrics=lines, timing=True)
    with Checkpointer(folder / "run", keep_last=3, reuse=True, options=options) as checkpointer:
        for step in range(1, 13):
            state["w"] += 1
            metrics = {"loss": math.nan if step in (6, 7) else 1 / step}
            if step % 4 == 0:
                metrics["eval/accuracy"] = step / 10
            checkpointer.save(step, state, metrics=metrics, wait=True)
    like = {**state, "w": np.zeros(4000, np.float32)}
    _, report = unickpt.load(folder / "run" / "step_12", like, cast=True, return_report=True)
    lines(report)
    return unickpt.report(folder / "run", folder / "report.html", metrics=folder / "saves.jsonl")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run of 4,096 processes and 2,000 arrays, in which one host is slow."""
    folder = tmp_path_factory.mktemp("large")
    mesh = Mesh(("pp", "dp", "tp"), (8, 64, 8), tuple(range(PROCESSES)))
    (folder / "run").mkdir()
    for step in (1, 2, 3):
        timing = large_timing(PROCESSES, SLOW, step)
        forge_step(folder / "run" / f"step_{step}", timing, 2000, mesh, step=step)
    return unickpt.report(folder / "run", folder / "report.html")


def column(page: Browser, section: str, number: int) -> list[str]:
    """The cells of a column of the first table below a title."""
    rows = f"section:has(h2) tbody tr td:nth-child({number})"
    script = """[...document.querySelectorAll("section")].find(
        (s) => s.querySelector("h2").textContent === a[0]).querySelectorAll(a[1])"""
    found: list[str] = page.run(
        f"[...{script}].map((e) => e.innerText)", section, rows.removeprefix("section:has(h2) ")
    )
    return found


def in_section(page: Browser, title: str, selector: str) -> str:
    """Gives a section an id, so that what is in it can be selected."""
    page.run(
        """[...document.querySelectorAll("section")].find(
        (s) => s.querySelector("h2").textContent === a[0]).id = "found" """,
        title,
    )
    return f"#found {selector}"


def press_until(page: Browser, selector: str, key: str, script: str) -> None:
    """Presses a key until an expression is true: browsers scroll when they next draw."""
    end = time.monotonic() + 60
    while not page.run(script):
        assert time.monotonic() < end, script
        page.keys(selector, key * 4)


def is_drawn(page: Browser, selector: str) -> bool:
    return len(page.pixels(selector)) > 2


def test_a_run_is_drawn_in_all_its_parts(page: Browser, small: Path) -> None:
    page.open(small)
    assert page.texts("h2") == [
        "Metrics",
        "Steps",
        "Lost time",
        "What each process did, and when",
        "Processes, the slowest first",
        "Arrays",
        "Loads",
    ]
    assert page.texts(".tile")[0].split("\n") == ["3", "steps kept, 9 removed"]
    pictures = page.run("document.querySelectorAll('.picture canvas').length")
    assert pictures == 5
    for title in ("Metrics", "Steps", "What each process did, and when", "Arrays"):
        assert is_drawn(page, in_section(page, title, ".picture canvas")), title
        page.run("document.getElementById('found').removeAttribute('id')")
    assert "cast" in page.texts(in_section(page, "Loads", "thead"))[0]
    assert page.run("performance.getEntriesByType('resource').length") == 0
    titles = page.run("[...document.querySelectorAll('h2')].map((title) => title.id)")
    assert len(set(titles)) == len(titles), "sections are named by their titles"


def test_loads_and_interruptions_are_drawn(page: Browser, tmp_path: Path) -> None:
    def load(process: int) -> dict[str, object]:
        took = {"seconds": 1.0 + process, "waited_s": 0.5, "waited_for": {"7": 0.5}}
        counts = {"bytes": 10**9, "read_bytes": 10**6, "received_bytes": 0}
        shape = {"counts": {"loaded": 1}, "rows": [], "process": process, "processes": 8}
        return {"kind": "load", "step": 1, **took, **counts, **shape}

    def at(second: int, **line: object) -> str:
        time = f"2026-11-28T10:00:{second:02d}+00:00"
        return json.dumps({"time": time, "process": 0, "url": str(tmp_path / "run"), **line})

    step = {"url": str(tmp_path / "run" / "step_1")}
    failed = {"kind": "save failed", "error": f"StorageError: {EVIL}", "step": 3}
    lines = [
        at(1, kind="began", job="a"),
        at(5, kind="step", job="a", step=1),
        at(8, kind="step", job="a", step=4),
        at(9, job="a", **step, **failed),
        at(20, kind="began", job="b"),
        *(at(30, **{"job": "b" if n == 0 else f"b{n}", **load(n), **step}) for n in range(8)),
        at(35, kind="step", job="b", step=2),
    ]
    (tmp_path / "lines").write_text("\n".join(lines))
    unickpt.save(tmp_path / "run" / "step_1", {"w": np.ones(3)})
    page.open(unickpt.report(tmp_path / "run", tmp_path / "r.html", metrics=tmp_path / "lines"))
    assert "Lost time" in page.texts("h2")
    row = page.texts(in_section(page, "Lost time", "tbody tr td"))
    assert row[1:8] == ["4", "1", "3", "1.00 s", "11.0 s", "1.00 s", "25.0 s"]
    page.run("document.getElementById('found').removeAttribute('id')")
    assert EVIL[:9] in page.texts(in_section(page, "Failures", "tbody tr"))[0]
    page.run("document.getElementById('found').removeAttribute('id')")
    assert is_drawn(page, in_section(page, "Loads", ".picture canvas"))
    bars, heat_map = page.run(
        "[...document.querySelectorAll('#found .picture canvas')].map((c) => c.ariaLabel)"
    )
    assert "each of 8 processes" in bars
    assert heat_map == "Heat map of 8 processes: seconds of the load, from 1.00 s to 8.00 s."
    assert "row=1" in page.texts("#found .two tbody th"), "where the slow ones are"
    assert "8.0 GB" in page.texts("#found tbody tr")[0]
    slowest = page.texts("#found table:last-of-type tbody tr")[-8]
    assert slowest.split("\t")[0] == "7", "the slowest first"
    assert page.run("window.pwned") is None


def test_tables_sort_by_what_is_clicked(page: Browser, small: Path) -> None:
    page.open(small)
    assert column(page, "Steps", 1)[:3] == ["step_12", "step_11", "step_10"]
    button = in_section(page, "Steps", "th:nth-child(1) button")
    page.click(button)
    assert column(page, "Steps", 1)[:3] == ["step_1", "step_2", "step_3"]
    assert page.run("document.querySelector('#found th').ariaSort") == "ascending"
    loss = page.texts("#found th").index("eval/accuracy") + 1
    page.click(f"#found th:nth-child({loss}) button")
    assert column(page, "Steps", 1)[:5] == ["step_12", "step_8", "step_4", "step_1", "step_2"]
    page.click(f"#found th:nth-child({loss}) button")
    found = column(page, "Steps", loss)
    assert found[:3] == ["0.4", "0.8", "1.2"]
    assert set(found[3:]) == {""}, "what is unknown comes last in both directions"


def test_tables_show_what_the_filter_says(page: Browser, small: Path) -> None:
    page.open(small)
    filter_ = in_section(page, "Steps", "input")
    page.keys(filter_, "REMOVED")
    assert len(column(page, "Steps", 1)) == 9
    assert page.texts("#found [role=status]") == ["9 of 12 steps"]
    page.keys(filter_, " not there")
    assert column(page, "Steps", 1) == []


def test_it_is_light_or_dark_as_the_user_prefers_and_as_the_button_says(
    page: Browser, small: Path
) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    ink = in_canvas = {}
    for scheme in ("light", "dark"):
        page.prefers(scheme)
        page.open(small)
        ink[scheme] = page.run(background)
        in_canvas[scheme, "drawn"] = page.pixels(".picture canvas")
    assert ink["light"] == "rgb(246, 247, 249)"
    assert ink["dark"] == "rgb(18, 22, 28)"
    assert in_canvas["light", "drawn"] != in_canvas["dark", "drawn"]
    page.click("#theme")
    assert page.run(background) == ink["light"]
    assert page.pixels(".picture canvas") == in_canvas["light", "drawn"]
    page.click("#theme")
    assert page.run(background) == ink["dark"]


@pytest.mark.parametrize("width", [320, 600])
def test_a_narrow_window_is_never_wider_than_itself(
    page: Browser, small: Path, large: Path, width: int
) -> None:
    for file in (small, large):
        page.width(width)
        page.open(file)
        assert page.run("document.documentElement.scrollWidth") == width
        assert is_drawn(page, ".picture canvas")
    page.width(1200)
    page.run("document.querySelector('section:has(.legend)').id = 'steps'")
    wide = "document.querySelector('#steps .picture canvas').width"  # its pixels
    page.run("new Promise((done) => setTimeout(done, 100))")
    assert page.run(wide) > 1000, "pictures follow the window"


def test_thousands_of_processes_open_in_a_moment(page: Browser, large: Path) -> None:
    assert large.stat().st_size < 3_000_000
    page.open(large)
    took = page.run("performance.timing.loadEventEnd - performance.timing.navigationStart")
    assert took < 15_000, "ms, of which a machine with time to spare needs 700"
    status = page.texts("[role=status]")
    assert status == ["3 steps", "4,096 processes, 10 shown", "2,000 arrays, 20 shown"]
    slowest = {int(process) for process in column(page, "Processes, the slowest first", 1)}
    assert len(slowest & set(SLOW)) >= 7
    often = column(page, "Processes, the slowest first", 2)
    assert often.count("3 of 3") >= 5, "the host is slow in every step"
    about = page.texts(in_section(page, "What each process did, and when", "p"))
    assert "each line stands for 9 of them" in about[0]


def test_the_slow_host_is_found_on_the_mesh(page: Browser, large: Path) -> None:
    page.open(large)
    canvas = in_section(page, "Processes over the mesh", ".picture canvas")
    colours = {tuple(colour[:3]) for colour in page.pixels(canvas)}
    assert (254, 232, 56) in colours, "the slowest process has the last colour"
    row = page.texts("#found table tr")[0].split()
    assert row[:2] == ["pp=0,", "dp=37"]
    assert float(row[-2]) > 1.8, "times the median"
    page.keys(canvas, "\ue010")  # End
    assert "process 4095 (pp=7, dp=63, tp=7)" in page.texts("#found .readout")[0]
    page.run("document.querySelector('#found select').value = 'rate'")
    page.run("document.querySelector('#found select').dispatchEvent(new Event('change'))")
    assert page.texts("#found h3") == ["The lowest means"]
    assert page.texts("#found table tr")[0].startswith("pp=0, dp=37")


def test_another_step_and_another_order_are_a_choice(page: Browser, large: Path) -> None:
    page.open(large)
    before = column(page, "Processes, the slowest first", 1)
    page.click("section tbody button.link")  # the first step of the table, the newest
    assert column(page, "Processes, the slowest first", 1) == before
    page.click("section tbody tr:nth-child(3) button.link")
    assert column(page, "Processes, the slowest first", 1) != before
    canvas = in_section(page, "What each process did, and when", ".picture canvas")
    page.run("document.querySelector('#found select').value = 'done'")
    page.run("document.querySelector('#found select').dispatchEvent(new Event('change'))")
    page.keys(canvas, "\ue011")  # Home
    first = column(page, "Processes, the slowest first", 1)[0]
    assert page.texts("#found .readout")[0].startswith(f"process {first} ")


def test_arrays_open_by_containers_and_show_their_fragments(page: Browser, large: Path) -> None:
    page.open(large)
    canvas = in_section(page, "Arrays", ".picture canvas")
    assert page.texts("#found .crumbs")[0].split("\n")[0].startswith("all arrays")
    page.keys(canvas, "\ue011\ue007")  # Home, Enter
    assert re.match(r"all arrays */ *(mu|nu)", " ".join(page.texts("#found .crumbs")[0].split()))
    assert re.search(r"in 66\d arrays", page.texts("#found .crumbs")[0])
    page.keys(canvas, "\ue003")  # Backspace
    assert "2,000 arrays" in page.texts("#found .crumbs")[0]
    page.keys("#found input", "nu/layers/3/mlp/down")
    page.click("#found tbody button.link")
    assert page.texts("#found h3") == ["Fragments of nu/layers/3/mlp/down"]
    assert page.texts("#found .map th")[:2] == ["0:32", "32:64"]
    assert page.texts("#found .map td")[1] == "p0"


def test_names_that_try_to_be_markup_stay_text(page: Browser, tmp_path: Path) -> None:
    forge_evil(tmp_path / "run" / "step_1")
    page.open(unickpt.report(tmp_path / "run", tmp_path / "report.html"))
    assert page.run("window.pwned === undefined")
    assert page.run("document.querySelectorAll('img, main script').length") == 0
    shown = column(page, "Arrays", 1)
    assert EVIL.replace("\u2028\u202e", " ") in shown
    assert "__proto__" in shown
    assert "onerror" in page.texts("section thead")[0], "the name of a metric"
    page.click(in_section(page, "Arrays", "tbody button.link"))
    assert page.run("document.querySelectorAll('img, main script').length") == 0


def test_what_got_into_the_page_nevertheless_would_not_run(chromium: Browser, small: Path) -> None:
    chromium.open(small)
    chromium.console()
    chromium.run("document.body.insertAdjacentHTML('beforeend', a[0])", EVIL)
    chromium.run(
        "document.body.append(Object.assign(document.createElement('script'), a[0]))",
        {"text": "pwned = 1"},
    )
    chromium.run("new Promise((done) => setTimeout(done, 100))")
    assert chromium.run("window.pwned === undefined")
    refused = chromium.console()
    assert refused
    assert all("Content Security Policy" in message for message in refused)


def test_one_process_and_few_are_drawn_too(page: Browser, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "alone", {"step": 3})
    page.open(unickpt.report(tmp_path / "alone", tmp_path / "report.html"))
    assert "It has no arrays." in page.texts("section p")
    save_in_job(tmp_path / "three", 3, lambda index: {"w": np.arange(50_000.0)})
    page.open(unickpt.report(tmp_path / "three", tmp_path / "report.html"))
    assert "Processes over the mesh" in page.texts("h2")
    for number in range(page.run("document.querySelectorAll('.picture canvas').length")):
        page.run("document.querySelectorAll('.picture canvas')[a[0]].id = 'this'", number)
        assert is_drawn(page, "#this")
        page.run("document.getElementById('this').id = ''")


def test_the_page_says_first_what_to_look_at(page: Browser, small: Path, large: Path) -> None:
    page.open(small)
    found = page.run("JSON.parse(document.getElementById('data').textContent).headline")
    assert found["level"] == "notice"
    assert page.texts("#headline") == [f"Look at this first: {found['text']}"]
    page.open(large)
    said = page.texts("#headline")[0]
    assert re.search(
        r"at least \d\d\.\d s of \d\d\.\d s for process (29[6-9]|30[0-3]) in step_3", said
    )


def test_metrics_are_drawn_by_their_names(page: Browser, small: Path) -> None:
    page.open(small)
    canvases = in_section(page, "Metrics", "canvas")
    assert page.texts("#found h3") == ["loss", "eval/accuracy"]
    loss, accuracy = page.texts("#found .plots p")
    assert loss == "last 0.0833333 · best 0.0833333 in step_12 · NaN in 2 steps"
    assert accuracy == "last 1.2 · best 1.2 in step_12 · missing in 9 steps"
    drawn = page.pixels("#found .plots div:nth-child(1) canvas")
    assert [179, 38, 30, 255] in drawn, "NaN is a red cross"
    assert [0, 114, 178, 255] in drawn
    page.keys(canvases, "\ue010")  # End
    assert page.texts("#found .readout")[0] == "step_12 · loss 0.0833333"
    page.keys(canvases, "\ue012" * 5)  # ArrowLeft
    assert page.texts("#found .readout")[0] == "step_7 · loss NaN"
    page.keys("#found .plots > div:nth-child(2) canvas", "\ue010\ue012")
    assert page.texts("#found .readout")[1] == "step_8 · eval/accuracy 0.8", "the next that has one"
    assert "NaN" in column(page, "Steps", page.texts("thead th").index("loss") + 1)


def test_what_a_save_cost_is_said(page: Browser, small: Path, large: Path) -> None:
    page.open(small)
    tiles = dict(text.split("\n", 1) for text in page.texts(".tile"))
    (share,) = [number for number, what in tiles.items() if what.startswith("of the loop")]
    assert re.fullmatch(r"\d+(\.\d+)? %", share)
    assert any(what.startswith("on disk; ") for what in tiles.values())
    assert "written, until all processes were done" in tiles.values()
    heads = page.texts("thead")[0].split("\n")[0].split("\t")
    assert {"rate", "wrote", "committed", "loop waited"} <= set(heads)
    assert page.run("document.body.innerText.match(/committed/gi).length") == 1
    page.open(large)
    assert page.run("document.body.innerText.match(/committed/gi)") is None, "nobody told"
    tiles = dict(text.split("\n", 1) for text in page.texts(".tile"))
    (share,) = [number for number, what in tiles.items() if what.startswith("of the loop")]
    assert share.startswith("≥ "), "steps may have been removed"


_TOLD = """(() => {
  const found = [], draw = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = (text) => found.push(text);
  document.getElementById("theme").click();
  CanvasRenderingContext2D.prototype.fillText = draw;
  return found;
})()"""


def test_areas_of_arrays_are_named_by_their_paths(
    page: Browser, small: Path, large: Path, tmp_path: Path
) -> None:
    page.open(small)
    assert {f"layers/{n}" for n in range(12)} <= set(page.run(_TOLD))
    tree = {str(n): {"attention": {"q": np.ones(900)}} for n in range(40)}
    unickpt.save(tmp_path / "step", {"decoder": {"layers": tree}})
    for width, lines in [(1200, {"decoder/layers/", "39/attention/q"}), (500, {"…/q"})]:
        page.width(width)
        page.open(unickpt.report(tmp_path / "step", tmp_path / "report.html"))
        told = set(page.run(_TOLD))
        assert lines <= told, width
    page.open(large)
    canvas = in_section(page, "Arrays", ".picture canvas")
    page.keys(canvas, "\ue011")  # Home
    name = page.texts("#found .readout")[0].split(" · ")[0]
    assert re.fullmatch(r"(mu|nu)/layers/\d+/\w+/\w+", name), "the whole path, by the keyboard"


_SCROLLS = """[...document.querySelectorAll(".scroll")].map((box) => [
  box.scrollWidth > box.clientWidth + 1, !box.previousSibling.hidden])"""


@pytest.mark.parametrize("width", [400, 1280])
def test_a_table_fits_or_says_that_it_scrolls(
    page: Browser, small: Path, large: Path, width: int
) -> None:
    page.width(width)
    for file in (small, large):
        page.open(file)
        page.run("new Promise((done) => setTimeout(done, 100))")
        found = page.run(_SCROLLS)
        assert found
        assert all(does_scroll == says for does_scroll, says in found), found
    assert next(does_scroll for does_scroll, _ in found) == (width == 400), "the steps fit in 1280"
    box = in_section(page, "Processes, the slowest first", ".scroll")
    hint = page.texts("#found .scrolls")[0]
    assert re.fullmatch(r"\d+ more columns to the right: scroll the table, or .* keys →", hint)
    arrow_right = "\ue014"
    press_until(page, box, arrow_right, "document.querySelector('#found .scroll').scrollLeft > 0")
    first = "document.querySelector('#found tbody td').getBoundingClientRect().left"
    start = "document.querySelector('#found .scroll').getBoundingClientRect().left"
    assert abs(page.run(first) - page.run(start)) < 2, "the first column stays in sight"
    said = "document.querySelector('#found .scrolls').innerText"
    at_the_end = f"/^← \\d+ columns to the left$/.test({said})"
    press_until(page, box, arrow_right, at_the_end)
