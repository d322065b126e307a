"""How often a run went on from steps with quantised arrays; stored with each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from unickpt.format import ocdbt_reader
from unickpt.format.index import RESERVED
from unickpt.quantized.restores import chosen
from unickpt.saving.options import SaveOptions
from unickpt.storage import paths

_KEY = "restores"


class RestoreCount:
    """Counts the restores of a run whose options ask for it, with `Restores`.

    Arguments:
        options: of the saves.
    """

    def __init__(self, options: SaveOptions) -> None:
        self._options, self.happened = options, 0

    def loaded(self, step: int, path: str) -> None:
        """Records that the run goes on from a step.

        Arguments:
            step: its number.
            path: of the step, whose metadata says how often that had happened before.
        """
        reader = ocdbt_reader.open(paths.resolve(path))
        if reader is None:
            return
        own = reader.index.metadata.get(RESERVED)
        before = own.get(_KEY) if isinstance(own, Mapping) else None
        is_quantized = any(entry.quantized for entry in reader.index.arrays.values())
        self.happened = (before if type(before) is int else 0) + is_quantized

    def options(self) -> SaveOptions:
        """Of the next save."""
        return replace(self._options, quantize=chosen(self._options.quantize, self.happened))

    def counting(self, metadata: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """A function that makes a step's metadata, and puts the count into it.

        Arguments:
            metadata: makes them; see `arguments.step_metadata`.
        """
        happened = self.happened

        def counted(*arguments: Any) -> dict[str, Any]:
            found = metadata(*arguments)
            return {**found, RESERVED: {**found[RESERVED], _KEY: happened}}

        return counted
