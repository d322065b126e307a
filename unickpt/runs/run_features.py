"""What a run asks of the features of its saves (`unickpt.features.RunFeature`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from unickpt.features import Run, RunFeature, SaveCall, SaveFeature
from unickpt.format import ocdbt_reader
from unickpt.options import SaveOptions
from unickpt.runs.tiers import Tier
from unickpt.saving.background import SaveCallbacks
from unickpt.storage import paths


class RunFeatures:
    """The parts of features that live as long as a run.

    Arguments:
        options: of its saves.
        tier: in which steps are saved.
        wait_ended: waits until all saves have ended.
    """

    def __init__(self, options: SaveOptions, tier: Tier, wait_ended: Callable[[], None]) -> None:
        self._options = options
        run = Run(tier.location.is_local, tier.path, wait_ended)
        every = {feature.name: feature.in_run(run) for feature in options.all_features}
        self._of_run = {name: each for name, each in every.items() if each is not None}

    @property
    def need_steps_before(self) -> bool:
        """Whether steps refer to steps before them."""
        return any(each.needs_steps_before for each in self._of_run.values())

    def before_save(
        self, call: SaveCall, callbacks: SaveCallbacks
    ) -> tuple[SaveOptions, dict[str, Any], SaveCallbacks]:
        """The options with which a step is saved, what features say in its metadata, and the
        callbacks of the save, after which features are told how it ended."""
        if not self._of_run:
            return self._options, {}, callbacks
        features, metadata = [], dict[str, Any]()
        told: list[tuple[RunFeature, SaveFeature]] = []
        for feature in self._options.all_features:
            more: Mapping[str, Any] = {}
            if (of_run := self._of_run.get(feature.name)) is not None:
                chosen, more = of_run.before_save(call)
                feature = chosen or feature
                told.append((of_run, feature))
            features.append(feature)
            metadata |= more

        def committed() -> None:
            callbacks.committed()
            for of_run, feature in told:
                of_run.after_save(feature, None)

        def failed(error: BaseException) -> None:
            callbacks.failed(error)
            for of_run, feature in told:
                of_run.after_save(feature, error)

        options = self._options.with_features(features)
        return options, metadata, replace(callbacks, committed=committed, failed=failed)

    def failed(self, error: BaseException) -> None:
        """Records that a call to save raised."""
        for each in self._of_run.values():
            each.after_save(None, error)

    def loaded(self, step: int, path: str) -> None:
        """Records that the run resumes from a step, which was loaded from a path."""
        if self._of_run:
            stored = ocdbt_reader.open(paths.resolve(path))
            for each in self._of_run.values():
                each.after_load(step, path, stored)

    def removed(self, steps: Collection[int]) -> None:
        """Records that steps were removed."""
        for each in self._of_run.values():
            each.after_removal(steps)
