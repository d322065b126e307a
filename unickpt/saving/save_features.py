"""Queries a save's features: what to leave out, what to reference, how to store arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unickpt.commit.merge import MergePolicies, Merging
from unickpt.format.index import INCREMENTAL, ArrayEntry
from unickpt.frameworks.process_group import Group
from unickpt.options import SaveOptions
from unickpt.quoting import quoted

if TYPE_CHECKING:
    from unickpt.features import FileObserver, PhaseObserver, SaveFeature
    from unickpt.format.encoder_protocol import SaveEncoder
    from unickpt.references.policy import ReferenceSource, WritingSave
    from unickpt.storage.locations import Location
    from unickpt.write_filter import Selection, Units, WriteFilter


class SaveFeatures:
    """The features of one save; the core knows only their interfaces.

    Arguments:
        options: of the save.
        attempt: its name in the index.
        group: the processes.
    """

    write_filter: WriteFilter | None = None
    """The units that the save leaves out, after `choose`."""
    units: Units | None = None
    """The units that it may leave out."""

    def __init__(self, options: SaveOptions, attempt: str, group: Group) -> None:
        self._options, self._attempt, self._group = options, attempt, group
        self.all, self.encoding = options.all_features, options.encoding

    def observers(self) -> Sequence[PhaseObserver]:
        """The observers of the save's phases."""
        if not self.all:
            return ()
        return [observer for feature in self.all if (observer := feature.observer()) is not None]

    def file_observers(self, folder: Location) -> Sequence[FileObserver]:
        """The observers of the files that the save writes in a folder."""
        if not self.all:
            return ()
        fsync = self._options.fsync
        observers = (feature.file_observer(folder, fsync=fsync) for feature in self.all)
        return [observer for observer in observers if observer is not None]

    def choose(self) -> None:
        """Determines what the save may leave out; may wait for earlier saves.

        Raises:
            UnsupportedLeaf: a feature cannot determine it.
            ValueError: several features leave something out.
        """
        filters = [(feature.name, feature.write_filter(self._attempt)) for feature in self.all]
        chosen = [(name, chooser) for name, chooser in filters if chooser is not None]
        if len(chosen) > 1:
            names = " and ".join(repr(name) for name, _ in chosen)
            raise ValueError(
                f"the features {names} would both leave parts of this save out, which only one "
                "can; leave the other out of SaveOptions.features"
            )
        for _, chooser in chosen:
            self.write_filter, self.units = chooser, chooser.units

    @cached_property
    def encoder(self) -> SaveEncoder | None:
        """Chooses how arrays are stored from what is saved, if that is requested."""
        policy = self.encoding
        return None if policy is None else policy.begin(alone=self._group.count == 1)

    def open_base(self, save: WritingSave) -> tuple[ReferenceSource | None, Selection | None]:
        """The chunks that the save references instead of writing. As `ReferencePolicy.open`."""
        return self._options.references.open(save)

    def notes(
        self, base: ReferenceSource | None, arrays: Mapping[str, ArrayEntry]
    ) -> dict[str, Any]:
        """The features' notes about the output of this process, by feature name.

        Arguments:
            base: the chunks that the save references.
            arrays: of this process.
        """
        notes = dict[str, Any]()
        if base is not None and base.note is not None:
            notes[self._options.references.name] = base.note
        if self.encoding is not None and self.encoder is not None:
            notes[self.encoding.name] = self.encoder.note([*arrays.values()])
        for feature in self.all:
            if (note := feature.note()) is not None:
                notes[feature.name] = _json(feature, "note()", note)
        return notes

    def check(self, arrays: Iterable[str]) -> None:
        """Checks before the commit that the features fit all arrays. As `SaveFeature.check`."""
        for feature in self.all:
            feature.check(arrays)

    @property
    def policies(self) -> MergePolicies:
        """The policies by which the coordinator merges what all processes wrote."""
        return MergePolicies(self._merging, self.encoding)

    def _merging(self, name: str) -> Merging | None:
        """The function that merges the notes of a name in records."""
        for feature in self.all:
            if feature.name == name:
                return lambda notes, _: _json(feature, "merge_notes()", feature.merge_notes(notes))
        return self._options.references.merge if name == INCREMENTAL else None


def _json(feature: SaveFeature, call: str, value: Any) -> Any:
    """What a call of a feature returned.

    Raises:
        TypeError: it is no data of JSON.
    """
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{call} of the feature {feature.name!r} returned {quoted(value)}, which is no data of "
            f"JSON: {error}. Return numbers, texts, lists and dicts of them"
        ) from error
    return value
