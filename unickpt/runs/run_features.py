"""Calls the hooks of a run on the features of its saves (`unickpt.features.RunFeature`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from unickpt.features import Run, RunFeature, SaveCall, SaveFeature
from unickpt.format import ocdbt_reader
from unickpt.options import SaveOptions
from unickpt.runs.step_folder import StepFolder
from unickpt.storage import paths

_log = logging.getLogger("unickpt")

Listener = tuple[RunFeature, SaveFeature | None]
"""A feature that is notified of the end of a save, with its part in this save."""


def save_ended(listeners: Iterable[Listener], error: BaseException | None) -> None:
    """Calls `RunFeature.after_save`. A failing feature does not affect the save, which has
    committed the step or raises its own error; so the feature's error is logged."""
    for run_feature, feature in listeners:
        try:
            run_feature.after_save(feature, error)
        except Exception:
            ended = "committed" if error is None else "failed"
            _log.exception("%s.after_save failed; the save %s", type(run_feature).__name__, ended)


class RunFeatures:
    """The parts of features that live as long as a run.

    Arguments:
        options: of its saves.
        folder: in which steps are saved.
        wait_ended: waits until all saves have ended.
        leaves_out: as of `Run`.
    """

    def __init__(
        self,
        options: SaveOptions,
        folder: StepFolder,
        wait_ended: Callable[[], None],
        *,
        leaves_out: bool,
    ) -> None:
        self._options = options
        run = Run(folder.location.is_local, folder.path, wait_ended, leaves_out)
        parts = ((feature.name, feature.in_run(run)) for feature in options.all_features)
        self.of_run = {name: part for name, part in parts if part is not None}

    @property
    def need_steps_before(self) -> bool:
        """Whether steps reference earlier steps."""
        return any(run_feature.needs_steps_before for run_feature in self.of_run.values())

    @property
    def options_without(self) -> SaveOptions:
        """The options of a save of which no feature of the run leaves anything out."""
        features = self._options.all_features
        left = [feature for feature in features if feature.name not in self.of_run]
        return self._options if len(left) == len(features) else self._options.with_features(left)

    def before_save(self, call: SaveCall) -> tuple[SaveOptions, dict[str, Any], list[Listener]]:
        """The options of a step's save, the features' entries in its metadata, and the features to
        notify of the end of the save, each with its part in this save."""
        features, metadata = [], dict[str, Any]()
        listeners: list[Listener] = []
        for feature in self._options.all_features:
            if (of_run := self.of_run.get(feature.name)) is not None:
                chosen, more = of_run.before_save(call)
                feature = chosen or feature
                listeners.append((of_run, feature))
                metadata |= more
            features.append(feature)
        return self._options.with_features(features), metadata, listeners

    def failed(self, error: BaseException) -> None:
        """Records that a call to save raised."""
        save_ended(((run_feature, None) for run_feature in self.of_run.values()), error)

    def loaded(self, step: int, path: str) -> None:
        """Records that the run resumes from a step, which was loaded from a path."""
        if self.of_run:
            stored = ocdbt_reader.open(paths.resolve(path))
            for run_feature in self.of_run.values():
                run_feature.after_load(step, path, stored)

    def removed(self, steps: Collection[int]) -> None:
        """Records that steps were removed."""
        for run_feature in self.of_run.values():
            run_feature.after_removal(steps)
