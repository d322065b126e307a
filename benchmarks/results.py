"""Runs the benchmarks one after another, and writes benchmarks/RESULTS.md and docs/plots/.

    python benchmarks/results.py                    # everything, as `make bench`
    python benchmarks/results.py --only peers less  # only these; the others' results stay
    python benchmarks/results.py --quick            # few rounds, to see that everything runs

Needs `pip install 'unickpt[bench]'`. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contenders import CONTENDERS
from matplotlib import rc_context
from matplotlib.figure import Figure
from peers import OPERATIONS, SETS, TARGETS, UNVERIFIED, ArraySet, Sample, by_round, ratio

HERE = Path(__file__).resolve().parent
RESULTS, PLOTS = HERE / "RESULTS.md", HERE.parent / "docs" / "plots"
HEAD = (
    "# Results\n\nWritten by `make bench` (`benchmarks/results.py`): what each benchmark printed, "
    "with the command. `docs/benchmarks.md` explains the figures, and says why goals are missed.\n"
)
LIMITS = ("raw", "pieces")
"""Contenders that are no libraries, but show what the machine can do."""


@dataclass(frozen=True)
class Section:
    """A benchmark of the results.

    Arguments:
        title: of the section.
        command: the script and its arguments.
        quick: arguments that make it quick.
    """

    title: str
    command: tuple[str, ...]
    quick: tuple[str, ...]


SECTIONS = {
    "peers": Section(
        "Save and load, beside other libraries", ("peers.py", "--rounds", "5"), ("--rounds", "1")
    ),
    "limits": Section(
        "Where the time of a load goes",
        ("limits.py", "--rounds", "11"),
        ("--count", "4", "--rounds", "1"),
    ),
    "many": Section(
        "Many small arrays",
        ("many.py", "--counts", "64", "4000", "10000", "--rounds", "5"),
        ("--counts", "64", "--rounds", "1"),
    ),
    "ranks": Section(
        "Loads by several processes of a node",
        ("ranks.py", "--rounds", "5"),
        ("--mib", "64", "--rounds", "1"),
    ),
    "start": Section(
        "Importing, the first save and the first load",
        ("start.py", "--rounds", "9"),
        ("--rounds", "1"),
    ),
    "stall": Section(
        "How long a save stops a program",
        ("stall.py", "--part", "blocking", "--rounds", "5"),
        ("--rounds", "1"),
    ),
    "memory": Section("Memory at the peak", ("memory.py", "--gib", "2"), ("--gib", "0.25")),
    "foreign": Section(
        "What other libraries saved", ("foreign.py",), ("--mib", "64", "--rounds", "1")
    ),
    "less": Section("A job with frozen weights", ("less.py", "lora"), ("--rounds", "2")),
}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dir", default=".", help="where the benchmarks write (default: .)")
    options = parser.parse_args()
    texts = read_sections()
    for name in options.only:
        section = SECTIONS[name]
        command = [*section.command, *(section.quick if options.quick else ())]
        print(f"== {' '.join(command)}", flush=True)
        texts[name] = run(name, section.title, command, options.dir)
        write_sections(texts)


def read_sections() -> dict[str, str]:
    """The sections that the file has, by name."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    return dict(re.findall(r"<!-- (\w+) -->\n(.*?)<!-- end -->", text, re.DOTALL))


def write_sections(texts: Mapping[str, str]) -> None:
    """Writes the file anew."""
    there = [name for name in SECTIONS if name in texts]
    parts = [f"\n<!-- {name} -->\n{texts[name]}<!-- end -->\n" for name in there]
    RESULTS.write_text(HEAD + "".join(parts))


def run(name: str, title: str, command: Sequence[str], directory: str) -> str:
    """Runs a benchmark; returns its section."""
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / "samples.json"
        extra = ["--json", str(kept)] if name == "peers" else []
        found = subprocess.run(
            [sys.executable, str(HERE / command[0]), *command[1:], "--dir", directory, *extra],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1"},
        )
        table = comparison(json.loads(kept.read_text())) if kept.exists() else ""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    printed = "\n".join(line.rstrip() for line in found.stdout.strip().splitlines())
    failed = f"\nIt ended with exit code {found.returncode}.\n" if found.returncode else ""
    return (
        f"## {title}\n\n`python benchmarks/{' '.join(command)}`, {today}\n{failed}\n{table}"
        f"```text\n{printed}\n```\n"
    )


def comparison(results: Mapping[str, Any]) -> str:
    """The timings of `peers.py` beside the best library and the limits, and its goals."""
    samples = [Sample(**sample) for sample in results["samples"]]
    rows = ["| set | operation | contender | median | to the best other library | to the limit |"]
    rows.append("|---|---|---|---|---|---|")
    for array_set in SETS:
        plot(array_set, samples)
        rows += compared(array_set, samples)
    goals = ["| goal | wanted | measured |", "|---|---|---|"]
    for target in TARGETS:
        measured = ratio(samples, target, target.peer)
        if measured is not None:
            what = f"{target.set}, {target.operation}: {target.contender} / {target.peer}"
            reached = "" if measured >= target.at_least else ", **missed**"
            goals.append(f"| {what} | {target.at_least:.2f} | {measured:.2f}{reached} |")
    images = [f"![{s}](../docs/plots/peers_{s.name}.svg)" for s in SETS]
    return "\n".join([*rows, "", *goals, "", *images, "", ""])


def compared(array_set: ArraySet, samples: Sequence[Sample]) -> list[str]:
    """The rows of unickpt, for one set of arrays."""
    rows = []
    medians = {name: medians_of(array_set, samples, name) for name in CONTENDERS}
    for operation in OPERATIONS:
        theirs = {
            name: found.get(operation, found.get("load") if operation == UNVERIFIED else None)
            for name, found in medians.items()
            if not name.startswith("unickpt")
        }
        others = {n: s for n, s in theirs.items() if s is not None and n not in LIMITS}
        hashed = operation != UNVERIFIED
        limit = theirs.get("pieces" if hashed else "raw")
        for name, found in medians.items():
            if name.startswith("unickpt") and operation in found and others:
                best = min(others, key=lambda other: others[other])
                seconds = found[operation]
                of_limit = "" if limit is None else f"{limit / seconds:.2f}"
                of_best = f"{others[best] / seconds:.2f} ({best})"
                rows.append(
                    f"| {array_set.name} | {operation} | {name} | {seconds:.3f} s | {of_best} | "
                    f"{of_limit} |"
                )
    return rows


def medians_of(array_set: ArraySet, samples: Sequence[Sample], name: str) -> dict[str, float]:
    """The median seconds of one contender, by operation."""
    found = {each: by_round(samples, array_set.name, name, each) for each in OPERATIONS}
    return {each: statistics.median(s.values()) for each, s in found.items() if s}


def plot(array_set: ArraySet, samples: Sequence[Sample]) -> None:
    """Draws the medians of all contenders, with the range of their rounds."""
    PLOTS.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(14, 4), layout="constrained")
    axes = figure.subplots(1, len(OPERATIONS))
    for axis, operation in zip(axes, OPERATIONS, strict=True):
        found = {n: by_round(samples, array_set.name, n, operation) for n in CONTENDERS}
        rounds = {name: sorted(s.values()) for name, s in found.items() if s}
        names = sorted(rounds, key=lambda name: -statistics.median(rounds[name]))
        middle = [statistics.median(rounds[name]) for name in names]
        below = [m - rounds[name][0] for name, m in zip(names, middle, strict=True)]
        above = [rounds[name][-1] - m for name, m in zip(names, middle, strict=True)]
        colors = [
            "tab:blue" if n.startswith("unickpt") else "silver" if n in LIMITS else "tab:orange"
            for n in names
        ]
        axis.barh(names, middle, xerr=[below, above], color=colors, ecolor="dimgray")
        axis.set_title(operation)
        axis.set_xlabel("seconds")
    figure.suptitle(f"{array_set}: medians, with the range of the rounds")
    with rc_context({"svg.hashsalt": "unickpt"}):  # the same file for the same figures
        figure.savefig(PLOTS / f"peers_{array_set.name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
