"""Plan: what rules make of a checkpoint, as facts; `planner` works it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from unickpt.arrays import dtypes
from unickpt.format.index import ArrayEntry
from unickpt.reading.recipes import Fill, MappedSource
from unickpt.rules.functions import Function


class LeafKind(Enum):
    """What a leaf is; the value is how messages say it."""

    ARRAY = "an array"
    VALUE = "a plain value"
    PROCESS = "a PerProcess"


@dataclass(frozen=True)
class Fact:
    """What is known of a leaf.

    Arguments:
        shape: of an array; a plain number counts as an array without dimensions.
        dtype: name of the dtype, where there is one; of a plain number, what it is to Python.
        kind: what it is.
        dispensable: whether a side does without it that lacks it, as a flag of an optimizer that
            only some versions of torch have.
    """

    shape: tuple[int, ...] = ()
    dtype: str = ""
    kind: LeafKind = LeafKind.ARRAY
    dispensable: bool = False

    @property
    def is_array(self) -> bool:
        """Whether it is an array."""
        return self.kind is LeafKind.ARRAY

    def __str__(self) -> str:
        return dtypes.with_shape(self.dtype, self.shape) if self.is_array else self.kind.value


LeafFacts = Mapping[str, Fact]
"""Facts of leaves, by name."""


@dataclass(frozen=True)
class Made:
    """An array, or a value, that rules make.

    Arguments:
        name: its name.
        fact: what it is.
        rule: what makes it, as text.
        sources: where its elements come from.
        fills: its elements that are constants.
        carried: of what is carried over whole (a plain value, a PerProcess), its name.
        function: makes it out of `inputs`.
        exact: whether the other direction brings every bit back.
        cropped: whether the stored arrays have padding that is left out.
        sizes: of the axes, where there is padding on either side; those of a pad under "_".
    """

    name: str
    fact: Fact
    rule: str
    sources: tuple[MappedSource, ...] = ()
    fills: tuple[Fill, ...] = ()
    carried: str | None = None
    function: Function | None = None
    inputs: tuple[Made, ...] = ()
    exact: bool = True
    cropped: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Same:
    """Two stored arrays that must be equal, because only the first of them is read.

    `made` is the other one made of the first, where its axes or its arithmetic are not the same.
    """

    first: str
    other: str
    rule: str
    made: Made | None = None


@dataclass(frozen=True)
class Constant:
    """A stored array that must hold one value everywhere: the other side has no array for it."""

    name: str
    value: float
    rule: str


@dataclass
class RulePlan:
    """What rules make of a checkpoint.

    Arguments:
        made: by name.
        aliases: further names of arrays that are made.
        kept_names: requested names that the rules leave as they are (`drop` on the left).
        dropped: what is stored and not carried over, with the rule that says so.
        checks: what must hold so that no stored data is lost.
        nameless: constants that are not made, because only what is asked for would tell their
            names; with their rules.
        unused: the names of what is stored and neither used nor dropped.
        misfits: what is asked for and not made, because its rule finds another shape stored: by
            name the name of what is stored.
    """

    made: dict[str, Made] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    kept_names: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    checks: list[Same | Constant] = field(default_factory=list)
    nameless: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredLeaves:
    """What is stored: the facts, and the arrays' entries by each of their names.

    `sizes` are those of axes that padding hides, as recorded when such an array was made.
    """

    facts: LeafFacts
    entries: Mapping[str, ArrayEntry]
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
