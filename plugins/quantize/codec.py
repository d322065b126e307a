"""The codec of quantised arrays, and which arrays of a save it stores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unickpt.errors import UnsupportedLeaf
from unickpt.extend import (
    Array,
    ArrayEntry,
    NotDecodable,
    Run,
    RunFeature,
    SaveFeature,
    StoredChunk,
    quoted,
)
from unickpt.plugins.quantize import choice, codes, quantized_chunk
from unickpt.plugins.quantize.blocks import stored_bytes
from unickpt.plugins.quantize.choice import QuantizePatterns
from unickpt.plugins.quantize.restores import RestoreCount, Restores

NAME = "quantized"


@dataclass(frozen=True)
class Quantize(SaveFeature):
    """Stores arrays with fewer bits; `SaveOptions(quantize=patterns)` is short for it.

    Arguments:
        patterns: as `SaveOptions.quantize`.

    Raises:
        TypeError, ValueError: they are not a dict of patterns and codes.
    """

    patterns: QuantizePatterns = field(default_factory=dict)
    name = NAME

    def __post_init__(self) -> None:
        choice.check(self.patterns)

    # --- a feature of saves -----------------------------------------------------------------------

    def check(self, arrays: Iterable[str]) -> None:
        """Checks that every pattern matches an array."""
        try:
            choice.check_used(self.patterns, arrays)
        except ValueError as error:
            raise UnsupportedLeaf(str(error)) from None

    def in_run(self, run: Run) -> RunFeature | None:
        """Counts restores, if a pattern needs that."""
        counts = any(isinstance(code, Restores) for code in self.patterns.values())
        return RestoreCount(self.patterns, Quantize, NAME) if counts else None

    # --- a codec ----------------------------------------------------------------------------------

    def configure(self, entry: ArrayEntry) -> Mapping[str, Any] | None:
        """The codes of an array that a pattern matches."""
        chosen = choice.codes_for(self.patterns, entry)
        return None if chosen is None else {"codes": chosen}

    def encode(self, entry: ArrayEntry, chunk: Array) -> StoredChunk:
        """Quantises a chunk."""
        chosen = entry.settings["codes"]
        try:
            coded = quantized_chunk.encode(chunk, chosen)
        except quantized_chunk.NotQuantizable as error:
            raise UnsupportedLeaf(
                f"array {entry.name!r} ({entry.dtype_and_shape}) cannot be stored as {chosen} "
                f"(SaveOptions.quantize): {error}. Leave it out, with None for its name before the "
                "pattern that matches it"
            ) from None
        return StoredChunk(coded.data, {"errors": [coded.absolute, coded.relative]})

    def decode(self, entry: ArrayEntry, data: Array, out: Array) -> None:
        """Decodes a chunk."""
        try:
            quantized_chunk.decode(data, out, entry.settings["codes"])
        except quantized_chunk.BadCodes as error:
            raise NotDecodable(str(error)) from None

    def stored_bytes(self, entry: ArrayEntry, shape: Sequence[int]) -> int:
        """The bytes of a chunk."""
        return stored_bytes(shape, entry.dtype, entry.settings["codes"])

    def zarr_codec(self, settings: Mapping[str, Any]) -> None:
        """Zarr has none."""

    # --- entries of the index ---------------------------------------------------------------------

    def merge(self, notes: Sequence[Any]) -> dict[str, Any]:
        """The largest errors."""
        errors = [note["errors"] for note in notes] or [(0.0, 0.0)]
        absolute, relative = zip(*errors, strict=True)
        return {"errors": [max(absolute), max(relative)]}

    def validate(self, entry: ArrayEntry, note: Any) -> None:
        """Checks the codes and the errors."""
        settings = entry.settings
        if settings.keys() != {"codes"}:
            raise ValueError(f"its codec {NAME!r} has the settings {quoted(settings)}")
        try:
            codes.check(settings["codes"], entry.dtype)
        except TypeError as error:
            raise ValueError(str(error)) from None
        errors = note.get("errors") if isinstance(note, Mapping) else None
        pair: list[Any] = errors if isinstance(errors, list) and len(errors) == 2 else [None]
        if not all(type(x) in (int, float) and 0 <= x < math.inf for x in pair):
            raise ValueError(f"its errors are {quoted(errors)}")

    def facts(self, entry: ArrayEntry) -> Mapping[str, Any]:
        """The codes and the errors."""
        absolute, relative = entry.extra[NAME]["errors"]
        errors = {"largest_error": absolute, "largest_relative_error": relative}
        return {**entry.settings, **errors}


CODEC = Quantize()
"""The codec that reads arrays; it chooses none."""
