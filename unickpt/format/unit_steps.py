"""The step of each unit of a checkpoint (`write_filter`), in its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from unickpt.errors import CheckpointCorrupt, CoverageError
from unickpt.format.index import RESERVED

UnitSteps = Mapping[str, Mapping[int, int]]
"""The step of each unit's state, by key."""
_Step = Annotated[int, msgspec.Meta(ge=0)]
_MEMBER = "experts"
"""A key of the reserved metadata. Its member `steps` is read here; all others are the feature's."""


def stored(metadata: Mapping[str, Any], where: str) -> dict[str, dict[int, int]] | None:
    """The steps of units in the metadata of a checkpoint; None if there are none.

    Raises:
        CheckpointCorrupt: it is malformed.
    """
    reserved = metadata.get(RESERVED)
    if not isinstance(reserved, dict) or _MEMBER not in reserved:
        return None
    try:
        steps = reserved[_MEMBER]["steps"]
        return msgspec.convert(steps, dict[str, dict[int, _Step]], str_keys=True)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(
            f"{where}: what its metadata records of its experts is malformed: {error!r}"
        ) from None


def older(metadata: Mapping[str, Any], where: str) -> tuple[tuple[str, int, int], ...]:
    """The units whose state is of an earlier step than their checkpoint: key, number, step.

    Arguments:
        metadata: of the checkpoint.
        where: its location.

    Raises:
        CheckpointCorrupt: they are malformed.
    """
    steps_by_key = stored(metadata, where)
    if steps_by_key is None:
        return ()
    step = metadata[RESERVED].get("step")
    return tuple(
        (key, number, unit_step)
        for key, steps in steps_by_key.items()
        for number, unit_step in sorted(steps.items())
        if unit_step != step
    )


def lost(metadata: Mapping[str, Any]) -> float | None:
    """The share of the units' training that a restart from this checkpoint loses, if known; call
    `stored` first."""
    plt = metadata[RESERVED][_MEMBER].get("plt")
    return plt if type(plt) is float else None


def merged(
    metadata: Mapping[str, Any], written: Sequence[tuple[int, UnitSteps]]
) -> Mapping[str, Any]:
    """The metadata of a checkpoint with the steps of the units of all processes.

    Arguments:
        metadata: as process 0 describes it.
        written: processes, each with the steps of the units that it wrote.

    Raises:
        CoverageError: two processes wrote a unit at different steps.
    """
    steps_by_key: dict[str, dict[int, int]] = {}
    first: dict[tuple[str, int], int] = {}
    for process, steps in written:
        for key, unit_steps in steps.items():
            into = steps_by_key.setdefault(key, {})
            for number, step in unit_steps.items():
                if into.setdefault(number, step) != step:
                    raise CoverageError(
                        f"expert {number} of {key!r} would be of two steps: process "
                        f"{first[key, number]} has it of step {into[number]}, process {process} of "
                        f"step {step}. All processes must save the same steps with the same "
                        "`experts`. Nothing was saved; the next save writes all"
                    )
                first.setdefault((key, number), process)
    if not steps_by_key:
        return metadata
    reserved = metadata[RESERVED]
    stored_as = {
        key: {str(n): unit_steps[n] for n in sorted(unit_steps)}
        for key, unit_steps in steps_by_key.items()
    }
    return {
        **metadata,
        RESERVED: {**reserved, _MEMBER: {**reserved.get(_MEMBER, {}), "steps": stored_as}},
    }
