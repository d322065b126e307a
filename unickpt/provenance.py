"""Provenance: what the numbers of a converted checkpoint mean, recorded in its metadata.

Which conventions they follow, which arithmetic was done to them, and the sizes of axes of which
only a padded extent is stored. With it, rules that would do the same twice are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unickpt.errors import CheckpointCorrupt, RuleError
from unickpt.index import RESERVED
from unickpt.rules import Rules
from unickpt.rules.plan import Plan

_KEY = "conversion"


@dataclass(frozen=True)
class Provenance:
    """What is recorded.

    Arguments:
        conventions: what the numbers mean, by the name of the convention.
        arithmetic: of arrays that are `scale * x + offset` of what they were first, these two.
        sizes: of arrays with padding, the sizes of the axes of their rule.
    """

    conventions: Mapping[str, str] = field(default_factory=dict)
    arithmetic: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: Mapping[str, Any], where: str) -> Provenance:
        """What is recorded in a checkpoint's metadata.

        Raises:
            CheckpointCorrupt: it is not as it should be.
        """
        own = metadata.get(RESERVED)
        record = own.get(_KEY, {}) if isinstance(own, dict) else {}
        try:
            return cls(
                {str(k): str(v) for k, v in record.get("conventions", {}).items()},
                {k: (float(a), float(b)) for k, (a, b) in record.get("arithmetic", {}).items()},
                {
                    name: {str(axis): int(size) for axis, size in sizes.items()}
                    for name, sizes in record.get("sizes", {}).items()
                },
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(f"{where}: the record of its conversion: {error}") from None

    def check(self, rules: Rules, where: str) -> None:
        """Refuses rules for numbers that mean something else.

        Raises:
            RuleError: names the convention, what is recorded, and what the rules are for.
        """
        for convention in rules.conventions:
            recorded = self.conventions.get(convention.name)
            if recorded is not None and recorded != convention.left:
                done = " (they have been applied already)" if recorded == convention.right else ""
                raise RuleError(
                    f"{where}: its convention {convention.name!r} is {recorded!r}, and the rules "
                    f"are for {convention.left!r}{done}"
                )

    def after(self, rules: Rules, plan: Plan, where: str) -> Provenance:
        """What is to be recorded of what the rules make.

        Raises:
            RuleError: arithmetic would be done to an array that has it already.
        """
        conventions = {**self.conventions, **{c.name: c.right for c in rules.conventions}}
        arithmetic: dict[str, tuple[float, float]] = {}
        sizes: dict[str, Mapping[str, int]] = {}
        for name, made in plan.made.items():
            if made.sizes:
                sizes[name] = made.sizes
            nets: set[tuple[float, float]] = set()
            for feed in made.feeds:
                scale, offset = self.arithmetic.get(feed.entry.name, (1.0, 0.0))
                net = feed.scale * scale, feed.scale * offset + feed.offset
                identity = all(map(_near, net, (1.0, 0.0)))
                if not feed.is_exact and (scale, offset) != (1.0, 0.0) and not identity:
                    raise RuleError(
                        f"{where}: {feed.entry.name!r} was converted already, to "
                        f"{scale:g} * x + {offset:g}; this would do arithmetic a second time\n"
                        f"  {made.rule}"
                    )
                nets.add((1.0, 0.0) if identity else net)
            if len(nets) == 1 and nets != {(1.0, 0.0)}:  # one pair cannot tell of different pieces
                arithmetic[name] = nets.pop()
        return Provenance(conventions, arithmetic, sizes)

    def merged_into(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Metadata with this record."""
        record = {
            "conventions": dict(self.conventions),
            "arithmetic": {name: list(net) for name, net in self.arithmetic.items()},
            "sizes": {name: dict(sizes) for name, sizes in self.sizes.items()},
        }
        own = metadata.get(RESERVED)
        filled = {key: value for key, value in record.items() if value}
        rest = {k: v for k, v in (own if isinstance(own, dict) else {}).items() if k != _KEY}
        inner = {**rest, **({_KEY: filled} if filled else {})}
        outer = {key: value for key, value in metadata.items() if key != RESERVED}
        return {**outer, **({RESERVED: inner} if inner else {})}


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
