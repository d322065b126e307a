"""The reference policy of saves: chunks of an earlier checkpoint are reused (docs/reuse.md)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, StorageError, UnsupportedFormat
from unickpt.extend import (
    DescribedSave,
    PathLike,
    ReferencePolicy,
    Selection,
    WritingSave,
    adapter_of,
    adapters,
    resolve_path,
)
from unickpt.plugins.incremental import unchanged
from unickpt.plugins.incremental.base import FAULTY, How, open_base
from unickpt.plugins.incremental.full_rewrites import Growth
from unickpt.plugins.incremental.source import BaseChunks
from unickpt.plugins.incremental.unchanged import Changed, SeenState, UnchangedArrays

_log = logging.getLogger("unickpt")


class Incremental(ReferencePolicy):
    """Takes chunks of an earlier checkpoint, or patches against them.

    Arguments:
        reuse, changed, kept_cost: see `SaveOptions`.

    Raises:
        TypeError, ValueError: `changed` is wrong.
    """

    name = "incremental"

    def __init__(self, reuse: str, changed: Changed | None, kept_cost: float) -> None:
        unchanged.check(changed)
        self._reuse, self._changed, self._kept_cost = reuse, changed, kept_cost

    # --- in the call ------------------------------------------------------------------------------

    def skipped(self, save: DescribedSave, before: Any) -> tuple[UnchangedArrays | None, SeenState]:
        """The unchanged arrays, according to `SaveOptions.changed`; see `ReferencePolicy`."""
        assert self._changed is not None, "else there is nothing to skip"
        # The step before has the state of a unit's last turn, not of the last call.
        words = unchanged.words_of(self._changed, save.entries, save.units)
        least = max(1, unchanged.LEAST_BYTES)
        large = [name for name in words if save.sources[name].held_bytes >= least]
        tracked = [name for name in large if isinstance(words[name], str)]
        tokens = _tokens(save.arrays(), tracked) if tracked else {}
        sources = save.current(large)
        arrays = {name: (save.entries[name], sources[name]) for name in large}
        skipped, samples = unchanged.find_unchanged(words, arrays, tokens, before)
        seen = SeenState(save.url, save.attempt, tokens, samples)
        return skipped, seen if before is None else replace(seen, turns=before.turns)

    # --- before it is written ---------------------------------------------------------------------

    def open(self, save: WritingSave) -> tuple[BaseChunks | None, Selection | None]:
        """Opens the base; a damaged one is logged and not used. See `ReferencePolicy`."""
        selection, skipped = save.selection, save.skipped
        earlier = [] if selection is None else selection.earlier
        how = How(
            self._reuse == "compare",
            self._reuse == "patch",
            save.budget_bytes,
            self._kept_cost,
            chained=bool(earlier),
            encoder=save.encoder,
        )
        base_paths: list[PathLike] = [] if save.base is None else [save.base]
        base = None
        for path in [checkpoint.path for checkpoint in earlier] or base_paths:
            try:
                needed = bool(earlier) or skipped is not None
                base = open_base(resolve_path(path), save, how, needed=needed)
            except (CheckpointCorrupt, CheckpointNotFound, UnsupportedFormat, StorageError) as e:
                if type(e) is CheckpointNotFound and save.is_given:
                    raise
                # A training job must not stop because an older checkpoint is damaged, or gone.
                _log.warning(FAULTY, path, e)
                if save.encoder is not None:
                    save.encoder.follow(None)
            if selection is None or base is None:
                continue
            same = selection.on(base.index.attempt)
            if same is not None:  # if the save before has failed, of the one before that
                selection = same
                break
        index = None if base is None else base.index
        if selection is not None:
            selection.check(index, save.location)
        if skipped is not None:
            skipped.check_base(index, save.location)
        if base is None:
            return None, selection
        return BaseChunks(base, skipped, compares=save.base is not None), selection

    # --- after it was written ---------------------------------------------------------------------

    def merge(
        self, notes: Mapping[int, Any], statistics: Sequence[Mapping[str, float]]
    ) -> dict[str, Any] | None:
        """How checkpoints have grown with this one; None if process 0 wrote a full one."""
        if 0 not in notes:
            return None
        names = "stored_bytes", "kept_bytes"
        sums = [int(sum(counts.get(name, 0) for counts in statistics)) for name in names]
        return {"growth": Growth(*notes[0]).then(*sums).stored}


def _tokens(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, object]:
    """The tokens of arrays, by name."""
    among, tokens = adapters(), dict[str, object]()
    adapter_by_name = {name: adapter_of(values[name], among) for name in names}
    for adapter in among:
        together = [name for name in names if adapter_by_name[name] is adapter]
        if together:
            of_them = adapter.tokens([values[name] for name in together])
            tokens |= zip(together, of_them, strict=True)
    return tokens
