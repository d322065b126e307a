"""What of our docstrings mkdocstrings' parser takes for something else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

DOCS = Path(__file__).parents[1]
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
PAGE = re.compile(r"(?<![`\w/])docs/([\w/-]+)\.md")
# `path, tree: as for ...` over two lines.
NAMES = re.compile(r"^( +(?:\w+, )+\w*,)\n +((?:\w+, )*\w+:)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Makes of our docstrings what the parser expects.

    `Example:` is a section of code, as `Examples:` is; names of arguments may take two lines; pages
    that are named are links.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
            text = PAGE.sub(_linked, text)
            obj.docstring.value = NAMES.sub(r"\1 \2", text)


def _linked(match: re.Match[str]) -> str:
    """A page that a docstring names, as a link from a page in api/."""
    exists = (DOCS / f"{match[1]}.md").exists()
    return f"[{match[0]}](../{match[1]}.md)" if exists else match[0]
