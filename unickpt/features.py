"""The seam for features of saves: what `SaveOptions.features` holds, and what a run asks of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from unickpt.format.index import Index


class SaveFeature:
    """Something that a save does beyond the core; a base class whose methods do nothing.

    A feature that also fulfils `Codec` chooses how arrays are stored.
    """

    name: str
    """Of the feature; a save has at most one of each name."""

    def check(self, arrays: Iterable[str]) -> None:
        """Called before the commit, on the coordinator, with the names of all arrays.

        Raises:
            UnsupportedLeaf: the feature does not fit them; the save fails.
        """

    def in_run(self) -> RunFeature | None:
        """What a `Checkpointer` asks before each save and after each load; None for nothing."""
        return None


class RunFeature(Protocol):
    """The part of a feature that lives as long as a run."""

    def before_save(self, step: int) -> tuple[SaveFeature, Mapping[str, Any]]:
        """The feature with which a step is saved, and what the step's metadata say below
        `["unickpt"]`. Called on each process, in the call that saves.

        Arguments:
            step: its number.
        """

    def after_load(self, step: int, index: Index) -> None:
        """Records that the run resumes from a step. Called on each process.

        Arguments:
            step: its number.
            index: of its checkpoint.
        """
