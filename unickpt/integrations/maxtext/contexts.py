"""What of the Context that MaxText builds for Orbax counts here."""

from __future__ import annotations

from typing import Any

_KEPT = (
    ("pytree.loading", "partial_load"),
    ("asynchronous", "timeout_secs"),
    ("array.loading", "use_load_and_broadcast"),
    ("deletion.gcs_deletion_options", "todelete_full_path"),
)
"""All else that MaxText sets tunes Orbax's files. Its limits of memory (96 GB) and sizes of files
(2 GiB) are in no relation to the machine: those of `unickpt.SaveOptions` count."""


def relevant(context: Any) -> Any:
    """A Context of Orbax's version 1 that has only what counts here; None stays None."""
    if context is None:
        return None
    found = type(context)()
    for path, name in _KEPT:
        here, there = found, context
        for part in path.split("."):
            here, there = getattr(here, part, None), getattr(there, part, None)
        if there is not None and here is not None and hasattr(there, name):
            setattr(here, name, getattr(there, name))
    return found
