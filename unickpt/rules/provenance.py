"""Provenance: the meaning of the numbers of a converted checkpoint, recorded in its metadata.

The record has their conventions, the arithmetic that was applied to them, and the sizes of axes
that are stored padded. With it, rules that would apply the same conversion twice are refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unickpt.errors import CheckpointCorrupt, RuleError
from unickpt.format.index import CONVERSION, RESERVED
from unickpt.reading.recipes import MappedSource
from unickpt.rules.compiling import CompiledRules
from unickpt.rules.plan import Made, RulePlan

Affine = tuple[float, float]
"""`scale` and `offset` of elements that are `scale * x + offset` of their original values."""
_IDENTITY: Affine = (1.0, 0.0)


@dataclass(frozen=True)
class Provenance:
    """The record.

    Arguments:
        conventions: the meaning of the numbers, by the name of the convention.
        arithmetic: for each array with converted elements, the total arithmetic; for an array of
            several pieces, that of each.
        sizes: for arrays with padding, the sizes of the axes of their rule.
    """

    conventions: Mapping[str, str] = field(default_factory=dict)
    arithmetic: Mapping[str, frozenset[Affine]] = field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], where: str) -> Provenance:
        """Reads the record from a checkpoint's metadata.

        Raises:
            CheckpointCorrupt: the record is malformed.
        """
        reserved = metadata.get(RESERVED)
        record = reserved.get(CONVERSION, {}) if isinstance(reserved, dict) else {}
        try:
            return cls(
                {str(k): str(v) for k, v in record.get("conventions", {}).items()},
                {
                    **{k: _affines([pair]) for k, pair in record.get("arithmetic", {}).items()},
                    **{
                        name: _affines(pairs) | {_IDENTITY}
                        for name, pairs in record.get("pieces", {}).items()
                    },
                },
                {
                    name: {str(axis): int(size) for axis, size in sizes.items()}
                    for name, sizes in record.get("sizes", {}).items()
                },
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(f"{where}: the record of its conversion: {error}") from None

    def check(self, rules: CompiledRules, where: str) -> None:
        """Refuses rules for numbers of another convention.

        Raises:
            RuleError: names the convention, the recorded value, and the value that the rules
                expect.
        """
        for convention in rules.conventions:
            recorded = self.conventions.get(convention.name)
            if recorded is not None and recorded != convention.left:
                done = " (they have been applied already)" if recorded == convention.right else ""
                raise RuleError(
                    f"{where}: its convention {convention.name!r} is {recorded!r}, and the rules "
                    f"are for {convention.left!r}{done}"
                )

    def after(self, rules: CompiledRules, plan: RulePlan, where: str) -> Provenance:
        """The record for the result of the rules.

        Raises:
            RuleError: arithmetic would be applied to an array a second time.
        """
        conventions = {**self.conventions, **{c.name: c.right for c in rules.conventions}}
        arithmetic: dict[str, frozenset[Affine]] = {}
        sizes: dict[str, Mapping[str, int]] = {}
        for name, made in plan.made.items():
            if made.sizes:
                sizes[name] = made.sizes
            affines = {
                affine
                for source in made.sources
                for affine in self._affines_after(source, made, where)
            }
            if affines - {_IDENTITY}:
                arithmetic[name] = frozenset(affines)
        return Provenance(conventions, arithmetic, sizes)

    def _affines_after(self, source: MappedSource, made: Made, where: str) -> Collection[Affine]:
        """The total arithmetic of elements after a source's own.

        Raises:
            RuleError: this would apply arithmetic to them a second time.
        """
        before = self.arithmetic.get(source.entry.name, frozenset([_IDENTITY]))
        whole = math.prod(source.extents) == math.prod(source.entry.shape)
        if source.is_exact:  # for a part of an array, the piece is unknown
            return before if whole or len(before) == 1 else [_IDENTITY]
        after = {_composed(source, affine) for affine in before}
        if _IDENTITY in after or before == {_IDENTITY}:
            return [_IDENTITY] if _IDENTITY in after else after
        scale, offset = min(before - {_IDENTITY})
        raise RuleError(
            f"{where}: {source.entry.name!r} was converted already, to {scale:g} * x + {offset:g}; "
            f"these rules would apply arithmetic a second time\n  {made.rule}"
        )

    def merged_into(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The metadata with this record added."""
        record = {
            "conventions": dict(self.conventions),
            "arithmetic": {
                n: list(*affines) for n, affines in self.arithmetic.items() if len(affines) == 1
            },
            "pieces": {
                name: sorted(map(list, affines - {_IDENTITY}))
                for name, affines in self.arithmetic.items()
                if len(affines) > 1
            },
            "sizes": {name: dict(sizes) for name, sizes in self.sizes.items()},
        }
        reserved = metadata.get(RESERVED)
        filled = {key: value for key, value in record.items() if value}
        other_records = {
            k: v
            for k, v in (reserved if isinstance(reserved, dict) else {}).items()
            if k != CONVERSION
        }
        inner = {**other_records, **({CONVERSION: filled} if filled else {})}
        outer = {key: value for key, value in metadata.items() if key != RESERVED}
        return {**outer, **({RESERVED: inner} if inner else {})}


def _affines(pairs: Iterable[Any]) -> frozenset[Affine]:
    return frozenset((float(a), float(b)) for a, b in pairs)


def _composed(source: MappedSource, affine: Affine) -> Affine:
    """The total of earlier arithmetic and a source's arithmetic."""
    total = source.scale * affine[0], source.scale * affine[1] + source.offset
    same = all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
        for a, b in zip(total, _IDENTITY, strict=True)
    )
    return _IDENTITY if same else total
