"""Reports on rules that were derived or checked: what they cover, and what is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unickpt.quoting import counted


@dataclass(frozen=True)
class ObservedReport:
    """The report of `Rules.observe`.

    Arguments:
        moved: names of the arrays that are made only by moving elements.
        scaled: those for which elements are multiplied by a number, or one is added.
        constant: those that hold one number, for any inputs.
        not_made: those that the converter makes without its input; they keep their values when the
            rules are used.
        dropped: names of inputs that no array uses: they are lost.
        cropped: names of inputs that arrays use only in part: the rest is lost.
        refused: arrays that no rule can make, and why, with the first element that shows it.
        runs: how often the converter was called.
        lines: the number of rules.
        text: the rules as a file.
    """

    moved: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    not_made: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    cropped: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    runs: int = 0
    lines: int = 0
    text: str = ""

    @property
    def covered(self) -> int:
        """How many arrays the rules make."""
        return len(self.moved) + len(self.scaled) + len(self.constant)

    def __str__(self) -> str:
        lines = [
            f"{counted(self.covered, 'array')} by {counted(self.lines, 'rule')}, seen in "
            f"{counted(self.runs, 'run')} of the converter: {len(self.moved)} moved, "
            f"{len(self.scaled)} with arithmetic, {len(self.constant)} constant"
        ]
        for what, names in (
            ("made from nothing, so they keep their values:", self.not_made),
            ("lost, as no array is made from them:", self.dropped),
            ("lost in part, as some of their elements are in no array:", self.cropped),
        ):
            if names:
                lines.append(f"{counted(len(names), 'array')} {what}")
                lines += _first(10, [f"  {name!r}" for name in names])
        if self.refused:
            lines.append(f"{counted(len(self.refused), 'array')} that no rule can make:")
            lines += _first(10, [f"  {name!r}: {why}" for name, why in self.refused.items()])
        return "\n".join(lines)


def _first(most: int, lines: list[str]) -> list[str]:
    """The first of some lines, and how many more there are."""
    return [*lines[:most], *([f"  and {len(lines) - most} more"] if len(lines) > most else [])]


@dataclass(frozen=True)
class RulesCheck:
    """The report of `Rules.check`; true if all compared elements are the same.

    Arguments:
        arrays: how many were compared.
        elements: how many of their elements were compared.
        differences: the differences by the name of the array on the right side, with the probable
            reason.
    """

    arrays: int
    elements: int
    differences: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        what = f"{counted(self.elements, 'element')} of {counted(self.arrays, 'array')}"
        if not self.differences:
            return f"{what} are as the rules make them"
        lines = [f"{counted(len(self.differences), 'array')} not as the rules make them ({what}):"]
        lines += _first(20, [f"  {name!r}: {why}" for name, why in self.differences.items()])
        return "\n".join(lines)


@dataclass(frozen=True)
class DraftReport:
    """The report of `Rules.draft`.

    Arguments:
        certain: rules that follow from values, or from names and sizes if nothing else fits.
        guesses: possible rules, each with its alternatives; a guess is no rule until it is written
            down as one.
        left_over, right_over: names of each side without a rule.
        text: all of it as a file, the guesses as comments that begin with `#?`.
    """

    certain: tuple[str, ...] = ()
    guesses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_over: tuple[str, ...] = ()
    right_over: tuple[str, ...] = ()
    text: str = ""

    def __str__(self) -> str:
        return (
            f"{counted(len(self.certain), 'rule')} certain, "
            f"{counted(len(self.guesses), 'guess', 'guesses')}, left over: "
            f"{counted(len(self.left_over), 'array')} on the left, "
            f"{counted(len(self.right_over), 'array')} on the right"
        )
