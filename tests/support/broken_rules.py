"""Presets with a mistake in one statement."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from pathlib import Path

from unickpt import Rules
from unickpt.rules.rule_files import preset_text

Texts = dict[str, list[str]]
"""The statements of a preset and of what it includes, by name."""


def each_broken(texts: Texts, without: Container[str] = ()) -> Iterator[tuple[Texts, str]]:
    """Each way to get one statement wrong, and what it is.

    Arguments:
        texts: as `files` returns them.
        without: names of presets that stay as they are.
    """
    for name, lines in texts.items():
        if name in without:
            continue
        for number, line in enumerate(lines):
            if line.startswith(("convention", "where")):
                continue
            for wrong in dict.fromkeys(broken(line)):
                if wrong != line:
                    changed = [*lines[:number], wrong, *lines[number + 1 :]]
                    yield {**texts, name: changed}, f"{name}: {line!r} as {wrong!r}"


def broken(line: str) -> Iterator[str]:
    """Ways to get a statement wrong."""
    yield ""
    left, arrow, right = line.partition("<->")
    if line.startswith("include"):
        return
    axes = lambda found: " ".join(reversed(re.findall(r"\(.*?\)|\S+", found[0])))  # noqa: E731
    yield left + arrow + re.sub(r"(?<=\[)[^]]*", axes, right)
    within = lambda found: f"({' '.join(reversed(found[1].split(' ')))})"  # noqa: E731
    yield left + arrow + re.sub(r"\(([\w ]+)\)", within, right)
    yield re.sub(r"\] [-+*/] [\w.*]+", "]", line)
    yield left + arrow + re.sub(r"\{(\w+)\|(\w+)\}", r"{\2|\1}", right)


def statements(name: str) -> list[str]:
    """The statements of a preset, each on a line."""
    text = preset_text(name)
    joined = re.sub(r"\n\s+(?=<->|,)|(?<=[,=])\n\s+|(?<=<->)\n\s+", " ", text)
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


def files(name: str) -> dict[str, list[str]]:
    """A preset and what it includes."""
    found = {name: statements(name)}
    for line in found[name]:
        if line.startswith("include"):
            found |= files(line.split()[1])
    return found


def load(texts: dict[str, list[str]], name: str, folder: Path, sizes: dict[str, int]) -> Rules:
    for each, lines in texts.items():
        quoted = [re.sub(r"^include (\S+)", r'include "\1.rules"', line) for line in lines]
        (folder / f"{each}.rules").write_text("\n".join(quoted))
    return Rules.load(str(folder / f"{name}.rules"), sizes=sizes)
