"""How many tokens routers gave to each expert since the start of a run; without a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unickpt.extend import name_matches


class SeenBefore:
    """The counts of earlier jobs, which a resumed one adds to its own."""

    def __init__(self) -> None:
        self._before: dict[str, dict[int, float]] = {}

    def resume(self, metadata: Mapping[str, Any]) -> None:
        """Resumes from the counts that a checkpoint records.

        Arguments:
            metadata: of the step that was loaded, such as
                `unickpt.open(run.path(step)).metadata`; without counts, those before are zero.
        """
        reserved = metadata.get("unickpt")
        experts = reserved.get("experts") if isinstance(reserved, Mapping) else None
        layers = experts.get("layers") if isinstance(experts, Mapping) else None
        self._before = {
            name: {int(number): float(count) for number, count in layer["seen"].items()}
            for name, layer in (layers or {}).items()
        }

    def added(self, layer: str, counts: Sequence[int]) -> list[float]:
        """The counts of a layer with those of the jobs before."""
        before = self._before.get(layer, {})
        return [count + before.get(number, 0.0) for number, count in enumerate(counts)]


def layer_beside(router: str, experts: str, separator: str) -> str:
    """The name of the experts next to a router, as in the names of their arrays.

    Example:
        >>> layer_beside("layers.0.moe.gate", "experts", ".")
        'layers.0.moe.experts'
    """
    above, joint, _ = router.rpartition(separator)
    return f"{above}{joint}{experts}"


def is_router(pattern: str, name: str) -> bool:
    """Whether a pattern of names, with dots or slashes, matches a router's."""
    return name_matches(pattern.replace(".", "/"), name.replace(".", "/"))
