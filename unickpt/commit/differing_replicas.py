"""Assumed replicas: a fingerprint of each, and the handling of differences.

For a sharded array the framework says which processes hold replicas; for a plain array it does not.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from unickpt.commit.messages import REPLICA_DTYPE, Names, Records
from unickpt.errors import CoverageError, ReplicasDiffer
from unickpt.trees import name_ranges

_log = logging.getLogger("unickpt")
_SHOWN = 8

_ADVICE = (
    "Plain tensors and arrays are assumed to be equal on every process that has them. Values that "
    "differ by process belong in unickpt.PerProcess; shards in a DTensor, an array with a "
    "NamedSharding, or unickpt.types.LocalFragments. If they should be equal, find out why they "
    "are not"
)


# --- comparing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaDifference:
    """An array that was assumed to be equal on all processes, and is not.

    Arguments:
        name: of the array.
        stored: the process whose data is stored: the lowest that has the array.
        other_processes: processes with other data.
    """

    name: str
    stored: int
    other_processes: tuple[int, ...]


class Replicas:
    """The reports of all processes about assumed replicas.

    Arguments:
        records: of all processes.
        names: for each process the arrays that it has.

    Raises:
        CoverageError: some compared every byte, and others did not.
    """

    def __init__(self, records: Records, names: Names) -> None:
        self.checked = records[0][1].checked
        for process, record in records:
            if record.checked != self.checked:
                raise CoverageError(
                    "the processes save with different SaveOptions.check_replicas: process 0 with "
                    f"{self.checked}, process {process} with {record.checked}"
                )
        # Most processes report the same; equal reports are decoded once.
        alike: dict[tuple[int, bytes], list[int]] = {}
        for process, record in records:
            key = (record.description, record.replicas.tobytes())
            alike.setdefault(key, []).append(process)
        self._reported: dict[str, dict[int, list[int]]] = {}
        for (_, data), processes in alike.items():
            array_names, rows = names[processes[0]], np.frombuffer(data, REPLICA_DTYPE)
            for number, fingerprint in rows.tolist():
                by_fingerprint = self._reported.setdefault(array_names[number], {})
                by_fingerprint.setdefault(fingerprint, []).extend(processes)

    @property
    def names(self) -> set[str]:
        """The arrays whose replication is only assumed."""
        return set(self._reported)

    def differences(self, contested: Mapping[str, Sequence[int]]) -> list[ReplicaDifference]:
        """The arrays that differ.

        Arguments:
            contested: arrays for which processes wrote different data, with those processes.

        Raises:
            CoverageError: some differ, and `SaveOptions.check_replicas` refuses that.
        """
        differences = []
        for name, reported in self._reported.items():
            if len(reported) > 1 or name in contested:
                stored = min(process for processes in reported.values() for process in processes)
                other_processes = {p for ps in reported.values() if stored not in ps for p in ps}
                other_processes |= set(contested.get(name, ())) - {stored}
                differences.append(ReplicaDifference(name, stored, tuple(sorted(other_processes))))
        if differences and self.checked:
            raise CoverageError(
                "arrays differ between processes (SaveOptions.check_replicas): "
                f"{_list(differences)}. {_ADVICE}. Nothing was saved."
            )
        return differences


def warn(differences: Sequence[ReplicaDifference]) -> None:
    """Warns, after the commit, that arrays differ; raises nothing, because it is committed.

    The text is the same at every save, so that Python shows it once.
    """
    text = (
        f"arrays differ between processes: {_list(differences)}. The data of the process named "
        f"last was saved. {_ADVICE}; if they are expected to differ (BatchNorm statistics under "
        "DDP), ignore this warning. SaveOptions(check_replicas=True) refuses such a save"
    )
    _log.warning("%s", text)
    with suppress(ReplicasDiffer):  # if a filter turns warnings into errors
        warnings.warn(text, ReplicasDiffer, stacklevel=2)


def _list(differences: Sequence[ReplicaDifference]) -> str:
    groups: dict[tuple[int, tuple[int, ...]], dict[str, list[str]]] = {}
    for difference in differences:
        alike = groups.setdefault((difference.stored, difference.other_processes), {})
        alike.setdefault(name_ranges.skeleton(difference.name), []).append(difference.name)
    return "; ".join(
        f"{_some(shown)} (different on {_processes(other_processes)} than on process {stored})"
        for (stored, other_processes), alike in groups.items()
        for shown in [[repr(name) for names in alike.values() for name in name_ranges.fold(names)]]
    )


def _some(items: Sequence[object]) -> str:
    more = f" and {len(items) - _SHOWN} more" * (len(items) > _SHOWN)
    return ", ".join(map(str, items[:_SHOWN])) + more


def _processes(numbers: Sequence[int]) -> str:
    return f"process{'es' * (len(numbers) > 1)} {_some(numbers)}"
