"""Equinox 0.13.8: tests/test_serialisation.py, with `tree_serialise_leaves` and
`tree_deserialise_leaves` replaced by `save` and `load(..., static="stored")`.

Equinox writes a file; ours are folders, whose names are those of its files. A file that is opened
is one of its name, with a further suffix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILES = ("tests/test_serialisation.py",)
REASONS = {
    "*::test_helpful_errors": "compares the text of a RuntimeError; ours is LoadMismatch, which "
    "names the leaf, too",
    "*::test_custom_leaf_serialisation": "filter_spec=, a function that writes bytes into the one "
    "file; filter the tree instead",
}


def redirect() -> None:
    import equinox

    from unickpt.integrations import equinox as ours

    def save(path_or_file: Any, pytree: Any) -> None:
        ours.save(_path(path_or_file), pytree, overwrite=True)

    def load(path_or_file: Any, like: Any) -> Any:
        return ours.load(_path(path_or_file), like, static="stored")

    equinox.tree_serialise_leaves = save
    equinox.tree_deserialise_leaves = load


def _path(path_or_file: Any) -> Path:
    if hasattr(path_or_file, "name") and not isinstance(path_or_file, Path):
        return Path(f"{path_or_file.name}.unickpt")
    return Path(path_or_file).with_suffix(".eqx")
