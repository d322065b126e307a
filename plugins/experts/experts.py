"""Which experts a run saves, and how many at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from unickpt.errors import UnsupportedLeaf
from unickpt.extend import Box, Reader, Run, RunFeature, SaveFeature, Selection, changed_repr
from unickpt.plugins.experts.expert_choice import Choose, most_lost
from unickpt.plugins.experts.in_run import PartialSaves
from unickpt.plugins.experts.keys import ExpertKeys
from unickpt.plugins.experts.two_levels import WholeSaves, copy_selection, recovered_selection


@dataclass(frozen=True)
class Experts(SaveFeature):
    """The experts of a mixture of experts take turns: each save writes only some of them, and
    refers to the step before for the others, whose state is then older. See docs/experts.md.

    Arrays that match no key are written every time. The first save, and the next after one that
    failed, write all.

    Arguments:
        each_save: how many experts a save writes, by patterns of names with `{x}`.
        choose: "most_lost", or a function of facts that returns the numbers; None: in turns.
        plt_budget: the proportion of tokens that restarts may lose until more is saved; None: any.

    Raises:
        ValueError: they are not valid.

    Example:
        >>> Experts({"**/experts/{x}/**": 4}).plt_budget
        0.0375
    """

    each_save: Mapping[str, int | tuple[int | str, int]]
    choose: Choose | Literal["most_lost"] | None = None
    plt_budget: float | None = 0.0375

    name = "experts"
    filters_copies = True
    __repr__ = changed_repr

    def __post_init__(self) -> None:
        ExpertKeys(self.each_save)
        if self.choose not in (None, "most_lost") and not callable(self.choose):
            raise ValueError(
                f'choose={self.choose!r} must be a function of facts, or "most_lost"; see Experts'
            )
        if self.plt_budget is not None and not 0 <= self.plt_budget <= 1:
            raise ValueError(
                f"plt_budget={self.plt_budget!r} must be a fraction from 0 to 1, or None"
            )

    def check(self, arrays: Iterable[str]) -> None:
        """Refuses a save outside of a run, which would silently write all experts."""
        raise UnsupportedLeaf(
            "experts take turns over the steps of a run: give Experts to a Checkpointer "
            "(experts=...), not to a single save"
        )

    def in_run(self, run: Run) -> RunFeature:
        """The object that a run calls before each save and after each load."""
        if not run.leaves_out:
            return WholeSaves(ExpertKeys(self.each_save), self.plt_budget)
        return PartialSaves(ExpertKeys(self.each_save), self._chooses, self.plt_budget, run)

    def copy_filter(self, stored: Reader, base: Reader) -> Selection | None:
        return copy_selection(stored, base, ExpertKeys(self.each_save), self._chooses)

    def recovered(
        self, stored: Reader, copy: Reader, lost: Iterable[tuple[str, Box]]
    ) -> Selection | None:
        return recovered_selection(stored, copy, ExpertKeys(self.each_save), lost)

    @property
    def _chooses(self) -> Choose | None:
        return most_lost if self.choose == "most_lost" else self.choose
