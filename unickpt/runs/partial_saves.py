"""The saves of a run that write only some experts: which step they refer to, and what it lacks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from unickpt.errors import UnickptError, UnsupportedLeaf
from unickpt.format import ocdbt_reader
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.reuse.expert_keys import ExpertKeys
from unickpt.reuse.experts import Choose, ExpertRecord, Steps, stored
from unickpt.reuse.partial_save import PartialBase, PartialSave
from unickpt.reuse.siblings import Siblings
from unickpt.runs.tiers import Tier
from unickpt.saving.pending import SaveCallbacks
from unickpt.storage import paths

_log = logging.getLogger("unickpt")
_TOKENS = "tokens/"


class PartialSaves:
    """What a run knows of the experts in its newest step, alike on all processes.

    Arguments:
        partial, choose, budget: see `Checkpointer`.
        tier: in which steps are saved.

    Raises:
        ValueError: they are not valid.
    """

    def __init__(
        self, partial: Mapping[str, Any], choose: Choose | None, budget: float | None, tier: Tier
    ) -> None:
        self._keys, self._choose, self._budget, self._tier = (
            ExpertKeys(partial), choose, budget, tier,
        )  # fmt: skip
        if choose is not None and not callable(choose):
            raise ValueError(f"choose is of type {type(choose).__name__}, but must be a function")
        if budget is not None and not 0 <= budget <= 1:
            raise ValueError(f"plt_budget={budget!r} must be a fraction from 0 to 1, or None")
        self._record = ExpertRecord({})
        self._base: PartialBase | None = None
        self._step: int | None = None

    def begin(self, step: int, metrics: Mapping[str, Any]) -> PartialSave:
        """The save that follows, once all earlier ones have ended.

        Arguments:
            step: its number.
            metrics: with the token counts; on process 0 only.

        Raises:
            UnsupportedLeaf: a token count has no known layer, or is no number.
        """
        seen: dict[str, dict[int, float]] = {}
        layers: dict[str, str] = {}
        for name, count in metrics.items():
            if str(name).startswith(_TOKENS):
                layer, number = _of_metric(str(name), self._keys, layers)
                seen.setdefault(layer, {})[number] = _amount(name, count)
        return PartialSave(self._keys, step, self._record, self._base, self._choose, seen, layers)

    def callbacks(self, step: int, given: SaveCallbacks) -> SaveCallbacks:
        """The callbacks of a save, with what this has to know of its outcome."""

        def committed() -> None:
            given.committed()
            self._remember(step, self._tier.path(step), restarted=False)

        def failed(error: BaseException) -> None:
            given.failed(error)
            self.forget()

        return replace(given, committed=committed, failed=failed)

    def loaded(self, step: int, path: str) -> None:
        """Records that the run goes on from a step.

        Arguments:
            step: its number.
            path: from which it was loaded; if it is that of the other tier, the next save writes
                all experts.
        """
        self._remember(step, path, restarted=True)

    def removed(self, steps: Collection[int]) -> None:
        """Records that steps were removed."""
        if self._step in steps:
            self.forget()

    def forget(self) -> None:
        """The next save writes all experts: the newest step is not known, or differs by process."""
        self._base = self._step = None

    def _remember(self, step: int, path: str, *, restarted: bool) -> None:
        self.forget()
        try:
            reader = ocdbt_reader.open(paths.resolve(path))
            found = None if reader is None else stored(reader.index.metadata, path)
            if reader is None or found is None:
                self._record = ExpertRecord({})
                return
            self._record = found.restarted(self._budget) if restarted else found
            if path == self._tier.path(step) and Siblings(reader).is_worthwhile():
                lender = _lender(reader, path)
                self._base = PartialBase.of(path, reader.index, found.steps, self._keys, lender)
                self._step = step
        except (UnickptError, ValueError) as error:
            _log.warning("%s: the next save writes all experts: %s", path, error)


def _lender(reader: OcdbtReader, path: str) -> Steps | None:
    """Of which step each expert is in the checkpoint from which one borrows; None if it is whole.

    Raises:
        CheckpointCorrupt, StorageError: that checkpoint cannot be read.
    """
    for base in reader.index.bases:
        found = stored(reader.base_index(base).metadata, path)
        return {} if found is None else found.steps
    return None


def without_tokens(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics without token counts, which are recorded elsewhere."""
    return {name: value for name, value in metrics.items() if not str(name).startswith(_TOKENS)}


def _of_metric(name: str, keys: ExpertKeys, layers: dict[str, str]) -> tuple[str, int]:
    """The layer and the expert of a token count; adds the layer's key to `layers`."""
    layer, _, number = name.removeprefix(_TOKENS).rpartition("/")
    if not number.isdecimal() or not number.isascii() or len(number) > 9:
        raise UnsupportedLeaf(f"metrics: {name!r} must be tokens/<layer>/<number of an expert>")
    if layer not in layers:
        try:
            key = keys.key_of_layer(layer)
        except ValueError as error:
            raise UnsupportedLeaf(f"metrics: {name!r}: {error}") from None
        if key is None:
            known = ", ".join(repr(key.text) for key in keys)
            raise UnsupportedLeaf(
                f"metrics: {name!r}: {layer!r} is neither a key of `partial` ({known}), nor what "
                "stands in the names of arrays before an expert's number, nor an array of experts"
            )
        layers[layer] = key
    return layer, int(number)


def _amount(name: object, count: Any) -> float:
    try:
        found = float(count)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedLeaf(f"metrics must be numbers: {name!r}: {error}") from error
    if not 0 <= found < float("inf"):
        raise UnsupportedLeaf(f"metrics: {name!r} is {found}, but counts tokens")
    return found
