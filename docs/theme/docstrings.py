"""What of our docstrings mkdocstrings' parser takes for something else."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
# `path, tree: as for ...` over two lines.
NAMES = re.compile(r"^( +(?:\w+, )+\w*,)\n +((?:\w+, )*\w+:)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """`Example:` is a section of code, as `Examples:` is; names of arguments may take two lines."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = NAMES.sub(r"\1 \2", text)
