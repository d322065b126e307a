"""Draws docs/plots/report.png and report_mesh.png, pictures of the page of `unickpt report`, of a
run by 4,096 processes with made-up times:

    python docs/draw_report.py

It needs Chromium with ChromeDriver, and pillow.
"""

from __future__ import annotations

import io
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from PIL import Image  # noqa: E402
from support.browser import Browser, browser  # noqa: E402
from support.report_cases import forge_step, large_timing  # noqa: E402

import unickpt  # noqa: E402
from unickpt.types import Mesh  # noqa: E402

PROCESSES, SLOW = 4096, range(296, 304)
STEPS, ARRAYS = range(200, 3200, 200), 432
WIDTH = 1084


def write_run(run: Path) -> None:
    """A run whose newest steps have a slow host."""
    mesh = Mesh(("pp", "dp", "tp"), (8, 64, 8), tuple(range(PROCESSES)))
    run.mkdir()
    for step in STEPS:
        timing = large_timing(PROCESSES, SLOW if step > 2400 else range(0), step)
        wave = math.sin(step) / 12
        metrics = {
            "loss": 1.7 + 6 * math.exp(-step / 700) + wave,
            "eval/accuracy": 0.62 - 0.6 * math.exp(-step / 1200) + wave / 9,
        }
        path = run / f"step_{step}"
        forge_step(path, timing, ARRAYS, mesh, step=step // 20, metrics=metrics)


def crop(shot: Image.Image, page: Browser, first: str, last: str, out: Path) -> None:
    """Writes the part of the page from an element to another one."""
    edges: list[float] = page.run(
        """[document.querySelector(a[0]).getBoundingClientRect().top,
            document.querySelector(a[1]).getBoundingClientRect().bottom]""",
        first,
        last,
    )
    top, bottom = (round(edge) for edge in edges)
    part = shot.crop((0, max(0, top - 16), WIDTH, bottom + 16))
    part.quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile") as page:
        run = Path(folder) / "llama"
        write_run(run)
        file = unickpt.report(run, Path(folder) / "report.html")
        page.width(WIDTH)
        page.prefers("light")
        page.open(file)
        # The folder's name is no business of the picture's, and rows of forged steps are alike.
        page.run("document.querySelector('.path').remove()")
        page.run("document.querySelectorAll('.tile')[1].remove()")  # there are no data on the disk
        page.run("[...document.querySelectorAll('tbody tr')].slice(6, 15).map((r) => r.remove())")
        title = "(n) => [...document.querySelectorAll('h2')].find((h) => h.innerText === n)"
        for name, mark in [("Steps", "steps"), ("What each process did, and when", "timeline")]:
            page.run(f"(({title})(a[0]).parentNode.id = a[1])", name, mark)
        page.run(f"(({title})('Processes over the mesh').parentNode.id = 'mesh')")
        high: Any = page.run("document.documentElement.scrollHeight")
        page.width(WIDTH, int(high))
        page.run("new Promise((done) => setTimeout(done, 500))")
        page.screenshot(Path(folder) / "whole.png")
        shot = Image.open(io.BytesIO((Path(folder) / "whole.png").read_bytes())).convert("RGB")
        crop(shot, page, "header", "#steps", HERE / "plots" / "report.png")
        crop(shot, page, "#timeline", "#mesh", HERE / "plots" / "report_mesh.png")


if __name__ == "__main__":
    main()
