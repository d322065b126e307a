"""Runs that save experts in turn."""

from unickpt import Checkpointer
from unickpt.plugins.experts.in_run import PartialSaves


def in_run(run: Checkpointer) -> PartialSaves:
    """What a run knows of its experts."""
    found = run._features.of_run["experts"]
    assert isinstance(found, PartialSaves)
    return found
