"""The saves of a run that write only some experts: which step they refer to, and what it lacks."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from unickpt.errors import UnickptError, UnsupportedLeaf
from unickpt.format import ocdbt_reader
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.quoting import given
from unickpt.reuse.expert_keys import ExpertKeys
from unickpt.reuse.experts import Choose, ExpertRecord, ExpertSteps, stored
from unickpt.reuse.partial_save import PartialBase, PartialSave
from unickpt.reuse.siblings import Siblings
from unickpt.runs.tiers import Tier
from unickpt.saving.background import SaveCallbacks
from unickpt.saving.describe import check_mapping
from unickpt.storage import paths

_log = logging.getLogger("unickpt")
TokensSeen = Mapping[str, Mapping[int, float] | Sequence[float]]
"""How many tokens the experts of each layer have seen: by their numbers, or of all in order."""
_TOKENS = "tokens/"


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture of experts take turns: each save writes only some of them, and
    refers to the step before for the others, whose state is then older. See docs/experts.md.

    What matches no key is written every time. The first save, and the next after one that failed,
    write all. A save first waits for the one before.

    Arguments:
        each_save: how many experts a save writes, by key. For experts that have arrays of their
            own, a key is a pattern of names (`*` is one component, `**` any number of them, `{x}`
            the number of the expert). For experts that are stacked in arrays, a key is a pattern of
            names, and its value a pair: the dimension, or the mesh axis that splits it, and how
            many. Optimizer states whose names match belong to their expert.
        choose: chooses the experts to write: called for each key with a frozen dataclass (`key`,
            `experts`, `k`, `steps`, `lost`), returns numbers. All processes must choose the same.
        plt_budget: with token counts (see `Checkpointer.save`), the greatest proportion of tokens
            whose updates the restarts of a run may lose. If another restart like the last one
            exceeded it, twice as many experts are saved. None: never.

    Raises:
        ValueError: they are not valid.

    Example:
        >>> Experts({"**/experts/{x}/**": 4}).plt_budget
        0.0375
    """

    each_save: Mapping[str, int | tuple[int | str, int]]
    choose: Choose | None = None
    plt_budget: float | None = 0.0375

    __repr__ = given

    def __post_init__(self) -> None:
        ExpertKeys(self.each_save)
        if self.choose is not None and not callable(self.choose):
            raise ValueError(f"choose={self.choose!r} must be a function of facts; see Experts")
        if self.plt_budget is not None and not 0 <= self.plt_budget <= 1:
            raise ValueError(
                f"plt_budget={self.plt_budget!r} must be a fraction from 0 to 1, or None"
            )


class PartialSaves:
    """What a run knows of the experts in its newest step, alike on all processes.

    Arguments:
        experts: as given.
        tier: in which steps are saved.
    """

    def __init__(self, experts: Experts, tier: Tier) -> None:
        self._experts, self._tier = experts, tier
        self._keys = ExpertKeys(experts.each_save)
        self._record = ExpertRecord({})
        self._base: PartialBase | None = None
        self._step: int | None = None

    def begin(self, step: int, tokens: TokensSeen | None) -> PartialSave:
        """The save that follows, once all earlier ones have ended.

        Arguments:
            step: its number.
            tokens: as for `Checkpointer.save`; on process 0 only.

        Raises:
            UnsupportedLeaf: a token count has no known layer, or is no number.
        """
        layers = {layer: _key_of(layer, self._keys) for layer in tokens or ()}
        seen = {layer: _counts(layer, counts) for layer, counts in (tokens or {}).items()}
        choose = self._experts.choose
        return PartialSave(self._keys, step, self._record, self._base, choose, seen, layers)

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
            self._record = found.restarted(self._experts.plt_budget) if restarted else found
            if path == self._tier.path(step) and Siblings(reader).is_worthwhile():
                lender = _lender(reader, path)
                self._base = PartialBase.of(path, reader.index, found.steps, self._keys, lender)
                self._step = step
        except (UnickptError, ValueError) as error:
            _log.warning("%s: the next save writes all experts: %s", path, error)


def _lender(reader: OcdbtReader, path: str) -> ExpertSteps | None:
    """Of which step each expert is in the checkpoint from which one borrows; None if it is whole.

    Raises:
        CheckpointCorrupt, StorageError: that checkpoint cannot be read.
    """
    for base in reader.index.bases:
        found = stored(reader.base_index(base).metadata, path)
        return {} if found is None else found.steps
    return None


def tokens_among(
    metrics: Mapping[str, float], tokens: TokensSeen | None
) -> tuple[dict[str, float], TokensSeen | None]:
    """Parts token counts from metrics that are named "tokens/<layer>/<number of an expert>".

    Arguments:
        metrics: as for `Checkpointer.save`.
        tokens: likewise; wins over a metric.

    Raises:
        UnsupportedLeaf: such a name has no number, or `tokens` is no mapping.

    Example:
        >>> tokens_among({"loss": 1.5, "tokens/moe/0": 10}, None)
        ({'loss': 1.5}, {'moe': {0: 10}})
    """
    check_mapping("tokens", tokens)
    rest, found = {}, dict[str, dict[int, float]]()
    for name, value in metrics.items():
        if not str(name).startswith(_TOKENS):
            rest[name] = value
            continue
        layer, _, number = name.removeprefix(_TOKENS).rpartition("/")
        if not number.isdecimal() or not number.isascii() or len(number) > 9:
            raise UnsupportedLeaf(f"metrics: {name!r} must be tokens/<layer>/<number of an expert>")
        found.setdefault(layer, {})[int(number)] = value
    return rest, {**found, **(tokens or {})} or tokens


def _key_of(layer: str, keys: ExpertKeys) -> str:
    """The key of the experts of a layer."""
    try:
        key = keys.key_of_layer(layer)
    except ValueError as error:
        raise UnsupportedLeaf(f"tokens: {layer!r}: {error}") from None
    if key is None:
        known = ", ".join(repr(key.text) for key in keys)
        raise UnsupportedLeaf(
            f"tokens: {layer!r} is neither a key of `experts` ({known}), nor what stands in the "
            "names of arrays before an expert's number, nor an array of experts"
        )
    return key


def _counts(layer: str, counts: Mapping[int, float] | Sequence[float]) -> dict[int, float]:
    """The token counts of a layer by the numbers of its experts."""
    seen: dict[int, float] = {}
    for number, count in counts.items() if isinstance(counts, Mapping) else enumerate(counts):
        where = f"tokens[{layer!r}][{number!r}]"
        if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= number < 10**9:
            raise UnsupportedLeaf(f"{where}: {number!r} is not the number of an expert")
        try:
            amount = float(count)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedLeaf(f"{where} must be a number: {error}") from error
        if not 0 <= amount < math.inf:
            raise UnsupportedLeaf(f"{where} is {amount}, but counts tokens")
        seen[int(number)] = amount
    return seen
