"""What a run asks of the features of its saves (`unickpt.features.RunFeature`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.format import ocdbt_reader
from unickpt.options import SaveOptions
from unickpt.storage import paths


class RunFeatures:
    """The parts of features that live as long as a run.

    Arguments:
        options: of its saves.
    """

    def __init__(self, options: SaveOptions) -> None:
        self._options = options
        every = {feature.name: feature.in_run() for feature in options.all_features}
        self._of_run = {name: each for name, each in every.items() if each is not None}

    def before_save(self, step: int) -> tuple[SaveOptions, dict[str, Any]]:
        """The options with which a step is saved, and what features say in its metadata."""
        if not self._of_run:
            return self._options, {}
        features, metadata = [], dict[str, Any]()
        for feature in self._options.all_features:
            more: Mapping[str, Any] = {}
            if feature.name in self._of_run:
                feature, more = self._of_run[feature.name].before_save(step)
            features.append(feature)
            metadata |= more
        return self._options.with_features(features), metadata

    def loaded(self, step: int, path: str) -> None:
        """Records that the run resumes from a step, which was loaded from a path."""
        reader = ocdbt_reader.open(paths.resolve(path)) if self._of_run else None
        if reader is not None:
            for feature in self._of_run.values():
                feature.after_load(step, reader.index)
