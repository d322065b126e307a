"""Prints every module with what it is for: `make modules`.

The first line of a module's docstring says it, so that no page has to be kept up to date.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def wings() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each folder with code, and its modules with the first lines of their docstrings."""
    for top in ("unickpt", "adapters", "backends", "integrations", "plugins"):
        for folder, below, files in os.walk(ROOT / top):  # which follows no links
            below.sort()
            modules = [
                (file.removesuffix(".py"), first_line(Path(folder) / file))
                for file in sorted(files)
                if file.endswith(".py")
            ]
            if modules:
                yield str(Path(folder).relative_to(ROOT)), modules


def first_line(module: Path) -> str:
    """What a module is for: the first paragraph of its docstring."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def main() -> None:
    for wing, modules in wings():
        print(f"## {wing}\n")
        for name, text in modules:
            print(f"- `{name}`: {text}" if name != "__init__" else f"{text}\n")
        print()


if __name__ == "__main__":
    main()
