"""What the processes of a job do together: wait for each other, agree, act through process 0."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from unickpt.errors import CoverageError, InvalidPath, ProcessFailed
from unickpt.frameworks.process_group import Group
from unickpt.steps.step_folder import PROBE
from unickpt.steps.tier import Tier
from unickpt.storage import database
from unickpt.storage.locations import Location


def barrier(group: Group) -> None:
    """Waits until all processes call this."""
    if group.count > 1:
        group.agree(0)


def check_same_step(group: Group, where: Location, call: str, step: int) -> None:
    """Checks that all processes call a method with the same step.

    Raises:
        CoverageError: on all processes, if they do not.
    """
    if group.count == 1:
        return
    highest = group.agree(step)
    if group.agree(int(step != highest)):
        other = f"another with {highest}" if step != highest else "another with an earlier one"
        raise CoverageError(
            f"{where}: the processes call {call} with different steps: process "
            f"{group.index} with {step}, {other}. Nothing was removed"
        )


def on_process_0(group: Group, where: Location, what: str, work: Callable[[], object]) -> None:
    """Calls `work` on process 0, while the others wait for it."""
    barrier(group)
    error: Exception | None = None
    if group.index == 0:
        try:
            work()
        except Exception as raised:
            error = raised
    failed = group.agree(int(error is not None)) if group.count > 1 else error is not None
    if failed:
        raise error or ProcessFailed(
            f"{where}: process 0 could not {what}; see the error of process 0"
        )


def check_shared(group: Group, local: Tier) -> None:
    """Checks that all of several processes see the same local tier.

    Raises:
        InvalidPath: they do not.
    """
    store = local.location.store(database.context(fsync=False))
    token = group.agree(secrets.randbits(60) + 1 if group.index == 0 else 0)
    name = f"{PROBE}{token:x}"
    if group.index == 0:
        local.location.make(durable=True)
        store.write(name, b"").result()
    group.agree(0)
    seen = store.read(name).result().state == "value"
    alone = group.agree(int(not seen))
    if group.index == 0:
        store.write(name, None).result()
    if alone:
        raise InvalidPath(
            f"local={str(local.location)!r} is not the same storage on all processes; "
            "give a path that they share, or omit local="
        )
