"""Which leaves a load is about: the arguments `only` and `skip` of `load`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.arrays.names import matches
from unickpt.errors import LoadMismatch
from unickpt.quoting import quoted, some

Patterns = str | Sequence[str]


@dataclass(frozen=True)
class Selection:
    """The leaves that match one of the patterns of `only`, and none of those of `skip`.

    Arguments:
        only: patterns of names; None selects all.
        skip: patterns of names.
    """

    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()

    @classmethod
    def of(cls, only: Patterns | None, skip: Patterns) -> Selection:
        """From the arguments of `load`.

        Raises:
            TypeError: they are neither a pattern nor several.
        """
        return cls(None if only is None else _patterns("only", only), _patterns("skip", skip))

    @property
    def selects_all(self) -> bool:
        return self.only is None and not self.skip

    def has(self, name: str) -> bool:
        """Whether a leaf is selected."""
        if self.only is not None and not any(matches(p, name) for p in self.only):
            return False
        return not any(matches(p, name) for p in self.skip)

    def left_out(self, names: Iterable[str]) -> frozenset[str]:
        """Those of some leaves that are not selected."""
        if self.selects_all:
            return frozenset()
        return frozenset(name for name in names if not self.has(name))

    def among(self, known: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of some leaves, by name, that are selected."""
        if self.selects_all:
            return known
        return {name: value for name, value in known.items() if self.has(name)}

    def check(self, where: str, asked: Collection[str], stored: Collection[str]) -> None:
        """Checks that every pattern matches a leaf, and that a leaf is selected.

        Arguments:
            where: the checkpoint, for messages.
            asked: names of the leaves of `like`, or of all that is stored without it.
            stored: names of what is stored, or of what rules make of it.

        Raises:
            LoadMismatch: names the patterns that match nothing, and some leaves.
        """
        if self.selects_all:
            return
        known = list(dict.fromkeys([*asked, *stored]))
        for argument, patterns in (("only", self.only or ()), ("skip", self.skip)):
            idle = [p for p in patterns if not any(matches(p, name) for name in known)]
            if idle:
                inner = [p for p in idle if any(name.startswith(f"{p}/") for name in known)]
                whole = f". All below {inner[0]!r} is {inner[0] + '/**'!r}" if inner else ""
                raise LoadMismatch(
                    f"{where}: {argument}={quoted(idle)} matches no leaf; there are "
                    f"{some([repr(name) for name in known]) or 'none'}{whole}. `*` is any text "
                    "within a component of a name, `**` any number of components"
                )
        if not any(map(self.has, asked)):
            raise LoadMismatch(f"{where}: only= and skip= together select no leaf")


ALL = Selection()


def _patterns(argument: str, given: Patterns) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f'{argument} must be a pattern of names such as "params/**", or several in a list, not '
            f"{quoted(given)}"
        )
    return tuple(patterns)
