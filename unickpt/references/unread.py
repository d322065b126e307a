"""The interface for chunks that a load need not read, because `like` already holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from unickpt.frameworks.adapter_protocol import ArrayTarget
from unickpt.reading.array_reader import LoadCounts, ReadArrays


class UnreadPolicy(Protocol):
    """Decides what one call of `load` need not read. The target of the door "since" of the group
    `references` is called with the arguments `since` and `under` of `load`, and its options."""

    def reading(
        self,
        read: ReadArrays,
        leaves: Mapping[str, Any],
        targets: Mapping[str, ArrayTarget],
        counts: LoadCounts,
    ) -> ReadArrays:
        """The function that reads arrays in place of `read`. Called once for each attempt: a save
        may replace the checkpoint while it is loaded, when `like` is filled in part.

        Arguments:
            read: reads what is left.
            leaves: of `like`, by name.
            targets: the arrays among them.
            counts: of the load; `unchanged_bytes` is added to.
        """
