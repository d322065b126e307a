"""Plan: the arrays that rules make from a checkpoint, as facts; `planner` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from unickpt.arrays import dtypes
from unickpt.format.index import ArrayEntry
from unickpt.reading.recipes import Fill, MappedSource
from unickpt.rules.functions import Function


class LeafKind(Enum):
    """The kind of a leaf; the value is its text in messages."""

    ARRAY = "an array"
    VALUE = "a plain value"
    PROCESS = "a PerProcess"


@dataclass(frozen=True)
class Fact:
    """The facts of a leaf.

    Arguments:
        shape: of an array; a plain number counts as an array without dimensions.
        dtype: name of the dtype, if there is one; for a plain number, its Python type.
        kind: the kind of leaf.
        dispensable: whether a side may lack it, as a flag of an optimizer that only some versions
            of torch have.
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
        fact: its facts.
        rule: the rule that makes it, as text.
        sources: the sources of its elements.
        fills: its elements that are constants.
        carried: the stored name of a leaf that is carried over whole (a plain value, a PerProcess).
        function: makes it from `inputs`.
        exact: whether the other direction restores every bit.
        cropped: whether the stored arrays have padding that is left out.
        sizes: of the axes, if there is padding on either side; those of a pad under "_".
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

    `made` is the second one made from the first, if its axes or its arithmetic differ.
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
    """The plan for making arrays from a checkpoint by rules.

    Arguments:
        made: by name.
        aliases: further names of arrays that are made.
        kept_names: requested names that the rules leave unchanged (`drop` on the left).
        dropped: stored leaves that are not carried over, with the rule that drops them.
        checks: conditions that must hold so that no stored data is lost.
        nameless: constants that are not made, because only a request could determine their names;
            with their rules.
        unused: the names of stored leaves that are neither used nor dropped.
        misfits: requested arrays that are not made, because the stored shape is another one: stored
            names by requested names.
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
    """The stored checkpoint: the facts, and the arrays' entries by each of their names.

    `sizes` are those of axes that padding hides, as recorded when such an array was made.
    """

    facts: LeafFacts
    entries: Mapping[str, ArrayEntry]
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
