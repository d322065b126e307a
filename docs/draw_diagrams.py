"""Draws the diagrams of the pages, docs/plots/{overview,save_and_load,checkpoint_folder}.svg:

    python docs/draw_diagrams.py

A text that could leave its box, or touch another text, is an error. A test compares the files with
what this draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

PLOTS = Path(__file__).resolve().parent / "plots"

INK, GREY, LINE, INDIGO, GREEN = "#18181b", "#52525b", "#3f3f46", "#3730a3", "#166534"
FONTS = "Helvetica, Arial, sans-serif"
MONO_FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Font(NamedTuple):
    """How a text looks."""

    size: float = 11
    color: str = INK
    bold: bool = False
    mono: bool = False

    def width(self, text: str) -> float:
        """The width of a text in DejaVu, the widest of the fonts that browsers may choose."""
        if self.mono:
            return 0.603 * self.size * len(text)
        widths = (next((w for letters, w in WIDTHS if c in letters), 0.64) for c in text)
        return sum(widths) * self.size * (1.12 if self.bold else 1)


WIDTHS = (
    ("ijlI'|", 0.3),
    (" ,.:;/", 0.34),
    ("ftr()[]-J", 0.41),
    ("scz", 0.55),
    ("<>×", 0.84),
    ('ABCDEFGHKLNOPQRSTUVXYZ"', 0.75),
    ("mwMW", 0.98),
)
"""Of letters, in shares of the font's size; 0.64 of all others."""


class Style(NamedTuple):
    """How a box looks."""

    fill: str
    stroke: str
    dash: str = ""


PROCESS = Style("#e0e7ff", INDIGO)
COORDINATOR = Style("#a5b4fc", INDIGO)
WAITING = Style("#f5f5ff", "#a5b4fc", "4 3")
LANE = Style("#fafafa", "#e4e4e7")
FOLDER = Style("#fafafa", "#a1a1aa")
COMMIT = Style("#86efac", GREEN)
STAYS = Style("#e4e4e7", "#71717a")
OPTIONAL = Style("#fed7aa", "#9a3412")
PASSING = Style("#ffffff", "#71717a", "4 3")
STRIPE = Style("#f4f4f5", "none")
LOADING = Style("#dcfce7", GREEN)

NAME, FILE, SENTENCE = Font(11, bold=True), Font(10, mono=True), Font(10, GREY)
HEADING, NOTE = Font(14, bold=True), Font(11, GREY)


class Rect(NamedTuple):
    """A rectangle."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def center(self) -> float:
        return self.left + self.width / 2

    @property
    def middle(self) -> float:
        return self.top + self.height / 2

    def encloses(self, other: Rect) -> bool:
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )

    def meets(self, other: Rect) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


class Picture:
    """An SVG on a white card, which can be read on light and on dark pages.

    Arguments:
        width, height: its size.
        title: what it shows, for readers who do not see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self._card = Rect(0.5, 0.5, width - 1, height - 1)
        self._texts: list[tuple[Rect, str]] = []
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'font-family="{FONTS}" role="img" aria-labelledby="title">'
            f'<title id="title">{escape(title)}</title>',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{LINE}"/>'
            "</marker></defs>",
        ]
        self.box(self._card, Style("#ffffff", "#d4d4d8"), radius=8)

    def text(
        self,
        x: float,
        baseline: float,
        text: str,
        font: Font = SENTENCE,
        anchor: str = "start",
        inside: Rect | None = None,
    ) -> None:
        """Draws one line of text.

        Arguments:
            x, baseline: where it begins, or has its middle or end.
            text, font: what is drawn.
            anchor: "start", "middle" or "end".
            inside: what it must not leave; by default the card.

        Raises:
            ValueError: it leaves that, or touches another text.
        """
        width = font.width(text)
        left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        area = Rect(left, baseline - 0.78 * font.size, width, font.size)
        if not (inside or self._card).encloses(area):
            raise ValueError(f"{text!r} leaves its box: {area} in {inside or self._card}")
        touched = [other for rect, other in self._texts if rect.meets(area)]
        if touched:
            raise ValueError(f"{text!r} touches {touched[0]!r}")
        self._texts.append((area, text))
        weight = ' font-weight="bold"' if font.bold else ""
        family = f' font-family="{MONO_FONTS}"' if font.mono else ""
        self._lines.append(
            f'<text x="{x:g}" y="{baseline:g}" font-size="{font.size:g}" text-anchor="{anchor}"'
            f'{weight}{family} fill="{font.color}">{escape(text, quote=False)}</text>'
        )

    def paragraph(
        self, x: float, baseline: float, width: float, text: str, font: Font = SENTENCE
    ) -> None:
        """Draws a text in lines of at most a width; `baseline` is that of the first line."""
        for number, line in enumerate(wrap(text, width, font)):
            self.text(x, baseline + number * line_height(font), line, font)

    def box(
        self,
        rect: Rect,
        style: Style,
        lines: Sequence[str] = (),
        font: Font = NAME,
        radius: float = 3,
    ) -> None:
        """Draws a rectangle with lines of text in its middle."""
        dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
        self._lines.append(
            f'<rect x="{rect.left:g}" y="{rect.top:g}" width="{rect.width:g}" '
            f'height="{rect.height:g}" rx="{radius:g}" fill="{style.fill}" '
            f'stroke="{style.stroke}"{dash}/>'
        )
        first = rect.middle + 0.36 * font.size - (len(lines) - 1) * line_height(font) / 2
        for number, line in enumerate(lines):
            baseline = first + number * line_height(font)
            self.text(rect.center, baseline, line, font, "middle", rect)

    def chip(self, left: float, middle: float, name: str, style: Style) -> Rect:
        """Draws a file or a folder by its name; returns its box."""
        rect = Rect(left, middle - 10, round(FILE.width(name) + 14), 20)
        self.box(rect, style, [name], FILE)
        return rect

    def line(
        self,
        *points: tuple[float, float],
        head: bool = False,
        color: str = LINE,
        dash: str = "",
        width: float = 1.5,
    ) -> None:
        """Draws a line through points, as an arrow with `head`."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#head)"' if head else ""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._lines.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" '
            f'stroke-width="{width:g}"{dashes}{end}/>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draws an arrow through points."""
        self.line(*points, head=True)

    def svg(self) -> str:
        """The picture as a file."""
        return "\n".join([*self._lines, "</svg>", ""])


def line_height(font: Font) -> float:
    return font.size * 1.3


def wrap(text: str, width: float, font: Font) -> list[str]:
    """A text in lines of at most a width."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and font.width(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


# --- a save and a load ----------------------------------------------------------------------------


class Stage(NamedTuple):
    """A stage of a save or a load."""

    name: str
    text: str


ALL_PROCESSES = (
    Stage("describe", "The tree becomes named leaves. For each, this process lists what it holds."),
    Stage("plan", "Which chunks this process writes. Replicas are shared out, without messages."),
    Stage("stage", "Only save_async: a snapshot of the state. staging= says how it is kept."),
    Stage("write", "Threads encode, hash and write chunks, each process to its own files."),
    Stage("record", "When the files are durable: the digests, and where each chunk is."),
)
COORDINATOR_ALONE = (
    Stage("merge", "All records have come. Every element must have exactly one source."),
    Stage("build root", "A B-tree of all keys: the index, the digests, the place of each chunk."),
    Stage("commit", "One write replaces the manifest, if it is still the one that all found."),
    Stage("remove", "The records go, and all earlier attempts."),
)
LOAD = (
    Stage("open", "The newest manifest is pinned."),
    Stage("index", "Names, shapes, layouts, digests. All of it is checked."),
    Stage(
        "compare",
        "Stored leaves with those of like=, by rules if given. All differences are one error.",
    ),
    Stage("plan", "Requested boxes become chunks: only those that this process needs."),
    Stage(
        "read, verify",
        "Each chunk once, by threads, into place if possible. Its digest must match.",
    ),
    Stage("place", "Casts and arithmetic of rules, then arrays on any mesh, in any framework."),
)

WIDTH = 820
ROW, FIRST_ROW, BREAK = 54, 76, 30
STAGE_INDEX = {s.name: i for i, s in enumerate((*ALL_PROCESSES, *COORDINATOR_ALONE))}
LANES = {"process 2": 304, "process 1": 386, "process 0": 468}
LANE_WIDTH = 76
LANES_END = 544
FILES_LEFT = 604


def row_top(stage: str) -> float:
    """Where the row of a stage of a save begins."""
    number = STAGE_INDEX[stage]
    breaks = (number >= STAGE_INDEX["write"]) + (number >= STAGE_INDEX["remove"])
    return FIRST_ROW + number * ROW + breaks * BREAK


def lane_box(lane: str, stage: str) -> Rect:
    """The box of a stage of a process."""
    return Rect(LANES[lane] + 4, row_top(stage) + 4, LANE_WIDTH - 8, 30)


def draw_save(picture: Picture) -> float:
    """Draws a save; returns where it ends."""
    end = row_top("remove") + ROW - 6
    picture.text(20, 32, "A save", HEADING)
    picture.text(20, 50, "from top to bottom", NOTE)
    for lane, left in LANES.items():
        picture.box(Rect(left, 20, LANE_WIDTH, end - 20), LANE)
        picture.text(left + LANE_WIDTH / 2, 38, lane, NAME, "middle")
    picture.text(LANES["process 0"] + LANE_WIDTH / 2, 53, "coordinator", Font(9.5, GREY), "middle")
    for stage in (*ALL_PROCESSES, *COORDINATOR_ALONE):
        picture.text(20, row_top(stage.name) + 14, stage.name, NAME)
        picture.paragraph(20, row_top(stage.name) + 28, 274, stage.text)
    for lane in LANES:
        style = COORDINATOR if lane == "process 0" else PROCESS
        for stage in ALL_PROCESSES:
            picture.box(lane_box(lane, stage.name), style, [stage.name])
    for stage in COORDINATOR_ALONE:
        style = COMMIT if stage.name == "commit" else COORDINATOR
        picture.box(lane_box("process 0", stage.name), style, [stage.name])
    for lane in ("process 2", "process 1"):
        first = lane_box(lane, "merge")
        height = lane_box(lane, "commit").bottom - first.top
        waiting = Rect(first.left, first.top, first.width, height)
        picture.box(waiting, WAITING, ["wait", "for the", "commit"], NOTE)
        picture.box(lane_box(lane, "remove"), PROCESS, ["return"])
    draw_saved_files(picture)
    returned, committed = row_top("write") - BREAK / 2, row_top("remove") - BREAK / 2
    picture.text(
        20, returned + 4, "save_async returns: training continues", Font(11, INDIGO, bold=True)
    )
    picture.line((296, returned), (LANES_END + 6, returned), color=INDIGO, dash="5 3")
    picture.text(
        20, committed + 4, "the checkpoint exists from here on", Font(11, GREEN, bold=True)
    )
    picture.line((296, committed), (WIDTH - 12, committed), color=GREEN, dash="5 3")
    return end


def draw_saved_files(picture: Picture) -> None:
    """Draws what a save writes into the checkpoint's folder, and when."""
    top, bottom = row_top("write") - 30, row_top("remove") + ROW - 6
    picture.box(Rect(FILES_LEFT - 24, top, WIDTH - 12 - FILES_LEFT + 24, bottom - top), FOLDER)
    picture.text(FILES_LEFT - 16, top + 14, "step_100/", FILE)
    attempt_top, attempt_end = row_top("write") - 8, row_top("commit") - 4
    attempt = Rect(
        FILES_LEFT - 12, attempt_top, WIDTH - 20 - FILES_LEFT + 12, attempt_end - attempt_top
    )
    picture.box(attempt, Style("#ffffff", "#a1a1aa"))
    picture.text(FILES_LEFT, attempt_top + 14, "processes/<attempt>/", FILE)

    bus = row_top("write") + 41
    left: float = FILES_LEFT
    for process in (2, 1, 0):
        left = picture.chip(left, bus, f"{process:05d}/d/", STAYS).right + 2
    record_bus = row_top("record") + 41
    records = picture.chip(FILES_LEFT, record_bus, "records/<p>.ok", PASSING)
    for stage, y in (("write", bus), ("record", record_bus)):
        for lane in LANES:
            box = lane_box(lane, stage)
            picture.line((box.center, box.bottom), (box.center, y))
        picture.arrow((lane_box("process 2", stage).center, y), (FILES_LEFT - 2, y))
    middle = {stage.name: lane_box("process 0", stage.name).middle for stage in COORDINATOR_ALONE}
    picture.arrow(
        (records.center, records.bottom),
        (records.center, middle["merge"]),
        (LANES_END, middle["merge"]),
    )
    root = picture.chip(FILES_LEFT, middle["build root"], "root/", STAYS)
    picture.chip(root.right + 6, middle["build root"], "notes/commit", STAYS)
    picture.chip(FILES_LEFT, middle["commit"], "manifest.ocdbt", COMMIT)
    gone = picture.chip(FILES_LEFT, middle["remove"], "records/", PASSING)
    picture.chip(gone.right + 6, middle["remove"], "earlier attempts", PASSING)
    for name in ("build root", "commit", "remove"):
        picture.arrow((LANES_END - 4, middle[name]), (FILES_LEFT - 2, middle[name]))


def draw_load(picture: Picture, top: float) -> None:
    """Draws a load below a save."""
    picture.text(20, top + 18, "A load", HEADING)
    picture.text(78, top + 18, "in every process, from left to right", NOTE)
    width, gap, height = 118, 14.4, 98
    boxes = {}
    for number, stage in enumerate(LOAD):
        box = boxes[stage.name] = Rect(20 + number * (width + gap), top + 32, width, height)
        picture.box(box, LOADING)
        picture.text(box.center, box.top + 17, stage.name, NAME, "middle", box)
        for line_number, line in enumerate(wrap(stage.text, width - 10, SENTENCE)):
            baseline = box.top + 34 + line_number * line_height(SENTENCE)
            picture.text(box.center, baseline, line, SENTENCE, "middle", box)
        if number:
            picture.arrow((box.left - gap, box.middle), (box.left - 1, box.middle))
    files = {"open": "manifest.ocdbt", "index": "root/", "read, verify": "<p>/d/"}
    for stage_name, name in files.items():
        box = boxes[stage_name]
        width_of_chip = round(FILE.width(name) + 14)
        style = COMMIT if stage_name == "open" else STAYS
        chip = picture.chip(box.center - width_of_chip / 2, box.bottom + 36, name, style)
        picture.arrow((chip.center, chip.top), (chip.center, box.bottom + 2))
    picture.text(
        20,
        top + 196,
        "A process reads alone, with its node, or with all (exchange=True). "
        "If a save replaces the checkpoint meanwhile, the load starts again.",
    )


def save_and_load() -> str:
    """The way of a save, and of a load."""
    end = row_top("remove") + ROW - 6
    picture = Picture(
        WIDTH,
        end + 226,
        "In a save, every process describes, plans, stages, writes its data files and publishes a "
        "record; process 0 merges the records, builds the root and replaces the manifest, which is "
        "the commit. In a load, each process opens the manifest, reads the index, compares it with "
        "like, plans chunks, reads and verifies them, and places them on its mesh",
    )
    draw_load(picture, draw_save(picture) + 18)
    return picture.svg()


# --- the folder of a checkpoint -------------------------------------------------------------------


class Entry(NamedTuple):
    """Files or folders of the picture of a checkpoint's folder.

    Arguments:
        depth: how many folders of the picture they are in.
        names: of them, as docs/format.md writes them.
        style: how long they stay.
        text: what they are for.
    """

    depth: int
    names: tuple[str, ...]
    style: Style
    text: str


CHECKPOINT = (
    Entry(0, ("step_<n>/",), STAYS, "A checkpoint. It exists if and only if it has a manifest."),
    Entry(
        1,
        ("manifest.ocdbt",),
        COMMIT,
        "The commit point. Readers open only this file by name.",
    ),
    Entry(
        1,
        ("manifest.ocdbt.__lock",),
        PASSING,
        "On a local file system, locked while the manifest is replaced.",
    ),
    Entry(1, ("processes/",), STAYS, "All else is here, in a folder for each attempt."),
    Entry(
        2,
        ("<attempt>/",),
        STAYS,
        "One save. Its name is new, and all of its processes agree on it.",
    ),
    Entry(
        3,
        ("<p>/d/<name>",),
        STAYS,
        "Data files of process p: chunks and per-process values, one after the other.",
    ),
    Entry(
        3,
        ("<p>/reused/",),
        OPTIONAL,
        "If it reuses chunks: data files of an earlier checkpoint, as hard links.",
    ),
    Entry(3, ("root/",), STAYS, "B-tree nodes: the index, the digests, and where each chunk is."),
    Entry(
        3,
        ("notes/commit",),
        STAYS,
        "The digest of the new manifest, and the attempts that it replaces.",
    ),
    Entry(
        3,
        ("notes/lineage", "notes/copied"),
        OPTIONAL,
        "With local=: what this step supersedes and follows, and that it was copied.",
    ),
    Entry(
        3,
        ("borrowers/",),
        OPTIONAL,
        "If it is a base: the names of checkpoints that borrow from it.",
    ),
    Entry(3, ("borrowed/",), OPTIONAL, "In a copy: the chunks that the original borrowed."),
    Entry(
        3,
        ("notes/request",),
        OPTIONAL,
        "Chunks that their planned writers lack: process 0 requests them from others.",
    ),
    Entry(
        3,
        ("records/<p>.ok", "records/<p>.more"),
        PASSING,
        "From several processes: what each wrote, and what it wrote on request.",
    ),
    Entry(
        3, ("records/<p>.at", "records/late"), PASSING, "How far each process of a slow save is."
    ),
    Entry(
        3,
        ("notes/error-<p>", "notes/left-<p>-<n>"),
        PASSING,
        "A process gave up, and no longer reads or writes here.",
    ),
    Entry(
        2,
        ("earlier attempts",),
        PASSING,
        "Replaced or interrupted saves: the next commit removes them.",
    ),
    Entry(
        1,
        ("retired/<its xxh3 as hex>/manifest",),
        OPTIONAL,
        "The manifest of a removed checkpoint that still is a base of others.",
    ),
    Entry(
        0,
        (".unickpt.lock",),
        OPTIONAL,
        "Beside the steps of a Checkpointer: the lease. Only its holder removes steps.",
    ),
)
LEGEND = (
    (STAYS, "as long as the checkpoint"),
    (OPTIONAL, "only in some cases"),
    (PASSING, "only during a save, or after it failed"),
)


def checkpoint_folder() -> str:
    """The files of a checkpoint."""
    row, top, step, sentences = 30, 48, 22, 372
    picture = Picture(
        WIDTH,
        top + len(CHECKPOINT) * row + 8,
        "The folder of a checkpoint as a tree, with a sentence for each file: the manifest, and "
        "for each attempt the data files of the processes, the root, notes and records",
    )
    left = 20.0
    for style, text in LEGEND:
        picture.box(Rect(left, 21, 24, 14), style)
        picture.text(left + 31, 32, text, NOTE)
        left += 31 + NOTE.width(text) + 26
    parents: dict[int, float] = {}  # where the line down from a folder has got to
    for number, entry in enumerate(CHECKPOINT):
        middle = top + number * row + row / 2
        if number % 2 == 0:
            picture.box(Rect(8, middle - row / 2, WIDTH - 16, row), STRIPE)
        left = 20.0 + entry.depth * step
        if entry.depth:
            stem = left - step + 10
            picture.line(
                (stem, parents[entry.depth]), (stem, middle), (left, middle), color="#a1a1aa"
            )
            parents[entry.depth] = middle
        for name in entry.names:
            chip = picture.chip(left, middle, name, entry.style)
            left = chip.right + 6
        if left > sentences:
            raise ValueError(f"{entry.names} reach into the sentences")
        parents[entry.depth + 1] = middle + 10
        lines = wrap(entry.text, WIDTH - sentences - 16, SENTENCE)
        baseline = middle + 3.6 - (len(lines) - 1) * line_height(SENTENCE) / 2
        picture.paragraph(sentences, baseline, WIDTH - sentences - 16, entry.text)
    return picture.svg()


# --- the overview ---------------------------------------------------------------------------------


def overview() -> str:
    """One job saves, any other loads."""
    picture = Picture(
        760,
        300,
        "A JAX job of eight devices saves an array into one checkpoint, from which PyTorch ranks, "
        "JAX on another mesh and a laptop each load the part that they ask for",
    )
    columns = (
        (110, "JAX saves", "a mesh of 2 × 4 devices", ("each process writes", "its own part")),
        (
            380,
            "one checkpoint",
            "run/step_100",
            ("Zarr chunks, each with a digest;", "appears atomically, or not at all"),
        ),
        (640, "anyone loads", "", ()),
    )
    for x, heading, subtitle, captions in columns:
        picture.text(x, 34, heading, HEADING, "middle")
        picture.text(x, 52, subtitle, Font(11), "middle")
        for number, caption in enumerate(captions):
            picture.text(x, 212 + 15 * number, caption, Font(11), "middle")
    shades = ("#c7d2fe", "#a5b4fc", "#818cf8", "#6366f1")
    for row, colors in enumerate((shades, shades[::-1])):
        for column, fill in enumerate(colors):
            picture.box(Rect(38 + 36 * column, 66 + 62 * row, 36, 62), Style(fill, INDIGO))
    for number in range(16):
        row, column = divmod(number, 4)
        picture.box(Rect(316 + 32 * column, 66 + 31 * row, 32, 31), STAYS)
    draw_loads(picture)
    picture.arrow((194, 128), (304, 128))
    for start, end in ((110, 96), (130, 172), (150, 240)):
        picture.arrow((456, start), (576, end))
    picture.text(
        380,
        280,
        "Each reads only the chunks that it needs, each chunk checked; rules map names and axes "
        "where the two sides differ.",
        NOTE,
        "middle",
    )
    return picture.svg()


def draw_loads(picture: Picture) -> None:
    """Draws three programs that load."""
    picture.text(588, 66, "PyTorch, 2 ranks", Font(11))
    for rank, fill in enumerate(("#fed7aa", "#fdba74")):
        rect = Rect(588 + 52 * rank, 74, 52, 44)
        picture.box(rect, Style(fill, "#9a3412"), [f"rank {rank}"], Font(10, "#431407"))
    picture.text(588, 142, "JAX, a mesh of 3 devices", Font(11))
    for row, fill in enumerate(("#bbf7d0", "#86efac", "#4ade80")):
        picture.box(Rect(588, 150 + 15 * row, 104, 15), Style(fill, GREEN))
    picture.text(588, 219, "one slice, no framework", Font(11))
    slice_style = Style("#f4f4f5", "#71717a")
    picture.box(Rect(588, 227, 124, 30), slice_style, ['open(path)["w"][:2]'], Font(10))


PICTURES = {
    "overview": overview,
    "save_and_load": save_and_load,
    "checkpoint_folder": checkpoint_folder,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (PLOTS / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
